//! [TensorBoard](https://www.tensorflow.org/tensorboard) event files: what `metrics.jsonl` records, as scalars.
//!
//! A file is a sequence of records in TFRecord framing (length, masked CRC-32C of the length, bytes, masked CRC-32C
//! of the bytes), each a protobuf `Event`. Field numbers are those of TensorFlow's event.proto and summary.proto.
//!
//! A file is never changed. A run that goes on after an interruption begins a new one, whose `SessionLog` tells
//! TensorBoard to forget what earlier files say of the steps that are now taken again.

use super::tally::RankRecord;
use prost::Message;
use serde_json::Value;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// How the names of event files begin; TensorBoard looks for it.
const PREFIX: &str = "events.out.tfevents.";
/// How the names of ours end: no other file is ever removed.
const SUFFIX: &str = ".birkhoff";

#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<SummaryValue>,
}

#[derive(Clone, PartialEq, Message)]
struct SummaryValue {
    #[prost(string, tag = "1")]
    tag: String,
    /// One of several kinds of value in the original, so that zero is written as well.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    /// 1: start.
    #[prost(int32, tag = "1")]
    status: i32,
}

/// The scalars of a record of `metrics.jsonl`, by tag; none for records that have no step or are of no such kind.
///
/// `train/…` for logged steps, `valid/…` for evaluations, `diagnosis/…` for the largest composite gains, `ranks/…` for
/// what ranks wait and hide.
pub fn scalars(record: &Value) -> Vec<(String, f64)> {
    let fields = record.as_object().into_iter().flatten();
    let numbers = |group: &str, except: &[&str]| {
        fields
            .clone()
            .filter(|(k, _)| !except.contains(&k.as_str()))
            .filter_map(|(k, v)| Some((format!("{group}/{k}"), v.as_f64()?)))
            .collect()
    };
    let largest = |key: &str| {
        let gains = record[key].as_array()?.iter().filter_map(Value::as_f64);
        gains.reduce(f64::max)
    };
    match record["type"].as_str() {
        Some("step") => numbers("train", &["step", "total_steps", "epoch", "rows", "seconds"]),
        Some("eval") => numbers("valid", &["step", "epoch", "rows", "positives", "seconds"]),
        Some("diagnose") => ["forward", "backward"]
            .into_iter()
            .filter_map(|d| {
                Some((format!("diagnosis/max_composite_{d}_gain"), largest(&format!("composite_{d}"))?))
            })
            .collect(),
        Some("ranks") => match serde_json::from_value::<RankRecord>(record.clone()) {
            Ok(r) => vec![("ranks/overlap".into(), r.overlap()), ("ranks/waiting".into(), r.waiting())],
            Err(_) => vec![],
        },
        _ => vec![],
    }
}

/// An event file being written.
#[derive(Debug)]
pub struct EventFile {
    file: File,
    path: PathBuf,
}

impl EventFile {
    /// Begins a new file in a run folder. With `purge_from`, TensorBoard forgets what earlier files of the folder
    /// say of this step and later ones.
    pub fn create(folder: &Path, purge_from: Option<u64>) -> io::Result<Self> {
        // names sort by time, also where a run goes on within the second
        let last = ours(folder)?.iter().filter_map(|p| second_of(p)).max();
        let second = last.map_or(now() as u64, |s| (s + 1).max(now() as u64));
        let path = folder.join(format!("{PREFIX}{second:010}{SUFFIX}"));
        let mut f = EventFile { file: File::create(&path)?, path };
        f.write(&Event { file_version: Some("brain.Event:2".into()), ..Event::now(0) })?;
        if let Some(step) = purge_from {
            f.write(&Event { session_log: Some(SessionLog { status: 1 }), ..Event::now(step) })?;
        }
        Ok(f)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends what a record of `metrics.jsonl` says, visible at once.
    pub fn record(&mut self, record: &Value) -> io::Result<()> {
        let (Some(step), scalars) = (record["step"].as_u64(), scalars(record)) else { return Ok(()) };
        if scalars.is_empty() {
            return Ok(());
        }
        let value = |(tag, v)| SummaryValue { tag, simple_value: Some(v as f32) };
        let summary = Summary { value: scalars.into_iter().map(value).collect() };
        self.write(&Event { summary: Some(summary), ..Event::now(step) })
    }

    fn write(&mut self, event: &Event) -> io::Result<()> {
        // in one piece: a reader never sees half a record that does not become whole
        self.file.write_all(&framed(&event.encode_to_vec()))
    }
}

impl Event {
    fn now(step: u64) -> Self {
        Event { wall_time: now(), step: step as i64, ..Event::default() }
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// A TFRecord.
fn framed(data: &[u8]) -> Vec<u8> {
    let mask = |crc: u32| crc.rotate_right(15).wrapping_add(0xa282_ead8);
    let length = (data.len() as u64).to_le_bytes();
    let mut out = Vec::with_capacity(data.len() + 16);
    out.extend(length);
    out.extend(mask(crc32c::crc32c(&length)).to_le_bytes());
    out.extend(data);
    out.extend(mask(crc32c::crc32c(data)).to_le_bytes());
    out
}

/// The event files of a run folder that birkhoff wrote.
pub fn ours(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = vec![];
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if second_of(&path).is_some() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn second_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse().ok()
}

/// The last step that a `metrics.jsonl` speaks of; `None` where there is no record yet.
pub fn last_step(metrics: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(metrics).ok()?;
    text.lines().rev().find_map(|l| serde_json::from_str::<Value>(l).ok()?["step"].as_u64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn records_become_scalars() {
        let step = json!({"type": "step", "step": 20, "rows": 10, "loss": 0.5, "lr": 0.0, "seconds": 1.0});
        assert_eq!(scalars(&step), [("train/loss".into(), 0.5), ("train/lr".into(), 0.0)]);
        let eval = json!({"type": "eval", "step": 20, "ne": null, "auc": 0.7, "best": true});
        assert_eq!(scalars(&eval), [("valid/auc".into(), 0.7)], "undefined metrics are left out");
        let diagnosis = json!({"type": "diagnose", "step": 0, "composite_forward": [1.0, 3.0, 2.0], "composite_backward": []});
        assert_eq!(scalars(&diagnosis), [("diagnosis/max_composite_forward_gain".into(), 3.0)]);
        let line = |waiting| json!({"communicating": 2.0, "waiting": waiting, "overlap": 0.5, "sent": 3, "table_values": 4});
        let ranks = json!({"type": "ranks", "step": 20, "seconds": 9.0, "steps": 20, "steps_seconds": 4.0, "ranks": [line(0.5), line(0.5)]});
        assert_eq!(scalars(&ranks), [("ranks/overlap".into(), 0.75), ("ranks/waiting".into(), 0.125)]);
        assert!(scalars(&json!({"type": "summary", "step": 3, "ne": 0.9})).is_empty());
    }

    #[test]
    fn frames_are_those_of_tensorflow() {
        // by tensorboard's own masked_crc32c
        let hex: String = framed(b"abc").iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "0300000000000000b099490e6162636e57f121");
    }

    #[test]
    fn names_sort_and_others_are_left_alone() {
        let dir = tempfile::tempdir().expect("temp dir");
        std::fs::write(dir.path().join("events.out.tfevents.123.host"), "x").expect("another's file");
        let a = EventFile::create(dir.path(), None).expect("first").path().to_owned();
        let b = EventFile::create(dir.path(), Some(5)).expect("second").path().to_owned();
        assert!(a < b);
        assert_eq!(ours(dir.path()).expect("list"), [a, b]);
    }
}
