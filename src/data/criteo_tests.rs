use super::*;
use crate::data::blocks::LONGEST_LINE;
use crate::data::format::FormatOptions;
use crate::data::input::Place;
use crate::data::mutation::{mutate, mutation};
use crate::data::rows::UNLABELLED;
use crate::data::schema::{Encoding, Transform};
use crate::data::vocab::{MISSING, OOV};
use proptest::prelude::*;
use std::io::Read;
use std::path::PathBuf;

const VOCAB: Encoding = Encoding::Vocabulary { min_count: 1, max_size: None };

fn schema() -> Schema {
    Schema::criteo(Transform::None, false, VOCAB)
}

/// A good row: label i % 2, I1 missing, I2 = −i, the other integers i; C1 missing, Ck = "k-i".
fn row(i: usize) -> String {
    let numbers = (1..=13)
        .map(|k| if k == 1 { String::new() } else { format!("{}{i}", if k == 2 { "-" } else { "" }) });
    let values = (1..=26).map(|k| if k == 1 { String::new() } else { format!("{k}-{i}") });
    let fields: Vec<String> = std::iter::once((i % 2).to_string()).chain(numbers).chain(values).collect();
    fields.join("\t")
}

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().unwrap())
    }

    fn write(&self, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join("x.tsv");
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

fn lines(n: usize) -> String {
    (1..=n).map(|i| row(i) + "\n").collect()
}

fn fit_error(bytes: impl AsRef<[u8]>) -> String {
    let files = Files::new();
    let text = fit(&files.write(bytes), &schema(), RowPolicy::Error).expect_err("bad file").to_string();
    text.split_once("/x.tsv").expect("names the file").1.to_string()
}

#[test]
fn reads_fits_and_encodes() {
    let files = Files::new();
    let path = files.write(lines(3));
    let (encoder, skipped) = fit(&path, &schema(), RowPolicy::Error).unwrap();
    assert_eq!((encoder.rows, encoder.positives, skipped.skipped), (3, 2, 0));
    assert_eq!(encoder.table_rows()[..2], [2, 5]);
    let path = files.write(row(2) + "\n" + &row(9));
    let data = load(&path, &encoder, ReadOptions::default()).unwrap();
    assert_eq!((data.labelled, data.rows.len(), &data.rows.labels[..]), (true, 2, &[0, 1][..]));
    assert_eq!(data.rows.numeric[..3], [0.0, -2.0, 2.0]);
    assert_eq!(data.rows.ids[..3], [MISSING, 3, 3]);
    assert_eq!(data.rows.ids[26..28], [MISSING, OOV]);
}

#[test]
fn endings_and_byte_order_mark_change_nothing() {
    let files = Files::new();
    let plain = lines(4);
    let (encoder, _) = fit(&files.write(&plain), &schema(), RowPolicy::Error).unwrap();
    let read = |text: &str| load(&files.write(text), &encoder, ReadOptions::default()).unwrap().rows;
    let want = read(&plain);
    assert_eq!(want.len(), 4);
    for text in [
        plain.replace('\n', "\r\n"),
        plain.trim_end().to_string(),
        plain.replacen('\n', "\r\n", 2),
        format!("\u{feff}{plain}"),
    ] {
        assert_eq!(read(&text), want);
    }
}

#[test]
fn each_bad_row_names_its_place() {
    let bad = |change: &dyn Fn(&mut Vec<String>)| {
        let mut fields: Vec<String> = row(5).split('\t').map(String::from).collect();
        change(&mut fields);
        fit_error(lines(2) + &fields.join("\t") + "\n" + &row(7))
    };
    assert_eq!(
        bad(&|f| f.truncate(39)),
        ":3: 39 fields, expected 40 (label, I1..I13, C1..C26); check for missing or extra tabs in this line"
    );
    assert!(bad(&|f| f.push("x".into())).starts_with(":3: 41 fields, expected 40"));
    assert!(bad(&|f| f.truncate(1)).starts_with(":3: 1 fields, expected 40"));
    assert!(bad(&|f| *f = vec![String::new()]).starts_with(":3: empty line"));
    for wrong in ["abc", "1x", "0x10", "nan", "inf", "1e999", "-", "+", ".", " 1", "1 ", "١", "--1", "1,5"] {
        let text = bad(&|f| f[3] = wrong.into());
        assert!(text.starts_with(":3: column I3: ") && text.contains("is not a number"), "{wrong}: {text}");
    }
    for wrong in ["2", "-1", "yes", "01", " 1", "1.0"] {
        assert!(bad(&|f| f[0] = wrong.into()).starts_with(":3: column label: "), "{wrong}");
    }
    assert!(bad(&|f| f[0].clear()).starts_with(":3: column label: no label"));
    assert!(bad(&|f| f[20] = "x".repeat(LONGEST_LINE)).starts_with(":3: line longer than"));
}

#[test]
fn bytes_that_are_not_utf8_name_column_and_offset() {
    let mut bytes = lines(3).into_bytes();
    let third = lines(2).len();
    let tab = bytes[third..].iter().enumerate().filter(|(_, b)| **b == b'\t').nth(15).unwrap().0;
    bytes[third + tab + 1] = 0xff;
    let text = fit_error(&bytes);
    let place = format!(":3: column C3: byte 0xff at offset {} of the file", third + tab + 1);
    assert!(text.starts_with(&place), "{text}");
    let text = fit_error([b"\xef\xbb\xbf", &bytes[..]].concat());
    assert!(text.contains(&format!("offset {} ", third + tab + 4)), "{text}");
}

#[test]
fn files_that_are_no_log_are_refused() {
    assert!(fit_error("").starts_with(": no rows"));
    assert!(fit_error("\u{feff}").starts_with(": no rows"));
    assert!(fit_error(b"\x1f\x8b\x08\0rest").starts_with(": cannot read"));
    assert!(fit_error(b"\x28\xb5\x2f\xfdrest").starts_with(": cannot read"));
    assert!(fit_error(b"BZh9rest").starts_with(": is bzip2-compressed"));
    let files = Files::new();
    let missing = files.0.path().join("none.tsv");
    let error = |path: &Path| fit(path, &schema(), RowPolicy::Skip).unwrap_err().to_string();
    assert!(error(&missing).ends_with("none.tsv: no such file; check the path"));
    assert!(error(files.0.path()).contains(": is a directory"));
    assert!(error(&files.write("a\nb\n")).contains("none of 2 rows can be used; the first: "));
    let mut short = schema();
    short.numeric.pop();
    assert!(fit(&missing, &short, RowPolicy::Skip).unwrap_err().to_string().contains("12 numeric"));
}

#[test]
fn skipping_counts_and_reports_the_first_few() {
    let files = Files::new();
    let text: String =
        (1..=20).map(|i| if i % 2 == 0 { format!("bad {i}\n") } else { row(i) + "\n" }).collect();
    let path = files.write(text);
    let (encoder, report) = fit(&path, &schema(), RowPolicy::Skip).unwrap();
    assert_eq!((encoder.rows, report.skipped, report.first.len()), (10, 10, SkipReport::KEPT));
    assert!(report.first[1].contains("x.tsv:4: 1 fields"), "{}", report.first[1]);
    let options = ReadOptions { policy: RowPolicy::Skip, labels: Labels::Required };
    let data = load(&path, &encoder, options).unwrap();
    assert_eq!((data.rows.len(), data.skipped), (10, report));
}

#[test]
fn labels_may_be_absent_but_not_mixed() {
    let files = Files::new();
    let (encoder, _) = fit(&files.write(lines(3)), &schema(), RowPolicy::Error).unwrap();
    let options = ReadOptions { policy: RowPolicy::Error, labels: Labels::Optional };
    let read = |text: &str| load(&files.write(text), &encoder, options);
    let strip =
        |text: &str, n: usize| -> String { text.lines().map(|l| l[n..].to_string() + "\n").collect() };
    let labelled = read(&lines(3)).unwrap();
    assert!(labelled.labelled);
    for n in [1, 2] {
        let data = read(&strip(&lines(3), n)).unwrap();
        assert!(!data.labelled && data.rows.labels == [UNLABELLED; 3]);
        assert_eq!(
            (data.rows.ids, data.rows.numeric),
            (labelled.rows.ids.clone(), labelled.rows.numeric.clone())
        );
    }
    let mixed = |text: String| read(&text).unwrap_err().to_string();
    assert!(mixed(lines(3) + &strip(&row(4), 1)).contains(":4: column label: no label, but most rows"));
    assert!(mixed(strip(&lines(3), 1) + &row(4)).contains(":4: column label: has a label, but most rows"));
    assert!(mixed(strip(&lines(3), 2) + &row(4)).contains(":4: 40 fields, expected 39"));
    // One broken first row must not decide what the file is.
    let broken = row(1).replacen("\t5-1", "", 1) + "\n" + &lines(3);
    assert!(mixed(broken).contains(":1: 39 fields, expected 40"));
    // Training needs labels.
    assert!(fit_error(strip(&lines(3), 1)).starts_with(":1: column label: no label"));
    assert!(fit_error(strip(&lines(3), 2)).starts_with(":1: 39 fields, expected 40"));
}

#[test]
fn many_blocks_keep_order_and_line_numbers() {
    let files = Files::new();
    let n = 12_000; // some 3 MiB
    let text = lines(n);
    let (encoder, _) = fit(&files.write(&text), &schema(), RowPolicy::Error).unwrap();
    let data = load(&files.write(&text), &encoder, ReadOptions::default()).unwrap();
    assert_eq!(data.rows.len(), n);
    assert!((0..n).all(|i| data.rows.numeric[i * 13 + 2] == (i + 1) as f32));
    let broken = text.replacen(&row(11_000), "oops", 1);
    assert!(fit_error(&broken).starts_with(":11000: 1 fields"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn mutated_files_never_panic_and_errors_are_one_line(
        mutations in prop::collection::vec(mutation(), 1..4),
        optional in any::<bool>(),
    ) {
        let files = Files::new();
        let (encoder, _) = fit(&files.write(lines(6)), &schema(), RowPolicy::Error).unwrap();
        let mut bytes = lines(6).into_bytes();
        mutations.iter().for_each(|m| mutate(&mut bytes, m));
        let path = files.write(&bytes);
        let labels = if optional { Labels::Optional } else { Labels::Required };
        let mut results = Vec::new();
        for policy in [RowPolicy::Error, RowPolicy::Skip] {
            let result = load(&path, &encoder, ReadOptions { policy, labels });
            match &result {
                Err(error) => {
                    let text = error.to_string();
                    prop_assert!(!text.chars().any(char::is_control), "{:?}", text);
                    prop_assert!(text.contains("x.tsv:"), "{}", text);
                    prop_assert!(text.len() < 500, "{}", text);
                }
                Ok(data) => {
                    // a carriage return alone may end lines
                    let mut bytes = vec![];
                    let (_, mut whole) = Place::File(path.clone()).open(&FormatOptions::default()).unwrap();
                    whole.read_to_end(&mut bytes).unwrap();
                    let newlines = bytes.iter().filter(|&&b| b == b'\n').count();
                    let seen = data.rows.len() + data.skipped.skipped as usize;
                    prop_assert!(seen == newlines + usize::from(!bytes.ends_with(b"\n")));
                    prop_assert_eq!(data.rows.ids.len(), 26 * data.rows.len());
                    prop_assert_eq!(data.rows.numeric.len(), 13 * data.rows.len());
                    prop_assert!(data.rows.numeric.iter().all(|v| v.is_finite()));
                    for (ids, sizes) in data.rows.ids.chunks(26).map(|r| (r, encoder.table_rows())) {
                        prop_assert!(ids.iter().zip(&sizes).all(|(id, n)| id < n));
                    }
                }
            }
            results.push(result);
        }
        // What is accepted outright has nothing to skip, and skipping accepts what has a good row.
        if let (Ok(strict), Ok(lenient)) = (&results[0], &results[1]) {
            prop_assert_eq!(&strict.rows, &lenient.rows);
            prop_assert_eq!(lenient.skipped.skipped, 0);
        }
    }
}

/// `BIRKHOFF_DATA`, else `../shared/data`.
fn real_rows() -> Option<PathBuf> {
    let folder = std::env::var_os("BIRKHOFF_DATA")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data"), PathBuf::from);
    let path = folder.join("criteo_8k");
    if !path.is_dir() {
        println!("skipped: no real rows at {}", path.display());
        return None;
    }
    Some(path)
}

#[test]
fn real_rows_read_as_their_description_says() {
    let Some(folder) = real_rows() else { return };
    let schema = Schema::criteo(Transform::Log, true, VOCAB);
    let (encoder, _) = fit(&folder.join("train.tsv"), &schema, RowPolicy::Error).unwrap();
    let rate = encoder.positives as f64 / encoder.rows as f64;
    assert!(encoder.rows == 7200 && (rate - 0.215).abs() < 0.001, "{rate}");
    let train = load(&folder.join("train.tsv"), &encoder, ReadOptions::default()).unwrap().rows;
    let missing = |feature: usize| {
        let indicators = train.numeric.iter().skip(13 + feature).step_by(26);
        f64::from(indicators.sum::<f32>()) / train.len() as f64
    };
    assert!((missing(0) - 0.45).abs() < 0.01 && (missing(11) - 0.78).abs() < 0.01, "{}", missing(0));
    let c22 = train.ids.iter().skip(21).step_by(26).filter(|&&id| id == MISSING).count();
    assert!((c22 as f64 / 7200.0 - 0.82).abs() < 0.03, "{c22}");
    assert!(!train.ids.contains(&OOV), "min_count 1 knows every training value");
    let dev = load(&folder.join("dev.tsv"), &encoder, ReadOptions::default()).unwrap().rows;
    let unseen = dev.ids.iter().filter(|&&id| id == OOV).count() as f64 / dev.ids.len() as f64;
    assert!(dev.len() == 409 && (0.08..0.18).contains(&unseen), "{unseen}");
}
