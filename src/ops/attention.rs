//! `attention`: scaled dot-product attention over the slots of each example, without a mask
//! (Vaswani et al., arXiv 1706.03762; math.md section 2.2).
//!
//! q, k, v `[batch, m, d]`, heads = contiguous blocks of `d_k = d/heads` columns;
//! A = softmax(QKᵀ/√d_k) over the keys, o `[batch, m, d]` = the heads' A·V side by side.
//! The second output, `[batch, heads, m]`, is the logsumexp of each row of scores: the backward pass finds
//! A again as e^(score − lse), so that nothing of size m × m is kept.
//!
//! On the CPU the queries of one head lie side by side in lanes: scores, softmax and sums over the keys
//! are then loops over whole lanes, without a sum across a vector anywhere.

use super::cpu::{par_rows2, rows_per_task};
use super::row::{kernel, shader};
use super::{Cpu, GpuCaps, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel};
use crate::graph::{Graph, Shape, Tensor};
use crate::par::*;

/// Forward: q, k, v → o, lse.
#[derive(Clone, Debug)]
pub struct Attention {
    pub(crate) dims: Dims,
}

/// Backward: q, k, v, o, lse, do → dq, dk, dv. (The shader reads o; here D comes from sums at hand.)
#[derive(Clone, Debug)]
pub struct AttentionGrad {
    dims: Dims,
}

/// The sizes of one attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dims {
    batch: usize,
    m: usize,
    pub(crate) heads: usize,
    /// Columns of a head.
    pub(crate) dk: usize,
}

impl Dims {
    fn d(&self) -> usize {
        self.heads * self.dk
    }

    pub(crate) fn scale(&self) -> f64 {
        1.0 / (self.dk as f64).sqrt()
    }

    fn x(&self) -> Shape {
        Shape::new(&[self.batch, self.m, self.d()])
    }

    fn lse(&self) -> Shape {
        Shape::new(&[self.batch, self.heads, self.m])
    }

    /// (q·k and A·v) multiply-adds of the batch.
    fn product(&self) -> f64 {
        (self.batch * self.m * self.m * self.d()) as f64
    }

    fn exps(&self) -> f64 {
        (self.batch * self.heads * self.m * self.m) as f64
    }
}

/// Columns in one lane group of the gradients of k and v.
const COLS: usize = 8;
/// Keys (rows) whose sums advance together there.
const KEYS: usize = 8;

/// c[r][·] = Σ_t a[r·rs + t·ts]·b[t][·], `R` rows of accumulators at a time.
#[inline(always)]
fn product<T: Real, const L: usize, const R: usize>(
    a: &[T],
    rs: usize,
    ts: usize,
    b: &[[T; L]],
    c: &mut [[T; L]],
) {
    let rows = c.len();
    assert!(rows > 0 && !b.is_empty() && (rows - 1) * rs + (b.len() - 1) * ts < a.len());
    let mut r0 = 0;
    while r0 + R <= rows {
        let c: &mut [[T; L]; R] = (&mut c[r0..r0 + R]).try_into().expect("R rows");
        let mut acc = [[T::ZERO; L]; R];
        for (t, b) in b.iter().enumerate() {
            for (r, acc) in acc.iter_mut().enumerate() {
                // SAFETY: r0 + r < rows and t < b.len(), so the assertion above covers the index.
                let x = unsafe { *a.get_unchecked((r0 + r) * rs + t * ts) };
                for (acc, b) in acc.iter_mut().zip(b) {
                    *acc += x * *b;
                }
            }
        }
        *c = acc;
        // the last rows once more together with some before them, rather than one by one
        r0 = if r0 + R < rows && r0 + 2 * R > rows { rows - R } else { r0 + R };
    }
    for (r, c) in c.iter_mut().enumerate().skip(r0) {
        let mut acc = [T::ZERO; L];
        for (t, b) in b.iter().enumerate() {
            let x = a[r * rs + t * ts];
            for (acc, b) in acc.iter_mut().zip(b) {
                *acc += x * *b;
            }
        }
        *c = acc;
    }
}

/// Gradients of k and v of one group of columns, both at once: c[r][·] (+= if `add`) is
/// Σ_t (ds, a)[r][t] ⊙ (q, do)[t][·], the pairs side by side. `ld` pairs a row; rows are a multiple of `KEYS`.
#[inline(always)]
fn pair_product<T: Real>(a: &[[T; 2]], ld: usize, b: &[[[T; 2]; COLS]], c: &mut [[[T; 2]; COLS]], add: bool) {
    assert!(b.len() <= ld && c.len() * ld <= a.len());
    for (c, a) in c.as_chunks_mut::<KEYS>().0.iter_mut().zip(a.chunks_exact(KEYS * ld)) {
        let mut acc = if add { *c } else { [[[T::ZERO; 2]; COLS]; KEYS] };
        for (t, b) in b.iter().enumerate() {
            for (r, acc) in acc.iter_mut().enumerate() {
                // SAFETY: r < KEYS, t < b.len() ≤ ld, and the chunk has KEYS·ld pairs.
                let x = unsafe { *a.get_unchecked(r * ld + t) };
                for (acc, b) in acc.iter_mut().zip(b) {
                    acc[0] += x[0] * b[0];
                    acc[1] += x[1] * b[1];
                }
            }
        }
        *c = acc;
    }
}

/// to[c][lane] = from[lane·d + c]·scale for the lanes that exist, zero beyond.
#[inline(always)]
fn to_lanes<T: Real, const L: usize>(from: &[T], d: usize, n: usize, scale: T, to: &mut [[T; L]]) {
    if n < L {
        to.fill([T::ZERO; L]);
    }
    let dk = to.len();
    let mut l0 = 0;
    while l0 + 8 <= n {
        let mut c0 = 0;
        while c0 + 8 <= dk {
            let mut x = [[T::ZERO; 8]; 8];
            for (l, x) in x.iter_mut().enumerate() {
                x.copy_from_slice(&from[(l0 + l) * d + c0..][..8]);
            }
            for (c, to) in to[c0..c0 + 8].iter_mut().enumerate() {
                for (l, to) in to[l0..l0 + 8].iter_mut().enumerate() {
                    *to = x[l][c] * scale;
                }
            }
            c0 += 8;
        }
        for (c, to) in to.iter_mut().enumerate().skip(c0) {
            for (l, to) in to[l0..l0 + 8].iter_mut().enumerate() {
                *to = from[(l0 + l) * d + c] * scale;
            }
        }
        l0 += 8;
    }
    for lane in l0..n.min(L) {
        for (to, x) in to.iter_mut().zip(&from[lane * d..][..dk]) {
            to[lane] = *x * scale;
        }
    }
}

/// The inverse of [`to_lanes`], each lane times its factor.
#[inline(always)]
fn from_lanes<T: Real, const L: usize>(from: &[[T; L]], factor: &[T; L], n: usize, d: usize, to: &mut [T]) {
    let dk = from.len();
    for lane in 0..n {
        for (to, x) in to[lane * d..][..dk].iter_mut().zip(from) {
            *to = x[lane] * factor[lane];
        }
    }
}

#[inline(always)]
fn forward<T: Real, const L: usize, const R: usize>(
    s: &Dims,
    q: &[T],
    k: &[T],
    v: &[T],
    o: &mut [T],
    lse: &mut [T],
) {
    let (m, d, dk) = (s.m, s.d(), s.dk);
    let scale = T::of(s.scale());
    let mut qt = vec![[T::ZERO; L]; dk];
    let mut ot = vec![[T::ZERO; L]; dk];
    let mut p = vec![[T::ZERO; L]; m];
    for ((((q, k), v), o), lse) in q
        .chunks_exact(m * d)
        .zip(k.chunks_exact(m * d))
        .zip(v.chunks_exact(m * d))
        .zip(o.chunks_exact_mut(m * d))
        .zip(lse.chunks_exact_mut(s.heads * m))
    {
        for (h, lse) in lse.chunks_exact_mut(m).enumerate() {
            let (k, v) = (&k[h * dk..], &v[h * dk..]);
            for (block, lse) in lse.chunks_mut(L).enumerate() {
                let at = block * L * d + h * dk;
                let n = lse.len();
                to_lanes(&q[at..], d, n, scale, &mut qt);
                product::<T, L, R>(k, d, 1, &qt, &mut p);
                let mut top = p[0];
                for p in &p[1..] {
                    for (t, p) in top.iter_mut().zip(p) {
                        *t = t.max(*p);
                    }
                }
                let mut sum = [T::ZERO; L];
                for p in &mut p {
                    for ((p, t), s) in p.iter_mut().zip(&top).zip(&mut sum) {
                        *p = (*p - *t).exp();
                        *s += *p;
                    }
                }
                product::<T, L, R>(v, 1, d, &p, &mut ot);
                let mut inv = [T::ZERO; L];
                for (i, s) in inv.iter_mut().zip(&sum) {
                    *i = T::ONE / *s;
                }
                from_lanes(&ot, &inv, n, d, &mut o[at..]);
                for ((l, t), s) in lse.iter_mut().zip(&top).zip(&sum) {
                    *l = *t + s.ln();
                }
            }
        }
    }
}

/// What the backward pass reads of some examples.
#[derive(Clone, Copy)]
struct Saved<'a, T> {
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    lse: &'a [T],
    dout: &'a [T],
}

#[inline(always)]
fn backward<T: Real, const L: usize, const R: usize>(
    s: &Dims,
    x: Saved<'_, T>,
    dq: &mut [T],
    dk_out: &mut [T],
    dv_out: &mut [T],
) {
    let (m, d, dk) = (s.m, s.d(), s.dk);
    let scale = T::of(s.scale());
    let groups = dk.div_ceil(COLS);
    let m8 = m.next_multiple_of(KEYS);
    let mut qt = vec![[T::ZERO; L]; dk];
    let mut dot = vec![[T::ZERO; L]; dk];
    let mut dqt = vec![[T::ZERO; L]; dk];
    let mut p = vec![[T::ZERO; L]; m];
    let mut ds = vec![[T::ZERO; L]; m];
    let mut pairs = vec![[T::ZERO; 2]; m8 * L];
    let mut cols = [[[T::ZERO; 2]; COLS]; L];
    let mut keys = vec![[[T::ZERO; 2]; COLS]; groups * m8];
    for e in 0..dq.len() / (m * d) {
        let of = e * m * d;
        for h in 0..s.heads {
            let head = of + h * dk;
            let (k, v) = (&x.k[head..], &x.v[head..]);
            let lse = &x.lse[(e * s.heads + h) * m..][..m];
            for (block, lse) in lse.chunks(L).enumerate() {
                let at = head + block * L * d;
                let n = lse.len();
                let (q, dout) = (&x.q[at..], &x.dout[at..]);
                to_lanes(q, d, n, scale, &mut qt);
                to_lanes(dout, d, n, T::ONE, &mut dot);
                let mut l = [T::ZERO; L];
                l[..n].copy_from_slice(lse);
                product::<T, L, R>(k, d, 1, &qt, &mut p);
                product::<T, L, R>(v, d, 1, &dot, &mut ds);
                // D = do·o = Σ_j a_j·(do·v_j)
                let mut big_d = [T::ZERO; L];
                for (p, ds) in p.iter_mut().zip(&ds) {
                    for (((p, ds), l), b) in p.iter_mut().zip(ds).zip(&l).zip(&mut big_d) {
                        *p = (*p - *l).exp();
                        *b += *p * *ds;
                    }
                }
                // pairs beyond the m-th row stay zero
                let rows = p.iter().zip(&mut ds).zip(pairs.as_chunks_mut::<L>().0);
                for ((p, ds), pairs) in rows {
                    for (((p, ds), b), pair) in p.iter().zip(ds).zip(&big_d).zip(pairs) {
                        *ds = *p * (*ds - *b);
                        *pair = [*ds, *p];
                    }
                }
                product::<T, L, R>(k, 1, d, &ds, &mut dqt);
                from_lanes(&dqt, &[scale; L], n, d, &mut dq[at..]);
                // keys: sums over the queries, with the columns in lanes
                for (g, keys) in keys.chunks_exact_mut(m8).enumerate() {
                    let (c0, w) = (g * COLS, (dk - g * COLS).min(COLS));
                    for ((to, q), dout) in cols[..n].iter_mut().zip(q.chunks(d)).zip(dout.chunks(d)) {
                        load_pairs(&q[c0..c0 + w], scale, &dout[c0..c0 + w], to);
                    }
                    pair_product(&pairs, L, &cols[..n], keys, block > 0);
                }
            }
            for (g, keys) in keys.chunks_exact(m8).enumerate() {
                let w = (dk - g * COLS).min(COLS);
                for (row, keys) in keys[..m].iter().enumerate() {
                    let at = head + row * d + g * COLS;
                    store_pairs(keys, &mut dk_out[at..at + w], &mut dv_out[at..at + w]);
                }
            }
        }
    }
}

#[inline(always)]
fn load_pairs<T: Real>(q: &[T], scale: T, dout: &[T], to: &mut [[T; 2]; COLS]) {
    if let (Ok(q), Ok(dout)) = (<&[T; COLS]>::try_from(q), <&[T; COLS]>::try_from(dout)) {
        for ((to, q), dout) in to.iter_mut().zip(q).zip(dout) {
            *to = [*q * scale, *dout];
        }
    } else {
        *to = [[T::ZERO; 2]; COLS];
        for ((to, q), dout) in to.iter_mut().zip(q).zip(dout) {
            *to = [*q * scale, *dout];
        }
    }
}

#[inline(always)]
fn store_pairs<T: Real>(from: &[[T; 2]; COLS], dk: &mut [T], dv: &mut [T]) {
    for ((from, dk), dv) in from.iter().zip(dk).zip(dv) {
        *dk = from[0];
        *dv = from[1];
    }
}

impl Attention {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let s = &self.dims;
        let (q, k, v) = (c.input(0), c.input(1), c.input(2));
        let (o, lse) = (c.output(0), c.output(1));
        let row = s.m * s.d();
        par_rows2(
            o,
            row,
            lse,
            s.heads * s.m,
            #[inline(always)]
            |first, o, lse| {
                let at = first * row..first * row + o.len();
                let (q, k, v) = (&q[at.clone()], &k[at.clone()], &v[at]);
                if s.m <= 16 {
                    forward::<T, 16, 8>(s, q, k, v, o, lse)
                } else {
                    forward::<T, 32, 4>(s, q, k, v, o, lse)
                }
            },
        );
    }

    fn new(q: Shape, heads: usize) -> Self {
        assert_eq!(q.rank(), 3, "attention: q is {q}, not [batch, m, d]");
        assert!(heads > 0 && q.dim(2).is_multiple_of(heads), "attention: {heads} heads do not divide {q}");
        Attention { dims: Dims { batch: q.dim(0), m: q.dim(1), heads, dk: q.dim(2) / heads } }
    }
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        for x in inputs {
            assert_eq!(*x, self.dims.x(), "attention: q, k and v have one shape");
        }
        vec![self.dims.x(), self.dims.lse()]
    }

    fn flops(&self, _: &[Shape], _: &[Shape]) -> f64 {
        4.0 * self.dims.product() + 4.0 * self.dims.exps()
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dout = v.grads[0].expect("called with a gradient");
        let mut inputs = v.inputs.to_vec();
        inputs.extend([v.outputs[0], v.outputs[1], dout]);
        g.push_multi(AttentionGrad { dims: self.dims }, &inputs).into_iter().map(Some).collect()
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let bindings = vec![Bind::In(0), Bind::In(1), Bind::In(2), Bind::Out(0), Bind::Out(1)];
        self.dims.launch("attention", include_str!("../../shaders/attention.wgsl"), bindings, r.caps).into()
    }
}

impl Dims {
    /// Queries (or keys) of one invocation, whose loads of the other side they share: many on a software
    /// driver, which waits for loads, few on hardware, which wants invocations. Even tiles of the m rows.
    fn tile(&self, vectors: usize, is_cpu: bool) -> usize {
        let most = if is_cpu { (16 / vectors).clamp(1, 8) } else { (8 / vectors).clamp(1, 2) };
        self.m.div_ceil(self.m.div_ceil(most))
    }

    fn launch(&self, label: &'static str, text: &str, bindings: Vec<Bind>, caps: &GpuCaps) -> Kernel {
        let vec4 = self.dk.is_multiple_of(4);
        let flags: &[&str] = if vec4 { &["vec4"] } else { &[] };
        let n = if vec4 { self.dk / 4 } else { self.dk };
        let t = self.tile(n, caps.is_cpu);
        let tiles = self.batch * self.heads * self.m.div_ceil(t);
        kernel(
            label,
            shader(text, flags, &[("N", n), ("T", t)]),
            "main",
            bindings,
            &[tiles as u32, self.m as u32, self.heads as u32, (self.scale() as f32).to_bits()],
            tiles,
        )
    }
}

impl AttentionGrad {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let s = &self.dims;
        let all = Saved { q: c.input(0), k: c.input(1), v: c.input(2), lse: c.input(4), dout: c.input(5) };
        let (dq, dk, dv) = (c.output(0), c.output(1), c.output(2));
        let row = s.m * s.d();
        let block = rows_per_task(row);
        dq.par_chunks_mut(block * row)
            .zip(dk.par_chunks_mut(block * row))
            .zip(dv.par_chunks_mut(block * row))
            .enumerate()
            .for_each(|(i, ((dq, dk), dv))| {
                T::simd(
                    #[inline(always)]
                    || {
                        let (lo, hi) = (i * block * row, i * block * row + dq.len());
                        let x = Saved {
                            q: &all.q[lo..hi],
                            k: &all.k[lo..hi],
                            v: &all.v[lo..hi],
                            lse: &all.lse[i * block * s.heads * s.m..],
                            dout: &all.dout[lo..hi],
                        };
                        if s.m <= 16 {
                            backward::<T, 16, 8>(s, x, dq, dk, dv)
                        } else {
                            backward::<T, 32, 4>(s, x, dq, dk, dv)
                        }
                    },
                )
            });
    }
}

impl Op for AttentionGrad {
    fn name(&self) -> &'static str {
        "attention_grad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs.len(), 6);
        vec![self.dims.x(); 3]
    }

    fn flops(&self, _: &[Shape], _: &[Shape]) -> f64 {
        10.0 * self.dims.product() + 4.0 * self.dims.exps()
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("second derivatives of attention are not needed")
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        // first by queries (dq, and D = Σ do·o for the next), then by keys (dk and dv)
        let s = &self.dims;
        let (i, o) = (Bind::In, Bind::Out);
        let queries = vec![i(0), i(1), i(2), i(3), i(4), i(5), o(0), Bind::Scratch(0)];
        let keys = vec![i(0), i(1), i(2), i(4), i(5), Bind::Scratch(0), o(1), o(2)];
        GpuLaunch {
            kernels: vec![
                s.launch("attention_dq", include_str!("../../shaders/attention_dq.wgsl"), queries, r.caps),
                s.launch("attention_dkv", include_str!("../../shaders/attention_dkv.wgsl"), keys, r.caps),
            ],
            scratch: vec![s.batch * s.heads * s.m],
        }
    }
}

impl Graph {
    /// Attention of `heads` heads over the middle axis: q, k, v `[batch, m, d]` → `[batch, m, d]`.
    ///
    /// # Panics
    /// If the shapes differ or `heads` does not divide `d`.
    pub fn attention(&mut self, q: Tensor, k: Tensor, v: Tensor, heads: usize) -> Tensor {
        self.push_multi(Attention::new(q.shape(), heads), &[q, k, v])[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::tests::{check_vjp_at, noise, run64};
    use crate::ops::row::tests::validate;

    /// batch, m, heads, dk
    const SIZES: [(usize, usize, usize, usize); 7] = [
        (2, 5, 2, 3),
        (1, 1, 1, 1),
        (3, 27, 4, 8),
        (1, 16, 1, 4),
        (2, 35, 1, 9),
        (1, 70, 2, 5),
        (1, 3, 3, 20),
    ];

    fn dims((b, m, h, dk): (usize, usize, usize, usize)) -> Vec<usize> {
        vec![b, m, h * dk]
    }

    #[test]
    fn adjoint_meets_finite_differences() {
        for s in SIZES {
            let d = dims(s);
            check_vjp_at(&[("q", d.clone()), ("k", d.clone()), ("v", d)], 2.0, |g, x| {
                vec![g.attention(x[0], x[1], x[2], s.2)]
            });
        }
    }

    #[test]
    fn values_of_a_naive_loop() {
        for s in SIZES {
            let (b, m, heads, dk) = s;
            let (d, n) = (heads * dk, b * m * heads * dk);
            let x = [noise(n, 1), noise(n, 2), noise(n, 3)].map(|x| x.iter().map(|v| 3.0 * v).collect());
            let [q, k, v]: [Vec<f64>; 3] = x;
            let mut g = Graph::new();
            let t = ["q", "k", "v"].map(|n| g.state(n, &dims(s)[..]));
            let out = g.push_multi(Attention::new(t[0].shape(), heads), &t);
            let got = run64(&g, &out, &[("q", q.clone()), ("k", k.clone()), ("v", v.clone())]);
            for e in 0..b {
                for h in 0..heads {
                    for i in 0..m {
                        let at = |j: usize| (e * m + j) * d + h * dk;
                        let score = |j: usize| {
                            (0..dk).map(|c| q[at(i) + c] * k[at(j) + c]).sum::<f64>() / (dk as f64).sqrt()
                        };
                        let sum: f64 = (0..m).map(|j| score(j).exp()).sum();
                        assert!((got[1][(e * heads + h) * m + i] - sum.ln()).abs() < 1e-12);
                        for c in 0..dk {
                            let want: f64 = (0..m).map(|j| score(j).exp() / sum * v[at(j) + c]).sum();
                            assert!((got[0][at(i) + c] - want).abs() < 1e-12);
                        }
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "3 heads do not divide")]
    fn heads_must_divide_the_width() {
        let mut g = Graph::new();
        let x = g.state("x", [2, 4, 8]);
        g.attention(x, x, x, 3);
    }

    #[test]
    fn shaders_are_valid() {
        for s in [(2, 5, 2, 3), (3, 27, 4, 8)] {
            let (x, lse) = (dims(s), vec![s.0, s.2, s.1]);
            let op = Attention::new(Shape::new(&x), s.2);
            validate(&op, &[&x, &x, &x]);
            validate(&AttentionGrad { dims: op.dims }, &[&x, &x, &x, &x, &lse, &x]);
        }
    }

    #[test]
    fn device_agrees() {
        for s in SIZES {
            crate::graph::testing::check_device(|g| {
                let t = ["q", "k", "v"].map(|n| g.state(n, &dims(s)[..]));
                vec![g.attention(t[0], t[1], t[2], s.2)]
            });
        }
    }
}
