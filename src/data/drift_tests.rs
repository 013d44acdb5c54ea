use super::*;
use crate::data::format::{FormatName, FormatOptions};
use crate::data::input::Place;
use crate::data::reader::{ReadOptions, RowPolicy, Source, fit};
use crate::data::schema::{
    CategoricalColumn, Encoding, ListOptions, NumericColumn, Pooling, Schema, Transform,
};

fn schema() -> Schema {
    let vocabulary = Encoding::Vocabulary { min_count: 2, max_size: None };
    let list = ListOptions { separator: '|', pooling: Pooling::Mean, max_length: 0 };
    Schema {
        numeric: vec![NumericColumn::new("price", Transform::LOG_STANDARDIZE, true)],
        categorical: vec![
            CategoricalColumn::single("user", vocabulary),
            CategoricalColumn { list: Some(list), ..CategoricalColumn::single("tags", vocabulary) },
            CategoricalColumn::single("page", Encoding::Hash { buckets: 50 }),
        ],
        ..Schema::default()
    }
}

/// Rows of one source; `part` has others of it.
fn rows(n: u32, part: u32, change: impl Fn(u32, [String; 4]) -> [String; 4]) -> String {
    let mut text = String::from("label,price,user,tags,page\n");
    for i in 0..n {
        let r = (i + part * 7_919).wrapping_mul(2_654_435_761) >> 8;
        let price = if r.is_multiple_of(10) { String::new() } else { format!("{}.5", 10 + r % 40) };
        // a long tail: some users come once
        let user = if r.is_multiple_of(5) { format!("once{r}-{part}") } else { (r % 37).to_string() };
        let cells = change(i, [price, user, format!("t{}|t{}", r % 7, r % 11), format!("p{}", r % 90)]);
        text += &format!("{},{}\n", r % 2, cells.join(","));
    }
    text
}

fn source(text: &str) -> Source {
    let format = FormatOptions { format: FormatName::Csv, ..FormatOptions::default() };
    Source::new(vec![Place::Bytes("x.csv".into(), text.as_bytes().into())], format, ReadOptions::default())
}

fn fitted() -> FittedEncoder {
    fit(&source(&rows(4000, 0, |_, c| c)), &schema()).unwrap().0
}

/// Counted as rows are encoded, which is what counting raw rows comes to.
fn drift(encoder: &FittedEncoder, source: &Source) -> Vec<ColumnDrift> {
    let mut reader = source.open(&encoder.schema).unwrap();
    reader.count_values(encoder);
    let mut rows = encoder.empty_rows();
    while reader.encode_more(encoder, &mut rows).unwrap() {}
    let seen = reader.seen().unwrap();
    assert_eq!(seen.rows(), rows.len() as u64);
    let encoded = compare(encoder, seen).unwrap();
    let mut raw = Seen::new(encoder).unwrap();
    let mut reader = source.open(&encoder.schema).unwrap();
    while let Some(chunks) = reader.next_chunks(|rows| rows).unwrap() {
        chunks.iter().for_each(|rows| raw.push(encoder, rows));
    }
    assert_eq!(compare(encoder, &raw).unwrap(), encoded);
    encoded
}

fn warnings(text: &str) -> Vec<String> {
    drift(&fitted(), &source(text)).iter().filter_map(ColumnDrift::warning).collect()
}

#[test]
fn rows_of_the_same_source_are_quiet() {
    let encoder = fitted();
    for (n, part) in [(1, 1), (5, 2), (35, 3), (100, 4), (4000, 5)] {
        for d in drift(&encoder, &source(&rows(n, part, |_, c| c))) {
            assert_eq!(d.warning(), None, "{n} rows: {d:?}");
        }
    }
    let columns = drift(&encoder, &source(&rows(4000, 6, |_, c| c)));
    let names: Vec<_> = columns.iter().map(|d| (d.column.as_str(), d.kind)).collect();
    let want = [("price", "numeric"), ("user", "categorical"), ("tags", "list"), ("page", "categorical")];
    assert_eq!(names, want);
    // the tail of users is what was to be expected
    let user = columns[1].unseen.unwrap();
    assert!((user.here - 0.2).abs() < 0.05 && (user.expected - user.here).abs() < 0.05, "{user:?}");
    assert!((columns[0].missing.train - 0.1).abs() < 0.03 && columns[0].outside.unwrap() < 0.05);
    assert_eq!(columns[3].unseen, None, "hashed values are all known");
}

#[test]
fn what_is_far_is_told_with_both_shares_and_an_example() {
    let with = |change: &dyn Fn([String; 4]) -> [String; 4]| warnings(&rows(400, 9, |_, c| change(c)));
    let float = with(&|[price, user, tags, page]| [price, format!("{user}.0"), tags, page]);
    assert_eq!(float.len(), 1, "{float:?}");
    for part in ["column user: 100 % of its values", ".0\"", "\"", "were to be expected", "another way"] {
        assert!(float[0].contains(part), "{part}: {}", float[0]);
    }
    let cents = with(&|[price, user, tags, page]| [price.replace(".5", "50"), user, tags, page]);
    assert!(
        cents.len() == 1 && cents[0].contains("column price: 100 % of its numbers, such as "),
        "{cents:?}"
    );
    assert!(cents[0].contains("outside 11.5 to 49.5"), "{cents:?}");
    let empty = with(&|[_, user, tags, _]| [String::new(), user, tags, String::new()]);
    assert_eq!(empty.len(), 2, "{empty:?}");
    assert!(empty[0].contains("column price: 100 % of the rows have no value, of training's "), "{empty:?}");
    assert!(empty[1].starts_with("column page: "), "{empty:?}");
    let tags = with(&|[price, user, tags, page]| [price, user, tags.replace('t', "T"), page]);
    assert!(tags.len() == 1 && tags[0].starts_with("column tags: 100 % of its values"), "{tags:?}");
}

#[test]
fn bad_rows_are_counted_nowhere() {
    let encoder = fitted();
    let text = rows(300, 1, |i, [p, u, t, page]| [if i % 50 == 7 { "x".into() } else { p }, u, t, page]);
    let mut bad = source(&text);
    bad.read.policy = RowPolicy::Skip;
    let columns = drift(&encoder, &bad);
    let good = rows(300, 1, |_, c| c);
    let lines: Vec<&str> = good.lines().enumerate().filter(|(i, _)| i % 50 != 8).map(|(_, l)| l).collect();
    assert_eq!(lines.len(), 295);
    assert_eq!(columns, drift(&encoder, &source(&(lines.join("\n") + "\n"))));
}

#[test]
fn an_encoder_without_a_profile_compares_nothing() {
    let mut encoder = fitted();
    let seen = Seen::new(&encoder).unwrap();
    encoder.profile = None;
    assert!(Seen::new(&encoder).is_none() && compare(&encoder, &seen).is_none());
}

#[test]
fn chance_is_no_drift() {
    assert!(!certain((0.1, 1000), (1.0, 29)) && certain((0.1, 1000), (1.0, 30)));
    assert!(!certain((0.5, 1000), (0.8, 40)) && certain((0.5, 1000), (0.8, 400)));
    assert!(certain((0.0, 1000), (0.6, 1000)) && !certain((0.0, 4), (0.6, 40)));
}
