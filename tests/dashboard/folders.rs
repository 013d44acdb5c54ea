//! Run folders in every state that a person can point the dashboard at.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;

use birkhoff::dashboard::folder::runs_in;
use birkhoff::dashboard::{FolderSource, RunData, Source};
use birkhoff::diagnose::{Record, Snapshot};
use birkhoff::train::trainer::Event;

use super::recorded::{DIAGNOSE, LAYERS, Recorded, TOTAL};

const RUN: Recorded = Recorded { mode: "mhc", seed: 4, done: 600 };

fn line(step: u64) -> String {
    serde_json::to_string(&RUN.step(step)).expect("json") + "\n"
}

/// As it comes back from a file: JSON readers may round the last bit.
fn read_back(r: &Record) -> Record {
    serde_json::from_str(&serde_json::to_string(r).expect("json")).expect("json")
}

fn append(path: &Path, text: &str) {
    let mut f = OpenOptions::new().create(true).append(true).open(path.join("metrics.jsonl")).expect("open");
    f.write_all(text.as_bytes()).expect("write");
}

fn poll(s: &mut FolderSource, r: &mut RunData) -> bool {
    let mut some = s.poll(r);
    while s.behind() {
        some |= s.poll(r);
    }
    some
}

#[test]
fn a_whole_folder_is_read() {
    let t = tempfile::tempdir().expect("folder");
    let path = Recorded { done: TOTAL, ..RUN }.write(t.path(), "a");
    let (mut s, mut r) = (FolderSource::new(&path), RunData::new("a"));
    assert!(poll(&mut s, &mut r));
    assert_eq!(r.problems, Vec::<String>::new());
    assert_eq!((s.name(), r.mode(), r.device(), r.finished()), ("a".into(), "mhc", Some("llvmpipe"), true));
    assert_eq!((r.steps.len(), r.evals.step.len()), (300, 10));
    let diagnoses = (TOTAL / DIAGNOSE + 1) as usize;
    assert_eq!((r.diagnoses.len(), r.snapshots.len()), (diagnoses, diagnoses));
    assert_eq!(r.snapshots[3], RUN.snapshot(450));
    assert_eq!(r.slots.len(), 27);
    assert_eq!((r.slots[0].as_str(), r.slots[26].as_str()), ("numbers", "C26"));
    assert_eq!(r.card.as_ref().expect("card").parts.len(), LAYERS + 4);
    assert!(!poll(&mut s, &mut r), "nothing is new");
}

#[test]
fn a_growing_log_is_followed_and_half_a_line_waits() {
    let t = tempfile::tempdir().expect("folder");
    let path = t.path();
    let (mut s, mut r) = (FolderSource::new(path), RunData::new("a"));
    append(path, &line(10));
    assert!(poll(&mut s, &mut r));
    assert_eq!(r.steps.step, [10.0]);
    let next = line(20);
    append(path, &next[..next.len() / 2]);
    poll(&mut s, &mut r);
    assert_eq!((r.steps.len(), r.problems.len()), (1, 0));
    append(path, &next[next.len() / 2..]);
    assert!(poll(&mut s, &mut r));
    assert_eq!(r.steps.step, [10.0, 20.0]);
    let event = |e: Event| serde_json::to_string(&e).expect("json") + "\n";
    append(path, &event(RUN.eval(20)));
    append(path, &event(Event::Diagnose(RUN.record(20))));
    assert!(poll(&mut s, &mut r));
    assert_eq!((r.evals.rows[0], r.diagnoses[0].clone()), (20.0 * 512.0, read_back(&RUN.record(20))));
    assert!(!poll(&mut s, &mut r));
}

#[test]
fn a_bad_line_is_named_and_the_rest_is_read() {
    let t = tempfile::tempdir().expect("folder");
    append(t.path(), &format!("{}{{\"type\":\"step\",\"st\n\u{0}\u{1}\n\n{}", line(10), line(20)));
    append(t.path(), "{\"type\":\"summary\",\"steps\":20}\n");
    let (mut s, mut r) = (FolderSource::new(t.path()), RunData::new("a"));
    poll(&mut s, &mut r);
    assert_eq!(r.steps.step, [10.0, 20.0]);
    assert_eq!(r.problems.len(), 2, "{:?}", r.problems);
    assert!(r.problems[0].starts_with("metrics.jsonl: line 2 cannot be read: "), "{}", r.problems[0]);
    assert!(r.problems[1].starts_with("metrics.jsonl: line 3 "));
    poll(&mut s, &mut r);
    assert_eq!(r.problems.len(), 2);
}

#[test]
fn a_damaged_snapshot_is_named_until_it_is_whole() {
    let t = tempfile::tempdir().expect("folder");
    let path = RUN.write(t.path(), "a");
    let file = path.join("snapshots").join(Snapshot::file_name(300));
    let bytes = fs::read(&file).expect("read");
    for cut in [0, 5, 40, bytes.len() - 1] {
        fs::write(&file, &bytes[..cut]).expect("write");
        let (mut s, mut r) = (FolderSource::new(&path), RunData::new("a"));
        poll(&mut s, &mut r);
        assert_eq!((r.snapshots.len(), r.problems.len()), (4, 1), "cut at {cut}: {:?}", r.problems);
        assert!(r.problems[0].contains("step-000000300.safetensors"), "{}", r.problems[0]);
        fs::write(&file, &bytes).expect("write");
        poll(&mut s, &mut r);
        assert_eq!((r.snapshots.len(), r.problems.len()), (5, 0));
    }
}

#[test]
fn damaged_small_files_are_named() {
    let t = tempfile::tempdir().expect("folder");
    let path = RUN.write(t.path(), "a");
    for f in ["model.json", "profile.json", "vocab.json"] {
        fs::write(path.join(f), "{\"half\": ").expect("write");
    }
    fs::write(path.join("config.toml"), [0xff, 0xfe, 0x00]).expect("write");
    let (mut s, mut r) = (FolderSource::new(&path), RunData::new("a"));
    poll(&mut s, &mut r);
    let named: Vec<&str> = r.problems.iter().map(|p| p.split(':').next().unwrap_or_default()).collect();
    assert_eq!(named, ["config.toml", "model.json", "profile.json", "vocab.json"]);
    assert_eq!((r.steps.len(), r.mode()), (60, "mhc"), "the rest is there; the snapshots know the mode");
}

#[test]
fn a_missing_folder_is_said_and_its_appearance_noticed() {
    let t = tempfile::tempdir().expect("folder");
    let path = t.path().join("later");
    let (mut s, mut r) = (FolderSource::new(&path), RunData::new("later"));
    assert!(poll(&mut s, &mut r));
    assert!(r.problems[0].contains("no such folder") && r.problems[0].contains("birkhoff train --out"));
    assert!(!poll(&mut s, &mut r), "said once");
    RUN.write(t.path(), "later");
    assert!(poll(&mut s, &mut r));
    assert_eq!((r.problems.len(), r.steps.len()), (0, 60));

    let file = t.path().join("file");
    File::create(&file).expect("file");
    let (mut s, mut r) = (FolderSource::new(&file), RunData::new("file"));
    poll(&mut s, &mut r);
    assert!(r.problems[0].ends_with("is a file; a run is a folder"), "{:?}", r.problems);

    let empty = t.path().join("empty");
    fs::create_dir(&empty).expect("folder");
    let (mut s, mut r) = (FolderSource::new(&empty), RunData::new("empty"));
    poll(&mut s, &mut r);
    assert!(r.problems[0].contains("has no config.toml"), "{:?}", r.problems);
}

#[test]
fn a_run_begun_anew_replaces_the_old_one() {
    let t = tempfile::tempdir().expect("folder");
    let path = Recorded { done: TOTAL, ..RUN }.write(t.path(), "a");
    let (mut s, mut r) = (FolderSource::new(&path), RunData::new("a"));
    poll(&mut s, &mut r);
    assert!(r.finished() && r.steps.len() == 300);
    // shorter than what was read
    for f in ["summary.json", "metrics.jsonl"] {
        fs::remove_file(path.join(f)).expect("remove");
    }
    fs::remove_dir_all(path.join("snapshots")).expect("remove");
    append(&path, &line(10));
    assert!(poll(&mut s, &mut r));
    assert_eq!((r.finished(), r.steps.len(), r.snapshots.len(), r.mode()), (false, 1, 0, "mhc"));
    // as long as before, but another run
    let other = Recorded { seed: 9, ..RUN };
    fs::write(path.join("metrics.jsonl"), other.log()).expect("write");
    assert!(poll(&mut s, &mut r));
    assert_eq!((r.steps.len(), r.diagnoses[1].clone()), (60, read_back(&other.record(150))));
}

#[test]
fn a_folder_of_runs_means_each_of_them() {
    let t = tempfile::tempdir().expect("folder");
    let (b, a) = (RUN.write(t.path(), "b"), RUN.write(t.path(), "a"));
    fs::create_dir(t.path().join("notes")).expect("folder");
    let all = runs_in(&[t.path().to_owned(), a.clone(), t.path().join("none")]);
    assert_eq!(all, [a, b, t.path().join("none")]);
}
