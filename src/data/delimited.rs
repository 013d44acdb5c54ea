//! Delimited text: Criteo's log, CSV and TSV, quoted by RFC 4180.
//!
//! A block without quotes is cut at the places of delimiters and line breaks, found 64 bytes at a time; one with
//! quotes goes through a state machine that unescapes. Either way a field is a range of the block's bytes.

use std::cell::RefCell;

use super::blocks::{Block, LONGEST_LINE, LONGEST_RECORD};
use super::columns::Batch;
use super::error::RowProblem;
use super::format::Delimited;
use super::marks::Marks;
#[cfg(target_arch = "x86_64")]
use super::marks::{Level, level};
use super::plan::{LabelLayout, Plan, Ranges, Sink};

/// (line, problem) of rows that cannot be used.
pub(crate) type Problems = Vec<(u64, RowProblem)>;

/// What parsing a block needs.
#[derive(Clone, Debug)]
pub(crate) struct Parser {
    pub format: Delimited,
    pub plan: Plan,
    pub comment: Vec<u8>,
}

/// A block's text and the marks in it.
struct Marked<'a> {
    text: &'a [u8],
    /// Of `text` in the file.
    offset: u64,
    places: &'a [u32],
    /// Whether all bytes are.
    ascii: bool,
}

impl Parser {
    /// The longest line.
    pub fn longest(format: &Delimited) -> usize {
        if format.criteo { LONGEST_LINE } else { LONGEST_RECORD }
    }

    /// Parses a block from byte `from` on, which is at line `line`; with `stop`, up to its first bad row.
    pub fn parse<S: Sink>(
        &self,
        block: Block,
        from: usize,
        line: u64,
        stop: bool,
        mut rows: S,
    ) -> (S, Problems, Vec<u8>) {
        let mut problems = Vec::new();
        let quoted = self.format.quote.is_some_and(|q| block.text[from..].contains(&q));
        let mut text = block.text;
        // a page reads Criteo's log only (`Reader::open_delimited`)
        if (quoted || self.format.trim) && !cfg!(target_arch = "wasm32") {
            self.parse_quoted(&mut text, block.offset, from, line, stop, &mut rows, &mut problems);
        } else {
            self.parse_plain(&text, block.offset, from, line, stop, &mut rows, &mut problems);
        }
        let text = rows.finish(text);
        (rows, problems, text)
    }

    fn parse_plain<S: Sink>(
        &self,
        text: &[u8],
        offset: u64,
        from: usize,
        line: u64,
        stop: bool,
        rows: &mut S,
        problems: &mut Problems,
    ) {
        SCRATCH.with_borrow_mut(|marks| {
            let ascii = marks.find(&text[from..], from, self.format.delimiter);
            // in a damaged file most lines may be none
            rows.expect(marks.lines().len().min(text.len() / 32), self.plan.width());
            let block = Marked { text, offset, places: &marks.places, ascii };
            self.parse_lines(&block, marks.lines(), line, stop, rows, problems);
        });
    }

    /// Reads the lines, compiled for what this processor has: numbers are read several at once.
    fn parse_lines<S: Sink>(
        &self,
        block: &Marked<'_>,
        lines: &[u32],
        line: u64,
        stop: bool,
        rows: &mut S,
        problems: &mut Problems,
    ) {
        #[cfg(target_arch = "x86_64")]
        match level() {
            // SAFETY: the processor has what the function is compiled for.
            Level::Avx512 => return unsafe { self.parse_512(block, lines, line, stop, rows, problems) },
            // SAFETY: the same.
            Level::Avx2 => return unsafe { self.parse_256(block, lines, line, stop, rows, problems) },
            Level::Any => {}
        }
        self.parse_any(block, lines, line, stop, rows, problems);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn parse_512<S: Sink>(
        &self,
        block: &Marked<'_>,
        lines: &[u32],
        line: u64,
        stop: bool,
        rows: &mut S,
        problems: &mut Problems,
    ) {
        self.parse_any(block, lines, line, stop, rows, problems);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn parse_256<S: Sink>(
        &self,
        block: &Marked<'_>,
        lines: &[u32],
        line: u64,
        stop: bool,
        rows: &mut S,
        problems: &mut Problems,
    ) {
        self.parse_any(block, lines, line, stop, rows, problems);
    }

    #[inline(always)]
    fn parse_any<S: Sink>(
        &self,
        block: &Marked<'_>,
        lines: &[u32],
        mut line: u64,
        stop: bool,
        rows: &mut S,
        problems: &mut Problems,
    ) {
        let mut batch = Batch::new(block.text);
        let mut first = 0;
        let mut lines = lines.iter();
        loop {
            let mut bad = None;
            while !batch.full()
                && bad.is_none()
                && let Some(&last) = lines.next()
            {
                let marks = &block.places[first..=last as usize];
                first = last as usize;
                match self.look(block, marks, line) {
                    Ok(Some(end)) => batch.add(marks, end, line),
                    Ok(None) => {}
                    Err(problem) => bad = Some((line, problem)),
                }
                line += 1;
            }
            let ended = !batch.full() && bad.is_none();
            if !batch.is_empty() && !self.plan.push_batch(&batch, rows) {
                self.give_one_by_one(&batch, stop, rows, problems);
            }
            batch.clear();
            if problems.is_empty() || !stop {
                problems.extend(bad);
            }
            if ended || (stop && !problems.is_empty()) {
                return;
            }
        }
    }

    /// Whether the line between the first and the last of some marks has a row's form, and then its end without the
    /// line break; `None` if it is not to be read.
    #[inline(always)]
    fn look(&self, block: &Marked<'_>, marks: &[u32], line: u64) -> Result<Option<u32>, RowProblem> {
        let text = block.text;
        let (start, line_end) = (marks[0].wrapping_add(1) as usize, marks[marks.len() - 1] as usize);
        let end = line_end - usize::from(line_end > start && text[line_end - 1] == b'\r');
        let whole = &text[start..end];
        let found = marks.len() - 1;
        if (!self.comment.is_empty() || !self.format.criteo) && self.skipped(whole) {
            return Ok(None);
        }
        let longest = Self::longest(&self.format);
        if whole.len() > longest {
            return Err(RowProblem::TooLong { limit: longest });
        }
        if whole.is_empty() {
            return Err(RowProblem::EmptyLine { expected: self.plan.expected.clone() });
        }
        if !block.ascii
            && let Err(e) = std::str::from_utf8(whole)
        {
            let bad = start + e.valid_up_to();
            let field = marks[1..found].iter().filter(|&&m| (m as usize) < bad).count();
            return Err(self.not_utf8(found, field, block.offset + bad as u64, text[bad]));
        }
        if found != self.plan.names.len() {
            return Err(self.count(found));
        }
        let end = end as u32;
        if self.plan.splits() {
            let fields = Ranges(|i: usize| (marks[i].wrapping_add(1), marks[i + 1].min(end)));
            return Ok(self.plan.belongs(text, line, &fields)?.then_some(end));
        }
        Ok(Some(end))
    }

    /// Gives the rows of a batch in which one is bad to the sink.
    #[inline(never)]
    fn give_one_by_one<S: Sink>(&self, batch: &Batch<'_>, stop: bool, rows: &mut S, problems: &mut Problems) {
        for row in 0..batch.len() {
            let fields = Ranges(|i| batch.range(row, i));
            if let Err(problem) = self.plan.push(batch.text(), batch.line(row), &fields, rows) {
                problems.push((batch.line(row), problem));
                if stop {
                    return;
                }
            }
        }
    }

    /// Whether a line is no row: a comment, or nothing in a format where blank lines mean nothing.
    fn skipped(&self, line: &[u8]) -> bool {
        (line.is_empty() && !self.format.criteo)
            || (!self.comment.is_empty() && line.starts_with(&self.comment))
    }

    fn count(&self, found: usize) -> RowProblem {
        let delimiter = self.format.delimiters();
        RowProblem::FieldCount { found, expected: self.plan.expected.clone(), delimiter }
    }

    fn not_utf8(&self, found: usize, field: usize, offset: u64, byte: u8) -> RowProblem {
        let fits = found == self.plan.names.len();
        let column = if fits { self.plan.names[field].clone() } else { "line".into() };
        RowProblem::NotUtf8 { column, offset, byte }
    }

    fn parse_quoted<S: Sink>(
        &self,
        text: &mut Vec<u8>,
        offset: u64,
        from: usize,
        mut line: u64,
        stop: bool,
        rows: &mut S,
        problems: &mut Problems,
    ) {
        let length = text.len();
        let longest = Self::longest(&self.format);
        let mut at = from;
        let mut fields = Vec::new();
        while at < length {
            let start = at;
            let record = self.record(text, length, at, &mut fields);
            let next = match &record {
                Ok(next) => *next,
                // go on at the next line
                Err(_) => text[at..length].iter().position(|&b| b == b'\n').map_or(length, |n| at + n + 1),
            };
            let blank = matches!(&text[start..next], b"\n" | b"\r\n" | b"\r" | b"");
            let comment = !self.comment.is_empty() && text[start..next].starts_with(&self.comment);
            let result = if (blank && !self.format.criteo) || comment {
                Ok(true)
            } else {
                record
                    .map_err(|(field, open)| {
                        let column =
                            self.plan.names.get(field).cloned().unwrap_or_else(|| format!("{}", field + 1));
                        if open {
                            RowProblem::OpenQuote { column }
                        } else {
                            RowProblem::AfterQuote { column }
                        }
                    })
                    .and_then(|_| {
                        if next - start > longest {
                            return Err(RowProblem::TooLong { limit: longest });
                        }
                        for (i, &(a, b)) in fields.iter().enumerate() {
                            if let Err(e) = std::str::from_utf8(&text[a as usize..b as usize]) {
                                let bad = a as usize + e.valid_up_to();
                                // an unescaped copy lies behind the block: its place is the record's
                                let place = if bad < length { bad } else { start };
                                return Err(self.not_utf8(fields.len(), i, offset + place as u64, text[bad]));
                            }
                        }
                        if fields.len() != self.plan.names.len() {
                            return Err(self.count(fields.len()));
                        }
                        self.plan.push(text, line, &Ranges(|i| fields[i]), rows)
                    })
            };
            if let Err(problem) = result {
                problems.push((line, problem));
                if stop {
                    return;
                }
            }
            line += text[start..next].iter().filter(|&&b| b == b'\n').count() as u64;
            at = next;
        }
    }

    /// The fields of the record at `at`, and where the next begins. Unescaped text is appended to `text`, whose own
    /// `length` bytes are the block. The error is the field, and whether its quote stays open.
    fn record(
        &self,
        text: &mut Vec<u8>,
        length: usize,
        mut at: usize,
        fields: &mut Vec<(u32, u32)>,
    ) -> Result<usize, (usize, bool)> {
        let (delimiter, quote) = (self.format.delimiter, self.format.quote);
        fields.clear();
        loop {
            // blanks in front of a field, and below behind it
            while self.format.trim && at < length && is_blank(text[at]) && text[at] != delimiter {
                at += 1;
            }
            let begin = at;
            if at < length && Some(text[at]) == quote {
                at += 1;
                let (start, mut copied) = (at, None::<usize>);
                let mut piece = at;
                let end = loop {
                    if at >= length {
                        return Err((fields.len(), true));
                    }
                    if Some(text[at]) != quote {
                        at += 1;
                        continue;
                    }
                    if at + 1 < length && Some(text[at + 1]) == quote {
                        // a doubled quote: the pieces between go behind the block
                        copied.get_or_insert(text.len());
                        text.extend_from_within(piece..=at);
                        at += 2;
                        piece = at;
                        continue;
                    }
                    break at;
                };
                match copied {
                    Some(begin) => {
                        text.extend_from_within(piece..end);
                        fields.push((begin as u32, text.len() as u32));
                    }
                    None => fields.push((start as u32, end as u32)),
                }
                at = end + 1;
                while self.format.trim && at < length && is_blank(text[at]) && text[at] != delimiter {
                    at += 1;
                }
                let ending = at >= length
                    || text[at] == b'\n'
                    || text[at..length].starts_with(b"\r\n")
                    || at + 1 == length && text[at] == b'\r';
                if !ending && text[at] != delimiter {
                    return Err((fields.len() - 1, false));
                }
                if ending {
                    let line = text[at.min(length)..length].iter().position(|&b| b == b'\n');
                    return Ok(line.map_or(length, |n| at + n + 1));
                }
                at += 1;
            } else {
                while at < length && text[at] != delimiter && text[at] != b'\n' {
                    at += 1;
                }
                let ended = at >= length || text[at] == b'\n';
                let cut = ended && at > begin && text[at - 1] == b'\r';
                let mut end = at - usize::from(cut);
                while self.format.trim && end > begin && is_blank(text[end - 1]) {
                    end -= 1;
                }
                fields.push((begin as u32, end as u32));
                at += 1;
                if ended {
                    return Ok(at.min(length));
                }
            }
            if at >= length {
                // a delimiter was the last byte
                fields.push((length as u32, length as u32));
                return Ok(length);
            }
        }
    }
}

/// What is left out around fields where blanks mean nothing.
fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

thread_local! {
    /// Kept from block to block: memory that is new has to be cleared first.
    static SCRATCH: RefCell<Marks> = RefCell::default();
}

/// The first records of a text as fields, at most `most` of them, and the offset behind each and its line; whether
/// text stands in quotes is the format's.
pub(crate) fn sample(head: &[u8], format: &Delimited, comment: &[u8], most: usize) -> Vec<Record> {
    let plan = Plan::new(&Default::default(), vec![], LabelLayout::Absent, &Default::default());
    let Ok(plan) = plan else { return vec![] };
    let parser = Parser { format: format.clone(), plan, comment: comment.to_vec() };
    let mark = if head.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    let mut text = head.to_vec();
    let (length, mut at, mut line) = (head.len(), mark, 1);
    let mut records = vec![];
    let mut fields = vec![];
    while at < length && records.len() < most {
        let Ok(next) = parser.record(&mut text, length, at, &mut fields) else { break };
        let whole = next < length || text[length - 1] == b'\n' || length < super::input::HEAD;
        let plain = &text[at..next];
        let blank = plain.iter().all(|b| matches!(b, b'\r' | b'\n'));
        let skip = blank || (!comment.is_empty() && plain.starts_with(comment));
        if whole && !skip {
            let values = fields.iter().map(|&(a, b)| text[a as usize..b as usize].to_vec()).collect();
            records.push(Record { values, start: at - mark, end: next - mark, line });
        }
        line += plain.iter().filter(|&&b| b == b'\n').count() as u64;
        at = next;
    }
    records
}

/// A record of [`sample`].
#[derive(Clone, Debug)]
pub(crate) struct Record {
    /// Its fields.
    pub values: Vec<Vec<u8>>,
    /// Its first byte, counted behind a byte order mark.
    pub start: usize,
    /// The first byte of what follows it.
    pub end: usize,
    /// Its line, from 1.
    pub line: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::encoder::{EncodingSink, FittedEncoder};
    use crate::data::plan::PlanOptions;
    use crate::data::rows::{RawRows, Rows};
    use crate::data::schema::{CategoricalColumn, Encoding, NumericColumn, Schema, Transform};
    use crate::data::split::{Part, Split, SplitBy};
    use crate::data::vocab::{ColumnEncoder, Interner};
    use proptest::prelude::*;

    fn parser(columns: usize, delimiter: u8, quote: Option<u8>) -> Parser {
        let encoding = Encoding::Vocabulary { min_count: 1, max_size: None };
        let names: Vec<String> = (0..columns).map(|i| format!("c{i}")).collect();
        let categorical = names.iter().map(|n| CategoricalColumn::single(n, encoding)).collect();
        let schema = Schema { categorical, ..Schema::default() };
        let plan = Plan::new(&schema, names, LabelLayout::Absent, &Default::default()).unwrap();
        let format = Delimited { delimiter, quote, header: Some(false), criteo: false, trim: false };
        Parser { format, plan, comment: b"#".to_vec() }
    }

    fn parse(p: &Parser, text: &[u8]) -> (Vec<Vec<Vec<u8>>>, Vec<u64>, Problems) {
        let block = Block { text: text.to_vec(), offset: 0, first_line: 1 };
        let (rows, problems, _) = p.parse(block, 0, 1, false, RawRows::default());
        let c = p.plan.names.len();
        let values =
            (0..rows.len()).map(|r| (0..c).map(|j| rows.field(r * c + j).to_vec()).collect()).collect();
        (values, rows.lines, problems)
    }

    proptest! {
        /// What the `csv` crate writes is read back; what it reads is read alike, with and without quotes.
        #[test]
        fn agrees_with_the_csv_crate(
            rows in prop::collection::vec(prop::collection::vec("[ab,\"\n\r#é|]{0,5}", 3), 1..8),
            crlf in any::<bool>(),
        ) {
            let mut w = csv::WriterBuilder::new();
            if crlf {
                w.terminator(csv::Terminator::CRLF);
            }
            let mut w = w.has_headers(false).quote_style(csv::QuoteStyle::Always).from_writer(vec![]);
            rows.iter().for_each(|r| w.write_record(r).unwrap());
            let text = w.into_inner().unwrap();
            let (got, _, problems) = parse(&parser(3, b',', Some(b'"')), &text);
            prop_assert!(problems.is_empty(), "{:?}", problems);
            let want: Vec<Vec<Vec<u8>>> = rows.iter().map(|r| r.iter().map(|f| f.clone().into_bytes()).collect()).collect();
            prop_assert_eq!(got, want);
        }

        /// Batches, column by column, give what rows give one by one, whatever is wrong with which.
        #[test]
        fn batches_are_rows_one_by_one(
            lines in prop::collection::vec(
                prop_oneof![
                    30 => "[01]\t(-?[0-9]{0,6}|[0-9]{0,11}|1[.]5|NA)\t([a-d]{0,9}|NA)\t([0-9a-f]{8}){0,1}[a-c]{0,1}",
                    1 => "[012]{0,1}\t[0-9x]{0,2}\t[a-d]{0,2}(\t[é]{0,1}){0,2}",
                ],
                0..200,
            ),
            (stop, na, split, crlf) in any::<(bool, bool, bool, bool)>(),
            encoding in prop_oneof![
                Just(Encoding::Hash { buckets: 97 }),
                Just(Encoding::Vocabulary { min_count: 1, max_size: None }),
            ],
        ) {
            let text = lines.join(if crlf { "\r\n" } else { "\n" });
            let numeric = NumericColumn::new("n", Transform::Log, true);
            let categorical = ["a", "b"].map(|n| CategoricalColumn::single(n, encoding)).to_vec();
            let schema = Schema { numeric: vec![numeric], categorical, ..Schema::default() };
            let names = ["label", "n", "a", "b"].map(String::from).to_vec();
            let na = if na { vec!["NA".to_string()] } else { vec![] };
            let split = split.then_some((Split { shares: [0.7, 0.2, 0.1], by: SplitBy::Random { seed: 3 } }, Part::Train));
            let o = PlanOptions { na: &na, split, ..PlanOptions::default() };
            let plan = Plan::new(&schema, names, LabelLayout::Labelled, &o).unwrap();
            let format = Delimited { delimiter: b'\t', quote: None, header: Some(false), criteo: false, trim: false };
            let p = Parser { format, plan, comment: vec![] };
            let mut known = Interner::default();
            for line in &lines {
                line.split('\t').skip(2).filter(|v| !v.is_empty() && v.len() % 5 != 0).for_each(|v| {
                    known.intern(v.as_bytes());
                });
            }
            let columns = schema.categorical.iter();
            let columns = columns.map(|c| ColumnEncoder::new(c, known.clone()).unwrap()).collect();
            let encoder = FittedEncoder { schema, columns, rows: 1, positives: 0, weights: None, lengths: vec![], profile: None };
            let said = |problems: Problems| -> Vec<String> {
                problems.iter().map(|(line, problem)| format!("{line}: {problem}")).collect()
            };
            let (mut batches, mut single) = (vec![], vec![]);
            let mut sink = EncodingSink::new(&encoder, Rows::default());
            p.parse_plain(text.as_bytes(), 0, 0, 1, stop, &mut sink, &mut batches);
            let got = (sink.into_rows(), said(batches));
            let mut sink = EncodingSink::new(&encoder, Rows::default());
            p.parse_quoted(&mut text.clone().into_bytes(), 0, 0, 1, stop, &mut sink, &mut single);
            prop_assert_eq!(&got, &(sink.into_rows(), said(single)));

            let (mut batches, mut single) = (vec![], vec![]);
            let (mut raw, mut raw_single) = (RawRows::default(), RawRows::default());
            p.parse_plain(text.as_bytes(), 0, 0, 1, stop, &mut raw, &mut batches);
            p.parse_quoted(&mut text.clone().into_bytes(), 0, 0, 1, stop, &mut raw_single, &mut single);
            let bits = |raw: &RawRows| raw.numeric.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&raw), bits(&raw_single));
            prop_assert_eq!((raw.labels, raw.lines), (raw_single.labels, raw_single.lines));
            for (&(a, b), &(c, d)) in raw.fields.iter().zip(&raw_single.fields) {
                prop_assert_eq!(&text[a as usize..b as usize], &text[c as usize..d as usize]);
            }
            prop_assert_eq!(raw.fields.len(), raw_single.fields.len());
        }

        #[test]
        fn quotes_or_not_plain_text_reads_alike(rows in prop::collection::vec(prop::collection::vec("[a-cé ]{1,4}", 3), 1..8)) {
            let text: String = rows.iter().map(|r| r.join("\t") + "\n").collect();
            let plain = parse(&parser(3, b'\t', None), text.as_bytes());
            // one quoted field sends the block through the state machine
            let quoted = parse(&parser(3, b'\t', Some(b'"')), format!("{text}\"q\"\tr\ts").as_bytes());
            prop_assert_eq!(&plain.0[..], &quoted.0[..rows.len()]);
            prop_assert_eq!(quoted.0[rows.len()].clone(), vec![b"q".to_vec(), b"r".to_vec(), b"s".to_vec()]);
            prop_assert_eq!(&plain.1[..], &quoted.1[..rows.len()]);
        }
    }

    #[test]
    fn what_is_wrong_with_quotes_has_a_place() {
        let p = parser(2, b',', Some(b'"'));
        let (rows, lines, problems) = parse(&p, b"a,\"b\nb\"\nc,\"d\" e\n\"f\"\"g\",h\r\n,\ni,\"open\n");
        assert_eq!(rows, [[&b"a"[..], b"b\nb"], [b"f\"g", b"h"], [b"", b""]]);
        assert_eq!(lines, [1, 4, 5]);
        let text: Vec<String> = problems.iter().map(|(l, p)| format!("{l}: {p}")).collect();
        assert_eq!(text.len(), 2, "{text:?}");
        assert!(text[0].starts_with("3: column c1: text after a closing quote"), "{text:?}");
        assert!(text[1].starts_with("6: column c1: a quote is never closed"), "{text:?}");
    }

    #[test]
    fn comments_and_blank_lines_are_no_rows() {
        for quote in [None, Some(b'"')] {
            let p = parser(2, b',', quote);
            let (rows, lines, problems) = parse(&p, b"# x\n\na,b\r\n\r\n#,\nc,d");
            assert_eq!(rows, [[&b"a"[..], b"b"], [b"c", b"d"]]);
            assert_eq!((lines, problems.len()), (vec![3, 6], 0));
        }
    }

    #[test]
    fn samples_have_places() {
        let format =
            Delimited { delimiter: b',', quote: Some(b'"'), header: None, criteo: false, trim: false };
        let records = sample(b"\xef\xbb\xbf# c\na,\"b\nc\"\n1,2\n", &format, b"#", 10);
        assert_eq!(records.len(), 2);
        assert_eq!((records[0].values.clone(), records[0].line), (vec![b"a".to_vec(), b"b\nc".to_vec()], 2));
        assert_eq!((records[0].end, records[1].line), (12, 4));
    }
}
