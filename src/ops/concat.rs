//! `concat`: tensors that differ in one axis only, one after the other along it.
//!
//! Seen as `[outer, run_k]` each, where `run_k` is everything from the joined axis inwards, the result is
//! `[outer, Σ run_k]`: every output row is the inputs' rows in order. The adjoint is a slice an input.

use super::copy::{par_copy, typed, unit, words};
use super::cpu::par_rows;
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};
use std::fmt::Write;

/// Inputs of one dispatch: eight storage buffers, one of them the output.
const MAX_INPUTS: usize = 7;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Concat {
    pub(crate) axis: usize,
    /// Product of the axes before it.
    outer: usize,
}

impl Concat {
    /// Elements of one row of this input.
    fn run_len(&self, s: &Shape) -> usize {
        s.dims()[self.axis..].iter().product()
    }

    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let out = c.output(0);
        let outer = self.outer;
        let parts: Vec<&[T]> = (0..c.n_inputs()).map(|i| c.input(i)).collect();
        if outer == 1 {
            let mut rest = out;
            for p in parts {
                let (head, tail) = rest.split_at_mut(p.len());
                par_copy(head, p);
                rest = tail;
            }
            return;
        }
        let width = out.len() / outer;
        par_rows(out, width, |first, out| {
            for (r, row) in out.chunks_exact_mut(width).enumerate() {
                let mut at = 0;
                for p in &parts {
                    let n = p.len() / outer;
                    row[at..at + n].copy_from_slice(&p[(first + r) * n..][..n]);
                    at += n;
                }
            }
        });
    }
}

/// The shader for `n` inputs; `e0, e1, …` are the ends of their columns among those of this dispatch.
fn shader(n: usize, unit: usize) -> String {
    let mut s = String::from(
        "// Rows of the inputs side by side: one element an invocation.\n\
         struct P {\n    total : u32,\n    width : u32, // columns of this dispatch\n    \
         stride : u32, // columns of the output\n    offset : u32, // first column of this dispatch\n    \
         e : array<vec4<u32>, 2>, // ends of the inputs' columns\n}\n",
    );
    for i in 0..n {
        let _ = writeln!(s, "@group(0) @binding({i}) var<storage, read> x{i} : array<{{{{T}}}}>;");
    }
    let _ = write!(
        s,
        "@group(0) @binding({n}) var<storage, read_write> y : array<{{{{T}}}}>;\n\
         @group(0) @binding({}) var<uniform> p : P;\n\
         @compute @workgroup_size(64)\n\
         fn main(@builtin(workgroup_id) wg : vec3<u32>, @builtin(num_workgroups) nw : vec3<u32>, \
         @builtin(local_invocation_index) li : u32) {{\n    \
         let i = (wg.x + wg.y * nw.x) * 64u + li;\n    if (i >= p.total) {{ return; }}\n    \
         let o = i / p.width;\n    let j = i % p.width;\n    let to = o * p.stride + p.offset + j;\n    ",
        n + 1
    );
    let e = |i: usize| format!("p.e[{}].{}", i / 4, ["x", "y", "z", "w"][i % 4]);
    for i in 0..n {
        let begin = if i == 0 { "0u".to_string() } else { e(i - 1) };
        let copy = format!("{{ y[to] = x{i}[o * ({} - {begin}) + j - {begin}]; }}", e(i));
        let _ = match i + 1 {
            _ if i + 1 == n => write!(s, "{copy}"),
            _ => write!(s, "if (j < {}) {copy} else ", e(i)),
        };
    }
    s.push_str("\n}\n");
    typed(&s, unit)
}

impl Op for Concat {
    fn name(&self) -> &'static str {
        "concat"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        let mut d = inputs[0].dims();
        for s in &inputs[1..] {
            let e = s.dims();
            let fits = e.len() == d.len() && (0..d.len()).all(|k| k == self.axis || d[k] == e[k]);
            assert!(fits, "{inputs:?} do not join along axis {}", self.axis);
            d[self.axis] += e[self.axis];
        }
        vec![Shape::new(&d)]
    }

    fn flops(&self, _: &[Shape], _: &[Shape]) -> f64 {
        0.0
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        let dy = v.grads[0].expect("called with a gradient");
        let mut at = 0;
        let mut grads = vec![];
        for (x, wanted) in v.inputs.iter().zip(v.wanted) {
            let n = x.dim(self.axis);
            grads.push(wanted.then(|| g.slice(dy, self.axis, at, n)));
            at += n;
        }
        grads
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let runs: Vec<usize> = r.inputs.iter().map(|s| self.run_len(s)).collect();
        let stride: usize = runs.iter().sum();
        let outer = r.outputs[0].len() / stride;
        let unit = unit(&runs);
        let mut launch = GpuLaunch::default();
        let mut offset = 0;
        for (k, part) in runs.chunks(MAX_INPUTS).enumerate() {
            let width: usize = part.iter().sum();
            let total = outer * width / unit;
            let mut p = vec![total, width / unit, stride / unit, offset / unit];
            let mut end = 0;
            p.extend(part.iter().map(|n| {
                end += n / unit;
                end
            }));
            p.resize(12, 0);
            let p: Vec<u32> = p.into_iter().map(|x| x as u32).collect();
            let mut bindings: Vec<Bind> = (0..part.len()).map(|i| Bind::In(k * MAX_INPUTS + i)).collect();
            bindings.push(Bind::Out(0));
            launch.kernels.push(Kernel {
                label: "concat".into(),
                source: shader(part.len(), unit).into(),
                entry: "main",
                constants: vec![],
                bindings,
                params: words(&p),
                groups: fold_groups(total.div_ceil(64) as u64),
            });
            offset += width;
        }
        launch
    }
}

impl Graph {
    /// Joins tensors along `axis`; all other axes agree. One tensor is returned as it is.
    pub fn concat(&mut self, tensors: &[Tensor], axis: usize) -> Tensor {
        assert!(!tensors.is_empty() && axis < tensors[0].shape().rank(), "concat along axis {axis}");
        if tensors.len() == 1 {
            return tensors[0];
        }
        let outer: usize = tensors[0].shape().dims()[..axis].iter().product();
        self.push(Concat { axis, outer }, tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::super::copy::tests::validated;
    use super::*;
    use crate::graph::tests::{check_vjp, run64};

    #[test]
    fn vjp_along_every_axis_and_with_a_repeated_input() {
        for axis in 0..3 {
            let at = |n: usize| {
                let mut d = vec![3, 5, 2];
                d[axis] = n;
                d
            };
            check_vjp(&[("a", at(1)), ("b", at(4)), ("c", at(3))], |g, x| {
                vec![g.concat(&[x[0], x[1], x[2], x[0]], axis)]
            });
        }
    }

    #[test]
    fn values() {
        let mut g = Graph::new();
        let a = g.state("a", [2, 1, 2]);
        let b = g.state("b", [2, 2, 2]);
        let y = g.concat(&[a, b], 1);
        let z = g.concat(&[a, b], 1);
        assert_eq!(g.concat(&[z], 0), z);
        let v = run64(&g, &[y], &[("a", vec![1., 2., 3., 4.]), ("b", (10..18).map(f64::from).collect())]);
        assert_eq!(v[0], [1., 2., 10., 11., 12., 13., 3., 4., 14., 15., 16., 17.]);
        assert_eq!(y.shape().dims(), [2, 3, 2]);
    }

    #[test]
    fn shaders_validate() {
        for d in [8, 3] {
            for n in [2, 7, 9] {
                let shape = [5, 2, d];
                let s = vec![&shape[..]; n];
                let l = validated(&Concat { axis: 1, outer: 5 }, &s);
                assert_eq!(l.kernels.len(), n.div_ceil(7));
            }
        }
    }

    #[test]
    fn device() {
        for (axis, d) in [(1, 8), (2, 3), (0, 4)] {
            crate::graph::testing::check_device(|g| {
                let xs: Vec<Tensor> = (0..9)
                    .map(|i| {
                        let mut s = [3, 2, d];
                        s[axis] = [1, 4, 8][i % 3] * if d == 8 { 4 } else { 1 };
                        g.state(format!("x{i}"), s)
                    })
                    .collect();
                vec![g.concat(&xs, axis), g.concat(&xs[..2], axis)]
            });
        }
    }
}
