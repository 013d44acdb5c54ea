//! Damaged files of every kind, many of them, in a process of their own: no panic, no hang, bounded memory, errors of one line.
//!
//! `BIRKHOFF_MUTATIONS` says how many (100,000 without it), `BIRKHOFF_MUTATION` which one alone.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::{ArrayRef, BooleanArray, Float64Array, Int64Array, RecordBatch, StringArray};
use birkhoff::data::format::{FormatName, FormatOptions};
use birkhoff::data::input::Place;
use birkhoff::data::reader::{Labels, ReadOptions, RowPolicy, Source, fit, load};
use birkhoff::data::schema::{
    CategoricalColumn, Encoding, ListOptions, NumericColumn, Pooling, Schema, Transform,
};
use birkhoff::data::survey::survey;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const VOCABULARY: Encoding = Encoding::Vocabulary { min_count: 1, max_size: None };

struct Good {
    bytes: Vec<u8>,
    schema: Schema,
    format: FormatOptions,
}

fn schema(number: &str, single: &str, list: &str) -> Schema {
    let options = ListOptions { separator: '|', pooling: Pooling::Mean, max_length: 0 };
    Schema {
        numeric: vec![NumericColumn::new(number, Transform::STANDARDIZE, true)],
        categorical: vec![
            CategoricalColumn::single(single, VOCABULARY),
            CategoricalColumn {
                list: Some(options),
                ..CategoricalColumn::single(list, Encoding::Hash { buckets: 50 })
            },
        ],
        file: ["label", number, single, list].map(String::from).to_vec(),
        ..Schema::default()
    }
}

fn files() -> Vec<Good> {
    let rows: Vec<(u8, String, String, String)> = (0..40)
        .map(|i| {
            (
                u8::from(i % 3 == 0),
                format!("{}.5", i % 7),
                format!("u{}", i % 5),
                ["a|b", "", "c"][i % 3].into(),
            )
        })
        .collect();
    let text = |delimiter: &str, head: bool| {
        let mut t = if head { ["label", "n", "user", "tags"].join(delimiter) + "\n" } else { String::new() };
        for (i, r) in rows.iter().enumerate() {
            let user = if i % 11 == 3 { format!("\"{}\"", r.2) } else { r.2.clone() };
            t += &([r.0.to_string(), r.1.clone(), user, r.3.clone()].join(delimiter) + "\n");
        }
        t.into_bytes()
    };
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("label", Arc::new(rows.iter().map(|r| Some(r.0 == 1)).collect::<BooleanArray>())),
        ("n", Arc::new(rows.iter().map(|r| r.1.parse::<f64>().ok()).collect::<Float64Array>())),
        ("user", Arc::new((0..40).map(|i| (i % 9 > 0).then_some(i % 5)).collect::<Int64Array>())),
        ("tags", Arc::new(rows.iter().map(|r| Some(r.3.clone())).collect::<StringArray>())),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let (mut parquet, mut stream, mut file) = (vec![], vec![], vec![]);
    let mut w = parquet::arrow::ArrowWriter::try_new(&mut parquet, batch.schema(), None).unwrap();
    w.write(&batch).unwrap();
    w.close().unwrap();
    let mut w = arrow_ipc::writer::StreamWriter::try_new(&mut stream, &batch.schema()).unwrap();
    w.write(&batch).unwrap();
    w.finish().unwrap();
    drop(w);
    let mut w = arrow_ipc::writer::FileWriter::try_new(&mut file, &batch.schema()).unwrap();
    w.write(&batch).unwrap();
    w.finish().unwrap();
    drop(w);
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(&text(",", true)).unwrap();
    let libsvm: String = (0..40).map(|i| format!("{} 3:{i}.5 {}:1 9:1\n", i % 2, 10 + i % 4)).collect();
    let libffm: String =
        (0..40).map(|i| format!("{} 0:3:{i}.5 1:{}:1 2:5:1 2:6:1\n", i % 2, i % 4)).collect();
    let criteo: String = (0..20)
        .map(|i| format!("{}\t{}\t{}\n", i % 2, ["3"; 13].join("\t"), ["68fd1e64"; 26].join("\t")))
        .collect();
    let usual = schema("n", "user", "tags");
    let auto = FormatOptions::default();
    let good = |bytes: Vec<u8>, schema: &Schema| Good { bytes, schema: schema.clone(), format: auto.clone() };
    let mut sparse = schema("3", "#2", "features");
    sparse.file.clear();
    let mut fields = schema("0", "1", "2");
    fields.file.clear();
    let trimmed = FormatOptions { trim: true, format: FormatName::Csv, ..auto.clone() };
    vec![
        good(text(",", true), &usual),
        good(text(";", false), &usual),
        good(text("\t", true), &usual),
        Good { bytes: text(", ", true), schema: usual.clone(), format: trimmed },
        good(gz.finish().unwrap(), &usual),
        good(zstd::encode_all(&text(",", true)[..], 1).unwrap(), &usual),
        good(parquet, &usual),
        good(stream, &usual),
        good(file, &usual),
        good(libsvm.into_bytes(), &sparse),
        good(libffm.into_bytes(), &fields),
        good(criteo.into_bytes(), &Schema::criteo(Transform::LOG_STANDARDIZE, true, VOCABULARY)),
    ]
}

fn damage(bytes: &mut Vec<u8>, rng: &mut ChaCha8Rng) {
    const PIECES: [&[u8]; 16] = [
        b"\0",
        b",",
        b"\t",
        b"\n",
        b"\r",
        b"\"",
        b"\xff",
        b"\xef\xbb\xbf",
        b"NA",
        b"1e39",
        b"-0.0",
        b" ",
        b":",
        b"PAR1",
        b"|||",
        b"99999999999999999999",
    ];
    let mut below = |n: usize| rng.next_u64() as usize % n.max(1);
    let at = below(bytes.len() + 1);
    match below(8) {
        0 => bytes.truncate(at),
        1 | 2 if at < bytes.len() => bytes[at] ^= 1 << below(8),
        3 | 4 => drop(bytes.splice(at..at, PIECES[below(PIECES.len())].iter().copied())),
        5 => drop(bytes.drain(at..(at + below(40)).min(bytes.len()))),
        6 => {
            let end = (at + below(60)).min(bytes.len());
            let piece = bytes[at..end].to_vec();
            let to = below(bytes.len() + 1);
            drop(bytes.splice(to..to, piece));
        }
        // rarely: a long field
        _ if below(200) == 0 => drop(bytes.splice(at..at, std::iter::repeat_n(b'7', 150_000))),
        _ if bytes.is_empty() => {}
        _ => {
            let last = bytes.len() - 1;
            bytes.swap(at.min(last), 0);
        }
    }
}

/// Reads a damaged file as training, scoring and `schema` would.
fn read(good: &Good, bytes: &[u8], lenient: bool) {
    let place = Place::Bytes("x.csv".into(), bytes.into());
    let policy = if lenient { RowPolicy::Skip } else { RowPolicy::Error };
    let options = ReadOptions { policy, labels: if lenient { Labels::Optional } else { Labels::Required } };
    let mut source = Source::new(vec![place], good.format.clone(), options);
    source.block = 64;
    let one_line = |e: String| assert!(!e.chars().any(char::is_control) && e.chars().count() < 900, "{e:?}");
    match fit(&source, &good.schema).and_then(|(encoder, _)| Ok((load(&source, &encoder)?, encoder))) {
        Err(e) => one_line(e.to_string()),
        Ok((data, encoder)) => {
            assert!(data.rows.numeric.iter().all(|v| v.is_finite()));
            let sizes = encoder.table_rows();
            let most = sizes.iter().max().unwrap();
            assert!(data.rows.ids.iter().all(|id| id < most));
        }
    }
    if let Err(e) = survey(&source, 0, None) {
        one_line(e.to_string());
    }
}

fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok().map(|kb| kb << 10)
}

/// The 143,840th: an Arrow file whose footer says that a block has gigabytes.
#[test]
fn a_footer_that_lies_is_refused_at_once() {
    let good = &files()[8];
    let mut rng = ChaCha8Rng::seed_from_u64(143_840);
    let mut bytes = good.bytes.clone();
    (0..1 + rng.next_u64() % 3).for_each(|_| damage(&mut bytes, &mut rng));
    let start = Instant::now();
    read(good, &bytes, false);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[test]
fn damaged_files_are_read_or_refused() {
    let count: u64 = std::env::var("BIRKHOFF_MUTATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000);
    // what the readers of other crates panic at is caught and said
    std::panic::set_hook(Box::new(|info| {
        if info.location().is_some_and(|l| !l.file().contains(".cargo")) {
            eprintln!("{info}");
        }
    }));
    let files = files();
    let begin = Instant::now();
    // one of them alone, to look into
    let only = std::env::var("BIRKHOFF_MUTATION").ok().and_then(|n| n.parse::<u64>().ok());
    let work = |part: u64| {
        for n in (part..count).step_by(2).filter(|n| only.is_none_or(|o| o == *n)) {
            let mut rng = ChaCha8Rng::seed_from_u64(n);
            let good = &files[n as usize % files.len()];
            let mut bytes = good.bytes.clone();
            (0..1 + rng.next_u64() % 3).for_each(|_| damage(&mut bytes, &mut rng));
            let start = Instant::now();
            read(good, &bytes, n % 3 == 0);
            assert!(start.elapsed() < Duration::from_secs(20), "input {n} took {:?}", start.elapsed());
        }
    };
    std::thread::scope(|s| {
        let other = s.spawn(|| work(1));
        work(0);
        other.join().expect("no panic");
    });
    let peak = peak_memory().unwrap_or(0);
    eprintln!("{count} damaged files in {:.0} s, at most {} MiB", begin.elapsed().as_secs_f64(), peak >> 20);
    assert!(peak < 1 << 30, "{peak} bytes");
}
