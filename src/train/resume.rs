//! Going on. A checkpoint is a safetensors file, `checkpoints/step-000000123.safetensors`: weights and optimiser state as
//! tensors, and [`Saved`] as JSON in its metadata; several ranks write their parts of the tables beside it
//! ([`super::sharded`]). A run that goes on from it computes what it would have computed had it never stopped; on the CPU
//! bit for bit.

use super::checkpoint::{self, CheckpointError, TensorSpec};
use super::infer::joined;
use super::progress::Progress;
use super::run::{CHECKPOINTS, RunFolder};
use super::sharded::Checkpoint;
use super::trainer::Trainer;
use crate::model::config::Config;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// The version of [`Saved`]; a newer one is refused. 2: there may be files of several ranks.
pub(super) const VERSION: u32 = 2;

/// The key of [`Saved`] in a checkpoint's metadata.
pub(crate) const STATE: &str = "state";

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

impl Trainer {
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
        let first = all.first().map_or(0, |c| c.0);
        let back = |damage: &dyn std::fmt::Display, step: u64| match step == first {
            true => format!("{damage}"),
            false => format!("{damage}; going back to the checkpoint before step {step}"),
        };
        for (step, path) in all.iter().rev() {
            match self.read(path, on_purpose, say) {
                Ok((saved, from)) => {
                    let (step, lines) = (saved.progress.step, saved.lines);
                    if let Some(damage) = self.take_up(&saved, path, from)? {
                        say(back(&damage, step));
                        continue;
                    }
                    self.progress = saved.progress;
                    self.replan(saved.world);
                    self.kept_step = Some(step);
                    self.restore_best(run, &all)?;
                    return Ok(Some(Resumed { step, lines }));
                }
                Err(e) if e.downcast_ref::<CheckpointError>().is_some_and(CheckpointError::is_damaged) => {
                    say(back(&e, *step));
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
                "{0}: none of its {1} checkpoints can be read; put back the files that are missing or damaged, or train again \
                 with --out {0} --force, which replaces all that is there",
                run.path().display(),
                all.len()
            ),
        }
    }

    /// The state of a checkpoint; `Some`: it is damaged.
    fn take_up(
        &mut self,
        saved: &Saved,
        path: &Path,
        mut from: Checkpoint,
    ) -> anyhow::Result<Option<CheckpointError>> {
        if let Some(r) = self.ranks.clone() {
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            r.tell(Some(serde_json::to_string(&Offer { saved: saved.clone(), file, sum: from.sum() })?))?;
            return r.take_up(Some(from), (&mut self.state, &self.params, &self.saved));
        }
        if let Err(e) = from.verify(|_| true) {
            return Ok(Some(e));
        }
        for s in &self.saved {
            let parts = s.parts.iter().map(|p| from.whole(&p.name)).collect::<Result<Vec<_>, _>>()?;
            self.state.set(&s.id, &joined(parts.into_iter()))?;
        }
        Ok(None)
    }

    /// [`Trainer::resume`] on the other ranks: what to go on from is what the first one finds. `run`: the run's folder;
    /// where this rank does not see it, it gets its part of the tables from the first.
    pub fn follow(&mut self, run: &Path) -> anyhow::Result<Option<Resumed>> {
        let Some(r) = self.ranks.clone() else { return Ok(None) };
        loop {
            let text = r.tell(None)?;
            if text.is_empty() {
                return Ok(None);
            }
            let Offer { saved, file, sum } = serde_json::from_str(&text)?;
            let own = Checkpoint::open(&run.join(CHECKPOINTS).join(file)).ok().filter(|c| c.sum() == sum);
            if r.take_up(own, (&mut self.state, &self.params, &self.saved))?.is_some() {
                continue;
            }
            let (step, lines) = (saved.progress.step, saved.lines);
            self.progress = saved.progress;
            self.replan(saved.world);
            self.kept_step = Some(step);
            return Ok(Some(Resumed { step, lines }));
        }
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

    /// What a checkpoint says, and its files. Their data are not read.
    fn read(
        &self,
        path: &Path,
        on_purpose: &[String],
        say: &mut dyn FnMut(String),
    ) -> anyhow::Result<(Saved, Checkpoint)> {
        let name = path.display();
        let from = Checkpoint::open(path)?;
        let text = from.meta().extra.get(STATE);
        let text = text.with_context(|| format!("{name}: holds weights alone, not a training state"))?;
        let saved: Value =
            serde_json::from_str(text).with_context(|| format!("{name}: its state cannot be read"))?;
        let version = saved["version"].as_u64().unwrap_or(u64::MAX);
        if version > u64::from(VERSION) {
            bail!(
                "{name}: written by birkhoff {}, which this version cannot go on from; upgrade it",
                from.meta().birkhoff
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
        from.check(&specs)?;
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
        Ok((saved, from))
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
        let Ok(mut from) = Checkpoint::open(path) else { return Ok(()) };
        if from.verify(|_| true).is_err() {
            return Ok(());
        }
        from.gather(&run.weights_path(), &self.specs, &self.best_meta()?)
    }
}

/// `train.batch` and the number of ranks of a run, by the newest of its checkpoints that can be read.
pub fn step_size(run: &Path) -> Option<(usize, usize)> {
    let saved = |path: &Path| {
        let header = checkpoint::read_header(path).ok()?;
        let saved: Saved = serde_json::from_str(header.meta.extra.get(STATE)?).ok()?;
        let config = Config::from_text("checkpoint", &saved.config, &[]).ok()?;
        Some((config.train.batch, saved.world))
    };
    super::run::checkpoints(run).iter().rev().find_map(|(_, path)| saved(path))
}

/// What rank 0 tells the others of a checkpoint that all go on from.
#[derive(Serialize, Deserialize)]
struct Offer {
    saved: Saved,
    /// Its name in the folder of checkpoints.
    file: String,
    /// [`Checkpoint::sum`].
    sum: u64,
}

/// A key with two values.
pub(super) struct Change {
    pub key: String,
    pub was: String,
    pub is: String,
}

/// The keys in which two configurations differ.
pub(super) fn differences(was: &Config, is: &Config) -> anyhow::Result<Vec<Change>> {
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
