//! Where a run's files go: a folder on disk, or memory (a browser tab).

use super::checkpoint::{self, CheckpointMeta, Fill, TensorRef, TensorSpec};
use super::run::{
    CHECKPOINTS, MARK, MetricsLog, RunFolder, SNAPSHOTS, SUMMARY, WEIGHTS, checkpoint_name, checkpoints,
    remove_checkpoints, shard_name, write_atomic,
};
use super::sharded::Shard;
#[cfg(not(target_arch = "wasm32"))]
use super::tensorboard::{self, EventFile};
use crate::diagnose::Snapshot;
use anyhow::Context;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Which weights are saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// `weights.safetensors`: the best so far.
    Best,
    /// `checkpoints/step-000000123.safetensors`: a whole training state.
    Checkpoint,
}

impl Weights {
    fn file_name(self, step: u64) -> String {
        match self {
            Weights::Best => WEIGHTS.into(),
            Weights::Checkpoint => format!("{CHECKPOINTS}/{}", checkpoint_name(step)),
        }
    }
}

/// Receives what a run writes.
pub trait Store {
    /// A line for `metrics.jsonl`.
    fn record(&mut self, record: &serde_json::Value) -> anyhow::Result<()>;
    /// Whether training states are kept here. Elsewhere none is handed over.
    fn keeps_checkpoints(&self) -> bool {
        false
    }
    /// Records so far.
    fn lines(&self) -> u64 {
        0
    }
    /// A word by which the store of another rank can tell whether it sees the same folder, until [`Store::unmark`].
    fn mark(&mut self) -> anyhow::Result<Option<String>> {
        Ok(None)
    }
    /// Takes the mark away.
    fn unmark(&mut self, _mark: &str) {}
    /// Whether the folder is that of the store that was marked so.
    fn sees(&self, _mark: &str) -> bool {
        false
    }
    /// What lies on one of several ranks of the checkpoint `meta.step`; it counts once the checkpoint itself is there,
    /// which names the returned file.
    fn shard(
        &mut self,
        _rank: usize,
        _world: usize,
        _tensors: &[TensorRef<'_>],
        _meta: &CheckpointMeta,
    ) -> anyhow::Result<Shard> {
        anyhow::bail!("no place for checkpoints")
    }
    /// [`Store::weights`] of [`Weights::Best`], that come in parts: see [`checkpoint::save_parts`].
    fn parts(
        &mut self,
        tensors: &[TensorSpec],
        meta: &CheckpointMeta,
        fill: &mut Fill<'_>,
    ) -> anyhow::Result<()> {
        let mut all: Vec<f32> = vec![];
        fill(&mut |data| {
            all.extend_from_slice(data);
            Ok(())
        })?;
        let mut sorted: Vec<&TensorSpec> = tensors.iter().collect();
        sorted.sort_by_key(|t| &t.name);
        let mut rest = &all[..];
        let refs: Vec<TensorRef<'_>> = sorted
            .iter()
            .map(|t| {
                let (data, tail) = rest.split_at(t.shape.iter().product());
                rest = tail;
                t.with(data)
            })
            .collect();
        self.weights(Weights::Best, &refs, meta)
    }
    /// Removes all checkpoints but the newest `keep`.
    fn prune(&mut self, _keep: usize) -> anyhow::Result<()> {
        Ok(())
    }
    /// Weights, replacing those saved before; or a checkpoint, beside those of other steps.
    fn weights(
        &mut self,
        which: Weights,
        tensors: &[TensorRef<'_>],
        meta: &CheckpointMeta,
    ) -> anyhow::Result<()>;
    /// The matrices of a diagnosis.
    fn snapshot(&mut self, snapshot: &Snapshot) -> anyhow::Result<()>;
    /// A small file that describes the run, such as `model.json`, replacing the one before.
    fn file(&mut self, name: &str, bytes: &[u8]) -> anyhow::Result<()>;
    /// The summary: from here on the run is finished.
    fn finish(&mut self, summary: &serde_json::Value) -> anyhow::Result<()>;
}

impl dyn Store + '_ {
    /// A record of any type.
    pub fn log(&mut self, record: &impl Serialize) -> anyhow::Result<()> {
        self.record(&serde_json::to_value(record)?)
    }
}

/// A run folder, its `metrics.jsonl` open.
#[derive(Debug)]
pub struct FolderStore {
    path: PathBuf,
    log: MetricsLog,
    #[cfg(not(target_arch = "wasm32"))]
    events: Option<EventFile>,
}

fn make_folder(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)
        .map_err(|e| anyhow::anyhow!("{}: cannot make the folder: {e}", folder.display()))
}

impl RunFolder {
    /// Opens the folder's files for a training run. Where `metrics.jsonl` has records already, the run goes on
    /// after the last of them.
    pub fn store(&self) -> anyhow::Result<FolderStore> {
        Ok(FolderStore {
            path: self.path().to_owned(),
            #[cfg(not(target_arch = "wasm32"))]
            events: self.events()?,
            log: self.metrics()?,
        })
    }

    /// A TensorBoard event file, where `train.tensorboard` of the run's configuration asks for one.
    #[cfg(not(target_arch = "wasm32"))]
    fn events(&self) -> anyhow::Result<Option<EventFile>> {
        if !self.read_config().is_ok_and(|c| c.train.tensorboard) {
            return Ok(None);
        }
        let next = tensorboard::last_step(&self.metrics_path()).map(|s| s + 1);
        let file = EventFile::create(self.path(), next);
        Ok(Some(file.with_context(|| format!("{}: cannot make an event file", self.path().display()))?))
    }
}

impl Store for FolderStore {
    fn keeps_checkpoints(&self) -> bool {
        true
    }

    fn lines(&self) -> u64 {
        self.log.lines()
    }

    fn prune(&mut self, keep: usize) -> anyhow::Result<()> {
        let all = checkpoints(&self.path);
        let Some((newest, _)) = all.last() else { return Ok(()) };
        let gone: Vec<u64> = all[..all.len().saturating_sub(keep)].iter().map(|c| c.0).collect();
        Ok(remove_checkpoints(&self.path, |step| gone.contains(&step), *newest)?)
    }

    fn mark(&mut self) -> anyhow::Result<Option<String>> {
        let now = web_time::SystemTime::now().duration_since(web_time::UNIX_EPOCH).unwrap_or_default();
        let mark = format!("{MARK}{}-{}", std::process::id(), now.as_nanos());
        make_folder(&self.path.join(CHECKPOINTS))?;
        write_atomic(&self.path.join(CHECKPOINTS).join(&mark), |_| Ok(()))?;
        Ok(Some(mark))
    }

    fn unmark(&mut self, mark: &str) {
        // one that stays is removed when the run goes on
        let _ = std::fs::remove_file(self.path.join(CHECKPOINTS).join(mark));
    }

    fn shard(
        &mut self,
        rank: usize,
        world: usize,
        tensors: &[TensorRef<'_>],
        meta: &CheckpointMeta,
    ) -> anyhow::Result<Shard> {
        save_shard(&self.path, rank, world, tensors, meta)
    }

    fn parts(
        &mut self,
        tensors: &[TensorSpec],
        meta: &CheckpointMeta,
        fill: &mut Fill<'_>,
    ) -> anyhow::Result<()> {
        checkpoint::save_parts(&self.path.join(WEIGHTS), tensors, meta, fill)
    }

    fn record(&mut self, record: &serde_json::Value) -> anyhow::Result<()> {
        self.log.append(record)?;
        #[cfg(not(target_arch = "wasm32"))]
        if let Some(events) = &mut self.events {
            let written = events.record(record);
            written.with_context(|| format!("{}: cannot write", events.path().display()))?;
        }
        Ok(())
    }

    fn weights(
        &mut self,
        which: Weights,
        tensors: &[TensorRef<'_>],
        meta: &CheckpointMeta,
    ) -> anyhow::Result<()> {
        let path = self.path.join(which.file_name(meta.step));
        if let (Weights::Checkpoint, Some(folder)) = (which, path.parent()) {
            make_folder(folder)?;
        }
        checkpoint::save(&path, tensors, meta)?;
        Ok(())
    }

    fn snapshot(&mut self, snapshot: &Snapshot) -> anyhow::Result<()> {
        let folder = self.path.join(SNAPSHOTS);
        make_folder(&folder)?;
        let bytes = snapshot.to_bytes();
        Ok(write_atomic(&folder.join(Snapshot::file_name(snapshot.step)), |w| {
            std::io::Write::write_all(w, &bytes)
        })?)
    }

    fn file(&mut self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(write_atomic(&self.path.join(name), |w| std::io::Write::write_all(w, bytes))?)
    }

    fn finish(&mut self, summary: &serde_json::Value) -> anyhow::Result<()> {
        let mut text = serde_json::to_string_pretty(summary)?;
        text.push('\n');
        self.file(SUMMARY, text.as_bytes())
    }
}

fn save_shard(
    run: &Path,
    rank: usize,
    world: usize,
    tensors: &[TensorRef<'_>],
    meta: &CheckpointMeta,
) -> anyhow::Result<Shard> {
    let file = shard_name(meta.step, rank, world);
    let sum = checkpoint::save(&run.join(CHECKPOINTS).join(&file), tensors, meta)?;
    Ok(Shard { file, sum: format!("{sum:016x}") })
}

/// Nowhere but for its parts of checkpoints: a rank of which the first one keeps the run's files. Where it sees their
/// folder, it writes its parts there; else they go by way of the first.
#[derive(Debug, Default)]
pub struct BesideStore {
    run: Option<PathBuf>,
}

impl BesideStore {
    /// Beside the rank that keeps the folder `run`.
    pub fn new(run: &Path) -> Self {
        BesideStore { run: Some(run.to_owned()) }
    }
}

impl Store for BesideStore {
    fn sees(&self, mark: &str) -> bool {
        self.run.as_ref().is_some_and(|run| run.join(CHECKPOINTS).join(mark).exists())
    }

    fn shard(
        &mut self,
        rank: usize,
        world: usize,
        tensors: &[TensorRef<'_>],
        meta: &CheckpointMeta,
    ) -> anyhow::Result<Shard> {
        let run = self.run.as_ref().context("no place for checkpoints")?;
        save_shard(run, rank, world, tensors, meta)
    }

    fn record(&mut self, _: &serde_json::Value) -> anyhow::Result<()> {
        Ok(())
    }

    fn weights(&mut self, _: Weights, _: &[TensorRef<'_>], _: &CheckpointMeta) -> anyhow::Result<()> {
        Ok(())
    }

    fn snapshot(&mut self, _: &Snapshot) -> anyhow::Result<()> {
        Ok(())
    }

    fn file(&mut self, _: &str, _: &[u8]) -> anyhow::Result<()> {
        Ok(())
    }

    fn finish(&mut self, _: &serde_json::Value) -> anyhow::Result<()> {
        Ok(())
    }
}

/// A run in memory, by file name: what a run folder holds, as bytes.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    /// `metrics.jsonl`, line by line.
    pub records: Vec<serde_json::Value>,
    /// Snapshots in order.
    pub snapshots: Vec<Snapshot>,
    /// Every other file, by name.
    pub files: BTreeMap<String, Vec<u8>>,
}

impl Store for MemoryStore {
    fn record(&mut self, record: &serde_json::Value) -> anyhow::Result<()> {
        self.records.push(record.clone());
        Ok(())
    }

    fn weights(
        &mut self,
        which: Weights,
        tensors: &[TensorRef<'_>],
        meta: &CheckpointMeta,
    ) -> anyhow::Result<()> {
        self.files.insert(which.file_name(meta.step), checkpoint::to_bytes(tensors, meta)?);
        Ok(())
    }

    fn snapshot(&mut self, snapshot: &Snapshot) -> anyhow::Result<()> {
        self.snapshots.push(snapshot.clone());
        Ok(())
    }

    fn file(&mut self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
        self.files.insert(name.into(), bytes.to_vec());
        Ok(())
    }

    fn finish(&mut self, summary: &serde_json::Value) -> anyhow::Result<()> {
        self.files.insert(SUMMARY.into(), serde_json::to_vec_pretty(summary)?);
        Ok(())
    }
}
