//! Real logs, where they are (`BIRKHOFF_DATA`, else ../shared/data): the examples' configurations load them, train
//! and report; the traps that real files hold are met. None of these files is part of the project.

mod program;

use program::{birkhoff, ok};
use std::path::{Path, PathBuf};

/// A data set's folder, or a line that says it is not there.
fn data(name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("BIRKHOFF_DATA")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data"), PathBuf::from);
    let path = folder.join(name);
    if !path.is_dir() {
        println!("SKIP: no real rows at {}", path.display());
        return None;
    }
    Some(path)
}

/// `check` of files by an example's columns: good rows and positives.
fn check(config: &str, files: &[&Path], sets: &[&str]) -> (u64, u64) {
    let mut args = vec!["check", "--schema", config, "--json"];
    args.extend(files.iter().map(|f| f.to_str().unwrap()));
    sets.iter().for_each(|s| args.extend(["--set", s]));
    let v: serde_json::Value = serde_json::from_str(&ok(&args)).unwrap();
    (v["rows"].as_u64().unwrap(), v["positives"].as_u64().unwrap())
}

/// One epoch of an example; the validation AUC.
fn train(args: &[&str]) -> f64 {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let mut all = vec!["train", "--json", "--quiet", "--device", "cpu", "--out", out.to_str().unwrap()];
    all.extend(["--set", "train.diagnose_every=0", "--epochs", "1"]);
    all.extend(args);
    let text = ok(&all);
    let mut lines = text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    let summary = lines.rfind(|l| l["type"] == "summary").expect("a summary");
    summary["auc"].as_f64().expect("two classes")
}

#[test]
fn avazu_with_and_without_a_header() {
    let Some(d) = data("avazu_9k") else { return };
    let (t, v) = (d.join("train.csv"), d.join("dev.csv"));
    let (rows, positives) = check("examples/avazu.toml", &[&t, &v], &[]);
    assert_eq!(rows, 8087 + 480);
    assert!((positives as f64 / rows as f64 - 0.174).abs() < 0.003, "{positives}");
    let auc = train(&[
        "--config",
        "examples/avazu.toml",
        "--train",
        t.to_str().unwrap(),
        "--valid",
        v.to_str().unwrap(),
    ]);
    assert!(auc > 0.6, "{auc}");
    // ids above 2^63 are ids, not numbers
    let schema = ok(&["schema", t.to_str().unwrap()]);
    assert!(
        schema.contains("name = \"click\"\nkind = \"label\"")
            && schema.contains("nearly every row has its own value"),
        "{schema}"
    );
}

#[test]
fn movielens_100k_and_its_latin_1_file() {
    let Some(d) = data("ml-100k") else { return };
    let (t, v) = (d.join("ua.base"), d.join("ua.test"));
    let (rows, positives) = check("examples/movielens_100k.toml", &[&t, &v], &[]);
    assert_eq!((rows, positives), (100_000, 34_174 + 21_201));
    let items = d.join("u.item");
    let schema = |more: &[&str]| {
        birkhoff(
            &[
                &[
                    "schema",
                    items.to_str().unwrap(),
                    "--set",
                    "data.delimiter=\"|\"",
                    "--set",
                    "data.header=no",
                ],
                more,
            ]
            .concat(),
        )
    };
    let plain = schema(&["--json"]);
    let v: serde_json::Value = serde_json::from_slice(&plain.stdout).unwrap();
    assert!(v["problems"][0].as_str().unwrap().contains("at offset 76620 "), "{}", v["problems"]);
    let latin = schema(&["--set", "data.encoding=latin1", "--json"]);
    let v: serde_json::Value = serde_json::from_slice(&latin.stdout).unwrap();
    assert_eq!((v["rows"].as_u64(), v["skipped"].as_u64()), (Some(1682), Some(0)));
}

#[test]
fn movielens_small_by_time_and_quoted_commas() {
    let Some(d) = data("ml-latest-small") else { return };
    let ratings = d.join("ratings.csv");
    let ratings = ratings.to_str().unwrap();
    let auc = train(&[
        "--config",
        "examples/movielens_small.toml",
        "--train",
        ratings,
        "--split",
        "0.8,0.1,0.1",
        "--split-by",
        "time:timestamp",
    ]);
    assert!(auc > 0.6, "{auc}");
    let movies = d.join("movies.csv");
    let v: serde_json::Value =
        serde_json::from_str(&ok(&["schema", movies.to_str().unwrap(), "--json", "--label", "movieId"]))
            .unwrap();
    assert_eq!((v["rows"].as_u64(), v["skipped"].as_u64()), (Some(9742), Some(0)));
    assert_eq!(v["columns"][2]["kind"], "list", "genres");
}

#[test]
fn frappe_as_csv_and_as_libsvm() {
    let Some(d) = data("frappe") else { return };
    assert_eq!(check("examples/frappe.toml", &[&d.join("valid.csv")], &[]), (57_722, 19_063));
    let columns: String = (1..=10).map(|i| format!("{{name=\"#{i}\",kind=\"categorical\"}},")).collect();
    let columns = format!("data.columns=[{{name=\"y\",kind=\"label\"}},{columns}]");
    assert_eq!(check("examples/frappe.toml", &[&d.join("valid.libsvm")], &[&columns]), (57_722, 19_063));
}

#[test]
fn criteo_days_kaggle_rows_and_a_sample_with_a_header() {
    let Some(d) = data("criteo_small") else { return };
    assert_eq!(check("examples/criteo.toml", &[&d.join("criteo1tb_1000.tsv.gz")], &[]).0, 1000);
    // DeepCTR's sample: comma, header, decimals
    let sample = d.join("criteo_sample_200.csv");
    assert_eq!(check("examples/criteo.toml", &[&sample], &["data.format=csv"]).0, 200);
    let schema = ok(&["schema", sample.to_str().unwrap()]);
    assert!(
        schema.contains("name = \"label\"\nkind = \"label\"")
            && schema.contains("name = \"I2\"\nkind = \"numeric\""),
        "{schema}"
    );
}
