//! `fm`: x `[B, m, d]` → `[B, d]`, ½[(Σ_i x_i)² − Σ_i x_i²] elementwise: the sum over all pairs i < j of
//! x_i ⊙ x_j in O(m·d) (factorisation machine; math.md 2.7). Backward: dx_i = dy ⊙ (Σ_j x_j − x_i).

use super::copy::{typed, unit, words};
use super::cpu::{par_rows, rows_per_task};

use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};
use crate::par::*;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Fm {
    d: usize,
}

/// The adjoint of [`Fm`]: inputs x and dy.
#[derive(Clone, Debug)]
pub struct FmGrad {
    d: usize,
}

impl Fm {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let d = self.d;
        let x = c.input(0);
        let out = c.output(0);
        let md = x.len() / (out.len() / d);
        // tasks by what is read, not by what is written
        let rows = rows_per_task(md);
        out.par_chunks_mut(rows * d).zip(x.par_chunks(rows * md)).for_each(|(out, x)| {
            T::simd(
                #[inline(always)]
                || {
                    let mut squares = vec![T::ZERO; d];
                    for (out, x) in out.chunks_exact_mut(d).zip(x.chunks_exact(md)) {
                        pair_sum(x, &mut squares, out);
                    }
                },
            )
        });
    }
}

/// ½[(Σ_i x_i)² − Σ_i x_i²] of one example.
#[inline(always)]
fn pair_sum<T: Real>(x: &[T], squares: &mut [T], out: &mut [T]) {
    let half = T::of(0.5);
    out.fill(T::ZERO);
    squares.fill(T::ZERO);
    for x in x.chunks_exact(out.len()) {
        for ((s, q), x) in out.iter_mut().zip(&mut *squares).zip(x) {
            *s += *x;
            *q += *x * *x;
        }
    }
    for (s, q) in out.iter_mut().zip(squares) {
        *s = half * (*s * *s - *q);
    }
}

/// dy ⊙ (Σ_j x_j − x_i) of one example.
#[inline(always)]
fn pair_sum_grad<T: Real>(x: &[T], dy: &[T], sum: &mut [T], out: &mut [T]) {
    let d = dy.len();
    sum.fill(T::ZERO);
    for x in x.chunks_exact(d) {
        for (s, x) in sum.iter_mut().zip(x) {
            *s += *x;
        }
    }
    for (out, x) in out.chunks_exact_mut(d).zip(x.chunks_exact(d)) {
        for (((o, x), s), g) in out.iter_mut().zip(x).zip(&*sum).zip(dy) {
            *o = *g * (*s - *x);
        }
    }
}

fn launch(r: &GpuRequest<'_>, grad: bool) -> GpuLaunch {
    let (b, m, d) = (r.inputs[0].dim(0), r.inputs[0].dim(1), r.inputs[0].dim(2));
    let unit = unit(&[d]);
    let total = b * d / unit;
    let (dy, store, label) = if grad {
        (
            "@group(0) @binding(1) var<storage, read> dy : array<{{T}}>;",
            "let g = dy[id];\n    for (var i = 0u; i < p.m; i += 1u) {\n        \
             y[at + i * p.width] = g * (s - x[at + i * p.width]);\n    }",
            "fm_grad",
        )
    } else {
        ("", "y[id] = 0.5 * (s * s - q);", "fm")
    };
    let source = include_str!("../../shaders/fm.wgsl")
        .replace("{{dy}}", dy)
        .replace("{{store}}", store)
        .replace("{{y}}", &(1 + grad as usize).to_string())
        .replace("{{p}}", &(2 + grad as usize).to_string());
    let mut bindings: Vec<Bind> = (0..1 + grad as usize).map(Bind::In).collect();
    bindings.push(Bind::Out(0));
    Kernel {
        label: label.into(),
        source: typed(&source, unit).into(),
        entry: "main",
        constants: vec![],
        bindings,
        params: words(&[total as u32, m as u32, (d / unit) as u32]),
        groups: fold_groups(total.div_ceil(64) as u64),
    }
    .into()
}

impl Op for Fm {
    fn name(&self) -> &'static str {
        "fm"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        vec![Shape::new(&[inputs[0].dim(0), inputs[0].dim(2)])]
    }

    fn flops(&self, inputs: &[Shape], outputs: &[Shape]) -> f64 {
        (3 * inputs[0].len() + 3 * outputs[0].len()) as f64
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dy = v.grads[0].expect("called with a gradient");
        vec![Some(g.push(FmGrad { d: self.d }, &[v.inputs[0], dy]))]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        launch(r, false)
    }
}

impl FmGrad {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let d = self.d;
        let (x, dy) = (c.input(0), c.input(1));
        let md = x.len() / (dy.len() / d);
        par_rows(
            c.output(0),
            md,
            #[inline(always)]
            |first, out| {
                let mut sum = vec![T::ZERO; d];
                for (k, out) in out.chunks_exact_mut(md).enumerate() {
                    let x = &x[(first + k) * md..][..md];
                    let dy = &dy[(first + k) * d..][..d];
                    pair_sum_grad(x, dy, &mut sum, out);
                }
            },
        );
    }
}

impl Op for FmGrad {
    fn name(&self) -> &'static str {
        "fm_grad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        vec![inputs[0]]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        (3 * inputs[0].len()) as f64
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("fm_grad: second derivatives are not needed")
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        launch(r, true)
    }
}

impl Graph {
    /// Sum over all pairs of slots of their elementwise products: x `[B, m, d]` → `[B, d]`.
    pub fn fm(&mut self, x: Tensor) -> Tensor {
        assert_eq!(x.shape().rank(), 3, "fm needs [batch, slots, width], not {}", x.shape());
        self.push(Fm { d: x.dim(2) }, &[x])
    }
}

#[cfg(test)]
mod tests {
    use super::super::copy::tests::validated;
    use super::*;
    use crate::graph::tests::{check_vjp, noise, run64};

    #[test]
    fn vjp() {
        for d in [vec![2, 5, 3], vec![1, 1, 1], vec![3, 2, 17]] {
            check_vjp(&[("x", d)], |g, x| vec![g.fm(x[0])]);
        }
    }

    #[test]
    fn values_are_the_sum_over_pairs() {
        let (b, m, d) = (300, 5, 7);
        let mut g = Graph::new();
        let x = g.state("x", [b, m, d]);
        let y = g.fm(x);
        let v = noise(b * m * d, 2);
        let out = run64(&g, &[y], &[("x", v.clone())]);
        for e in 0..b {
            for c in 0..d {
                let at = |i: usize| v[(e * m + i) * d + c];
                let want: f64 =
                    (0..m).flat_map(|j| (0..j).map(move |i| (i, j))).map(|(i, j)| at(i) * at(j)).sum();
                assert!((out[0][e * d + c] - want).abs() < 1e-13);
            }
        }
    }

    #[test]
    fn shaders_validate() {
        for d in [8, 3] {
            validated(&Fm { d }, &[&[3, 5, d]]);
            validated(&FmGrad { d }, &[&[3, 5, d], &[3, d]]);
        }
    }

    #[test]
    fn device() {
        for (b, m, d) in [(3, 5, 3), (70, 27, 32), (1, 1, 4), (2, 8, 1)] {
            crate::graph::testing::check_device(|g| {
                let x = g.state("x", [b, m, d]);
                vec![g.fm(x)]
            });
        }
    }
}
