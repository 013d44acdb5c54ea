//! `birkhoff synth` and `birkhoff devices` from outside, and the files that a user copies.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use birkhoff::model::config::Config;
use serde_json::Value;

fn birkhoff(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
    command.args(args).env_remove("XDG_RUNTIME_DIR").env_remove("BIRKHOFF_LOG").stdin(Stdio::null());
    command.output().expect("the program starts")
}

/// stdout of a run that must succeed without a word on stderr.
fn stdout(args: &[&str]) -> String {
    let output = birkhoff(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.is_empty(), "{args:?}: {stderr}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn json(args: &[&str]) -> Value {
    let text = stdout(args);
    assert_eq!(text.lines().count(), 1, "one line: {text}");
    serde_json::from_str(&text).expect("JSON")
}

fn path(dir: &Path, name: &str) -> String {
    dir.join(name).to_string_lossy().into_owned()
}

#[test]
fn synth_writes_rows_and_their_truth() {
    let dir = tempfile::tempdir().expect("temp dir");
    let (a, b, c) = (path(dir.path(), "a.tsv"), path(dir.path(), "b.tsv"), path(dir.path(), "c.tsv"));
    let report = json(&["synth", "--rows", "3000", "--seed", "7", "--out", &a, "--json"]);
    let text = std::fs::read_to_string(&a).expect("the file is there");
    assert_eq!(text.lines().count(), 3000);
    assert!(text.lines().all(|row| row.split('\t').count() == 40));
    let positives = text.lines().filter(|row| row.starts_with("1\t")).count() as u64;
    assert_eq!((report["rows"].as_u64(), report["positives"].as_u64()), (Some(3000), Some(positives)));
    assert_eq!((report["file"].as_str(), report["seed"].as_u64()), (Some(a.as_str()), Some(7)));
    let number = |key: &str| report[key].as_f64().expect(key);
    assert!((number("base_rate") - positives as f64 / 3000.0).abs() < 1e-12);
    assert!((0.6..0.95).contains(&number("truth_ne")) && number("truth_auc") > 0.7, "{report}");
    assert!(report["world"].is_u64());

    let summary = stdout(&["synth", "--rows", "3000", "--seed", "7", "--out", &b]);
    assert!(summary.contains("3000 rows") && summary.contains("planted truth: NE 0."), "{summary}");
    assert_eq!(std::fs::read(&b).expect("b"), text.as_bytes(), "the seed decides the bytes");
    stdout(&["synth", "--rows", "3000", "--seed", "8", "--out", &c]);
    assert_ne!(std::fs::read(&c).expect("c"), text.as_bytes());
    assert_eq!(std::fs::read_dir(dir.path()).expect("dir").count(), 3, "nothing else is left");
}

#[cfg(unix)]
#[test]
fn synth_to_a_pipe_leaves_only_rows_on_stdout() {
    let output = birkhoff(&["synth", "--rows", "20", "--out", "/dev/stdout"]);
    assert!(output.status.success());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text.lines().filter(|row| row.split('\t').count() == 40).count(), 20, "{text}");
    assert_eq!(text.lines().count(), 20, "{text}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("20 rows"));
}

#[test]
fn synth_errors_are_one_line_with_code_2() {
    let dir = tempfile::tempdir().expect("temp dir");
    let folder = path(dir.path(), "");
    let missing = path(dir.path(), "no/such/folder/x.tsv");
    for (out, words) in [(&folder, "is a directory"), (&missing, "its folder does not exist")] {
        let output = birkhoff(&["synth", "--rows", "5", "--out", out]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(output.stdout.is_empty() && stderr.trim_end().lines().count() == 1, "{stderr}");
        assert!(stderr.contains(words), "{stderr}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).expect("dir").count(), 0);
}

#[test]
fn devices_lists_the_cpu_and_every_adapter() {
    let report = json(&["devices", "--json"]);
    assert!(report["cpu"]["threads"].as_u64() >= Some(1), "{report}");
    let adapters = report["adapters"].as_array().expect("a list");
    let auto = report["auto"]["device"].as_str().expect("auto");
    for (i, adapter) in adapters.iter().enumerate() {
        assert_eq!(adapter["index"].as_u64(), Some(i as u64));
        let chosen = adapter["auto"].as_bool().expect("auto");
        assert_eq!(chosen, auto == i.to_string());
        assert!(!(chosen && adapter["device_type"] == "software"), "auto took a software driver: {report}");
        for key in ["name", "backend", "driver"] {
            assert!(adapter[key].is_string(), "{key}: {report}");
        }
        assert!(adapter["limits"]["max_storage_buffer_binding_size"].as_u64() >= Some(128 << 20));
    }
    assert_eq!(auto == "cpu", !adapters.iter().any(|a| a["auto"] == true), "{report}");

    let text = stdout(&["devices"]);
    assert!(text.contains("cpu executor") && text.contains(&format!("--device auto, here {auto}")), "{text}");
}

#[test]
fn ready_configurations_load_and_resolve() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut seen = Vec::new();
    for entry in std::fs::read_dir(&folder).expect("examples/") {
        let file = entry.expect("entry").path();
        if file.extension().is_none_or(|e| e != "toml") {
            continue;
        }
        if file.ends_with("ablation.toml") {
            // a sweep: the configurations of all its runs are checked
            let list = stdout(&[
                "sweep",
                &file.display().to_string(),
                "--list",
                "--",
                "--train",
                "a",
                "--valid",
                "b",
            ]);
            assert_eq!(list.lines().count(), 40, "{list}");
            continue;
        }
        let config = Config::load(Some(&file), &[]).unwrap_or_else(|e| panic!("{e}"));
        let plan = config.model.resolve(27).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        assert_eq!(plan.len(), config.model.layers);
        seen.push(file.file_name().expect("name").to_string_lossy().into_owned());
    }
    seen.sort();
    assert!(seen.len() >= 6, "{seen:?}");
    let defaults = Config::load(Some(&folder.join("criteo.toml")), &[]).expect("criteo.toml");
    assert_eq!(defaults, Config::default(), "examples/criteo.toml spells out the defaults");
}
