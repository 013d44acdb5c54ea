//! Drift: what rows are like beside those that an encoder was fitted to, column by column.
//!
//! Rows are counted as they are encoded ([`Seen`]); [`compare`] sets the counts beside the training rows' [`Profile`].
//! A column is *far* where that can be neither chance nor the tail of its distribution: rows of one source, split at
//! random or by time, are quiet.

use serde::Serialize;

use super::encoder::FittedEncoder;
use super::error::quoted;
use super::profile::Profile;
use super::rows::RawRows;
use super::vocab::{ColumnEncoder, MISSING, OOV};

/// Texts kept of a column's unseen values.
const EXAMPLES: usize = 3;

/// Bytes kept of such a text.
const LONGEST: usize = 200;

/// Fewer values say nothing.
const FEWEST: u64 = 30;

/// Standard deviations that are no chance any more.
const SIGNIFICANT: f64 = 5.0;

/// How much more, or less, may be missing.
const MISSING_BEYOND: f64 = 0.25;

/// How much more may be unseen than is to be expected, where most is.
const UNSEEN_BEYOND: f64 = 0.3;

/// What is most.
const MOST: f64 = 0.5;

/// Counts of some rows, column by column.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    rows: u64,
    numeric: Vec<NumbersSeen>,
    /// Those before the rows under construction.
    before: Vec<NumbersSeen>,
    categorical: Vec<ValuesSeen>,
    /// Where 98 % of a numeric column's training values lie.
    ranges: Vec<(f64, f64)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct NumbersSeen {
    present: u64,
    outside: u64,
    example: Option<f64>,
}

#[derive(Clone, Debug, Default)]
struct ValuesSeen {
    missing: u64,
    values: u64,
    unseen: u64,
    examples: Vec<String>,
}

impl Seen {
    /// No rows yet; `None` if the encoder does not know what its training rows were like.
    pub fn new(encoder: &FittedEncoder) -> Option<Seen> {
        let profile = encoder.profile.as_ref()?;
        let all = (f64::NEG_INFINITY, f64::INFINITY);
        let ranges = profile.numeric.iter().map(|n| n.range.map_or(all, |r| (r.low, r.high)));
        Some(Seen {
            rows: 0,
            numeric: vec![NumbersSeen::default(); profile.numeric.len()],
            before: vec![],
            categorical: vec![ValuesSeen::default(); profile.categorical.len()],
            ranges: ranges.collect(),
        })
    }

    /// No rows, of the same encoder.
    pub(crate) fn cleared(&self) -> Seen {
        Seen {
            rows: 0,
            numeric: vec![NumbersSeen::default(); self.numeric.len()],
            before: vec![],
            categorical: vec![ValuesSeen::default(); self.categorical.len()],
            ranges: self.ranges.clone(),
        }
    }

    /// Rows so far.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Rows begin, whose numbers come first.
    pub(crate) fn begin(&mut self) {
        self.before.clone_from(&self.numeric);
    }

    /// They are no rows after all; only numbers have been given.
    pub(crate) fn cancel(&mut self) {
        self.numeric.copy_from_slice(&self.before);
    }

    /// A row is whole.
    #[inline(always)]
    pub(crate) fn end(&mut self) {
        self.rows += 1;
    }

    /// Values of numeric column `k`; NaN is missing.
    pub(crate) fn numbers(&mut self, k: usize, values: &[f64]) {
        let (low, high) = self.ranges[k];
        let seen = &mut self.numeric[k];
        let (mut present, mut outside) = (0, 0);
        for &value in values {
            present += u64::from(!value.is_nan());
            outside += u64::from(value < low || value > high);
        }
        seen.present += present;
        seen.outside += outside;
        if outside > 0 && seen.example.is_none() {
            seen.example = values.iter().copied().find(|v| *v < low || *v > high);
        }
    }

    /// Values of single-valued column `j`, and their ids.
    pub(crate) fn singles(&mut self, j: usize, ids: &[u32], ranges: &[(u32, u32)], text: &[u8]) {
        let (mut missing, mut unseen) = (0, 0);
        for &id in ids {
            missing += u64::from(id == MISSING);
            unseen += u64::from(id == OOV);
        }
        let seen = &mut self.categorical[j];
        seen.missing += missing;
        seen.values += ids.len() as u64 - missing;
        seen.unseen += unseen;
        if unseen > 0 {
            seen.keep(ids, ranges, text);
        }
    }

    /// The values of a row's cell of list column `j`, and their ids.
    pub(crate) fn list(&mut self, j: usize, ids: &[u32], items: &[(u32, u32)], text: &[u8]) {
        let seen = &mut self.categorical[j];
        seen.missing += u64::from(ids.is_empty());
        seen.values += ids.len() as u64;
        let unseen = ids.iter().filter(|&&id| id == OOV).count() as u64;
        seen.unseen += unseen;
        if unseen > 0 {
            seen.keep(ids, items, text);
        }
    }

    /// Counts rows that are not encoded.
    pub fn push(&mut self, encoder: &FittedEncoder, raw: &RawRows) {
        let (n, c) = (self.numeric.len(), self.categorical.len());
        for k in 0..n {
            let values: Vec<f64> = raw.numeric.iter().skip(k).step_by(n).copied().collect();
            self.numbers(k, &values);
        }
        for (j, owner) in encoder.schema.owners().into_iter().enumerate() {
            let encoder_of = &encoder.columns[owner];
            let id = |&(a, b): &(u32, u32)| encoder_of.id(&raw.text[a as usize..b as usize]);
            let cells = raw.fields.iter().skip(j).step_by(c);
            if encoder.schema.categorical[j].list.is_some() {
                for &(a, b) in cells {
                    let items = &raw.items[a as usize..b as usize];
                    let ids: Vec<u32> = items.iter().map(id).collect();
                    self.list(j, &ids, items, &raw.text);
                }
            } else {
                let ranges: Vec<(u32, u32)> = cells.copied().collect();
                let ids: Vec<u32> = ranges.iter().map(id).collect();
                self.singles(j, &ids, &ranges, &raw.text);
            }
        }
        self.rows += raw.len() as u64;
    }

    /// Adds the counts of rows that come after these.
    pub fn merge(&mut self, later: &Seen) {
        self.rows += later.rows;
        for (a, b) in self.numeric.iter_mut().zip(&later.numeric) {
            a.present += b.present;
            a.outside += b.outside;
            a.example = a.example.or(b.example);
        }
        for (a, b) in self.categorical.iter_mut().zip(&later.categorical) {
            a.missing += b.missing;
            a.values += b.values;
            a.unseen += b.unseen;
            b.examples.iter().for_each(|e| a.example(e.clone()));
        }
    }
}

impl ValuesSeen {
    #[cold]
    fn keep(&mut self, ids: &[u32], ranges: &[(u32, u32)], text: &[u8]) {
        if self.examples.len() >= EXAMPLES {
            return;
        }
        for (_, &(a, b)) in ids.iter().zip(ranges).filter(|(id, _)| **id == OOV) {
            let value = &text[a as usize..b as usize];
            self.example(String::from_utf8_lossy(&value[..value.len().min(LONGEST)]).into_owned());
        }
    }

    fn example(&mut self, text: String) {
        if self.examples.len() < EXAMPLES && !self.examples.contains(&text) {
            self.examples.push(text);
        }
    }
}

/// A share of the training rows and of the rows at hand, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Shares {
    /// Of the training rows.
    pub train: f64,
    /// Of these.
    pub here: f64,
}

/// Values that a column's vocabulary does not have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Unseen {
    /// Their share of the training rows' values: too seldom, or beyond `max_size`.
    pub train: f64,
    /// The share that is to be expected in further rows like those.
    pub expected: f64,
    /// Of these rows.
    pub here: f64,
}

/// A column, beside what it was in the training rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ColumnDrift {
    /// Its name.
    pub column: String,
    /// `numeric`, `categorical` or `list`.
    pub kind: &'static str,
    /// Rows without a value.
    pub missing: Shares,
    /// Values out of the vocabulary; absent where values are hashed, and of numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unseen: Option<Unseen>,
    /// Numbers outside `range`, in training 2 % at most; absent where training had no number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outside: Option<f64>,
    /// Where 98 % of the training rows' numbers lie.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<[f64; 2]>,
    /// The first unseen values, or the first number outside.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub examples: Vec<String>,
    /// Whether it is far from the training rows.
    pub far: bool,
    /// What to be told of that, without the column's name.
    #[serde(skip)]
    says: Vec<String>,
}

impl ColumnDrift {
    /// One line that says what is far from the training rows, and what to look at.
    pub fn warning(&self) -> Option<String> {
        self.far.then(|| format!("column {}: {}", self.column.escape_debug(), self.says.join("; ")))
    }

    fn says(&mut self, text: String) {
        self.far = true;
        self.says.push(text);
    }
}

/// All columns, numeric ones first; `None` if the encoder does not know what its training rows were like.
pub fn compare(encoder: &FittedEncoder, seen: &Seen) -> Option<Vec<ColumnDrift>> {
    let profile = encoder.profile.as_ref()?;
    let numbers = (0..profile.numeric.len()).map(|k| number_column(encoder, profile, seen, k));
    let values = (0..profile.categorical.len()).map(|j| value_column(encoder, profile, seen, j));
    Some(numbers.chain(values).collect())
}

fn number_column(encoder: &FittedEncoder, profile: &Profile, seen: &Seen, k: usize) -> ColumnDrift {
    let (was, is) = (&profile.numeric[k], &seen.numeric[k]);
    let name = encoder.schema.numeric[k].name.clone();
    let mut d = column(name, "numeric", (was.missing, encoder.rows), (seen.rows - is.present, seen.rows));
    d.examples.extend(is.example.map(|v| v.to_string()));
    if let Some(r) = &was.range {
        let outside = share(is.outside, is.present);
        (d.outside, d.range) = (Some(outside), Some([r.low, r.high]));
        if outside > MOST && certain((0.02, encoder.rows), (outside, is.present)) {
            let example = d.examples.first().map_or_else(String::new, |e| format!(", such as {e},"));
            d.says(format!(
                "{} of its numbers{example} lie outside {} to {}, where 98 % of training's do; look whether its unit or \
                 meaning is another",
                percent(outside),
                r.low,
                r.high
            ));
        }
    }
    d
}

fn value_column(encoder: &FittedEncoder, profile: &Profile, seen: &Seen, j: usize) -> ColumnDrift {
    let (was, is, c) = (&profile.categorical[j], &seen.categorical[j], &encoder.schema.categorical[j]);
    let kind = if c.list.is_some() { "list" } else { "categorical" };
    let mut d = column(c.name.clone(), kind, (was.missing, encoder.rows), (is.missing, seen.rows));
    d.examples.clone_from(&is.examples);
    if let Some(coverage) = &was.coverage {
        let of = |n: u64| share(n, coverage.values);
        let u = Unseen {
            train: of(coverage.unseen),
            expected: of(coverage.expected),
            here: share(is.unseen, is.values),
        };
        d.unseen = Some(u);
        let far = u.here > MOST && u.here > u.expected + UNSEEN_BEYOND;
        if far && certain((u.expected, coverage.values), (u.here, is.values)) {
            let known = known(&encoder.columns[encoder.schema.owners()[j]]);
            d.says(format!(
                "{} of its values, such as {}, are none that training knows{known}, about {} were to be expected; look \
                 whether they are written in another way",
                percent(u.here),
                d.examples.iter().map(|e| quoted(e.as_bytes())).collect::<Vec<_>>().join(", "),
                percent(u.expected)
            ));
        }
    }
    d
}

/// A column with what is missing in it.
fn column(name: String, kind: &'static str, train: (u64, u64), here: (u64, u64)) -> ColumnDrift {
    let missing = Shares { train: share(train.0, train.1), here: share(here.0, here.1) };
    let mut d = ColumnDrift {
        column: name,
        kind,
        missing,
        unseen: None,
        outside: None,
        range: None,
        examples: vec![],
        far: false,
        says: vec![],
    };
    let beyond = (missing.here - missing.train).abs() > MISSING_BEYOND;
    if beyond && certain((missing.train, train.1), (missing.here, here.1)) {
        let look = match missing.here > missing.train {
            true => "look whether it is filled, and under this name",
            false => "look whether another text now stands for a missing value (data.na)",
        };
        d.says(format!(
            "{} of the rows have no value, of training's {}; {look}",
            percent(missing.here),
            percent(missing.train)
        ));
    }
    d
}

/// The most frequent values, in words.
fn known(encoder: &ColumnEncoder) -> String {
    let ColumnEncoder::Vocabulary(values, _) = encoder else { return String::new() };
    let some: Vec<String> = (0..values.len().min(EXAMPLES)).map(|i| quoted(values.value(i))).collect();
    if some.is_empty() { String::new() } else { format!(" ({}, …)", some.join(", ")) }
}

/// Whether two shares of so many values differ by more than chance.
fn certain((p, n): (f64, u64), (q, m): (f64, u64)) -> bool {
    if m < FEWEST || n == 0 {
        return false;
    }
    let (n, m) = (n as f64, m as f64);
    // a share of 0 or 1 is not known better than one value tells
    let p = p.clamp(0.5 / n, 1.0 - 0.5 / n);
    (p - q).abs() > SIGNIFICANT * (p * (1.0 - p) * (1.0 / n + 1.0 / m)).sqrt()
}

fn share(n: u64, all: u64) -> f64 {
    n as f64 / all.max(1) as f64
}

/// A share in words; one that is not all of it is never called so.
pub fn percent(share: f64) -> String {
    let p = 100.0 * share;
    match p {
        0.0 | 100.0 => format!("{p:.0} %"),
        _ => format!("{:.1} %", p.clamp(0.1, 99.9)),
    }
}

#[cfg(test)]
#[path = "drift_tests.rs"]
mod tests;
