//! What a run keeps of itself: checkpoints, of one file or a file a rank more ([`super::sharded`]), and the best weights.

use super::checkpoint::{CheckpointMeta, TensorRef, TensorSpec};
use super::infer::to_tensors;
use super::resume::{STATE, Saved, VERSION};
use super::sharded::SHARDS;
use super::step::RUNNING;
use super::store::{Store, Weights};
use super::trained_as::CONFIG;
use super::trainer::Trainer;
use crate::graph::{DType, Slot, StateId};
use crate::model::params::{Kind, Param};
use std::borrow::Cow;
use web_time::Instant;

/// A value of the training state, as tensors of a checkpoint: packed tables column by column, so that a checkpoint does
/// not depend on how a device's limits packed them.
#[derive(Clone, Debug)]
pub struct StateTensors {
    /// In the state.
    pub id: StateId,
    /// The tensors that it is made of, one after the other.
    pub parts: Vec<TensorSpec>,
}

/// The training state as tensors: parameters, optimiser state, the running loss.
pub fn state_tensors(params: &[Param], optimizer: &[(StateId, usize)]) -> Vec<StateTensors> {
    // the tensors of a value are named as it is, those of a packed table after its columns; a value of the optimiser may
    // be one number a row
    let tensors = |p: &Param, slot: Option<Slot>| {
        // moments of a table of one column have always been written as one number a row
        let by_row = slot.is_some_and(|s| s.is_by_row() || p.shape().last() == 1);
        let part = |name: String, rows: usize, width: usize| TensorSpec {
            name: StateId { slot, ..name.into() }.to_string(),
            shape: if by_row { vec![rows] } else { vec![rows, width] },
            dtype: DType::F32,
        };
        let parts = match &p.kind {
            Kind::Embedding(columns) => {
                let width = p.shape().last();
                columns.iter().map(|(c, rows)| part(format!("embeddings.{c}"), *rows, width)).collect()
            }
            _ => vec![TensorSpec { shape: p.shape().dims(), ..part(p.name.clone(), 0, 0) }],
        };
        StateTensors { id: StateId { slot, ..p.id() }, parts }
    };
    let mut out: Vec<StateTensors> = params.iter().map(|p| tensors(p, None)).collect();
    for (id, _) in optimizer {
        let p = params.iter().find(|p| *p.name == *id.name).expect("a parameter of the step");
        out.push(tensors(p, id.slot));
    }
    out.push(StateTensors { id: RUNNING.into(), parts: vec![TensorSpec::f32(RUNNING, [1])] });
    out
}

/// The table that a value of the state belongs to, and its place among the tables.
pub(super) fn table_of<'a>(params: &'a [Param], id: &StateId) -> Option<(usize, &'a Param)> {
    let mut tables = params.iter().filter(|p| p.is_table()).enumerate();
    tables.find(|(_, p)| *p.name == *id.name)
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
            here.retain(|s| table_of(&self.params, &s.id).is_none());
            let all = (&self.state, &self.params[..], &self.saved[..]);
            let check = |id: &StateId, v: &[f32]| self.check_value(id, v);
            let shards = r.keep_parts(store, &self.sees, all, &meta, check).await?;
            meta.extra.insert(SHARDS.into(), serde_json::to_string(&shards)?);
        }
        if self.is_first() {
            meta.extra.insert(STATE.into(), serde_json::to_string(&saved)?);
            let ids: Vec<&StateId> = here.iter().map(|s| &s.id).collect();
            let values = self.state.view(&ids).await?;
            ids.iter().zip(&values).try_for_each(|(id, v)| self.check_value(id, v))?;
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
            out.push(p.with(data));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::build::{EmbeddingSpec, FeatureSpec, model};
    use crate::model::config::Config;
    use crate::train::step::training_step;

    /// Names and shapes are those that checkpoints have always had.
    #[test]
    fn tensors_are_named_as_in_old_checkpoints() {
        let all = |embedding: &str, width: Option<usize>| -> Vec<(String, Vec<usize>)> {
            let sets = ["train.batch=4", "model.layers=1", &format!("train.embedding={embedding}")];
            let cfg = Config::load(None, &sets.map(str::to_string)).unwrap();
            let columns = vec![("C1".to_string(), 10), ("C2".to_string(), 7)];
            let columns = if width.is_some() { columns[..1].to_vec() } else { columns };
            let slots = (0..columns.len()).collect();
            let table = EmbeddingSpec { columns, width, slots, pooled: None };
            let f = FeatureSpec { numeric: 3, tables: vec![table] };
            let step = training_step(model(&cfg.model, &f, 4, true, 0.01, 0.0).unwrap(), &cfg.train);
            let saved = state_tensors(&step.params, &step.optimizer);
            saved.into_iter().flat_map(|s| s.parts).map(|t| (t.name, t.shape)).collect()
        };
        let has = |all: &[(String, Vec<usize>)], name: &str, shape: &[usize]| {
            assert!(all.iter().any(|t| t.0 == name && t.1 == shape), "{name} {shape:?} in {all:?}");
        };
        let adagrad = all("adagrad", None);
        for (name, shape) in [("embeddings.C1", vec![10, 16]), ("embeddings.C2#acc", vec![7])] {
            has(&adagrad, name, &shape);
        }
        for (name, shape) in [("head.w0#m", 2), ("head.b0#v", 1), ("head.b0", 1)] {
            let found =
                adagrad.iter().find(|t| t.0 == name).unwrap_or_else(|| panic!("{name} in {adagrad:?}"));
            assert_eq!(found.1.len(), shape, "{name}");
        }
        assert_eq!(adagrad.last().map(|t| (t.0.as_str(), t.1.clone())), Some((RUNNING, vec![1])));
        let adam = all("adam", None);
        has(&adam, "embeddings.C1#m", &[10, 16]);
        has(&adam, "embeddings.C2#v", &[7, 16]);
        has(&all("adam", Some(1)), "embeddings.C1#m", &[10]);
        has(&all("adam", Some(1)), "embeddings.C1", &[10, 1]);
    }
}
