//! `permute`: axis `k` of the result is axis `axes[k]` of the input. The adjoint is the inverse permutation.

use super::copy::{typed, unit, words};
use super::cpu::par_rows;
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, MAX_RANK, Shape, Tensor};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Permute {
    pub(crate) axes: Vec<usize>,
    shape: Shape,
}

impl Permute {
    /// Sizes of the output and steps in the input along its axes, with leading axes of size 1.
    fn walk(&self) -> ([usize; MAX_RANK], [usize; MAX_RANK]) {
        let rank = self.axes.len();
        let mut from = vec![0; rank];
        for (k, &a) in self.axes.iter().enumerate() {
            from[a] = self.shape.dim(k);
        }
        let (mut d, mut s) = ([1; MAX_RANK], [0; MAX_RANK]);
        for (k, &a) in self.axes.iter().enumerate() {
            d[MAX_RANK - rank + k] = self.shape.dim(k);
            s[MAX_RANK - rank + k] = from[a + 1..].iter().product();
        }
        (d, s)
    }

    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        const ROWS: usize = 8;
        let x = c.input(0);
        let (d, s) = self.walk();
        let n = d[3];
        let base = |r: usize| r % d[2] * s[2] + r / d[2] % d[1] * s[1] + r / d[2] / d[1] * s[0];
        par_rows(c.output(0), n, |first, out| {
            let rows = out.len() / n;
            let mut k = 0;
            while k < rows {
                let r = first + k;
                let at = base(r);
                if s[3] == 1 {
                    out[k * n..(k + 1) * n].copy_from_slice(&x[at..at + n]);
                    k += 1;
                } else if s[2] == 1 && k + ROWS <= rows && r % d[2] + ROWS <= d[2] {
                    // eight rows of a transposition: read eight neighbours at a time
                    let mut to = out[k * n..(k + ROWS) * n].chunks_exact_mut(n);
                    let to: [&mut [T]; ROWS] = std::array::from_fn(|_| to.next().expect("eight rows"));
                    for j in 0..n {
                        let from: &[T; ROWS] = x[at + j * s[3]..].first_chunk().expect("inside x");
                        for q in 0..ROWS {
                            to[q][j] = from[q];
                        }
                    }
                    k += ROWS;
                } else {
                    for (o, x) in out[k * n..(k + 1) * n].iter_mut().zip(x[at..].iter().step_by(s[3])) {
                        *o = *x;
                    }
                    k += 1;
                }
            }
        });
    }
}

impl Op for Permute {
    fn name(&self) -> &'static str {
        "permute"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert!(self.axes.iter().enumerate().all(|(k, &a)| self.shape.dim(k) == inputs[0].dim(a)));
        vec![self.shape]
    }

    fn flops(&self, _: &[Shape], _: &[Shape]) -> f64 {
        0.0
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let mut back = vec![0; self.axes.len()];
        for (k, &a) in self.axes.iter().enumerate() {
            back[a] = k;
        }
        vec![Some(g.permute(v.grads[0].expect("called with a gradient"), &back))]
    }

    cpu_both!();

    fn gpu(&self, _: &GpuRequest<'_>) -> GpuLaunch {
        let (mut d, mut s) = self.walk();
        let unit = if s[3] == 1 { unit(&[d[3]]) } else { 1 };
        d[3] /= unit;
        for stride in &mut s[..3] {
            *stride /= unit;
        }
        let p: Vec<u32> = d.iter().chain(&s).map(|&v| v as u32).collect();
        Kernel {
            label: "permute".into(),
            source: typed(include_str!("../../shaders/permute.wgsl"), unit).into(),
            entry: "main",
            constants: vec![],
            bindings: vec![Bind::In(0), Bind::Out(0)],
            params: words(&p),
            groups: fold_groups((self.shape.len() / unit).div_ceil(64) as u64),
        }
        .into()
    }
}

impl Graph {
    /// Reorders the axes: axis `k` of the result is axis `axes[k]` of `x`.
    pub fn permute(&mut self, x: Tensor, axes: &[usize]) -> Tensor {
        let mut sorted = axes.to_vec();
        sorted.sort_unstable();
        let all: Vec<usize> = (0..x.shape().rank()).collect();
        assert_eq!(sorted, all, "axes {axes:?} of {}", x.shape());
        let d: Vec<usize> = axes.iter().map(|&a| x.dim(a)).collect();
        // moving axes of size 1 moves no element
        let long: Vec<usize> = axes.iter().copied().filter(|&a| x.dim(a) > 1).collect();
        if long.is_sorted() {
            return x.reshaped(&d[..]);
        }
        self.push(Permute { axes: axes.to_vec(), shape: Shape::new(&d) }, &[x])
    }
}

#[cfg(test)]
mod tests {
    use super::super::copy::tests::validated;
    use super::*;
    use crate::graph::tests::{check_vjp, noise, run64};

    #[test]
    fn vjp() {
        check_vjp(&[("x", vec![2, 3, 5, 4]), ("y", vec![19, 3])], |g, x| {
            vec![
                g.permute(x[0], &[0, 2, 1, 3]),
                g.permute(x[0], &[3, 1, 2, 0]),
                g.permute(x[0], &[1, 0, 3, 2]),
                g.permute(x[1], &[1, 0]),
            ]
        });
    }

    #[test]
    fn values_of_every_permutation() {
        let dims = [3usize, 18, 2, 17];
        let n: usize = dims.iter().product();
        let data = noise(n, 3);
        for code in 0..256usize {
            let axes: Vec<usize> = (0..4).map(|k| code >> (2 * k) & 3).collect();
            let mut s = axes.clone();
            s.sort_unstable();
            if s != [0, 1, 2, 3] {
                continue;
            }
            let mut g = Graph::new();
            let x = g.state("x", dims);
            let y = g.permute(x, &axes);
            let z = g.affine(y, 1.0, 0.0);
            let out = run64(&g, &[z], &[("x", data.clone())]);
            let d: Vec<usize> = axes.iter().map(|&a| dims[a]).collect();
            for (i, got) in out[0].iter().enumerate() {
                let mut rest = i;
                let mut at = [0; 4];
                for k in (0..4).rev() {
                    at[axes[k]] = rest % d[k];
                    rest /= d[k];
                }
                let from = ((at[0] * dims[1] + at[1]) * dims[2] + at[2]) * dims[3] + at[3];
                assert_eq!(*got, data[from], "{axes:?} at {i}");
            }
        }
    }

    #[test]
    fn shaders_validate() {
        let op = |axes: &[usize], d: &[usize]| Permute { axes: axes.to_vec(), shape: Shape::new(d) };
        validated(&op(&[0, 2, 1, 3], &[2, 5, 3, 8]), &[&[2, 3, 5, 8]]);
        validated(&op(&[1, 0], &[5, 3]), &[&[3, 5]]);
    }

    #[test]
    fn device() {
        crate::graph::testing::check_device(|g| {
            let x = g.state("x", [3, 5, 2, 8]);
            let y = g.state("y", [33, 17]);
            vec![
                g.permute(x, &[0, 2, 1, 3]),
                g.permute(x, &[3, 2, 1, 0]),
                g.permute(x, &[2, 0, 3, 1]),
                g.permute(y, &[1, 0]),
            ]
        });
    }
}
