//! A run's past, read back from its folder.

use super::run::{METRICS, SNAPSHOTS};
use super::trainer::Event;
use crate::diagnose::Snapshot;
use std::path::{Path, PathBuf};

/// The lines of a run's `metrics.jsonl` that are events, in order, and what was wrong with others.
#[derive(Debug, Default)]
pub struct History {
    /// Steps, evaluations and diagnoses.
    pub events: Vec<Event>,
    /// One line for each line that could not be read: file, line, reason. A last line without its end is a
    /// write in progress or a crash, and no problem.
    pub problems: Vec<String>,
}

impl History {
    /// Reads a run folder's `metrics.jsonl`.
    pub fn read(run: &Path) -> anyhow::Result<Self> {
        let path = run.join(METRICS);
        let text = std::fs::read(&path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound if run.is_dir() => {
                anyhow::anyhow!(
                    "{} has no {METRICS}: not a run folder, or the run has not begun; give the folder of `birkhoff train --out`",
                    run.display()
                )
            }
            _ => anyhow::anyhow!("{}: cannot read: {e}", path.display()),
        })?;
        let mut h = History::default();
        for (i, line) in text.split_inclusive(|&b| b == b'\n').enumerate() {
            let whole = line.ends_with(b"\n");
            if let Err(e) = h.line(line)
                && whole
            {
                h.problems.push(format!("{}:{}: {e}", path.display(), i + 1));
            }
        }
        Ok(h)
    }

    fn line(&mut self, line: &[u8]) -> Result<(), String> {
        let text = std::str::from_utf8(line).map_err(|_| "not UTF-8".to_string())?;
        if text.trim().is_empty() {
            return Ok(());
        }
        let v: serde_json::Value = serde_json::from_str(text).map_err(|e| format!("not valid JSON: {e}"))?;
        if v.get("type").and_then(|t| t.as_str()) == Some("summary") {
            return Ok(());
        }
        self.events.push(serde_json::from_value(v).map_err(|e| format!("not an event of a run: {e}"))?);
        Ok(())
    }
}

/// The snapshots of a run by step, in order; empty where there are none.
pub fn snapshots(run: &Path) -> Vec<(u64, PathBuf)> {
    let entries = std::fs::read_dir(run.join(SNAPSHOTS)).into_iter().flatten().flatten();
    let mut list: Vec<(u64, PathBuf)> = entries
        .filter_map(|e| Some((Snapshot::step_of(&e.file_name().to_string_lossy())?, e.path())))
        .collect();
    list.sort();
    list
}

/// Reads a snapshot file; the error names it.
pub fn snapshot(path: &Path) -> anyhow::Result<Snapshot> {
    let bytes = std::fs::read(path).map_err(|e| anyhow::anyhow!("{}: cannot read: {e}", path.display()))?;
    Snapshot::from_bytes(&bytes).map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_lines_are_named_and_the_rest_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let good = r#"{"type":"diagnose","step":3,"rows":9,"seconds":0.5,"layers":[],"composite_forward":[],"composite_backward":[],"token_composite_forward":[],"token_composite_backward":[]}"#;
        let text = format!(
            "{good}\nnot json\n\n{{\"type\":\"summary\",\"ne\":null}}\n{{\"type\":\"step\"}}\n{good}\n{{\"type\":\"st"
        );
        std::fs::write(dir.path().join(METRICS), text).unwrap();
        let h = History::read(dir.path()).unwrap();
        assert_eq!(h.events.len(), 2);
        assert_eq!(h.problems.len(), 2, "{:?}", h.problems);
        assert!(h.problems[0].contains("metrics.jsonl:2: not valid JSON"), "{:?}", h.problems);
        assert!(h.problems[1].contains("metrics.jsonl:5: not an event"), "{:?}", h.problems);
        let e = History::read(&dir.path().join("none")).unwrap_err().to_string();
        assert!(e.contains("none"), "{e}");
    }
}
