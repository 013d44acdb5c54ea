//! The parts of a split, from the files of real runs: disjoint, all of the rows, and the same after a stop.

mod program;

use birkhoff::data::FittedEncoder;
use birkhoff::data::feed::{Feed, Files};
use birkhoff::data::input::Place;
use birkhoff::data::loader::{LoaderOptions, Order};
use birkhoff::data::reader::{ReadOptions, Source};
use birkhoff::data::split::{Part, Split};
use birkhoff::graph::exec::Device;
use birkhoff::model::config::Config;
use birkhoff::train::infer::Inputs;
use birkhoff::train::run::RunFolder;
use birkhoff::train::schema::format;
use program::{ok, s};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

const ROWS: usize = 900;

const SCHEMA: &str = "
[data]
min_count = 1
[[data.columns]]
name = 'row'
kind = 'categorical'
[[data.columns]]
name = 'user'
kind = 'categorical'
[[data.columns]]
name = 'day'
kind = 'ignore'
[[data.columns]]
name = 'click'
kind = 'label'
";

fn user(row: usize) -> usize {
    row * 31 % 457
}

/// Not in the order of the rows.
fn day(row: usize) -> usize {
    1 + row * 17 % 28
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Numbers of the rows of a part, as a run's own files say what it is.
fn rows_of(run: &Path, file: &Path, part: Part) -> BTreeSet<usize> {
    let cfg = Config::load(Some(&run.join("config.toml")), &[]).unwrap();
    let split: Split = serde_json::from_value(json(&run.join("data.json"))["parts"].clone()).unwrap();
    let encoder = Arc::new(FittedEncoder::load(&run.join("vocab.json")).unwrap());
    let place = Place::File(file.to_path_buf());
    let mut source = Source::new(vec![place], format(&cfg.data), ReadOptions::default()).part(&split, part);
    source.passed = vec!["row".into()];
    let groups = Inputs::new(encoder.clone(), &cfg, &Device::Cpu).unwrap().groups;
    let feed = Feed::from(Files::new(source, encoder));
    let mut rows = BTreeSet::new();
    for batch in feed.loader(groups, Order::Sequential, LoaderOptions::new(64)).unwrap() {
        for name in batch.unwrap().passed {
            assert!(rows.insert(name[1..].parse().unwrap()), "{name} comes twice");
        }
    }
    rows
}

/// What the vocabulary of the column `row` has: the rows that the run was fitted to.
fn fitted_rows(run: &Path) -> BTreeSet<usize> {
    let text = std::fs::read_to_string(run.join("vocab.json")).unwrap();
    let mut lines = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    let n = lines.find(|l| l["column"] == "row").unwrap()["values"].as_u64().unwrap();
    lines.take(n as usize).map(|l| l.as_str().unwrap()[1..].parse().unwrap()).collect()
}

/// Standard output without what depends on the clock: evaluations and the test rows' metrics.
fn measured(out: &str) -> Vec<Value> {
    let lines = out.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    let mut lines: Vec<Value> = lines.filter(|l| l["type"] == "eval" || l["type"] == "test").collect();
    lines.iter_mut().for_each(|l| _ = l.as_object_mut().unwrap().remove("seconds"));
    lines
}

#[test]
fn parts_are_disjoint_and_the_same_after_a_stop() {
    let dir = tempfile::tempdir().unwrap();
    let at = |n: &str| dir.path().join(n);
    let rows = (0..ROWS).map(|i| {
        let click = u8::from((user(i) + i % 3).is_multiple_of(4));
        format!("r{i},u{},2024-02-{:02},{click}\n", user(i), day(i))
    });
    let (file, schema) = (at("log.csv"), at("s.toml"));
    std::fs::write(&file, "row,user,day,click\n".to_owned() + &rows.collect::<String>()).unwrap();
    std::fs::write(&schema, SCHEMA).unwrap();
    for by in ["random:3", "group:user", "time:day"] {
        let run = at(&by.replace(':', "_"));
        let mut args = vec!["train", "--train", s(&file), "--split", "0.6,0.2,0.2", "--split-by", by];
        args.extend(["--schema", s(&schema), "--out", s(&run), "--device", "cpu", "--quiet", "--json"]);
        for set in ["model.layers=1", "model.width=4", "train.batch=32", "train.epochs=2", "train.keep=100"] {
            args.extend(["--set", set]);
        }
        args.extend(["--set", "train.checkpoint_every=5", "--set", "train.eval_every=9"]);
        let want = measured(&ok(&args));

        // each row is in one part, and the run has used the parts as such
        let parts = |file: &Path| [Part::Train, Part::Valid, Part::Test].map(|p| rows_of(&run, file, p));
        let before = parts(&file);
        let all: BTreeSet<usize> = before.iter().flatten().copied().collect();
        assert_eq!((all.len(), before.iter().map(BTreeSet::len).sum()), (ROWS, ROWS), "{by}");
        for (part, share) in before.iter().zip([0.6, 0.2, 0.2]) {
            let share = share * ROWS as f64;
            assert!((part.len() as f64 - share).abs() < 0.4 * share, "{by}: {} of {share}", part.len());
        }
        assert_eq!(fitted_rows(&run), before[0], "{by}: vocabularies come from the training rows");
        let (last, evals) = want.split_last().unwrap();
        assert!(evals.len() > 2 && evals.iter().all(|e| e["rows"] == before[1].len()), "{by}: {evals:?}");
        assert_eq!((&last["type"], &last["metrics"]["rows"]), (&"test".into(), &before[2].len().into()));
        // as the rule says
        match by {
            "group:user" => {
                let users: Vec<BTreeSet<usize>> =
                    before.iter().map(|p| p.iter().map(|&r| user(r)).collect()).collect();
                assert_eq!(users.iter().map(BTreeSet::len).sum::<usize>(), 457, "a user is in one part");
            }
            "time:day" => {
                let days = |p: &BTreeSet<usize>| {
                    let days: BTreeSet<usize> = p.iter().map(|&r| day(r)).collect();
                    (*days.first().unwrap(), *days.last().unwrap())
                };
                let [train, valid, test] = [0, 1, 2].map(|i| days(&before[i]));
                assert!(train.1 < valid.0 && valid.1 < test.0, "{train:?} {valid:?} {test:?}");
            }
            _ => {}
        }

        // stopped in its first epoch, and gone on with from files that have moved
        let weights = std::fs::read(run.join("weights.safetensors")).unwrap();
        std::fs::remove_file(run.join("summary.json")).unwrap();
        for (step, path) in RunFolder::open(&run).unwrap().checkpoints() {
            if step > 5 {
                std::fs::remove_file(path).unwrap();
            }
        }
        let moved = at("moved.csv");
        std::fs::rename(&file, &moved).unwrap();
        let out = ok(&["train", "--resume", s(&run), "--train", s(&moved), "--quiet", "--json"]);
        assert_eq!(measured(&out), want, "{by}: the same evaluations, the same test rows");
        assert_eq!(parts(&moved), before, "{by}");
        assert!(std::fs::read(run.join("weights.safetensors")).unwrap() == weights, "{by}");
        std::fs::rename(&moved, &file).unwrap();
    }
}
