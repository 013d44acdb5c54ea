//! Diagnosis while training (math.md section 5): one fixed batch through the current weights, forward and
//! backward, on the training device; what comes back is small, and becomes a [`Record`] and a [`Snapshot`].

use super::events::Report;
use super::infer::{Inputs, run_with_pauses, upload_over};
use super::ranks::{Exchange, Ranks};
use crate::data::batch::Batch;
use crate::data::feed::Feed;
use crate::data::loader::{LoaderOptions, Order};
use crate::diagnose::measure::{self, LayerRes};
use crate::diagnose::{LayerSnapshot, LayerStats, ModuleSnapshot, ModuleStats, Record, Snapshot};
use crate::graph::exec::{Device, Program, State};
use crate::graph::{Graph, Tensor};
use crate::model::build::Model;
use crate::model::config::{Config, Ensemble, ResidualMode};
use crate::model::params::AttentionProbe;
use crate::ops::matmul::Trans;

/// Most snapshots of a run; beyond, only every second, third, … diagnosis writes its matrices.
const SNAPSHOTS: u64 = 200;

/// Positions in the program's kept values of one layer's results.
struct LayerOutputs {
    pre: Option<usize>,
    post: Option<usize>,
    res: Option<usize>,
    /// Gram matrices of the streams that leave the layer, `[tokens, n, n]`.
    gram: usize,
    /// Squared norm of the gradient of the layer's parameters.
    grad: usize,
    /// Name, squared norm of the contribution, its elements, attention map `[m, m]` (sum) with what it is a sum of.
    modules: Vec<ModuleOutputs>,
    changes_slots: bool,
}

struct ModuleOutputs {
    name: String,
    norm: usize,
    elements: usize,
    /// Position, slots, number of maps summed.
    attention: Option<(usize, usize, usize)>,
}

/// Measures a model on one fixed batch.
pub struct Diagnoser {
    program: Program,
    over: Option<(Ranks, Exchange)>,
    batch: Batch,
    keep: usize,
    layers: Vec<LayerOutputs>,
    /// Each layer's ensemble weights, by state name; `None` where all are 1.
    alphas: Vec<Option<String>>,
    mode: ResidualMode,
    streams: usize,
    width: usize,
    snapshot_every: u64,
    /// Diagnoses done so far.
    pub(super) measured: u64,
}

impl Diagnoser {
    /// Compiles the measuring program for weights that are in `state`; the batch is the first
    /// `train.diagnose_rows` rows of `valid`. `None` where the configuration asks for no diagnosis.
    pub fn new(
        cfg: &Config,
        inputs: &Inputs,
        device: &Device,
        state: &State,
        valid: &Feed,
        total_steps: u64,
        ranks: Option<&Ranks>,
    ) -> anyhow::Result<Option<Self>> {
        let t = &cfg.train;
        if t.diagnose_every == 0 {
            return Ok(None);
        }
        let first = |rows: usize| {
            let options = LoaderOptions { prefetch: 1, ..LoaderOptions::new(rows) };
            valid.loader(inputs.groups.clone(), Order::Sequential, options)?.next().transpose()
        };
        let Some(mut batch) = first(t.diagnose_rows)? else { return Ok(None) };
        // padding would count as rows; of a smaller batch the lists may have less room
        while batch.rows < batch.capacity {
            batch = first(batch.rows)?.unwrap_or(batch);
        }
        let rows = batch.rows;
        let mut m = inputs.model(cfg, rows, false)?;
        let mode = cfg.model.residual.mode;
        let streams = if mode == ResidualMode::Shortcut { 1 } else { cfg.model.residual.streams };
        let (keep, layers) = outputs(&mut m, streams);
        let alphas = m
            .plans
            .iter()
            .map(|p| (p.ensemble == Ensemble::Weighted).then(|| format!("layers.{}.alpha", p.index)))
            .collect();
        // every rank measures the same batch: its tables are everywhere
        let (graph, kept, over) = match ranks {
            None => (m.graph, keep, None),
            Some(r) => {
                let capacity = m.gathers.iter().map(|t| t.ids).collect();
                let (graph, at, exchange) = r.forward(&m.graph, &m.params, capacity, "diagnosis.");
                let kept = keep.iter().map(|t| at[t.index()].reshaped(t.shape())).collect();
                (graph, kept, Some((r.clone(), exchange)))
            }
        };
        let program = Program::compile(device, state, &graph, &kept, "diagnosis")?;
        let diagnoses = total_steps / t.diagnose_every as u64;
        Ok(Some(Diagnoser {
            program,
            over,
            batch,
            keep: kept.len(),
            layers,
            alphas,
            mode,
            streams,
            width: cfg.model.width,
            snapshot_every: diagnoses.div_ceil(SNAPSHOTS).max(1),
            measured: 0,
        }))
    }

    /// Measures the weights in `state`. The snapshot is there only where this diagnosis keeps its matrices.
    pub async fn measure(
        &mut self,
        state: &mut State,
        step: u64,
        rows: u64,
        seconds: f64,
        report: &mut dyn Report,
    ) -> anyhow::Result<(Record, Option<Snapshot>)> {
        upload_over(&mut self.program, &self.batch, self.over.as_ref())?;
        run_with_pauses(&mut self.program, state, report).await?;
        let v = self.program.read(&(0..self.keep).collect::<Vec<_>>()).await?;
        let names: Vec<&str> = self.alphas.iter().flatten().map(String::as_str).collect();
        let mut alphas = if names.is_empty() { vec![] } else { state.get(&names).await? }.into_iter();
        let n = self.streams;
        let res: Vec<LayerRes<'_>> = self
            .layers
            .iter()
            .map(|l| LayerRes { res: l.res.map(|i| v[i].as_slice()), changes_slots: l.changes_slots })
            .collect();
        let measured = measure::residual(n, &res);
        let mut record = Record {
            step,
            rows,
            seconds,
            layers: vec![],
            composite_forward: measured.forward,
            composite_backward: measured.backward,
            token_composite_forward: measured.token_forward,
            token_composite_backward: measured.token_backward,
        };
        let keep_matrices = self.measured.is_multiple_of(self.snapshot_every);
        self.measured += 1;
        let mut snapshot = keep_matrices.then(|| Snapshot {
            step,
            rows,
            mode: self.mode.name().into(),
            streams: n,
            layers: vec![],
            composites: measured.composites.iter().map(|&x| x as f32).collect(),
        });
        for ((l, s), alpha) in self.layers.iter().zip(measured.layers).zip(&self.alphas) {
            let (stream_cosine, state_rms) = measure::streams(n, self.width, &v[l.gram]);
            let weights = alpha.as_ref().and_then(|_| alphas.next());
            let modules = l.modules.iter().enumerate().map(|(i, m)| ModuleStats {
                name: m.name.clone(),
                rms: (f64::from(v[m.norm][0]) / m.elements as f64).sqrt(),
                weight: weights.as_ref().map_or(1.0, |w| f64::from(w[i])),
            });
            record.layers.push(LayerStats {
                forward_gain: s.average.forward_gain(),
                backward_gain: s.average.backward_gain(),
                token_forward_gain: s.token_gain.0,
                token_backward_gain: s.token_gain.1,
                row_sum_min: s.row_sums.0,
                row_sum_max: s.row_sums.1,
                col_sum_min: s.col_sums.0,
                col_sum_max: s.col_sums.1,
                second_singular: s.second_singular,
                row_entropy: s.row_entropy,
                stream_cosine,
                state_rms,
                grad_norm: f64::from(v[l.grad][0]).sqrt(),
                modules: modules.collect(),
            });
            if let Some(snapshot) = &mut snapshot {
                let average = |at: Option<usize>, fixed: f32| {
                    at.map_or_else(|| vec![fixed; n], |i| measure::token_average(n, &v[i]))
                };
                let pre = if self.mode == ResidualMode::Shortcut { 1.0 } else { 1.0 / n as f32 };
                snapshot.layers.push(LayerSnapshot {
                    pre: average(l.pre, pre),
                    post: average(l.post, 1.0),
                    res: s.average.data().iter().map(|&x| x as f32).collect(),
                    modules: l
                        .modules
                        .iter()
                        .filter_map(|m| {
                            let (at, slots, maps) = m.attention?;
                            let attention = v[at].iter().map(|x| x / maps as f32).collect();
                            Some(ModuleSnapshot { name: m.name.clone(), slots, attention })
                        })
                        .collect(),
                });
            }
        }
        Ok((record, snapshot))
    }
}

/// Appends to a model's graph what a diagnosis reads; the kept values and where each stands among them.
fn outputs(m: &mut Model, streams: usize) -> (Vec<Tensor>, Vec<LayerOutputs>) {
    let mut keep: Vec<Tensor> = vec![];
    let mut hold = |t: Tensor| {
        keep.push(t);
        keep.len() - 1
    };
    let g = &mut m.graph;
    // embeddings belong to no layer, and their gradients need the batch's index
    let dense: Vec<_> = m.params.iter().filter(|p| !p.is_table()).collect();
    let wrt: Vec<Tensor> = dense.iter().map(|p| p.tensor).collect();
    let grads = g.gradients(m.loss, &wrt);
    g.enter("diagnosis");
    let mut layers = vec![];
    for (l, plan) in m.plans.iter().enumerate() {
        let c = m.coefficients.get(l);
        let prefix = format!("layers.{}.", plan.index);
        let mine: Vec<Tensor> =
            dense.iter().zip(&grads).filter_map(|(p, d)| p.name.starts_with(&prefix).then_some(*d)).collect();
        let s = m.states[l];
        let d = s.shape().last();
        let s = s.reshaped([s.shape().len() / (streams * d), streams, d]);
        let gram = g.matmul_t(s, s, Trans { a: false, b: true });
        let modules = plan
            .modules
            .iter()
            .zip(&m.contributions[l])
            .map(|(p, u)| {
                let scope = format!("{prefix}{}", p.name);
                let probe = m.attentions.iter().find(|a| a.scope == scope);
                ModuleOutputs {
                    name: p.name.clone(),
                    norm: hold(g.sum_squares(&[*u])),
                    elements: u.shape().len(),
                    attention: probe.map(|a| {
                        let (map, maps) = attention_map(g, a);
                        (hold(map), a.q.dim(1), maps)
                    }),
                }
            })
            .collect();
        layers.push(LayerOutputs {
            pre: c.and_then(|c| c.pre).map(&mut hold),
            post: c.and_then(|c| c.post).map(&mut hold),
            res: c.and_then(|c| c.res).map(&mut hold),
            gram: hold(gram),
            grad: hold(g.sum_squares(&mine)),
            modules,
            changes_slots: plan.shortcut_weight,
        });
    }
    g.leave();
    (keep, layers)
}

/// softmax(QKᵀ/√d_k) again, summed over batch and heads: `[m, m]`, and how many maps that sums.
fn attention_map(g: &mut Graph, a: &AttentionProbe) -> (Tensor, usize) {
    let (b, m, d) = (a.q.dim(0), a.q.dim(1), a.q.dim(2));
    let (h, dk) = (a.heads, d / a.heads);
    let mut split = |x: Tensor| g.permute(x.reshaped([b, m, h, dk]), &[0, 2, 1, 3]).reshaped([b * h, m, dk]);
    let (q, k) = (split(a.q), split(a.k));
    let s = g.matmul_t(q, k, Trans { a: false, b: true });
    let s = g.affine(s, 1.0 / (dk as f64).sqrt(), 0.0);
    let p = g.softmax(s);
    (g.reduce_sum(p, 1, b * h, m * m, [m, m]), b * h)
}
