//! `birkhoff compare` and `birkhoff sweep` as a user types them.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn birkhoff(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_birkhoff")).args(args).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ok(args: &[&str]) -> (String, String) {
    let o = birkhoff(args);
    assert!(o.status.success(), "{args:?}: {}", text(&o.stderr));
    (text(&o.stdout), text(&o.stderr))
}

/// Exit code 2, and a last line that holds every part.
fn fails(args: &[&str], parts: &[&str]) -> Output {
    let o = birkhoff(args);
    let err = text(&o.stderr);
    let last = err.lines().last().unwrap_or_default();
    assert_eq!(o.status.code(), Some(2), "{args:?}: {err}");
    assert!(!err.contains("panicked"), "{err}");
    parts.iter().for_each(|p| assert!(last.contains(p), "{args:?}: {last:?} does not say {p:?}"));
    o
}

fn s(p: &Path) -> &str {
    p.to_str().unwrap()
}

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let p = Place { dir: tempfile::tempdir().unwrap() };
        ok(&["synth", "--rows", "1200", "--seed", "1", "--out", s(&p.at("train.tsv"))]);
        ok(&["synth", "--rows", "400", "--seed", "2", "--out", s(&p.at("valid.tsv"))]);
        p
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn train(&self, name: &str, sets: &[&str]) -> PathBuf {
        let (train, valid, out) = (self.at("train.tsv"), self.at("valid.tsv"), self.at(name));
        let mut args = vec!["train", "--train", s(&train), "--valid", s(&valid), "--out", s(&out), "--quiet"];
        args.extend(["--device", "cpu", "--set", "model.width=8", "--set", "train.batch=200"]);
        sets.iter().for_each(|set| args.extend(["--set", set]));
        ok(&args);
        out
    }
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn compare_shows_what_differs_and_names_what_is_broken() {
    let p = Place::new();
    let a = p.train("a", &["model.layers=1"]);
    let b = p.train("b", &["model.layers=2", "train.eval_every=2"]);
    let broken = p.at("broken");
    std::fs::create_dir(&broken).unwrap();
    std::fs::write(broken.join("config.toml"), "[model]\nwidht = 3\n").unwrap();
    std::fs::write(broken.join("weights.safetensors"), "").unwrap();
    let csv = p.at("t.csv");
    let (out, err) = ok(&["compare", s(&a), s(&b), s(&broken), s(&p.at("none")), "--csv", s(&csv)]);
    assert!(err.contains("unknown key `model.widht`") && err.contains("none: no such run folder"), "{err}");
    let lines: Vec<&str> = out.lines().collect();
    let words: Vec<&str> = lines[0].split_whitespace().collect();
    assert_eq!(words[..4], ["run", "layers", "eval_every", "NE"], "only what differs: {out}");
    assert_eq!(lines.len(), 3);
    assert!(lines[1].starts_with("a ") && lines[1].contains("+0.000"), "{out}");
    let table = std::fs::read_to_string(&csv).unwrap();
    assert!(table.starts_with("run,path,finished,ne_difference_percent,device,ne,auc,"), "{table}");

    let (out, _) = ok(&["compare", s(&a), s(&b), "--json", "--sort", "model.layers"]);
    let v: Value = serde_json::from_str(&out).unwrap();
    let ne = |run: &Path| json(&run.join("summary.json"))["ne"].as_f64().unwrap();
    let want = 100.0 * (ne(&b) - ne(&a)) / ne(&a);
    assert!((v["runs"][1]["ne_difference"].as_f64().unwrap() - want).abs() < 1e-9);
    assert_eq!(v["runs"][1]["config"]["model.layers"], 2);
    assert_eq!(v["differs"], serde_json::json!(["model.layers", "train.eval_every"]));
    let card = json(&a.join("model.json"));
    assert_eq!(v["runs"][0]["parameters"], card["parameters"]);
    assert!(v["runs"][0]["flops_per_example"].as_f64().unwrap() > 1e4);

    // an unfinished run shows its best evaluation so far
    let best = json(&b.join("summary.json"));
    std::fs::remove_file(b.join("summary.json")).unwrap();
    let (out, _) = ok(&["compare", s(p.dir.path()), "--json"]);
    let v: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&v["runs"][1]["finished"], &v["runs"][1]["ne"]), (&Value::Bool(false), &best["ne"]));
    assert_eq!(v["runs"][1]["best_step"], best["best_step"]);
    assert_eq!(v["broken"].as_array().unwrap().len(), 1);
    assert!(ok(&["compare", s(&a), s(&b)]).0.contains("b (unfinished)"));

    fails(&["compare", s(&a), "--sort", "nee"], &["--sort nee", "it takes run, ne"]);
    fails(&["compare", s(&broken)], &["none of the 1 runs can be read"]);
}

#[test]
fn a_sweep_trains_restarts_and_reports() {
    let p = Place::new();
    let file = p.at("sweep.toml");
    let write = |layers: &str| {
        let text = format!(
            "train = 'train.tsv'\nvalid = 'valid.tsv'\nseeds = 2\n[set]\nmodel.width = 8\ntrain.batch = 200\n[grid]\n'model.layers' = {layers}\n"
        );
        std::fs::write(&file, text).unwrap();
    };
    write("[1, 2]");
    let list = ok(&["sweep", s(&file), "--list"]).0;
    assert_eq!(list.lines().count(), 4);
    assert!(list.contains("layers=2/seed-1: birkhoff train --train"), "{list}");
    let out = p.at("sweep");
    assert!(!out.exists(), "--list trains nothing");

    // a folder of somebody else in the way: that run fails, the others are trained
    let bad = out.join("layers=2/seed-2");
    std::fs::create_dir_all(&bad).unwrap();
    std::fs::write(bad.join("photo.jpg"), "x").unwrap();
    let args = ["sweep", s(&file), "--json", "--", "--device", "cpu"];
    let o = fails(&args, &["1 of 4 runs failed, the first layers=2/seed-2"]);
    assert!(
        text(&o.stderr).contains("failed: layers=2/seed-2: ")
            && text(&o.stderr).contains("not a birkhoff run")
    );
    let v: Value = serde_json::from_str(&text(&o.stdout)).unwrap();
    assert_eq!(v["runs"][1]["seeds"], serde_json::json!([1]));
    assert_eq!(v["runs"][1]["failed"][0]["seed"], 2);
    std::fs::remove_dir_all(&bad).unwrap();

    // the same command goes on: three are kept, the missing one is trained
    let first = out.join("layers=1/seed-1/weights.safetensors");
    let time = || std::fs::metadata(&first).unwrap().modified().unwrap();
    let before = time();
    let csv = p.at("t.csv");
    let (stdout, err) = ok(&["sweep", s(&file), "--json", "--csv", s(&csv), "--", "--device", "cpu"]);
    assert!(
        err.contains("3 of 4 runs are finished already") && err.contains("[4/4] layers=2/seed-2: NE"),
        "{err}"
    );
    assert_eq!(time(), before);
    let v: Value = serde_json::from_str(&stdout).unwrap();
    let ne = |run: &str| json(&out.join(run).join("summary.json"))["ne"].as_f64().unwrap();
    let (x, y) = (ne("layers=2/seed-1"), ne("layers=2/seed-2"));
    assert!(x != y, "another seed is another run");
    let mean = v["runs"][1]["ne"]["mean"].as_f64().unwrap();
    let std = v["runs"][1]["ne"]["std"].as_f64().unwrap();
    assert!((mean - (x + y) / 2.0).abs() < 1e-12 && (std - (x - y).abs() / 2f64.sqrt()).abs() < 1e-12);
    assert_eq!(std::fs::read_to_string(&csv).unwrap().lines().count(), 3);
    let (table, _) = ok(&["sweep", s(&file), "--", "--device", "cpu"]);
    assert!(table.lines().nth(1).unwrap().contains(" ± ") && table.contains("layers=2"), "{table}");

    // what never came to its end goes on, what cannot go on begins again, and nothing else is trained
    let summary = out.join("layers=1/seed-2/summary.json");
    let mut interrupted = json(&summary);
    interrupted["interrupted"] = Value::Bool(true);
    std::fs::write(&summary, interrupted.to_string()).unwrap();
    std::fs::remove_file(out.join("layers=2/seed-1/summary.json")).unwrap();
    let (_, err) = ok(&["sweep", s(&file), "--jobs", "2", "--", "--device", "cpu"]);
    for part in [
        "2 of 4 runs are finished already",
        "layers=2/seed-1: was stopped, goes on",
        "layers=1/seed-2: begins again at its first step: ",
        "finished: 1 of 1 epochs are trained",
    ] {
        assert!(err.contains(part), "{part}: {err}");
    }
    assert!(!err.contains("layers=2/seed-1: begins again"), "{err}");
    assert_eq!(json(&summary)["interrupted"], false);
    assert_eq!((ne("layers=2/seed-1"), time()), (x, before), "the same seed is the same run");

    // other settings, other data, mistakes: before anything is trained
    let args = ["sweep", s(&file), "--", "--device", "cpu", "--set", "train.lr=0.1"];
    fails(&args, &["finished with another configuration", "train.lr is 0.005 there, 0.1 here"]);
    fails(&["sweep", s(&file), "--", "--nonsense"], &["--nonsense"]);
    write("[1, 0]");
    fails(
        &["sweep", s(&file), "--out", s(&p.at("other"))],
        &["run layers=0", "model.layers = 0 is out of range"],
    );
    assert!(!p.at("other").exists());
    write("[1, 2]");
    ok(&["synth", "--rows", "500", "--seed", "9", "--out", s(&p.at("valid.tsv"))]);
    fails(&["sweep", s(&file), "--", "--device", "cpu"], &["valid.tsv", "not as it was"]);
}

/// One signal to the sweep alone: the run in progress saves what it has learned, no other begins, and the same
/// command goes on with it.
#[cfg(unix)]
#[test]
fn an_interrupted_sweep_goes_on() {
    let p = Place::new();
    let file = p.at("long.toml");
    std::fs::write(&file, "train = 'train.tsv'\nvalid = 'valid.tsv'\nseeds = 2\n[set]\nmodel.width = 8\nmodel.layers = 1\ntrain.batch = 40\ntrain.epochs = 6\ntrain.patience = 0\ntrain.diagnose_every = 0\n").unwrap();
    let args = |out: &Path| -> Vec<String> {
        ["sweep", s(&file), "--out", s(out), "--", "--device", "cpu"].map(String::from).into()
    };
    let out = p.at("stopped");
    let child = Command::new(env!("CARGO_BIN_EXE_birkhoff"))
        .args(args(&out))
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let run = out.join("base/seed-1");
    let steps =
        || std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default().contains("\"step\":20,");
    let begin = std::time::Instant::now();
    while !steps() {
        assert!(begin.elapsed().as_secs() < 120, "the run does not begin");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let kill = Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status();
    assert!(kill.unwrap().success());
    let o = child.wait_with_output().unwrap();
    let err = text(&o.stderr);
    assert_eq!(o.status.code(), Some(130), "{err}");
    assert!(err.contains("the same command goes on with the runs that are missing"), "{err}");
    assert!(!run.join("summary.json").exists() && run.join("checkpoints").is_dir(), "stopped, not finished");
    assert!(!out.join("base/seed-2").exists(), "no other begins");

    // it goes on to where it would have come
    let sweep = |out: &Path| {
        let args = args(out);
        ok(&args.iter().map(String::as_str).collect::<Vec<_>>()).1
    };
    let err = sweep(&out);
    assert!(err.contains("base/seed-1: was stopped, goes on") && !err.contains("begins again"), "{err}");
    assert!(err.contains("[2/2] base/seed-2: NE") && !err.contains("finished already"), "{err}");
    let whole = p.at("whole");
    sweep(&whole);
    for seed in ["base/seed-1", "base/seed-2"] {
        let weights = |out: &Path| std::fs::read(out.join(seed).join("weights.safetensors")).unwrap();
        assert!(weights(&out) == weights(&whole), "{seed}");
    }

    // of another configuration it is another run
    for seed in ["base/seed-1", "base/seed-2"] {
        std::fs::remove_file(out.join(seed).join("summary.json")).unwrap();
    }
    let (_, err) = ok(&["sweep", s(&file), "--out", s(&out), "--", "--device", "cpu", "--epochs", "1"]);
    assert!(
        err.contains(
            "base/seed-1: begins again at its first step: its configuration is another: train.epochs is 6"
        ),
        "{err}"
    );
}

/// Rows split from one file, a schema and a cache, all beside the sweep's file, which stands in another folder.
#[test]
fn a_sweep_of_split_rows_says_its_data_by_keys() {
    let p = Place::new();
    let folder = p.at("there");
    std::fs::create_dir(&folder).unwrap();
    let rows = std::fs::read_to_string(p.at("train.tsv")).unwrap();
    for (i, part) in rows.split_inclusive('\n').collect::<Vec<_>>().chunks(600).enumerate() {
        std::fs::write(folder.join(format!("part-{i}.tsv")), part.concat()).unwrap();
    }
    std::fs::write(folder.join("schema.toml"), "[data]\nformat = 'criteo'\nmin_count = 3\n").unwrap();
    let file = folder.join("s.toml");
    std::fs::write(
        &file,
        "train = ['part-0.tsv', 'part-1*.tsv']\nsplit = '0.7,0.3'\nsplit_by = 'random:4'\nschema = 'schema.toml'\ncache = 'rows'\n[set]\nmodel.width = 8\nmodel.layers = 1\n",
    )
    .unwrap();
    ok(&["sweep", s(&file), "--", "--device", "cpu"]);
    let run = folder.join("s/base/seed-1");
    let data = json(&run.join("data.json"));
    assert_eq!((&data["split"], &data["split_by"]), (&"0.7,0.3".into(), &"random:4".into()));
    assert_eq!(data["sizes"].as_array().unwrap().len(), 2);
    assert!(std::fs::read_to_string(run.join("config.toml")).unwrap().contains("min_count = 3"));
    assert_eq!(std::fs::read_dir(folder.join("rows")).unwrap().count(), 2, "training and validation rows");
    // what stands behind -- counts, also where the two exclude each other
    let list = ok(&["sweep", s(&file), "--list", "--", "--valid", "v.tsv"]).0;
    assert!(!list.contains("--split") && list.contains("--valid v.tsv"), "{list}");
    fails(
        &["sweep", s(&file), "--", "--device", "cpu", "--split-by", "random:5"],
        &["--split-by random:4, not random:5"],
    );
    // a file that comes to match the pattern is other data
    std::fs::copy(folder.join("part-0.tsv"), folder.join("part-10.tsv")).unwrap();
    fails(&["sweep", s(&file), "--", "--device", "cpu"], &["part-10.tsv: not the file, or not as it was"]);
}
