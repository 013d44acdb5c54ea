//! The workgroup-memory tile for real GPUs: 64 × 64 outputs a workgroup, 16 steps of the sum at a time.
//!
//! Both operands are kept as `[step][row / 4]` vectors, so a step's products read whole vectors. The
//! tile is filled in 4 × 4 blocks, transposed in registers where memory has the sum innermost; whole
//! vectors are written, never components (a component store may be a read and a write of all four).

use std::fmt::Write as _;

use super::plan::Plan;
use super::{Kernel, Variant, build};

/// Rows and columns of the workgroup's tile, and steps of the sum held at once.
const SIDE: u32 = 64;
const STEPS: u32 = 16;

/// Text that fills the tile of one operand. "Rows" are rows of A or columns of B.
fn fill(name: char, rows: &str, first: &str, k_inner: bool, vec: bool, threads: u32) -> String {
    let lower = name.to_ascii_lowercase();
    let blocks = SIDE / 4 * STEPS / 4;
    let guard = if threads > blocks { format!("if (local < {blocks}u) ") } else { String::new() };
    let mut text = format!("    {guard}{{\n");
    // Neighbouring invocations read neighbouring memory: along k, or along the rows.
    if k_inner {
        let _ = writeln!(text, "      let kb = (local % {0}u) * 4u; let rb = local / {0}u;", STEPS / 4);
    } else {
        let _ = writeln!(text, "      let kb = (local / {0}u) * 4u; let rb = local % {0}u;", SIDE / 4);
    }
    for e in 0..4 {
        let value = match (k_inner, vec) {
            (true, _) => {
                let at = |c: u32| format!("in_k(k + kb + {c}u, k_end)");
                let row = format!("min({first} + rb * 4u + {e}u, p.{rows} - 1u)");
                let _ = writeln!(text, "      let o{e} = base_{lower} + {row} * p.k + k + kb;");
                if vec {
                    format!("select(vec4<f32>(), {name}[min(o{e}, end_{lower} - 4u) / 4u], {})", at(0))
                } else {
                    let one = |c: u32| {
                        format!("select(0.0, {name}[min(o{e} + {c}u, end_{lower} - 1u)], {})", at(c))
                    };
                    format!("vec4<f32>({}, {}, {}, {})", one(0), one(1), one(2), one(3))
                }
            }
            (false, _) => {
                let step = format!("min(k + kb + {e}u, p.k - 1u)");
                let ok = format!("in_k(k + kb + {e}u, k_end)");
                let _ = writeln!(text, "      let o{e} = base_{lower} + {step} * p.{rows};");
                if vec {
                    let row = format!("min({first} + rb * 4u, p.{rows} - 4u)");
                    format!("select(vec4<f32>(), {name}[(o{e} + {row}) / 4u], {ok})")
                } else {
                    let one = |c: u32| format!("{name}[o{e} + min({first} + rb * 4u + {c}u, p.{rows} - 1u)]");
                    let all = format!("vec4<f32>({}, {}, {}, {})", one(0), one(1), one(2), one(3));
                    format!("select(vec4<f32>(), {all}, {ok})")
                }
            }
        };
        let _ = writeln!(text, "      let v{e} = {value};");
    }
    for (e, c) in ['x', 'y', 'z', 'w'].into_iter().enumerate() {
        let value =
            if k_inner { format!("vec4<f32>(v0.{c}, v1.{c}, v2.{c}, v3.{c})") } else { format!("v{e}") };
        let _ = writeln!(text, "      tile_{lower}[(kb + {e}u) * {}u + rb] = {value};", SIDE / 4);
    }
    text + "    }\n"
}

/// The 64 × 64 kernel.
pub(super) fn shared(plan: &Plan) -> Kernel {
    let Variant::Shared { tile, .. } = plan.variant else { unreachable!("shared() is for shared tiles") };
    let s = &plan.spec;
    let side = SIDE / tile;
    let threads = side * side;
    let vecs = tile / 4;
    let (a_inner, b_inner) = (!s.trans_a, s.trans_b);
    let vec_a = if a_inner { s.k } else { s.m }.is_multiple_of(4);
    let vec_b = if b_inner { s.k } else { s.n }.is_multiple_of(4);
    let vec_c = plan.vec_out();

    let mut body = plan.epilogue_functions(vec_c);
    let _ = write!(
        body,
        "fn in_k(k: u32, end: u32) -> bool {{ return k < end; }}
var<workgroup> tile_a: array<vec4<f32>, {cells}>;
var<workgroup> tile_b: array<vec4<f32>, {cells}>;
@compute @workgroup_size({threads})
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {{
  let group = wid.x + wid.y * groups.x;
  if (group >= p.tiles) {{ return; }}
  let first_n = group % p.nt * {SIDE}u;
  let first_m = group / p.nt % p.mt * {SIDE}u;
  let z = group / (p.nt * p.mt);
  let b = z / p.split;
  let part = z % p.split;
  let across = local % {side}u * {vecs}u;
  let down = local / {side}u * {vecs}u;
",
        cells = SIDE / 4 * STEPS
    );
    for i in 0..tile {
        for j in 0..vecs {
            let _ = writeln!(body, "  var c{i}_{j} = vec4<f32>();");
        }
    }
    if s.reduce_batch {
        body += "  let last = min((part + 1u) * p.chunk, p.sum_batch);
  for (var product = part * p.chunk; product < last; product++) {
    let k_start = 0u;
    let k_end = p.k;
";
    } else {
        body += "  {
    let product = b;
    let k_start = part * p.chunk;
    let k_end = min(k_start + p.chunk, p.k);
";
    }
    body += "    let base_a = product * p.stride_a;
    let base_b = product * p.stride_b;
    let end_a = base_a + p.m * p.k;
    let end_b = base_b + p.n * p.k;
";
    let _ = writeln!(body, "  for (var k = k_start; k < k_end; k += {STEPS}u) {{");
    body += &fill('A', "m", "first_m", a_inner, vec_a, threads);
    body += &fill('B', "n", "first_n", b_inner, vec_b, threads);
    let _ = writeln!(body, "    workgroupBarrier();\n    for (var step = 0u; step < {STEPS}u; step++) {{");
    for (name, first) in [('a', "down"), ('b', "across")] {
        for v in 0..vecs {
            let _ =
                writeln!(body, "      let {name}{v} = tile_{name}[step * {}u + {first} + {v}u];", SIDE / 4);
        }
    }
    for i in 0..tile {
        let a = format!("a{}.{}", i / 4, ['x', 'y', 'z', 'w'][i as usize % 4]);
        for j in 0..vecs {
            let _ = writeln!(body, "      c{i}_{j} = fma(vec4<f32>({a}), b{j}, c{i}_{j});");
        }
    }
    body += "    }\n    workgroupBarrier();\n  }\n  }\n";
    body += "  let row = first_m + down * 4u;\n  let col = first_n + across * 4u;\n";
    for i in 0..tile {
        let row = format!("(row + {i}u)");
        let _ = writeln!(body, "  if ({row} < p.m) {{");
        for j in 0..tile {
            if vec_c && j % 4 != 0 {
                continue;
            }
            let col = format!("(col + {j}u)");
            let component = if vec_c { "" } else { [".x", ".y", ".z", ".w"][j as usize % 4] };
            let acc = format!("c{i}_{}{component}", j / 4);
            let store = plan.store(vec_c, ["b", &row, &col], &acc);
            let _ = writeln!(body, "    if ({col} < p.n) {{ {store} }}");
        }
        body += "  }\n";
    }
    body += "}\n";
    let groups = plan.tiles(SIDE, SIDE).2;
    build(plan.variant.label(), plan, &plan.product_buffers(vec_a, vec_b, vec_c), groups, &body)
}
