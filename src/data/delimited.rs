//! Delimited text: Criteo's log, CSV and TSV, quoted by RFC 4180.
//!
//! A block without quotes is cut at the places of delimiters and line breaks, found 64 bytes at a time; one with
//! quotes goes through a state machine that unescapes. Either way a field is a range of the block's bytes.

use std::cell::RefCell;

use super::blocks::{Block, LONGEST_LINE, LONGEST_RECORD};
use super::error::RowProblem;
use super::format::Delimited;
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
    ) -> (S, Problems) {
        let mut problems = Vec::new();
        let quoted = self.format.quote.is_some_and(|q| block.text[from..].contains(&q));
        let mut text = block.text;
        if quoted {
            self.parse_quoted(&mut text, block.offset, from, line, stop, &mut rows, &mut problems);
        } else {
            self.parse_plain(&text, block.offset, from, line, stop, &mut rows, &mut problems);
        }
        rows.finish(text);
        (rows, problems)
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
            // compiled for what this processor has: counting and clearing bits is most of the work
            #[cfg(not(target_arch = "wasm32"))]
            pulp::Arch::new().dispatch(
                #[inline(always)]
                || self.parse_marked(text, offset, from, line, stop, marks, rows, problems),
            );
            #[cfg(target_arch = "wasm32")]
            self.parse_marked(text, offset, from, line, stop, marks, rows, problems);
        });
    }

    #[inline(always)]
    fn parse_marked<S: Sink>(
        &self,
        text: &[u8],
        offset: u64,
        from: usize,
        line: u64,
        stop: bool,
        marks: &mut Marks,
        rows: &mut S,
        problems: &mut Problems,
    ) {
        let ascii = marks.find(&text[from..], from, self.format.delimiter);
        // in a damaged file most lines may be none
        rows.expect(marks.lines.len().min(text.len() / 32), self.plan.width());
        self.parse_lines(text, offset, line, stop, marks, ascii, rows, problems);
    }

    #[inline(always)]
    fn parse_lines<S: Sink>(
        &self,
        text: &[u8],
        offset: u64,
        mut line: u64,
        stop: bool,
        marks: &Marks,
        ascii: bool,
        rows: &mut S,
        problems: &mut Problems,
    ) {
        let longest = Self::longest(&self.format);
        let wanted = self.plan.names.len();
        let any = !self.comment.is_empty() || !self.format.criteo;
        let mut first = 0;
        for &last in &marks.lines {
            let marks = &marks.places[first..=last as usize];
            first = last as usize;
            let (start, line_end) = (marks[0].wrapping_add(1) as usize, marks[marks.len() - 1] as usize);
            let end = line_end - usize::from(line_end > start && text[line_end - 1] == b'\r');
            let whole = &text[start..end];
            let found = marks.len() - 1;
            let result = if any && self.skipped(whole) {
                Ok(true)
            } else if whole.len() > longest {
                Err(RowProblem::TooLong { limit: longest })
            } else if whole.is_empty() {
                Err(RowProblem::EmptyLine { expected: self.plan.expected.clone() })
            } else if !ascii && let Err(e) = std::str::from_utf8(whole) {
                let bad = start + e.valid_up_to();
                let field = marks[1..found].iter().filter(|&&m| (m as usize) < bad).count();
                Err(self.not_utf8(found, field, offset + bad as u64, text[bad]))
            } else if found != wanted {
                Err(self.count(found))
            } else if end < line_end {
                let range = |i: usize| (marks[i].wrapping_add(1), marks[i + 1].min(end as u32));
                self.plan.push(text, line, &Ranges(range), rows)
            } else {
                let range = |i: usize| (marks[i].wrapping_add(1), marks[i + 1]);
                self.plan.push(text, line, &Ranges(range), rows)
            };
            if let Err(problem) = result {
                problems.push((line, problem));
                if stop {
                    return;
                }
            }
            line += 1;
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
                fields.push((begin as u32, (at - usize::from(cut)) as u32));
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

thread_local! {
    /// Kept from block to block: memory that is new has to be cleared first.
    static SCRATCH: RefCell<Marks> = RefCell::default();
}

/// Where the fields of a block's lines are.
#[derive(Default)]
struct Marks {
    /// Places of delimiters and line breaks; in front of the first line stands one as well, so that field i lies
    /// between marks i and i + 1. What follows the last line is left over.
    places: Vec<u32>,
    /// Of each line break its index there; a last line without one has one at the text's end.
    lines: Vec<u32>,
}

impl Marks {
    /// Finds them in a text that stands at `base` of its block; whether all bytes are ASCII.
    #[inline(always)]
    fn find(&mut self, text: &[u8], base: usize, delimiter: u8) -> bool {
        let places = &mut self.places;
        let lines = &mut self.lines;
        lines.clear();
        places.resize(places.len().max(256), 0);
        places[0] = (base as u32).wrapping_sub(1);
        let mut n = 1;
        let mut high = 0u64;
        let mut at = base as u32;
        let blocks = text.chunks_exact(64);
        let rest = blocks.remainder();
        let mut last = [0; 64];
        last[..rest.len()].copy_from_slice(rest);
        // zeros are no delimiters, unless a NUL is one
        let whole = text.len() / 64 * 64;
        for (i, block) in blocks.chain(std::iter::once(&last[..])).enumerate() {
            let mut m = masks(block, delimiter);
            if i * 64 >= whole && rest.len() < 64 {
                let real = (1u64 << rest.len()) - 1;
                m = Masks { found: m.found & real, breaks: m.breaks & real, high: m.high & real };
            }
            high |= m.high;
            if places.len() < n + 64 {
                places.resize(2 * places.len(), 0);
            }
            let count = m.found.count_ones() as usize;
            // eight by eight, as no processor foresees how many there are
            let mut bits = m.found;
            for place in &mut places[n..n + 8] {
                *place = at + bits.trailing_zeros();
                bits &= bits.wrapping_sub(1);
            }
            if count > 8 {
                for place in &mut places[n + 8..n + 16] {
                    *place = at + bits.trailing_zeros();
                    bits &= bits.wrapping_sub(1);
                }
            }
            if count > 16 {
                for place in &mut places[n + 16..n + count] {
                    *place = at + bits.trailing_zeros();
                    bits &= bits.wrapping_sub(1);
                }
            }
            let mut breaks = m.breaks;
            while breaks != 0 {
                let before = m.found & (breaks & breaks.wrapping_neg()).wrapping_sub(1);
                lines.push(n as u32 + before.count_ones());
                breaks &= breaks - 1;
            }
            n += count;
            at = at.wrapping_add(64);
        }
        if !text.is_empty() && text.last() != Some(&b'\n') {
            if places.len() <= n {
                places.push(0);
            }
            places[n] = (base + text.len()) as u32;
            lines.push(n as u32);
        }
        high == 0
    }
}

/// One bit a byte of a block of 64.
struct Masks {
    /// Delimiters and line breaks.
    found: u64,
    /// Line breaks.
    breaks: u64,
    /// Bytes above 127.
    high: u64,
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn masks(block: &[u8], delimiter: u8) -> Masks {
    // SAFETY: SSE2 is part of every x86-64.
    unsafe { masks_sse2(block, delimiter) }
}

/// Sixteen bytes at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")]
#[inline]
fn masks_sse2(block: &[u8], delimiter: u8) -> Masks {
    use std::arch::x86_64::{_mm_cmpeq_epi8, _mm_movemask_epi8, _mm_set_epi64x, _mm_set1_epi8};
    let mut m = Masks { found: 0, breaks: 0, high: 0 };
    let (d, n) = (_mm_set1_epi8(delimiter as i8), _mm_set1_epi8(b'\n' as i8));
    for (i, p) in block.chunks_exact(16).enumerate() {
        let low = i64::from_le_bytes([p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]]);
        let high = i64::from_le_bytes([p[8], p[9], p[10], p[11], p[12], p[13], p[14], p[15]]);
        let x = _mm_set_epi64x(high, low);
        let breaks = _mm_movemask_epi8(_mm_cmpeq_epi8(x, n)) as u64;
        let found = _mm_movemask_epi8(_mm_cmpeq_epi8(x, d)) as u64 | breaks;
        m.found |= found << (16 * i);
        m.breaks |= breaks << (16 * i);
        m.high |= (_mm_movemask_epi8(x) as u64) << (16 * i);
    }
    m
}

#[cfg(not(target_arch = "x86_64"))]
use masks_of_words as masks;

/// Eight bytes at a time.
#[cfg(any(test, not(target_arch = "x86_64")))]
#[inline]
fn masks_of_words(block: &[u8], delimiter: u8) -> Masks {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    let (d, n) = (u64::from_ne_bytes([delimiter; 8]), u64::from_ne_bytes([b'\n'; 8]));
    // the top bit of each byte that is zero, exactly (Mycroft's test without its false positives)
    let zero = |x: u64| !(((x & LOW) + LOW) | x | LOW);
    // the top bits of eight bytes as eight bits
    let gather = |x: u64| ((x >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56) & 0xff;
    let mut m = Masks { found: 0, breaks: 0, high: 0 };
    for (i, p) in block.chunks_exact(8).enumerate() {
        let x = u64::from_le_bytes([p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]]);
        let breaks = gather(zero(x ^ n)) << (8 * i);
        m.found |= gather(zero(x ^ d)) << (8 * i) | breaks;
        m.breaks |= breaks;
        m.high |= gather(x & !LOW) << (8 * i);
    }
    m
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
    use crate::data::rows::RawRows;
    use crate::data::schema::{CategoricalColumn, Encoding, Schema};
    use proptest::prelude::*;

    fn parser(columns: usize, delimiter: u8, quote: Option<u8>) -> Parser {
        let encoding = Encoding::Vocabulary { min_count: 1, max_size: None };
        let names: Vec<String> = (0..columns).map(|i| format!("c{i}")).collect();
        let categorical = names.iter().map(|n| CategoricalColumn::single(n, encoding)).collect();
        let schema = Schema { categorical, ..Schema::default() };
        let plan = Plan::new(&schema, names, LabelLayout::Absent, &Default::default()).unwrap();
        let format = Delimited { delimiter, quote, header: Some(false), criteo: false };
        Parser { format, plan, comment: b"#".to_vec() }
    }

    fn parse(p: &Parser, text: &[u8]) -> (Vec<Vec<Vec<u8>>>, Vec<u64>, Problems) {
        let block = Block { text: text.to_vec(), offset: 0, first_line: 1 };
        let (rows, problems) = p.parse(block, 0, 1, false, RawRows::default());
        let c = p.plan.names.len();
        let values =
            (0..rows.len()).map(|r| (0..c).map(|j| rows.field(r * c + j).to_vec()).collect()).collect();
        (values, rows.lines, problems)
    }

    proptest! {
        #[test]
        fn marks_are_where_the_bytes_are(text in prop::collection::vec(prop::sample::select(b"\t\n\x08\x0b\x89\x8a\x00ab".to_vec()), 0..300)) {
            let mut marks = Marks::default();
            let ascii = marks.find(&text, 3, b'\t');
            let mut want: Vec<usize> = (0..text.len()).filter(|&i| matches!(text[i], b'\t' | b'\n')).collect();
            let mut breaks: Vec<usize> = (0..text.len()).filter(|&i| text[i] == b'\n').collect();
            if !text.is_empty() && text.last() != Some(&b'\n') {
                want.push(text.len());
                breaks.push(text.len());
            }
            let places: Vec<usize> = marks.places[1..=want.len()].iter().map(|&p| p as usize - 3).collect();
            prop_assert_eq!(places, want);
            let lines: Vec<usize> = marks.lines.iter().map(|&l| marks.places[l as usize] as usize - 3).collect();
            prop_assert_eq!(lines, breaks);
            prop_assert_eq!(marks.places[0], 2);
            prop_assert_eq!(ascii, text.is_ascii());
            for block in text.chunks_exact(64) {
                let (a, b) = (masks(block, b'\t'), masks_of_words(block, b'\t'));
                prop_assert_eq!((a.found, a.breaks, a.high), (b.found, b.breaks, b.high));
            }
        }

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
        let format = Delimited { delimiter: b',', quote: Some(b'"'), header: None, criteo: false };
        let records = sample(b"\xef\xbb\xbf# c\na,\"b\nc\"\n1,2\n", &format, b"#", 10);
        assert_eq!(records.len(), 2);
        assert_eq!((records[0].values.clone(), records[0].line), (vec![b"a".to_vec(), b"b\nc".to_vec()], 2));
        assert_eq!((records[0].end, records[1].line), (12, 4));
    }
}
