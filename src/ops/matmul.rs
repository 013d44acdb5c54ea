//! Matrix products: `C[b] = epilogue(op(A[b]) · op(B[b]))`, batched or with a shared operand, plain or
//! transposed, optionally summed over the batch (the gradient of a shared operand).
//!
//! The epilogue is an elementwise expression over the product and further inputs (bias, activation,
//! accumulation): the fusion pass moves a following `map` here. CPU products go to the `gemm` crate in
//! blocks of rows, so that the epilogue finds its block in cache.

use super::access::Access;
use super::expr::{BLOCK, Expr};
use super::matmul_wgsl::{self, MatmulSpec};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::graph::{Graph, Shape, Tensor};
use crate::par::*;
use std::any::TypeId;

/// What happens to the product before it is stored: `expr` over input 0 = the product, inputs 1.. = the
/// operation's inputs 2.., read through `access`.
#[derive(Clone, Debug)]
pub struct Epilogue {
    /// The expression.
    pub expr: Expr,
    /// How each extra input is read, relative to C's linear index.
    pub access: Vec<Access>,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Matmul {
    /// Sizes and layout.
    pub spec: MatmulSpec,
    /// Shape of C.
    pub shape: Shape,
    /// Fused elementwise tail.
    pub epilogue: Option<Epilogue>,
}

/// A strided matrix in memory: element (r, c) is at `p + r·rs + c·cs`.
#[derive(Clone, Copy)]
struct View<T> {
    p: *const T,
    rs: usize,
    cs: usize,
}

// SAFETY: views are only read, while the call that made them holds the buffers.
unsafe impl<T> Sync for View<T> {}
// SAFETY: as above.
unsafe impl<T> Send for View<T> {}

impl<T: Copy> View<T> {
    /// The view `n` elements further in memory.
    ///
    /// # Safety
    /// That element must exist.
    unsafe fn skip(self, n: usize) -> Self {
        // SAFETY: by the caller.
        View { p: unsafe { self.p.add(n) }, ..self }
    }

    /// The view that starts `r` rows and `c` columns further in.
    ///
    /// # Safety
    /// That element must exist.
    unsafe fn at(self, r: usize, c: usize) -> Self {
        // SAFETY: by the caller.
        View { p: unsafe { self.p.add(r * self.rs + c * self.cs) }, ..self }
    }
}

/// C (rows of stride `ldc`) = a·b, or += when `add`.
///
/// # Safety
/// `a` is m × k, `b` is k × n, `c` has m rows of n elements at stride `ldc`, not overlapping a or b.
unsafe fn gemm<T: Real>(
    m: usize,
    n: usize,
    k: usize,
    a: View<T>,
    b: View<T>,
    c: *mut T,
    ldc: usize,
    add: bool,
) {
    // SAFETY: by the caller; the transmuted pointers have the element type that the TypeId names.
    unsafe {
        if TypeId::of::<T>() == TypeId::of::<f32>() {
            gemm::gemm(
                m,
                n,
                k,
                c as *mut f32,
                1,
                ldc as isize,
                add,
                a.p as *const f32,
                a.cs as isize,
                a.rs as isize,
                b.p as *const f32,
                b.cs as isize,
                b.rs as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        } else {
            gemm::gemm(
                m,
                n,
                k,
                c as *mut f64,
                1,
                ldc as isize,
                add,
                a.p as *const f64,
                a.cs as isize,
                a.rs as isize,
                b.p as *const f64,
                b.cs as isize,
                b.rs as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

struct Ptr<T>(*mut T);
// SAFETY: each thread writes its own rows.
unsafe impl<T> Sync for Ptr<T> {}
// SAFETY: as above.
unsafe impl<T> Send for Ptr<T> {}
impl<T> Ptr<T> {
    /// # Safety
    /// Element `i` must exist.
    unsafe fn at(&self, i: usize) -> *mut T {
        // SAFETY: by the caller.
        unsafe { self.0.add(i) }
    }
}

impl Matmul {
    /// Number of outputs in the batch.
    fn out_batch(&self) -> usize {
        if self.spec.reduce_batch { 1 } else { self.spec.batch as usize }
    }

    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let s = &self.spec;
        let (bt, m, n, k) = (s.batch as usize, s.m as usize, s.n as usize, s.k as usize);
        let (a, b) = (c.input(0), c.input(1));
        assert_eq!(a.len(), m * k * if s.a_batched { bt } else { 1 });
        assert_eq!(b.len(), k * n * if s.b_batched { bt } else { 1 });
        let av = if s.trans_a {
            View { p: a.as_ptr(), rs: 1, cs: m }
        } else {
            View { p: a.as_ptr(), rs: k, cs: 1 }
        };
        let bv = if s.trans_b {
            View { p: b.as_ptr(), rs: 1, cs: k }
        } else {
            View { p: b.as_ptr(), rs: n, cs: 1 }
        };
        // SAFETY: for both, element i of the batch exists, or the operand is shared and i counts for nothing.
        let a_of = |i: usize| unsafe { av.skip(if s.a_batched { i * m * k } else { 0 }) };
        // SAFETY: as above.
        let b_of = |i: usize| unsafe { bv.skip(if s.b_batched { i * n * k } else { 0 }) };
        let extras: Vec<View<T>> =
            (2..c.n_inputs()).map(|i| View { p: c.input_raw(i).0, rs: 0, cs: 1 }).collect();
        let out = c.output(0);
        let total = out.len();
        let out = Ptr(out.as_mut_ptr());
        let epilogue = |start: usize, len: usize| {
            if let Some(e) = &self.epilogue {
                // SAFETY: the block [start, start + len) belongs to this thread; the accesses were made for
                // C's shape, and an extra that shares C's buffer is only read at the block's own elements.
                unsafe { run_epilogue(e, &extras, out.at(start), start, len) }
            }
        };
        // C must be free of the accumulated input before the product overwrites it: `accumulate` in place
        // is only offered without an epilogue expression other than the sum, where C += A·B does it.
        let in_place_sum = self.accumulates() && std::ptr::eq(extras[0].p, out.0);
        let finish = |start: usize, len: usize| {
            if !in_place_sum {
                epilogue(start, len)
            }
        };

        if s.reduce_batch {
            // Σ_b: fixed runs of the batch into partial sums, added in order
            let runs = bt.min(16);
            let per = bt.div_ceil(runs);
            let parts: Vec<Vec<T>> = (0..bt.div_ceil(per))
                .into_par_iter()
                .map(|r| {
                    let mut p = vec![T::ZERO; m * n];
                    for i in r * per..((r + 1) * per).min(bt) {
                        // SAFETY: batch element i exists; p is m × n.
                        unsafe { gemm(m, n, k, a_of(i), b_of(i), p.as_mut_ptr(), n, i > r * per) };
                    }
                    p
                })
                .collect();
            // SAFETY: out has m·n elements and nobody else writes it.
            unsafe { add_parts(&parts, out.at(0), total, in_place_sum) };
            finish(0, total);
        } else if bt == 1 && m * n <= 64 * 1024 && k >= 4096 && k >= 8 * m.max(n) {
            // a weight gradient: few outputs, long sums; fixed runs of k
            let runs = k.div_ceil(k.div_ceil(16).max(1024));
            let per = k.div_ceil(runs);
            let parts: Vec<Vec<T>> = (0..runs)
                .into_par_iter()
                .map(|r| {
                    let (lo, hi) = (r * per, ((r + 1) * per).min(k));
                    let mut p = vec![T::ZERO; m * n];
                    // SAFETY: rows lo..hi of the k axis exist; p is m × n.
                    unsafe {
                        gemm(m, n, hi - lo, a_of(0).at(0, lo), b_of(0).at(lo, 0), p.as_mut_ptr(), n, false)
                    };
                    p
                })
                .collect();
            // SAFETY: as above.
            unsafe { add_parts(&parts, out.at(0), total, in_place_sum) };
            finish(0, total);
        } else {
            // blocks of rows of one product, or runs of whole small products
            let per_row = n * k;
            if m * per_row <= 1 << 17 && bt > 1 {
                let run = ((1usize << 18) / (m * per_row)).clamp(1, bt.div_ceil(4).max(1));
                (0..bt.div_ceil(run)).into_par_iter().for_each(|r| {
                    let (lo, hi) = (r * run, ((r + 1) * run).min(bt));
                    for i in lo..hi {
                        // SAFETY: batch element i exists in a, b and out, and belongs to this task.
                        unsafe { gemm(m, n, k, a_of(i), b_of(i), out.at(i * m * n), n, in_place_sum) };
                    }
                    finish(lo * m * n, (hi - lo) * m * n);
                });
            } else {
                let rows = ((1usize << 21) / per_row.max(1)).clamp(16, 512).min(m);
                let blocks = m.div_ceil(rows);
                (0..bt * blocks).into_par_iter().for_each(|t| {
                    let (i, r) = (t / blocks, t % blocks * rows);
                    let h = rows.min(m - r);
                    // SAFETY: rows r..r+h of product i exist and belong to this task.
                    unsafe {
                        gemm(h, n, k, a_of(i).at(r, 0), b_of(i), out.at((i * m + r) * n), n, in_place_sum)
                    };
                    finish((i * m + r) * n, h * n);
                });
            }
        }
    }

    /// The epilogue is exactly "product + extra 0, element for element".
    fn accumulates(&self) -> bool {
        self.epilogue.as_ref().is_some_and(|e| {
            e.access.len() == 1 && e.access[0].is_same() && e.expr == Expr::binary(super::expr::Bin::Add)
        })
    }
}

/// # Safety
/// `out` has `len` writable elements; every part has as many.
unsafe fn add_parts<T: Real>(parts: &[Vec<T>], out: *mut T, len: usize, keep: bool) {
    // SAFETY: by the caller.
    let out = unsafe { std::slice::from_raw_parts_mut(out, len) };
    if !keep {
        out.fill(T::ZERO);
    }
    for p in parts {
        for (o, v) in out.iter_mut().zip(p) {
            *o += *v;
        }
    }
}

/// # Safety
/// `block` has `len` writable elements, which are C's elements from `start`; extras are readable at them.
unsafe fn run_epilogue<T: Real>(e: &Epilogue, extras: &[View<T>], block: *mut T, start: usize, len: usize) {
    T::simd(
        #[inline(always)]
        || {
            let mut regs: Vec<[T; BLOCK]> = Vec::new();
            let root = e.expr.ins.len() - 1;
            let mut done = 0;
            while done < len {
                let n = BLOCK.min(len - done);
                // SAFETY: within the block.
                let c = unsafe { std::slice::from_raw_parts_mut(block.add(done), n) };
                e.expr.eval(n, &mut regs, |i, r| {
                    if i == 0 {
                        r.copy_from_slice(c);
                    } else {
                        // SAFETY: by the caller.
                        unsafe { e.access[i - 1].load(extras[i - 1].p, start + done, r) }
                    }
                });
                c.copy_from_slice(&regs[root][..n]);
                done += n;
            }
        },
    );
}

impl Op for Matmul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs.len(), 2 + self.epilogue.as_ref().map_or(0, |e| e.access.len()));
        assert_eq!(self.shape.len(), self.out_batch() * (self.spec.m * self.spec.n) as usize);
        vec![self.shape]
    }

    fn flops(&self, _: &[Shape], outputs: &[Shape]) -> f64 {
        let s = &self.spec;
        2.0 * s.batch as f64 * s.m as f64 * s.n as f64 * s.k as f64
            + self.epilogue.as_ref().map_or(0.0, |e| (e.expr.flops() * outputs[0].len()) as f64)
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        assert!(self.epilogue.is_none(), "epilogues are fused after autodiff");
        let s = &self.spec;
        let dc = v.grads[0].expect("called with a gradient");
        let (a, b) = (v.inputs[0], v.inputs[1]);
        assert!(!s.reduce_batch, "the gradient of a batch-summed product is not needed");
        // dA = dC · op(B)ᵀ (or its transpose), summed over the batch where A is shared
        let side = |g: &mut Graph,
                    x: Tensor,
                    tx: bool,
                    xb: bool,
                    y: Tensor,
                    ty: bool,
                    yb: bool,
                    m,
                    n,
                    k,
                    out: Tensor,
                    batched: bool| {
            let spec = MatmulSpec {
                batch: s.batch,
                m,
                n,
                k,
                trans_a: tx,
                trans_b: ty,
                a_batched: xb,
                b_batched: yb,
                reduce_batch: !batched && s.batch > 1,
                accumulate: None,
            };
            g.push(Matmul { spec: simplify(spec), shape: out.shape(), epilogue: None }, &[x, y])
        };
        let da = v.wanted[0].then(|| {
            if s.trans_a {
                // A stored [k, m]: dAᵀ = op(B) · dCᵀ
                side(g, b, s.trans_b, s.b_batched, dc, true, true, s.k, s.m, s.n, a, s.a_batched)
            } else {
                side(g, dc, false, true, b, !s.trans_b, s.b_batched, s.m, s.k, s.n, a, s.a_batched)
            }
        });
        let db = v.wanted[1].then(|| {
            if s.trans_b {
                // B stored [n, k]: dBᵀ = dCᵀ · op(A)
                side(g, dc, true, true, a, s.trans_a, s.a_batched, s.n, s.k, s.m, b, s.b_batched)
            } else {
                side(g, a, !s.trans_a, s.a_batched, dc, false, true, s.k, s.n, s.m, b, s.b_batched)
            }
        });
        vec![da, db]
    }

    fn may_alias(&self) -> Vec<(usize, usize)> {
        // an extra that is read element for element; the product itself must not overwrite it too early, so
        // only the plain accumulation runs in place
        if self.accumulates() { vec![(2, 0)] } else { vec![] }
    }

    fn with_accumulate(&self) -> Option<Box<dyn Op>> {
        if self.epilogue.is_some() {
            return None;
        }
        let e = Epilogue {
            expr: Expr::binary(super::expr::Bin::Add),
            access: vec![Access::same(self.shape.len())],
        };
        Some(Box::new(Matmul { epilogue: Some(e), ..self.clone() }))
    }

    cpu_both!();

    fn may_alias_gpu(&self) -> Vec<(usize, usize)> {
        vec![] // the shader binds an extra input and C separately
    }

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let variant = r.caps.matmul.choose(&self.spec);
        let epilogue = self.epilogue.as_ref().map(|e| matmul_wgsl::Epilogue {
            wgsl: e.expr.wgsl_inline(&|i| if i == 0 { "acc".into() } else { format!("x{}", i - 1) }),
            extras: e.access.iter().map(|a| self.extra(a)).collect(),
        });
        let scratch = matmul_wgsl::scratch_len(&self.spec, epilogue.as_ref(), variant) as usize;
        GpuLaunch {
            kernels: matmul_wgsl::kernels(&self.spec, epilogue.as_ref(), variant),
            scratch: if scratch == 0 { vec![] } else { vec![scratch] },
        }
    }
}

/// Writes a product the way that runs best: a batch whose operands lie one after the other is one product.
fn simplify(mut s: MatmulSpec) -> MatmulSpec {
    if s.batch > 1 && s.a_batched && !s.b_batched && !s.reduce_batch && !s.trans_a {
        // rows of all examples stacked
        s.m *= s.batch;
        s.batch = 1;
    } else if s.batch > 1 && s.reduce_batch && s.a_batched && s.b_batched && s.trans_a && !s.trans_b {
        // Σ_b A[b]ᵀ B[b] = AᵀB over the stacked rows
        s.k *= s.batch;
        s.batch = 1;
        s.reduce_batch = false;
    }
    if s.batch == 1 {
        s.a_batched = false;
        s.b_batched = false;
        s.reduce_batch = false;
    }
    s
}

/// Which operands are stored transposed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trans {
    /// A is stored `[.., k, m]`.
    pub a: bool,
    /// B is stored `[.., n, k]`.
    pub b: bool,
}

impl Graph {
    /// `x[.., k] · w[k, n] → [.., n]`
    pub fn matmul(&mut self, x: Tensor, w: Tensor) -> Tensor {
        self.matmul_t(x, w, Trans::default())
    }

    /// Products of matrices in the last two axes. An operand of rank 2 beside one of rank 3 is shared by the
    /// batch; a vector counts as one row.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn matmul_t(&mut self, a: Tensor, b: Tensor, t: Trans) -> Tensor {
        let split = |x: Tensor| {
            let d = x.shape().dims();
            match d.len() {
                1 => (1, 1, d[0], false),
                2 => (1, d[0], d[1], false),
                r => (d[..r - 2].iter().product::<usize>(), d[r - 2], d[r - 1], true),
            }
        };
        let (ba, a0, a1, a_batched) = split(a);
        let (bb, b0, b1, b_batched) = split(b);
        let (m, k) = if t.a { (a1, a0) } else { (a0, a1) };
        let (kb, n) = if t.b { (b1, b0) } else { (b0, b1) };
        assert_eq!(k, kb, "matmul of {} and {} ({t:?})", a.shape(), b.shape());
        assert!(!(a_batched && b_batched) || ba == bb, "matmul of {} and {}", a.shape(), b.shape());
        let batch = ba.max(bb);
        let mut dims = if a.shape().rank() >= b.shape().rank() { a.shape().dims() } else { b.shape().dims() };
        let r = dims.len();
        if r == 1 {
            dims = vec![n];
        } else {
            dims[r - 2] = m;
            dims[r - 1] = n;
            if a.shape().rank() == 1 && r == 2 {
                dims = vec![n];
            }
        }
        let spec = simplify(MatmulSpec {
            batch: batch as u32,
            m: m as u32,
            n: n as u32,
            k: k as u32,
            trans_a: t.a,
            trans_b: t.b,
            a_batched,
            b_batched,
            reduce_batch: false,
            accumulate: None,
        });
        self.push(Matmul { spec, shape: Shape::new(&dims), epilogue: None }, &[a, b])
    }

    /// Slot mix: `U[b, j, c] = Σ_i W[i, j] X[b, i, c]`, `X[B, m, d]`, `W[m, l]` → `[B, l, d]`.
    pub fn slot_mix(&mut self, x: Tensor, w: Tensor) -> Tensor {
        self.matmul_t(w, x, Trans { a: true, b: false })
    }
}

impl Matmul {
    /// Strides of an extra input over `[batch, m, n]`, if it can be read that way.
    pub fn extra_strides(&self, a: &Access) -> Option<[usize; 3]> {
        let dims = [self.out_batch(), self.spec.m as usize, self.spec.n as usize];
        if a.offset != 0 || a.len() != dims.iter().product::<usize>() {
            return None;
        }
        // walk both factorisations from the inside
        let (mut k, mut left, mut stride) = (a.dims.len() - 1, *a.dims.last()?, *a.strides.last()?);
        let mut out = [0; 3];
        for (d, o) in dims.iter().zip(&mut out).rev() {
            if *d == 1 {
                continue;
            }
            if left == 1 {
                k = k.checked_sub(1)?;
                (left, stride) = (a.dims[k], a.strides[k]);
            }
            if !left.is_multiple_of(*d) {
                return None;
            }
            *o = stride;
            left /= d;
            stride *= d;
        }
        Some(out)
    }

    /// The generator's name for an access.
    fn extra(&self, a: &Access) -> matmul_wgsl::Extra {
        use matmul_wgsl::Extra;
        let [b, row, col] = self.extra_strides(a).expect("checked by the fusion pass");
        let s = &self.spec;
        let (m, n) = (s.m as usize, s.n as usize);
        let one = |d: usize, stride: usize, want: usize| d == 1 || stride == want;
        let batch = self.out_batch();
        if one(batch, b, m * n) && one(m, row, n) && one(n, col, 1) {
            Extra::Full
        } else if one(batch, b, 0) && one(m, row, 0) && one(n, col, 0) {
            Extra::Scalar
        } else if one(batch, b, 0) && one(m, row, 0) && one(n, col, 1) {
            Extra::Row
        } else if one(batch, b, m) && one(m, row, 1) && one(n, col, 0) {
            Extra::Col
        } else {
            Extra::Strided { batch: b as u32, row: row as u32, col: col as u32 }
        }
    }

    /// Whether an epilogue may read an input this way.
    pub fn fits(&self, a: &Access) -> bool {
        self.extra_strides(a).is_some()
    }
}

/// The variant by device type, without measuring.
#[derive(Clone, Copy, Debug)]
pub struct ByDevice {
    /// A software driver.
    pub is_cpu: bool,
}

impl super::MatmulChoice for ByDevice {
    fn choose(&self, spec: &MatmulSpec) -> matmul_wgsl::Variant {
        let kind = if self.is_cpu { wgpu::DeviceType::Cpu } else { wgpu::DeviceType::DiscreteGpu };
        super::matmul_tune::default_variant(spec, kind)
    }
}
