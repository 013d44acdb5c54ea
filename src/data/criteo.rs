//! Criteo's tab-separated click log: label, I1..I13, C1..C26, an empty field = missing.
//!
//! The file is read in blocks of whole lines; blocks are parsed in parallel, each into one set of
//! arrays that point into the block's bytes, and come back in file order.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::par::*;

use super::blocks::{Block, BlockReader, LONGEST_LINE};
use super::encoder::{FittedEncoder, Fitter};
use super::error::{DataError, RowProblem, quoted};
use super::rows::{Dataset, RawRows, Rows, SkipReport, UNLABELLED};
use super::schema::{CRITEO_CATEGORICAL, CRITEO_NUMERIC, Schema};

/// Columns of a row after the label.
const FEATURES: usize = CRITEO_NUMERIC + CRITEO_CATEGORICAL;

/// What happens at a row that cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowPolicy {
    /// It is an error.
    #[default]
    Error,
    /// It is left out, counted, and the first few are reported.
    Skip,
}

/// Whether rows must have labels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Labels {
    /// Every row has a label (training, evaluation).
    #[default]
    Required,
    /// All rows have labels or none: an empty label field, or no label column (39 fields).
    Optional,
}

/// How a file is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadOptions {
    /// Bad rows.
    pub policy: RowPolicy,
    /// Labels.
    pub labels: Labels,
}

/// What the rows of a file look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Labelled,
    EmptyLabel,
    NoLabelColumn,
}

impl Layout {
    /// The layout that most rows of the first block have, so that one broken row decides nothing.
    fn of(block: &Block, labels: Labels) -> Layout {
        let mut counts = [0usize; 3];
        if labels == Labels::Required {
            return Layout::Labelled;
        }
        for line in block.text.split(|&b| b == b'\n') {
            match line.iter().filter(|&&b| b == b'\t').count() + 1 {
                n if n == FEATURES => counts[2] += 1,
                n if n == FEATURES + 1 => counts[usize::from(line[0] == b'\t')] += 1,
                _ => {}
            }
        }
        if counts[2] > counts[0] + counts[1] {
            Layout::NoLabelColumn
        } else if counts[1] > counts[0] {
            Layout::EmptyLabel
        } else {
            Layout::Labelled
        }
    }

    fn expected(self) -> &'static str {
        match self {
            Layout::NoLabelColumn => "39 (I1..I13, C1..C26, as most rows here)",
            _ => "40 (label, I1..I13, C1..C26)",
        }
    }

    fn fields(self) -> usize {
        FEATURES + usize::from(self != Layout::NoLabelColumn)
    }
}

/// Streams a Criteo file, or anything else that has its bytes.
#[derive(Debug)]
pub struct CriteoReader<R = File> {
    blocks: BlockReader<R>,
    options: ReadOptions,
    layout: Option<Layout>,
    rows: u64,
    skipped: SkipReport,
}

impl CriteoReader<File> {
    /// Opens a file; nothing is read yet.
    pub fn open(path: &Path, options: ReadOptions) -> Result<CriteoReader, DataError> {
        Ok(CriteoReader::of(BlockReader::open(path)?, options))
    }
}

impl<'a> CriteoReader<&'a [u8]> {
    /// A file that is in memory, in blocks of about `block_bytes`; errors call it `name`.
    pub fn bytes(name: &str, bytes: &'a [u8], block_bytes: usize, options: ReadOptions) -> Self {
        CriteoReader::of(BlockReader::new(Path::new(name), bytes, block_bytes), options)
    }
}

impl<R: Read> CriteoReader<R> {
    fn of(blocks: BlockReader<R>, options: ReadOptions) -> CriteoReader<R> {
        CriteoReader { blocks, options, layout: None, rows: 0, skipped: SkipReport::default() }
    }

    /// Whether the file has labels; known after the first chunks.
    pub fn labelled(&self) -> bool {
        self.layout == Some(Layout::Labelled)
    }

    /// Rows left out so far.
    pub fn skipped(&self) -> &SkipReport {
        &self.skipped
    }

    /// The next chunks of rows in file order, `map` having run on each on some thread; `None` at
    /// the end. A file without a usable row is an error.
    pub fn next_chunks<T: Send>(
        &mut self,
        map: impl Fn(RawRows) -> T + Sync,
    ) -> Result<Option<Vec<T>>, DataError> {
        let mut group = Vec::new();
        while group.len() < current_num_threads() {
            let Some(block) = self.blocks.next_block()? else { break };
            group.push(block);
        }
        let Some(first) = group.first() else { return self.at_end().map(|()| None) };
        let layout = *self.layout.get_or_insert_with(|| Layout::of(first, self.options.labels));
        let stop = self.options.policy == RowPolicy::Error;
        let parsed = group.into_par_iter().map(|block| {
            let (rows, problems) = parse_block(block, layout, stop);
            (rows.len() as u64, problems, map(rows))
        });
        let mut chunks = Vec::new();
        for (rows, problems, chunk) in parsed.collect::<Vec<_>>() {
            self.rows += rows;
            for (line, problem) in problems {
                let problem = match problem {
                    RowProblem::NoLabel if self.options.labels == Labels::Optional => {
                        RowProblem::MixedLabels { found: "no label", most: "most rows of the file have one" }
                    }
                    other => other,
                };
                let error = DataError::Row { path: self.blocks.path().to_path_buf(), line, problem };
                if stop {
                    return Err(error);
                }
                self.skipped.add(|| error.to_string());
            }
            chunks.push(chunk);
        }
        Ok(Some(chunks))
    }

    /// Encodes the next chunks and appends them; `false` at the end. The schema must be the format's
    /// ([`check_columns`]).
    pub fn encode_more(&mut self, encoder: &FittedEncoder, rows: &mut Rows) -> Result<bool, DataError> {
        let encode = |raw: RawRows| {
            let mut rows = encoder.empty_rows();
            encoder.encode(&raw, &mut rows);
            rows
        };
        let Some(chunks) = self.next_chunks(encode)? else { return Ok(false) };
        chunks.iter().for_each(|chunk| rows.append(chunk));
        if rows.len() > u32::MAX as usize {
            return Err(DataError::TooMany {
                what: format!("rows of {}", self.blocks.path().display()),
                count: rows.len() as u64,
                limit: u64::from(u32::MAX),
                remedy: "split the file",
            });
        }
        Ok(true)
    }

    fn at_end(&self) -> Result<(), DataError> {
        let path = self.blocks.path().to_path_buf();
        match (self.rows, self.skipped.skipped) {
            (0, 0) => {
                let expected = "tab-separated lines of label, I1..I13, C1..C26";
                Err(DataError::Empty { path, expected })
            }
            (0, skipped) => {
                let first = self.skipped.first.first().cloned().unwrap_or_default();
                Err(DataError::AllSkipped { path, skipped, first })
            }
            _ => Ok(()),
        }
    }
}

/// Fits an encoder to a training file in one pass.
pub fn fit(
    path: &Path,
    schema: &Schema,
    policy: RowPolicy,
) -> Result<(FittedEncoder, SkipReport), DataError> {
    check_columns(schema)?;
    let mut fitter = Fitter::new(schema)?;
    let mut reader = CriteoReader::open(path, ReadOptions { policy, labels: Labels::Required })?;
    while let Some(chunks) = reader.next_chunks(|rows| rows)? {
        for rows in &chunks {
            fitter.push(rows)?;
        }
    }
    Ok((fitter.finish()?, reader.skipped))
}

/// Reads and encodes a whole file into memory, in file order.
pub fn load(path: &Path, encoder: &FittedEncoder, options: ReadOptions) -> Result<Dataset, DataError> {
    check_columns(&encoder.schema)?;
    let mut reader = CriteoReader::open(path, options)?;
    let mut rows = encoder.empty_rows();
    while reader.encode_more(encoder, &mut rows)? {}
    Ok(Dataset { rows, labelled: reader.labelled(), skipped: reader.skipped })
}

/// A schema for this format must have its number of columns.
pub fn check_columns(schema: &Schema) -> Result<(), DataError> {
    let (n, c) = (schema.numeric.len(), schema.categorical.len());
    if (n, c) == (CRITEO_NUMERIC, CRITEO_CATEGORICAL) {
        return Ok(());
    }
    Err(DataError::Schema {
        column: "I1..C26".into(),
        problem: format!("{n} numeric and {c} categorical columns, the criteo format has 13 and 26"),
    })
}

/// Name of field `i` of a row with that many fields.
fn column_name(i: usize, fields: usize) -> String {
    match i + FEATURES + 1 - fields {
        0 => "label".into(),
        i if i <= CRITEO_NUMERIC => format!("I{i}"),
        i => format!("C{}", i - CRITEO_NUMERIC),
    }
}

type Problems = Vec<(u64, RowProblem)>;

/// Parses a block; with `stop`, up to its first bad row.
fn parse_block(block: Block, layout: Layout, stop: bool) -> (RawRows, Problems) {
    let mut rows = RawRows::default();
    let mut problems = Vec::new();
    let guess = block.text.len() / 150;
    rows.numeric.reserve(guess * CRITEO_NUMERIC);
    rows.fields.reserve(guess * CRITEO_CATEGORICAL);
    let (mut start, mut number) = (0, block.first_line);
    while start < block.text.len() {
        let length = block.text[start..].iter().position(|&b| b == b'\n');
        let end = length.map_or(block.text.len(), |n| start + n);
        let mut line = &block.text[start..end];
        if let [head @ .., b'\r'] = line {
            line = head;
        }
        match parse_line(line, start, &block, layout, &mut rows) {
            Ok(()) => rows.lines.push(number),
            Err(problem) => {
                problems.push((number, problem));
                if stop {
                    break;
                }
            }
        }
        number += 1;
        start = end + 1;
    }
    rows.text = block.text;
    (rows, problems)
}

/// Appends the row of one line, which starts at `at` in its block; on error `rows` is unchanged.
fn parse_line(
    line: &[u8],
    at: usize,
    block: &Block,
    layout: Layout,
    rows: &mut RawRows,
) -> Result<(), RowProblem> {
    let (wanted, expected) = (layout.fields(), layout.expected());
    if line.len() > LONGEST_LINE {
        return Err(RowProblem::TooLong { limit: LONGEST_LINE });
    }
    if line.is_empty() {
        return Err(RowProblem::EmptyLine { expected });
    }
    // Field i is line[bounds[i] .. bounds[i + 1] - 1].
    let mut bounds = [0u32; FEATURES + 2];
    let mut found = 0;
    for (i, &byte) in line.iter().enumerate() {
        if byte == b'\t' {
            found += 1;
            if found <= FEATURES {
                bounds[found] = i as u32 + 1;
            }
        }
    }
    found += 1;
    if let Err(error) = std::str::from_utf8(line) {
        let bad = error.valid_up_to();
        let field = line[..bad].iter().filter(|&&b| b == b'\t').count();
        let column = if found == wanted { column_name(field, wanted) } else { "line".into() };
        let offset = block.offset + (at + bad) as u64;
        return Err(RowProblem::NotUtf8 { column, offset, byte: line[bad] });
    }
    if found != wanted {
        return Err(RowProblem::FieldCount { found, expected });
    }
    bounds[wanted] = line.len() as u32 + 1;
    let field = |i: usize| &line[bounds[i] as usize..bounds[i + 1] as usize - 1];

    let first = wanted - FEATURES;
    let label = match (layout, if first == 1 { field(0) } else { b"" }) {
        (Layout::Labelled, b"0") => 0,
        (Layout::Labelled, b"1") => 1,
        (Layout::Labelled, b"") => return Err(RowProblem::NoLabel),
        (Layout::Labelled, other) => return Err(RowProblem::BadLabel { value: quoted(other) }),
        (_, b"") => UNLABELLED,
        (_, _) => {
            let (found, most) = ("has a label", "most rows of the file have none");
            return Err(RowProblem::MixedLabels { found, most });
        }
    };
    let kept = rows.numeric.len();
    for i in 0..CRITEO_NUMERIC {
        let Some(value) = parse_number(field(first + i)) else {
            rows.numeric.truncate(kept);
            let (column, value) = (column_name(first + i, wanted), quoted(field(first + i)));
            return Err(RowProblem::BadNumber { column, value });
        };
        rows.numeric.push(value);
    }
    let base = at as u32; // a block is far below 4 GiB
    let categories = first + CRITEO_NUMERIC..wanted;
    rows.fields.extend(categories.map(|i| (base + bounds[i], base + bounds[i + 1] - 1)));
    rows.labels.push(label);
    Ok(())
}

/// A finite decimal number of float32's range; NaN for the empty field.
fn parse_number(field: &[u8]) -> Option<f64> {
    if field.is_empty() {
        return Some(f64::NAN);
    }
    let (negative, digits) = match field {
        [b'-', rest @ ..] => (true, rest),
        _ => (false, field),
    };
    // Up to 15 digits are exact in f64; this is nearly every field.
    if (1..=15).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit) {
        let value = digits.iter().fold(0u64, |v, &d| 10 * v + u64::from(d - b'0')) as f64;
        return Some(if negative { -value } else { value });
    }
    // `f64::from_str` alone would let "inf" and "nan" through.
    if !field.iter().all(|b| b.is_ascii_digit() || b"+-.eE".contains(b)) {
        return None;
    }
    let value: f64 = std::str::from_utf8(field).ok()?.parse().ok()?;
    (value.abs() <= f64::from(f32::MAX)).then_some(value)
}

#[cfg(test)]
#[path = "criteo_tests.rs"]
mod tests;
