//! `reduce_sum`: view the input as `[outer, n, inner]`, sum over the middle axis to `[outer, inner]`.

use super::access::Access;
use super::cpu::{par_reduce_rows, par_rows};
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct ReduceSum {
    pub(crate) outer: usize,
    pub(crate) n: usize,
    pub(crate) inner: usize,
    shape: Shape,
}

/// The uniform block of `reduce.wgsl`.
#[derive(encase::ShaderType)]
struct Params {
    n: u32,
    inner: u32,
    runs: u32,
    per: u32,
    total: u32,
}

impl ReduceSum {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let x = c.input(0);
        let out = c.output(0);
        let (n, inner) = (self.n, self.inner);
        if self.outer == 1 && inner == 1 {
            par_reduce_rows(n, 16384, out, |r, p| p[0] += super::real::sum(&x[r]));
        } else if self.outer == 1 {
            par_reduce_rows(n, 16384 / inner, out, |r, p| {
                for row in x[r.start * inner..r.end * inner].chunks_exact(inner) {
                    for (o, v) in p.iter_mut().zip(row) {
                        *o += *v;
                    }
                }
            });
        } else if inner == 1 {
            par_rows(out, 1, |first, out| {
                for (o, row) in out.iter_mut().zip(x[first * n..].chunks_exact(n)) {
                    *o = super::real::sum(row);
                }
            });
        } else {
            par_rows(out, inner, |first, out| {
                for (k, o) in out.chunks_exact_mut(inner).enumerate() {
                    o.fill(T::ZERO);
                    for row in x[(first + k) * n * inner..].chunks_exact(inner).take(n) {
                        for (o, v) in o.iter_mut().zip(row) {
                            *o += *v;
                        }
                    }
                }
            });
        }
    }
}

impl Op for ReduceSum {
    fn name(&self) -> &'static str {
        "reduce_sum"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs[0].len(), self.outer * self.n * self.inner);
        vec![self.shape]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        inputs[0].len() as f64
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dy = v.grads[0].expect("called with a gradient");
        let shape = v.inputs[0].shape();
        let a = Access::new(vec![self.outer, self.n, self.inner], vec![self.inner, 0, 1], 0);
        vec![Some(g.map_access(&super::expr::Expr::input(0), &[(dy, a)], shape))]
    }

    cpu_both!();

    fn gpu(&self, _: &GpuRequest<'_>) -> GpuLaunch {
        // few sums over many rows: first over fixed runs of rows, then over the runs
        let outs = self.outer * self.inner;
        let runs = if outs >= 4096 || self.n < 128 {
            1
        } else {
            self.n.div_ceil(64).min((16384 / outs).max(1)).min(1024)
        };
        let stage = |from: Bind, to: Bind, n: usize, runs: usize| {
            let per = n.div_ceil(runs);
            Kernel {
                label: "reduce_sum".into(),
                source: include_str!("../../shaders/reduce.wgsl").into(),
                entry: "main",
                constants: vec![],
                bindings: vec![from, to],
                params: super::uniform(&Params {
                    n: n as u32,
                    inner: self.inner as u32,
                    runs: runs as u32,
                    per: per as u32,
                    total: (self.outer * runs * self.inner) as u32,
                }),
                groups: fold_groups((self.outer * runs * self.inner).div_ceil(64) as u64),
            }
        };
        if runs == 1 {
            return stage(Bind::In(0), Bind::Out(0), self.n, 1).into();
        }
        GpuLaunch {
            kernels: vec![
                stage(Bind::In(0), Bind::Scratch(0), self.n, runs),
                stage(Bind::Scratch(0), Bind::Out(0), runs, 1),
            ],
            scratch: vec![self.outer * runs * self.inner],
        }
    }
}

impl Graph {
    /// Sum over the middle axis of `x` seen as `[outer, n, inner]`, with the given output shape.
    pub fn reduce_sum(
        &mut self,
        x: Tensor,
        outer: usize,
        n: usize,
        inner: usize,
        shape: impl Into<Shape>,
    ) -> Tensor {
        let shape = shape.into();
        assert_eq!(shape.len(), outer * inner);
        if n == 1 {
            return x.reshaped(shape);
        }
        self.push(ReduceSum { outer, n, inner, shape }, &[x])
    }

    /// Sum of all elements, `[1]`.
    pub fn sum_all(&mut self, x: Tensor) -> Tensor {
        self.reduce_sum(x, 1, x.shape().len(), 1, [1])
    }

    /// Sum over one axis, which disappears (a vector becomes `[1]`).
    pub fn sum_axis(&mut self, x: Tensor, axis: usize) -> Tensor {
        let d = x.shape().dims();
        let mut rest: Vec<usize> = d.clone();
        rest.remove(axis);
        if rest.is_empty() {
            rest.push(1);
        }
        self.reduce_sum(x, d[..axis].iter().product(), d[axis], d[axis + 1..].iter().product(), &rest[..])
    }

    /// The adjoint of a broadcast: sums `x` over the axes that `a` repeats.
    pub(crate) fn reduce_access(&mut self, x: Tensor, a: &Access, shape: Shape) -> Tensor {
        assert_eq!(a.offset, 0, "slices have their own adjoint");
        let mut dims = a.dims.clone();
        let mut t = x;
        for k in (0..dims.len()).rev() {
            if a.strides[k] == 0 && dims[k] > 1 {
                let (outer, inner) = (dims[..k].iter().product(), dims[k + 1..].iter().product());
                t = self.reduce_sum(t, outer, dims[k], inner, [outer * inner]);
                dims[k] = 1;
            }
        }
        t.reshaped(shape)
    }
}
