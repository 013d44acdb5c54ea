//! `slice`: `len` entries of one axis from `start` on; `pad`, its adjoint: the same entries among zeros.
//!
//! Both see their tensors as `[outer, columns]`, columns being everything from the sliced axis inwards.

use super::copy::{par_copy, typed, unit, words};
use super::cpu::par_rows;
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Slice {
    pub(crate) axis: usize,
    pub(crate) start: usize,
    pub(crate) len: usize,
    full: Shape,
    part: Shape,
}

/// The adjoint of [`Slice`].
#[derive(Clone, Debug)]
pub struct Pad(Slice);

impl Slice {
    /// Elements inside one entry of the axis.
    fn inner(&self) -> usize {
        self.full.dims()[self.axis + 1..].iter().product()
    }

    /// Columns of the full tensor, of the part, and the first of the part's columns.
    fn columns(&self) -> (usize, usize, usize) {
        let inner = self.inner();
        (self.full.dim(self.axis) * inner, self.len * inner, self.start * inner)
    }

    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (full, part, offset) = self.columns();
        let x = c.input(0);
        let out = c.output(0);
        if out.len() == part {
            return par_copy(out, &x[offset..offset + part]);
        }
        par_rows(out, part, |first, out| {
            for (o, x) in out.chunks_exact_mut(part).zip(x[first * full..].chunks(full)) {
                o.copy_from_slice(&x[offset..offset + part]);
            }
        });
    }

    fn launch(&self, entry: &'static str, x: usize, y: usize, total: usize) -> GpuLaunch {
        let inner = self.inner();
        let (_, _, offset) = self.columns();
        let unit = unit(&[inner * self.start, x, y]);
        let total = total / unit;
        Kernel {
            label: entry.into(),
            source: typed(include_str!("../../shaders/slice.wgsl"), unit).into(),
            entry,
            constants: vec![],
            bindings: vec![Bind::In(0), Bind::Out(0)],
            params: words(&[total as u32, (x / unit) as u32, (y / unit) as u32, (offset / unit) as u32]),
            groups: fold_groups(total.div_ceil(64) as u64),
        }
        .into()
    }
}

impl Op for Slice {
    fn name(&self) -> &'static str {
        "slice"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs[0], self.full);
        vec![self.part]
    }

    fn flops(&self, _: &[Shape], _: &[Shape]) -> f64 {
        0.0
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dy = v.grads[0].expect("called with a gradient");
        vec![Some(g.push(Pad(self.clone()), &[dy]))]
    }

    cpu_both!();

    fn gpu(&self, _: &GpuRequest<'_>) -> GpuLaunch {
        let (full, part, _) = self.columns();
        self.launch("slice", full, part, self.part.len())
    }
}

impl Pad {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (full, part, offset) = self.0.columns();
        let x = c.input(0);
        par_rows(c.output(0), full, |first, out| {
            for (o, x) in out.chunks_exact_mut(full).zip(x[first * part..].chunks(part)) {
                o[..offset].fill(T::ZERO);
                o[offset..offset + part].copy_from_slice(x);
                o[offset + part..].fill(T::ZERO);
            }
        });
    }
}

impl Op for Pad {
    fn name(&self) -> &'static str {
        "pad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs[0], self.0.part);
        vec![self.0.full]
    }

    fn flops(&self, _: &[Shape], _: &[Shape]) -> f64 {
        0.0
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dy = v.grads[0].expect("called with a gradient");
        vec![Some(g.push(self.0.clone(), &[dy]))]
    }

    cpu_both!();

    fn gpu(&self, _: &GpuRequest<'_>) -> GpuLaunch {
        let (full, part, _) = self.0.columns();
        self.0.launch("pad", part, full, self.0.full.len())
    }
}

impl Graph {
    /// Entries `start .. start + len` of `axis`.
    pub fn slice(&mut self, x: Tensor, axis: usize, start: usize, len: usize) -> Tensor {
        let full = x.shape();
        let mut d = full.dims();
        assert!(
            axis < d.len() && len > 0 && start + len <= d[axis],
            "slice {start}..{} of axis {axis} of {full}",
            start + len
        );
        if len == d[axis] {
            return x;
        }
        d[axis] = len;
        self.push(Slice { axis, start, len, full, part: Shape::new(&d) }, &[x])
    }
}

#[cfg(test)]
mod tests {
    use super::super::copy::tests::validated;
    use super::*;
    use crate::graph::tests::{check_vjp, run64};

    #[test]
    fn vjp_along_every_axis() {
        check_vjp(&[("x", vec![3, 5, 4])], |g, x| {
            vec![
                g.slice(x[0], 0, 1, 2),
                g.slice(x[0], 1, 0, 3),
                g.slice(x[0], 1, 4, 1),
                g.slice(x[0], 2, 1, 2),
                g.slice(x[0], 2, 0, 4),
            ]
        });
        check_vjp(&[("x", vec![7])], |g, x| {
            let s = g.slice(x[0], 0, 2, 3);
            let p = g.push(
                Pad(Slice { axis: 0, start: 1, len: 3, full: Shape::new(&[5]), part: Shape::new(&[3]) }),
                &[s],
            );
            vec![p]
        });
    }

    #[test]
    fn values() {
        let mut g = Graph::new();
        let x = g.state("x", [2, 3, 2]);
        let y = [g.slice(x, 1, 1, 1), g.slice(x, 2, 1, 1), g.slice(x, 0, 1, 1)];
        let v = run64(&g, &y, &[("x", (0..12).map(f64::from).collect())]);
        assert_eq!(v[0], [2., 3., 8., 9.]);
        assert_eq!(v[1], [1., 3., 5., 7., 9., 11.]);
        assert_eq!(v[2], [6., 7., 8., 9., 10., 11.]);
    }

    #[test]
    fn shaders_validate() {
        for d in [8, 3] {
            let s = |n| Shape::new(&[5, n, d]);
            let op = Slice { axis: 1, start: 1, len: 2, full: s(4), part: s(2) };
            validated(&op, &[&[5, 4, d]]);
            validated(&Pad(op), &[&[5, 2, d]]);
        }
    }

    #[test]
    fn device() {
        for d in [8, 3] {
            crate::graph::testing::check_device(|g| {
                let x = g.state("x", [5, 9, d]);
                vec![g.slice(x, 1, 2, 4), g.slice(x, 2, 1, 2), g.slice(x, 0, 4, 1)]
            });
        }
    }
}
