//! Event files as the `tensorboard` package reads them, against `metrics.jsonl`.

mod python;

use birkhoff::model::config::Config;
use birkhoff::train::run::RunFolder;
use birkhoff::train::store::Store;
use birkhoff::train::tensorboard::{ours, scalars};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// What TensorBoard must show: every scalar of `metrics.jsonl`, in 32 bits.
fn wanted(metrics: &str) -> BTreeMap<String, Vec<(u64, f32)>> {
    let mut all: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
    for line in metrics.lines() {
        let record: Value = serde_json::from_str(line).unwrap();
        for (tag, v) in scalars(&record) {
            all.entry(tag).or_default().push((record["step"].as_u64().unwrap(), v as f32));
        }
    }
    all
}

fn shown(python: &Path, run: &Path) -> BTreeMap<String, Vec<(u64, f32)>> {
    serde_json::from_str(&python::script(python, "read_events.py", &[run])).unwrap()
}

#[test]
fn a_run_in_tensorboard_is_its_metrics_file() {
    let Some(py) = python::python("a_run_in_tensorboard_is_its_metrics_file") else { return };
    let dir = tempfile::tempdir().unwrap();
    let at = |n: &str| dir.path().join(n).display().to_string();
    let ok = |args: &[&str]| {
        let o = Command::new(env!("CARGO_BIN_EXE_birkhoff")).args(args).output().unwrap();
        assert!(o.status.success(), "{args:?}: {}", String::from_utf8_lossy(&o.stderr));
    };
    let (data, run) = (at("train.tsv"), at("run"));
    ok(&["synth", "--rows", "1500", "--out", &data]);
    let mut args =
        vec!["train", "--train", &data, "--valid", &data, "--out", &run, "--device", "cpu", "--quiet"];
    args.extend(["--set", "model.layers=2", "--set", "model.width=8", "--set", "train.batch=100"]);
    args.extend([
        "--set",
        "train.log_every=2",
        "--set",
        "train.diagnose_every=5",
        "--set",
        "train.eval_every=6",
    ]);
    ok(&args);
    let metrics = std::fs::read_to_string(Path::new(&run).join("metrics.jsonl")).unwrap();
    let want = wanted(&metrics);
    for tag in ["train/loss", "train/lr", "train/grad_norm", "train/rows_per_s", "valid/ne", "valid/auc"] {
        assert!(want[tag].len() >= 3, "{tag}");
    }
    for tag in ["valid/logloss", "valid/calibration", "diagnosis/max_composite_forward_gain"] {
        assert!(want[tag].len() >= 3, "{tag}");
    }
    assert_eq!(want["diagnosis/max_composite_backward_gain"][0].0, 0, "before the first step");
    assert_eq!(shown(&py, Path::new(&run)), want);

    // a new run in the folder leaves nothing of the old one, and may do without
    args.extend(["--force", "--set", "train.tensorboard=false"]);
    ok(&args);
    assert!(ours(Path::new(&run)).unwrap().is_empty());
}

#[test]
fn a_run_that_goes_on_shows_no_step_twice() {
    let Some(py) = python::python("a_run_that_goes_on_shows_no_step_twice") else { return };
    let dir = tempfile::tempdir().unwrap();
    let run = RunFolder::create(dir.path(), false).unwrap();
    run.begin(&Config::default()).unwrap();
    let record = |step: u64, loss: f64| json!({"type": "step", "step": step, "loss": loss});
    let mut store = run.store().unwrap();
    for step in 1..=10 {
        store.record(&record(step, 1.0 / step as f64)).unwrap();
    }
    drop(store);
    // killed at step 10, goes on from a checkpoint after step 6
    for from in [6, 8] {
        let text = std::fs::read_to_string(run.metrics_path()).unwrap();
        let kept: String = text.lines().take(from).map(|l| format!("{l}\n")).collect();
        std::fs::write(run.metrics_path(), kept).unwrap();
        let mut store = run.store().unwrap();
        for step in from as u64 + 1..=12 {
            store.record(&record(step, 1.0 / step as f64 + from as f64)).unwrap();
        }
    }
    assert_eq!(ours(dir.path()).unwrap().len(), 3);
    let want = wanted(&std::fs::read_to_string(run.metrics_path()).unwrap());
    assert_eq!(want["train/loss"].len(), 12);
    assert_eq!(shown(&py, dir.path()), want);
}
