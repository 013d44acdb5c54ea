//! Tables as people have them: read as they are meant, or refused with a line that says why.

use super::program::{birkhoff, fails, ok, s};
use super::{SMALL, birkhoff_reads};
use std::path::{Path, PathBuf};

fn draw(state: &mut u64, n: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % n
}

/// Visits, all texts: clicked by user and city.
fn visits(seed: u64, rows: usize) -> Vec<[String; 3]> {
    let mut state = seed;
    let mut one = || {
        let (u, c) = (draw(&mut state, 9), draw(&mut state, 4));
        let likely = if (u < 4) == (c < 2) { 90 } else { 10 };
        let y = if draw(&mut state, 100) < likely { "yes" } else { "no" };
        [y.to_string(), format!("u{u}"), format!("c{c}")]
    };
    (0..rows).map(|_| one()).collect()
}

fn lines(rows: &[[String; 3]], order: [usize; 3]) -> String {
    rows.iter().map(|r| order.map(|i| r[i].clone()).join(",") + "\n").collect()
}

const VISITS: &str = r#"
[data]
[[data.columns]]
name = "clicked"
kind = "label"
positive = "= yes"
[[data.columns]]
name = "user"
kind = "categorical"
[[data.columns]]
name = "city"
kind = "categorical"
"#;

fn trained(dir: &Path, file: &Path, schema: &Path, more: &[&str]) -> PathBuf {
    let out = dir.join("run");
    let mut args = vec!["train", "--train", s(file), "--split", "0.8,0.2", "--schema", s(schema)];
    args.extend(["--out", s(&out), "--force", "--epochs", "1"]);
    args.extend(more);
    args.extend(SMALL);
    ok(&args);
    out
}

/// Columns that are renamed, moved or gone in the file to be scored, also where all columns are texts.
#[test]
fn names_that_do_not_match_are_refused_by_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let at = |n: &str| dir.path().join(n);
    let put = |n: &str, text: String| std::fs::write(at(n), text).unwrap();
    put("a.csv", "clicked,user,city\n".to_string() + &lines(&visits(5, 2000), [0, 1, 2]));
    let few = visits(6, 300);
    put("renamed.csv", "clicked,city,user_id\n".to_string() + &lines(&few, [0, 2, 1]));
    put("unlabelled.csv", few.iter().fold("user_id,city\n".into(), |t, r| t + &r[1] + "," + &r[2] + "\n"));
    put("moved.csv", "city,clicked,user\n".to_string() + &lines(&few, [2, 0, 1]));
    put("same.csv", "clicked,user,city\n".to_string() + &lines(&few, [0, 1, 2]));
    put("bare.csv", lines(&few, [0, 1, 2]));
    put("a.toml", VISITS.into());
    let run = trained(dir.path(), &at("a.csv"), &at("a.toml"), &[]);
    let config = std::fs::read_to_string(run.join("config.toml")).unwrap();
    assert!(config.contains("header = \"yes\""), "what was found is kept: {config}");

    let words = ["no column \"user\"", "it has clicked, city, user_id", "did you mean \"user_id\""];
    let renamed = at("renamed.csv");
    fails(&["predict", s(&run), "--data", s(&renamed), "--columns", "city", "--out", "-"], &words);
    fails(&["eval", s(&run), "--data", s(&renamed)], &words);
    fails(&["check", s(&renamed), "--schema", s(&at("a.toml"))], &words);
    let mut train = vec!["train", "--train", s(&renamed), "--split", "0.8,0.2", "--out", "x"];
    let schema = at("a.toml");
    train.extend(["--schema", s(&schema)]);
    fails(&train, &words);
    fails(
        &["predict", s(&run), "--data", s(&at("unlabelled.csv")), "--out", "-"],
        &["no column \"user\"", "user_id"],
    );
    // a file without a header is not one with a header
    let bare = at("bare.csv");
    fails(&["predict", s(&run), "--data", s(&bare), "--out", "-"], &["expected a header", "--header no"]);
    let scores = |file: &str, more: &[&str]| {
        let mut args = vec!["predict", s(&run), "--data", file, "--out", "-"];
        args.extend(more);
        ok(&args)
    };
    let want = scores(s(&at("same.csv")), &[]);
    assert_eq!(want.lines().count(), 301);
    assert_eq!(scores(s(&at("moved.csv")), &[]), want);
    assert_eq!(scores(s(&bare), &["--header", "no"]), want);
    // and the reverse: a run without headers
    let run = trained(dir.path(), &bare, &at("a.toml"), &[]);
    assert!(std::fs::read_to_string(run.join("config.toml")).unwrap().contains("header = \"no\""));
    fails(&["eval", s(&run), "--data", s(&at("same.csv"))], &["has the columns' names", "--header yes"]);
    ok(&["eval", s(&run), "--data", s(&at("same.csv")), "--header", "yes", "--json"]);
}

/// What `schema` was told, and what it found, is in the schema: its own next command works.
#[test]
fn a_schema_says_how_its_file_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let at = |n: &str| dir.path().join(n);
    let (file, out) = (at("it's odd.csv"), at("s.toml"));
    let mut text = b"# made by hand\nclick;city;x\n".to_vec();
    for i in 0..200 {
        let city = [&b"M\xfcnchen"[..], b"Paris"][i % 2];
        text.extend(
            [format!("{};", i % 3 / 2).as_bytes(), city, format!(";{}.5\n", i % 9).as_bytes()].concat(),
        );
        if i % 20 == 7 {
            text.extend(b"0;'a;b';void\n");
        }
    }
    std::fs::write(&file, text).unwrap();
    let sets = ["data.encoding=latin1", "data.na=void", "data.comment=\"#\"", "data.quote=\"'\""];
    let mut args = vec!["schema", s(&file), "--out", s(&out)];
    sets.iter().for_each(|set| args.extend(["--set", set]));
    let said = ok(&args);
    assert!(
        said.contains("header: ") && said.contains(&format!("'{}/it'\\''s odd.csv'", s(dir.path()))),
        "{said}"
    );
    let toml = std::fs::read_to_string(&out).unwrap();
    for part in
        ["header = \"yes\"", "encoding = \"latin1\"", "na = [\"void\"]", "comment = \"#\"", "quote = \"'\""]
    {
        assert!(toml.contains(part), "{part} in {toml}");
    }
    let check: serde_json::Value =
        serde_json::from_str(&ok(&["check", s(&file), "--schema", s(&out), "--json"])).unwrap();
    assert_eq!((check["rows"].as_u64(), check["bad"].as_u64()), (Some(210), Some(0)));
    // its own next line, by a shell
    let next = said.lines().find_map(|l| l.strip_prefix("next: birkhoff ")).unwrap();
    let small = SMALL.map(|w| format!("'{w}'")).join(" ");
    let line = format!("{} {next} {small} --epochs 1", env!("CARGO_BIN_EXE_birkhoff"));
    let run = std::process::Command::new("sh").args(["-c", &line]).current_dir(dir.path()).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    // --set takes effect, or is an error
    ok(&["check", s(&file), "--schema", s(&out), "--set", "data.min_count=1"]);
    fails(
        &["check", s(&file), "--schema", s(&out), "--set", "data.numeric=none"],
        &["--set data.numeric=none", "would change nothing", "transform"],
    );
    fails(&["eval", "nowhere", "--data", "x", "--set", "train.lr=1"], &["nowhere"]);
}

/// The index of pandas, texts that mean "missing", blanks behind commas, row numbers, doubled names, CR alone.
#[test]
fn schema_knows_tables_as_people_have_them() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.csv");
    let mut state = 3;
    let schema = |text: &str, more: &[&str]| {
        std::fs::write(&file, text).unwrap();
        let mut args = vec!["schema", s(&file)];
        args.extend(more);
        ok(&args)
    };
    let column = |toml: &str, name: &str| {
        let part = toml.split("[[data.columns]]").find(|p| p.contains(&format!("name = \"{name}\"")));
        part.unwrap_or_else(|| panic!("no column {name} in {toml}")).to_string()
    };
    let mut index = String::from(",click,user,price,when\n");
    for i in 0..600 {
        let price = if i % 20 == 3 { "NA".into() } else { format!("{}.25", draw(&mut state, 9)) };
        index += &format!(
            "{i},{},u{},{price},2024-05-{:02}\n",
            draw(&mut state, 2),
            draw(&mut state, 9),
            1 + i / 30
        );
    }
    let toml = schema(&index, &[]);
    assert!(toml.contains("header = \"yes\"") && column(&toml, "click").contains("label"), "{toml}");
    let first = column(&toml, "Unnamed: 0");
    assert!(first.contains("\"ignore\"") && first.contains("numbers of the rows"), "{first}");
    let price = column(&toml, "price");
    assert!(
        price.contains("\"numeric\"")
            && price.contains("na = [\"NA\"]")
            && price.contains("taken as missing")
    );
    assert!(column(&toml, "user").contains("\"categorical\""));
    // the same with a mark, carriage returns alone, blanks around names
    for text in [format!("\u{feff}{index}"), index.replace('\n', "\r"), index.replacen("user", " user ", 1)] {
        assert_eq!(schema(&text, &[]), toml);
    }
    // the same name twice
    std::fs::write(&file, index.replacen("user", "click", 1)).unwrap();
    fails(&["schema", s(&file)], &["\"click\" stands twice", "as number 2 and 3"]);

    let adult: String = (0..900)
        .map(|i| {
            format!(
                "{}, j{}, {}\n",
                18 + i % 60,
                draw(&mut state, 5),
                ["<=50K", ">50K"][usize::from(i % 10 < 3)]
            )
        })
        .collect();
    let toml = schema(&adult, &["--label", "c3"]);
    assert!(toml.contains("trim = true") && toml.contains("positive = \"= >50K\""), "{toml}");
    let out = dir.path().join("adult.toml");
    std::fs::write(&out, toml).unwrap();
    let check: serde_json::Value =
        serde_json::from_str(&ok(&["check", s(&file), "--schema", s(&out), "--json"])).unwrap();
    assert_eq!((check["rows"].as_u64(), check["positives"].as_u64()), (Some(900), Some(270)));

    let all: String = visits(9, 500).iter().map(|r| r.join(",") + "\n").collect();
    let toml = schema(&format!("clicked,user,city\n{all}"), &[]);
    assert!(
        column(&toml, "clicked").contains("positive = \"= yes\"") && toml.contains("never come again"),
        "{toml}"
    );
    assert!(schema(&all, &[]).contains("header = \"no\""));
}

/// A file with a header is not read by a run without, rows and all; large ids are no row numbers; floats are ids where the
/// name says so; decimal commas are no lists.
#[test]
fn what_looks_like_something_else_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.csv");
    let mut state = 11;
    let schema = |text: String| {
        std::fs::write(&file, text).unwrap();
        ok(&["schema", s(&file)])
    };
    let mut rows = |make: &mut dyn FnMut(&mut u64) -> String, head: &str| {
        (0..300).fold(format!("{head}\n"), |t, _| t + &make(&mut state) + "\n")
    };
    let large = rows(&mut |st| format!("{},{}", draw(st, 2), (1u64 << 60) + draw(st, 100)), "click,thing");
    assert!(!schema(large).contains("in order"), "random ids");
    let floats =
        rows(&mut |st| format!("{},{}.0,{}", draw(st, 2), draw(st, 40), draw(st, 9)), "click,user_id,n");
    assert!(schema(floats).contains("numbers that look like ids"));
    let years =
        rows(&mut |st| format!("{},{},{}", draw(st, 2), draw(st, 900), draw(st, 900)), "label,2019,2020");
    assert!(schema(years).contains("name = \"2019\""));
    let commas = rows(&mut |st| format!("{};{},{}5", draw(st, 2), draw(st, 90), draw(st, 9)), "click;price");
    assert!(schema(commas).contains("numbers with commas"));
    std::fs::write(&file, b"\xff\xfec\0l\0i\0c\0k\0\n\0").unwrap();
    fails(&["schema", s(&file)], &["UTF-16", "data.encoding=utf-16"]);

    let bare: String = visits(3, 400).iter().map(|r| r.join(",") + "\n").collect();
    std::fs::write(dir.path().join("a.toml"), VISITS).unwrap();
    std::fs::write(dir.path().join("bare.csv"), &bare).unwrap();
    let run = trained(dir.path(), &dir.path().join("bare.csv"), &dir.path().join("a.toml"), &[]);
    std::fs::write(&file, format!("antwort,wer,wo\n{bare}")).unwrap();
    fails(
        &["predict", s(&run), "--data", s(&file), "--out", "-"],
        &["looks like a header", "take that row out"],
    );
}

/// Advice that can be followed, in one step.
#[test]
fn messages_lead_to_the_change() {
    let dir = tempfile::tempdir().unwrap();
    let at = |n: &str| dir.path().join(n);
    let toml = "[data]\n[[data.columns]]\nname = \"y\"\nkind = \"label\"\n[[data.columns]]\nname = \"x\"\nkind = \"numeric\"\n";
    std::fs::write(at("s.toml"), toml).unwrap();
    let (schema, file) = (at("s.toml"), at("x.csv"));
    let error = |body: &str, parts: &[&str], more: &[&str]| {
        std::fs::write(&file, format!("y,x\n1,2\n0,3\n{body}\n")).unwrap();
        let out = at("r");
        let mut args = vec!["train", "--train", s(&file), "--valid", s(&file), "--schema", s(&schema)];
        args.extend(["--out", s(&out)]);
        args.extend(more);
        fails(&args, parts);
    };
    error("1,NA", &["x.csv:4: column x: \"NA\"", "na = [\"NA\"]"], &[]);
    error("1,1e39", &["x.csv:4", "too large a number"], &[]);
    error("maybe,1", &["x.csv:4: column y", "positive = "], &[]);
    error("1,1", &["header"], &["--set", "data.header=maybe"]);
    for word in ["true", "yes"] {
        std::fs::write(&file, "y,x\n1,2\n0,3\n").unwrap();
        ok(&["check", s(&file), "--schema", s(&schema), "--set", &format!("data.header={word}")]);
    }
    // a time that is none has a line
    std::fs::write(&file, "y,x,t\n1,2,5\n0,3,soon\n").unwrap();
    let out = at("r");
    let mut args = vec!["train", "--train", s(&file), "--split", "0.5,0.5", "--split-by", "time:t"];
    args.extend(["--schema", s(&schema), "--out", s(&out)]);
    fails(&args, &["x.csv:3: column t: \"soon\" is not a time"]);
    // labels as programs write them
    let piped =
        birkhoff_reads(&["check", "-", "--schema", s(&schema), "--json"], b"y,x\nTrue,2\nFalse,3\n1.0,1\n");
    let check: serde_json::Value = serde_json::from_slice(&piped.stdout).unwrap();
    assert_eq!((check["rows"].as_u64(), check["positives"].as_u64()), (Some(3), Some(2)));
    assert!(birkhoff(&["schema", "--help"]).status.success());
}
