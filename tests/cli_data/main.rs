//! Data as a user brings it: CSV, Parquet, compressed, piped; schemas, splits, caches; what `predict` writes.

use std::io::Write;
#[path = "../program/mod.rs"]
mod program;
mod tables;

use program::{birkhoff, fails, ok, s};
use std::path::Path;
use std::process::{Command, Stdio};

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

/// A log with a header: user, item, history of items, price, clicked or not by a rule that can be learned.
fn log(rows: usize) -> String {
    let mut text = String::from("row,user,item,history,price,rating,day\n");
    for i in 0..rows {
        let (user, item) = (i * 7 % 23, i * 13 % 17);
        let history: Vec<String> = (0..i % 4).map(|k| format!("i{}", (item + k * user) % 17)).collect();
        let price = if i % 9 == 0 { String::new() } else { format!("{}.5", i % 40) };
        let rating = 1 + (user * 3 + item * 5 + i % 3) % 5;
        text += &format!(
            "{i},\"u, {user}\",i{item},{},{price},{rating},2024-01-{:02}\n",
            history.join("|"),
            1 + 28 * i / rows
        );
    }
    text
}

const SCHEMA: &str = r#"
[data]
min_count = 1
[[data.columns]]
name = "row"
kind = "ignore"
[[data.columns]]
name = "user"
kind = "categorical"
width = 4
[[data.columns]]
name = "item"
kind = "categorical"
[[data.columns]]
name = "history"
kind = "list"
share = "item"
pooling = "mean"
[[data.columns]]
name = "price"
kind = "numeric"
transform = "standardize"
[[data.columns]]
name = "rating"
kind = "label"
positive = ">= 4"
[[data.columns]]
name = "day"
kind = "ignore"
[[data.columns]]
name = "who"
from = "user"
kind = "group"
"#;

/// The program with something on its standard input.
fn birkhoff_reads(args: &[&str], input: &[u8]) -> std::process::Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_birkhoff"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // it may end before it has read all
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

fn last(out: &str) -> serde_json::Value {
    serde_json::from_str(out.lines().last().expect("output")).expect("JSON")
}

#[test]
fn own_logs_train_evaluate_and_predict_without_code() {
    let dir = tempfile::tempdir().unwrap();
    let at = |n: &str| dir.path().join(n);
    let (csv, gz, schema) = (at("log.csv"), at("log.bin"), at("s.toml"));
    let text = log(3000);
    std::fs::write(&csv, &text).unwrap();
    std::fs::write(&schema, SCHEMA).unwrap();
    let mut z = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    z.write_all(text.as_bytes()).unwrap();
    std::fs::write(&gz, z.finish().unwrap()).unwrap();

    let check: serde_json::Value =
        serde_json::from_str(&ok(&["check", s(&csv), "--schema", s(&schema), "--json"])).unwrap();
    assert_eq!((check["rows"].as_u64(), check["bad"].as_u64()), (Some(3000), Some(0)));

    // the same rows, plain, compressed, piped, cached: the same losses
    let train = |file: &str, out: &Path, more: &[&str]| {
        let mut args = vec!["train", "--train", file, "--split", "0.7,0.2,0.1", "--split-by", "time:day"];
        args.extend(["--schema", s(&schema), "--out", s(out), "--epochs", "2"]);
        args.extend(more);
        args.extend(SMALL);
        args.iter().map(|a| a.to_string()).collect::<Vec<_>>()
    };
    let run = |args: Vec<String>| ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let out = run(train(s(&csv), &at("plain"), &[]));
    let test = last(&out);
    assert_eq!(test["type"], "test");
    let losses = |out: &str| -> Vec<String> {
        let lines = out.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
        lines
            .filter(|l| l["type"] == "step" || l["type"] == "eval")
            .map(|l| format!("{} {}", l["loss"], l["logloss"]))
            .collect()
    };
    let want = losses(&out);
    assert!(want.len() >= 3);
    let folder = at("cache");
    for (name, file, more) in [
        ("gz", &gz, vec![]),
        ("memory", &csv, vec!["--cache"]),
        ("cold", &csv, vec!["--cache", s(&folder)]),
        ("warm", &csv, vec!["--cache", s(&folder)]),
    ] {
        assert_eq!(losses(&run(train(s(file), &at(name), &more))), want, "{name}");
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 3, "one file a part");
    // a damaged cache is a warning, and made anew
    let whole = |path: &Path| std::fs::read(path).unwrap();
    let parts: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    let good: Vec<_> = parts.iter().map(|p| whole(p)).collect();
    parts
        .iter()
        .zip(&good)
        .for_each(|(p, b)| std::fs::write(p, [&b[..20], b"?", &b[21..]].concat()).unwrap());
    let args = train(s(&csv), &at("damaged"), &["--cache", s(&folder)]);
    let o = birkhoff(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let err = String::from_utf8_lossy(&o.stderr);
    assert_eq!(err.matches(".rows: the cache is damaged; the data are read again").count(), 3, "{err}");
    assert_eq!(losses(&String::from_utf8(o.stdout).unwrap()), want, "damaged");
    assert!(parts.iter().zip(&good).all(|(p, b)| whole(p) == *b));
    let args = train("-", &at("piped"), &[]);
    let mut child = Command::new(env!("CARGO_BIN_EXE_birkhoff"))
        .args(&args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let piped = child.wait_with_output().unwrap();
    assert!(piped.status.success());
    assert_eq!(losses(&String::from_utf8(piped.stdout).unwrap()), want, "piped");
    // its errors say where they come from, however often it is read
    let bad = text.replacen("i1,", "i1,,,", 1);
    let line = 1 + bad.lines().position(|l| l.contains("i1,,,")).unwrap();
    let args = train("-", &at("bad"), &[]);
    for args in [
        args.iter().map(String::as_str).collect::<Vec<_>>(),
        vec!["check", "-", "--schema", s(&schema)],
        vec!["eval", s(&at("piped")), "--data", "-", "--device", "cpu"],
        vec!["predict", s(&at("piped")), "--data", "-", "--out", "-", "--device", "cpu"],
    ] {
        let o = birkhoff_reads(&args, bad.as_bytes());
        let said = String::from_utf8([o.stderr, o.stdout].concat()).unwrap();
        let want = format!("standard input, line {line}: 9 fields, expected 7");
        assert!(o.status.code() == Some(2) && said.contains(&want), "{args:?}: {said}");
        assert!(!said.contains("/tmp") || !said.contains("tmp/."), "{said}");
    }

    // scores: in order, with columns of the input, as CSV and as Parquet, whatever the input's format
    let predict = |data: &Path, out: &Path| {
        ok(&[
            "predict",
            s(&at("plain")),
            "--data",
            s(data),
            "--columns",
            "row,user",
            "--out",
            s(out),
            "--device",
            "cpu",
        ]);
    };
    predict(&csv, &at("a.csv"));
    predict(&gz, &at("b.csv"));
    let a = std::fs::read_to_string(at("a.csv")).unwrap();
    assert_eq!(a, std::fs::read_to_string(at("b.csv")).unwrap());
    let mut lines = a.lines();
    assert_eq!(lines.next(), Some("row,user,score,logit"));
    let first = lines.next().unwrap();
    assert!(first.starts_with("0,\"u, 0\",0."), "{first}");
    assert_eq!(lines.count(), 2999);
    predict(&csv, &at("c.parquet"));
    let bytes = std::fs::read(at("c.parquet")).unwrap();
    let reader =
        parquet::arrow::arrow_reader::ParquetRecordBatchReader::try_new(bytes::Bytes::from(bytes), 4096)
            .unwrap();
    let rows: usize = reader.map(|b| b.unwrap().num_rows()).sum();
    assert_eq!(rows, 3000);

    // a run with a split goes on; its rows are those of its start
    ok(&["train", "--resume", s(&at("plain")), "--epochs", "3", "--quiet", "--device", "cpu"]);

    // unlabelled rows are scored alike; the label column may be missing
    let bare: String = text
        .lines()
        .map(|l| {
            let mut f: Vec<&str> = l.rsplitn(3, ',').collect();
            f.remove(1);
            f.reverse();
            f.join(",") + "\n"
        })
        .collect();
    std::fs::write(at("bare.csv"), bare).unwrap();
    predict(&csv, &at("e.csv"));
    predict(&at("bare.csv"), &at("d.csv"));
    assert_eq!(std::fs::read_to_string(at("e.csv")).unwrap(), std::fs::read_to_string(at("d.csv")).unwrap());
    let piped_out = ok(&["predict", s(&at("plain")), "--data", s(&csv), "--out", "-", "--device", "cpu"]);
    assert_eq!(piped_out.lines().count(), 3001);
}

/// A run scores files of other formats than its own; the columns are what counts.
#[test]
fn rows_of_another_format_are_scored_alike() {
    let dir = tempfile::tempdir().unwrap();
    let at = |n: &str| dir.path().join(n);
    // a schema as `birkhoff schema` writes it: format, delimiter and header are pinned
    let tsv: String =
        (0..600).map(|i| format!("{}\t{}\tu{}\n", u8::from(i % 7 < 3), i % 11, i % 7)).collect();
    let columns = "[[data.columns]]\nname = 'y'\nkind = 'label'\n[[data.columns]]\nname = 'n'\nkind = 'numeric'\n[[data.columns]]\nname = 'u'\nkind = 'categorical'\n";
    std::fs::write(at("a.tsv"), &tsv).unwrap();
    std::fs::write(
        at("s.toml"),
        format!("[data]\nformat = 'tsv'\ndelimiter = \"\\t\"\nheader = 'no'\n{columns}"),
    )
    .unwrap();
    let (a, schema, run) = (at("a.tsv"), at("s.toml"), at("run"));
    let mut args =
        vec!["train", "--train", s(&a), "--split", "0.8,0.2", "--schema", s(&schema), "--out", s(&run)];
    args.extend(SMALL);
    ok(&args);
    let csv = format!(
        "u;n;y\n{}",
        tsv.lines()
            .map(|l| {
                let f: Vec<&str> = l.split('\t').collect();
                format!("{}; {} ;{}\n", f[2], f[1], f[0])
            })
            .collect::<String>()
    );
    std::fs::write(at("b.csv"), &csv).unwrap();
    std::fs::write(at("c.txt"), tsv.replace('\t', ":")).unwrap();
    let (b, c) = (at("b.csv"), at("c.txt"));
    let scores = |data: &Path, more: &[&str]| {
        ok(&[&["predict", s(&run), "--data", s(data), "--out", "-", "--device", "cpu"], more].concat())
    };
    let want = scores(&a, &[]);
    assert_eq!(scores(&b, &["--format", "csv"]), want);
    assert_eq!(scores(&b, &["--format", "auto"]), want);
    assert_eq!(scores(&c, &["--delimiter", ":"]), want);
    assert_eq!(scores(&a, &["--format", "csv", "--delimiter", "tab", "--header", "no"]), want);
    let ne = |data: &Path, more: &[&str]| {
        ok(&[&["eval", s(&run), "--data", s(data), "--device", "cpu", "--json"], more].concat())
    };
    assert_eq!(ne(&b, &["--format", "csv"]), ne(&a, &[]));
    // as the run says, the file is another one
    fails(&["predict", s(&run), "--data", s(&b), "--out", "-", "--device", "cpu"], &["b.csv:1", "--format"]);
    fails(&["eval", s(&run), "--data", s(&b), "--delimiter", "::", "--device", "cpu"], &["data.delimiter"]);
    fails(
        &["eval", s(&run), "--data", s(&b), "--format", "csv", "--header", "no", "--device", "cpu"],
        &["b.csv:1", "has the columns' names", "--header yes"],
    );

    // libsvm, with labels and without
    let svm = |labels: bool| -> String {
        let label = |i: usize| if labels { format!("{} ", u8::from(i % 7 < 3)) } else { String::new() };
        (0..600).map(|i| format!("{}{}:1 20:{}\n", label(i), i % 7, i % 11)).collect()
    };
    let (l, u, schema, run) = (at("l.svm"), at("u.svm"), at("svm.toml"), at("svm"));
    std::fs::write(&l, svm(true)).unwrap();
    std::fs::write(&u, svm(false)).unwrap();
    std::fs::write(&schema, "[data]\n[[data.columns]]\nname = 'y'\nkind = 'label'\n[[data.columns]]\nname = '20'\nkind = 'numeric'\n[[data.columns]]\nname = '#1'\nkind = 'categorical'\n").unwrap();
    let mut args =
        vec!["train", "--train", s(&l), "--split", "0.8,0.2", "--schema", s(&schema), "--out", s(&run)];
    args.extend(SMALL);
    ok(&args);
    let scores = |data: &Path| ok(&["predict", s(&run), "--data", s(data), "--out", "-", "--device", "cpu"]);
    assert_eq!(scores(&l), scores(&u));
    fails(&["eval", s(&run), "--data", s(&u), "--device", "cpu"], &["u.svm:1: column y: no label"]);
    std::fs::write(&u, svm(false) + "1 3:1 20:1\n").unwrap();
    fails(
        &["predict", s(&run), "--data", s(&u), "--out", "-", "--device", "cpu"],
        &["u.svm:601: column y: has a label, but most rows of the file have none"],
    );
}

#[test]
fn a_schema_is_written_for_a_file_and_trains() {
    let dir = tempfile::tempdir().unwrap();
    let at = |n: &str| dir.path().join(n);
    let text = log(1000).replace("rating", "click");
    let text: String = text
        .lines()
        .map(|l| {
            // rating 4 and 5 as 1, others as 0
            let f: Vec<&str> = l.rsplitn(3, ',').collect();
            let y = match f[1] {
                "click" => "click".to_string(),
                r => usize::from(r > "3").to_string(),
            };
            format!("{},{y},{}\n", f[2], f[0])
        })
        .collect();
    std::fs::write(at("log.csv"), text).unwrap();
    let said = ok(&["schema", s(&at("log.csv")), "--out", s(&at("s.toml"))]);
    assert!(said.contains("7 columns of 1,000 rows") && said.contains("next: birkhoff train"), "{said}");
    let schema = std::fs::read_to_string(at("s.toml")).unwrap();
    for part in [
        "name = \"click\"\nkind = \"label\"",
        "kind = \"list\"",
        "kind = \"numeric\"",
        "% of the labels are 1",
        "dates; for --split-by time",
    ] {
        assert!(schema.contains(part), "{part} in {schema}");
    }
    let mut args = vec!["train", "--train"];
    let (log, s_toml, out) = (at("log.csv"), at("s.toml"), at("run"));
    args.extend([s(&log), "--split", "0.8,0.2", "--schema", s(&s_toml), "--out", s(&out)]);
    args.extend(SMALL);
    assert_eq!(last(&ok(&args))["type"], "summary");
}

#[test]
fn what_does_not_fit_is_said_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let at = |n: &str| dir.path().join(n);
    let (csv, schema, out) = (at("log.csv"), at("s.toml"), at("run"));
    std::fs::write(&csv, log(300)).unwrap();
    std::fs::write(&schema, SCHEMA).unwrap();
    let train = |more: &[&str], parts: &[&str]| {
        let mut args = vec!["train", "--train", s(&csv), "--out", s(&out), "--device", "cpu"];
        args.extend(more);
        fails(&args, parts);
    };
    train(&["--split", "0.8,0.2"], &["log.csv", "not Criteo's log", "birkhoff schema"]);
    let with = ["--schema", s(&schema)];
    train(&[&["--split", "0.8,0.3"], &with[..]].concat(), &["--split", "add up to 1.1"]);
    train(
        &[&["--split", "0.8,0.2", "--split-by", "time:user"], &with[..]].concat(),
        &["column user", "is not a time"],
    );
    train(
        &[&["--split", "0.8,0.2", "--split-by", "group:nobody"], &with[..]].concat(),
        &["has no column \"nobody\""],
    );
    train(&[&["--valid", "nowhere*.csv"], &with[..]].concat(), &["nowhere*.csv", "no file matches"]);
    std::fs::write(&schema, SCHEMA.replace("positive = \">= 4\"\n", "")).unwrap();
    train(&[&["--split", "0.8,0.2"], &with[..]].concat(), &["log.csv:", "column rating", "positive = "]);
    std::fs::write(&schema, SCHEMA.replace("share = \"item\"", "share = \"items\"")).unwrap();
    train(
        &[&["--split", "0.8,0.2"], &with[..]].concat(),
        &["column history", "\"items\", which is no categorical column"],
    );
    std::fs::write(&schema, SCHEMA.replace("positive = \">= 4\"", "positive = \"4\"")).unwrap();
    train(
        &[&["--split", "0.8,0.2"], &with[..]].concat(),
        &["s.toml:", "data.columns[5].positive", "comparison"],
    );
    // texts that mean "missing" may be numbers
    std::fs::write(&schema, SCHEMA).unwrap();
    let wide = log(300).replace(",0.5,", ",-999,");
    let (n, wide_csv) = (wide.matches(",-999,").count(), at("wide.csv"));
    std::fs::write(&wide_csv, &wide).unwrap();
    let json = ok(&["check", s(&wide_csv), "--schema", s(&schema), "--json", "--set", "data.na=[\"-999\"]"]);
    let empty = (0..300).filter(|i| i % 9 == 0).count();
    let missing =
        last(&json)["missing"].as_array().unwrap().iter().find(|m| m[0] == "price").unwrap()[1].clone();
    assert!(n > 3 && missing == n + empty, "{n} + {empty}: {missing}");
    // labels that are all the same are worth a word
    std::fs::write(&schema, SCHEMA.replace("positive = \">= 4\"", "positive = \">= 1\"")).unwrap();
    let said = ok(&["check", s(&csv), "--schema", s(&schema)]);
    assert!(said.contains("warning: all 300 labels are 1"), "{said}");
    let json = ok(&["check", s(&csv), "--schema", s(&schema), "--json"]);
    assert_eq!(last(&json)["warnings"].as_array().unwrap().len(), 1, "{json}");
    // check names every kind of trouble and its first place
    std::fs::write(&schema, SCHEMA).unwrap();
    let mut bad = log(300);
    bad += "a,b\n300,u,i,,x,5,d\n301,u,i,,1,great,d\n302,u,i,,y,5,d\n";
    std::fs::write(&csv, bad).unwrap();
    let o = birkhoff(&["check", s(&csv), "--schema", s(&schema)]);
    let said = String::from_utf8(o.stdout).unwrap();
    assert_eq!(o.status.code(), Some(2));
    for part in [
        "300 good rows",
        "4 bad rows",
        "2  not a number; first: ",
        "log.csv:303: column price",
        "1  not a label",
        "1  another number of fields",
    ] {
        assert!(said.contains(part), "{part} in {said}");
    }
    // Latin-1 without saying so: the offset, and what to set
    std::fs::write(&csv, [log(3).as_bytes(), b"9,caf\xe9,i1,,1,5,d\n"].concat()).unwrap();
    train(
        &[&["--split", "0.8,0.2"], &with[..]].concat(),
        &["log.csv:5: column user: byte 0xe9 at offset", "data.encoding"],
    );
    let o = birkhoff(&["check", s(&csv), "--schema", s(&schema), "--set", "data.encoding=latin1"]);
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
}
