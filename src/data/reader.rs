//! Rows of any format: files one after the other, in blocks that are parsed in parallel and come back in order.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::par::*;

use super::blocks::{BLOCK_BYTES, Block, BlockReader};
#[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
use super::columnar::{Columnar, rows_of};
use super::delimited::{Parser, Problems, Record, sample};
use super::drift::Seen;
use super::encoder::{EncodingSink, FittedEncoder};
#[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
use super::error::quoted;
use super::error::{DataError, RowProblem};
use super::fitter::Fitter;
use super::format::{Delimited, Format, FormatOptions, resolve};
use super::header::read_header;
use super::input::Place;
use super::plan::{LabelLayout, Plan, PlanOptions, Sink, listed};
use super::rows::{Dataset, RawRows, Rows, SkipReport};
use super::schema::Schema;
#[cfg(not(target_arch = "wasm32"))]
use super::sparse::SparseParser;
use super::split::{Part, Split};
use super::witness::Witness;

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
    /// All rows have labels or none: empty labels, or no label column.
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

/// Files, and how they are read.
#[derive(Clone, Debug)]
pub struct Source {
    /// The files, in order.
    pub places: Vec<Place>,
    /// What is said about their format.
    pub format: FormatOptions,
    /// Bad rows and labels.
    pub read: ReadOptions,
    /// Only the rows of one part.
    pub split: Option<(Split, Part)>,
    /// Columns whose text comes along ([`RawRows::passed`]).
    pub passed: Vec<String>,
    /// Bytes of a block of text, about.
    pub block: usize,
    /// Whether files have a header, as the first one of those that are read together showed.
    pub decided: Option<bool>,
    /// Where the files must stay as they are, who remembers them.
    pub witness: Option<Witness>,
}

impl Source {
    /// All rows of these files.
    pub fn new(places: Vec<Place>, format: FormatOptions, read: ReadOptions) -> Source {
        Source {
            places,
            format,
            read,
            split: None,
            passed: vec![],
            block: BLOCK_BYTES,
            decided: None,
            witness: None,
        }
    }

    /// One file of Criteo's format.
    pub fn criteo(place: Place, read: ReadOptions) -> Source {
        let format = FormatOptions { format: super::format::FormatName::Criteo, ..FormatOptions::default() };
        Source::new(vec![place], format, read)
    }

    /// The same files, only the rows of one part of a split.
    pub fn part(&self, split: &Split, part: Part) -> Source {
        Source { split: Some((split.clone(), part)), ..self.clone() }
    }

    /// Names of the files, for messages.
    pub fn name(&self) -> String {
        match &self.places[..] {
            [one] => one.name().display().to_string(),
            [first, rest @ ..] => format!("{} and {} more files", first.name().display(), rest.len()),
            [] => "no file".into(),
        }
    }

    /// An error if file number `i` is not as it was at first, where that is watched.
    fn unchanged(&self, i: usize) -> Result<(), DataError> {
        match (&self.witness, self.places.get(i)) {
            (Some(witness), Some(Place::File(path))) => witness.check(path),
            _ => Ok(()),
        }
    }

    /// Opens the files for reading rows of a schema.
    pub fn open(&self, schema: &Schema) -> Result<Reader, DataError> {
        Reader::new(self.clone(), schema)
    }
}

/// The columns that the schema takes from a file, when the file is open.
enum Parse {
    Delimited(Arc<Parser>),
    #[cfg(not(target_arch = "wasm32"))]
    Sparse(Arc<SparseParser>),
}

/// A file, open.
enum Open {
    Text {
        blocks: BlockReader<Box<dyn Read + Send>>,
        parse: Parse,
        /// Offset and line of the first row in the first block.
        start: Option<(usize, u64)>,
    },
    #[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
    Columnar { file: Columnar, plan: Arc<Plan>, kind: &'static str },
}

/// Streams rows.
pub struct Reader {
    source: Source,
    schema: Arc<Schema>,
    /// Number of the file that is open, or comes next.
    file: usize,
    open: Option<Open>,
    /// What the files opened so far are.
    formats: Vec<Format>,
    /// Columns of them that are texts by type.
    texts: Vec<String>,
    labelled: Option<bool>,
    rows: u64,
    skipped: SkipReport,
    expected: String,
    /// Of [`Reader::encode_more`], for their memory.
    chunks: Vec<(Rows, u64)>,
    /// What the encoded rows are like, where that is counted.
    seen: Option<Box<Seen>>,
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader")
            .field("source", &self.source)
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

impl Reader {
    fn new(source: Source, schema: &Schema) -> Result<Reader, DataError> {
        schema.validate()?;
        let mut schema = schema.clone();
        if source.read.labels == Labels::Optional {
            // rows that are only scored need neither
            (schema.weight, schema.group) = (None, None);
        }
        let mut reader = Reader {
            source,
            schema: Arc::new(schema),
            file: 0,
            open: None,
            formats: vec![],
            texts: vec![],
            labelled: None,
            rows: 0,
            skipped: SkipReport::default(),
            expected: String::new(),
            chunks: vec![],
            seen: None,
        };
        // so that a missing file is an error before anything else is done
        reader.advance()?;
        Ok(reader)
    }

    /// Whether the rows have labels.
    pub fn labelled(&self) -> bool {
        self.labelled == Some(true)
    }

    /// Whether files of text have a header, once one has been opened.
    pub fn header(&self) -> Option<bool> {
        match self.formats.iter().any(|f| matches!(f, Format::Delimited(d) if !d.criteo)) {
            true => self.source.format.header.or(self.source.decided),
            false => None,
        }
    }

    /// Columns of the files opened so far whose values are texts by type, in columnar files.
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Rows left out so far.
    pub fn skipped(&self) -> &SkipReport {
        &self.skipped
    }

    /// Counts what the rows are like that are encoded from here on, if the encoder knows what its training rows were like.
    pub fn count_values(&mut self, encoder: &FittedEncoder) {
        self.seen = Seen::new(encoder).map(Box::new);
    }

    /// What was counted since [`Reader::count_values`].
    pub fn seen(&self) -> Option<&Seen> {
        self.seen.as_deref()
    }

    /// The formats of the files opened so far.
    pub fn formats(&self) -> &[Format] {
        &self.formats
    }

    /// The file that was opened last.
    pub fn path(&self) -> PathBuf {
        let place = &self.source.places[self.file.min(self.source.places.len()) - 1];
        place.name()
    }

    /// Opens the next file; `false` if there is none.
    fn advance(&mut self) -> Result<bool, DataError> {
        let Some(place) = self.source.places.get(self.file).cloned() else { return Ok(false) };
        let path = place.name();
        self.source.unchanged(self.file)?;
        let (head, reader) = place.open(&self.source.format)?;
        let fail = |problem: String| DataError::Format { path: path.clone(), problem };
        let format = resolve(&head, &self.source.format);
        let format = match format {
            Err(_) if head.iter().all(u8::is_ascii_whitespace) => {
                return Err(DataError::Empty { path, expected: "rows of data".into() });
            }
            other => other.map_err(fail)?,
        };
        self.formats.push(format.clone());
        let (labelled, open) = match format {
            Format::Delimited(d) => self.open_delimited(&path, &head, reader, d)?,
            // a page stays small
            #[cfg(target_arch = "wasm32")]
            Format::Sparse { .. } => {
                return Err(fail(
                    "is libsvm or libffm, which a page does not read; convert it to CSV".into(),
                ));
            }
            #[cfg(not(target_arch = "wasm32"))]
            Format::Sparse { fields } => {
                let o = PlanOptions { signed: true, ..self.plan_options() };
                let layout = match self.source.read.labels {
                    Labels::Optional if super::sparse::unlabelled(&head) => LabelLayout::Absent,
                    _ => LabelLayout::Labelled,
                };
                let plan = Plan::new(&self.schema, SparseParser::names(&self.schema), layout, &o);
                let plan = plan.map_err(fail)?;
                let blocks = BlockReader::new(&path, reader, self.source.block);
                let blocks = blocks.records(super::blocks::LONGEST_RECORD, None);
                self.expected = "lines of a label and index:value pairs".into();
                let parse = Parse::Sparse(Arc::new(SparseParser::new(plan, &self.schema, fields)));
                (layout == LabelLayout::Labelled, Open::Text { blocks, parse, start: None })
            }
            #[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
            Format::Parquet | Format::Arrow { .. } => {
                drop(reader);
                self.open_columnar(&path, &place, &format)?
            }
            #[cfg(not(all(feature = "formats", not(target_arch = "wasm32"))))]
            Format::Parquet | Format::Arrow { .. } => {
                return Err(fail("is columnar, which this build does not read; convert it to CSV".into()));
            }
        };
        if self.labelled.is_some_and(|l| l != labelled) {
            let problem = "has labels and the files before have none, or the reverse; read them apart".into();
            return Err(DataError::Columns { path, line: 1, problem });
        }
        self.labelled = Some(labelled);
        self.open = Some(open);
        self.file += 1;
        Ok(true)
    }

    fn plan_options(&self) -> PlanOptions<'_> {
        PlanOptions {
            split: self.source.split.clone(),
            passed: &self.source.passed,
            na: &self.source.format.na,
            file: self.file,
            ..PlanOptions::default()
        }
    }

    fn open_delimited(
        &mut self,
        path: &Path,
        head: &[u8],
        reader: Box<dyn Read + Send>,
        mut format: Delimited,
    ) -> Result<(bool, Open), DataError> {
        let comment = self.source.format.comment.clone().into_bytes();
        let records = sample(head, &format, &comment, 200);
        let columns =
            |line: u64, problem: String| DataError::Columns { path: path.to_path_buf(), line, problem };
        let header = if format.criteo {
            super::criteo::check_columns(&self.schema)?;
            None
        } else if cfg!(target_arch = "wasm32") {
            return Err(columns(1, "is not Criteo's log, the only format that a page reads".into()));
        } else {
            let labelled = self.source.read.labels == Labels::Required;
            let header = read_header(&self.schema, &format, &records, labelled, self.source.decided);
            let header = header.map_err(|(line, p)| columns(line, p))?;
            // decided once, for all files
            if !records.is_empty() {
                self.source.decided.get_or_insert(header.is_some());
            }
            header
        };
        format.header = Some(header.is_some());
        if let Some(Format::Delimited(d)) = self.formats.last_mut() {
            d.header = format.header;
        }
        let body = if header.is_some() { &records[1..] } else { &records[..] };
        let names = header.clone().unwrap_or_else(|| self.schema.file.clone());
        let (names, layout) = self.label_layout(names, header.is_some(), body);
        let o = PlanOptions { integer: format.criteo, ..self.plan_options() };
        let mut plan = Plan::new(&self.schema, names, layout, &o)
            .map_err(|problem| columns(records.first().map_or(1, |r| r.line), problem))?;
        if format.criteo {
            plan.expected = match layout {
                LabelLayout::Absent => "39 (I1..I13, C1..C26, as most rows here)".into(),
                _ => "40 (label, I1..I13, C1..C26)".into(),
            };
            self.expected = "tab-separated lines of label, I1..I13, C1..C26".into();
        } else {
            self.expected = format!("lines of {} fields ({})", plan.names.len(), listed(&plan.names));
        }
        let start = header.as_ref().map(|_| {
            let first = &records[0];
            let lines = head_lines(head, first);
            (first.end, first.line + lines)
        });
        let blocks = BlockReader::new(path, reader, self.source.block);
        let blocks = blocks.records(Parser::longest(&format), format.quoting());
        let parse = Parse::Delimited(Arc::new(Parser { format, plan, comment }));
        Ok((layout == LabelLayout::Labelled, Open::Text { blocks, parse, start }))
    }

    /// Whether most rows of a sample have labels, and the names of the columns that they have.
    fn label_layout(&self, names: Vec<String>, header: bool, body: &[Record]) -> (Vec<String>, LabelLayout) {
        if self.source.read.labels == Labels::Required {
            return (names, LabelLayout::Labelled);
        }
        let label = names.iter().position(|n| *n == self.schema.label.name);
        let without = || names.iter().filter(|n| **n != self.schema.label.name).cloned().collect::<Vec<_>>();
        let Some(label) = label else { return (names, LabelLayout::Absent) };
        // [labelled, empty, no such column]
        let mut counts = [0usize; 3];
        for record in body {
            match record.values.len() {
                n if n == names.len() => counts[usize::from(record.values[label].is_empty())] += 1,
                n if n + 1 == names.len() && !header => counts[2] += 1,
                _ => {}
            }
        }
        if counts[2] > counts[0] + counts[1] {
            (without(), LabelLayout::Absent)
        } else if counts[1] > counts[0] {
            (names, LabelLayout::Empty)
        } else {
            (names, LabelLayout::Labelled)
        }
    }

    #[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
    fn open_columnar(
        &mut self,
        path: &Path,
        place: &Place,
        format: &Format,
    ) -> Result<(bool, Open), DataError> {
        let schema = self.schema.clone();
        let mut used: Vec<String> = schema.needed().into_iter().map(String::from).collect();
        used.push(schema.label.name.clone());
        used.extend(self.source.passed.iter().cloned());
        used.extend(self.source.split.iter().filter_map(|(s, _)| s.column().map(String::from)));
        let (file, kind) = match format {
            Format::Arrow { stream } => (Columnar::arrow(place, *stream)?, "Arrow IPC"),
            _ => (Columnar::parquet(place, |name| used.iter().any(|u| u == name))?, "Parquet"),
        };
        self.texts.extend(file.texts.iter().cloned());
        let has_label = file.names.contains(&schema.label.name);
        let layout = match self.source.read.labels {
            Labels::Optional if !has_label => LabelLayout::Absent,
            _ => LabelLayout::Labelled,
        };
        let plan = Plan::new(&schema, file.names.clone(), layout, &self.plan_options())
            .map_err(|problem| DataError::Format { path: path.to_path_buf(), problem })?;
        self.expected = "rows".into();
        Ok((layout == LabelLayout::Labelled, Open::Columnar { file, plan: Arc::new(plan), kind }))
    }

    /// The next chunks of rows in file order, `map` having run on each on some thread; `None` at
    /// the end. A source without a usable row is an error, unless only a part of a split is read.
    pub fn next_chunks<T: Send>(
        &mut self,
        map: impl Fn(RawRows) -> T + Sync,
    ) -> Result<Option<Vec<T>>, DataError> {
        self.next_of(RawRows::default, map)
    }

    /// The next chunks of rows in file order, encoded on the way, each with the number of rows that have a list cut;
    /// `false` at the end. They take the place of those in `chunks`, whose memory is used again.
    pub fn next_encoded(
        &mut self,
        encoder: &FittedEncoder,
        chunks: &mut Vec<(Rows, u64)>,
    ) -> Result<bool, DataError> {
        let empty = self.seen.as_ref().map(|s| s.cleared());
        let sink = || {
            let spare = chunks.pop().map_or_else(Rows::default, |c| c.0);
            EncodingSink::counting(encoder, spare, empty.clone().map(Box::new))
        };
        let Some(next) = self.next_of(sink, EncodingSink::into_parts)? else { return Ok(false) };
        chunks.clear();
        for (rows, cut, seen) in next {
            if let (Some(all), Some(seen)) = (&mut self.seen, seen) {
                all.merge(&seen);
            }
            chunks.push((rows, cut));
        }
        Ok(true)
    }

    fn next_of<S: Sink + Send, T: Send>(
        &mut self,
        sink: impl FnMut() -> S,
        map: impl Fn(S) -> T + Sync,
    ) -> Result<Option<Vec<T>>, DataError> {
        let next = self.next_rows(sink, map);
        if next.is_err() && self.file > 0 {
            // half a row, say, of somebody who writes: that is the reason
            self.source.unchanged(self.file - 1)?;
        }
        next
    }

    fn next_rows<S: Sink + Send, T: Send>(
        &mut self,
        mut sink: impl FnMut() -> S,
        map: impl Fn(S) -> T + Sync,
    ) -> Result<Option<Vec<T>>, DataError> {
        loop {
            let Some(open) = &mut self.open else {
                if self.advance()? {
                    continue;
                }
                return self.at_end().map(|()| None);
            };
            let path = self.source.places[self.file - 1].name();
            let stop = self.source.read.policy == RowPolicy::Error;
            let parsed: Vec<(u64, Problems, T)> = match open {
                Open::Text { blocks, parse, start } => {
                    let mut group: Vec<(Block, usize, u64, S)> = Vec::new();
                    while group.len() < current_num_threads() {
                        let Some(block) = blocks.next_block()? else { break };
                        let first = block.first_line;
                        let (from, line) = start.take().unwrap_or((0, first));
                        group.push((block, from, line, sink()));
                    }
                    let parse = &*parse;
                    let one = |(block, from, line, sink): (Block, usize, u64, S)| {
                        let (rows, problems, text) = match parse {
                            Parse::Delimited(p) => p.parse(block, from, line, stop, sink),
                            #[cfg(not(target_arch = "wasm32"))]
                            Parse::Sparse(p) => p.parse(block, stop, sink),
                        };
                        (rows.rows() as u64, problems, map(rows), text)
                    };
                    let parsed: Vec<_> = group.into_par_iter().map(one).collect();
                    let mut give_back = |(rows, problems, chunk, text)| {
                        blocks.recycle(text);
                        (rows, problems, chunk)
                    };
                    parsed.into_iter().map(&mut give_back).collect()
                }
                #[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
                Open::Columnar { file, plan, kind } => {
                    let mut group = Vec::new();
                    while group.len() < current_num_threads() {
                        let Some(batch) = file.next_batch(&path, kind)? else { break };
                        group.push((batch, sink()));
                    }
                    let one = |((batch, before), sink)| {
                        let (rows, problems) = rows_of::<S>(&batch, before, plan, stop, sink)?;
                        Ok((rows.rows() as u64, problems, map(rows)))
                    };
                    let parsed: Result<Vec<_>, (String, String)> = group.into_par_iter().map(one).collect();
                    parsed.map_err(|(column, e)| DataError::Format {
                        path: path.clone(),
                        problem: format!("column {}: {e}", quoted(column.as_bytes())),
                    })?
                }
            };
            if parsed.is_empty() {
                self.source.unchanged(self.file - 1)?;
                self.open = None;
                continue;
            }
            let mut chunks = Vec::new();
            for (rows, problems, chunk) in parsed {
                self.rows += rows;
                for (line, problem) in problems {
                    let problem = self.in_context(problem);
                    let kind = problem.kind();
                    let error = DataError::Row { path: path.clone(), line, problem };
                    if stop {
                        return Err(error);
                    }
                    self.skipped.add(kind, || error.to_string());
                }
                chunks.push(chunk);
            }
            return Ok(Some(chunks));
        }
    }

    /// A missing label in a file where the others have one.
    fn in_context(&self, problem: RowProblem) -> RowProblem {
        match problem {
            RowProblem::NoLabel { column } if self.source.read.labels == Labels::Optional => {
                let most = "most rows of the file have one";
                RowProblem::MixedLabels { column, found: "no label", most }
            }
            other => other,
        }
    }

    /// Encodes the next chunks and appends them; `false` at the end.
    pub fn encode_more(&mut self, encoder: &FittedEncoder, rows: &mut Rows) -> Result<bool, DataError> {
        let mut chunks = std::mem::take(&mut self.chunks);
        let more = self.next_encoded(encoder, &mut chunks)?;
        if more {
            for (chunk, cut) in &chunks {
                rows.append(chunk);
                self.skipped.cut += cut;
            }
        }
        self.chunks = chunks;
        if rows.len() > u32::MAX as usize {
            return Err(DataError::TooMany {
                what: format!("rows of {}", self.source.name()),
                count: rows.len() as u64,
                limit: u64::from(u32::MAX),
                remedy: "split the file",
            });
        }
        Ok(more)
    }

    fn at_end(&self) -> Result<(), DataError> {
        let path = PathBuf::from(self.source.name());
        match (self.rows, self.skipped.skipped) {
            _ if self.source.split.is_some() => Ok(()),
            (0, 0) => Err(DataError::Empty { path, expected: self.expected.clone() }),
            (0, skipped) => {
                let first = self.skipped.first.first().cloned().unwrap_or_default();
                Err(DataError::AllSkipped { path, skipped, first })
            }
            _ => Ok(()),
        }
    }
}

/// Line breaks of a record of a head.
fn head_lines(head: &[u8], record: &Record) -> u64 {
    let mark = if head.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    let text = &head[mark + record.start..(mark + record.end).min(head.len())];
    text.iter().filter(|&&b| b == b'\n').count() as u64
}

/// Fits an encoder to training rows in one pass.
pub fn fit(source: &Source, schema: &Schema) -> Result<(FittedEncoder, SkipReport), DataError> {
    let mut fitter = Fitter::new(schema)?;
    let mut reader = source.open(schema)?;
    while let Some(chunks) = reader.next_chunks(|rows| rows)? {
        for rows in &chunks {
            fitter.push(rows)?;
        }
    }
    fitter.texts(reader.texts());
    Ok((fitter.finish()?, reader.skipped))
}

/// Reads and encodes all rows into memory, in file order.
pub fn load(source: &Source, encoder: &FittedEncoder) -> Result<Dataset, DataError> {
    let mut reader = source.open(&encoder.schema)?;
    let mut rows = encoder.empty_rows();
    while reader.encode_more(encoder, &mut rows)? {}
    Ok(Dataset { labelled: reader.labelled(), skipped: reader.skipped, rows })
}

#[cfg(test)]
#[path = "reader_tests.rs"]
mod tests;
