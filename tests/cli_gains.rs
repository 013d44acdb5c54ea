//! What a training run records of its residual stream, and `birkhoff gains`.

use birkhoff::diagnose::{ModelCard, Snapshot, TimeReport};
use birkhoff::train::history::{self, History};
use birkhoff::train::trainer::Event;
mod program;

use program::{birkhoff, ok, s};
use std::path::Path;

fn train(dir: &Path, name: &str, sets: &[&str]) -> std::path::PathBuf {
    let (data, run) = (dir.join("rows.tsv"), dir.join(name));
    if !data.exists() {
        ok(&["synth", "--rows", "2000", "--seed", "1", "--out", s(&data)]);
    }
    let mut args = vec!["train", "--train", s(&data), "--valid", s(&data), "--out", s(&run), "--quiet"];
    args.extend(["--device", "cpu", "--set", "model.width=8", "--set", "train.batch=100"]);
    args.extend(["--set", "train.diagnose_every=5", "--set", "train.diagnose_rows=30"]);
    for x in sets {
        args.extend(["--set", x]);
    }
    ok(&args);
    run
}

#[test]
fn a_run_records_its_residual_stream() {
    let dir = tempfile::tempdir().unwrap();
    let modules = "model.modules=[{kind=\"attention\"},{kind=\"linear\"},{kind=\"cross\",rank=2}]";
    let run = train(dir.path(), "mhc", &["model.layers=3", "model.ensemble=weighted", modules]);
    let h = History::read(&run).unwrap();
    assert!(h.problems.is_empty());
    let records: Vec<_> =
        h.events.iter().filter_map(|e| if let Event::Diagnose(r) = e { Some(r) } else { None }).collect();
    assert_eq!(records.iter().map(|r| r.step).collect::<Vec<_>>(), [0, 5, 10, 15, 20]);
    for r in &records {
        assert_eq!((r.layers.len(), r.composite_forward.len(), r.composite_backward.len()), (3, 3, 3));
        for l in &r.layers {
            // Sinkhorn ends with rows
            assert!((l.row_sum_min - 1.0).abs() < 1e-5 && (l.row_sum_max - 1.0).abs() < 1e-5, "{l:?}");
            assert!((l.forward_gain - 1.0).abs() < 1e-5 && (l.col_sum_max - 1.0).abs() < 0.1, "{l:?}");
            assert!(l.second_singular > 0.5 && l.second_singular < 1.0, "{l:?}");
            assert!(l.row_entropy > 0.0 && l.row_entropy < 1.4 && l.grad_norm > 0.0 && l.state_rms > 0.0);
            let names: Vec<_> = l.modules.iter().map(|m| m.name.as_str()).collect();
            assert_eq!(names, ["attention", "linear", "cross"]);
            assert!(l.modules.iter().all(|m| m.rms > 0.0));
        }
    }
    let weights = |i: usize| records[i].layers[1].modules.iter().map(|m| m.weight).collect::<Vec<_>>();
    assert!(weights(0).iter().all(|w| (w - 1.0 / 3.0).abs() < 1e-6) && weights(4) != weights(0));
    assert!((records[0].layers[0].stream_cosine - 1.0).abs() < 0.05, "streams start as copies");

    let snapshots = history::snapshots(&run);
    assert_eq!(snapshots.iter().map(|s| s.0).collect::<Vec<_>>(), [0, 5, 10, 15, 20]);
    let last = history::snapshot(&snapshots[4].1).unwrap();
    assert_eq!((last.mode.as_str(), last.streams, last.layers.len()), ("mhc", 4, 3));
    for (l, layer) in last.layers.iter().enumerate() {
        let r = last.res(l).unwrap();
        assert!((r.forward_gain() - records[4].layers[l].forward_gain).abs() < 1e-6);
        assert!((r.backward_gain() - records[4].layers[l].backward_gain).abs() < 1e-6);
        let map = &layer.modules[0];
        assert_eq!((layer.modules.len(), map.name.as_str(), map.slots), (1, "attention", 27));
        for row in map.attention.chunks(27) {
            assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-4 && row.iter().all(|&x| x >= 0.0));
        }
    }
    let c = last.composite(0, 2).unwrap();
    assert!((c.forward_gain() - records[4].composite_forward[2]).abs() < 1e-5);
    assert!((c.backward_gain() - records[4].composite_backward[0]).abs() < 1e-5);

    let card: ModelCard = serde_json::from_slice(&std::fs::read(run.join("model.json")).unwrap()).unwrap();
    assert!(card.parts.iter().any(|p| p.name == "layers.2" && p.parameters > 0));
    let time: TimeReport = serde_json::from_slice(&std::fs::read(run.join("profile.json")).unwrap()).unwrap();
    assert_eq!((time.device.as_str(), time.step), ("cpu", 8));
    let inside: f64 = time.rows.iter().map(|r| r.micros).sum();
    assert!(inside > 0.0 && inside <= time.wall_micros * 1.001, "{inside} of {}", time.wall_micros);
    for stage in ["forward", "backward", "update"] {
        assert!(time.rows.iter().any(|r| r.stage == stage), "{stage}");
    }

    // a second run into the folder leaves nothing of the first
    train(dir.path(), "again", &["model.layers=1"]);
    let again = dir.path().join("again");
    std::fs::write(again.join("snapshots").join(Snapshot::file_name(99)), b"old").unwrap();
    let data = dir.path().join("rows.tsv");
    ok(&[
        "train",
        "--train",
        s(&data),
        "--valid",
        s(&data),
        "--out",
        s(&again),
        "--force",
        "--quiet",
        "--device",
        "cpu",
        "--set",
        "train.diagnose_every=0",
        "--set",
        "model.layers=1",
    ]);
    assert!(history::snapshots(&again).is_empty());
}

#[test]
fn a_change_of_slots_and_the_other_modes_are_measured() {
    let dir = tempfile::tempdir().unwrap();
    let change = "model.layer=[{},{slots=10},{}]";
    for mode in ["mhc", "hc"] {
        let run = train(dir.path(), mode, &[change, &format!("model.residual.mode={mode}")]);
        let last = history::snapshot(&history::snapshots(&run).last().unwrap().1).unwrap();
        assert!(
            last.composite(0, 1).is_some()
                && last.composite(1, 2).is_none()
                && last.composite(2, 2).is_some()
        );
        assert_eq!(last.layers[2].modules[0].slots, 10);
    }
    let run = train(dir.path(), "shortcut", &["model.residual.mode=shortcut", "model.layers=2"]);
    let out = ok(&["gains", s(&run), "--json"]);
    let v: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(v["diagnosis"]["composite_forward"], serde_json::json!([1.0, 1.0]));
}

#[test]
fn gains_are_printed_and_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let hot = ["model.residual.mode=hc", "model.layers=4", "train.lr=3e-2"];
    let run = train(dir.path(), "hc", &hot);
    let text = ok(&["gains", s(&run)]);
    assert!(
        text.contains("hc, 4 streams: gains at step 20") && text.contains("greatest composite gain"),
        "{text}"
    );
    let v: serde_json::Value =
        serde_json::from_str(&ok(&["gains", s(&run), "--json", "--step", "0"])).unwrap();
    assert_eq!(v["diagnosis"]["step"], 0);
    assert_eq!(v["course"].as_array().unwrap().len(), 5);
    // up to the rounding of a mean over tokens
    let first = v["course"][0]["forward"].as_f64().unwrap();
    assert!((first - 1.0).abs() < 1e-12, "HC starts at the identity: {first}");
    assert_ne!(v["course"][4]["forward"], 1.0, "and leaves it");
    let (svg, png) = (dir.path().join("g.svg"), dir.path().join("g.png"));
    ok(&["gains", s(&run), "--out", s(&svg)]);
    ok(&["gains", s(&run), "--out", s(&png)]);
    assert!(std::fs::read_to_string(&svg).unwrap().contains("composite of layers 0…3"));
    assert!(std::fs::read(&png).unwrap().starts_with(b"\x89PNG"));

    for (args, parts) in [
        (vec!["gains", s(&run), "--step", "7"], vec!["no diagnosis at step 7", "nearest at step 5"]),
        (vec!["gains", s(&run), "--out", "g.pdf"], vec![".svg or a .png"]),
        (vec!["gains", s(dir.path())], vec!["metrics.jsonl"]),
    ] {
        let o = birkhoff(&args);
        let err = String::from_utf8_lossy(&o.stderr);
        assert_eq!(o.status.code(), Some(2), "{err}");
        assert!(parts.iter().all(|p| err.contains(p)) && err.lines().count() == 1, "{err}");
    }
}
