//! One table in many containers: the same ids and numbers, whatever wrote it and whatever the model was fitted on. And a
//! table that is not as it was: the same rows, or one clear error.

use std::io::Write as _;
use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, BooleanArray, Date32Array, Decimal128Array, Float32Array, Float64Array, Int64Array,
    RecordBatch, StringArray, UInt64Array,
};
use arrow_schema::DataType;
use proptest::prelude::*;

use super::FittedEncoder;
use super::error::DataError;
use super::format::FormatOptions;
use super::input::Place;
use super::reader::{Labels, ReadOptions, RowPolicy, Source, fit, load};
use super::rows::Rows;
use super::schema::{CategoricalColumn, Encoding, LabelColumn, NumericColumn, Schema, Transform};

/// A row of the table.
#[derive(Clone, Debug)]
struct Row {
    click: bool,
    price: Option<f32>,
    age: Option<i64>,
    site: Option<String>,
    user: Option<i64>,
    big: u64,
    app: bool,
    day: i32,
    cost: i128,
    score: f64,
}

const NAMES: [&str; 10] = ["click", "price", "age", "site", "user", "big", "app", "day", "cost", "score"];

fn row() -> impl Strategy<Value = Row> {
    let some = |n: u32| prop::bool::weighted(1.0 - f64::from(n) / 10.0);
    (
        (any::<bool>(), some(1), -1e6f32..1e6, some(2), -9i64..99),
        (some(1), "[a-z][a-z0-9 ,;é\"']{0,5}[a-z]", some(1), 0i64..40),
        (prop::sample::select(vec![u64::MAX, u64::MAX - 7, 1 << 63, 12]), any::<bool>(), 19_000i32..19_020),
        (0i128..500, prop::sample::select(vec![0.5, 2.0, 1e-5, -3.25, 1e22])),
    )
        .prop_map(|((click, p, price, a, age), (s, site, u, user), (big, app, day), (cost, score))| {
            Row {
                click,
                price: p.then_some(price),
                age: a.then_some(age),
                site: s.then_some(site),
                user: u.then_some(user),
                big,
                app,
                day,
                cost,
                score,
            }
        })
}

/// As a program of the field writes text: `python`'s words for booleans and floats.
fn cells(r: &Row, floats: bool) -> Vec<String> {
    let whole =
        |v: Option<i64>| v.map_or(String::new(), |v| if floats { format!("{v}.0") } else { v.to_string() });
    let date = arrow_cast::cast(&Date32Array::from(vec![r.day]), &DataType::Utf8).unwrap();
    let date = date.as_any().downcast_ref::<StringArray>().unwrap().value(0).to_string();
    let words = if floats { ["False", "True"] } else { ["false", "true"] };
    vec![
        u8::from(r.click).to_string(),
        r.price.map_or(String::new(), |v| v.to_string()),
        whole(r.age),
        r.site.clone().unwrap_or_default(),
        whole(r.user),
        r.big.to_string(),
        words[usize::from(r.app)].into(),
        if floats { format!("{date} 00:00:00") } else { date },
        format!("{}.{:02}", r.cost / 100, r.cost % 100),
        if floats { format!("{:e}", r.score) } else { format!("{:?}", r.score) },
    ]
}

fn text(rows: &[Row], delimiter: &str, header: bool, floats: bool, end: &str, quote: bool) -> Vec<u8> {
    let mut out = String::new();
    let mut line = |cells: Vec<String>| {
        let cell = |c: &String| match quote && (!c.is_empty() || delimiter == ",") {
            true if c.contains(['"', ',', ';']) || delimiter == "," => {
                format!("\"{}\"", c.replace('"', "\"\""))
            }
            _ => c.clone(),
        };
        out.push_str(&cells.iter().map(cell).collect::<Vec<_>>().join(delimiter));
        out.push_str(end);
    };
    if header {
        line(NAMES.map(String::from).to_vec());
    }
    rows.iter().for_each(|r| line(cells(r, floats)));
    out.into_bytes()
}

#[derive(Clone, Copy, PartialEq)]
enum Typed {
    Whole,
    Floats,
    Dictionary,
}

fn batch(rows: &[Row], typed: Typed) -> RecordBatch {
    let ints = |f: &dyn Fn(&Row) -> Option<i64>| -> ArrayRef {
        match typed {
            Typed::Floats => {
                let value = |r: &Row| Some(f(r).map_or(f64::NAN, |v| v as f64));
                Arc::new(rows.iter().map(value).collect::<Float64Array>())
            }
            _ => Arc::new(rows.iter().map(f).collect::<Int64Array>()),
        }
    };
    let packed = |a: ArrayRef| match typed {
        Typed::Dictionary => {
            let kind = DataType::Dictionary(DataType::Int32.into(), a.data_type().clone().into());
            arrow_cast::cast(&a, &kind).unwrap()
        }
        _ => a,
    };
    let cost = rows.iter().map(|r| Some(r.cost)).collect::<Decimal128Array>();
    let columns: Vec<ArrayRef> = vec![
        ints(&|r| Some(i64::from(r.click))),
        Arc::new(rows.iter().map(|r| r.price).collect::<Float32Array>()),
        ints(&|r| r.age),
        packed(Arc::new(rows.iter().map(|r| r.site.clone()).collect::<StringArray>())),
        packed(ints(&|r| r.user)),
        Arc::new(rows.iter().map(|r| Some(r.big)).collect::<UInt64Array>()),
        Arc::new(rows.iter().map(|r| Some(r.app)).collect::<BooleanArray>()),
        packed(Arc::new(rows.iter().map(|r| Some(r.day)).collect::<Date32Array>())),
        Arc::new(cost.with_precision_and_scale(12, 2).unwrap()),
        Arc::new(rows.iter().map(|r| Some(r.score)).collect::<Float64Array>()),
    ];
    RecordBatch::try_from_iter(NAMES.into_iter().zip(columns)).unwrap()
}

fn parquet(b: &RecordBatch) -> Vec<u8> {
    let mut out = vec![];
    let mut w = parquet::arrow::ArrowWriter::try_new(&mut out, b.schema(), None).unwrap();
    w.write(b).unwrap();
    w.close().unwrap();
    out
}

fn arrow(b: &RecordBatch, stream: bool) -> Vec<u8> {
    let mut out = vec![];
    if stream {
        let mut w = arrow_ipc::writer::StreamWriter::try_new(&mut out, &b.schema()).unwrap();
        w.write(b).unwrap();
        w.finish().unwrap();
    } else {
        let mut w = arrow_ipc::writer::FileWriter::try_new(&mut out, &b.schema()).unwrap();
        w.write(b).unwrap();
        w.finish().unwrap();
    }
    out
}

/// The table in every container, and what has to be said about it.
fn containers(rows: &[Row]) -> Vec<(&'static str, Vec<u8>, FormatOptions)> {
    let auto = FormatOptions::default;
    let plain = text(rows, ",", true, false, "\n", true);
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(&plain).unwrap();
    let trim = FormatOptions { trim: true, ..auto() };
    let tsv = FormatOptions { format: super::format::FormatName::Tsv, ..auto() };
    let bare = FormatOptions { header: Some(false), ..auto() };
    vec![
        ("csv", plain.clone(), auto()),
        ("csv of pandas", text(rows, ",", true, true, "\n", true), auto()),
        ("csv, no header", text(rows, ",", false, false, "\n", true), bare),
        ("csv, crlf", text(rows, ",", true, false, "\r\n", true), auto()),
        ("csv, blanks", text(rows, ", ", true, true, " \n", true), trim),
        ("tsv", text(rows, "\t", true, false, "\n", false), tsv),
        ("byte order mark", [&b"\xef\xbb\xbf"[..], &plain].concat(), auto()),
        ("gzip", gz.finish().unwrap(), auto()),
        ("zstd", zstd::encode_all(&plain[..], 1).unwrap(), auto()),
        ("parquet", parquet(&batch(rows, Typed::Whole)), auto()),
        ("parquet of floats", parquet(&batch(rows, Typed::Floats)), auto()),
        ("parquet of dictionaries", parquet(&batch(rows, Typed::Dictionary)), auto()),
        ("arrow file", arrow(&batch(rows, Typed::Whole), false), auto()),
        ("arrow stream of floats", arrow(&batch(rows, Typed::Floats), true), auto()),
    ]
}

fn schema(encoding: Encoding) -> Schema {
    let numeric = |n: &str, t| NumericColumn::new(n, t, true);
    Schema {
        numeric: vec![numeric("price", Transform::STANDARDIZE), numeric("age", Transform::LOG_STANDARDIZE)],
        categorical: NAMES[3..].iter().map(|n| CategoricalColumn::single(*n, encoding)).collect(),
        label: LabelColumn { name: "click".into(), positive: None },
        file: NAMES.map(String::from).to_vec(),
        ..Schema::default()
    }
}

fn source(bytes: &[u8], format: &FormatOptions, labels: Labels) -> Source {
    let place = Place::Bytes("x".into(), bytes.into());
    Source::new(vec![place], format.clone(), ReadOptions { policy: RowPolicy::Error, labels })
}

fn fitted(bytes: &[u8], format: &FormatOptions, schema: &Schema) -> FittedEncoder {
    fit(&source(bytes, format, Labels::Required), schema).unwrap().0
}

fn bits(rows: &Rows) -> (Vec<u32>, &[u32], &[u8]) {
    (rows.numeric.iter().map(|v| v.to_bits()).collect(), &rows.ids, &rows.labels)
}

/// A table whose columns have more than one value, none of them in every row.
fn table() -> impl Strategy<Value = Vec<Row>> {
    prop::collection::vec(row(), 30..70).prop_map(|mut rows| {
        (rows[0].click, rows[1].click) = (false, true);
        (rows[0].app, rows[1].app) = (false, true);
        (rows[0].price, rows[1].price) = (Some(0.1), Some(2.5));
        (rows[0].age, rows[1].age) = (Some(1), Some(2));
        (rows[0].cost, rows[0].score, rows[1].score) = (1250, 0.5, 2.0);
        rows
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever the container of the training rows, all containers have the same ids and numbers.
    #[test]
    fn a_table_is_the_same_in_every_container(rows in table(), hash in any::<bool>()) {
        let encoding =
            if hash { Encoding::Hash { buckets: 1 << 20 } } else { Encoding::Vocabulary { min_count: 1, max_size: None } };
        let schema = schema(encoding);
        let all = containers(&rows);
        let mut first: Option<Rows> = None;
        for (fit_on, bytes, format) in &all {
            let encoder = fitted(bytes, format, &schema);
            for (name, bytes, format) in &all {
                let got = load(&source(bytes, format, Labels::Required), &encoder).unwrap().rows;
                let want = first.get_or_insert_with(|| got.clone());
                let (got, want) = (bits(&got), bits(want));
                prop_assert_eq!(got.1, want.1, "ids of {} by {}", name, fit_on);
                prop_assert!(got == want, "numbers or labels of {} by {}", name, fit_on);
            }
        }
    }

    /// A column renamed, dropped, doubled, moved or of another type gives the same rows, or one line that names it.
    #[test]
    fn a_changed_table_is_the_same_or_refused(
        rows in table(),
        at in 0usize..NAMES.len(),
        to in 0usize..NAMES.len(),
        how in 0usize..6,
        columnar in any::<bool>(),
        decided in any::<bool>(),
    ) {
        let schema = schema(Encoding::Vocabulary { min_count: 1, max_size: None });
        let encoder = fitted(&text(&rows, ",", true, false, "\n", true), &FormatOptions::default(), &schema);
        let format = FormatOptions { header: decided.then_some(true), ..FormatOptions::default() };
        let options = |bytes: &[u8]| source(bytes, &format, Labels::Optional);
        let want = load(&options(&text(&rows, ",", true, false, "\n", true)), &encoder).unwrap().rows;
        let whole = batch(&rows, Typed::Whole);
        let mut names = NAMES.map(String::from).to_vec();
        let mut columns = whole.columns().to_vec();
        // the digits of a float are those that say it shortest, which Arrow's are not
        let text = |c: &ArrayRef| -> ArrayRef {
            match c.as_any().downcast_ref::<Float32Array>() {
                Some(f) => Arc::new(f.iter().map(|v| v.map(|v| v.to_string())).collect::<StringArray>()),
                None => arrow_cast::cast(c, &DataType::Utf8).unwrap(),
            }
        };
        match how {
            0 => names[at] = format!("{}_id", names[at]),
            1 => drop((names.remove(at), columns.remove(at))),
            2 => {
                names.push(names[at].clone());
                columns.push(columns[to].clone());
            }
            3 => {
                let (name, column) = (names.remove(at), columns.remove(at));
                names.insert(to, name);
                columns.insert(to, column);
            }
            4 => columns[at] = text(&columns[at]),
            _ => {
                let kind = columns[at].data_type().clone();
                if kind.is_numeric() || kind == DataType::Boolean {
                    columns[at] = arrow_cast::cast(&columns[at], &DataType::Float64).unwrap();
                }
            }
        }
        let bytes = if columnar {
            let fields: Vec<_> = names.iter().zip(&columns).map(|(n, c)| arrow_schema::Field::new(n, c.data_type().clone(), true)).collect();
            let b = RecordBatch::try_new(Arc::new(arrow_schema::Schema::new(fields)), columns.clone()).unwrap();
            parquet(&b)
        } else {
            let texts: Vec<ArrayRef> = columns.iter().map(text).collect();
            let mut w = csv::Writer::from_writer(vec![]);
            w.write_record(&names).unwrap();
            for r in 0..rows.len() {
                let cell = |c: &ArrayRef| {
                    let t = c.as_any().downcast_ref::<StringArray>().unwrap();
                    if t.is_null(r) { String::new() } else { t.value(r).to_string() }
                };
                w.write_record(texts.iter().map(cell)).unwrap();
            }
            w.into_inner().unwrap()
        };
        // a large float has lost what the whole number said; a float of 32 bits in 64 has digits that its text has not
        let lossy = how == 5 && matches!(NAMES[at], "big" | "price");
        match load(&options(&bytes), &encoder) {
            Ok(got) if lossy => prop_assert_eq!(got.rows.len(), rows.len()),
            Ok(got) => {
                let (g, w) = (bits(&got.rows), bits(&want));
                prop_assert_eq!(g.1, w.1, "other ids: {} at {} to {}", how, NAMES[at], NAMES[to]);
                prop_assert_eq!(g.0, w.0, "other numbers: {} at {} to {}", how, NAMES[at], NAMES[to]);
            }
            Err(e) => {
                let line = e.to_string();
                prop_assert!(line.contains(NAMES[at]) && !line.contains('\n'), "{}", line);
                prop_assert!(matches!(how, 0..=2), "refused: {}", line);
                prop_assert!(matches!(e, DataError::Columns { .. } | DataError::Format { .. }), "{}", line);
            }
        }
    }
}
