//! `layer_norm`: over the last axis of `x [.., d]`, `y = (x − mean)/√(var + 1e-5)·γ + β` with the biased
//! variance, `γ [d]`, `β [d]` (Ba et al., arXiv 1607.06450; math.md section 3).
//!
//! The row's first element is subtracted before the mean is taken: with a plain mean, a row of mean 1e4
//! loses three digits in f32, and E[x²] − mean² loses all. The second output, `[rows, 2]`, keeps
//! (mean − first element, 1/σ) for the backward pass, which would need two sums a row to find them again.

use super::cpu::{par_rows, par_rows2};
use super::norm_params::NormParamsGrad;
use super::row::{by_width, fetch, kernel, row_flags, shader, sum1, sum3};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::Bind;
use crate::graph::{Graph, Shape, Tensor};

/// ε of every layer norm.
pub(crate) const EPS: f64 = 1e-5;

/// Forward: x, γ, β → y, stats.
#[derive(Clone, Debug)]
pub struct LayerNorm;

/// Backward to x: x, γ, stats, dy (, a gradient to add) → dx.
#[derive(Clone, Debug)]
pub struct LayerNormGrad {
    accumulate: bool,
}

#[inline(always)]
fn forward<T: Real, const D: usize>(
    d: usize,
    x: &[T],
    gamma: &[T],
    beta: &[T],
    y: &mut [T],
    stats: &mut [T],
) {
    let d = if D > 0 { D } else { d };
    let (inv, eps) = (T::of(1.0 / d as f64), T::of(EPS));
    let (gamma, beta) = (&gamma[..d], &beta[..d]);
    for ((x, y), s) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(stats.as_chunks_mut::<2>().0) {
        let x0 = x[0];
        let m = sum1(x, |v| v - x0) * inv;
        let var = sum1(x, |v| {
            let t = (v - x0) - m;
            t * t
        });
        let r = T::ONE / (var * inv + eps).sqrt();
        for (((y, x), g), b) in y.iter_mut().zip(x).zip(gamma).zip(beta) {
            *y = ((*x - x0) - m) * r * *g + *b;
        }
        *s = [m, r];
    }
}

/// mean(g) and mean(g·x̂)/σ of one row, g = dy·γ.
#[inline(always)]
fn sums<T: Real>(dy: &[T], x: &[T], gamma: &[T], m: T, r: T) -> (T, T) {
    let inv = T::of(1.0 / x.len() as f64);
    let x0 = x[0];
    let (a, b) = sum3(dy, gamma, x, |dy, g, x| (dy * g, dy * g * ((x - x0) - m)));
    (a * inv, b * inv * r * r)
}

/// Works on `dx`, which holds dy when called, or, if dy comes separately, the gradient to add.
#[inline(always)]
fn backward<T: Real, const D: usize>(
    d: usize,
    x: &[T],
    gamma: &[T],
    stats: &[T],
    dy: Option<&[T]>,
    dx: &mut [T],
) {
    let d = if D > 0 { D } else { d };
    let gamma = &gamma[..d];
    let rows = x.chunks_exact(d).zip(dx.chunks_exact_mut(d)).zip(stats.as_chunks::<2>().0);
    for (i, ((x, dx), &[m, r])) in rows.enumerate() {
        let x0 = x[0];
        if let Some(dy) = dy {
            let dy = &dy[i * d..][..d];
            let (a, b) = sums(dy, x, gamma, m, r);
            for (((o, dy), g), x) in dx.iter_mut().zip(dy).zip(gamma).zip(x) {
                *o += (*dy * *g - a - ((*x - x0) - m) * b) * r;
            }
        } else {
            let (a, b) = sums(dx, x, gamma, m, r);
            for ((o, g), x) in dx.iter_mut().zip(gamma).zip(x) {
                *o = (*o * *g - a - ((*x - x0) - m) * b) * r;
            }
        }
    }
}

impl LayerNorm {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (x, gamma, beta) = (c.input(0), c.input(1), c.input(2));
        let (y, stats) = (c.output(0), c.output(1));
        let d = gamma.len();
        par_rows2(
            y,
            d,
            stats,
            2,
            #[inline(always)]
            |first, y, stats| {
                let x = &x[first * d..][..y.len()];
                by_width!(d, forward(d, x, gamma, beta, y, stats))
            },
        );
    }
}

impl Op for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        let d = inputs[0].last();
        assert!(
            inputs[1].len() == d && inputs[2].len() == d,
            "layer_norm: γ {} and β {} for rows of {d}",
            inputs[1],
            inputs[2]
        );
        vec![inputs[0], Shape::new(&[inputs[0].len() / d, 2])]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        9.0 * inputs[0].len() as f64
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dy = v.grads[0].expect("called with a gradient");
        let (x, gamma, stats) = (v.inputs[0], v.inputs[1], v.outputs[1]);
        // parameters first: dx may then be written over dy
        let (mut dgamma, mut dbeta) = (None, None);
        if v.wanted[1] || v.wanted[2] {
            let p = g.push_multi(NormParamsGrad { layer: true }, &[x, stats, dy]);
            (dgamma, dbeta) = (Some(p[0]), Some(p[1]));
        }
        let dx = v.wanted[0].then(|| g.push(LayerNormGrad { accumulate: false }, &[x, gamma, stats, dy]));
        vec![dx, dgamma, dbeta]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let d = r.inputs[0].last();
        let rows = r.inputs[0].len() / d;
        let (n, flags) = row_flags(d);
        kernel(
            "layer_norm",
            shader(include_str!("../../shaders/layer_norm.wgsl"), &flags, &[("N", n)]),
            "main",
            vec![Bind::In(0), Bind::In(1), Bind::In(2), Bind::Out(0), Bind::Out(1)],
            &[rows as u32, n as u32, (1.0 / d as f32).to_bits(), (EPS as f32).to_bits()],
            rows,
        )
        .into()
    }
}

impl LayerNormGrad {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (x, gamma, stats) = (c.input(0), c.input(1), c.input(2));
        let d = gamma.len();
        // start: what dx holds at first, unless it is in place already
        let start = if self.accumulate { 4 } else { 3 };
        let start_at = c.input_raw(start).0;
        let dy = self.accumulate.then(|| c.input(3));
        let dx = c.output(0);
        let start = (start_at != dx.as_ptr()).then(|| c.input(start));
        par_rows(
            dx,
            d,
            #[inline(always)]
            |first, dx| {
                let (lo, n) = (first * d, dx.len());
                fetch(start, lo, dx);
                let (x, stats, dy) = (&x[lo..][..n], &stats[2 * first..], dy.map(|dy| &dy[lo..][..n]));
                by_width!(d, backward(d, x, gamma, stats, dy, dx))
            },
        );
    }
}

impl Op for LayerNormGrad {
    fn name(&self) -> &'static str {
        "layer_norm_grad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs.len(), if self.accumulate { 5 } else { 4 });
        vec![inputs[0]]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        13.0 * inputs[0].len() as f64
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("second derivatives of layer_norm are not needed")
    }

    fn may_alias(&self) -> Vec<(usize, usize)> {
        vec![(if self.accumulate { 4 } else { 3 }, 0)]
    }

    fn with_accumulate(&self) -> Option<Box<dyn Op>> {
        (!self.accumulate).then(|| Box::new(LayerNormGrad { accumulate: true }) as Box<dyn Op>)
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let d = r.inputs[0].last();
        let rows = r.inputs[0].len() / d;
        let (n, mut flags) = row_flags(d);
        let mut bindings = vec![Bind::In(0), Bind::In(1), Bind::In(2)];
        match (self.accumulate, r.in_place.is_some()) {
            (false, false) => {
                flags.push("plain");
                bindings.push(Bind::In(3));
            }
            (false, true) => flags.extend(["plain", "over_dy"]),
            (true, false) => {
                flags.push("acc");
                bindings.extend([Bind::In(3), Bind::In(4)]);
            }
            (true, true) => {
                flags.push("over_acc");
                bindings.push(Bind::In(3));
            }
        }
        bindings.push(Bind::Out(0));
        kernel(
            "layer_norm_grad",
            shader(include_str!("../../shaders/layer_norm_grad.wgsl"), &flags, &[("N", n)]),
            "main",
            bindings,
            &[rows as u32, n as u32, (1.0 / d as f32).to_bits(), 0],
            rows,
        )
        .into()
    }
}

impl Graph {
    /// Layer norm over the last axis of `x [.., d]` with `γ [d]` and `β [d]`.
    ///
    /// # Panics
    /// If γ or β does not have `d` elements.
    pub fn layer_norm(&mut self, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor {
        self.push_multi(LayerNorm, &[x, gamma, beta])[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::cpu::{CpuProgram, CpuState};
    use crate::graph::tests::{check_vjp, noise, run64};
    use crate::graph::{fuse, plan};
    use crate::ops::row::tests::validate;

    #[test]
    fn adjoint_meets_finite_differences() {
        for s in [vec![2, 3, 5], vec![7, 32], vec![1, 3], vec![3, 1], vec![4, 1, 21]] {
            let d = *s.last().unwrap();
            check_vjp(&[("x", s), ("g", vec![d]), ("b", vec![d])], |g, x| {
                // a residual sum around it: the gradient of x accumulates
                let y = g.layer_norm(x[0], x[1], x[2]);
                vec![g.add(x[0], y)]
            });
        }
    }

    #[test]
    fn residual_gradient_accumulates_in_place() {
        let mut g = Graph::new();
        let p = [g.state("x", [6, 5]), g.state("g", [5]), g.state("b", [5])];
        let x = g.affine(p[0], 2.0, 0.0);
        let y = g.layer_norm(x, p[1], p[2]);
        let z = g.add(x, y);
        let q = g.mul(z, z);
        let loss = g.sum_all(q);
        let grads = g.gradients(loss, &[p[0]]);
        let (f, keep) = fuse::fuse(&g, &grads);
        let live = plan::live_nodes(&f, &keep);
        let acc = live.iter().find(|&&n| f.nodes()[n].op.name() == "layer_norm_grad").unwrap();
        assert_eq!(f.nodes()[*acc].inputs.len(), 5);
        let states = [("x", noise(30, 1)), ("g", noise(5, 2)), ("b", noise(5, 3))];
        let (a, b) = (run64(&g, &grads, &states), run64(&f, &keep, &states));
        for (a, b) in a[0].iter().zip(&b[0]) {
            assert!((a - b).abs() < 1e-13);
        }
    }

    #[test]
    fn values_and_large_means() {
        // in f32, on rows with mean 1e4, against a naive loop in f64 over the same f32 numbers
        for (rows, d) in [(3, 1), (5, 7), (9, 32), (4, 256)] {
            let x: Vec<f32> = noise(rows * d, 1).iter().map(|v| (1e4 + v) as f32).collect();
            let gb = [noise(d, 2), noise(d, 3)];
            let mut g = Graph::new();
            let p = [g.state("x", [rows, d]), g.state("g", [d]), g.state("b", [d])];
            let y = g.layer_norm(p[0], p[1], p[2]);
            let mut program = CpuProgram::<f32>::new(g, &[y]);
            let f32s = |v: &[f64]| v.iter().map(|&v| v as f32).collect::<Vec<f32>>();
            let mut s = CpuState::default();
            s.values.insert("x".into(), x.clone().into());
            s.values.insert("g".into(), f32s(&gb[0]).into());
            s.values.insert("b".into(), f32s(&gb[1]).into());
            program.run(&mut s);
            let y = program.read(y);
            for (x, y) in x.chunks(d).zip(y.chunks(d)) {
                let mean = x.iter().map(|&v| v as f64).sum::<f64>() / d as f64;
                let var = x.iter().map(|&v| (v as f64 - mean).powi(2)).sum::<f64>() / d as f64;
                for i in 0..d {
                    let want = (x[i] as f64 - mean) / (var + 1e-5).sqrt() * gb[0][i] + gb[1][i];
                    assert!((y[i] as f64 - want).abs() < 3e-6, "{} {want}", y[i]);
                }
            }
        }
    }

    #[test]
    fn shaders_are_valid() {
        for d in [1usize, 6, 32, 37, 256] {
            validate(&LayerNorm, &[&[3, 5, d], &[d], &[d]]);
            let x = [3, 5, d];
            validate(&LayerNormGrad { accumulate: false }, &[&x, &[d], &[15, 2], &x]);
            validate(&LayerNormGrad { accumulate: true }, &[&x, &[d], &[15, 2], &x, &x]);
        }
    }

    #[test]
    fn device_agrees() {
        for s in
            [vec![2, 3, 5], vec![7, 32], vec![131, 1], vec![1, 12], vec![9, 40, 7], vec![5, 37], vec![5, 100]]
        {
            let d = *s.last().unwrap();
            crate::graph::testing::check_device(|g| {
                let (x, gamma, beta) = (g.state("x", &s[..]), g.state("g", [d]), g.state("b", [d]));
                let y = g.layer_norm(x, gamma, beta);
                // mid-graph: the gradient accumulates in place
                let x2 = g.affine(x, 2.0, 1.0);
                let z = g.layer_norm(x2, gamma, beta);
                vec![y, g.add(z, x2)]
            });
        }
    }
}
