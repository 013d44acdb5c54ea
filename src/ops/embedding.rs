//! Embedding tables: `gather` (one row an id) and `pooled_gather` (one sum or mean a bag of ids).
//!
//! - `gather`: table `[V, d]`, ids `[B, F]` → `[B, F, d]`.
//! - `pooled_gather`: table `[V, d]`, ids `[N]`, offsets `[R + 1]`, weights `[N]` → `[R, d]`: bag `r` pools
//!   `ids[offsets[r] .. offsets[r + 1]]`; an empty bag gives zeros; a mean divides by the bag's length.
//!
//! The gradient of the table is compact, `[N, d]`: one row a *unique* id of the batch, summed by
//! `embedding_grad` over segments that the host has sorted ([`SparseIndex`](super::sparse_index)).

use super::copy::{typed, unit, words};
use super::cpu::par_rows;
use super::real::axpy;
use super::{Cpu, GpuLaunch, GpuRequest, Op, Real, Vjp, shapes};
use crate::cpu_both;
use crate::gpu::kernel::{Bind, Kernel, fold_groups};
use crate::graph::{Graph, Shape, Tensor, ValueType};

/// How a bag becomes one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// The (weighted) sum of its rows.
    Sum,
    /// That, divided by the number of its rows.
    Mean,
}

/// Graph inputs that carry a [`SparseIndex`](super::sparse_index::SparseIndex).
#[derive(Clone, Copy, Debug)]
pub struct SparseInputs {
    /// `[N]` ids.
    pub order: Tensor,
    /// `[N + 1]` ids.
    pub segments: Tensor,
    /// `[N]` ids; only the optimiser reads them.
    pub unique: Tensor,
    /// `[N]` floats, where terms have factors (means, weights).
    pub scale: Option<Tensor>,
}

impl SparseInputs {
    /// Makes the inputs `NAME.order`, `.segments`, `.unique` and, if asked for, `.scale` for `n` ids.
    pub fn new(g: &mut Graph, name: &str, n: usize, scaled: bool) -> Self {
        SparseInputs {
            order: g.input_ids(&format!("{name}.order"), [n]),
            segments: g.input_ids(&format!("{name}.segments"), [n + 1]),
            unique: g.input_ids(&format!("{name}.unique"), [n]),
            scale: scaled.then(|| g.input(&format!("{name}.scale"), [n])),
        }
    }

    /// What the gradient's sum reads.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = Tensor> {
        [self.order, self.segments].into_iter().chain(self.scale)
    }
}

/// The row of an id, with an error that says what is wrong.
#[inline(always)]
fn row<T>(table: &[T], d: usize, id: u32) -> &[T] {
    let at = id as usize * d;
    table.get(at..at + d).unwrap_or_else(|| panic!("id {id} in a table of {} rows", table.len() / d))
}

/// The gradients of all inputs of a gather: the table's, from its last inputs.
fn table_grad(g: &mut Graph, v: &Vjp<'_>, first: usize, d: usize) -> Vec<Option<Tensor>> {
    assert!(!v.wanted[1..].contains(&true), "only the table of a gather has a gradient");
    assert!(v.inputs.len() > first, "a gather that is differentiated needs its SparseInputs");
    let dy = v.grads[0].expect("called with a gradient");
    let dy = dy.reshaped([dy.shape().len() / d, d]);
    let mut grads = vec![None; v.inputs.len()];
    grads[0] = Some(g.embedding_grad(v.inputs[0], dy, &v.inputs[first..]));
    grads
}

/// Inputs: table, ids, and, when differentiable, order, segments.
#[derive(Clone, Debug)]
pub struct Gather;

impl Gather {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (table, ids) = (c.input(0), c.ids(1));
        let out = c.output(0);
        let d = out.len() / ids.len();
        par_rows(out, d, |first, out| {
            for (o, &id) in out.chunks_exact_mut(d).zip(&ids[first..]) {
                o.copy_from_slice(row(table, d, id));
            }
        });
    }
}

impl Op for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs[0].rank(), 2, "a table is [rows, width]");
        let mut d = inputs[1].dims();
        d.push(inputs[0].last());
        vec![Shape::new(&d)]
    }

    fn flops(&self, _: &[Shape], _: &[Shape]) -> f64 {
        0.0
    }

    fn cost(&self, inputs: &[ValueType], outputs: &[ValueType]) -> super::Cost {
        let n = outputs[0].shape.len();
        let ids = inputs[1].bytes_of(inputs[1].shape.len());
        super::Cost { flops: 0.0, read: inputs[0].bytes_of(n) + ids, written: outputs[0].bytes_of(n) }
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        table_grad(g, v, 2, v.inputs[0].shape().last())
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let d = r.inputs[0].last();
        let unit = unit(&[d]);
        let total = r.outputs[0].len() / unit;
        Kernel {
            label: "gather".into(),
            source: typed(include_str!("../../shaders/gather.wgsl"), unit).into(),
            entry: "main",
            constants: vec![],
            bindings: vec![Bind::In(0), Bind::In(1), Bind::Out(0)],
            params: words(&[total as u32, (d / unit) as u32, r.inputs[0].dim(0) as u32 - 1]),
            groups: fold_groups(total.div_ceil(64) as u64),
        }
        .into()
    }
}

/// Inputs: table, ids, offsets, weights (if `weighted`), and, when differentiable, order, segments, scale.
#[derive(Clone, Debug)]
pub struct PooledGather {
    pub(crate) pool: Pool,
    pub(crate) weighted: bool,
}

impl PooledGather {
    fn run<T: Real>(&self, c: &mut Cpu<'_, T>) {
        let (table, ids, offsets) = (c.input(0), c.ids(1), c.ids(2));
        let weights = self.weighted.then(|| c.input(3));
        let out = c.output(0);
        let d = out.len() / (offsets.len() - 1);
        par_rows(
            out,
            d,
            #[inline(always)]
            |first, out| {
                for (o, w) in out.chunks_exact_mut(d).zip(offsets[first..].windows(2)) {
                    let (begin, end) = (w[0] as usize, w[1] as usize);
                    o.fill(T::ZERO);
                    for (k, &id) in ids[begin..end].iter().enumerate() {
                        axpy(weights.map_or(T::ONE, |w| w[begin + k]), row(table, d, id), o);
                    }
                    if self.pool == Pool::Mean && end > begin + 1 {
                        let f = T::ONE / T::of((end - begin) as f64);
                        for o in o {
                            *o *= f;
                        }
                    }
                }
            },
        );
    }
}

impl Op for PooledGather {
    fn name(&self) -> &'static str {
        "pooled_gather"
    }

    fn outputs(&self, inputs: &[Shape]) -> Vec<Shape> {
        assert_eq!(inputs[0].rank(), 2, "a table is [rows, width]");
        if self.weighted {
            assert_eq!(inputs[3].len(), inputs[1].len(), "one weight an id");
        }
        vec![Shape::new(&[inputs[2].len() - 1, inputs[0].last()])]
    }

    fn flops(&self, inputs: &[Shape], _: &[Shape]) -> f64 {
        (inputs[1].len() * inputs[0].last() * (1 + self.weighted as usize)) as f64
    }

    fn cost(&self, inputs: &[ValueType], outputs: &[ValueType]) -> super::Cost {
        let whole = |v: &ValueType| v.bytes_of(v.shape.len());
        let rows = inputs[0].bytes_of(inputs[1].shape.len() * inputs[0].shape.last());
        super::Cost {
            flops: self.flops(&shapes(inputs), &shapes(outputs)),
            read: rows + whole(&inputs[1]) + whole(&inputs[2]),
            written: whole(&outputs[0]),
        }
    }

    fn vjp(&self, g: &mut Graph, v: &Vjp<'_>) -> Vec<Option<Tensor>> {
        table_grad(g, v, 3 + self.weighted as usize, v.inputs[0].shape().last())
    }

    cpu_both!();

    fn gpu(&self, r: &GpuRequest<'_>) -> GpuLaunch {
        let d = r.inputs[0].last();
        let unit = unit(&[d]);
        let total = r.outputs[0].len() / unit;
        let w = self.weighted as usize;
        let weights =
            ["", "@group(0) @binding(3) var<storage, read> weights : array<f32>;"][self.weighted as usize];
        let source = typed(include_str!("../../shaders/pooled_gather.wgsl"), unit)
            .replace("{{weights}}", weights)
            .replace("{{times}}", ["", " * weights[q]"][w])
            .replace("{{y}}", &(3 + w).to_string())
            .replace("{{p}}", &(4 + w).to_string());
        let mut bindings: Vec<Bind> = (0..3 + w).map(Bind::In).collect();
        bindings.push(Bind::Out(0));
        Kernel {
            label: "pooled_gather".into(),
            source: source.into(),
            entry: "main",
            constants: vec![],
            bindings,
            params: words(&[
                total as u32,
                (d / unit) as u32,
                r.inputs[0].dim(0) as u32 - 1,
                r.inputs[1].len() as u32,
                (self.pool == Pool::Mean) as u32,
            ]),
            groups: fold_groups(total.div_ceil(64) as u64),
        }
        .into()
    }
}

impl Graph {
    /// Rows of `table [V, d]` by `ids [B, F]` → `[B, F, d]`. The ids must lie within the table.
    ///
    /// With `sparse` (the index of exactly these ids) the table has a gradient, of shape `[B·F, d]`.
    pub fn gather(&mut self, table: Tensor, ids: Tensor, sparse: Option<&SparseInputs>) -> Tensor {
        let mut inputs = vec![table, ids];
        if let Some(s) = sparse {
            assert_eq!(s.order.shape().len(), ids.shape().len(), "the index is of other ids");
            assert!(s.scale.is_none(), "a plain gather has no factors");
            inputs.extend(s.tensors());
        }
        self.push(Gather, &inputs)
    }

    /// Bags of rows of `table [V, d]`: `ids [N]`, `offsets [R + 1]`, `weights [N]` → `[R, d]`.
    ///
    /// With `sparse` (made by `SparseIndex::bags`) the table has a gradient, of shape `[N, d]`; means and
    /// weights need its `scale`. Weights have no gradient.
    pub fn pooled_gather(
        &mut self,
        table: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Option<Tensor>,
        pool: Pool,
        sparse: Option<&SparseInputs>,
    ) -> Tensor {
        let mut inputs = vec![table, ids, offsets];
        inputs.extend(weights);
        if let Some(s) = sparse {
            assert_eq!(s.order.shape().len(), ids.shape().len(), "the index is of other ids");
            assert!(
                s.scale.is_some() || (pool == Pool::Sum && weights.is_none()),
                "a mean or weighted pool needs SparseInputs with scale"
            );
            inputs.extend(s.tensors());
        }
        self.push(PooledGather { pool, weighted: weights.is_some() }, &inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::super::copy::tests::validated;
    use super::super::embedding_grad::EmbeddingGrad;
    use super::super::sparse_index::SparseIndex;
    use super::*;
    use crate::graph::cpu::{CpuProgram, CpuState};
    use crate::graph::tests::noise;
    use crate::graph::{Form, InputId, fuse};
    use crate::ops::expr::Un;

    struct Case {
        v: usize,
        d: usize,
        ids: Vec<u32>,
        offsets: Option<Vec<u32>>,
        weights: Option<Vec<f32>>,
        pool: Pool,
    }

    impl Case {
        fn index(&self) -> SparseIndex {
            match &self.offsets {
                None => SparseIndex::plain(&self.ids),
                Some(o) => SparseIndex::bags(&self.ids, o, self.weights.as_deref(), self.pool),
            }
        }

        /// (y, loss, compact gradient) with the gather between two maps.
        fn build(&self) -> (Graph, [Tensor; 3]) {
            let mut g = Graph::new();
            let t = g.state("table", [self.v, self.d]);
            let n = self.ids.len();
            let scaled = self.weights.is_some() || self.pool == Pool::Mean;
            let s = SparseInputs::new(&mut g, "sparse", n, scaled);
            let ids = g.input_ids("ids", [n]);
            let y = match &self.offsets {
                None => g.gather(t, ids.reshaped([1, n]), Some(&s)),
                Some(o) => {
                    let offsets = g.input_ids("offsets", [o.len()]);
                    let w = self.weights.as_ref().map(|_| g.input("weights", [n]));
                    g.pooled_gather(t, ids, offsets, w, self.pool, Some(&s))
                }
            };
            let z = g.unary(Un::Tanh, y);
            let w = g.constant(y.shape(), noise(y.shape().len(), 9));
            let p = g.mul(z, w);
            let loss = g.sum_all(p);
            let grad = g.gradients(loss, &[t])[0];
            assert_eq!(grad.shape().len(), n * self.d);
            assert_eq!(g.form(grad), Form::Rows(t.index()));
            (g, [y, loss, grad])
        }

        fn run(&self, table: &[f64]) -> Vec<Vec<f64>> {
            let (g, keep) = self.build();
            let (g, keep) = fuse::fuse(&g, &keep);
            let mut p = CpuProgram::<f64>::new(g, &keep);
            let index = self.index();
            p.set_ids("ids", &self.ids);
            p.set_ids("sparse.order", &index.order);
            p.set_ids("sparse.segments", &index.segments);
            if p.has_input("sparse.scale") {
                p.set("sparse.scale", &index.scale);
            }
            if let Some(o) = &self.offsets {
                p.set_ids("offsets", o);
            }
            if let Some(w) = &self.weights {
                p.set("weights", w);
            }
            let mut s = CpuState::default();
            s.values.insert("table".into(), table.to_vec().into());
            p.run(&mut s);
            keep.iter().map(|t| p.read(*t)).collect()
        }

        /// Values by a naive loop, gradient by differences.
        fn check(&self) {
            let (v, d) = (self.v, self.d);
            let table = noise(v * d, 4);
            let out = self.run(&table);
            let bags: Vec<(usize, usize)> = match &self.offsets {
                None => (0..self.ids.len()).map(|p| (p, p + 1)).collect(),
                Some(o) => o.windows(2).map(|w| (w[0] as usize, w[1] as usize)).collect(),
            };
            for (r, &(b, e)) in bags.iter().enumerate() {
                for c in 0..d {
                    let mut want = 0.0;
                    for p in b..e {
                        want += table[self.ids[p] as usize * d + c]
                            * self.weights.as_ref().map_or(1.0, |w| w[p] as f64);
                    }
                    if self.pool == Pool::Mean && e > b {
                        want /= (e - b) as f64;
                    }
                    assert!((out[0][r * d + c] - want).abs() < 1e-14);
                }
            }
            // the compact gradient, made dense
            let index = self.index();
            let mut dense = vec![0.0; v * d];
            for (u, &id) in index.unique.iter().enumerate() {
                for c in 0..d {
                    let x = out[2][u * d + c];
                    if id == u32::MAX {
                        assert_eq!(x, 0.0, "rows past the last unique id are zero");
                    } else {
                        dense[id as usize * d + c] += x;
                    }
                }
            }
            for j in 0..v * d {
                let at = |h: f64| {
                    let mut t = table.clone();
                    t[j] += h;
                    self.run(&t)[1][0]
                };
                let h = 1e-5;
                let want = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * h);
                // the factors 1/length and the weights come in f32
                assert!((dense[j] - want).abs() < 2e-7, "row {} : {} or {want}", j / d, dense[j]);
            }
        }
    }

    #[test]
    fn plain() {
        for d in [1, 3, 8] {
            let ids = vec![6, 0, 2, 6, 6, 5, 0];
            Case { v: 7, d, ids, offsets: None, weights: None, pool: Pool::Sum }.check();
        }
        Case { v: 1, d: 2, ids: vec![0], offsets: None, weights: None, pool: Pool::Sum }.check();
    }

    /// Rows and rows of other ids cannot be added up, nor rows and whole tables: not even where their sizes are equal.
    #[test]
    fn a_table_feeds_one_gather_and_nothing_else() {
        let refused = |also: &dyn Fn(&mut Graph, Tensor, Tensor) -> Tensor| {
            let mut g = Graph::new();
            let t = g.state("table", [5, 2]);
            let s = SparseInputs::new(&mut g, "sparse", 5, false);
            let ids = g.input_ids("ids", [5]);
            let x = g.gather(t, ids, Some(&s));
            let y = also(&mut g, t, ids);
            let z = g.add(x, y);
            let loss = g.sum_all(z);
            let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| g.gradients(loss, &[t])));
            let e = made.expect_err("two gradients");
            e.downcast_ref::<String>().expect("text").contains("two gradients of table [5, 2]")
        };
        assert!(refused(&|g, t, _| g.affine(t, 2.0, 0.0)));
        assert!(refused(&|g, t, ids| {
            let other = SparseInputs::new(g, "other", 5, false);
            g.gather(t, ids, Some(&other))
        }));
    }

    #[test]
    fn the_form_stays_through_arithmetic_and_passes() {
        let ids = vec![6, 0, 2, 6];
        let case = Case { v: 4, d: 2, ids, offsets: None, weights: None, pool: Pool::Sum };
        let (mut g, [_, loss, grad]) = case.build();
        let half = g.div(grad, loss);
        let twice = g.add(half, grad);
        let c = g.constant([4, 2], vec![1.0; 8]);
        let other = g.mul(grad, c);
        let table = g.find_state(&"table".into()).expect("made");
        assert_eq!(
            [half, twice, other].map(|t| g.form(t)),
            [Form::Rows(table.index()), Form::Rows(table.index()), Form::Whole]
        );
        // one node of the two, with the table's place in the new graph
        let (f, keep) = fuse::fuse(&g, &[twice]);
        assert_eq!(f.form(keep[0]), Form::Rows(f.find_state(&"table".into()).expect("read").index()));
        let mut h = Graph::new();
        h.constant([1], vec![0.0]);
        let at = h.append(&g, InputId::clone);
        assert_eq!(h.form(at[grad.index()]), Form::Rows(at[table.index()].index()));
        assert_ne!(table.index(), at[table.index()].index());
    }

    #[test]
    fn bags() {
        for pool in [Pool::Sum, Pool::Mean] {
            for weights in [None, Some(vec![0.5, -2.0, 1.5, 3.0, 0.25, 1.0, 9.0, 9.0])] {
                for d in [1, 5] {
                    // an empty bag first, in the middle and last; an id twice in one bag; padding at the end
                    let ids = vec![3, 3, 1, 4, 3, 0, 2, 2];
                    let offsets = Some(vec![0, 0, 3, 3, 5, 6, 6]);
                    Case { v: 6, d, ids, offsets, weights: weights.clone(), pool }.check();
                }
            }
        }
    }

    #[test]
    fn shaders_validate() {
        for d in [8, 3] {
            validated(&Gather, &[&[9, d], &[2, 3]]);
            for pool in [Pool::Sum, Pool::Mean] {
                validated(&PooledGather { pool, weighted: false }, &[&[9, d], &[5], &[4]]);
                validated(&PooledGather { pool, weighted: true }, &[&[9, d], &[5], &[4], &[5]]);
            }
            validated(&EmbeddingGrad, &[&[5, d], &[5], &[6]]);
            validated(&EmbeddingGrad, &[&[4, d], &[5], &[6], &[5]]);
        }
    }

    #[test]
    fn device() {
        use crate::graph::testing::check_device_with;
        for d in [8, 3] {
            let ids: Vec<u32> = (0..300u32).map(|i| if i % 3 == 0 { 7 } else { i * i % 41 }).collect();
            let n = ids.len();
            let s = SparseIndex::plain(&ids);
            let given = [("ids", ids.clone()), ("s.order", s.order), ("s.segments", s.segments)];
            check_device_with(
                |g| {
                    let t = g.state("t", [41, d]);
                    let sparse = SparseInputs::new(g, "s", n, false);
                    let ids = g.input_ids("ids", [n]);
                    let y = g.gather(t, ids.reshaped([20, 15]), Some(&sparse));
                    let w = g.constant(y.shape(), noise(y.shape().len(), 5));
                    let dt = g.gradients_from(&[(y, w)], &[t])[0];
                    vec![y, dt]
                },
                &given,
                1.0,
                1e-5,
            );
            let offsets = vec![0u32, 0, 5, 6, 120, 120, 270, 280];
            for (pool, weighted) in [(Pool::Sum, false), (Pool::Mean, true)] {
                // the factors are whatever noise the comparison uploads: both executors see the same
                let s = SparseIndex::bags(&ids, &offsets, None, pool);
                let given = [
                    ("ids", ids.clone()),
                    ("offsets", offsets.clone()),
                    ("s.order", s.order),
                    ("s.segments", s.segments),
                ];
                check_device_with(
                    |g| {
                        let t = g.state("t", [41, d]);
                        let sparse = SparseInputs::new(g, "s", n, weighted);
                        let ids = g.input_ids("ids", [n]);
                        let o = g.input_ids("offsets", [offsets.len()]);
                        let w = weighted.then(|| g.input("w", [n]));
                        let y = g.pooled_gather(t, ids, o, w, pool, Some(&sparse));
                        let c = g.constant(y.shape(), noise(y.shape().len(), 5));
                        let dt = g.gradients_from(&[(y, c)], &[t])[0];
                        vec![y, dt]
                    },
                    &given,
                    1.0,
                    1e-5,
                );
            }
        }
    }
}
