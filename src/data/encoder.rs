//! A schema fitted to training rows: statistics, vocabularies, and the file that keeps them.
//!
//! The file is text, read and written line by line: a JSON header (schema, counts); for each
//! categorical column a JSON line with its number of values, then one JSON string a line; a last
//! line with a checksum, so that a cut or changed file is noticed.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::columns::{BATCH, SmallLogs, log_of_small, place_of};
use super::drift::Seen;
use super::error::DataError;
use super::lengths::Lengths;
use super::plan::Sink;
use super::profile::Profile;
use super::rows::Rows;
use super::schema::{Encoding, Schema, Transform};
use super::vocab::{ColumnEncoder, Interner, MISSING};

const FORMAT: &str = "birkhoff-encoder";
const VERSION: u32 = 2;

/// Everything that turns raw rows into numbers and ids.
#[derive(Clone, Debug)]
pub struct FittedEncoder {
    /// The schema, with fitted statistics.
    pub schema: Schema,
    /// One encoder for each categorical column; that of a column that shares a table is empty, and its owner's
    /// counts.
    pub columns: Vec<ColumnEncoder>,
    /// Training rows that it was fitted to.
    pub rows: u64,
    /// Those with label 1.
    pub positives: u64,
    /// Sum of the weights of all rows, and of those with label 1, where rows have weights.
    pub weights: Option<[f64; 2]>,
    /// What they looked like; runs of older versions did not keep it.
    pub profile: Option<Profile>,
    /// How long the lists of the training rows are, for each multi-valued column in schema order; empty where the file
    /// is of a version that did not count them.
    pub lengths: Vec<Lengths>,
}

#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    rows: u64,
    positives: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weights: Option<[f64; 2]>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    lengths: Vec<Lengths>,
    schema: Schema,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    profile: Option<Profile>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ColumnLine {
    column: String,
    values: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct EndLine {
    end: String,
}

impl FittedEncoder {
    /// Rows of each categorical column's embedding table, which shared columns have in common.
    pub fn table_rows(&self) -> Vec<u32> {
        self.schema.owners().into_iter().map(|owner| self.columns[owner].table_rows()).collect()
    }

    /// Click rate of the training rows by their weights, kept inside (0, 1) so that its log-odds are finite.
    pub fn click_rate(&self) -> f64 {
        let rows = self.rows as f64;
        let (all, positive) = match self.weights {
            // as if each row weighed 1 on the mean
            Some([all, positive]) if all > 0.0 => (rows, positive * (rows / all)),
            _ => (rows, self.positives as f64),
        };
        (positive + 0.5) / (all + 1.0)
    }

    /// Rows, empty, of the width that this encoder makes.
    pub fn empty_rows(&self) -> Rows {
        Rows::default().cleared(self.schema.features(), self.schema.singles(), self.schema.lists())
    }

    /// An error unless this encoder was fitted for `schema` (fitted statistics aside).
    pub fn check_schema(&self, path: &Path, schema: &Schema) -> Result<(), DataError> {
        self.schema.difference(schema).map_or(Ok(()), |difference| {
            Err(DataError::Encoder {
                path: path.to_path_buf(),
                line: 1,
                problem: format!(
                    "fitted for another schema ({difference}); use the config of the run that wrote it, or train again"
                ),
            })
        })
    }

    /// Writes the file, under another name first, so that an interrupted write leaves none behind.
    pub fn save(&self, path: &Path) -> Result<(), DataError> {
        super::replace_file(path, |file| self.write_to(BufWriter::new(file)))
    }

    /// Writes what [`FittedEncoder::save`] puts in its file.
    pub fn write_to(&self, out: impl Write) -> std::io::Result<()> {
        let mut out = Hashing { inner: out, hash: Xxh3::new() };
        let header = Header {
            format: FORMAT.into(),
            version: VERSION,
            rows: self.rows,
            positives: self.positives,
            weights: self.weights,
            lengths: self.lengths.clone(),
            schema: self.schema.clone(),
            profile: self.profile.clone(),
        };
        json_line(&mut out, &header)?;
        for (column, encoder) in self.schema.categorical.iter().zip(&self.columns) {
            let empty = Interner::default();
            let values = if let ColumnEncoder::Vocabulary(v, _) = encoder { v } else { &empty };
            json_line(&mut out, &ColumnLine { column: column.name.clone(), values: values.len() as u64 })?;
            for i in 0..values.len() {
                json_line(&mut out, &String::from_utf8_lossy(values.value(i)))?;
            }
        }
        let end = format!("{:016x}", out.hash.digest());
        json_line(&mut out, &EndLine { end })?;
        out.flush()
    }

    /// Reads a file that [`FittedEncoder::save`] wrote.
    pub fn load(path: &Path) -> Result<FittedEncoder, DataError> {
        let file = File::open(path).map_err(|e| DataError::io(path, "read", e))?;
        FittedEncoder::read_from(path, BufReader::new(file))
    }

    /// Reads what [`FittedEncoder::write_to`] wrote; errors call it `path`.
    pub fn read_from(path: &Path, reader: impl BufRead) -> Result<FittedEncoder, DataError> {
        let mut lines = Lines { path: path.to_owned(), reader, line: 0, text: Vec::new(), hash: Xxh3::new() };
        let header: Header = lines.next("the header")?;
        if header.format != FORMAT || header.version != VERSION {
            return Err(lines.fail(format!(
                "format {:?} version {}, expected {FORMAT:?} version {VERSION}; it was written by another version, train again",
                header.format, header.version
            )));
        }
        header.schema.validate().map_err(|e| lines.fail(format!("{e}; the file is damaged, train again")))?;
        let columns = (header.schema.numeric.len(), header.schema.categorical.len());
        if header.profile.as_ref().is_some_and(|p| (p.numeric.len(), p.categorical.len()) != columns) {
            return Err(
                lines.fail("its profile is of other columns; the file is damaged, train again".into())
            );
        }
        if ![0, header.schema.lists()].contains(&header.lengths.len()) {
            return Err(lines.fail("lengths of other lists; the file is damaged, train again".into()));
        }
        let mut columns = Vec::new();
        for column in &header.schema.categorical {
            let line: ColumnLine = lines.next("a column")?;
            let vocabulary = matches!(column.encoding, Encoding::Vocabulary { .. }) && column.share.is_none();
            if line.column != column.name || (!vocabulary && line.values != 0) {
                let found = &line.column;
                return Err(lines.fail(format!(
                    "column {found:?} with {} values does not fit the header's column {}; the file is damaged, train again",
                    line.values, column.name
                )));
            }
            let mut values = Interner::default();
            for n in 0..line.values {
                let value: String = lines.next("a value")?;
                if value.is_empty() || values.intern(value.as_bytes()) != Some(n as u32) {
                    return Err(lines.fail(format!(
                        "column {}: value {value:?} is empty or repeated; the file is damaged, train again",
                        column.name
                    )));
                }
            }
            columns.push(ColumnEncoder::new(column, values)?);
        }
        let digest = format!("{:016x}", lines.hash.digest());
        let end: EndLine = lines.next("the checksum")?;
        if end.end != digest {
            return Err(lines.fail("the checksum does not match; the file is damaged, train again".into()));
        }
        lines.at_end()?;
        let Header { schema, rows, positives, weights, lengths, profile, .. } = header;
        Ok(FittedEncoder { schema, columns, rows, positives, weights, lengths, profile })
    }
}

/// Rows that are encoded as they are parsed.
pub(crate) struct EncodingSink<'a> {
    rows: Rows,
    /// Rows with a list that was cut.
    cut: u64,
    /// Of each numeric column its transform and the place of its indicator.
    numeric: Vec<(Transform, Option<usize>)>,
    /// Of each categorical column.
    columns: Vec<Place<'a>>,
    /// Where the rows under construction begin in `rows.numeric` and `rows.ids`.
    at: (usize, usize),
    small: &'static SmallLogs,
    was_cut: bool,
    /// What the values are like, where that is counted.
    seen: Option<Box<Seen>>,
}

/// Where a categorical column's ids go.
struct Place<'a> {
    encoder: &'a ColumnEncoder,
    /// Among the single-valued columns, or the lists.
    index: usize,
    /// Values of a list that count.
    most: usize,
}

impl<'a> EncodingSink<'a> {
    /// No rows yet, in the memory of some that are done with.
    #[cfg(test)]
    pub fn new(encoder: &'a FittedEncoder, spare: Rows) -> Self {
        EncodingSink::counting(encoder, spare, None)
    }

    /// No rows yet, in the memory of some that are done with; what their values are like is counted in `seen`.
    pub fn counting(encoder: &'a FittedEncoder, spare: Rows, seen: Option<Box<Seen>>) -> Self {
        let schema = &encoder.schema;
        let mut indicator = schema.numeric.len();
        let numeric = schema.numeric.iter().map(|c| {
            indicator += usize::from(c.indicator);
            (c.transform, c.indicator.then(|| indicator - 1))
        });
        let (mut singles, mut lists) = (0, 0);
        let columns = schema.categorical.iter().zip(schema.owners()).map(|(c, owner)| {
            let count = if c.list.is_some() { &mut lists } else { &mut singles };
            *count += 1;
            let most = c.list.as_ref().map_or(0, |l| l.max_length as usize);
            let most = if most == 0 { usize::MAX } else { most };
            Place { encoder: &encoder.columns[owner], index: *count - 1, most }
        });
        EncodingSink {
            numeric: numeric.collect(),
            columns: columns.collect(),
            rows: spare.cleared(schema.features(), schema.singles(), schema.lists()),
            cut: 0,
            at: (0, 0),
            small: log_of_small(),
            was_cut: false,
            seen,
        }
    }

    /// The rows, and in how many of them a list was cut.
    #[cfg(test)]
    pub fn into_rows(self) -> (Rows, u64) {
        (self.rows, self.cut)
    }

    /// The rows, in how many of them a list was cut, and what was counted.
    pub fn into_parts(self) -> (Rows, u64, Option<Box<Seen>>) {
        (self.rows, self.cut, self.seen)
    }
}

impl Sink for EncodingSink<'_> {
    fn expect(&mut self, rows: usize, _: (usize, usize)) {
        self.rows.numeric.reserve(rows * self.rows.features);
        self.rows.ids.reserve(rows * self.rows.columns);
        self.rows.labels.reserve(rows);
    }

    #[inline(always)]
    fn begin(&mut self, rows: usize, _: (usize, usize)) {
        self.at = (self.rows.numeric.len(), self.rows.ids.len());
        self.rows.numeric.resize(self.at.0 + rows * self.rows.features, 0.0);
        self.rows.ids.resize(self.at.1 + rows * self.rows.columns, MISSING);
        self.was_cut = false;
        if let Some(seen) = &mut self.seen {
            seen.begin();
        }
    }

    fn cancel(&mut self, _: usize, _: (usize, usize)) {
        if let Some(seen) = &mut self.seen {
            seen.cancel();
        }
        self.rows.numeric.truncate(self.at.0);
        self.rows.ids.truncate(self.at.1);
    }

    #[inline(always)]
    fn numbers(&mut self, k: usize, values: &[f64]) {
        let (transform, indicator) = self.numeric[k];
        let width = self.rows.features;
        let out = &mut self.rows.numeric[self.at.0..];
        if let Some(seen) = &mut self.seen {
            seen.numbers(k, values);
        }
        if let Some((mean, scale)) = transform.of_log() {
            let mut places = [0; BATCH];
            for (place, value) in places.iter_mut().zip(values) {
                *place = place_of(*value);
            }
            if transform == Transform::Log {
                for ((row, place), value) in out.chunks_exact_mut(width).zip(places).zip(values) {
                    row[k] = match self.small.plain.get(place as usize) {
                        Some(log) => *log,
                        None => transform.apply(*value),
                    };
                }
            } else {
                let mut logs = [0.0; BATCH];
                for ((log, place), value) in logs.iter_mut().zip(places).zip(values) {
                    *log = match self.small.exact.get(place as usize) {
                        Some(log) => *log,
                        None => value.max(0.0).ln_1p(),
                    };
                }
                for ((row, log), value) in out.chunks_exact_mut(width).zip(logs).zip(values) {
                    let feature = ((log - mean) * scale) as f32;
                    // 0 where it is missing: without a branch, as which ones are is not to be guessed
                    let present = u32::from(value.is_nan()).wrapping_sub(1);
                    row[k] = f32::from_bits(feature.to_bits() & present);
                }
            }
        } else {
            for (row, value) in out.chunks_exact_mut(width).zip(values) {
                row[k] = transform.apply(*value);
            }
        }
        if let Some(i) = indicator {
            for (row, value) in out.chunks_exact_mut(width).zip(values) {
                row[i] = f32::from(u8::from(value.is_nan()));
            }
        }
    }

    #[inline(always)]
    fn singles(&mut self, j: usize, ranges: &[(u32, u32)], text: &[u8]) {
        let place = &self.columns[j];
        let out = &mut self.rows.ids[self.at.1..];
        if let [(start, end)] = *ranges {
            let id = place.encoder.id(&text[start as usize..end as usize]);
            out[place.index] = id;
            if let Some(seen) = &mut self.seen {
                seen.singles(j, &[id], ranges, text);
            }
            return;
        }
        let mut ids = [MISSING; BATCH];
        place.encoder.ids(text, ranges, &mut ids);
        for (row, id) in out.chunks_exact_mut(self.rows.columns).zip(ids) {
            row[place.index] = id;
        }
        if let Some(seen) = &mut self.seen {
            seen.singles(j, &ids[..ranges.len()], ranges, text);
        }
    }

    fn list(&mut self, j: usize, items: &[(u32, u32)], text: &[u8]) {
        let place = &self.columns[j];
        let list = &mut self.rows.lists[place.index];
        self.was_cut |= items.len() > place.most;
        let (items, first) = (&items[..items.len().min(place.most)], list.ids.len());
        list.ids.extend(items.iter().map(|&(a, b)| place.encoder.id(&text[a as usize..b as usize])));
        list.ends.push(list.ids.len() as u32);
        if let Some(seen) = &mut self.seen {
            seen.list(j, &list.ids[first..], items, text);
        }
    }

    fn pass(&mut self, (start, end): (u32, u32), text: &[u8]) {
        self.rows.passed.push(String::from_utf8_lossy(&text[start as usize..end as usize]).into_owned());
    }

    #[inline(always)]
    fn end(&mut self, label: u8, weight: Option<f32>, group: Option<u64>, _: u64) {
        self.rows.labels.push(label);
        self.rows.weights.extend(weight);
        self.rows.groups.extend(group);
        self.cut += u64::from(self.was_cut);
        if let Some(seen) = &mut self.seen {
            seen.end();
        }
    }

    fn finish(&mut self, text: Vec<u8>) -> Vec<u8> {
        text
    }

    fn rows(&self) -> usize {
        self.rows.len()
    }
}

fn json_line<T: Serialize + ?Sized>(out: &mut impl Write, value: &T) -> std::io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    out.write_all(b"\n")
}

struct Hashing<W> {
    inner: W,
    hash: Xxh3,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner.flush()
    }
}

/// Reads JSON lines, counting and hashing them.
struct Lines<R> {
    path: PathBuf,
    reader: R,
    line: u64,
    text: Vec<u8>,
    hash: Xxh3,
}

impl<R: BufRead> Lines<R> {
    fn read(&mut self) -> Result<bool, DataError> {
        self.text.clear();
        self.line += 1;
        let read = self.reader.read_until(b'\n', &mut self.text);
        Ok(read.map_err(|e| DataError::io(&self.path, "read", e))? > 0)
    }

    fn next<T: serde::de::DeserializeOwned>(&mut self, what: &str) -> Result<T, DataError> {
        if !self.read()? {
            return Err(self.fail(format!("the file ends before {what}; it is damaged, train again")));
        }
        self.hash.update(&self.text);
        serde_json::from_slice(&self.text).map_err(|e| {
            self.fail(format!("not {what} of an encoder file ({e}); it is damaged, train again"))
        })
    }

    fn at_end(&mut self) -> Result<(), DataError> {
        if self.read()? {
            return Err(self.fail("text after the checksum; the file is damaged, train again".into()));
        }
        Ok(())
    }

    fn fail(&self, problem: String) -> DataError {
        DataError::Encoder { path: self.path.clone(), line: self.line, problem }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fitter::Fitter;
    use crate::data::rows::RawRows;
    use crate::data::schema::{CategoricalColumn, NumericColumn};

    fn raw(rows: &[(f64, [&str; 2], u8)]) -> RawRows {
        let mut raw = RawRows::default();
        for (value, fields, label) in rows {
            raw.numeric.push(*value);
            for f in fields {
                let start = raw.text.len() as u32;
                raw.text.extend_from_slice(f.as_bytes());
                raw.fields.push((start, raw.text.len() as u32));
            }
            raw.labels.push(*label);
        }
        raw
    }

    fn fitted() -> FittedEncoder {
        let transform = Transform::STANDARDIZE;
        let schema = Schema {
            numeric: vec![NumericColumn::new("n", transform, true)],
            categorical: vec![
                CategoricalColumn::single("v", Encoding::Vocabulary { min_count: 1, max_size: None }),
                CategoricalColumn::single("h", Encoding::Hash { buckets: 10 }),
            ],
            ..Schema::default()
        };
        let mut fitter = Fitter::new(&schema).unwrap();
        fitter.push(&raw(&[(1.0, ["a\"\\\t", "x"], 1), (f64::NAN, ["é\n", ""], 0)])).unwrap();
        fitter.push(&raw(&[(5.0, ["é\n", "y"], 0)])).unwrap();
        fitter.finish().unwrap()
    }

    #[test]
    fn fits_population_statistics_and_encodes() {
        let e = fitted();
        assert_eq!(e.schema.numeric[0].transform, Transform::Standardize { mean: 3.0, std: 2.0 });
        assert_eq!((e.rows, e.positives, e.table_rows()), (3, 1, vec![4, 12]));
        let raw = raw(&[(7.0, ["é\n", ""], 1), (f64::NAN, ["?", "x"], 0)]);
        let mut sink = EncodingSink::new(&e, Rows::default());
        for row in 0..raw.len() {
            sink.begin(1, (1, 2));
            sink.numbers(0, &[raw.numeric[row]]);
            (0..2).for_each(|j| sink.singles(j, &[raw.fields[2 * row + j]], &raw.text));
            sink.end(raw.labels[row], None, None, 0);
        }
        let rows = sink.into_rows().0;
        assert_eq!(rows.numeric, [2.0, 0.0, 0.0, 1.0]);
        assert_eq!(rows.ids[..3], [2, 1, 0]);
        assert_eq!(rows.labels, [1, 0]);
    }

    #[test]
    fn file_round_trip_and_every_damage_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("encoder.jsonl");
        let e = fitted();
        e.save(&path).unwrap();
        let back = FittedEncoder::load(&path).unwrap();
        assert_eq!((&back.schema, back.rows, back.positives), (&e.schema, 3, 1));
        for value in ["a\"\\\t", "é\n", "none", ""] {
            assert_eq!(back.columns[0].id(value.as_bytes()), e.columns[0].id(value.as_bytes()));
        }
        let good = std::fs::read(&path).unwrap();
        let mut damaged: Vec<Vec<u8>> = (0..good.len()).map(|n| good[..n].to_vec()).collect();
        damaged.pop(); // only the last line's newline is missing
        damaged.extend((0..good.len() - 1).map(|i| {
            let mut bytes = good.clone();
            bytes[i] ^= 1;
            bytes
        }));
        damaged.push([&good[..], b"{}\n"].concat());
        for bytes in damaged {
            std::fs::write(&path, &bytes).unwrap();
            let text = FittedEncoder::load(&path).expect_err("damage").to_string();
            assert!(text.contains("encoder.jsonl:") && !text.contains('\n'), "{text}");
        }
        assert!(matches!(FittedEncoder::load(&dir.path().join("no")), Err(DataError::NotFound { .. })));
        assert!(matches!(FittedEncoder::load(dir.path()), Err(DataError::Directory { .. })));
    }

    #[test]
    fn another_schema_is_refused() {
        let e = fitted();
        let mut other = e.schema.clone();
        other.numeric[0].transform = Transform::STANDARDIZE;
        assert!(e.check_schema(Path::new("f"), &other).is_ok());
        other.categorical[1].encoding = Encoding::Hash { buckets: 11 };
        let text = e.check_schema(Path::new("f"), &other).unwrap_err().to_string();
        assert!(text.starts_with("f:1: fitted for another schema (column h has another encoding)"), "{text}");
    }
}
