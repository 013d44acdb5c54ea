//! `birkhoff plan` as a user types it.

mod program;

use program::{birkhoff, fails, ok, s};
use serde_json::Value;
use std::path::PathBuf;

/// Criteo's columns, hashed: every table has 100,002 rows.
const HASHED: [&str; 3] = ["plan", "--set", "data.ids=hash"];

fn hashed<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&HASHED[..], more].concat()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&ok(&[args, &["--json"]].concat())).expect("one JSON object")
}

fn numbers(ranks: &Value, key: &str) -> Vec<f64> {
    ranks.as_array().expect("a list").iter().map(|r| r[key].as_f64().expect("a number")).collect()
}

#[test]
fn a_plan_is_made_written_edited_and_priced() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plan.toml");
    let made = json(&hashed(&["--world", "4", "--memory", "1GiB", "--out", s(&file)]));
    assert_eq!(made["tables"].as_array().map(Vec::len), Some(26));
    let bytes = numbers(&made["ranks"], "bytes");
    // width 16, an accumulator a row
    assert_eq!(bytes.iter().sum::<f64>(), 26.0 * 100_002.0 * 4.0 * 17.0);
    let imbalance = |v: &Value| v["imbalance"].as_f64().unwrap();
    assert!(imbalance(&made) < 1.1, "{made}");
    for rank in made["ranks"].as_array().unwrap() {
        let of = |key: &str| rank[key].as_f64().unwrap();
        assert!((of("seconds") - of("lookup_s") - of("communication_s")).abs() < 1e-12);
        let held: f64 = rank["holds"].as_array().unwrap().iter().map(|h| h["bytes"].as_f64().unwrap()).sum();
        assert_eq!(held, of("bytes"));
    }
    // the same plan from the file
    let again = json(&hashed(&["--plan", s(&file), "--memory", "1GiB"]));
    assert_eq!(again, made);
    let text = ok(&hashed(&["--plan", s(&file)]));
    assert!(text.starts_with("rank ") && text.contains("imbalance  "), "{text}");

    // everything of rank 0 on rank 1
    let toml = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, toml.replace("rank = 0\n", "rank = 1\n")).unwrap();
    let edited = json(&hashed(&["--plan", s(&file)]));
    assert!(imbalance(&edited) > 1.3, "{edited}");
    assert_eq!(edited["ranks"][0]["shards"], 0);
    // which is more than rank 1 may hold: still shown, but an error
    let args = hashed(&["--plan", s(&file), "--memory", "60MiB", "--json"]);
    let o = birkhoff(&args);
    assert!(serde_json::from_slice::<Value>(&o.stdout).is_ok());
    fails(&args, &["plan.toml: rank 1 holds ", "more than its memory"]);
    // a shard is lost
    let at = toml.find("[[shards]]").unwrap();
    let next = at + 1 + toml[at + 1..].find("[[shards]]").unwrap();
    std::fs::write(&file, [&toml[..at], &toml[next..]].concat()).unwrap();
    fails(&hashed(&["--plan", s(&file)]), &["plan.toml: C1: rows 0 to ", "columns 0 to 16 are on no rank"]);
    std::fs::write(&file, toml.replacen("rank = ", "rank = 1", 1)).unwrap();
    fails(&hashed(&["--plan", s(&file)]), &["plan.toml:", "C1: rank = 1", "ranks go from 0 to 3"]);
    std::fs::write(&file, &toml).unwrap();
    fails(&hashed(&["--plan", s(&file), "--world", "5"]), &["world = 4, but --world 5"]);
    fails(&hashed(&["--plan", s(&file), "--out", s(&file)]), &["would replace an input"]);
}

#[test]
fn what_does_not_fit_says_what_would() {
    let args = |memory| hashed(&["--world", "4", "--memory", memory]);
    // 26 tables of 6.49 MiB: 168.6 MiB
    let said = &["4 ranks have 41 MiB each: 4.6 MiB too much", "--memory 43MiB", "--world 5", "rows of C1"];
    fails(&args("41MiB"), said);
    ok(&args("43MiB"));
    ok(&hashed(&["--world", "5", "--memory", "41MiB"]));
    let adam = ["--set", "train.embedding=adam"];
    fails(&[&args("43MiB")[..], &adam].concat(), &["too much", "--set train.embedding=adagrad"]);
    // one large table goes in parts
    let large = json(&[&args("1GiB")[..], &["--rows", "C3=50_000_000"]].concat());
    assert!(large["tables"][2]["shards"].as_u64() >= Some(4), "{large}");
    assert!(numbers(&large["ranks"], "bytes").iter().all(|&b| b <= f64::from(1 << 30)));
}

#[test]
fn sizes_come_from_rows_and_runs() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| -> PathBuf { dir.path().join(name) };
    let (train, valid, run) = (at("train.tsv"), at("valid.tsv"), at("run"));
    ok(&["synth", "--rows", "1500", "--seed", "1", "--out", s(&train)]);
    ok(&["synth", "--rows", "300", "--seed", "2", "--out", s(&valid)]);
    let world = ["--world", "3", "--batch", "200"];
    let counted = json(&[&["plan", "--train", s(&train)][..], &world].concat());
    let rows = |v: &Value| numbers(&v["tables"], "rows");
    let unique = |v: &Value| numbers(&v["tables"], "unique");
    assert!(rows(&counted).iter().all(|&r| r >= 2.0) && rows(&counted).iter().any(|&r| r > 100.0));
    assert!(unique(&counted).iter().all(|&u| u < 0.9), "values repeat within 200 rows: {counted}");
    let sets = ["--set", "model.width=8", "--set", "model.layers=1", "--device", "cpu", "--quiet"];
    let files = ["train", "--train", s(&train), "--valid", s(&valid), "--out", s(&run)];
    ok(&[&files[..], &sets].concat());
    let of_run = json(&[&["plan", s(&run)][..], &world].concat());
    assert_eq!(rows(&of_run), rows(&counted));
    assert!(unique(&of_run).iter().all(|&u| u == 1.0) && of_run["tables"][0]["width"] == 8);
    let measured = json(&[&["plan", s(&run), "--train", s(&train)][..], &world].concat());
    assert_eq!(unique(&measured), unique(&counted));
    // a batch that the file has not
    let o = birkhoff(&["plan", s(&run), "--train", s(&train), "--world", "2", "--batch", "5000"]);
    assert!(
        o.status.success() && String::from_utf8_lossy(&o.stderr).contains("fewer rows than a batch of 5,000")
    );
    fails(&["plan", s(&run), "--world", "2", "--set", "data.ids=hash"], &["vocab.json", "another encoding"]);
    fails(&["plan", s(&run), "--world", "2", "--schema", s(&train)], &["leave out --schema"]);
    fails(&["plan", s(dir.path()), "--world", "2"], &["has no config.toml"]);
}

#[test]
fn mistakes_have_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = dir.path().join("cluster.toml");
    std::fs::write(&cluster, "ranks = 6\nranks_per_host = 3\nmemory = \"1GiB\"\nlatency = 1e-3\n").unwrap();
    let spread = json(&hashed(&["--cluster", s(&cluster)]));
    assert_eq!(numbers(&spread["ranks"], "host"), [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    // three exchanges with five others
    assert!(numbers(&spread["ranks"], "communication_s").iter().all(|&s| s > 15e-3));
    assert!(ok(&hashed(&["--cluster", s(&cluster)])).lines().next().is_some_and(|l| l.contains("host")));
    std::fs::write(&cluster, "ranks = 6\nlatncy = 1e-3\n").unwrap();
    fails(&hashed(&["--cluster", s(&cluster)]), &["cluster.toml:2: not a cluster: unknown field `latncy`"]);
    fails(&hashed(&["--cluster", "none.toml"]), &["none.toml: cannot read"]);
    fails(&hashed(&["--plan", "none.toml"]), &["none.toml: cannot read"]);
    fails(&hashed(&[]), &["--world N"]);
    fails(&["plan", "--world", "2"], &["tables of C1 and 25 more", "--train FILE", "--rows C1=N"]);
    for (rows, message) in [
        ("C3", "expected COLUMN=N"),
        ("C99=5", "no categorical column C99"),
        ("C3=0", "expected 1 to 4,294,967,295 rows"),
        ("C3=many", "expected 1 to 4,294,967,295 rows"),
    ] {
        fails(&hashed(&["--world", "2", "--rows", rows]), &[message]);
    }
    fails(&hashed(&["--world", "0"]), &["--world"]);
    fails(&hashed(&["--world", "2", "--memory", "16G"]), &["--memory", "such as 16GiB"]);
}
