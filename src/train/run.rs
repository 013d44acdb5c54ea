//! The run folder: everything that `eval`, `predict` and a restart need, written so that a crash
//! at any moment leaves either the old file or the new one.
//!
//! | file | written | holds |
//! |---|---|---|
//! | `config.toml` | at the start | the complete configuration |
//! | `vocab.json` | at the start | vocabularies and numeric statistics |
//! | `metrics.jsonl` | while training | one JSON object a logged step or evaluation |
//! | `weights.safetensors` | at each better evaluation | the best weights so far |
//! | `data.json` | at the start | where the rows came from |
//! | `checkpoints/` | at each evaluation, and in between | all that the run needs to go on ([`super::save`]) |
//! | `snapshots/` | at each diagnosis | residual matrices, one safetensors file each ([`crate::diagnose`]) |
//! | `model.json` | at the start | the layers, their parameters and costs |
//! | `profile.json` | after a profiled step | time by operation |
//! | `events.out.tfevents.*.birkhoff` | while training | the same for TensorBoard ([`super::tensorboard`]) |
//! | `summary.json` | at the end | the result; its presence means *finished* |

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::data::temporary::Temporary;
use crate::diagnose::Snapshot;
use crate::model::config::{Config, ConfigError};

pub(crate) const CONFIG: &str = "config.toml";
pub(crate) const VOCAB: &str = "vocab.json";
pub(crate) const WEIGHTS: &str = "weights.safetensors";
pub(crate) const DATA: &str = "data.json";
pub(crate) const CHECKPOINTS: &str = "checkpoints";
pub(crate) const METRICS: &str = "metrics.jsonl";
pub(crate) const SUMMARY: &str = "summary.json";
pub(crate) const SNAPSHOTS: &str = "snapshots";
pub(crate) const MODEL: &str = "model.json";
pub(crate) const PROFILE: &str = "profile.json";
const LOCK: &str = ".lock";

/// Every file of a run. The summary comes first: without it an old run no longer looks finished.
const FILES: [&str; 8] = [SUMMARY, WEIGHTS, METRICS, MODEL, PROFILE, DATA, VOCAB, CONFIG];

/// How a file begins by which a rank sees that its folder is that of another.
pub(crate) const MARK: &str = ".ranks-";

/// The name of the checkpoint of a step.
pub(crate) fn checkpoint_name(step: u64) -> String {
    format!("step-{step:09}.safetensors")
}

/// The step of a checkpoint by its file's name.
fn checkpoint_step(name: &OsStr) -> Option<u64> {
    let digits = name.to_str()?.strip_prefix("step-")?.strip_suffix(".safetensors")?;
    let step = digits.parse().ok()?;
    (checkpoint_name(step) == name.to_str()?).then_some(step)
}

/// The name of what one of several ranks wrote of a checkpoint.
pub(crate) fn shard_name(step: u64, rank: usize, world: usize) -> String {
    format!("step-{step:09}-{rank:05}-of-{world:05}.safetensors")
}

/// The step of such a file by its name.
pub(crate) fn shard_step(name: &OsStr) -> Option<u64> {
    let name = name.to_str()?;
    let mut parts = name.strip_prefix("step-")?.strip_suffix(".safetensors")?.split('-');
    let (step, rank) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let world = parts.nth(1)?.parse().ok()?;
    (shard_name(step, rank, world) == name).then_some(step)
}

/// Files in the folder of a run's checkpoints by step, in order.
fn by_step(run: &Path, step: impl Fn(&OsStr) -> Option<u64>) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(run.join(CHECKPOINTS)).into_iter().flatten().flatten();
    let mut list: Vec<(u64, PathBuf)> =
        entries.filter_map(|e| Some((step(&e.file_name())?, e.path()))).collect();
    list.sort();
    list
}

/// A run's checkpoints by step, in order. Where several ranks wrote one, its other files are beside it, complete before
/// it is there.
pub(crate) fn checkpoints(run: &Path) -> Vec<(u64, PathBuf)> {
    by_step(run, checkpoint_step)
}

/// Removes the checkpoints of some steps, each before its ranks' parts; and parts up to step `orphans` whose checkpoint
/// was never finished.
pub(crate) fn remove_checkpoints(
    run: &Path,
    which: impl Fn(u64) -> bool,
    orphans: u64,
) -> Result<(), RunError> {
    let mut kept = HashSet::new();
    for (step, path) in checkpoints(run) {
        match which(step) {
            true => remove(&path)?,
            false => drop(kept.insert(step)),
        }
    }
    for (step, path) in by_step(run, shard_step) {
        if which(step) || step <= orphans && !kept.contains(&step) {
            remove(&path)?;
        }
    }
    Ok(())
}

/// Whether a file is what a write that was cut short has left of one of ours.
fn is_left_over(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    if name.starts_with(MARK) {
        return true;
    }
    let Some((file, _)) = name.strip_prefix('.').and_then(|n| n.split_once(".tmp-")) else { return false };
    let step = checkpoint_step(OsStr::new(file)).or_else(|| shard_step(OsStr::new(file)));
    FILES.contains(&file) || step.is_some()
}

/// How a `config.toml` written by this module starts. No other folder is ever taken for a run.
const TITLE: &str = "# birkhoff run";

/// What is wrong with a run folder or a file in it, in one line.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// `--out` names a finished run.
    #[error("{0} holds a finished run; add --force to replace it, or name another folder with --out")]
    Finished(String),
    /// `--out` names a run that was stopped.
    #[error(
        "{0} holds an unfinished run; go on with it: birkhoff train --resume {0}, or add --force to replace it, \
         or name another folder with --out"
    )]
    Unfinished(String),
    /// `--out` names a folder of something else.
    #[error(
        "{0} is not empty and not a birkhoff run, so it is left alone (also with --force); \
         name a new or empty folder with --out"
    )]
    NotARun(String),
    /// The path is a file.
    #[error("{0} is a file; a run is a folder")]
    File(String),
    /// Nothing is there.
    #[error("{0}: no such run folder; a run is made by `birkhoff train --out {0}`")]
    Missing(String),
    /// A run without a checkpoint.
    #[error(
        "{0} has no weights.safetensors: the run did not reach its first checkpoint; begin it again with: birkhoff train --resume {0}"
    )]
    NoWeights(String),
    /// A run that was stopped before its first evaluation.
    #[error(
        "{0} has no weights.safetensors: it was stopped before its first evaluation, or the file is gone; go on with: birkhoff train --resume {0}"
    )]
    NoEvaluation(String),
    /// A folder without a configuration.
    #[error(
        "{0} has no config.toml: it is not a run folder; give the folder that `birkhoff train --out` wrote"
    )]
    NoConfig(String),
    /// `--resume` names something else than a run.
    #[error("{0} is not a run of `birkhoff train --out`: it has no config.toml of its making")]
    NotResumable(String),
    /// Another process trains into the folder.
    #[error("{0} is in use by another birkhoff process; wait for it, or name another folder with --out")]
    Busy(String),
    /// The configuration of the run cannot be read.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// A JSON file of the run cannot be read.
    #[error("{path}: not valid JSON: {message}")]
    Json {
        /// The file.
        path: String,
        /// The parser's words.
        message: String,
    },
    /// The operating system refused.
    #[error("{path}: cannot {what}: {message}")]
    Io {
        /// The file or folder.
        path: String,
        /// The action, such as "write".
        what: &'static str,
        /// The system's words.
        message: String,
    },
}

fn io_error(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> RunError {
    let path = path.display().to_string();
    move |e| RunError::Io { path, what, message: e.to_string() }
}

/// A folder with one training run.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    notice: Option<String>,
    /// Held while training; released and removed on drop.
    lock: Option<File>,
    /// Folders that were made for the run, the innermost first; removed on drop if nothing came into them.
    made: Vec<PathBuf>,
}

impl RunFolder {
    /// Prepares `path` for a new run: creates the folder, or checks that it may be used. A run, finished or not, is
    /// refused without `force` ([`RunFolder::notice`] says what is replaced); any other folder that is not empty is
    /// refused always. Nothing is removed before [`RunFolder::begin`], so that a start that fails on its data leaves
    /// an old run whole, and nothing where nothing was.
    pub fn create(path: &Path, force: bool) -> Result<Self, RunError> {
        let name = path.display().to_string();
        if path.exists() && !path.is_dir() {
            return Err(RunError::File(name));
        }
        let absent = |p: &&Path| !p.as_os_str().is_empty() && !p.exists();
        let made: Vec<PathBuf> = path.ancestors().take_while(absent).map(Path::to_owned).collect();
        fs::create_dir_all(path).map_err(io_error(path, "create the folder"))?;
        let mut empty = true;
        for entry in fs::read_dir(path).map_err(io_error(path, "list the folder"))? {
            let name = entry.map_err(io_error(path, "list the folder"))?.file_name();
            // a kill at the very start leaves the beginning of a file
            empty &= name == OsStr::new(LOCK) || is_left_over(&name);
        }
        if !(empty || has(&path.join(CONFIG))? && Self::is_run(path)) {
            return Err(RunError::NotARun(name));
        }
        let lock = lock(path)?;
        let finished = path.join(SUMMARY).exists();
        let notice = match (empty, finished) {
            (true, _) => None,
            (false, true) if !force => return Err(RunError::Finished(name)),
            (false, false) if !force => return Err(RunError::Unfinished(name)),
            (false, true) => Some(format!("{name}: replacing a finished run (--force)")),
            (false, false) => Some(format!("{name}: replacing an unfinished run (--force)")),
        };
        Ok(Self { path: path.to_owned(), notice, lock: Some(lock), made })
    }

    /// Whether a folder is a run's: it has a configuration written by this module.
    pub fn is_run(path: &Path) -> bool {
        let mut start = Vec::new();
        let read = File::open(path.join(CONFIG)).map(|f| f.take(TITLE.len() as u64).read_to_end(&mut start));
        matches!(read, Ok(Ok(_))) && start == TITLE.as_bytes()
    }

    /// Opens a run to go on with it. Nothing is changed before [`RunFolder::rewind`].
    pub fn resume(path: &Path) -> Result<Self, RunError> {
        let name = path.display().to_string();
        match fs::metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(RunError::Missing(name)),
            Err(e) => return Err(io_error(path, "open")(e)),
            Ok(m) if !m.is_dir() => return Err(RunError::File(name)),
            Ok(_) => {}
        }
        if !(has(&path.join(CONFIG))? && Self::is_run(path)) {
            return Err(RunError::NotResumable(name));
        }
        let lock = lock(path)?;
        Ok(Self { path: path.to_owned(), notice: None, lock: Some(lock), made: vec![] })
    }

    /// Takes the run back to a checkpoint: what was written after it goes, so that the folder reads as if the run
    /// had come to this step and no further. `lines`: lines of `metrics.jsonl` up to there. A crash in between
    /// leaves a run that can be taken back again.
    pub fn rewind(&self, config: &Config, step: u64, lines: u64) -> Result<(), RunError> {
        remove(&self.summary_path())?;
        // the newest first: a crash in between leaves no gap
        for (newer, _) in self.checkpoints().into_iter().rev().filter(|(s, _)| *s > step) {
            remove_checkpoints(&self.path, |s| s == newer, 0)?;
        }
        remove_checkpoints(&self.path, |s| s > step, step)?;
        self.remove_snapshots(|s| s > step)?;
        self.remove_left_overs()?;
        cut_lines(&self.metrics_path(), lines)?;
        self.write_config(config)
    }

    /// The checkpoints by step, in order.
    pub fn checkpoints(&self) -> Vec<(u64, PathBuf)> {
        checkpoints(&self.path)
    }

    /// `data.json`: where the rows came from.
    pub fn data_path(&self) -> PathBuf {
        self.path.join(DATA)
    }

    /// Opens a run for reading; it has a configuration and weights, but may be unfinished.
    pub fn open(path: &Path) -> Result<Self, RunError> {
        let run = Self::look(path)?;
        if !has(&path.join(WEIGHTS))? {
            let name = path.display().to_string();
            return Err(match checkpoints(path).is_empty() {
                true => RunError::NoWeights(name),
                false => RunError::NoEvaluation(name),
            });
        }
        Ok(run)
    }

    /// The same of one that may have no weights yet, but checkpoints.
    pub fn look(path: &Path) -> Result<Self, RunError> {
        let name = path.display().to_string();
        match fs::metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(RunError::Missing(name)),
            Err(e) => return Err(io_error(path, "open")(e)),
            Ok(m) if !m.is_dir() => return Err(RunError::File(name)),
            Ok(_) => {}
        }
        if !has(&path.join(CONFIG))? {
            return Err(RunError::NoConfig(name));
        }
        Ok(Self { path: path.to_owned(), notice: None, lock: None, made: vec![] })
    }

    /// Removes the files of an earlier run (and only these) and writes the configuration.
    pub fn begin(&self, config: &Config) -> Result<(), RunError> {
        // `config.toml` is replaced, not removed: at no moment does the folder stop being a run.
        for name in FILES.into_iter().filter(|&name| name != CONFIG) {
            remove(&self.path.join(name))?;
        }
        self.remove_snapshots(|_| true)?;
        remove_checkpoints(&self.path, |_| true, 0)?;
        // not empty: not ours alone
        let _ = fs::remove_dir(self.path.join(CHECKPOINTS));
        self.remove_left_overs()?;
        #[cfg(not(target_arch = "wasm32"))]
        for file in super::tensorboard::ours(&self.path).map_err(io_error(&self.path, "list the folder"))? {
            remove(&file)?;
        }
        self.write_config(config)
    }

    /// Removes what writes that were cut short have left.
    fn remove_left_overs(&self) -> Result<(), RunError> {
        for folder in [self.path.clone(), self.path.join(CHECKPOINTS)] {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                if is_left_over(&entry.file_name()) {
                    remove(&entry.path())?;
                }
            }
        }
        Ok(())
    }

    fn write_config(&self, config: &Config) -> Result<(), RunError> {
        let version = env!("CARGO_PKG_VERSION");
        let text = format!(
            "{TITLE}, written by birkhoff {version}: the complete configuration\n\n{}",
            config.to_toml()?
        );
        write_atomic(&self.config_path(), |w| w.write_all(text.as_bytes()))
    }

    /// Removes snapshots by their step; a folder that holds something else as well stays.
    fn remove_snapshots(&self, which: impl Fn(u64) -> bool) -> Result<(), RunError> {
        let folder = self.snapshots_path();
        let Ok(entries) = fs::read_dir(&folder) else { return Ok(()) };
        for entry in entries.flatten() {
            if Snapshot::step_of(&entry.file_name().to_string_lossy()).is_some_and(&which) {
                remove(&entry.path())?;
            }
        }
        // not empty: not ours alone
        let _ = fs::remove_dir(&folder);
        Ok(())
    }

    /// What the user should be told about an earlier run in this folder.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.toml`.
    pub fn config_path(&self) -> PathBuf {
        self.path.join(CONFIG)
    }

    /// `vocab.json`.
    pub fn vocab_path(&self) -> PathBuf {
        self.path.join(VOCAB)
    }

    /// `weights.safetensors`: the best weights.
    pub fn weights_path(&self) -> PathBuf {
        self.path.join(WEIGHTS)
    }

    /// `metrics.jsonl`.
    pub fn metrics_path(&self) -> PathBuf {
        self.path.join(METRICS)
    }

    /// `snapshots`, the folder of the diagnoses' matrices.
    pub fn snapshots_path(&self) -> PathBuf {
        self.path.join(SNAPSHOTS)
    }

    /// `summary.json`.
    pub fn summary_path(&self) -> PathBuf {
        self.path.join(SUMMARY)
    }

    /// Whether the run came to its end.
    pub fn is_finished(&self) -> bool {
        self.summary_path().exists()
    }

    /// The configuration that the run was trained with.
    pub fn read_config(&self) -> Result<Config, RunError> {
        Ok(Config::load(Some(&self.config_path()), &[])?)
    }

    /// Opens `metrics.jsonl` for appending.
    pub fn metrics(&self) -> Result<MetricsLog, RunError> {
        let path = self.metrics_path();
        let file = File::options().create(true).append(true).open(&path).map_err(io_error(&path, "open"))?;
        let lines = count_lines(&path)?;
        Ok(MetricsLog { file, path, lines })
    }

    /// Writes `summary.json`: from here on the run is finished.
    pub fn finish(&self, summary: &impl Serialize) -> Result<(), RunError> {
        let path = self.summary_path();
        let mut text = serde_json::to_string_pretty(summary).map_err(|e| json_error(&path, &e))?;
        text.push('\n');
        write_atomic(&path, |w| w.write_all(text.as_bytes()))
    }

    /// Reads `summary.json`.
    pub fn read_summary(&self) -> Result<serde_json::Value, RunError> {
        let path = self.summary_path();
        let text = fs::read_to_string(&path).map_err(io_error(&path, "read"))?;
        serde_json::from_str(&text).map_err(|e| json_error(&path, &e))
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        if self.lock.take().is_some() {
            // Left behind, the file would do no harm.
            let _ = fs::remove_file(self.path.join(LOCK));
        }
        // a start that failed leaves no empty folder; one with something in it is not removed
        self.made.iter().take_while(|folder| fs::remove_dir(folder).is_ok()).for_each(drop);
    }
}

/// Whether a file is there and can be read; an error where the system refuses to say, or to let it be read.
fn has(path: &Path) -> Result<bool, RunError> {
    use io::ErrorKind::{NotADirectory, NotFound};
    match fs::metadata(path)
        .and_then(|m| if m.is_file() { File::open(path).map(|_| true) } else { Ok(false) })
    {
        Err(e) if matches!(e.kind(), NotFound | NotADirectory) => Ok(false),
        other => other.map_err(io_error(path, "read")),
    }
}

fn json_error(path: &Path, e: &serde_json::Error) -> RunError {
    RunError::Json { path: path.display().to_string(), message: e.to_string() }
}

fn lock(folder: &Path) -> Result<File, RunError> {
    let path = folder.join(LOCK);
    let open = File::options().create(true).truncate(false).write(true).open(&path);
    let file = open.map_err(io_error(&path, "write"))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(RunError::Busy(folder.display().to_string())),
        // Some file systems know no locks; training there is as safe as without this check.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
    }
}

fn remove(path: &Path) -> Result<(), RunError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io_error(path, "remove")(e)),
        _ => Ok(()),
    }
}

/// Replaces a file in one step: a temporary file in the same folder, fsync, rename. A reader sees
/// the old content or the new, never a part; on an error the old file stays. A path that exists and
/// is no regular file (`/dev/stdout`, a pipe) is written directly.
pub fn write_atomic(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), RunError> {
    if crate::data::is_stream(path) && !path.is_dir() {
        // appending: `> file` must not be cut by what another stream wrote there
        let file = File::options().append(true).open(path).map_err(io_error(path, "write"))?;
        let mut writer = BufWriter::new(file);
        return write(&mut writer).and_then(|()| writer.flush()).map_err(io_error(path, "write"));
    }
    // Through a symbolic link, its target is replaced and the link stays.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if target.file_name().is_none() || target.is_dir() {
        return Err(io_error(path, "write")(io::Error::other("it is a folder")));
    }
    let temporary = Temporary::beside(&target);
    let result = write_through(temporary.path(), write).and_then(|()| temporary.rename(&target));
    result.map_err(io_error(path, "write"))?;
    if let Some(parent) = target.parent().filter(|p| !p.as_os_str().is_empty())
        && let Ok(folder) = File::open(parent)
    {
        // Makes the rename itself durable; not every system can.
        let _ = folder.sync_all();
    }
    Ok(())
}

fn write_through(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let mut writer = BufWriter::with_capacity(1 << 20, File::create(path)?);
    write(&mut writer)?;
    writer.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

/// `metrics.jsonl`, open for appending: each record is one whole line, visible at once.
#[derive(Debug)]
pub struct MetricsLog {
    file: File,
    path: PathBuf,
    lines: u64,
}

impl MetricsLog {
    /// Whole lines in the file.
    pub fn lines(&self) -> u64 {
        self.lines
    }

    /// Appends one JSON object as a line.
    pub fn append(&mut self, record: &impl Serialize) -> Result<(), RunError> {
        let mut line = serde_json::to_vec(record).map_err(|e| json_error(&self.path, &e))?;
        line.push(b'\n');
        self.lines += 1;
        self.file.write_all(&line).and_then(|()| self.file.flush()).map_err(io_error(&self.path, "write"))
    }
}

/// Calls `f` with the number of each whole line, from 1, and where it ends, until it says no.
fn each_line(path: &Path, mut f: impl FnMut(u64, u64) -> bool) -> io::Result<()> {
    let mut input = BufReader::with_capacity(1 << 18, File::open(path)?);
    let (mut line, mut at) = (0, 0);
    loop {
        let buffer = input.fill_buf()?;
        if buffer.is_empty() {
            return Ok(());
        }
        for (i, _) in buffer.iter().enumerate().filter(|(_, b)| **b == b'\n') {
            line += 1;
            if !f(line, at + i as u64 + 1) {
                return Ok(());
            }
        }
        let n = buffer.len();
        at += n as u64;
        input.consume(n);
    }
}

fn count_lines(path: &Path) -> Result<u64, RunError> {
    let mut lines = 0;
    each_line(path, |n, _| {
        lines = n;
        true
    })
    .map_err(io_error(path, "read"))?;
    Ok(lines)
}

/// Leaves the first `lines` whole lines of a file.
fn cut_lines(path: &Path, lines: u64) -> Result<(), RunError> {
    let mut end = 0;
    let read = each_line(path, |n, at| {
        if n <= lines {
            end = at;
        }
        n < lines
    });
    match read {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(io_error(path, "read"))?,
    }
    let file = File::options().write(true).open(path).map_err(io_error(path, "write"))?;
    file.set_len(end).and_then(|()| file.sync_all()).map_err(io_error(path, "write"))
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
