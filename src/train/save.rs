//! What a run keeps of itself: checkpoints, of one file or a file a rank more ([`super::sharded`]), and the best weights.

use super::checkpoint::{CheckpointMeta, TensorRef, TensorSpec};
use super::infer::to_tensors;
use super::resume::{STATE, Saved, VERSION};
use super::sharded::SHARDS;
use super::step::RUNNING;
use super::store::{Store, Weights};
use super::trained_as::CONFIG;
use super::trainer::Trainer;
use crate::model::params::{Kind, Param};
use std::borrow::Cow;
use web_time::Instant;

/// A value of the training state, as tensors of a checkpoint: packed tables column by column, so that a checkpoint does
/// not depend on how a device's limits packed them.
#[derive(Clone, Debug)]
pub struct StateTensors {
    /// Its name in the state.
    pub name: String,
    /// The tensors that it is made of, one after the other.
    pub parts: Vec<TensorSpec>,
}

/// The training state as tensors: parameters, optimiser state, the running loss.
pub fn state_tensors(params: &[Param], optimizer: &[(String, usize)]) -> Vec<StateTensors> {
    let whole = |name: &str, shape: Vec<usize>| StateTensors {
        name: name.into(),
        parts: vec![TensorSpec { name: name.into(), shape }],
    };
    // `suffix` follows the name of each part; a part has `width` elements a row, or is one number a row
    let one = |p: &Param, name: &str, suffix: &str, len: usize| match &p.kind {
        Kind::Embedding(columns) => {
            let rows = p.shape().dim(0);
            let shape = |r: usize| if len == rows { vec![r] } else { vec![r, len / rows] };
            let part = |(c, r): &(String, usize)| TensorSpec {
                name: format!("embeddings.{c}{suffix}"),
                shape: shape(*r),
            };
            StateTensors { name: name.into(), parts: columns.iter().map(part).collect() }
        }
        _ => whole(name, p.shape().dims()),
    };
    let mut out: Vec<StateTensors> = params
        .iter()
        .map(|p| match &p.kind {
            Kind::Embedding(columns) => StateTensors {
                name: p.name.clone(),
                parts: columns
                    .iter()
                    .map(|(c, r)| TensorSpec {
                        name: format!("embeddings.{c}"),
                        shape: vec![*r, p.shape().last()],
                    })
                    .collect(),
            },
            _ => whole(&p.name, p.shape().dims()),
        })
        .collect();
    for (name, len) in optimizer {
        let at = name.rfind('#').expect("optimiser state is named after its parameter");
        let p = params.iter().find(|p| p.name == name[..at]).expect("a parameter of the step");
        out.push(one(p, name, &name[at..], *len));
    }
    out.push(whole(RUNNING, vec![1]));
    out
}

/// The table that a name in the state belongs to, its place among the tables, and which of the optimiser's values it is.
pub(super) fn table_of<'a, 'b>(
    params: &'a [Param],
    name: &'b str,
) -> Option<(usize, &'a Param, Option<&'b str>)> {
    let (base, what) = match name.split_once('#') {
        Some((base, what)) => (base, Some(what)),
        None => (name, None),
    };
    let mut tables = params.iter().filter(|p| p.is_table()).enumerate();
    tables.find(|(_, p)| p.name == base).map(|(i, p)| (i, p, what))
}

impl Trainer {
    /// Hands the whole training state to the store, if it keeps such.
    pub(super) async fn checkpoint(&mut self, store: &mut dyn Store) -> anyhow::Result<()> {
        if !self.keeps {
            return Ok(());
        }
        self.progress.window.pause();
        let begin = Instant::now();
        self.progress.seconds = self.elapsed();
        let saved = Saved {
            version: VERSION,
            config: self.cfg.to_toml()?,
            vocab: self.vocab.clone(),
            train_rows: self.train_rows,
            device: self.device.name(),
            lines: store.lines(),
            progress: self.progress.clone(),
            world: self.world(),
        };
        let mut meta = self.meta();
        // of several ranks: what is the same on all
        let mut here: Vec<&StateTensors> = self.saved.iter().collect();
        if let Some(r) = &self.ranks {
            here.retain(|s| table_of(&self.params, &s.name).is_none());
            let all = (&self.state, &self.params[..], &self.saved[..]);
            let check = |name: &str, v: &[f32]| self.check_value(name, v);
            let shards = r.keep_parts(store, &self.sees, all, &meta, check).await?;
            meta.extra.insert(SHARDS.into(), serde_json::to_string(&shards)?);
        }
        if self.is_first() {
            meta.extra.insert(STATE.into(), serde_json::to_string(&saved)?);
            let names: Vec<&str> = here.iter().map(|s| s.name.as_str()).collect();
            let values = self.state.view(&names).await?;
            names.iter().zip(&values).try_for_each(|(name, v)| self.check_value(name, v))?;
            store.weights(Weights::Checkpoint, &parts(&here, &values), &meta)?;
            store.prune(self.cfg.train.keep)?;
        }
        self.last_checkpoint = Instant::now();
        self.kept_step = Some(self.progress.step);
        self.progress.times.checkpoints += begin.elapsed().as_secs_f64();
        self.progress.window.resume();
        Ok(())
    }

    /// Writes the best weights, whole.
    pub(super) async fn save_best(&self, store: &mut dyn Store) -> anyhow::Result<()> {
        let meta = self.best_meta()?;
        if let Some(r) = &self.ranks {
            // parameters come first in the state
            let saved = &self.saved[..self.params.len()];
            return r.save_whole(store, (&self.state, &self.params, saved), &meta).await;
        }
        let names: Vec<&str> = self.params.iter().map(|p| p.name.as_str()).collect();
        let values = self.state.view(&names).await?;
        store.weights(Weights::Best, &to_tensors(&self.specs, &self.params, &values), &meta)
    }

    /// Whether this rank keeps the run's files.
    fn is_first(&self) -> bool {
        self.ranks.as_ref().is_none_or(|r| r.rank() == 0)
    }

    pub(super) fn world(&self) -> usize {
        self.ranks.as_ref().map_or(1, |r| r.world())
    }

    fn meta(&self) -> CheckpointMeta {
        CheckpointMeta { step: self.progress.step, seed: self.cfg.train.seed, ..CheckpointMeta::default() }
    }

    /// What `weights.safetensors` says of itself.
    pub(super) fn best_meta(&self) -> anyhow::Result<CheckpointMeta> {
        let mut meta = self.meta();
        meta.extra.insert(CONFIG.into(), self.cfg.to_toml()?);
        if let Some(best) = &self.progress.best {
            meta.step = best.step;
            if let Some(ne) = best.detail.metrics.ne {
                meta.extra.insert("valid_ne".into(), ne.to_string());
            }
        }
        Ok(meta)
    }
}

/// Each value's parts.
fn parts<'a>(saved: &[&'a StateTensors], values: &'a [Cow<'_, [f32]>]) -> Vec<TensorRef<'a>> {
    let mut out = vec![];
    for (s, v) in saved.iter().zip(values) {
        let mut rest: &[f32] = v;
        for p in &s.parts {
            let (data, tail) = rest.split_at(p.shape.iter().product());
            rest = tail;
            out.push(TensorRef { name: &p.name, shape: &p.shape, data });
        }
    }
    out
}
