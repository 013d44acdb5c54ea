//! `row_l2`: the gradient of an L2 penalty on the embedding rows of a batch, added to their own. table `[V, d]`, grad
//! `[N, d]`, unique `[N]`, segments `[N + 1]` (see [`super::sparse_index`]), hyper `[8]` → `[N, d]`:
//! grad[u] + λ·s·table[unique[u]], where s is 1, or with `by_frequency` the row's share of the batch: its occurrences
//! over the number of examples, `hyper[7]`.

use super::copy::{typed, unit, words};
use super::cpu::par_rows;
use super::optim::HYPER;
use super::{Cost, Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp, shapes};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Form, Graph, Shape, Tensor, ValueType};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct RowL2 {
    lambda: f64,
    by_frequency: bool,
}

impl RowL2 {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (table, grad) = (c.input(0), c.input(1));
        let (unique, segments) = (c.ids(2), c.ids(3));
        let (lambda, rows) = (T::of(self.lambda), c.input(4)[7]);
        let out = c.output(0);
        let d = out.len() / unique.len();
        par_rows(
            out,
            d,
            #[inline(always)]
            |first, out| {
                for (i, o) in out.chunks_exact_mut(d).enumerate() {
                    let u = first + i;
                    let g = &grad[u * d..][..d];
                    match table.get(unique[u] as usize * d..).and_then(|t| t.get(..d)) {
                        None => o.copy_from_slice(g),
                        Some(row) => {
                            let n = T::of(f64::from(segments[u + 1] - segments[u]));
                            let f = if self.by_frequency { lambda * (n / rows) } else { lambda };
                            for ((o, g), r) in o.iter_mut().zip(g).zip(row) {
                                *o = *g + f * *r;
                            }
                        }
                    }
                }
            },
        );
    }
}

impl Op for RowL2 {
    fn name(&self) -> &'static str {
        "row_l2"
    }

    fn outputs(&self, s: &[Shape]) -> Vec<Shape> {
        let n = s[1].dim(0);
        assert_eq!(s[0].last(), s[1].last(), "the gradient's rows are as wide as the table's");
        assert_eq!((s[2].len(), s[3].len(), s[4].len()), (n, n + 1, HYPER));
        vec![s[1]]
    }

    fn form(&self, inputs: &[Form]) -> Form {
        inputs[1]
    }

    fn flops(&self, s: &[Shape], _: &[Shape]) -> f64 {
        2.0 * s[1].len() as f64
    }

    fn cost(&self, inputs: &[ValueType], outputs: &[ValueType]) -> Cost {
        let moved = |v: &ValueType| v.bytes_of(inputs[1].shape.len());
        Cost {
            flops: self.flops(&shapes(inputs), &shapes(outputs)),
            read: moved(&inputs[0]) + moved(&inputs[1]),
            written: moved(&outputs[0]),
        }
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("row_l2 stands after the gradients")
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let d = r.inputs[0].last();
        let unit = unit(&[d]);
        let total = r.outputs[0].len() / unit;
        Kernel {
            label: "row_l2".into(),
            source: typed(include_str!("../../shaders/row_l2.wgsl"), unit).into(),
            entry: "main",
            constants: vec![],
            bindings: (0..5).map(Bind::In).chain([Bind::Out(0)]).collect(),
            params: words(&[
                total as u32,
                (d / unit) as u32,
                r.inputs[0].dim(0) as u32,
                (self.lambda as f32).to_bits(),
                u32::from(self.by_frequency),
            ]),
            groups: fold_groups(total.div_ceil(64) as u64),
        }
        .into()
    }
}

impl Graph {
    /// `grad [N, d]` with λ times the rows of `table [V, d]` that it belongs to. See [`super::row_l2`].
    pub fn row_l2(
        &mut self,
        lambda: f64,
        by_frequency: bool,
        table: Tensor,
        grad: Tensor,
        unique: Tensor,
        segments: Tensor,
        hyper: Tensor,
    ) -> Tensor {
        self.push(RowL2 { lambda, by_frequency }, &[table, grad, unique, segments, hyper])
    }
}

#[cfg(test)]
mod tests {
    use super::super::copy::tests::validated;
    use super::super::sparse_index::SparseIndex;
    use super::*;
    use crate::graph::cpu::{CpuProgram, CpuState};
    use crate::graph::testing::check_device_with;
    use crate::graph::tests::noise;

    #[test]
    fn shaders_validate() {
        for d in [4, 5] {
            validated(&RowL2 { lambda: 0.1, by_frequency: true }, &[&[9, d], &[6, d], &[6], &[7], &[HYPER]]);
        }
    }

    /// Against the definition: the gradient of λ/2·Σ over the batch's rows of s·|row|², by central differences.
    #[test]
    fn it_is_the_gradient_of_its_penalty() {
        let ids = [7u32, 2, 7, 0, 7, 2];
        let index = SparseIndex::plain(&ids);
        let (v, d, rows) = (9usize, 3usize, 4.0);
        let table = noise(v * d, 5);
        for by_frequency in [false, true] {
            let mut g = Graph::new();
            let (t, grad) = (g.state("t", [v, d]), g.state("g", [ids.len(), d]));
            let (u, s) = (g.input_ids("u", [6]), g.input_ids("s", [7]));
            let h = g.constant([HYPER], [vec![0.0; 7], vec![rows]].concat());
            let y = g.row_l2(0.3, by_frequency, t, grad, u, s, h);
            let mut c = CpuProgram::<f64>::new(g, &[y]);
            c.set_ids("u", &index.unique);
            c.set_ids("s", &index.segments);
            let g0 = noise(6 * d, 8);
            let values = [("t".into(), table.clone().into()), ("g".into(), g0.clone().into())].into();
            c.run(&mut CpuState { values });
            let got = c.read(y);
            let penalty = |t: &[f64]| -> f64 {
                let norm = |r: u32| t[r as usize * d..][..d].iter().map(|x| x * x).sum::<f64>();
                match by_frequency {
                    // every occurrence once, a mean over the examples
                    true => 0.15 * ids.iter().map(|&r| norm(r)).sum::<f64>() / rows,
                    false => 0.15 * [0, 2, 7].map(norm).iter().sum::<f64>(),
                }
            };
            for (k, row) in [0usize, 2, 7].into_iter().enumerate() {
                for j in 0..d {
                    let mut t = table.clone();
                    t[row * d + j] += 1e-6;
                    let up = penalty(&t);
                    t[row * d + j] -= 2e-6;
                    let slope = (up - penalty(&t)) / 2e-6;
                    assert!((got[k * d + j] - g0[k * d + j] - slope).abs() < 1e-8, "row {row}");
                }
            }
            assert_eq!(got[3 * d..], g0[3 * d..], "past the last row nothing is added");
        }
    }

    #[test]
    fn device() {
        for (d, by_frequency) in [(4, true), (5, false), (16, true)] {
            let ids: Vec<u32> = (0..57u32).map(|i| i * i % 23).collect();
            let index = SparseIndex::plain(&ids);
            check_device_with(
                |g| {
                    let (t, grad) = (g.state("t", [23, d]), g.state("g", [57, d]));
                    let (u, s) = (g.input_ids("u", [57]), g.input_ids("s", [58]));
                    let h = g.constant([HYPER], [vec![0.0; 7], vec![13.0]].concat());
                    vec![g.row_l2(0.3, by_frequency, t, grad, u, s, h)]
                },
                &[("u", index.unique.clone()), ("s", index.segments.clone())],
                1.0,
                1e-6,
            );
        }
    }
}
