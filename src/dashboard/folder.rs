//! A run folder as a source: follows its files while they grow.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use super::run::RunData;
use super::source::Source;
use crate::diagnose::Snapshot;
use crate::train::run::{CONFIG, METRICS, MODEL, PROFILE, SNAPSHOTS, SUMMARY, VOCAB};
use crate::train::trainer::Event;

/// Time that a call may take before the rest waits for the next.
const BUDGET: Duration = Duration::from_millis(4);

/// Bytes read at a time.
const CHUNK: usize = 256 << 10;

/// A line longer than this is no line of ours.
const LINE: usize = 16 << 20;

/// Bytes of the log's start that tell one run in a folder from the next.
const HEAD: usize = 256;

/// Length and time of change: a file that has the same is not read again.
type Stamp = (u64, Option<SystemTime>);

/// Follows a run folder. Whatever is wrong there becomes a message in [`RunData::problems`].
#[derive(Debug)]
pub struct FolderSource {
    path: PathBuf,
    name: String,
    /// Bytes of the log that were read.
    offset: u64,
    /// The log's first bytes, as read.
    head: Vec<u8>,
    /// The last line, so far as it is written.
    partial: Vec<u8>,
    line: usize,
    stamps: BTreeMap<PathBuf, Stamp>,
    /// What is wrong with lines that will not be read again.
    lines: Vec<String>,
    /// What is wrong with each file.
    files: BTreeMap<PathBuf, String>,
    behind: bool,
}

impl FolderSource {
    /// Follows a folder, which need not exist yet. The run is named as the folder.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let full = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
        let name =
            full.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned());
        Self::named(path, name)
    }

    /// The same under a name of the caller's choice.
    pub fn named(path: impl Into<PathBuf>, name: impl Into<String>) -> Self {
        FolderSource {
            path: path.into(),
            name: name.into(),
            offset: 0,
            head: vec![],
            partial: vec![],
            line: 0,
            stamps: BTreeMap::new(),
            lines: vec![],
            files: BTreeMap::new(),
            behind: false,
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn restart(&mut self, into: &mut RunData) {
        into.clear();
        *self = Self::named(std::mem::take(&mut self.path), std::mem::take(&mut self.name));
    }

    /// Whether the log is no longer the one that was read.
    fn replaced(&self) -> bool {
        if self.offset == 0 {
            return false;
        }
        let path = self.path.join(METRICS);
        match fs::metadata(&path) {
            Ok(m) if m.len() < self.offset => true,
            Ok(_) => read_head(&path, self.head.len()).is_ok_and(|h| h != self.head),
            Err(e) => e.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Reads on in the log until it ends or the time is up.
    fn follow(&mut self, into: &mut RunData, begin: Instant) -> io::Result<bool> {
        let path = self.path.join(METRICS);
        let mut file = match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            other => other?,
        };
        file.seek(SeekFrom::Start(self.offset))?;
        let mut some = false;
        let mut chunk = vec![0; CHUNK];
        loop {
            let n = file.read(&mut chunk)?;
            if n == 0 {
                return Ok(some);
            }
            some = true;
            self.offset += n as u64;
            let missing = HEAD.saturating_sub(self.head.len()).min(n);
            self.head.extend_from_slice(&chunk[..missing]);
            let mut rest = &chunk[..n];
            while let Some(end) = rest.iter().position(|&b| b == b'\n') {
                self.partial.extend_from_slice(&rest[..end]);
                rest = &rest[end + 1..];
                let line = std::mem::take(&mut self.partial);
                self.take_line(&line, into);
            }
            self.partial.extend_from_slice(rest);
            if self.partial.len() > LINE {
                self.lines
                    .push(format!("{METRICS}: line {} is longer than {LINE} bytes; left out", self.line + 1));
                self.partial.clear();
            }
            if begin.elapsed() > BUDGET {
                self.behind = true;
                return Ok(true);
            }
        }
    }

    fn take_line(&mut self, line: &[u8], into: &mut RunData) {
        self.line += 1;
        let line = line.trim_ascii();
        if line.is_empty() {
            return;
        }
        let e = match serde_json::from_slice::<Event>(line) {
            Ok(e) => return into.push(&e),
            Err(e) => e,
        };
        // the last line of a finished run repeats its summary
        let value: Option<serde_json::Value> = serde_json::from_slice(line).ok();
        if value.is_some_and(|v| v["type"] == "summary") {
            return;
        }
        if self.lines.len() < 20 {
            self.lines.push(format!("{METRICS}: line {} cannot be read: {e}; left out", self.line));
        }
    }

    /// Reads a file that is new or changed. True if it was; `read` says what is wrong with its content.
    fn file(
        &mut self,
        name: &Path,
        into: &mut RunData,
        read: impl FnOnce(&Path, &mut RunData) -> Result<(), String>,
    ) -> bool {
        let path = self.path.join(name);
        let m = match fs::metadata(&path) {
            Ok(m) => m,
            Err(e) => {
                self.stamps.remove(name);
                let gone = self.files.remove(name).is_some();
                if e.kind() != io::ErrorKind::NotFound {
                    self.files.insert(name.to_owned(), format!("{}: cannot be read: {e}", name.display()));
                }
                return gone;
            }
        };
        let stamp = (m.len(), m.modified().ok());
        if self.stamps.get(name) == Some(&stamp) {
            return false;
        }
        self.stamps.insert(name.to_owned(), stamp);
        match read(&path, into) {
            Ok(()) => self.files.remove(name),
            Err(e) => self.files.insert(name.to_owned(), format!("{}: {e}", name.display())),
        };
        true
    }

    fn snapshots(&mut self, into: &mut RunData, begin: Instant) -> bool {
        let Ok(entries) = fs::read_dir(self.path.join(SNAPSHOTS)) else { return false };
        let names = entries.flatten().map(|e| e.file_name());
        let mut names: Vec<_> = names.filter(|n| Snapshot::step_of(&n.to_string_lossy()).is_some()).collect();
        names.sort();
        let mut some = false;
        // the newest first: it is what is shown
        for n in names.iter().rev() {
            let new = self.file(&Path::new(SNAPSHOTS).join(n), into, |path, into| {
                let bytes = fs::read(path).map_err(|e| format!("cannot be read: {e}"))?;
                into.push_snapshot(Snapshot::from_bytes(&bytes)?);
                Ok(())
            });
            some |= new;
            // those that have not changed cost next to nothing
            if new && begin.elapsed() > BUDGET {
                self.behind = true;
                break;
            }
        }
        some
    }
}

impl Source for FolderSource {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn poll(&mut self, into: &mut RunData) -> bool {
        let begin = Instant::now();
        self.behind = false;
        let mut some = self.replaced();
        if some {
            self.restart(into);
        }
        let here = self.path.is_dir();
        if here {
            some |= self.file(Path::new(CONFIG), into, |path, into| {
                into.set_config(text(path)?);
                Ok(())
            });
            some |= self.file(Path::new(VOCAB), into, |path, into| {
                into.slots = slots(path, &into.config)?;
                Ok(())
            });
            some |= self.file(Path::new(MODEL), into, |path, into| {
                into.card = Some(json(path)?);
                Ok(())
            });
            some |= self.file(Path::new(PROFILE), into, |path, into| {
                into.time = Some(json(path)?);
                Ok(())
            });
            some |= self.file(Path::new(SUMMARY), into, |path, into| {
                into.summary = Some(json(path)?);
                Ok(())
            });
            match self.follow(into, begin) {
                Ok(new) => {
                    some |= new;
                    self.files.remove(Path::new(METRICS));
                }
                Err(e) => {
                    self.files.insert(METRICS.into(), format!("{METRICS}: cannot be read: {e}"));
                }
            }
            some |= self.snapshots(into, begin);
        }
        let mut problems = vec![];
        if !self.path.exists() {
            let p = self.path.display();
            problems.push(format!("{p}: no such folder; a run is made by `birkhoff train --out {p}`"));
        } else if !here {
            problems.push(format!("{} is a file; a run is a folder", self.path.display()));
        } else if into.is_empty() && !self.path.join(CONFIG).exists() {
            problems
                .push(format!("{} has no {CONFIG}: no run folder, or not begun yet", self.path.display()));
        }
        problems.extend(self.files.values().cloned());
        problems.extend(self.lines.iter().cloned());
        if problems != into.problems {
            into.problems.clear();
            problems.into_iter().for_each(|p| into.problem(p));
            some = true;
        }
        some
    }

    fn behind(&self) -> bool {
        self.behind
    }
}

fn read_head(path: &Path, n: usize) -> io::Result<Vec<u8>> {
    let mut head = Vec::with_capacity(n);
    File::open(path)?.take(n as u64).read_to_end(&mut head)?;
    Ok(head)
}

fn text(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("cannot be read: {e}"))
}

fn json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, String> {
    serde_json::from_str(&text(path)?).map_err(|e| format!("not valid: {e}"))
}

/// The names of the slots that the features make: the first line of the vocabularies has the schema.
fn slots(path: &Path, config: &str) -> Result<Vec<String>, String> {
    let mut line = String::new();
    let file = File::open(path).map_err(|e| format!("cannot be read: {e}"))?;
    BufReader::new(file.take(LINE as u64))
        .read_line(&mut line)
        .map_err(|e| format!("cannot be read: {e}"))?;
    let head: serde_json::Value = serde_json::from_str(&line).map_err(|e| format!("not valid: {e}"))?;
    let fields = |kind: &str| head["schema"][kind].as_array().cloned().unwrap_or_default();
    let config: toml::Table = config.parse().unwrap_or_default();
    let features = config.get("model").and_then(|m| m.get("features"));
    let dense = features.and_then(|f| f.get("dense_slots")).and_then(toml::Value::as_integer).unwrap_or(1);
    let mut names = vec![];
    if !fields("numeric").is_empty() {
        let dense = dense.clamp(0, 1000);
        names.extend((0..dense).map(|i| if dense == 1 { "numbers".into() } else { format!("numbers {i}") }));
    }
    names.extend(fields("categorical").iter().map(|f| f["name"].as_str().unwrap_or("?").to_string()));
    Ok(names)
}

/// The runs that paths mean: a run folder itself, or every run folder in it. What is neither stays as it is,
/// so that its source can say what is wrong.
pub fn runs_in(paths: &[PathBuf]) -> Vec<PathBuf> {
    let is_run = |p: &Path| p.join(CONFIG).is_file() || p.join(METRICS).is_file();
    let mut out = vec![];
    for p in paths {
        let mut inside: Vec<PathBuf> = match fs::read_dir(p) {
            Ok(entries) if !is_run(p) => entries.flatten().map(|e| e.path()).filter(|c| is_run(c)).collect(),
            _ => vec![],
        };
        inside.sort();
        if inside.is_empty() {
            inside.push(p.clone());
        }
        out.extend(inside.into_iter().filter(|c| !out.contains(c)).collect::<Vec<_>>());
    }
    out
}
