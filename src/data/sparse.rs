//! libsvm (`label index:value …`) and libffm (`label field:index:value …`).
//!
//! A schema names what it takes from such a line:
//!
//! | column | libsvm | libffm |
//! |---|---|---|
//! | numeric `17` | the value of index 17, missing where the line has none | the value of field 17 |
//! | categorical `#3` | the index of the third token, whose value must be 1 | |
//! | categorical `17` | | the index of field 17, whose value must be 1 |
//! | list `features` | the indices of all tokens, whose values must be 1 | |
//! | list `17` | | the indices of field 17 |
//!
//! `qid:7` is the token of a column `qid`. What stands behind a `#` is a comment.

use std::collections::HashMap;

use super::blocks::Block;
use super::delimited::Problems;
use super::error::{RowProblem, quoted};
use super::plan::{LabelLayout, Plan, Ranges, Sink, Uses};
use super::schema::Schema;

/// The list column of a libsvm line's indices.
pub const FEATURES: &str = "features";

/// Whether most lines of a file that starts with `head` begin with a feature: they have no label.
pub(crate) fn unlabelled(head: &[u8]) -> bool {
    let lines = head.split(|&b| b == b'\n').filter(|l| !l.trim_ascii().is_empty() && !l.starts_with(b"#"));
    let first = |l: &[u8]| l.trim_ascii_start().split(|b| b.is_ascii_whitespace()).next().map(<[u8]>::to_vec);
    let (mut all, mut without) = (0, 0);
    for token in lines.take(200).filter_map(first) {
        all += 1;
        without += usize::from(token.contains(&b':'));
    }
    without * 2 > all
}

/// What parsing a block needs.
#[derive(Clone, Debug)]
pub(crate) struct SparseParser {
    /// Its names are the label's and what the schema takes.
    pub plan: Plan,
    /// libffm.
    fields: bool,
    /// By name, the plan's field.
    places: HashMap<Vec<u8>, usize>,
    separators: Vec<char>,
}

impl SparseParser {
    /// The columns that a schema takes from a line, the label first.
    pub fn names(schema: &Schema) -> Vec<String> {
        let needed = schema.needed().into_iter().map(String::from);
        std::iter::once(schema.label.name.clone()).chain(needed).collect()
    }

    /// A parser for a plan over [`SparseParser::names`].
    pub fn new(plan: Plan, schema: &Schema, fields: bool) -> SparseParser {
        let places = plan.names.iter().enumerate().skip(1);
        let places = places.map(|(i, n)| (n.clone().into_bytes(), i)).collect();
        let separator = |name: &String| {
            let list = schema.categorical.iter().find(|c| c.from.as_ref().unwrap_or(&c.name) == name);
            list.and_then(|c| Some(c.list.as_ref()?.separator)).unwrap_or('|')
        };
        let separators = plan.names.iter().map(separator).collect();
        SparseParser { plan, fields, places, separators }
    }

    /// Parses a block; with `stop`, up to its first bad row.
    pub fn parse<S: Sink>(&self, block: Block, stop: bool, mut rows: S) -> (S, Problems, Vec<u8>) {
        let mut problems = vec![];
        let mut text = block.text;
        let length = text.len();
        let (mut at, mut line) = (0, block.first_line);
        let mut lists: Vec<Vec<u8>> = vec![vec![]; self.plan.names.len()];
        while at < length {
            let end = text[at..length].iter().position(|&b| b == b'\n').map_or(length, |n| at + n);
            let cut = text[at..end]
                .iter()
                .position(|&b| b == b'#' && self.comment(&text[at..end]))
                .map_or(end, |n| at + n);
            let result = match std::str::from_utf8(&text[at..cut]) {
                Ok(s) if s.trim().is_empty() => Ok(true),
                Ok(_) => self.row(&mut text, at, cut, line, &mut lists, &mut rows),
                Err(e) => {
                    let bad = at + e.valid_up_to();
                    let offset = block.offset + bad as u64;
                    Err(RowProblem::NotUtf8 { column: "line".into(), offset, byte: text[bad] })
                }
            };
            if let Err(problem) = result {
                problems.push((line, problem));
                if stop {
                    break;
                }
            }
            (at, line) = (end + 1, line + 1);
        }
        let text = rows.finish(text);
        (rows, problems, text)
    }

    /// Whether the first `#` of a line begins a comment: at its start or behind a space.
    fn comment(&self, line: &[u8]) -> bool {
        let at = line.iter().position(|&b| b == b'#').unwrap_or(0);
        at == 0 || line[at - 1].is_ascii_whitespace()
    }

    fn row<S: Sink>(
        &self,
        text: &mut Vec<u8>,
        start: usize,
        end: usize,
        line: u64,
        lists: &mut [Vec<u8>],
        rows: &mut S,
    ) -> Result<bool, RowProblem> {
        let mut ranges = vec![(0u32, 0u32); self.plan.names.len()];
        lists.iter_mut().for_each(Vec::clear);
        let mut at = start;
        // without labels the first token is number 1 all the same
        let labelled = self.plan.layout == LabelLayout::Labelled;
        let mut token = usize::from(!labelled);
        let column = || self.plan.label_name.clone();
        let bad = |token: usize, value: &[u8], expected: String| {
            Err(RowProblem::BadToken { token, value: quoted(value), expected })
        };
        while at < end {
            if text[at].is_ascii_whitespace() {
                at += 1;
                continue;
            }
            let stop = text[at..end].iter().position(u8::is_ascii_whitespace).map_or(end, |n| at + n);
            let whole = &text[at..stop];
            if token == 0 {
                if whole.contains(&b':') {
                    return Err(RowProblem::NoLabel { column: column() });
                }
                ranges[0] = (at as u32, stop as u32);
            } else {
                // qid:7 has one colon in either format
                let colons: Vec<usize> =
                    (0..whole.len()).filter(|&i| whole[i] == b':').map(|i| at + i).collect();
                let (name, value) = match (self.fields, &colons[..]) {
                    (_, &[a]) if !self.fields || &text[at..a] == b"qid" => ((at, a), (a + 1, stop)),
                    (true, &[a, b]) => ((at, a), (b + 1, stop)),
                    (_, []) if !labelled && token == 1 => {
                        let (found, most) = ("has a label", "most rows of the file have none");
                        return Err(RowProblem::MixedLabels { column: column(), found, most });
                    }
                    _ => {
                        let form = if self.fields { "field:index:value" } else { "index:value" };
                        return bad(token, whole, format!("{form}; correct the token"));
                    }
                };
                let index = match (self.fields, &colons[..]) {
                    (true, &[a, b]) => (a + 1, b),
                    _ => name,
                };
                if name.0 == name.1 || index.0 == index.1 {
                    return bad(token, whole, "complete; it has no index".into());
                }
                let value_text = &text[value.0..value.1];
                let number = std::str::from_utf8(value_text).ok().and_then(|v| v.parse::<f64>().ok());
                if &text[name.0..name.1] != b"qid" && !number.is_some_and(f64::is_finite) {
                    return bad(token, whole, "a number behind its last colon; correct the value".into());
                }
                let position = format!("#{token}").into_bytes();
                let keys: [&[u8]; 3] = [
                    &text[name.0..name.1],
                    if self.fields { b"" } else { &position },
                    if self.fields { b"" } else { FEATURES.as_bytes() },
                ];
                for key in keys {
                    let Some(&i) = self.places.get(key) else { continue };
                    let Uses { number: as_number, list, .. } = self.plan.uses(i);
                    if as_number || key == b"qid" {
                        if ranges[i] != (0, 0) {
                            return bad(token, whole, "alone; its index stands twice in the line".into());
                        }
                        ranges[i] = (value.0 as u32, value.1 as u32);
                        continue;
                    }
                    if number != Some(1.0) {
                        let name = &self.plan.names[i];
                        return bad(
                            token,
                            whole,
                            format!(
                                "of value 1, as the categories of column {name} must be; make the column numeric, or write 1"
                            ),
                        );
                    }
                    if list {
                        let separator = self.separators[i];
                        let mut buffer = [0; 4];
                        let separator = separator.encode_utf8(&mut buffer).as_bytes();
                        let value = &text[index.0..index.1];
                        if value.windows(separator.len()).any(|w| w == separator) {
                            return bad(
                                token,
                                whole,
                                "without the column's separator; choose another separator".into(),
                            );
                        }
                        lists[i].extend_from_slice(value);
                        lists[i].extend_from_slice(separator);
                    } else {
                        if ranges[i] != (0, 0) {
                            return bad(
                                token,
                                whole,
                                "alone; its field stands twice in the line: make the column a list".into(),
                            );
                        }
                        ranges[i] = (index.0 as u32, index.1 as u32);
                    }
                }
            }
            token += 1;
            at = stop;
        }
        let list_text = text.len();
        for (range, list) in ranges.iter_mut().zip(lists.iter()).filter(|(_, l)| !l.is_empty()) {
            *range = (text.len() as u32, (text.len() + list.len()) as u32);
            text.extend_from_slice(list);
        }
        let kept = self.plan.push(text, line, &Ranges(|i| ranges[i]), rows);
        if !matches!(kept, Ok(true)) {
            text.truncate(list_text);
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::rows::RawRows;
    use crate::data::schema::{CategoricalColumn, Encoding, ListOptions, NumericColumn, Pooling, Transform};

    fn schema(numeric: &[&str], single: &[&str], list: &[&str]) -> Schema {
        let encoding = Encoding::Vocabulary { min_count: 1, max_size: None };
        let options = ListOptions { separator: '|', pooling: Pooling::Mean, max_length: 0 };
        let column = |n: &&str| CategoricalColumn::single(*n, encoding);
        Schema {
            numeric: numeric.iter().map(|n| NumericColumn::new(*n, Transform::None, false)).collect(),
            categorical: single
                .iter()
                .map(column)
                .chain(list.iter().map(|n| CategoricalColumn { list: Some(options.clone()), ..column(n) }))
                .collect(),
            ..Schema::default()
        }
    }

    fn parse(s: &Schema, fields: bool, text: &str) -> (RawRows, Problems) {
        parse_as(LabelLayout::Labelled, s, fields, text)
    }

    fn parse_as(layout: LabelLayout, s: &Schema, fields: bool, text: &str) -> (RawRows, Problems) {
        let o = crate::data::plan::PlanOptions { signed: true, ..Default::default() };
        let plan = Plan::new(s, SparseParser::names(s), layout, &o).unwrap();
        let block = Block { text: text.into(), offset: 0, first_line: 1 };
        let (rows, problems, _) = SparseParser::new(plan, s, fields).parse(block, false, RawRows::default());
        (rows, problems)
    }

    #[test]
    fn libsvm_gives_numbers_positions_and_lists() {
        let s = schema(&["3"], &["#1"], &["features"]);
        let (rows, problems) = parse(&s, false, "1 7:1 9:1\n-1 8:1 # note\n+1 3:1 10:1\n");
        assert!(problems.is_empty(), "{problems:?}");
        assert_eq!(rows.labels, [1, 0, 1]);
        assert!(rows.numeric[0].is_nan() && rows.numeric[2] == 1.0);
        let list = |r: usize| {
            rows.list(2 * r + 1).map(|v| String::from_utf8_lossy(v).into_owned()).collect::<Vec<_>>()
        };
        assert_eq!(
            (rows.field(0), list(0), list(1)),
            (&b"7"[..], vec!["7".into(), "9".into()], vec!["8".to_string()])
        );
        let (_, problems) = parse(&s, false, "1 7\n1 7:x\n2 7:1\n1:1 2:1\n1 7:0.5\n1 :1\n");
        let text: Vec<String> = problems.iter().map(|(l, p)| format!("{l}: {p}")).collect();
        for (t, want) in text.iter().zip([
            "1: token 1: \"7\" is not index:value",
            "2: token 1",
            "3: column label",
            "4: column label: no label",
            "5: token 1: \"7:0.5\" is not of value 1",
            "6: token 1",
        ]) {
            assert!(t.starts_with(want), "{t} / {want}");
        }
        assert_eq!(text.len(), 6);
    }

    /// The same lines without their labels give the same values, positions included.
    #[test]
    fn lines_without_labels_are_features_alone() {
        let s = schema(&["3"], &["#1"], &["features"]);
        let labelled = "1 7:1 9:1\n-1 8:1 # note\n\n+1 3:1 10:1\n";
        let bare = "7:1 9:1\n8:1 # note\n\n3:1 10:1\n";
        assert!(unlabelled(bare.as_bytes()) && !unlabelled(labelled.as_bytes()));
        let (want, _) = parse(&s, false, labelled);
        let (rows, problems) = parse_as(LabelLayout::Absent, &s, false, bare);
        assert!(problems.is_empty(), "{problems:?}");
        let values = |rows: &RawRows| {
            let list = |r: usize| rows.list(2 * r + 1).map(<[u8]>::to_vec).collect::<Vec<_>>();
            let row = |r: usize| (rows.numeric[r].to_bits(), rows.field(2 * r).to_vec(), list(r));
            (0..rows.len()).map(row).collect::<Vec<_>>()
        };
        assert_eq!(values(&rows), values(&want));
        let (_, problems) = parse_as(LabelLayout::Absent, &s, false, "7:1\n1 7:1\n7:1 9\n");
        let text: Vec<String> = problems.iter().map(|(l, p)| format!("{l}: {p}")).collect();
        assert!(text[0].starts_with("2: column label: has a label, but most rows"), "{text:?}");
        assert!(text[1].starts_with("3: token 2: \"9\" is not index:value"), "{text:?}");
    }

    #[test]
    fn libffm_gives_fields() {
        let s = Schema { group: Some("qid".into()), ..schema(&["0"], &["1"], &["2"]) };
        let (rows, problems) = parse(&s, true, "1 qid:4 0:0:0.25 1:77:1 2:5:1 2:6:1\n0 1:78:1\n");
        assert!(problems.is_empty(), "{problems:?}");
        assert_eq!((rows.numeric[0], rows.field(0), rows.list(1).len()), (0.25, &b"77"[..], 2));
        assert_eq!((rows.field(2), rows.list(3).len()), (&b"78"[..], 0));
        assert!(rows.groups.len() == 2 && rows.groups[0] != rows.groups[1]);
        let (_, problems) = parse(&s, true, "1 1:77:1 1:78:1\n1 0:1\n");
        assert!(problems[0].1.to_string().contains("stands twice") && problems.len() == 2, "{problems:?}");
    }
}
