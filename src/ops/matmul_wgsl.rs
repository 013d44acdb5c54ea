//! WGSL for matrix products: `C[b] = epilogue(op(A[b]) · op(B[b]))`, f32, row-major.
//!
//! [`kernels`] writes the launches of one product for one [`Variant`]. All sizes travel in a uniform
//! block; the text depends only on what changes the code (tile, layouts, whether a dimension is a
//! multiple of 4 or of the tile), so shapes of one class share one pipeline.
//!
//! How a ragged edge is handled: loads clamp their row or column to the last one (a repeated value
//! that is never stored), stores are guarded. So the inner loop has no bounds checks at all.
//!
//! A product with a long sum and a small result (a weight gradient) is split: chunks of K, or of the
//! batch when that is summed over, write partial results to a scratch buffer, and a second kernel adds
//! them in a fixed order. No atomics: the same inputs give the same bits.

mod epilogue;
mod plan;
mod register;
mod shared;

use std::borrow::Cow;
use std::fmt::Write as _;

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use plan::Plan;

/// A matrix product, its layouts and its batch rule.
///
/// `a` is `[batch, m, k]` (`[batch, k, m]` when `trans_a`), `b` is `[batch, k, n]` (`[batch, n, k]`
/// when `trans_b`), without the batch dimension where the operand is not batched. The result is
/// `[batch, m, n]`, or `[m, n]` when `reduce_batch`. All sizes are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatmulSpec {
    /// Number of products.
    pub batch: u32,
    /// Rows of the result.
    pub m: u32,
    /// Columns of the result.
    pub n: u32,
    /// Length of each inner product.
    pub k: u32,
    /// `A[b]` is stored `[k, m]` instead of `[m, k]`.
    pub trans_a: bool,
    /// `B[b]` is stored `[n, k]` instead of `[k, n]`.
    pub trans_b: bool,
    /// Each product has its own A (false: one A for all).
    pub a_batched: bool,
    /// Each product has its own B (false: one B for all).
    pub b_batched: bool,
    /// `C = Σ_b op(A[b]) · op(B[b])`, one `[m, n]` result: the gradient of a shared operand.
    pub reduce_batch: bool,
    /// Index into [`Epilogue::extras`] of a tensor added to the product before the epilogue. Without
    /// an epilogue it must be `Some(0)`, and that tensor (of C's shape) is the only extra input.
    ///
    /// The tensor must not be the buffer of C: WebGPU forbids reading and writing one buffer through
    /// two bindings.
    pub accumulate: Option<usize>,
}

impl MatmulSpec {
    /// One plain product `[m, k] · [k, n]`.
    pub fn plain(m: u32, n: u32, k: u32) -> Self {
        Self {
            batch: 1,
            m,
            n,
            k,
            trans_a: false,
            trans_b: false,
            a_batched: false,
            b_batched: false,
            reduce_batch: false,
            accumulate: None,
        }
    }

    /// Floating point operations: `2 · batch · m · n · k`.
    pub fn flops(&self) -> f64 {
        2.0 * self.batch as f64 * self.m as f64 * self.n as f64 * self.k as f64
    }

    /// Products in the result: `batch`, or 1 when the batch is summed over.
    pub fn out_batch(&self) -> u32 {
        if self.reduce_batch { 1 } else { self.batch }
    }

    /// Elements of A, B and C.
    pub fn lens(&self) -> [usize; 3] {
        let count = |batched: bool| if batched { self.batch as usize } else { 1 };
        let (m, n, k) = (self.m as usize, self.n as usize, self.k as usize);
        [count(self.a_batched) * m * k, count(self.b_batched) * k * n, self.out_batch() as usize * m * n]
    }
}

/// What is done to each element of the product before it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// A WGSL expression of type f32 in terms of `acc` (f32) and `x0`, `x1`, … (f32, one per extra),
    /// e.g. `max(acc + x0, 0.0)`.
    pub wgsl: String,
    /// Extra inputs, bound as `In(2)`, `In(3)`, …; at most [`MAX_EXTRAS`].
    pub extras: Vec<Extra>,
}

/// How an extra input of an [`Epilogue`] is indexed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extra {
    /// The shape of C.
    Full,
    /// Length `n`, the same for every row (a bias).
    Row,
    /// `[batch, m]`, one value a row.
    Col,
    /// One value.
    Scalar,
    /// Element `b * batch + i * row + j * col`.
    Strided {
        /// Step from one product to the next.
        batch: u32,
        /// Step from one row to the next.
        row: u32,
        /// Step from one column to the next.
        col: u32,
    },
}

/// Extra inputs an epilogue may have: 8 storage buffers less A, B and C.
pub const MAX_EXTRAS: usize = 5;

/// A way to compute a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Variant {
    /// One output an invocation; the baseline of the benchmarks.
    Naive,
    /// A `tm × tn` tile of outputs an invocation, held in registers; no workgroup memory.
    Register {
        /// Rows of the tile: 1 to 16.
        tm: u32,
        /// Columns of the tile: 1, or a multiple of 4 up to 16.
        tn: u32,
        /// Invocations a workgroup.
        threads: u32,
        /// Chunks of the sum, 1 for none (lowered where the sum is too short).
        split: u32,
    },
    /// A 64 × 64 tile a workgroup through workgroup memory, `tile × tile` outputs an invocation.
    Shared {
        /// 4 (256 invocations) or 8 (64 invocations).
        tile: u32,
        /// Chunks of the sum, 1 for none (lowered where the sum is too short).
        split: u32,
    },
}

impl Variant {
    /// A register tile of the given shape, 32 invocations a workgroup, no split.
    pub const fn register(tm: u32, tn: u32) -> Self {
        Variant::Register { tm, tn, threads: 32, split: 1 }
    }

    /// The same variant with another number of chunks.
    pub fn with_split(self, parts: u32) -> Self {
        let split = parts.max(1);
        match self {
            Variant::Naive => Variant::Naive,
            Variant::Register { tm, tn, threads, .. } => Variant::Register { tm, tn, threads, split },
            Variant::Shared { tile, .. } => Variant::Shared { tile, split },
        }
    }

    /// Whether the tile is one that [`kernels`] can write.
    pub fn is_valid(&self) -> bool {
        match *self {
            Variant::Naive => true,
            Variant::Register { tm, tn, threads, split } => {
                (1..=16).contains(&tm)
                    && (tn == 1 || (4..=16).contains(&tn) && tn.is_multiple_of(4))
                    && (1..=256).contains(&threads)
                    && split >= 1
            }
            Variant::Shared { tile, split } => (tile == 4 || tile == 8) && split >= 1,
        }
    }

    /// The name of its main kernel, e.g. `matmul_reg8x8`.
    pub fn label(&self) -> String {
        match self {
            Variant::Naive => "matmul_naive".into(),
            Variant::Register { tm, tn, .. } => format!("matmul_reg{tm}x{tn}"),
            Variant::Shared { tile, .. } => format!("matmul_shared64_{tile}x{tile}"),
        }
    }
}

/// The uniform block of every kernel here; [`PARAMS_WGSL`] is its WGSL. All u32, with `strides` at a
/// multiple of 16 bytes, so `repr(C)` is WGSL's uniform layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    m: u32,
    n: u32,
    k: u32,
    /// Products in the result.
    batch: u32,
    /// Tiles down, tiles across, and tiles in all (with batch and split).
    mt: u32,
    nt: u32,
    tiles: u32,
    /// Chunks of the sum, and the length of one (in k, or in products when the batch is summed).
    split: u32,
    chunk: u32,
    /// Elements from one A, B to the next; 0 when shared.
    stride_a: u32,
    stride_b: u32,
    /// Products summed over (1 unless `reduce_batch`).
    sum_batch: u32,
    /// Batch, row and column strides of the extras.
    strides: [[u32; 4]; MAX_EXTRAS],
}

const PARAMS_WGSL: &str = "struct Params {
    m: u32, n: u32, k: u32, batch: u32,
    mt: u32, nt: u32, tiles: u32, split: u32,
    chunk: u32, stride_a: u32, stride_b: u32, sum_batch: u32,
    strides: array<vec4<u32>, 5>,
}
";

/// The launches of a product: one kernel, or two when the sum is split.
///
/// Bindings: `In(0)` = A, `In(1)` = B, `In(2..)` = the extras, `Out(0)` = C, and `Scratch(0)` of
/// [`scratch_len`] elements when there are two kernels.
///
/// # Panics
///
/// When a size is 0, the variant's tile is none of the documented ones, there are more than
/// [`MAX_EXTRAS`] extras, or `accumulate` names no extra: errors of the caller, not of its data.
pub fn kernels(spec: &MatmulSpec, epilogue: Option<&Epilogue>, variant: Variant) -> Vec<Kernel> {
    let plan = Plan::new(spec, epilogue, variant);
    let main = match plan.variant {
        Variant::Naive => register::naive(&plan),
        Variant::Register { .. } => register::register(&plan),
        Variant::Shared { .. } => shared::shared(&plan),
    };
    if plan.split == 1 {
        return vec![main];
    }
    vec![main, register::add_parts(&plan)]
}

/// Elements (f32) of `Scratch(0)` that [`kernels`] needs for this choice; 0 when it needs none.
pub fn scratch_len(spec: &MatmulSpec, epilogue: Option<&Epilogue>, variant: Variant) -> u64 {
    let plan = Plan::new(spec, epilogue, variant);
    if plan.split == 1 { 0 } else { plan.split as u64 * plan.out_len() }
}

/// One storage binding: what it is, its WGSL name, vec4 or f32 elements, writable or not.
struct Buffer {
    bind: Bind,
    name: String,
    vec: bool,
    write: bool,
}

/// Assembles a kernel: declarations of the bindings and the uniform block, then `body`.
fn build(label: String, plan: &Plan, buffers: &[Buffer], groups: u64, body: &str) -> Kernel {
    let mut source = String::from(PARAMS_WGSL);
    let mut bindings = Vec::new();
    for (i, buffer) in buffers.iter().enumerate() {
        let Buffer { bind, name, vec, .. } = buffer;
        let access = if buffer.write { "read_write" } else { "read" };
        let ty = if *vec { "vec4<f32>" } else { "f32" };
        let _ = writeln!(source, "@group(0) @binding({i}) var<storage, {access}> {name}: array<{ty}>;");
        bindings.push(*bind);
    }
    let _ = writeln!(source, "@group(0) @binding({}) var<uniform> p: Params;", bindings.len());
    source.push_str(body);
    Kernel {
        label: Cow::Owned(label),
        source: Cow::Owned(source),
        entry: "main",
        constants: Vec::new(),
        bindings,
        params: bytemuck::bytes_of(&plan.params()).to_vec(),
        groups: fold_groups(groups),
    }
}
