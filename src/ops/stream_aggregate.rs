//! `stream_aggregate`: the weighted sum of a token's streams that a layer reads (math.md section 4).
//!
//! `S[.., n, d], pre[.., n] → u[.., d]`, u = Σ_i pre[i] S[i], n = 1 to 8. Backward, two operations, so that the
//! first can be one link of a chain of accumulations into dS: dS[i] = pre[i] du (+ what came before), and
//! dpre[i] = ⟨S[i], du⟩.

use super::streams::{FAST_STREAMS, MAX_STREAMS, TOKENS_PER_TASK, load, split, store, unroll};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};
use crate::par::*;
use crate::{by_streams, cpu_both};
use pulp::{Arch, Simd, WithSimd};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct StreamAggregate {
    n: usize,
    d: usize,
}

/// dS of [`StreamAggregate`]: inputs pre, du, and with `accumulate` a gradient to add to; output dS.
#[derive(Clone, Debug)]
pub struct StreamAggregateGrad {
    n: usize,
    d: usize,
    accumulate: bool,
}

/// dpre of [`StreamAggregate`]: inputs S, du; output dpre.
#[derive(Clone, Debug)]
pub struct StreamAggregateCoef {
    n: usize,
    d: usize,
}

/// Σ_i pre[i] S[i] of consecutive tokens.
struct Forward<'a, const N: usize>(&'a [f32], &'a [f32], &'a mut [f32], usize);

impl<const N: usize> WithSimd for Forward<'_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Forward(s, pre, u, d) = self;
        let tokens = s.chunks_exact(N * d).zip(pre.chunks_exact(N));
        for ((s, pre), u) in tokens.zip(u.chunks_exact_mut(d)) {
            let x = split::<N>(s);
            let mut p = [simd.splat_f32s(0.0); N];
            for i in 0..N {
                p[i] = simd.splat_f32s(pre[i]);
            }
            let mut c = 0;
            while c + S::F32_LANES <= d {
                combine::<S, N, true>(simd, &x, &p, u, c);
                c += S::F32_LANES;
            }
            if c < d {
                combine::<S, N, false>(simd, &x, &p, u, c);
            }
        }
    }
}

#[inline(always)]
fn combine<S: Simd, const N: usize, const FULL: bool>(
    simd: S,
    x: &[&[f32]; N],
    p: &[S::f32s; N],
    u: &mut [f32],
    c: usize,
) {
    let mut sum = simd.mul_f32s(p[0], load::<S, FULL>(simd, x[0], c));
    for i in 1..N {
        sum = simd.mul_add_e_f32s(p[i], load::<S, FULL>(simd, x[i], c), sum);
    }
    store::<S, FULL>(simd, u, c, sum);
}

/// dpre of consecutive tokens.
struct Coef<'a, const N: usize>(&'a [f32], &'a [f32], &'a mut [f32], usize);

impl<const N: usize> WithSimd for Coef<'_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Coef(s, du, dpre, d) = self;
        let tokens = s.chunks_exact(N * d).zip(du.chunks_exact(d));
        for ((s, du), dpre) in tokens.zip(dpre.chunks_exact_mut(N)) {
            let x = split::<N>(s);
            let mut sums = [simd.splat_f32s(0.0); N];
            let mut c = 0;
            while c + S::F32_LANES <= d {
                inner::<S, N, true>(simd, &x, du, &mut sums, c);
                c += S::F32_LANES;
            }
            if c < d {
                inner::<S, N, false>(simd, &x, du, &mut sums, c);
            }
            for i in 0..N {
                dpre[i] = simd.reduce_sum_f32s(sums[i]);
            }
        }
    }
}

#[inline(always)]
fn inner<S: Simd, const N: usize, const FULL: bool>(
    simd: S,
    x: &[&[f32]; N],
    du: &[f32],
    sums: &mut [S::f32s; N],
    c: usize,
) {
    let v = load::<S, FULL>(simd, du, c);
    for i in 0..N {
        sums[i] = simd.mul_add_e_f32s(load::<S, FULL>(simd, x[i], c), v, sums[i]);
    }
}

fn forward<const N: usize>(s: &[f32], pre: &[f32], u: &mut [f32], d: usize) {
    Arch::new().dispatch(Forward::<N>(s, pre, u, d))
}

fn coef<const N: usize>(s: &[f32], du: &[f32], dpre: &mut [f32], d: usize) {
    Arch::new().dispatch(Coef::<N>(s, du, dpre, d))
}

impl StreamAggregate {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (n, d) = (self.n, self.d);
        let (s, pre, u) = (c.input(0), c.input(1), c.output(0));
        u.par_chunks_mut(TOKENS_PER_TASK * d).enumerate().for_each(|(b, u)| {
            let at = b * TOKENS_PER_TASK;
            let (s, pre) = (&s[at * n * d..], &pre[at * n..]);
            if size_of::<T>() == 4 && n <= FAST_STREAMS {
                let (s, pre) = (bytemuck::cast_slice(s), bytemuck::cast_slice(pre));
                return by_streams!(n, forward(s, pre, bytemuck::cast_slice_mut(u), d));
            }
            for ((s, pre), u) in s.chunks_exact(n * d).zip(pre.chunks_exact(n)).zip(u.chunks_exact_mut(d)) {
                for (c, u) in u.iter_mut().enumerate() {
                    *u = (0..n).map(|i| pre[i] * s[i * d + c]).sum();
                }
            }
        });
    }
}

impl StreamAggregateGrad {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (n, d) = (self.n, self.d);
        let (pre, du) = (c.input(0), c.input(1));
        let ds = c.output(0);
        // the gradient to add to is either elsewhere or already in ds
        let in_place = self.accumulate && c.input_raw(2).0 == ds.as_ptr();
        let before = (self.accumulate && !in_place).then(|| c.input(2));
        ds.par_chunks_mut(TOKENS_PER_TASK * n * d).enumerate().for_each(|(b, ds)| {
            T::simd(
                #[inline(always)]
                || {
                    let at = b * TOKENS_PER_TASK;
                    let rows = ds.chunks_exact_mut(d).zip(&pre[at * n..]);
                    for (k, (row, &p)) in rows.enumerate() {
                        let t = at + k / n;
                        let du = &du[t * d..(t + 1) * d];
                        if in_place {
                            super::real::axpy(p, du, row);
                        } else if let Some(z) = before {
                            let z = &z[(at * n + k) * d..][..d];
                            for ((y, x), z) in row.iter_mut().zip(du).zip(z) {
                                *y = *z + p * *x;
                            }
                        } else {
                            for (y, x) in row.iter_mut().zip(du) {
                                *y = p * *x;
                            }
                        }
                    }
                },
            );
        });
    }
}

impl StreamAggregateCoef {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (n, d) = (self.n, self.d);
        let (s, du, dpre) = (c.input(0), c.input(1), c.output(0));
        dpre.par_chunks_mut(TOKENS_PER_TASK * n).enumerate().for_each(|(b, dpre)| {
            let at = b * TOKENS_PER_TASK;
            let (s, du) = (&s[at * n * d..], &du[at * d..]);
            if size_of::<T>() == 4 && n <= FAST_STREAMS {
                let (s, du) = (bytemuck::cast_slice(s), bytemuck::cast_slice(du));
                return by_streams!(n, coef(s, du, bytemuck::cast_slice_mut(dpre), d));
            }
            for ((s, du), dpre) in s.chunks_exact(n * d).zip(du.chunks_exact(d)).zip(dpre.chunks_exact_mut(n))
            {
                for (s, dpre) in s.chunks_exact(d).zip(dpre) {
                    *dpre = super::real::dot(s, du);
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
    (tokens, n, d): (usize, usize, usize),
    split: bool,
    bindings: Vec<Bind>,
) -> GpuLaunch {
    let (unit, elem, dot) =
        if d.is_multiple_of(4) { (4, "vec4<f32>", "dot(a, b)") } else { (1, "f32", "a * b") };
    let width = d / unit;
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
    .into()
}

impl Op for StreamAggregate {
    fn name(&self) -> &'static str {
        "stream_aggregate"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        let mut dims = inputs[0].dims();
        dims.remove(dims.len() - 2);
        vec![Shape::new(&dims)]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        2.0 * inputs[0].len() as f64
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let du = v.grads[0].expect("called with a gradient");
        let (s, pre) = (v.inputs[0], v.inputs[1]);
        let (n, d) = (self.n, self.d);
        let dpre = v.wanted[1].then(|| g.push(StreamAggregateCoef { n, d }, &[s, du]));
        let ds = v.wanted[0].then(|| g.push(StreamAggregateGrad { n, d, accumulate: false }, &[pre, du]));
        vec![ds.map(|t| t.reshaped(s.shape())), dpre.map(|t| t.reshaped(pre.shape()))]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let size = (r.inputs[0].len() / (self.n * self.d), self.n, self.d);
        let text = include_str!("../../shaders/stream_aggregate.wgsl");
        kernel("stream_aggregate", text, r, size, true, vec![Bind::In(0), Bind::In(1), Bind::Out(0)])
    }
}

impl Op for StreamAggregateGrad {
    fn name(&self) -> &'static str {
        "stream_aggregate_grad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        let (t, n, d) = (inputs[1].len() / self.d, self.n, self.d);
        assert_eq!(inputs[0].len(), t * n);
        assert!(!self.accumulate || inputs[2].len() == t * n * d);
        vec![Shape::new(&[t, n, d])]
    }

    fn flops(&self, _: &[Shape], outputs: &[Shape]) -> f64 {
        (1 + self.accumulate as usize) as f64 * outputs[0].len() as f64
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("second derivatives are not needed")
    }

    fn may_alias(&self) -> Vec<(usize, usize)> {
        if self.accumulate { vec![(2, 0)] } else { vec![] }
    }

    fn with_accumulate(&self) -> Option<Box<dyn Op>> {
        (!self.accumulate).then(|| Box::new(StreamAggregateGrad { accumulate: true, ..*self }) as Box<dyn Op>)
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let size = (r.inputs[1].len() / self.d, self.n, self.d);
        let mut bind = vec![Bind::In(0), Bind::In(1), Bind::Out(0)];
        let (mut decl, mut add) = ("", "");
        if self.accumulate && r.in_place.is_some() {
            add = " + y[at + $iu * p.width]";
        } else if self.accumulate {
            bind.push(Bind::In(2));
            decl = "@group(0) @binding(3) var<storage, read> z : array<{{ELEM}}>;";
            add = " + z[at + $iu * p.width]";
        }
        let text = include_str!("../../shaders/stream_aggregate_grad.wgsl")
            .replace("{{MORE}}", decl)
            .replace("{{ADD}}", add)
            .replace("{{UNIFORM}}", &bind.len().to_string());
        kernel("stream_aggregate_grad", &text, r, size, true, bind)
    }
}

impl Op for StreamAggregateCoef {
    fn name(&self) -> &'static str {
        "stream_aggregate_coef"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        vec![Shape::new(&[inputs[0].len() / (self.n * self.d), self.n])]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        2.0 * inputs[0].len() as f64
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("second derivatives are not needed")
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let size = (r.inputs[0].len() / (self.n * self.d), self.n, self.d);
        let text = include_str!("../../shaders/stream_aggregate_coef.wgsl");
        kernel("stream_aggregate_coef", text, r, size, false, vec![Bind::In(0), Bind::In(1), Bind::Out(0)])
    }
}

impl Graph {
    /// `S[.., n, d], pre[.., n] → u[.., d]`: u = Σ_i pre[i] S[i].
    ///
    /// # Panics
    /// If the sizes do not fit or n is not in 1..=8.
    pub fn stream_aggregate(&mut self, s: Tensor, pre: Tensor) -> Tensor {
        let dims = s.shape().dims();
        assert!(dims.len() >= 3, "stream_aggregate of {}", s.shape());
        let (n, d) = (dims[dims.len() - 2], dims[dims.len() - 1]);
        assert!(
            n <= MAX_STREAMS && pre.shape().len() * d == s.shape().len(),
            "stream_aggregate of {} with pre {}",
            s.shape(),
            pre.shape()
        );
        self.push(StreamAggregate { n, d }, &[s, pre])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::testing::check_device;
    use crate::graph::tests::{check_vjp, run64};
    use crate::graph::{fuse, plan};

    #[test]
    fn adjoint() {
        for (t, n, d) in [(3, 1, 5), (5, 2, 4), (1, 3, 1), (7, 4, 18), (2, 8, 3)] {
            check_vjp(&[("s", vec![t, n, d]), ("pre", vec![t, n])], |g, x| {
                vec![g.stream_aggregate(x[0], x[1])]
            });
        }
    }

    #[test]
    fn weights_streams() {
        let mut g = Graph::new();
        let (s, p) = (g.state("s", [1, 2, 3]), g.state("pre", [1, 2]));
        let u = g.stream_aggregate(s, p);
        assert_eq!(u.shape(), Shape::new(&[1, 3]));
        let st = [("s", vec![1., 2., 3., 10., 20., 30.]), ("pre", vec![2.0, 0.5])];
        assert_eq!(run64(&g, &[u], &st)[0], [7.0, 14.0, 21.0]);
    }

    #[test]
    fn gradients_of_the_state_form_a_chain() {
        // merge, aggregate: the sum of their gradients is no node of its own, and runs in place
        let mut g = Graph::new();
        let s0 = g.state("s", [6, 4, 8]);
        let (pre, res, post) = (g.state("pre", [6, 4]), g.state("res", [6, 4, 4]), g.state("post", [6, 4]));
        let s = g.affine(s0, 2.0, 0.0);
        let u = g.stream_aggregate(s, pre);
        let y = g.stream_merge(s, u, res, post);
        let loss = g.sum_all(y);
        let d = g.gradients(loss, &[s0]);
        let (f, keep) = fuse::fuse(&g, &d);
        let order = plan::live_nodes(&f, &keep);
        let names: Vec<&str> = order.iter().map(|&n| f.nodes()[n].op.name()).collect();
        assert_eq!(names.iter().filter(|n| **n == "stream_aggregate_grad").count(), 1, "{names:?}");
        let p = plan::plan(&f, &keep, &|_| vec![], &|op| op.may_alias());
        let n = *order.iter().find(|&&n| f.nodes()[n].op.name() == "stream_aggregate_grad").unwrap();
        assert_eq!(f.nodes()[n].inputs.len(), 3, "accumulates");
        assert_eq!(p.in_place.get(&n), Some(&(2, 0)));
    }

    #[test]
    fn device() {
        for (t, n, d) in [(300, 4, 32), (257, 4, 7), (129, 1, 1), (70, 8, 36), (65, 3, 20)] {
            check_device(|g| {
                let (s0, p) = (g.state("s", [t, n, d]), g.state("pre", [t, n]));
                let s = g.affine(s0, 2.0, 0.0);
                let u = g.stream_aggregate(s, p);
                let v = g.mul(s, s);
                vec![u, v]
            });
        }
    }

    #[test]
    fn shaders_are_valid() {
        for n in 1..=8 {
            for d in [4, 5] {
                for accumulate in [false, true] {
                    let mut g = Graph::new();
                    let (s, p) = (g.state("s", [3, n, d]), g.state("pre", [3, n]));
                    let u = g.stream_aggregate(s, p);
                    let l = g.sum_all(u);
                    g.gradients(l, &[s, p]);
                    if accumulate {
                        let op = StreamAggregateGrad { n, d, accumulate: false }.with_accumulate().unwrap();
                        g.push_arc(op.into(), &[p, u, s]);
                    }
                    crate::ops::streams::tests::validate_graph(&g);
                }
            }
        }
    }
}
