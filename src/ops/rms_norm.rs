//! `rms_norm`: over the last axis of `x [.., d]`, `y = x·r·w`, `r = 1/√(mean(x²) + ε)`, with or without a
//! weight `w [d]` (Zhang and Sennrich, arXiv 1910.07467; math.md section 4, ε = 1e-6).
//!
//! The second output, `[rows, 1]`, keeps r for the backward pass.

use super::cpu::{par_rows, par_rows2};
use super::norm_params::NormParamsGrad;
use super::row::{by_width, fetch, kernel, row_flags, shader, sum1, sum3};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::Bind;
use crate::graph::{Graph, Shape, Tensor};

/// Forward: x (, w) → y, r.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    pub(crate) eps: f64,
    pub(crate) weight: bool,
}

/// Backward to x: x, r, dy (, w) (, a gradient to add) → dx.
#[derive(Clone, Debug)]
pub struct RmsNormGrad {
    weight: bool,
    accumulate: bool,
}

#[inline(always)]
fn forward<T: Real, const D: usize>(d: usize, eps: T, x: &[T], w: &[T], y: &mut [T], stats: &mut [T]) {
    let d = if D > 0 { D } else { d };
    let inv = T::of(1.0 / d as f64);
    let w = &w[..d];
    for ((x, y), s) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(stats) {
        let r = T::ONE / (sum1(x, |v| v * v) * inv + eps).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
            *y = *x * r * *w;
        }
        *s = r;
    }
}

/// mean(dy·w·x) of one row.
#[inline(always)]
fn mean<T: Real>(dy: &[T], x: &[T], w: &[T]) -> T {
    sum3(dy, w, x, |dy, w, x| (dy * w * x, T::ZERO)).0 * T::of(1.0 / x.len() as f64)
}

/// Works on `dx`, which holds dy when called, or, if dy comes separately, the gradient to add.
#[inline(always)]
fn backward<T: Real, const D: usize>(
    d: usize,
    x: &[T],
    w: &[T],
    stats: &[T],
    dy: Option<&[T]>,
    dx: &mut [T],
) {
    let d = if D > 0 { D } else { d };
    let w = &w[..d];
    for (i, ((x, dx), &r)) in x.chunks_exact(d).zip(dx.chunks_exact_mut(d)).zip(stats).enumerate() {
        if let Some(dy) = dy {
            let dy = &dy[i * d..][..d];
            let b = mean(dy, x, w) * r * r;
            for (((o, dy), w), x) in dx.iter_mut().zip(dy).zip(w).zip(x) {
                *o += (*dy * *w - *x * b) * r;
            }
        } else {
            let b = mean(dx, x, w) * r * r;
            for ((o, w), x) in dx.iter_mut().zip(w).zip(x) {
                *o = (*o * *w - *x * b) * r;
            }
        }
    }
}

impl RmsNorm {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let x = c.input(0);
        let (y, stats) = (c.output(0), c.output(1));
        let d = x.len() / stats.len();
        let ones = if self.weight { vec![] } else { vec![T::ONE; d] };
        let w = if self.weight { c.input(1) } else { &ones };
        let eps = T::of(self.eps);
        par_rows2(
            y,
            d,
            stats,
            1,
            #[inline(always)]
            |first, y, stats| {
                let x = &x[first * d..][..y.len()];
                by_width!(d, forward(d, eps, x, w, y, stats))
            },
        );
    }
}

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        let d = inputs[0].last();
        assert!(!self.weight || inputs[1].len() == d, "rms_norm: weight {} for rows of {d}", inputs[1]);
        vec![inputs[0], Shape::new(&[inputs[0].len() / d, 1])]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        4.0 * inputs[0].len() as f64
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dy = v.grads[0].expect("called with a gradient");
        let (x, stats) = (v.inputs[0], v.outputs[1]);
        let mut grads = vec![None; v.inputs.len()];
        // the weight first: dx may then be written over dy
        if self.weight && v.wanted[1] {
            grads[1] = Some(g.push(NormParamsGrad { layer: false }, &[x, stats, dy]));
        }
        if v.wanted[0] {
            let mut inputs = vec![x, stats, dy];
            inputs.extend(&v.inputs[1..]);
            grads[0] = Some(g.push(RmsNormGrad { weight: self.weight, accumulate: false }, &inputs));
        }
        grads
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let d = r.inputs[0].last();
        let rows = r.inputs[0].len() / d;
        let (n, mut flags) = row_flags(d);
        let mut bindings = vec![Bind::In(0)];
        if self.weight {
            flags.push("weight");
            bindings.push(Bind::In(1));
        }
        bindings.extend([Bind::Out(0), Bind::Out(1)]);
        kernel(
            "rms_norm",
            shader(include_str!("../../shaders/rms_norm.wgsl"), &flags, &[("N", n)]),
            "main",
            bindings,
            &[rows as u32, n as u32, (1.0 / d as f32).to_bits(), (self.eps as f32).to_bits()],
            rows,
        )
        .into()
    }
}

impl RmsNormGrad {
    /// Position of the gradient to add.
    fn acc(&self) -> usize {
        3 + self.weight as usize
    }

    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (x, stats) = (c.input(0), c.input(1));
        let d = x.len() / stats.len();
        let ones = if self.weight { vec![] } else { vec![T::ONE; d] };
        let w = if self.weight { c.input(3) } else { &ones };
        // start: what dx holds at first, unless it is in place already
        let start = if self.accumulate { self.acc() } else { 2 };
        let start_at = c.input_raw(start).0;
        let dy = self.accumulate.then(|| c.input(2));
        let dx = c.output(0);
        let start = (start_at != dx.as_ptr()).then(|| c.input(start));
        par_rows(
            dx,
            d,
            #[inline(always)]
            |first, dx| {
                let (lo, n) = (first * d, dx.len());
                fetch(start, lo, dx);
                let (x, stats, dy) = (&x[lo..][..n], &stats[first..], dy.map(|dy| &dy[lo..][..n]));
                by_width!(d, backward(d, x, w, stats, dy, dx))
            },
        );
    }
}

impl Op for RmsNormGrad {
    fn name(&self) -> &'static str {
        "rms_norm_grad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs.len(), self.acc() + self.accumulate as usize);
        vec![inputs[0]]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        7.0 * inputs[0].len() as f64
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("second derivatives of rms_norm are not needed")
    }

    fn may_alias(&self) -> Vec<(usize, usize)> {
        vec![(if self.accumulate { self.acc() } else { 2 }, 0)]
    }

    fn with_accumulate(&self) -> Option<Box<dyn Op>> {
        (!self.accumulate)
            .then(|| Box::new(RmsNormGrad { weight: self.weight, accumulate: true }) as Box<dyn Op>)
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let d = r.inputs[0].last();
        let rows = r.inputs[0].len() / d;
        let (n, mut flags) = row_flags(d);
        let in_place = r.in_place.is_some();
        let mut bindings = vec![Bind::In(0), Bind::In(1)];
        if self.accumulate || !in_place {
            bindings.push(Bind::In(2));
        } else {
            flags.push("over_dy");
        }
        if self.weight {
            flags.push("weight");
            bindings.push(Bind::In(3));
        }
        match (self.accumulate, in_place) {
            (false, _) => flags.push("plain"),
            (true, false) => {
                flags.push("acc");
                bindings.push(Bind::In(self.acc()));
            }
            (true, true) => flags.push("over_acc"),
        }
        bindings.push(Bind::Out(0));
        kernel(
            "rms_norm_grad",
            shader(include_str!("../../shaders/rms_norm_grad.wgsl"), &flags, &[("N", n)]),
            "main",
            bindings,
            &[rows as u32, n as u32, (1.0 / d as f32).to_bits(), 0],
            rows,
        )
        .into()
    }
}

impl Graph {
    /// RMS norm over the last axis of `x [.., d]`, with a weight `[d]` or none.
    ///
    /// # Panics
    /// If the weight does not have `d` elements.
    pub fn rms_norm(&mut self, x: Tensor, weight: Option<Tensor>, eps: f64) -> Tensor {
        let inputs: Vec<Tensor> = std::iter::once(x).chain(weight).collect();
        self.push_multi(RmsNorm { eps, weight: weight.is_some() }, &inputs)[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::tests::{check_vjp, noise, run64};
    use crate::ops::row::tests::validate;

    #[test]
    fn adjoint_meets_finite_differences() {
        for s in [vec![2, 3, 5], vec![7, 32], vec![1, 3], vec![3, 1], vec![4, 1, 21]] {
            let d = *s.last().unwrap();
            check_vjp(&[("x", s.clone()), ("w", vec![d])], |g, x| {
                let y = g.rms_norm(x[0], Some(x[1]), 1e-2);
                vec![g.add(x[0], y)]
            });
            check_vjp(&[("x", s)], |g, x| vec![g.rms_norm(x[0], None, 1e-2)]);
        }
    }

    #[test]
    fn values() {
        let (rows, d) = (4, 7);
        let s = [("x", noise(rows * d, 1)), ("w", noise(d, 2))];
        let mut g = Graph::new();
        let (x, w) = (g.state("x", [rows, d]), g.state("w", [d]));
        let y = [g.rms_norm(x, Some(w), 1e-6), g.rms_norm(x, None, 1e-6)];
        let got = run64(&g, &y, &s);
        for r in 0..rows {
            let x = &s[0].1[r * d..][..d];
            let ms = x.iter().map(|v| v * v).sum::<f64>() / d as f64;
            for i in 0..d {
                let want = x[i] / (ms + 1e-6).sqrt();
                assert!((got[1][r * d + i] - want).abs() < 1e-13);
                assert!((got[0][r * d + i] - want * s[1].1[i]).abs() < 1e-13);
            }
        }
    }

    #[test]
    fn shaders_are_valid() {
        for d in [1usize, 6, 32, 37, 256] {
            let x = [3, 5, d];
            validate(&RmsNorm { eps: 1e-6, weight: true }, &[&x, &[d]]);
            validate(&RmsNorm { eps: 1e-6, weight: false }, &[&x]);
            for accumulate in [false, true] {
                for weight in [false, true] {
                    let op = RmsNormGrad { weight, accumulate };
                    let mut inputs: Vec<&[usize]> = vec![&x, &[15, 1], &x];
                    let dd = [d];
                    if weight {
                        inputs.push(&dd);
                    }
                    if accumulate {
                        inputs.push(&x);
                    }
                    validate(&op, &inputs);
                }
            }
        }
    }

    #[test]
    fn device_agrees() {
        for s in [vec![2, 3, 5], vec![7, 32], vec![131, 1], vec![9, 40, 12], vec![5, 37], vec![5, 100]] {
            let d = *s.last().unwrap();
            crate::graph::testing::check_device(|g| {
                let (x, w) = (g.state("x", &s[..]), g.state("w", [d]));
                let y = g.rms_norm(x, Some(w), 1e-2);
                let x2 = g.affine(x, 2.0, 1.0);
                let z = g.rms_norm(x2, None, 1e-2);
                vec![y, g.add(z, x2)]
            });
        }
    }
}
