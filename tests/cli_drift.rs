//! Rows that are not like the training rows, files that change while they are read, runs of older versions.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
mod program;

use program::{birkhoff, fails, ok, s};
use serde_json::Value;

const SMALL: [&str; 12] = [
    "--device",
    "cpu",
    "--quiet",
    "--set",
    "model.layers=1",
    "--set",
    "model.width=8",
    "--set",
    "train.batch=128",
    "--set",
    "train.eval_batch=256",
    "--json",
];

const SCHEMA: &str = "[data]\nmin_count = 1\n[[data.columns]]\nname = 'click'\nkind = 'label'\npositive = '= yes'\n\
                      [[data.columns]]\nname = 'user'\nkind = 'categorical'\n\
                      [[data.columns]]\nname = 'price'\nkind = 'numeric'\n";

/// Rows of one source; `change` spoils a row's user and price.
fn rows(n: usize, change: impl Fn(String, String) -> (String, String)) -> String {
    let mut text = String::from("click,user,price\n");
    for i in 0..n {
        let user = i * 7 % 23;
        let price = if i % 9 == 0 { String::new() } else { format!("{}.5", i * 11 % 40) };
        let click = if (user * 3 + i * 11 % 40) % 5 < 2 { "yes" } else { "no" };
        let (user, price) = change(user.to_string(), price);
        text += &format!("{click},{user},{price}\n");
    }
    text
}

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let p = Place(tempfile::tempdir().unwrap());
        p.write("schema.toml", SCHEMA);
        p.write("train.csv", &rows(1200, |u, p| (u, p)));
        p.write("valid.csv", &rows(300, |u, p| (u, p)));
        p
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        std::fs::write(self.at(name), text).unwrap();
        self.at(name)
    }

    /// The arguments of a training run.
    fn train(&self, valid: &str, more: &[&str]) -> Vec<String> {
        let (train, valid, schema, out) =
            (self.at("train.csv"), self.at(valid), self.at("schema.toml"), self.at("run"));
        let args =
            ["train", "--train", s(&train), "--valid", s(&valid), "--schema", s(&schema), "--out", s(&out)];
        args.iter().chain(&SMALL).chain(more).map(|a| a.to_string()).collect()
    }
}

fn strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

/// What succeeds: standard output and standard error.
fn told(args: &[&str]) -> (String, String) {
    let o = birkhoff(args);
    let err = String::from_utf8(o.stderr).unwrap();
    assert!(o.status.success(), "{args:?}: {err}");
    (String::from_utf8(o.stdout).unwrap(), err)
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn drift_is_told_by_every_command_that_reads_rows() {
    let p = Place::new();
    let (run, scores, report) = (p.at("run"), p.at("scores.csv"), p.at("report.json"));
    let (out, err) = told(&strs(&p.train("valid.csv", &[])));
    assert!(!err.contains("warning"), "ordinary rows are quiet: {err}");
    let lines: Vec<Value> = out.lines().map(json).collect();
    let drift = lines.iter().find(|l| l["type"] == "drift").expect("a line of drift");
    assert_eq!((&drift["rows"], drift["columns"].as_array().unwrap().len()), (&300.into(), 2));

    // users by another scheme, and a price in cents
    let far = p.write("far.csv", &rows(400, |u, p| (format!("{u}-b"), p.replace(".5", "50"))));
    let near = p.at("valid.csv");
    let eval = |data: &Path| told(&["eval", s(&run), "--data", s(data), "--device", "cpu", "--json"]);
    let check =
        |data: &Path, more: &[&str]| told(&[&["check", s(data), "--against", s(&run)], more].concat());
    let predict = |data: &Path| {
        let args = ["predict", s(&run), "--data", s(data), "--device", "cpu", "--out", s(&scores)];
        told(&[&args[..], &["--report", s(&report)]].concat()).1
    };
    let warned = |err: &str| {
        let lines: Vec<&str> = err.lines().filter(|l| l.starts_with("warning: ")).collect();
        assert_eq!(lines.len(), 2, "{err}");
        assert!(lines[0].contains("column price: ") && lines[0].contains("outside 0.5 to 39.5"), "{err}");
        for part in [
            "far.csv: column user: 100 % of its values",
            "\"7-b\"",
            "(\"0\", \"14\",",
            "about 0 % were to be expected",
        ] {
            assert!(lines[1].contains(part), "{part}: {err}");
        }
    };
    let columns = |drift: &Value, far: bool| {
        let drift = drift.as_array().unwrap();
        let names: Vec<&Value> = drift.iter().map(|c| &c["column"]).collect();
        assert_eq!(names, ["price", "user"]);
        assert!(drift.iter().all(|c| c["far"] == far), "{drift:?}");
        assert_eq!(drift[1]["unseen"]["here"], if far { 1.0 } else { 0.0 });
    };
    let (out, err) = eval(&near);
    assert!(!err.contains("warning"), "{err}");
    columns(&json(&out)["drift"], false);
    let (out, err) = eval(&far);
    warned(&err);
    let out = json(&out);
    assert!(out["ne"].is_number(), "{out}");
    columns(&out["drift"], true);

    assert!(!predict(&near).contains("warning"));
    columns(&json(&std::fs::read_to_string(&report).unwrap())["drift"], false);
    warned(&predict(&far));
    columns(&json(&std::fs::read_to_string(&report).unwrap())["drift"], true);
    let lines = std::fs::read_to_string(&scores).unwrap();
    assert_eq!(lines.lines().count(), 401, "scores are written all the same");

    // drift alone is no error
    let (table, _) = check(&far, &[]);
    for part in ["! price", "! user", "missing", "unseen", "outside", "warning: column user"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    assert!(!check(&near, &[]).0.contains("! "));
    columns(&json(&check(&far, &["--json"]).0)["drift"], true);
    columns(&json(&check(&near, &["--json"]).0)["drift"], false);

    // a column that is empty now, in the validation rows
    p.write("empty.csv", &rows(300, |_, p| (String::new(), p)));
    let (_, err) = told(&strs(&p.train("empty.csv", &["--force"])));
    assert!(err.contains("column user: 100 % of the rows have no value, of training's 0 %"), "{err}");
}

/// Takes what older versions did not write from a run's folder.
fn make_old(run: &Path) {
    let config = std::fs::read_to_string(run.join("config.toml")).unwrap();
    let lines: Vec<&str> = config.lines().filter(|l| !l.starts_with("standardize_log")).collect();
    std::fs::write(run.join("config.toml"), lines.join("\n")).unwrap();
    let vocab = std::fs::read_to_string(run.join("vocab.json")).unwrap();
    let (header, rest) = vocab.split_once('\n').unwrap();
    let mut header = json(header);
    header.as_object_mut().unwrap().remove("profile").expect("a profile");
    assert_eq!(header["schema"]["numeric"][0]["transform"].to_string(), r#"{"kind":"log"}"#);
    let (columns, _) = rest.split_once("{\"end\"").unwrap();
    let text = format!("{header}\n{columns}");
    let sum = xxhash_rust::xxh3::xxh3_64(text.as_bytes());
    std::fs::write(run.join("vocab.json"), format!("{text}{{\"end\":\"{sum:016x}\"}}\n")).unwrap();
}

#[test]
fn runs_of_older_versions_keep_their_numbers() {
    let p = Place::new();
    let (run, data) = (p.at("run"), p.at("valid.csv"));
    told(&strs(&p.train("valid.csv", &["--set", "data.standardize_log=false"])));
    let eval = || json(&ok(&["eval", s(&run), "--data", s(&data), "--device", "cpu", "--json"]));
    let predict = || ok(&["predict", s(&run), "--data", s(&data), "--device", "cpu", "--out", "-"]);
    let (mut before, scores) = (eval(), predict());
    make_old(&run);
    before.as_object_mut().unwrap().remove("drift");
    assert_eq!(eval(), before, "nothing to compare with, the same figures");
    assert_eq!(predict(), scores);
    let (table, err) = told(&["check", s(&data), "--against", s(&run)]);
    assert!(err.contains("older version") && !table.contains("against the training rows"), "{err}{table}");

    // its vocabularies are taken as they are, plain logarithms and all: a run that was stopped before its first checkpoint
    std::fs::remove_dir_all(run.join("checkpoints")).unwrap();
    std::fs::remove_file(run.join("summary.json")).unwrap();
    std::fs::write(run.join("metrics.jsonl"), "").unwrap();
    let vocab = std::fs::read(run.join("vocab.json")).unwrap();
    ok(&["train", "--resume", s(&run), "--json"]);
    assert!(
        std::fs::read(run.join("vocab.json")).unwrap() == vocab,
        "the same bytes: what checkpoints are checked by"
    );
    assert_eq!(predict(), scores);
}

/// The AUC of a run on rows whose click hangs on a uniform number from 0 to `most`.
fn auc_of_uniform(most: f64) -> f64 {
    let p = Place::new();
    let rows = |n: u64, seed: u64| {
        let mut text = String::from("click,user,price\n");
        for i in 0..n {
            let hash = xxhash_rust::xxh3::xxh3_64_with_seed(&i.to_le_bytes(), seed);
            let (x, y) = ((hash >> 32) as f64 / 2f64.powi(32), (hash as u32) as f64 / 2f64.powi(32));
            let click = if y < 1.0 / (1.0 + (-8.0 * (x - 0.5)).exp()) { "yes" } else { "no" };
            text += &format!("{click},u{},{}\n", i % 5, x * most);
        }
        text
    };
    p.write("train.csv", &rows(6000, 1));
    p.write("valid.csv", &rows(2000, 2));
    let out = ok(&strs(&p.train("valid.csv", &["--epochs", "3"])));
    json(out.lines().last().unwrap())["auc"].as_f64().unwrap()
}

#[test]
fn logs_of_large_numbers_train_as_those_of_small_ones() {
    let (large, small) = (auc_of_uniform(1e9), auc_of_uniform(1.0));
    assert!(large > 0.8 && small > 0.8, "{large} {small}");
}

/// A run of many short epochs, once it has trained an epoch.
fn training(p: &Place) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_birkhoff"))
        .args(p.train("valid.csv", &["--epochs", "100000"]))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("\"eval\"") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "it ended before its first evaluation");
    }
    (child, out)
}

/// What a run that must fail says, on one line.
fn failure(mut child: Child, mut out: BufReader<std::process::ChildStdout>) -> String {
    std::io::copy(&mut out, &mut std::io::sink()).unwrap();
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(2), "{err}");
    let errors: Vec<&str> = err.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!((errors.len(), err.contains("panicked")), (1, false), "{err}");
    errors[0].into()
}

#[test]
fn a_file_that_changes_while_it_is_read_ends_the_run() {
    let p = Place::new();
    let append = |name: &str| {
        let mut file = std::fs::File::options().append(true).open(p.at(name)).unwrap();
        file.write_all(b"yes,3,1.5\nno,").unwrap();
    };
    let (child, out) = training(&p);
    append("train.csv");
    let said = failure(child, out);
    for part in ["train.csv: changed while it was read: it had ", " bytes, now ", "such as a copy"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let resumed = |parts: &[&str]| fails(&["train", "--resume", s(&p.at("run"))], parts);
    resumed(&["train.csv", "not those that the run began with"]);

    let p = Place::new();
    let (child, out) = training(&p);
    // one digit in the middle, and the size is as it was
    let (path, mut text) = (p.at("train.csv"), std::fs::read(p.at("train.csv")).unwrap());
    let middle = text.len() / 2;
    let at = middle + text[middle..].iter().position(u8::is_ascii_digit).unwrap();
    text[at] = if text[at] == b'1' { b'2' } else { b'1' };
    std::fs::write(&path, text).unwrap();
    let said = failure(child, out);
    assert!(said.contains("train.csv: changed while it was read: "), "{said}");
    fails(
        &["train", "--resume", s(&p.at("run"))],
        &["train.csv: changed since the run began: it has the same size and other content", "--train"],
    );

    let p = Place::new();
    let (child, out) = training(&p);
    let mut file = std::fs::File::options().append(true).open(p.at("valid.csv")).unwrap();
    file.write_all(b"yes,3,1.5\n").unwrap();
    let said = failure(child, out);
    assert!(said.contains("valid.csv: changed while it was read: it had "), "{said}");
    fails(&["train", "--resume", s(&p.at("run"))], &["valid.csv: changed since the run began", "--valid"]);
}

#[test]
fn a_rule_that_never_matches_is_shown_with_the_labels() {
    let p = Place::new();
    p.write("schema.toml", &SCHEMA.replace("= yes", "= Yes"));
    let parts = [
        "train.csv: all 1,200 labels are 0: the rule \"= Yes\" of column click",
        "\"yes\", \"no\"",
        "positive",
    ];
    fails(&strs(&p.train("valid.csv", &[])), &parts);
    p.write("schema.toml", &SCHEMA.replace("= yes", "!= maybe"));
    fails(
        &strs(&p.train("valid.csv", &[])),
        &["all 1,200 labels are 1: the rule \"!= maybe\"", "every value"],
    );
    // without a rule there is none to correct
    p.write("schema.toml", &SCHEMA.replace("positive = '= yes'\n", ""));
    p.write("train.csv", &rows(1200, |u, p| (u, p)).replace("yes", "0").replace("no,", "0,"));
    fails(&strs(&p.train("valid.csv", &[])), &["labels are 0; a model needs clicks and non-clicks"]);
}
