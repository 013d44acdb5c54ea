use super::*;
use crate::data::label::LabelRule;
use crate::data::mutation::{mutate, mutation};
use crate::data::schema::{
    CategoricalColumn, Encoding, LabelColumn, ListOptions, NumericColumn, Pooling, Transform,
};
use proptest::prelude::*;
use std::io::Write;

const VOCAB: Encoding = Encoding::Vocabulary { min_count: 1, max_size: None };

/// price (numeric), user (also the group), tags (a list), w (weights), y (the label: positive from 4 on).
fn schema() -> Schema {
    let list = ListOptions { separator: '|', pooling: Pooling::Mean, max_length: 0 };
    Schema {
        numeric: vec![NumericColumn::new("price", Transform::None, true)],
        categorical: vec![
            CategoricalColumn::single("user", VOCAB),
            CategoricalColumn { list: Some(list), ..CategoricalColumn::single("tags", VOCAB) },
        ],
        label: LabelColumn { name: "y".into(), positive: Some(LabelRule::parse(">= 4").unwrap()) },
        weight: Some("w".into()),
        group: Some("user".into()),
        file: ["y", "user", "price", "tags", "w"].map(String::from).to_vec(),
    }
}

fn source(bytes: &[u8], format: FormatOptions, policy: RowPolicy) -> Source {
    let read = ReadOptions { policy, labels: Labels::Required };
    Source::new(vec![Place::Bytes("x.csv".into(), bytes.into())], format, read)
}

/// The rows of a text as (label, price, user, tags, weight, group, line).
type Row = (u8, f64, String, Vec<String>, f32, u64, u64);

fn rows(s: &Source, schema: &Schema) -> Result<Vec<Row>, DataError> {
    let text = |b: &[u8]| String::from_utf8(b.to_vec()).unwrap();
    let mut reader = s.open(schema)?;
    let mut all = vec![];
    while let Some(chunks) = reader.next_chunks(|r| r)? {
        for c in &chunks {
            for i in 0..c.len() {
                let tags = c.list(2 * i + 1).map(text).collect();
                all.push((
                    c.labels[i],
                    c.numeric[i],
                    text(c.field(2 * i)),
                    tags,
                    c.weights[i],
                    c.groups[i],
                    c.lines[i],
                ));
            }
        }
    }
    Ok(all)
}

const GOOD: &str =
    "user,y,extra,tags,price,w\nu1,5,x,a|b,1.5,1\n\"u,2\",3,x,,,0.5\nu1,4,\"q\"\"q\",b||c,-2e1,2\n";

#[test]
fn csv_with_a_header_gives_every_kind_of_column() {
    let got = rows(&source(GOOD.as_bytes(), FormatOptions::default(), RowPolicy::Error), &schema()).unwrap();
    assert_eq!(got.len(), 3);
    assert_eq!((got[0].0, got[0].1, got[0].3.join(" "), got[0].6), (1, 1.5, "a b".into(), 2));
    assert!(
        got[1].0 == 0 && got[1].1.is_nan() && got[1].2 == "u,2" && got[1].3.is_empty() && got[1].4 == 0.5
    );
    assert_eq!((got[2].1, got[2].3.join(" "), got[2].4), (-20.0, "b c".into(), 2.0));
    assert!(got[0].5 == got[2].5 && got[0].5 != got[1].5);
}

#[test]
fn files_with_and_without_a_header_read_alike() {
    let headed = source(GOOD.as_bytes(), FormatOptions::default(), RowPolicy::Error);
    let bare = "5,u1,1.5,a|b,1\n3,\"u,2\",,,0.5\n4,u1,-2e1,b||c,2\n";
    let bare = source(bare.as_bytes(), FormatOptions::default(), RowPolicy::Error);
    let strip = |mut v: Vec<Row>| {
        v.iter_mut().for_each(|r| (r.6, r.1) = (0, if r.1.is_nan() { 99.0 } else { r.1 }));
        v
    };
    assert_eq!(strip(rows(&bare, &schema()).unwrap()), strip(rows(&headed, &schema()).unwrap()));
    // of several files the first decides
    let mut both = headed.clone();
    both.places.extend(bare.places.clone());
    assert_eq!(rows(&both, &schema()).unwrap().len(), 6, "rows beyond doubt");
    both.places.rotate_left(1);
    let text = rows(&both, &schema()).unwrap_err().to_string();
    assert!(text.contains("has the columns' names") && text.contains("--header yes"), "{text}");
    both.places[1] = both.places[0].clone();
    assert_eq!(rows(&both, &schema()).unwrap().len(), 6);
    let fail = |text: &str, format: FormatOptions, s: &Schema| {
        rows(&source(text.as_bytes(), format, RowPolicy::Error), s).unwrap_err().to_string()
    };
    // a schema that needs a header
    let needs = FormatOptions { header: Some(true), ..Default::default() };
    let text = fail("5,u1,1.5,a|b,1\n5,u1,1.5,a|b,1\n", needs, &schema());
    assert!(text.starts_with("x.csv:1: its first row is \"5,u1,1.5,a|b,1\", expected a header"), "{text}");
    let unordered = Schema { file: vec![], ..schema() };
    let text = fail("5,u1,1.5,a|b,1\n5,u1,1.5,a|b,1\n", FormatOptions::default(), &unordered);
    assert!(
        text.contains("has no header with the schema's columns") && text.contains("first row is \"5,u1"),
        "{text}"
    );
    let text = fail("y,user,price,w\n1,a,2,1\n", FormatOptions::default(), &schema());
    assert!(text.starts_with("x.csv:1: has no column \"tags\"; it has y, user, price, w"), "{text}");
    let text = fail("y,user,user,price,tags,w\n1,a,b,2,,1\n", FormatOptions::default(), &schema());
    assert!(text.contains("column \"user\" stands twice, as number 2 and 3"), "{text}");
}

#[test]
fn each_wrong_value_names_its_place() {
    let one = |row: &str| {
        let text = format!("{GOOD}{row}\nu9,5,x,a,1,1\n");
        rows(&source(text.as_bytes(), FormatOptions::default(), RowPolicy::Error), &schema())
            .unwrap_err()
            .to_string()
    };
    for (row, want) in [
        ("u,5,x,a,1,-1", "x.csv:5: column w: \"-1\" is not a weight"),
        ("u,5,x,a,1,", "x.csv:5: column w: \"\" is not a weight"),
        (
            "u,high,x,a,1,1",
            "x.csv:5: column y: \"high\" is not a label, expected what its rule \">= 4\" can compare",
        ),
        ("u,,x,a,1,1", "x.csv:5: column y: no label"),
        ("u,5,x,a,one,1", "x.csv:5: column price: \"one\" is not a number, expected a decimal number"),
        (
            "u,5,x,a,1",
            "x.csv:5: 5 fields, expected 6 (user, y, extra, tags, price, w); check for missing or extra commas",
        ),
        ("u,5,x,\"a,1,1", "x.csv:5: column tags: a quote is never closed"),
        ("u,5,x,\"a\"b,1,1", "x.csv:5: column tags: text after a closing quote"),
    ] {
        let text = one(row);
        assert!(text.starts_with(want), "{text}");
    }
    // a label that is not 0 or 1 needs a rule
    let plain = Schema { label: LabelColumn { name: "y".into(), positive: None }, ..schema() };
    let text = rows(&source(GOOD.as_bytes(), FormatOptions::default(), RowPolicy::Error), &plain)
        .unwrap_err()
        .to_string();
    assert!(
        text.starts_with("x.csv:2: column y: \"5\" is not a label") && text.contains("positive = \">= 4\""),
        "{text}"
    );
    // ids beyond 2^63 are texts
    let text = GOOD.replace("u1", "18446744073709551617");
    assert_eq!(
        rows(&source(text.as_bytes(), FormatOptions::default(), RowPolicy::Error), &schema()).unwrap()[0].2,
        "18446744073709551617"
    );
    // other texts that mean missing
    let na = FormatOptions { na: vec!["NA".into()], ..Default::default() };
    let text = GOOD.replace("a|b", "a|NA").replace("1.5", "NA");
    let got = rows(&source(text.as_bytes(), na, RowPolicy::Error), &schema()).unwrap();
    assert!(got[0].1.is_nan() && got[0].3 == ["a"]);
}

#[test]
fn a_split_gives_every_row_to_one_part() {
    let text: String = (0..500).map(|i| format!("{},u{},1,a,1\n", i % 2 * 5, i % 37)).collect();
    let all = source(text.as_bytes(), FormatOptions::default(), RowPolicy::Error);
    for by in [
        crate::data::split::SplitBy::Random { seed: 4 },
        crate::data::split::SplitBy::Group { column: "user".into(), seed: 4 },
    ] {
        let split = Split { shares: [0.6, 0.2, 0.2], by };
        let parts =
            [Part::Train, Part::Valid, Part::Test].map(|p| rows(&all.part(&split, p), &schema()).unwrap());
        let mut lines: Vec<u64> = parts.iter().flatten().map(|r| r.6).collect();
        lines.sort_unstable();
        assert_eq!(lines, (1..=500).collect::<Vec<u64>>());
        assert!(parts.iter().all(|p| p.len() > 40), "{:?}", parts.each_ref().map(Vec::len));
        if split.column().is_some() {
            let users = |p: &[Row]| p.iter().map(|r| r.2.clone()).collect::<std::collections::HashSet<_>>();
            assert!(users(&parts[0]).is_disjoint(&users(&parts[1])));
        }
    }
}

#[cfg(feature = "formats")]
mod columnar {
    use super::*;
    use arrow_array::builder::{ListBuilder, StringBuilder, StringDictionaryBuilder};
    use arrow_array::types::Int32Type;
    use arrow_array::{ArrayRef, Float64Array, Int64Array, RecordBatch};

    /// The rows of `GOOD`.
    pub fn batch() -> RecordBatch {
        let mut user = StringDictionaryBuilder::<Int32Type>::new();
        ["u1", "u,2", "u1"].iter().for_each(|u| user.append_value(u));
        let mut tags = ListBuilder::new(StringBuilder::new());
        tags.append_value([Some("a"), Some("b")]);
        tags.append_null();
        tags.append_value([Some("b"), None, Some("c")]);
        let columns: Vec<(&str, ArrayRef)> = vec![
            ("user", Arc::new(user.finish())),
            ("y", Arc::new(Int64Array::from(vec![5, 3, 4]))),
            ("price", Arc::new(Float64Array::from(vec![Some(1.5), None, Some(-20.0)]))),
            ("tags", Arc::new(tags.finish())),
            ("w", Arc::new(Float64Array::from(vec![1.0, 0.5, 2.0]))),
            ("other", Arc::new(Int64Array::from(vec![7, 8, 9]))),
        ];
        RecordBatch::try_from_iter(columns).unwrap()
    }

    pub fn parquet() -> Vec<u8> {
        let mut out = vec![];
        let b = batch();
        let mut w = parquet::arrow::ArrowWriter::try_new(&mut out, b.schema(), None).unwrap();
        w.write(&b).unwrap();
        w.close().unwrap();
        out
    }

    pub fn arrow(stream: bool) -> Vec<u8> {
        let mut out = vec![];
        let b = batch();
        if stream {
            let mut w = arrow_ipc::writer::StreamWriter::try_new(&mut out, &b.schema()).unwrap();
            w.write(&b).unwrap();
            w.finish().unwrap();
        } else {
            let mut w = arrow_ipc::writer::FileWriter::try_new(&mut out, &b.schema()).unwrap();
            w.write(&b).unwrap();
            w.finish().unwrap();
        }
        out
    }

    #[test]
    fn columnar_files_give_the_rows_of_the_text() {
        let want =
            rows(&source(GOOD.as_bytes(), FormatOptions::default(), RowPolicy::Error), &schema()).unwrap();
        for bytes in [parquet(), arrow(false), arrow(true)] {
            let got = rows(&source(&bytes, FormatOptions::default(), RowPolicy::Error), &schema()).unwrap();
            assert_eq!(got.len(), 3);
            for (g, w) in got.iter().zip(&want) {
                assert_eq!((g.0, &g.2, &g.3, g.4, g.5), (w.0, &w.2, &w.3, w.4, w.5));
                assert!(g.1 == w.1 || (g.1.is_nan() && w.1.is_nan()));
                assert_eq!(g.6, w.6 - 1, "rows count from 1, without a header");
            }
        }
        let text = |s: &Schema| {
            rows(&source(&parquet(), FormatOptions::default(), RowPolicy::Error), s).unwrap_err().to_string()
        };
        let mut other = schema();
        other.numeric[0].from = Some("user".into());
        assert!(text(&other).starts_with("x.csv:1: column user: \"u1\" is not a number"), "{}", text(&other));
        other.numeric[0].from = Some("tags".into());
        assert!(text(&other).contains("only a list column can be made"), "{}", text(&other));
        other.numeric[0].from = Some("none".into());
        assert!(text(&other).contains("has no column \"none\"; it has user, y, price"), "{}", text(&other));
    }
}

fn gzipped(text: &[u8]) -> Vec<u8> {
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(text).unwrap();
    gz.finish().unwrap()
}

/// A good file of each kind, and the schema that reads it.
fn good_files() -> Vec<(Vec<u8>, Schema)> {
    let sparse = Schema {
        numeric: vec![NumericColumn::new("3", Transform::None, false)],
        categorical: vec![CategoricalColumn::single("#1", VOCAB), schema().categorical[1].clone()],
        ..Schema::default()
    };
    let mut libsvm = sparse.clone();
    libsvm.categorical[1].name = super::super::sparse::FEATURES.into();
    let mut libffm = sparse;
    libffm.categorical[0].name = "1".into();
    libffm.categorical[1].name = "2".into();
    let bare = "5\tu1\t1.5\ta|b\t1\n3\tu2\t\t\t0.5\n4\tu1\t-2e1\tb||c\t2\n";
    let mut files = vec![
        (GOOD.as_bytes().to_vec(), schema()),
        (bare.as_bytes().to_vec(), schema()),
        (b"1 7:1 9:1\n0 8:1 3:1\n1 9:1\n".to_vec(), libsvm),
        (b"1 3:0:2.5 1:7:1 2:5:1 2:6:1\n0 1:8:1\n1 1:7:1 2:6:1\n".to_vec(), libffm),
        (gzipped(GOOD.as_bytes()), schema()),
    ];
    #[cfg(feature = "formats")]
    {
        files.push((zstd::encode_all(GOOD.as_bytes(), 1).unwrap(), schema()));
        files.push((columnar::parquet(), schema()));
        files.push((columnar::arrow(false), schema()));
        files.push((columnar::arrow(true), schema()));
    }
    files
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn mutated_files_never_panic_and_errors_are_one_line(
        kind in any::<prop::sample::Index>(),
        mutations in prop::collection::vec(mutation(), 1..4),
        optional in any::<bool>(),
    ) {
        let files = good_files();
        let (good, schema) = &files[kind.index(files.len())];
        let mut bytes = good.clone();
        mutations.iter().for_each(|m| mutate(&mut bytes, m));
        let labels = if optional { Labels::Optional } else { Labels::Required };
        let mut results = vec![];
        for policy in [RowPolicy::Error, RowPolicy::Skip] {
            let mut s = source(&bytes, FormatOptions::default(), policy);
            s.read.labels = labels;
            // small blocks: borders everywhere
            s.block = 16;
            let result = fit(&s, schema).and_then(|(encoder, _)| load(&s, &encoder).map(|d| (d, encoder)));
            match &result {
                Err(e) => {
                    let text = e.to_string();
                    prop_assert!(!text.chars().any(char::is_control), "{:?}", text);
                    prop_assert!(text.starts_with("x.csv:") && text.chars().count() < 700, "{}", text);
                }
                Ok((data, encoder)) => {
                    let n = data.rows.len();
                    prop_assert!(data.rows.numeric.len() == n * encoder.schema.features() && data.rows.ids.len() == n);
                    prop_assert!(data.rows.numeric.iter().all(|v| v.is_finite()));
                    let sizes = encoder.table_rows();
                    prop_assert!(data.rows.ids.iter().all(|&id| id < sizes[0]));
                    prop_assert!(data.rows.lists[0].ids.iter().all(|&id| id < sizes[1]));
                }
            }
            results.push(result);
        }
        if let (Ok(strict), Ok(lenient)) = (&results[0], &results[1]) {
            prop_assert_eq!(&strict.0.rows, &lenient.0.rows);
            prop_assert_eq!(lenient.0.skipped.skipped, 0);
        }
    }
}

#[test]
fn enormous_headers_and_lines_are_errors_in_bounded_memory() {
    let fail = |text: &[u8]| {
        rows(&source(text, FormatOptions::default(), RowPolicy::Error), &schema()).unwrap_err().to_string()
    };
    let header: String = (0..1_000_000).map(|i| format!("c{i},")).collect::<String>() + "y\n1\n";
    let text = fail(header.as_bytes());
    assert!(text.starts_with("x.csv:1: ") && text.len() < 700, "{text}");
    let mut long = GOOD.as_bytes().to_vec();
    long.extend_from_slice(b"u1,5,");
    long.resize(long.len() + (64 << 20), b'z');
    long.extend_from_slice(b",a,1,1\n");
    assert!(fail(&long).starts_with("x.csv:5: line longer than 8388608 bytes"), "{}", fail(&long));
    // the same behind a quote that is never closed
    let mut open = GOOD.as_bytes().to_vec();
    open.extend_from_slice(b"u1,5,\"");
    open.resize(open.len() + (20 << 20), b'\n');
    assert!(fail(&open).starts_with("x.csv:5: column extra: a quote is never closed"), "{}", fail(&open));
}
