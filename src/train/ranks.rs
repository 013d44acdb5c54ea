//! Training on several ranks: each has its share of every batch and its part of the tables; dense parameters are the same
//! everywhere. Only rank 0 keeps a run's files.

use super::infer::{upload_examples, upload_indices};
use super::tally::Told;
use crate::collective::{Communicator, Element, Reduction, Wire};
use crate::data::batch::{Batch, SparseIds};
use crate::data::loader::LoaderOptions;
use crate::data::metrics::MetricsAccumulator;
use crate::graph::exec::Program;
use crate::graph::{Graph, InputId, StateId, Tensor};
use crate::model::params::Param;
use crate::parallel::dense::{DenseOptions, Feedback, Signals, all_reduce_gradients, all_reduce_small};
use crate::parallel::layout::{Layout, Piece};
use anyhow::bail;
use std::sync::Arc;

pub use super::tally::{RankLine, RankReport};
pub use crate::parallel::exchange::{Asking, Exchange};

/// How values travel between ranks.
#[derive(Clone, Debug, Default)]
pub struct RankOptions {
    /// Gradients of dense parameters.
    pub dense: DenseOptions,
    /// Rows of tables and their gradients.
    pub tables: Wire,
}

/// The ranks that train one model.
#[derive(Clone, Debug)]
pub struct Ranks {
    /// For dense gradients, losses, and everything beside the steps.
    pub(super) comm: Communicator,
    /// For tables: its operations run beside the others.
    tables: Communicator,
    /// For the ids of the next step, beside both.
    ahead: Communicator,
    pub(super) layout: Arc<Layout>,
    options: RankOptions,
    signals: Arc<Signals>,
    pub(super) feedback: Arc<Feedback>,
}

impl Ranks {
    /// Over a group of at least two. All ranks call it with the same layout and options.
    ///
    /// # Errors
    /// If a rank is lost, or the layout is for another number of ranks.
    pub fn new(comm: Communicator, layout: Layout, options: RankOptions) -> anyhow::Result<Self> {
        if layout.world != comm.world() {
            bail!("the plan is for {} ranks, {} were started", layout.world, comm.world());
        }
        let again = || -> anyhow::Result<Communicator> {
            Ok(comm.split(Some(0), comm.rank() as u32)?.expect("every rank has the same color"))
        };
        let (tables, ahead) = (again()?, again()?);
        Ok(Ranks {
            comm,
            tables,
            ahead,
            layout: layout.into(),
            options,
            signals: Arc::default(),
            feedback: Arc::default(),
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Their number.
    pub fn world(&self) -> usize {
        self.comm.world()
    }

    /// The group.
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// What this rank holds.
    pub fn own(&self) -> &[Piece] {
        &self.layout.pieces[self.layout.of(self.rank())]
    }

    /// The way of rows for a graph with at most so many distinct ids of each table, which may be told how often they occur.
    pub(super) fn exchange(&self, capacity: Vec<usize>, counts: bool, prefix: &str) -> Exchange {
        let comms = (self.tables.clone(), self.ahead.clone());
        Exchange::new(self.layout.clone(), comms, self.options.tables, capacity, counts, prefix)
    }

    /// The sum over ranks of the tables' part of the gradient's squared norm; by the tables' communicator, whose
    /// operations depend on one another anyway.
    pub(super) fn sum_of_tables(&self, g: &mut Graph, mine: Tensor) -> Tensor {
        all_reduce_small(g, &self.tables, &[mine], None)[0]
    }

    /// The sums over ranks of loss and weight, with what the ranks ask for.
    pub(super) fn sum_of_losses(&self, g: &mut Graph, values: &[Tensor]) -> Vec<Tensor> {
        all_reduce_small(g, &self.comm, values, Some(self.signals.clone()))
    }

    /// The sums over ranks of dense gradients.
    pub(super) fn sum_of_gradients(&self, g: &mut Graph, grads: &[Tensor]) -> Vec<Tensor> {
        all_reduce_gradients(g, &self.comm, grads, &self.options.dense, &self.feedback)
    }

    /// A forward graph whose tables are read from where they lie: the graph, and where each of the model's values is in it.
    pub(super) fn forward(
        &self,
        graph: &Graph,
        params: &[Param],
        capacity: Vec<usize>,
        prefix: &str,
    ) -> (Graph, Vec<Tensor>, Exchange) {
        let tables = table_ids(params);
        let exchange = self.exchange(capacity, false, prefix);
        let mut g = Graph::new();
        g.enter("embeddings");
        let working = exchange.pull(&mut g, &tables);
        g.leave();
        let replaced: Vec<(StateId, Tensor)> = tables.into_iter().zip(working).collect();
        let at = g.append_replacing(graph, InputId::clone, &replaced);
        (g, at, exchange)
    }

    /// A rank's share of all batches.
    pub(super) fn share(&self, options: LoaderOptions) -> LoaderOptions {
        LoaderOptions { rank: self.rank(), ranks: self.world(), ..options }
    }

    /// What this rank would like after the next step.
    pub(super) fn wish(&self, told: Told) {
        self.signals.ask([told.stop, told.interrupt, told.checkpoint]);
    }

    /// What the ranks asked for in the step that was just run.
    pub(super) fn told(&self) -> Told {
        let [stop, interrupt, checkpoint] = self.signals.told();
        Told { stop, interrupt, checkpoint }
    }

    /// Tells the other ranks which rows the next run of a graph needs. `merged`: the ids of each table; `ahead`: while another
    /// step is computed.
    pub(super) fn ask(&self, exchange: &Exchange, merged: &[SparseIds], ahead: bool) -> Asking {
        let segments: Vec<&[u32]> = merged.iter().map(|s| &s.segments[..]).collect();
        exchange.ask(&unique(merged), &segments, ahead)
    }

    /// Uploads the batches of a run of a graph, whose ids become places in the working tables, and what the other ranks need.
    /// `parts`: the graph's inputs are named for several batches.
    pub(super) fn upload(
        &self,
        program: &mut Program,
        exchange: &Exchange,
        batches: &[&Batch],
        (merged, asking): (&[SparseIds], Asking),
        parts: bool,
    ) -> anyhow::Result<()> {
        let asked = exchange.prepare(asking)?;
        let unique = unique(merged);
        for (i, a) in asked.iter().enumerate() {
            let (ids, index) = exchange.inputs(i);
            program.set_ids(&ids, &a.ids)?;
            if program.has_input(&format!("{index}.order")) {
                program.set_ids(&format!("{index}.order"), &a.index.order)?;
                program.set_ids(&format!("{index}.segments"), &a.index.segments)?;
                program.set_ids(&format!("{index}.unique"), &a.index.unique)?;
            }
            if !a.occurrences.is_empty() {
                program.set_ids(&format!("{index}.occurrences"), &a.occurrences)?;
            }
        }
        for (part, batch) in batches.iter().enumerate() {
            // padding is in no index: any row will do
            let local = |(s, unique): (&SparseIds, &&[u32])| -> Vec<u32> {
                s.ids.iter().map(|id| unique.binary_search(id).unwrap_or(0) as u32).collect()
            };
            let ids: Vec<Vec<u32>> = batch.groups.iter().zip(&unique).map(local).collect();
            upload_examples(program, batch, parts.then_some(part), Some(&ids))?;
        }
        if parts { upload_indices(program, merged.iter()) } else { Ok(()) }
    }

    /// Makes sure that all ranks have the same, before they train for hours on different things.
    ///
    /// # Errors
    /// If they do not: says which rank differs.
    pub fn agree(&self, what: &str, value: u64) -> anyhow::Result<()> {
        self.agree_or(value, |rank| {
            format!(
                "rank {rank} has another {what} than rank 0; start all ranks with the same version, configuration and files"
            )
        })
    }

    /// The same, with an error of one's own about the first rank that differs from rank 0.
    pub fn agree_or(&self, value: u64, error: impl FnOnce(usize) -> String) -> anyhow::Result<()> {
        let all = self.one_of_each(value)?;
        match all.iter().position(|v| *v != all[0]) {
            None => Ok(()),
            Some(rank) => bail!(error(rank)),
        }
    }

    /// Every rank's value.
    pub(super) fn one_of_each<T: Element>(&self, mine: T) -> anyhow::Result<Vec<T>> {
        Ok(self.comm.all_gather(&[mine], &vec![1; self.world()])?)
    }

    /// Every rank's values, one rank's after the other's, and how many each has.
    pub(super) fn some_of_each<T: Element>(&self, mine: &[T]) -> anyhow::Result<(Vec<T>, Vec<usize>)> {
        let lengths = self.one_of_each(mine.len() as u64)?;
        let lengths: Vec<usize> = lengths.into_iter().map(|n| n as usize).collect();
        Ok((self.comm.all_gather(mine, &lengths)?, lengths))
    }

    /// Everyone's scores and labels.
    pub(super) fn merge(&self, mine: &MetricsAccumulator) -> anyhow::Result<MetricsAccumulator> {
        let (all, lengths) = self.some_of_each(&mine.to_words())?;
        let mut rest = &all[..];
        let mut out = MetricsAccumulator::new();
        for n in lengths {
            let (words, tail) = rest.split_at(n);
            out.merge(MetricsAccumulator::from_words(words));
            rest = tail;
        }
        Ok(out)
    }

    /// Rank 0's text for all.
    pub(super) fn tell(&self, text: Option<String>) -> anyhow::Result<String> {
        let mut bytes = text.unwrap_or_default().into_bytes();
        let mut n = [bytes.len() as u64];
        self.comm.broadcast(&mut n, 0)?;
        bytes.resize(n[0] as usize, 0);
        self.comm.broadcast(&mut bytes, 0)?;
        Ok(String::from_utf8(bytes)?)
    }

    /// What this rank did so far.
    pub(super) fn figures(&self) -> RankLine {
        let (a, b, c) = (self.comm.stats(), self.tables.stats(), self.ahead.stats());
        let values: usize = self.own().iter().map(|p| p.rows() * p.width()).sum();
        RankLine::new(
            a.busy + b.busy + c.busy,
            a.waited + b.waited + c.waited,
            a.sent + b.sent + c.sent,
            a.received + b.received + c.received,
            values as u64,
        )
    }

    /// Every rank's figures, on all of them.
    pub(super) fn gather(&self, mine: &RankLine) -> anyhow::Result<Vec<RankLine>> {
        let m = mine;
        let words = [m.communicating.to_bits(), m.waiting.to_bits(), m.sent, m.received, m.table_values];
        let all = self.comm.all_gather(&words, &vec![words.len(); self.world()])?;
        let line = |w: &[u64]| RankLine::new(f64::from_bits(w[0]), f64::from_bits(w[1]), w[2], w[3], w[4]);
        Ok(all.chunks_exact(words.len()).map(line).collect())
    }

    /// What each rank did.
    pub(super) fn report(&self) -> anyhow::Result<RankReport> {
        Ok(RankReport {
            world: self.world(),
            transport: self.comm.transport().into(),
            ranks: self.gather(&self.figures())?,
        })
    }

    /// The largest of the ranks' values.
    pub fn largest(&self, value: u64) -> anyhow::Result<u64> {
        let mut v = [value];
        self.comm.all_reduce(&mut v, Reduction::Max)?;
        Ok(v[0])
    }
}

/// Each table's distinct ids.
fn unique(merged: &[SparseIds]) -> Vec<&[u32]> {
    merged.iter().map(|s| &s.unique[..s.n_unique]).collect()
}

fn table_ids(params: &[Param]) -> Vec<StateId> {
    params.iter().filter(|p| p.is_table()).map(Param::id).collect()
}
