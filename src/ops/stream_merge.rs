//! `stream_merge`: residual mixing, post and merge in one pass (mHC, arXiv 2512.24880 eq. 3; math.md section 4).
//!
//! `S[.., n, d], f[.., d], res[.., n, n], post[.., n] → S'[.., n, d]`, n = 1 to 8,
//! S'[o] = Σ_i res[o, i] S[i] + post[o] f. Reads (n+1)·d and writes n·d elements a token, beside n² + n
//! coefficients. Backward, one operation: dS[i] = Σ_o res[o, i] dS'[o], df = Σ_o post[o] dS'[o],
//! dres[o, i] = ⟨dS'[o], S[i]⟩, dpost[o] = ⟨dS'[o], f⟩; on the device two kernels (eight buffers each at most).

#![allow(clippy::needless_range_loop)] // several fixed-size arrays walked in step

use super::streams::{FAST_STREAMS, MAX_STREAMS, TOKENS_PER_TASK, load, split, store, unroll};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};
use crate::par::*;
use crate::{by_streams, cpu_both};
use pulp::{Arch, Simd, WithSimd};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct StreamMerge {
    n: usize,
    d: usize,
}

/// Backward of [`StreamMerge`]: inputs S, f, res, post, dS'; outputs dS, df, dres, dpost.
#[derive(Clone, Debug)]
pub struct StreamMergeGrad {
    n: usize,
    d: usize,
}

/// The inputs of consecutive tokens.
#[derive(Clone, Copy)]
struct Tokens<'a> {
    s: &'a [f32],
    f: &'a [f32],
    res: &'a [f32],
    post: &'a [f32],
    d: usize,
}

struct Forward<'a, const N: usize> {
    x: Tokens<'a>,
    y: &'a mut [f32],
}

impl<const N: usize> WithSimd for Forward<'_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Tokens { s, f, res, post, d } = self.x;
        for (t, y) in self.y.chunks_exact_mut(N * d).enumerate() {
            let x = split::<N>(&s[t * N * d..][..N * d]);
            let f = &f[t * d..][..d];
            let (a, p) = coefficients::<S, N>(simd, &res[t * N * N..], &post[t * N..]);
            let mut c = 0;
            while c + S::F32_LANES <= d {
                mix::<S, N, true>(simd, &x, f, &a, &p, y, c);
                c += S::F32_LANES;
            }
            if c < d {
                mix::<S, N, false>(simd, &x, f, &a, &p, y, c);
            }
        }
    }
}

#[inline(always)]
fn coefficients<S: Simd, const N: usize>(
    simd: S,
    res: &[f32],
    post: &[f32],
) -> ([[S::f32s; N]; N], [S::f32s; N]) {
    let zero = simd.splat_f32s(0.0);
    let (mut a, mut p) = ([[zero; N]; N], [zero; N]);
    let (res, post) = (&res[..N * N], &post[..N]);
    for o in 0..N {
        p[o] = simd.splat_f32s(post[o]);
        for i in 0..N {
            a[o][i] = simd.splat_f32s(res[o * N + i]);
        }
    }
    (a, p)
}

#[inline(always)]
fn mix<S: Simd, const N: usize, const FULL: bool>(
    simd: S,
    x: &[&[f32]; N],
    f: &[f32],
    a: &[[S::f32s; N]; N],
    p: &[S::f32s; N],
    y: &mut [f32],
    c: usize,
) {
    let d = f.len();
    let f = load::<S, FULL>(simd, f, c);
    let mut v = [f; N];
    for i in 0..N {
        v[i] = load::<S, FULL>(simd, x[i], c);
    }
    for o in 0..N {
        let mut sum = simd.mul_f32s(p[o], f);
        for i in 0..N {
            sum = simd.mul_add_e_f32s(a[o][i], v[i], sum);
        }
        store::<S, FULL>(simd, &mut y[o * d..(o + 1) * d], c, sum);
    }
}

struct Backward<'a, const N: usize> {
    x: Tokens<'a>,
    g: &'a [f32],
    ds: &'a mut [f32],
    df: &'a mut [f32],
    dres: &'a mut [f32],
    dpost: &'a mut [f32],
}

/// Sums of one token, a lane's share in each lane.
struct Sums<S: Simd, const N: usize> {
    res: [[S::f32s; N]; N],
    post: [S::f32s; N],
}

impl<const N: usize> WithSimd for Backward<'_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Tokens { s, f, res, post, d } = self.x;
        let outs = self.ds.chunks_exact_mut(N * d).zip(self.df.chunks_exact_mut(d));
        let small = self.dres.chunks_exact_mut(N * N).zip(self.dpost.chunks_exact_mut(N));
        let zero = simd.splat_f32s(0.0);
        for (t, ((ds, df), (dres, dpost))) in outs.zip(small).enumerate() {
            let x = split::<N>(&s[t * N * d..][..N * d]);
            let g = split::<N>(&self.g[t * N * d..][..N * d]);
            let f = &f[t * d..][..d];
            let (a, p) = coefficients::<S, N>(simd, &res[t * N * N..], &post[t * N..]);
            let mut sums = Sums::<S, N> { res: [[zero; N]; N], post: [zero; N] };
            let mut c = 0;
            while c + S::F32_LANES <= d {
                back::<S, N, true>(simd, &x, f, &g, &a, &p, ds, df, &mut sums, c);
                c += S::F32_LANES;
            }
            if c < d {
                back::<S, N, false>(simd, &x, f, &g, &a, &p, ds, df, &mut sums, c);
            }
            for o in 0..N {
                for i in 0..N {
                    dres[o * N + i] = simd.reduce_sum_f32s(sums.res[o][i]);
                }
                dpost[o] = simd.reduce_sum_f32s(sums.post[o]);
            }
        }
    }
}

#[inline(always)]
fn back<S: Simd, const N: usize, const FULL: bool>(
    simd: S,
    x: &[&[f32]; N],
    f: &[f32],
    g: &[&[f32]; N],
    a: &[[S::f32s; N]; N],
    p: &[S::f32s; N],
    ds: &mut [f32],
    df: &mut [f32],
    sums: &mut Sums<S, N>,
    c: usize,
) {
    let d = f.len();
    let f = load::<S, FULL>(simd, f, c);
    let mut gv = [f; N];
    for o in 0..N {
        gv[o] = load::<S, FULL>(simd, g[o], c);
        sums.post[o] = simd.mul_add_e_f32s(gv[o], f, sums.post[o]);
    }
    let mut sum = simd.mul_f32s(p[0], gv[0]);
    for o in 1..N {
        sum = simd.mul_add_e_f32s(p[o], gv[o], sum);
    }
    store::<S, FULL>(simd, df, c, sum);
    for i in 0..N {
        let v = load::<S, FULL>(simd, x[i], c);
        let mut sum = simd.mul_f32s(a[0][i], gv[0]);
        for o in 1..N {
            sum = simd.mul_add_e_f32s(a[o][i], gv[o], sum);
        }
        store::<S, FULL>(simd, &mut ds[i * d..(i + 1) * d], c, sum);
        for o in 0..N {
            sums.res[o][i] = simd.mul_add_e_f32s(gv[o], v, sums.res[o][i]);
        }
    }
}

fn forward<const N: usize>(x: Tokens<'_>, y: &mut [f32]) {
    Arch::new().dispatch(Forward::<N> { x, y })
}

fn backward<const N: usize>(
    x: Tokens<'_>,
    g: &[f32],
    ds: &mut [f32],
    df: &mut [f32],
    dres: &mut [f32],
    dpost: &mut [f32],
) {
    Arch::new().dispatch(Backward::<N> { x, g, ds, df, dres, dpost })
}

/// Inputs 0 to 3 from token `at` on, if `T` is f32.
fn tokens<T: Real>(x: [&[T]; 4], n: usize, d: usize, at: usize) -> Tokens<'_> {
    let [s, f, res, post] = x;
    Tokens {
        s: bytemuck::cast_slice(&s[at * n * d..]),
        f: bytemuck::cast_slice(&f[at * d..]),
        res: bytemuck::cast_slice(&res[at * n * n..]),
        post: bytemuck::cast_slice(&post[at * n..]),
        d,
    }
}

impl StreamMerge {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (n, d) = (self.n, self.d);
        let x = [c.input(0), c.input(1), c.input(2), c.input(3)];
        let y = c.output(0);
        y.par_chunks_mut(TOKENS_PER_TASK * n * d).enumerate().for_each(|(b, y)| {
            let at = b * TOKENS_PER_TASK;
            if size_of::<T>() == 4 && n <= FAST_STREAMS {
                let (x, y) = (tokens(x, n, d, at), bytemuck::cast_slice_mut(y));
                return by_streams!(n, forward(x, y));
            }
            let [s, f, res, post] = x;
            for (t, y) in (at..).zip(y.chunks_exact_mut(n * d)) {
                for (o, y) in y.chunks_exact_mut(d).enumerate() {
                    for (c, y) in y.iter_mut().enumerate() {
                        *y = post[t * n + o] * f[t * d + c];
                        for i in 0..n {
                            *y += res[(t * n + o) * n + i] * s[(t * n + i) * d + c];
                        }
                    }
                }
            }
        });
    }
}

impl StreamMergeGrad {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (n, d) = (self.n, self.d);
        let x = [c.input(0), c.input(1), c.input(2), c.input(3)];
        let g = c.input(4);
        let (ds, df, dres, dpost) = (c.output(0), c.output(1), c.output(2), c.output(3));
        let outs = (
            ds.par_chunks_mut(TOKENS_PER_TASK * n * d),
            df.par_chunks_mut(TOKENS_PER_TASK * d),
            dres.par_chunks_mut(TOKENS_PER_TASK * n * n),
            dpost.par_chunks_mut(TOKENS_PER_TASK * n),
        );
        outs.into_par_iter().enumerate().for_each(|(b, (ds, df, dres, dpost))| {
            let at = b * TOKENS_PER_TASK;
            if size_of::<T>() == 4 && n <= FAST_STREAMS {
                let (x, g) = (tokens(x, n, d, at), bytemuck::cast_slice(&g[at * n * d..]));
                let (ds, df) = (bytemuck::cast_slice_mut(ds), bytemuck::cast_slice_mut(df));
                let (dres, dpost) = (bytemuck::cast_slice_mut(dres), bytemuck::cast_slice_mut(dpost));
                return by_streams!(n, backward(x, g, ds, df, dres, dpost));
            }
            let [s, f, res, post] = x;
            for k in 0..dpost.len() / n {
                let t = at + k;
                let (s, g) = (&s[t * n * d..][..n * d], &g[t * n * d..][..n * d]);
                for c in 0..d {
                    df[k * d + c] = (0..n).map(|o| post[t * n + o] * g[o * d + c]).sum();
                    for i in 0..n {
                        ds[(k * n + i) * d + c] =
                            (0..n).map(|o| res[(t * n + o) * n + i] * g[o * d + c]).sum();
                    }
                }
                for o in 0..n {
                    let g = &g[o * d..(o + 1) * d];
                    dpost[k * n + o] = super::real::dot(g, &f[t * d..(t + 1) * d]);
                    for i in 0..n {
                        dres[(k * n + o) * n + i] = super::real::dot(g, &s[i * d..(i + 1) * d]);
                    }
                }
            }
        });
    }
}

/// A kernel over tokens; with `split` a token's row is shared by several invocations where that coalesces.
fn kernel(
    label: &'static str,
    template: &str,
    r: &GpuRequest<'_>,
    (n, d): (usize, usize),
    split: bool,
    bindings: Vec<Bind>,
) -> Kernel {
    let tokens = r.inputs[0].len() / (n * d);
    let (unit, elem, dot) =
        if d.is_multiple_of(4) { (4, "vec4<f32>", "dot(a, b)") } else { (1, "f32", "a * b") };
    let width = d / unit;
    // a row an invocation is fastest on a software driver; neighbours read neighbours on the others
    let parts = if split && !r.caps.is_cpu { width } else { 1 };
    Kernel {
        label: label.into(),
        source: unroll(&template.replace("{{ELEM}}", elem).replace("{{DOT}}", dot), n).into(),
        entry: "main",
        constants: vec![],
        bindings,
        params: bytemuck::cast_slice(&[tokens as u32, width as u32, parts as u32, 0]).to_vec(),
        groups: fold_groups((tokens * parts).div_ceil(64) as u64),
    }
}

impl Op for StreamMerge {
    fn name(&self) -> &'static str {
        "stream_merge"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        vec![inputs[0]]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        (2 * (self.n + 1) * inputs[0].len()) as f64
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dy = v.grads[0].expect("called with a gradient");
        let i = v.inputs;
        let op = StreamMergeGrad { n: self.n, d: self.d };
        g.push_multi(op, &[i[0], i[1], i[2], i[3], dy]).into_iter().map(Some).collect()
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let text = include_str!("../../shaders/stream_merge.wgsl");
        let bind = vec![Bind::In(0), Bind::In(1), Bind::In(2), Bind::In(3), Bind::Out(0)];
        kernel("stream_merge", text, r, (self.n, self.d), true, bind).into()
    }
}

impl Op for StreamMergeGrad {
    fn name(&self) -> &'static str {
        "stream_merge_grad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs[0].len(), inputs[4].len());
        inputs[..4].to_vec()
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        (4 * (self.n + 1) * inputs[0].len()) as f64
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("second derivatives are not needed")
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let size = (self.n, self.d);
        let back = include_str!("../../shaders/stream_merge_grad.wgsl");
        let bind = vec![Bind::In(2), Bind::In(3), Bind::In(4), Bind::Out(0), Bind::Out(1)];
        let a = kernel("stream_merge_grad", back, r, size, true, bind);
        let coef = include_str!("../../shaders/stream_merge_coef.wgsl");
        let bind = vec![Bind::In(0), Bind::In(1), Bind::In(4), Bind::Out(2), Bind::Out(3)];
        let b = kernel("stream_merge_coef", coef, r, size, false, bind);
        GpuLaunch { kernels: vec![a, b], scratch: vec![] }
    }
}

impl Graph {
    /// `S[.., n, d], f[.., d], res[.., n, n], post[.., n] → S'[.., n, d]`:
    /// S'[o] = Σ_i res[o, i] S[i] + post[o] f. Leading axes may be folded differently in each.
    ///
    /// # Panics
    /// If the sizes do not fit or n is not in 1..=8.
    pub fn stream_merge(&mut self, s: Tensor, f: Tensor, res: Tensor, post: Tensor) -> Tensor {
        let dims = s.shape().dims();
        assert!(dims.len() >= 2, "stream_merge of {}", s.shape());
        let (n, d) = (dims[dims.len() - 2], dims[dims.len() - 1]);
        let t = s.shape().len() / (n * d);
        assert!(n <= MAX_STREAMS, "stream_merge of {}: at most {MAX_STREAMS} streams", s.shape());
        assert!(
            f.shape().len() == t * d
                && f.shape().last() == d
                && res.shape().len() == t * n * n
                && post.shape().len() == t * n,
            "stream_merge of {} with f {}, res {}, post {}",
            s.shape(),
            f.shape(),
            res.shape(),
            post.shape()
        );
        self.push(StreamMerge { n, d }, &[s, f, res, post])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::testing::check_device;
    use crate::graph::tests::{check_vjp, run64};

    fn states(t: usize, n: usize, d: usize) -> [(&'static str, Vec<usize>); 4] {
        [("s", vec![t, n, d]), ("f", vec![t, d]), ("res", vec![t, n, n]), ("post", vec![t, n])]
    }

    #[test]
    fn adjoint() {
        for (t, n, d) in [(3, 1, 5), (5, 2, 4), (1, 3, 1), (7, 4, 18), (2, 8, 3)] {
            check_vjp(&states(t, n, d), |g, x| vec![g.stream_merge(x[0], x[1], x[2], x[3])]);
        }
    }

    #[test]
    fn first_index_of_res_is_the_output() {
        // one token, two streams, width 1, asymmetric res
        let mut g = Graph::new();
        let x: Vec<Tensor> = states(1, 2, 1).iter().map(|(n, s)| g.state(n, &s[..])).collect();
        let y = g.stream_merge(x[0], x[1], x[2], x[3]);
        let got = run64(
            &g,
            &[y],
            &[
                ("s", vec![1.0, 10.0]),
                ("f", vec![100.0]),
                ("res", vec![0.1, 0.2, 0.3, 0.4]),
                ("post", vec![2.0, 3.0]),
            ],
        );
        for (got, want) in got[0].iter().zip([0.1 + 2.0 + 200.0, 0.3 + 4.0 + 300.0]) {
            assert!((got - want).abs() < 1e-12);
        }
    }

    #[test]
    fn device() {
        for (t, n, d) in [(300, 4, 32), (257, 4, 7), (129, 1, 1), (70, 8, 36), (65, 3, 20), (1, 5, 33)] {
            check_device(|g| {
                let x: Vec<Tensor> = states(t, n, d).iter().map(|(n, s)| g.state(n, &s[..])).collect();
                vec![g.stream_merge(x[0], x[1], x[2], x[3])]
            });
        }
    }

    #[test]
    fn shaders_are_valid() {
        for n in 1..=8 {
            for d in [4, 5] {
                let mut g = Graph::new();
                let x: Vec<Tensor> = states(3, n, d).iter().map(|(n, s)| g.state(n, &s[..])).collect();
                let y = g.stream_merge(x[0], x[1], x[2], x[3]);
                let s = g.sum_all(y);
                g.gradients(s, &x);
                crate::ops::streams::tests::validate_graph(&g);
            }
        }
    }
}
