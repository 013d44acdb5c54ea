//! `sum_squares`: any number of tensors → `[1]`, the sum of the squares of all their elements: the squared
//! global norm of the gradients. Deterministic; partial sums are short, so that it is right to 1e-6 in f32.

use super::copy::{sum_kernel, typed, words};
use super::real::dot;
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor};
use crate::par::*;
use std::fmt::Write;

/// Tensors of one dispatch: eight storage buffers, one of them for the partial sums.
const MAX_INPUTS: usize = 7;
/// Terms that one invocation adds up.
const PER: usize = 64;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct SumSquares;

impl SumSquares {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        const CHUNK: usize = 1 << 15;
        let chunks: Vec<&[T]> = (0..c.n_inputs()).flat_map(|i| c.input(i).chunks(CHUNK)).collect();
        let parts: Vec<f64> = chunks
            .par_iter()
            .map(|x| {
                T::simd(
                    #[inline(always)]
                    || squares(x),
                )
            })
            .collect();
        c.output(0)[0] = T::of(parts.iter().sum());
    }
}

/// Runs of 2048 (128 a lane) in the executor's precision, the sum over runs in f64.
#[inline(always)]
fn squares<T: Real>(x: &[T]) -> f64 {
    x.chunks(2048).map(|x| dot(x, x).f64()).sum()
}

/// The shader: partial sum `j` of a tensor takes its elements `j, j + parts, j + 2·parts, …`.
fn shader(unit: usize) -> String {
    let mut s = String::from(
        "// Partial sums of squares of seven tensors, one partial sum an invocation.\n\
         struct P {\n    total : u32,  // partial sums of this dispatch\n    offset : u32, // of its first one\n    \
         n : array<vec4<u32>, 2>, // elements of each tensor\n    e : array<vec4<u32>, 2>, // ends of their partial sums\n}\n",
    );
    for i in 0..MAX_INPUTS {
        let _ = writeln!(
            s,
            "@group(0) @binding({i}) var<storage, read> x{i} : array<{{{{T}}}}>;\n\
             fn f{i}(j : u32, step : u32, n : u32) -> {{{{T}}}} {{\n    var s = {{{{T}}}}(0.0);\n    \
             for (var q = j; q < n; q += step) {{\n        let v = x{i}[q];\n        s += v * v;\n    }}\n    return s;\n}}"
        );
    }
    let _ = write!(
        s,
        "@group(0) @binding({MAX_INPUTS}) var<storage, read_write> y : array<f32>;\n\
         @group(0) @binding({}) var<uniform> p : P;\n\
         @compute @workgroup_size(64)\n\
         fn main(@builtin(workgroup_id) wg : vec3<u32>, @builtin(num_workgroups) nw : vec3<u32>, \
         @builtin(local_invocation_index) li : u32) {{\n    \
         let i = (wg.x + wg.y * nw.x) * 64u + li;\n    if (i >= p.total) {{ return; }}\n    \
         var s : {{{{T}}}};\n    ",
        MAX_INPUTS + 1
    );
    let at = |name: &str, i: usize| format!("p.{name}[{}].{}", i / 4, ["x", "y", "z", "w"][i % 4]);
    for i in 0..MAX_INPUTS {
        let begin = if i == 0 { "0u".to_string() } else { at("e", i - 1) };
        let end = at("e", i);
        let sum = format!("{{ s = f{i}(i - {begin}, {end} - {begin}, {}); }}", at("n", i));
        let _ = if i + 1 < MAX_INPUTS { write!(s, "if (i < {end}) {sum} else ") } else { write!(s, "{sum}") };
    }
    let total = if unit == 4 { "dot(s, vec4<f32>(1.0))" } else { "s" };
    let _ = write!(s, "\n    y[p.offset + i] = {total};\n}}\n");
    typed(&s, unit)
}

impl Op for SumSquares {
    fn name(&self) -> &'static str {
        "sum_squares"
    }

    fn outputs(&self, _: &[Shape]) -> Vec<Shape> {
        vec![Shape::new(&[1])]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        inputs.iter().map(|s| 2.0 * s.len() as f64).sum()
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("sum_squares: a gradient of the gradient's norm is not needed")
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let mut launch = GpuLaunch::default();
        let mut offset = 0;
        for unit in [4, 1] {
            let of_unit: Vec<usize> =
                (0..r.inputs.len()).filter(|&i| r.inputs[i].len().is_multiple_of(4) == (unit == 4)).collect();
            for part in of_unit.chunks(MAX_INPUTS) {
                let (mut n, mut e, mut end) = ([0u32; 8], [0u32; 8], 0);
                for k in 0..8 {
                    if let Some(&i) = part.get(k) {
                        let len = r.inputs[i].len() / unit;
                        n[k] = len as u32;
                        end += len.div_ceil(PER);
                    }
                    e[k] = end as u32;
                }
                // empty places bind the first tensor once more
                let mut bindings: Vec<Bind> =
                    (0..MAX_INPUTS).map(|k| Bind::In(*part.get(k).unwrap_or(&part[0]))).collect();
                bindings.push(Bind::Scratch(0));
                let mut p = vec![end as u32, offset as u32, 0, 0];
                p.extend(n);
                p.extend(e);
                launch.kernels.push(Kernel {
                    label: "sum_squares".into(),
                    source: shader(unit).into(),
                    entry: "main",
                    constants: vec![],
                    bindings,
                    params: words(&p),
                    groups: fold_groups(end.div_ceil(64) as u64),
                });
                offset += end;
            }
        }
        // then 64 to 1 until few are left
        let mut left = offset;
        launch.scratch.push(left);
        while left > 4 * PER {
            let s = launch.scratch.len();
            launch.kernels.push(sum_kernel(
                "sum_squares",
                Bind::Scratch(s - 1),
                Bind::Scratch(s),
                left,
                1,
                PER,
            ));
            left = left.div_ceil(PER);
            launch.scratch.push(left);
        }
        let s = launch.scratch.len() - 1;
        launch.kernels.push(sum_kernel("sum_squares", Bind::Scratch(s), Bind::Out(0), left, 1, left));
        launch
    }
}

impl Graph {
    /// The sum of the squares of all elements of all `tensors`, `[1]`.
    pub fn sum_squares(&mut self, tensors: &[Tensor]) -> Tensor {
        assert!(!tensors.is_empty(), "sum_squares of nothing");
        self.push(SumSquares, tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::super::copy::tests::validated;
    use super::*;
    use crate::graph::testing::check_device_with;
    use crate::graph::tests::{noise, run64};

    #[test]
    fn values() {
        let sizes = [1, 7, 40_000, 3 << 15];
        let mut g = Graph::new();
        let ts: Vec<Tensor> = sizes.iter().enumerate().map(|(i, n)| g.state(format!("x{i}"), [*n])).collect();
        let y = g.sum_squares(&ts);
        let data: Vec<Vec<f64>> = sizes.iter().enumerate().map(|(i, n)| noise(*n, i as u64)).collect();
        let names = ["x0", "x1", "x2", "x3"];
        let states: Vec<(&str, Vec<f64>)> = names.into_iter().zip(data.iter().cloned()).collect();
        let want: f64 = data.iter().flatten().map(|x| x * x).sum();
        let got = run64(&g, &[y], &states)[0][0];
        assert!((got - want).abs() < 1e-12 * want);
    }

    #[test]
    fn shaders_validate() {
        let l = validated(&SumSquares, &[&[8][..]; 9]);
        assert_eq!(l.kernels.len(), 3);
        validated(&SumSquares, &[&[8], &[7], &[300_000]]);
    }

    /// Both f32 executors to a millionth.
    #[test]
    fn device() {
        for sizes in [&[1usize, 7, 8, 12, 100, 5, 3, 4, 4, 4, 4, 4, 4][..], &[300_001, 2_000_000, 64][..]] {
            check_device_with(
                |g| {
                    let ts: Vec<Tensor> =
                        sizes.iter().enumerate().map(|(i, n)| g.state(format!("x{i}"), [*n])).collect();
                    vec![g.sum_squares(&ts)]
                },
                &[],
                0.3,
                1e-6,
            );
        }
    }
}
