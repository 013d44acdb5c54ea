//! Optimisers of embedding tables: only the rows that the batch names are read or written.
//!
//! Both take the compact gradient G `[N, d]` and `unique [N]`, the table row of each of its rows, ascending,
//! padded with `u32::MAX` (`SparseIndex`). The learning rate is `hyper[4]`; g is the clipped gradient.
//!
//! - `row_adagrad`: acc[r] += mean(g²); θ[r] −= lr·g/(√acc[r] + ε).
//! - `lazy_adam`: Adam's step on the named rows of θ, m and v, with bias correction by the global step.

use super::copy::{typed, unit, words};
use super::cpu::rows_per_task;
use super::optim::{Adam, HYPER, adam, clip_factor, left_out};
use super::real::dot;
use super::{Cost, Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp, shapes};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor, ValueType};
use crate::par::*;

/// Calls `f(u, rows)` for every segment `u` that names a row, where `rows[k]` is that row of table `k`
/// (`width` elements). The ids ascend, so blocks of segments own disjoint stretches of the tables.
fn for_rows<T: Real, const K: usize>(
    unique: &[u32],
    tables: [(&mut [T], usize); K],
    f: impl Fn(usize, [&mut [T]; K]) + Send + Sync,
) {
    let rows = tables[0].0.len() / tables[0].1;
    let widths = tables.each_ref().map(|t| t.1);
    let live = &unique[..unique.partition_point(|&r| (r as usize) < rows)];
    let block = rows_per_task(widths[0]);
    let mut rest = tables.map(|t| t.0);
    let mut done = 0;
    let mut tasks = Vec::with_capacity(live.len().div_ceil(block));
    for ids in live.chunks(block) {
        let (base, end) = (ids[0] as usize, ids[ids.len() - 1] as usize + 1);
        assert!(done <= base && base < end, "unique ids must ascend");
        let mut mine = [(); K].map(|_| Default::default());
        for k in 0..K {
            let (_, tail) = std::mem::take(&mut rest[k]).split_at_mut((base - done) * widths[k]);
            (mine[k], rest[k]) = tail.split_at_mut((end - base) * widths[k]);
        }
        done = end;
        tasks.push(mine);
    }
    tasks.into_par_iter().zip(live.par_chunks(block)).enumerate().for_each(|(i, (mut mine, ids))| {
        T::simd(
            #[inline(always)]
            || {
                for (j, &id) in ids.iter().enumerate() {
                    let r = (id - ids[0]) as usize;
                    let mut k = 0;
                    let rows = mine.each_mut().map(
                        #[inline(always)]
                        |t: &mut &mut [T]| {
                            k += 1;
                            &mut t[r * widths[k - 1]..][..widths[k - 1]]
                        },
                    );
                    f(i * block + j, rows);
                }
            },
        )
    });
}

fn check(s: &[Shape], g: usize) {
    let (n, d) = (s[g].dim(0), s[0].last());
    assert_eq!(s[g].last(), d, "the gradient's rows are as wide as the table's");
    assert_eq!(s[g + 1].len(), n, "one table row for each of the gradient's");
    assert_eq!((s[g + 2].len(), s[g + 3].len()), (HYPER, 1));
}

/// Inputs: table `[V, d]`, acc `[V]` (updated), G `[N, d]`, unique `[N]`, hyper, norm2.
#[derive(Clone, Debug)]
pub struct RowAdagrad {
    eps: f64,
}

impl RowAdagrad {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (table, acc) = (c.state(0), c.state(1));
        let (grad, unique) = (c.input(2), c.ids(3));
        let (hyper, norm2) = (c.input(4), c.input(5));
        if left_out(norm2) {
            return;
        }
        let (factor, lr, eps) = (clip_factor(hyper, norm2), hyper[4], T::of(self.eps));
        let d = table.len() / acc.len();
        let mean = factor * factor / T::of(d as f64);
        for_rows(
            unique,
            [(table, d), (acc, 1)],
            #[inline(always)]
            |u, [row, acc]| {
                let g = &grad[u * d..][..d];
                adagrad(row, &mut acc[0], g, mean, lr, eps, factor);
            },
        );
    }
}

/// One row; `mean` is the factor that makes the sum of g² the mean of the clipped gradient's squares.
#[inline(always)]
fn adagrad<T: Real>(row: &mut [T], acc: &mut T, g: &[T], mean: T, lr: T, eps: T, factor: T) {
    *acc += dot(g, g) * mean;
    let step = lr / (acc.sqrt() + eps) * factor;
    for (t, g) in row.iter_mut().zip(g) {
        *t -= step * *g;
    }
}

impl Op for RowAdagrad {
    fn name(&self) -> &'static str {
        "row_adagrad"
    }

    fn outputs(&self, s: &[Shape]) -> Vec<Shape> {
        check(s, 2);
        assert_eq!(s[1].len(), s[0].dim(0), "one accumulator a row");
        vec![]
    }

    fn flops(&self, s: &[Shape], _: &[Shape]) -> f64 {
        4.0 * s[2].len() as f64
    }

    fn cost(&self, inputs: &[ValueType], outputs: &[ValueType]) -> Cost {
        let moved = |v: &ValueType| v.bytes_of(inputs[2].shape.len());
        Cost {
            flops: self.flops(&shapes(inputs), &shapes(outputs)),
            read: moved(&inputs[0]) + moved(&inputs[2]),
            written: moved(&inputs[0]),
        }
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("row_adagrad has no outputs")
    }

    fn mutates(&self) -> &'static [usize] {
        &[0, 1]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let (n, d) = (r.inputs[2].dim(0), r.inputs[0].last());
        let unit = unit(&[d]);
        let sum = if unit == 4 { "dot(q, vec4<f32>(1.0))" } else { "q" };
        Kernel {
            label: "row_adagrad".into(),
            source: typed(include_str!("../../shaders/row_adagrad.wgsl"), unit)
                .replace("{{sum}}", sum)
                .into(),
            entry: "main",
            constants: vec![],
            bindings: (0..6).map(Bind::In).collect(),
            params: words(&[
                n as u32,
                (d / unit) as u32,
                r.inputs[0].dim(0) as u32,
                (self.eps as f32).to_bits(),
                (1.0 / d as f32).to_bits(),
            ]),
            groups: fold_groups(n.div_ceil(64) as u64),
        }
        .into()
    }
}

/// Inputs: table, m, v `[V, d]` (updated), G `[N, d]`, hyper, norm2, unique `[N]`.
#[derive(Clone, Debug)]
pub struct LazyAdam(Adam);

impl LazyAdam {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (table, m, v) = (c.state(0), c.state(1), c.state(2));
        let (grad, unique) = (c.input(3), c.ids(6));
        if left_out(c.input(5)) {
            return;
        }
        let step = self.0.step(c.input(4), 4, c.input(5));
        let d = grad.len() / unique.len();
        for_rows(
            unique,
            [(table, d), (m, d), (v, d)],
            #[inline(always)]
            |u, [t, m, v]| {
                adam(step, t, m, v, &grad[u * d..][..d]);
            },
        );
    }
}

impl Op for LazyAdam {
    fn name(&self) -> &'static str {
        "lazy_adam"
    }

    fn outputs(&self, s: &[Shape]) -> Vec<Shape> {
        check(&[s[0], s[3], s[6], s[4], s[5]], 1);
        assert!(s[1].len() == s[0].len() && s[2].len() == s[0].len(), "moments of the table's shape");
        vec![]
    }

    fn flops(&self, s: &[Shape], _: &[Shape]) -> f64 {
        15.0 * s[3].len() as f64
    }

    fn cost(&self, inputs: &[ValueType], outputs: &[ValueType]) -> Cost {
        let moved = |v: &[ValueType]| v.iter().map(|v| v.bytes_of(inputs[3].shape.len())).sum();
        Cost {
            flops: self.flops(&shapes(inputs), &shapes(outputs)),
            read: moved(&inputs[..4]),
            written: moved(&inputs[..3]),
        }
    }

    fn vjp(&self, _: &mut Graph, _: &Vjp<'_>) -> Vec<Option<Tensor>> {
        unreachable!("lazy_adam has no outputs")
    }

    fn mutates(&self) -> &'static [usize] {
        &[0, 1, 2]
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let lazy = Some((r.inputs[0].last(), r.inputs[0].dim(0)));
        self.0.launch("lazy_adam", r.inputs[3].len(), 4, lazy)
    }
}

impl Graph {
    /// Row-wise Adagrad on the rows `unique [N]` of `table [V, d]` with accumulators `acc [V]`, by the compact
    /// gradient `grad [N, d]`; hyper and norm2 as for [`Graph::adamw`], the learning rate is `hyper[4]`.
    pub fn row_adagrad(
        &mut self,
        eps: f64,
        table: Tensor,
        acc: Tensor,
        grad: Tensor,
        unique: Tensor,
        hyper: Tensor,
        norm2: Tensor,
    ) {
        self.push_multi(RowAdagrad { eps }, &[table, acc, grad, unique, hyper, norm2]);
    }

    /// Adam on the rows `unique [N]` of `table [V, d]` and its moments; other rows keep theirs.
    pub fn lazy_adam(
        &mut self,
        options: Adam,
        table: Tensor,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        unique: Tensor,
        hyper: Tensor,
        norm2: Tensor,
    ) {
        self.push_multi(LazyAdam(options), &[table, m, v, grad, hyper, norm2, unique]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::copy::tests::validated;
    use super::*;

    #[test]
    fn blocks_of_rows_are_disjoint_and_complete() {
        let d = 3;
        let rows = 20_000;
        let ids: Vec<u32> = (0..rows as u32).filter(|r| r % 3 != 1).chain([u32::MAX; 5]).collect();
        let mut a = vec![0f64; rows * d];
        let mut b = vec![0f64; rows];
        for_rows(&ids, [(&mut a, d), (&mut b, 1)], |u, [x, y]| {
            x.fill(u as f64 + 1.0);
            y[0] += 1.0;
        });
        for r in 0..rows {
            let u = ids.iter().position(|&i| i as usize == r);
            assert_eq!(a[r * d + 2], u.map_or(0.0, |u| u as f64 + 1.0));
            assert_eq!(b[r], if u.is_some() { 1.0 } else { 0.0 });
        }
        for_rows::<f64, 1>(&[u32::MAX], [(&mut a, d)], |_, _| panic!("padding names no row"));
    }

    #[test]
    #[should_panic(expected = "ascend")]
    fn unsorted_ids_are_refused() {
        let mut a = vec![0f64; 8];
        for_rows(&[3, 1], [(&mut a, 1)], |_, _| {});
    }

    #[test]
    fn shaders_validate() {
        for d in [8, 3] {
            let (t, g): ([usize; 2], [usize; 2]) = ([9, d], [5, d]);
            validated(&RowAdagrad { eps: 1e-8 }, &[&t, &[9], &g, &[5], &[HYPER], &[1]]);
            validated(&LazyAdam(Adam::default()), &[&t, &t, &t, &g, &[HYPER], &[1], &[5]]);
        }
    }

    #[test]
    fn device() {
        use super::super::optim::hyper;
        use super::super::optim::tests::check_update;
        use super::super::sparse_index::SparseIndex;
        use crate::graph::testing::noise;
        for (rows, d, n) in [(5, 3, 2), (1000, 8, 400), (900, 1, 1000)] {
            let ids: Vec<u32> = (0..n as u32).map(|i| i * i % rows as u32).collect();
            let unique = SparseIndex::plain(&ids).unique;
            let squares = |n: usize| noise(n, 3).iter().map(|x| x * x).collect::<Vec<f64>>();
            for clip in [0.0, 1.0] {
                check_update(
                    |g| {
                        let (t, a) = (g.state("t", [rows, d]), g.state("a", [rows]));
                        let (l, m, v) =
                            (g.state("l", [rows, d]), g.state("m", [rows, d]), g.state("v", [rows, d]));
                        let u = g.input_ids("u", [n]);
                        let grad = g.constant([n, d], noise(n * d, 4));
                        let n2 = g.sum_squares(&[grad]);
                        let h = g.constant([HYPER], hyper(0.0, 0.05, 0.9, 0.95, 3, clip).to_vec());
                        g.row_adagrad(1e-8, t, a, grad, u, h, n2);
                        g.lazy_adam(Adam::default(), l, m, v, grad, u, h, n2);
                    },
                    &[
                        ("t", noise(rows * d, 1)),
                        ("a", squares(rows)),
                        ("l", noise(rows * d, 5)),
                        ("m", noise(rows * d, 2)),
                        ("v", squares(rows * d)),
                    ],
                    &[("u", unique.clone())],
                    1e-6,
                );
            }
        }
    }
}
