//! Stopping and going on. A checkpoint is one safetensors file, `checkpoints/step-000000123.safetensors`: weights and
//! optimiser state as tensors, and [`Saved`] as JSON in its metadata. A run that goes on from it computes what it would
//! have computed had it never stopped; on the CPU bit for bit.

use super::checkpoint::{self, CheckpointError, CheckpointMeta, TensorRef, TensorSpec};
use super::infer::{joined, to_tensors};
use super::progress::Progress;
use super::run::RunFolder;
use super::step::RUNNING;
use super::store::{Store, Weights};
use super::trainer::Trainer;
use crate::model::config::Config;
use crate::model::params::{Kind, Param};
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::path::Path;
use web_time::Instant;

/// The version of [`Saved`]; a newer one is refused.
const VERSION: u32 = 1;

/// The key of [`Saved`] in a checkpoint's metadata.
const STATE: &str = "state";

/// Keys that do not change what a step computes: they may differ at any time.
const FREE: [&str; 10] = [
    "train.epochs",
    "train.eval_every",
    "train.checkpoint_every",
    "train.checkpoint_minutes",
    "train.keep",
    "train.log_every",
    "train.tensorboard",
    "train.diagnose_every",
    "train.diagnose_rows",
    "train.patience",
];

/// Keys of `[train]` that a run cannot change on its way: what is in a checkpoint depends on them.
const FIXED: [&str; 6] = [
    "train.batch",
    "train.accumulate",
    "train.seed",
    "train.monitor",
    "train.embedding",
    "train.embedding_init",
];

/// What a checkpoint says beside its tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Saved {
    /// Version of this record.
    pub version: u32,
    /// The complete configuration, as TOML.
    pub config: String,
    /// Checksum of the vocabularies.
    pub vocab: String,
    /// Rows of the training data.
    pub train_rows: u64,
    /// Name of the device.
    pub device: String,
    /// Lines of `metrics.jsonl` when it was written.
    pub lines: u64,
    /// Where the run stood.
    pub progress: Progress,
    /// Ranks that trained it.
    #[serde(default = "one")]
    pub world: usize,
}

fn one() -> usize {
    1
}

/// A run taken up again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// The checkpoint's step.
    pub step: u64,
    /// Lines of `metrics.jsonl` up to there.
    pub lines: u64,
}

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

impl Trainer {
    fn state_names(&self) -> Vec<&str> {
        self.saved.iter().map(|s| s.name.as_str()).collect()
    }

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
        meta.extra.insert(STATE.into(), serde_json::to_string(&saved)?);
        let names = self.state_names();
        let values = self.whole(&names).await?;
        if self.is_first() {
            self.check_values(&values)?;
            store.weights(Weights::Checkpoint, &parts(&self.saved, &values), &meta)?;
            store.prune(self.cfg.train.keep)?;
        }
        self.last_checkpoint = Instant::now();
        self.kept_step = Some(self.progress.step);
        self.progress.times.checkpoints += begin.elapsed().as_secs_f64();
        self.progress.window.resume();
        Ok(())
    }

    /// Writes the best weights.
    pub(super) async fn save_best(&self, store: &mut dyn Store) -> anyhow::Result<()> {
        let names: Vec<&str> = self.params.iter().map(|p| p.name.as_str()).collect();
        let values = self.whole(&names).await?;
        match self.is_first() {
            true => store.weights(
                Weights::Best,
                &to_tensors(&self.specs, &self.params, &values),
                &self.best_meta(),
            ),
            false => Ok(()),
        }
    }

    /// Whole values of the state; of several ranks on the first.
    async fn whole(&self, names: &[&str]) -> anyhow::Result<Vec<Cow<'_, [f32]>>> {
        match &self.ranks {
            None => Ok(self.state.view(names).await?),
            Some(r) => {
                let values = r.collect(&self.state, &self.params, names).await?;
                Ok(values.into_iter().map(Cow::Owned).collect())
            }
        }
    }

    /// Whether this rank keeps the run's files.
    fn is_first(&self) -> bool {
        self.ranks.as_ref().is_none_or(|r| r.rank() == 0)
    }

    fn world(&self) -> usize {
        self.ranks.as_ref().map_or(1, |r| r.world())
    }

    fn meta(&self) -> CheckpointMeta {
        CheckpointMeta { step: self.progress.step, seed: self.cfg.train.seed, ..CheckpointMeta::default() }
    }

    /// What `weights.safetensors` says of itself.
    fn best_meta(&self) -> CheckpointMeta {
        let mut meta = self.meta();
        if let Some(best) = &self.progress.best {
            meta.step = best.step;
            if let Some(ne) = best.detail.metrics.ne {
                meta.extra.insert("valid_ne".into(), ne.to_string());
            }
        }
        meta
    }

    /// Takes up the run from its newest checkpoint that is whole; `say` gets a line for each that is not. `None`: there
    /// is no checkpoint yet, and the run begins at its first step. `on_purpose` are the keys that the user changed for
    /// the rest of the run. Of the folder only the best weights may change, where they are not those of this checkpoint.
    pub fn resume(
        &mut self,
        run: &RunFolder,
        on_purpose: &[String],
        say: &mut dyn FnMut(String),
    ) -> anyhow::Result<Option<Resumed>> {
        let all = run.checkpoints();
        for (step, path) in all.iter().rev() {
            match self.read(path, on_purpose, say) {
                Ok((saved, values)) => {
                    let (step, lines) = (saved.progress.step, saved.lines);
                    match self.ranks.clone() {
                        Some(r) => {
                            r.tell(Some(serde_json::to_string(&saved)?))?;
                            r.distribute(&mut self.state, &self.params, &self.saved, Some(values))?;
                        }
                        None => {
                            for (s, v) in self.saved.iter().zip(&values) {
                                self.state.set(&s.name, v)?;
                            }
                        }
                    }
                    self.progress = saved.progress;
                    self.replan(saved.world);
                    self.kept_step = Some(step);
                    self.restore_best(run, &all)?;
                    return Ok(Some(Resumed { step, lines }));
                }
                Err(e) if e.downcast_ref::<CheckpointError>().is_some_and(CheckpointError::is_damaged) => {
                    say(format!("{e}; going back to the checkpoint before step {step}"));
                }
                Err(e) => return Err(e),
            }
        }
        match all.is_empty() {
            true => {
                if let Some(r) = &self.ranks {
                    r.tell(Some(String::new()))?;
                }
                Ok(None)
            }
            false => bail!(
                "{0}: none of its {1} checkpoints can be read; train again with --out {0} --force",
                run.path().display(),
                all.len()
            ),
        }
    }

    /// [`Trainer::resume`] on the ranks that keep no files: they get what the first one reads.
    pub fn follow(&mut self) -> anyhow::Result<Option<Resumed>> {
        let Some(r) = self.ranks.clone() else { return Ok(None) };
        let text = r.tell(None)?;
        if text.is_empty() {
            return Ok(None);
        }
        let saved: Saved = serde_json::from_str(&text)?;
        r.distribute(&mut self.state, &self.params, &self.saved, None)?;
        let (step, lines) = (saved.progress.step, saved.lines);
        self.progress = saved.progress;
        self.replan(saved.world);
        self.kept_step = Some(step);
        Ok(Some(Resumed { step, lines }))
    }

    /// The steps of a run whose steps had another size: those done, and what is left.
    fn replan(&mut self, world: usize) {
        if world == self.world() {
            return;
        }
        let (t, p) = (&self.cfg.train, &self.progress);
        let batches = self.train_rows.div_ceil((t.batch * self.world()) as u64);
        let steps = |batches: u64| batches.div_ceil(t.accumulate as u64);
        let epochs = (t.epochs.saturating_sub(p.epoch)) as u64;
        let left = match epochs {
            0 => 0,
            n => steps(batches.saturating_sub(p.batch)) + (n - 1) * steps(batches),
        };
        self.schedule.total = p.step + left;
    }

    /// The place in the epoch of a run that had another number of ranks.
    fn moved(&self, saved: &mut Saved, then: usize, say: &mut dyn FnMut(String)) {
        let (was, is) = (then * saved.world, self.cfg.train.batch * self.world());
        if saved.world != self.world() {
            let size = match was == is {
                true => String::new(),
                false if was % self.world() == 0 => format!(
                    "; a step has {is} rows, so far {was}: --set train.batch={} keeps that",
                    was / self.world()
                ),
                false => format!("; a step has {is} rows, so far {was}"),
            };
            say(format!("note: ranks so far {}, from here {}{size}", saved.world, self.world()));
        }
        if was != is {
            saved.progress.batch = saved.progress.batch * was as u64 / is as u64;
        }
    }

    /// What a checkpoint says, and its values in the order of the state.
    fn read(
        &self,
        path: &Path,
        on_purpose: &[String],
        say: &mut dyn FnMut(String),
    ) -> anyhow::Result<(Saved, Vec<Vec<f32>>)> {
        let name = path.display();
        let header = checkpoint::read_header(path)?;
        let text = header.meta.extra.get(STATE);
        let text = text.with_context(|| format!("{name}: holds weights alone, not a training state"))?;
        let saved: Value =
            serde_json::from_str(text).with_context(|| format!("{name}: its state cannot be read"))?;
        let version = saved["version"].as_u64().unwrap_or(u64::MAX);
        if version > u64::from(VERSION) {
            bail!(
                "{name}: written by birkhoff {}, which this version cannot go on from; upgrade it",
                header.meta.birkhoff
            );
        }
        let mut saved: Saved =
            serde_json::from_value(saved).with_context(|| format!("{name}: its state cannot be read"))?;
        if saved.train_rows != self.train_rows {
            bail!(
                "{name}: trained on {} rows, the training data have {} now; give the data of the start with --train",
                saved.train_rows,
                self.train_rows
            );
        }
        let then = Config::from_text(&format!("{name} (its configuration)"), &saved.config, &[])?;
        let changes = differences(&then, &self.cfg)?;
        for c in &changes {
            let Change { key, was, is } = c;
            if FREE.contains(&key.as_str()) {
                continue;
            }
            // the same rows a step on another number of ranks
            let together = then.train.batch * saved.world == self.cfg.train.batch * self.world();
            if key == "train.batch" && saved.world != self.world() && together {
                continue;
            }
            let table = key.split('.').next().unwrap_or_default();
            if table != "train" || FIXED.contains(&key.as_str()) {
                bail!(
                    "{name}: written with {key} = {was}, now it is {is}; a run keeps it to its end: undo the \
                     change, or train a new run with --out"
                );
            }
            if !on_purpose.iter().any(|p| key.starts_with(p.as_str())) {
                bail!(
                    "{name}: written with {key} = {was}, the run's config.toml says {is}; undo the change, or make \
                     it for the rest of the run with --set {key}={is}"
                );
            }
        }
        let specs: Vec<TensorSpec> = self.saved.iter().flat_map(|s| s.parts.clone()).collect();
        let read = checkpoint::load(path, &specs)?;
        if saved.vocab != self.vocab {
            bail!(
                "{name}: belongs to another vocab.json (checksum {}, here {}); put back the one that the run began with",
                saved.vocab,
                self.vocab
            );
        }
        if saved.device != self.device.name() {
            say(format!(
                "note: so far the run was on {}; on {} it goes on with equal losses up to rounding, not bit for bit",
                saved.device,
                self.device.name()
            ));
        }
        for Change { key, was, is } in changes.iter().filter(|c| !FREE.contains(&c.key.as_str())) {
            say(format!("from step {} on: {key} = {is} (so far {was})", saved.progress.step));
        }
        self.moved(&mut saved, then.train.batch, say);
        let mut tensors = read.tensors.into_iter();
        let values = self.saved.iter().map(|s| joined(tensors.by_ref().take(s.parts.len()))).collect();
        Ok((saved, values))
    }

    /// A kill between a checkpoint and the best weights that belong to it leaves older ones; a return to an older
    /// checkpoint finds newer ones.
    fn restore_best(&self, run: &RunFolder, all: &[(u64, std::path::PathBuf)]) -> anyhow::Result<()> {
        let Some(best) = &self.progress.best else { return Ok(()) };
        let there = checkpoint::read_header(&run.weights_path());
        if there.is_ok_and(|h| h.meta.step == best.step) {
            return Ok(());
        }
        let Some((_, path)) = all.iter().find(|(s, _)| *s == best.step) else { return Ok(()) };
        let specs: Vec<TensorSpec> = self.saved.iter().flat_map(|s| s.parts.clone()).collect();
        let Ok(read) = checkpoint::load(path, &specs) else { return Ok(()) };
        let tensors: Vec<TensorRef<'_>> = specs
            .iter()
            .zip(&read.tensors)
            .take(self.specs.len())
            .map(|(s, data)| TensorRef { name: &s.name, shape: &s.shape, data })
            .collect();
        Ok(checkpoint::save(&run.weights_path(), &tensors, &self.best_meta())?)
    }
}

/// Each value's parts.
fn parts<'a>(saved: &'a [StateTensors], values: &'a [Cow<'_, [f32]>]) -> Vec<TensorRef<'a>> {
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

/// A key with two values.
struct Change {
    key: String,
    was: String,
    is: String,
}

/// The keys in which two configurations differ.
fn differences(was: &Config, is: &Config) -> anyhow::Result<Vec<Change>> {
    fn walk(key: String, a: &Value, b: &Value, out: &mut Vec<Change>) {
        let join = |k: &str| if key.is_empty() { k.to_string() } else { format!("{key}.{k}") };
        match (a, b) {
            (Value::Object(x), Value::Object(y)) => {
                let keys = x.keys().chain(y.keys().filter(|k| !x.contains_key(*k)));
                for k in keys {
                    let absent = Value::Null;
                    walk(join(k), x.get(k).unwrap_or(&absent), y.get(k).unwrap_or(&absent), out);
                }
            }
            (Value::Array(x), Value::Array(y)) if x.len() == y.len() => {
                for (i, (a, b)) in x.iter().zip(y).enumerate() {
                    walk(format!("{key}[{i}]"), a, b, out);
                }
            }
            _ if a == b => {}
            _ => {
                let show = |v: &Value| match v {
                    Value::Null => "absent".to_string(),
                    v => v.to_string(),
                };
                out.push(Change { key, was: show(a), is: show(b) });
            }
        }
    }
    let mut out = vec![];
    walk(String::new(), &serde_json::to_value(was)?, &serde_json::to_value(is)?, &mut out);
    Ok(out)
}
