//! `softmax`: over the last axis of `x [.., d]`, `y_i = e^(x_i − max x) / Σ_j e^(x_j − max x)`.

use super::cpu::par_rows;
use super::row::{by_width, fetch, kernel, max1, row_flags, shader};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::Bind;
use crate::graph::{Graph, Shape, Tensor};

/// Forward: x → y.
#[derive(Clone, Debug)]
pub struct Softmax {
    d: usize,
}

/// Backward: y, dy → dx.
#[derive(Clone, Debug)]
pub struct SoftmaxGrad {
    d: usize,
}

#[inline(always)]
fn forward<T: Real, const D: usize>(d: usize, y: &mut [T]) {
    let d = if D > 0 { D } else { d };
    for y in y.chunks_exact_mut(d) {
        let m = max1(y);
        for v in y.iter_mut() {
            *v = (*v - m).exp();
        }
        let r = T::ONE / super::real::sum(y);
        for v in y.iter_mut() {
            *v *= r;
        }
    }
}

#[inline(always)]
fn backward<T: Real, const D: usize>(d: usize, y: &[T], dx: &mut [T]) {
    let d = if D > 0 { D } else { d };
    for (y, dx) in y.chunks_exact(d).zip(dx.chunks_exact_mut(d)) {
        // dx does not change when a constant is taken from dy: the one at the largest y leaves nothing to
        // cancel where the row is saturated (dy − Σ dy·y would lose all but two digits there)
        let (mut top, mut at) = (y[0], dx[0]);
        for (y, dy) in y.iter().zip(dx.iter()) {
            if *y > top {
                (top, at) = (*y, *dy);
            }
        }
        for v in dx.iter_mut() {
            *v -= at;
        }
        let t = super::real::dot(y, dx);
        for (o, y) in dx.iter_mut().zip(y) {
            *o = *y * (*o - t);
        }
    }
}

fn launch(
    label: &'static str,
    text: &str,
    d: usize,
    rows: usize,
    in_place: bool,
    bindings: Vec<Bind>,
) -> GpuLaunch {
    let (n, mut flags) = row_flags(d);
    if in_place {
        flags.push("in_place");
    }
    kernel(label, shader(text, &flags, &[("N", n)]), "main", bindings, &[rows as u32, n as u32, 0, 0], rows)
        .into()
}

impl Softmax {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let d = self.d;
        let at = c.input_raw(0).0;
        let y = c.output(0);
        let x = (at != y.as_ptr()).then(|| c.input(0));
        par_rows(
            y,
            d,
            #[inline(always)]
            |first, y| {
                fetch(x, first * d, y);
                by_width!(d, forward(d, y))
            },
        );
    }
}

impl Op for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs[0].last(), self.d);
        vec![inputs[0]]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        5.0 * inputs[0].len() as f64
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dy = v.grads[0].expect("called with a gradient");
        vec![Some(g.push(SoftmaxGrad { d: self.d }, &[v.outputs[0], dy]))]
    }

    fn may_alias(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let in_place = r.in_place.is_some();
        let bindings = if in_place { vec![Bind::Out(0)] } else { vec![Bind::In(0), Bind::Out(0)] };
        let text = include_str!("../../shaders/softmax.wgsl");
        launch("softmax", text, self.d, r.inputs[0].len() / self.d, in_place, bindings)
    }
}

impl SoftmaxGrad {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let d = self.d;
        let y = c.input(0);
        let at = c.input_raw(1).0;
        let dx = c.output(0);
        let dy = (at != dx.as_ptr()).then(|| c.input(1));
        par_rows(
            dx,
            d,
            #[inline(always)]
            |first, dx| {
                fetch(dy, first * d, dx);
                let y = &y[first * d..][..dx.len()];
                by_width!(d, backward(d, y, dx))
            },
        );
    }
}

impl Op for SoftmaxGrad {
    fn name(&self) -> &'static str {
        "softmax_grad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        vec![inputs[0]]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        4.0 * inputs[0].len() as f64
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("second derivatives of softmax are not needed")
    }

    fn may_alias(&self) -> Vec<(usize, usize)> {
        vec![(1, 0)]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let in_place = r.in_place.is_some();
        let mut bindings = vec![Bind::In(0)];
        if !in_place {
            bindings.push(Bind::In(1));
        }
        bindings.push(Bind::Out(0));
        let text = include_str!("../../shaders/softmax_grad.wgsl");
        launch("softmax_grad", text, self.d, r.inputs[0].len() / self.d, in_place, bindings)
    }
}

impl Graph {
    /// Softmax over the last axis.
    pub fn softmax(&mut self, x: Tensor) -> Tensor {
        self.push(Softmax { d: x.shape().last() }, &[x])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::cpu::{CpuProgram, CpuState};
    use crate::graph::tests::check_vjp_at;
    use crate::ops::row::tests::validate;

    #[test]
    fn adjoint_meets_finite_differences() {
        for s in [vec![2, 3, 5], vec![5, 32], vec![1, 3], vec![3, 1], vec![4, 1, 21]] {
            check_vjp_at(&[("x", s)], 3.0, |g, x| vec![g.softmax(x[0])]);
        }
    }

    #[test]
    fn values_with_large_logits() {
        let x = [[1000f32, 999.0, -1000.0], [-3e4, -3e4, -3e4], [0.0, 1.0, 2.0]];
        let mut g = Graph::new();
        let t = g.state("x", [3, 3]);
        let y = g.softmax(t);
        let mut p = CpuProgram::<f32>::new(g, &[y]);
        let mut s = CpuState::default();
        s.values.insert("x".into(), x.concat().into());
        p.run(&mut s);
        let e = std::f32::consts::E;
        let want = [
            [e / (e + 1.0), 1.0 / (e + 1.0), 0.0],
            [1.0 / 3.0; 3],
            [0.090_030_57, 0.244_728_47, 0.665_240_96],
        ];
        for (y, w) in p.read(y).iter().zip(want.concat()) {
            assert!((y - w).abs() < 3e-7, "{y} {w}");
        }
    }

    #[test]
    fn shaders_are_valid() {
        for d in [1usize, 6, 32, 37, 256] {
            validate(&Softmax { d }, &[&[3, 5, d]]);
            validate(&SoftmaxGrad { d }, &[&[3, 5, d], &[3, 5, d]]);
        }
    }

    #[test]
    fn device_agrees() {
        for s in [vec![2, 3, 5], vec![7, 32], vec![131, 1], vec![9, 40, 27], vec![5, 14], vec![5, 100]] {
            crate::graph::testing::check_device(|g| {
                let x = g.state("x", &s[..]);
                let x2 = g.affine(x, 5.0, 1.0);
                vec![g.softmax(x), g.softmax(x2)]
            });
        }
    }
}
