//! Kernels without workgroup memory: the register tile, the naive product, and the kernel that adds
//! the partial sums of a split product.
//!
//! The register tile is what a software Vulkan driver wants. Such a driver runs one invocation a SIMD
//! lane and performs a load lane by lane, so a load costs some forty multiply-adds: the larger the
//! tile, the fewer loads an output. Loads of four neighbours at once share most of their cost.

use std::fmt::Write as _;

use super::plan::Plan;
use super::{Buffer, Kernel, Variant, build};
use crate::gpu::kernel::Bind;

const XYZW: [char; 4] = ['x', 'y', 'z', 'w'];

/// How one operand is read into registers. "Rows" are rows of A or columns of B: the dimension that
/// is not summed over.
struct Operand {
    /// Buffer, and prefix of the names of its registers: `A`/`a` or `B`/`b`.
    upper: char,
    lower: char,
    /// Rows of the tile, and the uniform holding how many there are.
    tile: u32,
    rows: &'static str,
    /// The summed dimension is the inner one in memory.
    k_inner: bool,
    /// Declared as `vec4<f32>`.
    vec: bool,
    /// The number of rows is a multiple of the tile.
    exact: bool,
}

impl Operand {
    fn a(plan: &Plan) -> Self {
        let s = &plan.spec;
        Self::new('A', 'a', plan.tm, "m", s.m, !s.trans_a, s.k)
    }

    fn b(plan: &Plan) -> Self {
        let s = &plan.spec;
        Self::new('B', 'b', plan.tn, "n", s.n, s.trans_b, s.k)
    }

    fn new(
        upper: char,
        lower: char,
        tile: u32,
        rows: &'static str,
        count: u32,
        k_inner: bool,
        k: u32,
    ) -> Self {
        let vec =
            if k_inner { k.is_multiple_of(4) } else { count.is_multiple_of(4) && tile.is_multiple_of(4) };
        Self { upper, lower, tile, rows, k_inner, vec, exact: count.is_multiple_of(tile) }
    }

    /// Registers one step along the rows needs, and how far apart they are.
    fn row_step(&self) -> usize {
        if self.vec && !self.k_inner { 4 } else { 1 }
    }

    /// Declares the offset of each row (or of each four) within one product, in units of the array.
    fn offsets(&self, first: &str) -> String {
        let Self { lower, rows, .. } = self;
        let mut text = String::new();
        for i in (0..self.tile).step_by(self.row_step()) {
            let row = if self.exact {
                format!("({first} + {i}u)")
            } else {
                format!("min({first} + {i}u, p.{rows} - {}u)", self.row_step())
            };
            let offset = match (self.k_inner, self.vec) {
                (true, false) => format!("{row} * p.k"),
                (true, true) => format!("{row} * (p.k / 4u)"),
                (false, false) => row,
                (false, true) => format!("{row} / 4u"),
            };
            let _ = writeln!(text, "  let o{lower}{i} = {offset};");
        }
        text
    }

    /// Loads `steps` (1 or 4) steps of the sum, from WGSL variable `k` on.
    fn load(&self, steps: u32) -> String {
        let Self { upper, lower, rows, .. } = self;
        let mut text = String::new();
        if self.k_inner && self.vec {
            let _ = writeln!(text, "      let k{lower} = base_{lower} + k / 4u;");
            for i in 0..self.tile {
                let _ = writeln!(text, "      let {lower}{i} = {upper}[k{lower} + o{lower}{i}];");
            }
            return text;
        }
        for kk in 0..steps {
            let step = if self.k_inner {
                format!("k + {kk}u")
            } else if self.vec {
                format!("(k + {kk}u) * (p.{rows} / 4u)")
            } else {
                format!("(k + {kk}u) * p.{rows}")
            };
            let _ = writeln!(text, "      let k{lower}{kk} = base_{lower} + {step};");
            for i in (0..self.tile).step_by(self.row_step()) {
                let _ = writeln!(text, "      let {lower}{kk}_{i} = {upper}[k{lower}{kk} + o{lower}{i}];");
            }
        }
        text
    }

    /// The value of row `i` at step `kk` after [`load`](Self::load).
    fn at(&self, i: u32, kk: u32) -> String {
        let lower = self.lower;
        match (self.k_inner, self.vec) {
            (true, true) => format!("{lower}{i}.{}", XYZW[kk as usize]),
            (false, true) => format!("{lower}{kk}_{}.{}", i / 4 * 4, XYZW[i as usize % 4]),
            _ => format!("{lower}{kk}_{i}"),
        }
    }

    /// Rows `i..i + 4` at step `kk` as a vec4.
    fn at4(&self, i: u32, kk: u32) -> String {
        if self.vec && !self.k_inner {
            return format!("{}{kk}_{i}", self.lower);
        }
        let at = |e| self.at(i + e, kk);
        format!("vec4<f32>({}, {}, {}, {})", at(0), at(1), at(2), at(3))
    }
}

/// Multiply-adds of `steps` steps into the accumulators.
fn multiply(plan: &Plan, a: &Operand, b: &Operand, steps: u32) -> String {
    let mut text = String::new();
    for kk in 0..steps {
        if plan.tn == 1 {
            for i in 0..plan.tm {
                let _ = writeln!(text, "      c{i}_0 = fma({}, {}, c{i}_0);", a.at(i, kk), b.at(0, kk));
            }
            continue;
        }
        for j in (0..plan.tn).step_by(4) {
            let _ = writeln!(text, "      let w{kk}_{j} = {};", b.at4(j, kk));
        }
        for i in 0..plan.tm {
            let _ = writeln!(text, "      let v{kk}_{i} = vec4<f32>({});", a.at(i, kk));
            for j in (0..plan.tn).step_by(4) {
                let _ = writeln!(text, "      c{i}_{j} = fma(v{kk}_{i}, w{kk}_{j}, c{i}_{j});");
            }
        }
    }
    text
}

/// Text that finds this invocation's tile: `b` (product), `part` (chunk), `row`, `col`.
fn locate(plan: &Plan, threads: u32) -> (String, u64) {
    let (mt, nt, tiles) = plan.tiles(plan.tm, plan.tn);
    let (tm, tn) = (plan.tm, plan.tn);
    let tail = format!(
        "  let b = z / p.split;\n  let part = z % p.split;\n  \
         let row = tile_m * {tm}u;\n  let col = tile_n * {tn}u;\n"
    );
    // Blocks of 8 tiles across share cache lines of B; but not where the ragged ones would idle.
    let down = threads / 8;
    let blocked = threads.is_multiple_of(8) && nt >= 8 && mt >= down && {
        let padded = nt.next_multiple_of(8) as u64 * mt.next_multiple_of(down) as u64;
        padded * 10 <= (mt as u64 * nt as u64) * 11
    };
    if blocked {
        let groups = tiles / (mt as u64 * nt as u64) * nt.div_ceil(8) as u64 * mt.div_ceil(down) as u64;
        let text = format!(
            "  let group = wid.x + wid.y * groups.x;
  let across = (p.nt + 7u) / 8u;
  let down = (p.mt + {d}u) / {down}u;
  let tile_n = (group % across) * 8u + local % 8u;
  let tile_m = (group / across % down) * {down}u + local / 8u;
  let z = group / (across * down);
  if (tile_n >= p.nt || tile_m >= p.mt || z >= p.batch * p.split) {{ return; }}
{tail}",
            d = down - 1
        );
        (text, groups)
    } else {
        let text = format!(
            "  let t = (wid.x + wid.y * groups.x) * {threads}u + local;
  if (t >= p.tiles) {{ return; }}
  let tile_n = t % p.nt;
  let tile_m = t / p.nt % p.mt;
  let z = t / (p.nt * p.mt);
{tail}"
        );
        (text, tiles.div_ceil(threads as u64))
    }
}

/// The loops over the sum around `main` (4 steps) and `tail` (1 step). Declares `base_a`, `base_b`:
/// where the operands of the product at hand begin, in units of their arrays.
fn sum_loops(plan: &Plan, vec_a: bool, vec_b: bool, main: &str, tail: &str) -> String {
    let unit = |vec: bool| if vec { " / 4u" } else { "" };
    let bases = format!(
        "    let base_a = product * p.stride_a{};\n    let base_b = product * p.stride_b{};\n",
        unit(vec_a),
        unit(vec_b)
    );
    let (head, foot) = if plan.spec.reduce_batch {
        let head = "  let last = min((part + 1u) * p.chunk, p.sum_batch);
  for (var product = part * p.chunk; product < last; product++) {
    var k = 0u;
    let k_end = p.k;
";
        (head, "  }\n")
    } else {
        (
            "  {\n    let product = b;\n    var k = part * p.chunk;\n    let k_end = min(k + p.chunk, p.k);\n",
            "  }\n",
        )
    };
    let mut text = format!("{head}{bases}");
    if plan.spec.k >= 4 && !main.is_empty() {
        let _ = writeln!(text, "    for (; k + 3u < k_end; k += 4u) {{\n{main}    }}");
    }
    if !plan.spec.k.is_multiple_of(4) || main.is_empty() {
        let _ = writeln!(text, "    for (; k < k_end; k++) {{\n{tail}    }}");
    }
    text + foot
}

const MAIN: &str = "(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
";

/// The register tile.
pub(super) fn register(plan: &Plan) -> Kernel {
    let Variant::Register { threads, .. } = plan.variant else { unreachable!("register() is for registers") };
    let (a, b) = (Operand::a(plan), Operand::b(plan));
    let vec_c = plan.vec_out();
    let (locate, groups) = locate(plan, threads);
    let width = if plan.tn == 1 { 1 } else { 4 };

    let mut body = plan.epilogue_functions(vec_c);
    let _ = write!(body, "@compute @workgroup_size({threads})\nfn main{MAIN}{locate}");
    body += &a.offsets("row");
    body += &b.offsets("col");
    let ty = if width == 1 { "f32" } else { "vec4<f32>" };
    for i in 0..plan.tm {
        for j in (0..plan.tn).step_by(width) {
            let _ = writeln!(body, "  var c{i}_{j} = {ty}();");
        }
    }
    let steps = |n| a.load(n) + &b.load(n) + &multiply(plan, &a, &b, n);
    body += &sum_loops(plan, a.vec, b.vec, &steps(4), &steps(1));
    for i in 0..plan.tm {
        let row = format!("(row + {i}u)");
        let (open, close) =
            if a.exact || i == 0 { ("", "") } else { (&*format!("if ({row} < p.m) {{ "), " }") };
        let _ = writeln!(body, "  {open}");
        for j in (0..plan.tn).step_by(if vec_c { 4 } else { 1 }) {
            let col = format!("(col + {j}u)");
            let acc = match (vec_c, width) {
                (true, _) => format!("c{i}_{j}"),
                (false, 1) => format!("c{i}_{j}"),
                (false, _) => format!("c{i}_{}.{}", j / 4 * 4, XYZW[j as usize % 4]),
            };
            let store = plan.store(vec_c, ["b", &row, &col], &acc);
            if b.exact || j == 0 {
                let _ = writeln!(body, "    {store}");
            } else {
                let _ = writeln!(body, "    if ({col} < p.n) {{ {store} }}");
            }
        }
        let _ = writeln!(body, "  {close}");
    }
    body += "}\n";
    build(plan.variant.label(), plan, &plan.product_buffers(a.vec, b.vec, vec_c), groups, &body)
}

/// One output an invocation, scalar loads.
pub(super) fn naive(plan: &Plan) -> Kernel {
    const THREADS: u32 = 64;
    let s = &plan.spec;
    let (locate, groups) = locate(plan, THREADS);
    let at_a = if s.trans_a { "k * p.m + row" } else { "row * p.k + k" };
    let at_b = if s.trans_b { "col * p.k + k" } else { "k * p.n + col" };
    let tail = format!("      sum += A[base_a + {at_a}] * B[base_b + {at_b}];\n");
    let mut body = plan.epilogue_functions(false);
    let _ = write!(body, "@compute @workgroup_size({THREADS})\nfn main{MAIN}{locate}  var sum = 0.0;\n");
    body += &sum_loops(plan, false, false, "", &tail);
    let _ = writeln!(body, "  {}\n}}", plan.store(false, ["b", "row", "col"], "sum"));
    build(plan.variant.label(), plan, &plan.product_buffers(false, false, false), groups, &body)
}

/// Adds the chunks' partial sums, first to last, and applies the epilogue.
pub(super) fn add_parts(plan: &Plan) -> Kernel {
    const THREADS: u32 = 32;
    let vec = plan.spec.n.is_multiple_of(4);
    let ty = if vec { "vec4<f32>" } else { "f32" };
    let unit = if vec { 4u64 } else { 1 };
    let count = plan.out_len() / unit;
    let mut body = plan.epilogue_functions(vec);
    let value = plan.finish(vec, ["b", "row", "col"], "sum");
    let _ = write!(
        body,
        "@compute @workgroup_size({THREADS})
fn main{MAIN}  let t = (wid.x + wid.y * groups.x) * {THREADS}u + local;
  let count = p.batch * p.m * p.n / {unit}u;
  if (t >= count) {{ return; }}
  var sum = {ty}();
  for (var part = 0u; part < p.split; part++) {{ sum += S[part * count + t]; }}
  let col = t * {unit}u % p.n;
  let row = t * {unit}u / p.n % p.m;
  let b = t * {unit}u / (p.n * p.m);
  C[t] = {value};
}}
"
    );
    let mut buffers = vec![Buffer { bind: Bind::Scratch(0), name: "S".into(), vec, write: false }];
    buffers.extend(plan.extra_buffers(vec));
    buffers.push(Buffer { bind: Bind::Out(0), name: "C".into(), vec, write: true });
    build("matmul_add_parts".into(), plan, &buffers, count.div_ceil(THREADS as u64), &body)
}
