//! How the columns of one file serve a schema, and one row's fields as a row.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use xxhash_rust::xxh3::xxh3_64;

use super::columns::{BATCH, Batch};
use super::error::{RowProblem, quoted};
use super::label::LabelRule;
use super::number::{beyond_range, number_advice, parse_number, plain_label, spaced_number};
use super::rows::{RawRows, UNLABELLED};
use super::schema::Schema;
use super::split::{Part, Split};
use super::value::Form;

/// Where a file's labels are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LabelLayout {
    /// A column, filled.
    Labelled,
    /// A column, empty in every row.
    Empty,
    /// No column.
    Absent,
}

/// What each field of a file's rows is for.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Names of the file's columns.
    pub names: Vec<String>,
    /// Fields of a row and what they are, for messages.
    pub expected: String,
    /// (field, numeric column)
    numeric: Vec<(usize, usize)>,
    /// (field, categorical column)
    single: Vec<(usize, usize)>,
    /// (field, categorical column, separator)
    lists: Vec<(usize, usize, char)>,
    label: Option<usize>,
    pub label_name: String,
    rule: Option<LabelRule>,
    pub layout: LabelLayout,
    /// Whether "0" and "1" are what they seem.
    plain_labels: bool,
    /// Labels may be −1 for 0 (libsvm).
    signed: bool,
    weight: Option<usize>,
    group: Option<usize>,
    passed: Vec<usize>,
    key: Option<usize>,
    split: Option<(Split, Part)>,
    /// Numeric and categorical columns of the schema.
    width: (usize, usize),
    na: Vec<Vec<u8>>,
    /// Further ones of each numeric and each categorical column.
    own_na: [Vec<Vec<Vec<u8>>>; 2],
    /// Whether any column has some.
    any_na: bool,
    /// Fields whose values are texts, also where a columnar file has numbers.
    #[cfg_attr(target_arch = "wasm32", allow(dead_code, reason = "a page has no columnar files"))]
    texts: Vec<bool>,
    /// Whole numbers only (Criteo), for messages.
    integer: bool,
    /// Number of the file in its source.
    pub file: usize,
}

/// Takes rows, one field after the other: as they are ([`RawRows`]), or encoded on the way.
pub(crate) trait Sink {
    /// So many rows may come.
    fn expect(&mut self, rows: usize, width: (usize, usize));
    /// So many rows, at most [`BATCH`], of so many numeric and categorical columns begin.
    fn begin(&mut self, rows: usize, width: (usize, usize));
    /// They are no rows after all; only numbers have been given.
    fn cancel(&mut self, rows: usize, width: (usize, usize));
    /// Numeric column `k` of each of the rows; NaN is missing.
    fn numbers(&mut self, k: usize, values: &[f64]);
    /// Categorical column `j` of each of the rows; an empty range is missing.
    fn singles(&mut self, j: usize, ranges: &[(u32, u32)], text: &[u8]);
    /// List column `j` of the row, which is one.
    fn list(&mut self, j: usize, items: &[(u32, u32)], text: &[u8]);
    /// The next passed column.
    fn pass(&mut self, range: (u32, u32), text: &[u8]);
    /// The next of the rows is whole.
    fn end(&mut self, label: u8, weight: Option<f32>, group: Option<u64>, line: u64);
    /// All rows of the block, whose bytes are `text`, have been given; what is not kept of it comes back.
    fn finish(&mut self, text: Vec<u8>) -> Vec<u8>;
    /// Rows so far.
    fn rows(&self) -> usize;
}

impl Sink for RawRows {
    fn expect(&mut self, rows: usize, (n, c): (usize, usize)) {
        self.numeric.reserve(rows * n);
        self.fields.reserve(rows * c);
        self.labels.reserve(rows);
        self.lines.reserve(rows);
    }

    #[inline]
    fn begin(&mut self, rows: usize, (n, c): (usize, usize)) {
        self.row = (self.numeric.len(), self.fields.len());
        self.width = (n, c);
        self.numeric.resize(self.numeric.len() + rows * n, f64::NAN);
        self.fields.resize(self.fields.len() + rows * c, (0, 0));
    }

    fn cancel(&mut self, rows: usize, (n, c): (usize, usize)) {
        self.numeric.truncate(self.numeric.len() - rows * n);
        self.fields.truncate(self.fields.len() - rows * c);
    }

    #[inline(always)]
    fn numbers(&mut self, k: usize, values: &[f64]) {
        for (row, value) in self.numeric[self.row.0..].chunks_exact_mut(self.width.0).zip(values) {
            row[k] = *value;
        }
    }

    #[inline(always)]
    fn singles(&mut self, j: usize, ranges: &[(u32, u32)], _: &[u8]) {
        for (row, range) in self.fields[self.row.1..].chunks_exact_mut(self.width.1).zip(ranges) {
            row[j] = *range;
        }
    }

    fn list(&mut self, j: usize, items: &[(u32, u32)], text: &[u8]) {
        let begin = self.items.len() as u32;
        self.items.extend_from_slice(items);
        self.singles(j, &[(begin, self.items.len() as u32)], text);
    }

    fn pass(&mut self, range: (u32, u32), _: &[u8]) {
        self.passed.push(range);
    }

    #[inline]
    fn end(&mut self, label: u8, weight: Option<f32>, group: Option<u64>, line: u64) {
        self.labels.push(label);
        self.weights.extend(weight);
        self.groups.extend(group);
        self.lines.push(line);
    }

    fn finish(&mut self, text: Vec<u8>) -> Vec<u8> {
        std::mem::replace(&mut self.text, text)
    }

    fn rows(&self) -> usize {
        self.len()
    }
}

/// What a field is used as; it may be several things.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(target_arch = "wasm32", allow(dead_code))]
pub(crate) struct Uses {
    pub number: bool,
    pub text: bool,
    pub list: bool,
}

/// The fields of one row.
pub(crate) trait Fields {
    /// Where field `i` lies in the row's text; an empty range is a missing value.
    fn range(&self, i: usize) -> (u32, u32);

    /// The number of field `i` of the row's `text`; NaN where it is missing.
    #[inline(always)]
    fn number(&self, i: usize, text: &[u8]) -> Option<f64> {
        let (start, end) = self.range(i);
        parse_number(&text[start as usize..end as usize])
    }

    /// The values of field `i`, where the format has lists of its own.
    #[inline]
    fn items(&self, _: usize) -> Option<&[(u32, u32)]> {
        None
    }
}

/// Fields of text.
pub(crate) struct Ranges<F>(pub F);

impl<F: Fn(usize) -> (u32, u32)> Fields for Ranges<F> {
    #[inline(always)]
    fn range(&self, i: usize) -> (u32, u32) {
        self.0(i)
    }
}

/// What a plan needs besides schema and names.
#[derive(Clone, Debug, Default)]
pub(crate) struct PlanOptions<'a> {
    pub split: Option<(Split, Part)>,
    pub passed: &'a [String],
    pub na: &'a [String],
    pub integer: bool,
    pub signed: bool,
    pub file: usize,
}

impl Plan {
    /// A plan for a file with these columns, or what it lacks, in words.
    pub fn new(
        schema: &Schema,
        names: Vec<String>,
        layout: LabelLayout,
        o: &PlanOptions<'_>,
    ) -> Result<Plan, String> {
        let mut wanted = schema.needed();
        let label = (layout != LabelLayout::Absent).then_some(&schema.label.name[..]);
        let key = o.split.as_ref().and_then(|(s, _)| s.column());
        wanted.extend(label.into_iter().chain(key).chain(o.passed.iter().map(String::as_str)));
        if let Some(problem) = missing_columns(&names, &wanted) {
            return Err(problem);
        }
        // the first and second place of each name: tables may have very many columns
        let mut places: HashMap<&str, (usize, Option<usize>)> = HashMap::new();
        for (i, name) in names.iter().enumerate() {
            places.entry(name).and_modify(|p| p.1 = p.1.or(Some(i))).or_insert((i, None));
        }
        let find = |name: &str| match places.get(name) {
            Some(&(i, None)) => Ok(i),
            Some(&(i, Some(k))) => {
                Err(format!("column {name:?} stands twice, as number {} and {}; rename one", i + 1, k + 1))
            }
            None => Err(format!("has no column {name:?}; it has {}", listed(&names))),
        };
        let numeric = schema.numeric.iter().enumerate();
        let numeric = numeric.map(|(k, c)| Ok((find(c.from.as_deref().unwrap_or(&c.name))?, k)));
        let numeric = numeric.collect::<Result<Vec<_>, String>>()?;
        let (mut single, mut lists) = (vec![], vec![]);
        for (j, c) in schema.categorical.iter().enumerate() {
            let field = find(c.from.as_deref().unwrap_or(&c.name))?;
            match &c.list {
                Some(list) => lists.push((field, j, list.separator)),
                None => single.push((field, j)),
            }
        }
        let label = match layout {
            LabelLayout::Absent => None,
            _ => Some(find(&schema.label.name)?),
        };
        let optional = |name: Option<&str>| name.map(find).transpose();
        let bytes = |texts: &[String]| texts.iter().map(|n| n.clone().into_bytes()).collect::<Vec<_>>();
        let own_na = [
            schema.numeric.iter().map(|c| bytes(&c.na)).collect::<Vec<_>>(),
            schema.categorical.iter().map(|c| bytes(&c.na)).collect(),
        ];
        let mut texts = vec![false; names.len()];
        for (field, j) in single.iter().copied().chain(lists.iter().map(|l| (l.0, l.1))) {
            texts[field] |= schema.categorical[j].form == Some(Form::Text);
        }
        let passed = o.passed.iter().map(|n| find(n)).collect::<Result<_, _>>()?;
        let (weight, group) = (optional(schema.weight.as_deref())?, optional(schema.group.as_deref())?);
        let key = optional(key)?;
        drop(places);
        Ok(Plan {
            expected: format!("{} ({})", names.len(), listed(&names)),
            numeric,
            single,
            lists,
            label,
            label_name: schema.label.name.clone(),
            rule: schema.label.positive.clone(),
            layout,
            plain_labels: layout == LabelLayout::Labelled
                && schema.label.positive.is_none()
                && o.na.is_empty(),
            signed: o.signed,
            weight,
            group,
            passed,
            key,
            split: o.split.clone(),
            width: (schema.numeric.len(), schema.categorical.len()),
            any_na: !o.na.is_empty() || own_na.iter().flatten().any(|n| !n.is_empty()),
            na: bytes(o.na),
            texts,
            own_na,
            integer: o.integer,
            file: o.file,
            names,
        })
    }

    /// Numeric and categorical columns of the schema.
    pub fn width(&self) -> (usize, usize) {
        self.width
    }

    /// Whether a field is text for an output and nothing else that needs its text.
    #[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
    pub fn only_passed(&self, i: usize) -> bool {
        !self.single.iter().any(|s| s.0 == i) && ![self.label, self.group, self.key].contains(&Some(i))
    }

    /// What a field is used as.
    #[cfg_attr(target_arch = "wasm32", allow(dead_code))]
    pub fn uses(&self, i: usize) -> Uses {
        let number = self.numeric.iter().any(|n| n.0 == i) || self.weight == Some(i);
        let list = self.lists.iter().any(|l| l.0 == i);
        let text = self.single.iter().any(|s| s.0 == i)
            || [self.label, self.group, self.key].contains(&Some(i))
            || self.passed.contains(&i);
        Uses { number, text, list }
    }

    /// Whether a columnar file's numbers are to be written as whole numbers are, in a column of texts.
    #[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
    pub fn of_texts(&self, i: usize) -> bool {
        self.texts[i]
    }

    /// Whether texts, perhaps numbers, mean that a value is missing.
    #[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
    pub fn has_na(&self) -> bool {
        self.any_na
    }

    fn missing(&self, field: &[u8]) -> bool {
        field.is_empty() || self.na.iter().any(|n| n == field)
    }

    fn missing_in(&self, own: &[Vec<u8>], field: &[u8]) -> bool {
        self.missing(field) || own.iter().any(|n| n == field)
    }

    /// The label of a field's text.
    #[inline(always)]
    fn label_of(&self, field: &[u8]) -> Result<u8, RowProblem> {
        match field {
            [digit @ (b'0' | b'1')] if self.plain_labels => Ok(digit - b'0'),
            _ => self.label_of_other(field),
        }
    }

    #[inline(never)]
    fn label_of_other(&self, field: &[u8]) -> Result<u8, RowProblem> {
        let missing = self.missing(field);
        if self.layout != LabelLayout::Labelled {
            return match missing {
                true => Ok(UNLABELLED),
                false => Err(RowProblem::MixedLabels {
                    column: self.label_name.clone(),
                    found: "has a label",
                    most: "most rows of the file have none",
                }),
            };
        }
        if missing {
            return Err(RowProblem::NoLabel { column: self.label_name.clone() });
        }
        if let ([digit @ (b'0' | b'1')], None) = (field, &self.rule) {
            return Ok(digit - b'0');
        }
        let bad = |expected: String| {
            Err(RowProblem::BadLabel { column: self.label_name.clone(), value: quoted(field), expected })
        };
        if let Some(rule) = &self.rule {
            let wrong = || format!("what its rule \"{}\" can compare; correct the value", rule.text());
            return rule.of(field).map_or_else(|| bad(wrong()), |positive| Ok(u8::from(positive)));
        }
        let plain = if self.integer { Cow::Borrowed(field) } else { plain_label(field) };
        match &*plain {
            b"0" => Ok(0),
            b"1" => Ok(1),
            b"-1" if self.signed => Ok(0),
            b"+1" if self.signed => Ok(1),
            _ if self.integer => bad("0 or 1; correct the value".into()),
            _ => bad("0 or 1; correct the value, or say in the schema which values are positive (positive = \">= 4\")".into()),
        }
    }

    /// Whether rows are told apart by [`Plan::belongs`].
    pub fn splits(&self) -> bool {
        self.split.is_some()
    }

    /// Whether a row is of the part of the split that is read.
    #[inline]
    pub fn belongs(&self, text: &[u8], line: u64, fields: &impl Fields) -> Result<bool, RowProblem> {
        let Some((split, part)) = &self.split else { return Ok(true) };
        let key = self.key.map_or(&b""[..], |k| {
            let (start, end) = fields.range(k);
            &text[start as usize..end as usize]
        });
        split.part(self.file, line, key).map(|p| p == *part).ok_or_else(|| {
            let column = self.key.map_or_else(String::new, |k| self.names[k].clone());
            RowProblem::BadTime { column, value: quoted(key) }
        })
    }

    /// Gives a batch of rows to `sink`, column by column; `false`, and the sink is as before, if that cannot be done:
    /// then the rows must go through [`Plan::push`], which says what is wrong with which.
    #[inline(always)]
    pub fn push_batch<S: Sink>(&self, batch: &Batch<'_>, sink: &mut S) -> bool {
        let (n, text) = (batch.len(), batch.text());
        // a text that means "missing" may look like a number: not for numbers read at once
        let numbers = |na: &Vec<u8>| !na.is_empty() && parse_number(na).is_some();
        if !self.lists.is_empty()
            || (self.any_na && self.na.iter().chain(self.own_na[0].iter().flatten()).any(numbers))
        {
            return false;
        }
        let mut labels = [UNLABELLED; BATCH];
        let mut weights = [None; BATCH];
        if let Some(i) = self.label {
            for (row, label) in labels[..n].iter_mut().enumerate() {
                match self.label_of(batch.field(row, i)) {
                    Ok(l) => *label = l,
                    Err(_) => return false,
                }
            }
        }
        if let Some(i) = self.weight {
            for (row, weight) in weights[..n].iter_mut().enumerate() {
                match parse_number(batch.field(row, i)) {
                    Some(w) if w >= 0.0 => *weight = Some(w as f32),
                    _ => return false,
                }
            }
        }
        sink.begin(n, self.width);
        let mut values = [0.0; BATCH];
        for &(i, k) in &self.numeric {
            if !batch.numbers(i, &mut values, |field| self.missing_in(&self.own_na[0][k], field)) {
                sink.cancel(n, self.width);
                return false;
            }
            sink.numbers(k, &values[..n]);
        }
        for &(i, j) in &self.single {
            let mut ranges = batch.ranges(i);
            if self.any_na {
                for range in &mut ranges[..n] {
                    if self.missing_in(&self.own_na[1][j], &text[range.0 as usize..range.1 as usize]) {
                        *range = (0, 0);
                    }
                }
            }
            sink.singles(j, &ranges[..n], text);
        }
        for row in 0..n {
            self.passed.iter().for_each(|&i| sink.pass(batch.range(row, i), text));
            let group = self.group.map(|i| xxh3_64(batch.field(row, i)));
            sink.end(labels[row], weights[row], group, batch.line(row));
        }
        true
    }

    /// Gives a row whose fields lie in `text` to `sink`; `false` if it belongs to another part of the split. On error,
    /// and then, the sink is as before.
    #[inline(always)]
    pub fn push<S: Sink>(
        &self,
        text: &[u8],
        line: u64,
        fields: &impl Fields,
        sink: &mut S,
    ) -> Result<bool, RowProblem> {
        if !self.belongs(text, line, fields)? {
            return Ok(false);
        }
        let field = |i: usize| {
            let (start, end) = fields.range(i);
            &text[start as usize..end as usize]
        };
        let label = match self.label {
            Some(i) => self.label_of(field(i))?,
            None => UNLABELLED,
        };
        let number = |i: usize, own: &[Vec<u8>]| match fields.number(i, text) {
            // a text that means "missing" may look like a number; a number of a columnar file has no text
            Some(_) if self.any_na && !field(i).is_empty() && self.missing_in(own, field(i)) => {
                Some(f64::NAN)
            }
            None if !self.integer => spaced_number(field(i)),
            other => other,
        };
        let weight = match self.weight {
            Some(i) => match number(i, &[]) {
                Some(w) if w >= 0.0 => Some(w as f32),
                _ => {
                    return Err(RowProblem::BadWeight {
                        column: self.names[i].clone(),
                        value: quoted(field(i)),
                    });
                }
            },
            None => None,
        };
        sink.begin(1, self.width);
        for &(i, k) in &self.numeric {
            match number(i, &self.own_na[0][k]) {
                Some(value) => sink.numbers(k, &[value]),
                None if self.missing_in(&self.own_na[0][k], field(i)) => sink.numbers(k, &[f64::NAN]),
                None => {
                    sink.cancel(1, self.width);
                    let (column, value) = (self.names[i].clone(), quoted(field(i)));
                    if !self.integer && beyond_range(field(i)) {
                        return Err(RowProblem::TooLarge { column, value });
                    }
                    let advice = number_advice(field(i));
                    return Err(RowProblem::BadNumber { column, value, integer: self.integer, advice });
                }
            }
        }
        if !self.any_na {
            for &(i, j) in &self.single {
                sink.singles(j, &[fields.range(i)], text);
            }
        } else {
            for &(i, j) in &self.single {
                let range =
                    if self.missing_in(&self.own_na[1][j], field(i)) { (0, 0) } else { fields.range(i) };
                sink.singles(j, &[range], text);
            }
        }
        for &(i, j, separator) in &self.lists {
            match fields.items(i) {
                Some(items) => sink.list(j, items, text),
                None => {
                    let mut items = vec![];
                    if !self.missing_in(&self.own_na[1][j], field(i)) {
                        self.split_list(field(i), fields.range(i).0, (separator, j), &mut items);
                    }
                    sink.list(j, &items, text);
                }
            }
        }
        self.passed.iter().for_each(|&i| sink.pass(fields.range(i), text));
        sink.end(label, weight, self.group.map(|i| xxh3_64(field(i))), line);
        Ok(true)
    }

    /// The non-empty parts of a cell that starts at `start`.
    fn split_list(
        &self,
        cell: &[u8],
        start: u32,
        (separator, j): (char, usize),
        items: &mut Vec<(u32, u32)>,
    ) {
        let mut buffer = [0; 4];
        let separator = separator.encode_utf8(&mut buffer).as_bytes();
        let mut at = 0;
        while at <= cell.len() {
            let end = cell[at..]
                .windows(separator.len())
                .position(|w| w == separator)
                .map_or(cell.len(), |n| at + n);
            if end > at && !self.missing_in(&self.own_na[1][j], &cell[at..end]) {
                items.push((start + at as u32, start + end as u32));
            }
            at = end + separator.len();
        }
    }
}

/// What of some columns a file with these names lacks, in words: what is missing, what is there, the nearest spelling.
pub(crate) fn missing_columns(names: &[String], wanted: &[&str]) -> Option<String> {
    let there: HashSet<&str> = names.iter().map(String::as_str).collect();
    let mut said = HashSet::new();
    let missing: Vec<&str> =
        wanted.iter().copied().filter(|n| !there.contains(n) && said.insert(*n)).collect();
    let (first, rest) = missing.split_first()?;
    let shown = |n: &str| quoted(n.as_bytes());
    let all =
        std::iter::once(first).chain(rest.iter().take(4)).map(|n| shown(n)).collect::<Vec<_>>().join(", ");
    let more = if missing.len() > 5 { format!(" and {} more", missing.len() - 5) } else { String::new() };
    let wanted: HashSet<&str> = wanted.iter().copied().collect();
    let free = || names.iter().map(String::as_str).filter(|n| !wanted.contains(n)).take(1000);
    let near = missing.iter().take(3).filter_map(|m| Some((m, crate::text::nearest_name(m, free())?)));
    let near: Vec<String> = near
        .map(|(m, n)| match missing.len() {
            1 => format!("did you mean {}?", shown(n)),
            _ => format!("{} may be {}", shown(n), shown(m)),
        })
        .collect();
    let near = if near.is_empty() { String::new() } else { format!("; {}", near.join(", ")) };
    let word = if missing.len() == 1 { "column" } else { "columns" };
    Some(format!("has no {word} {all}{more}; it has {}{near}", listed(names)))
}

/// Names for a message: all of a few, the first and last of many.
pub(crate) fn listed(names: &[String]) -> String {
    let short = |n: &String| quoted(n.as_bytes()).trim_matches('"').to_string();
    match names {
        [.., last] if names.len() > 12 => {
            let head: Vec<String> = names[..6].iter().map(short).collect();
            format!("{}, … {}", head.join(", "), short(last))
        }
        _ => names.iter().map(short).collect::<Vec<_>>().join(", "),
    }
}
