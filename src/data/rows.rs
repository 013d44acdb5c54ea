//! Rows as read ([`RawRows`]) and as the model sees them ([`Rows`], [`Dataset`]).

use std::ops::Range;

/// Marks a row without a label.
pub const UNLABELLED: u8 = 2;

/// Parsed rows of one block of a file, column values still as text. No allocation per field.
#[derive(Clone, Debug, Default)]
pub struct RawRows {
    /// The block's bytes; the ranges below point into it.
    pub text: Vec<u8>,
    /// `[rows, numeric columns]`, NaN = missing.
    pub numeric: Vec<f64>,
    /// `[rows, categorical columns]`, start and end in `text`, an empty range = missing; of a list column in
    /// `items`.
    pub fields: Vec<(u32, u32)>,
    /// The values of all lists, start and end in `text`.
    pub items: Vec<(u32, u32)>,
    /// `[rows]`, 0, 1 or [`UNLABELLED`].
    pub labels: Vec<u8>,
    /// `[rows]`, or empty where the schema has no weight column.
    pub weights: Vec<f32>,
    /// `[rows]`, hashes of the group column, or empty where the schema has none.
    pub groups: Vec<u64>,
    /// `[rows, passed columns]`, start and end in `text`: what `predict` copies to its output.
    pub passed: Vec<(u32, u32)>,
    /// `[rows]`, line in the file, from 1; in a columnar file the row.
    pub lines: Vec<u64>,
    /// Where the rows under construction begin in `numeric` and `fields`.
    pub(crate) row: (usize, usize),
    /// Their numeric and categorical columns.
    pub(crate) width: (usize, usize),
}

impl RawRows {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Bytes of a categorical field, counted over `[rows, categorical columns]`.
    #[inline]
    pub fn field(&self, index: usize) -> &[u8] {
        self.slice(self.fields[index])
    }

    /// The values of a list field, counted over `[rows, categorical columns]`.
    pub fn list(&self, index: usize) -> impl ExactSizeIterator<Item = &[u8]> {
        let (start, end) = self.fields[index];
        self.items[start as usize..end as usize].iter().map(|&range| self.slice(range))
    }

    /// The bytes of a range of `text`.
    #[inline]
    pub fn slice(&self, (start, end): (u32, u32)) -> &[u8] {
        &self.text[start as usize..end as usize]
    }
}

/// The ids of one multi-valued column.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ListIds {
    /// `[rows]`, end of each row's ids in `ids`.
    pub ends: Vec<u32>,
    /// Column-local ids of all rows.
    pub ids: Vec<u32>,
}

impl ListIds {
    /// Where a row's ids lie.
    pub fn range(&self, row: usize) -> Range<usize> {
        let start = if row == 0 { 0 } else { self.ends[row - 1] as usize };
        start..self.ends[row] as usize
    }

    /// The ids of a row.
    pub fn row(&self, row: usize) -> &[u32] {
        &self.ids[self.range(row)]
    }

    fn append(&mut self, other: &ListIds) {
        let base = self.ids.len() as u32;
        self.ids.extend_from_slice(&other.ids);
        self.ends.extend(other.ends.iter().map(|e| base + e));
    }

    fn crop(&mut self, keep: &Range<usize>) {
        let (start, end) = match keep.is_empty() {
            true => (0, 0),
            false => (self.range(keep.start).start, self.range(keep.end - 1).end),
        };
        self.ids.truncate(end);
        self.ids.drain(..start);
        self.ends.truncate(keep.end);
        self.ends.drain(..keep.start);
        self.ends.iter_mut().for_each(|e| *e -= start as u32);
    }
}

/// Encoded rows, column by column of the schema, row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// Numeric features a row, F.
    pub features: usize,
    /// Single-valued categorical columns a row, C.
    pub columns: usize,
    /// `[rows, F]`.
    pub numeric: Vec<f32>,
    /// `[rows, C]`, column-local ids.
    pub ids: Vec<u32>,
    /// Multi-valued columns, in schema order.
    pub lists: Vec<ListIds>,
    /// `[rows]`, 0, 1 or [`UNLABELLED`].
    pub labels: Vec<u8>,
    /// `[rows]`, or empty: every row weighs 1.
    pub weights: Vec<f32>,
    /// `[rows]`, or empty: there are no groups.
    pub groups: Vec<u64>,
    /// `[rows, passed columns]`, text for `predict`'s output.
    pub passed: Vec<String>,
}

impl Rows {
    /// No rows of the given width.
    pub fn new(features: usize, columns: usize) -> Rows {
        Rows { features, columns, ..Rows::default() }
    }

    /// No rows of the given widths, in the memory of these.
    pub(crate) fn cleared(mut self, features: usize, columns: usize, lists: usize) -> Rows {
        (self.features, self.columns) = (features, columns);
        self.lists.resize(lists, ListIds::default());
        for list in &mut self.lists {
            list.ends.clear();
            list.ids.clear();
        }
        self.numeric.clear();
        self.ids.clear();
        self.labels.clear();
        self.weights.clear();
        self.groups.clear();
        self.passed.clear();
        self
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Rows with label 1.
    pub fn positives(&self) -> usize {
        self.labels.iter().filter(|&&l| l == 1).count()
    }

    /// Bytes that the rows take.
    pub fn bytes(&self) -> usize {
        let lists: usize = self.lists.iter().map(|l| 4 * (l.ends.len() + l.ids.len())).sum();
        4 * (self.numeric.len() + self.ids.len() + self.weights.len())
            + 8 * self.groups.len()
            + self.labels.len()
            + lists
    }

    /// Appends rows of the same width.
    pub fn append(&mut self, other: &Rows) {
        debug_assert_eq!(
            (self.features, self.columns, self.lists.len()),
            (other.features, other.columns, other.lists.len())
        );
        self.numeric.extend_from_slice(&other.numeric);
        self.ids.extend_from_slice(&other.ids);
        self.lists.iter_mut().zip(&other.lists).for_each(|(a, b)| a.append(b));
        self.labels.extend_from_slice(&other.labels);
        self.weights.extend_from_slice(&other.weights);
        self.groups.extend_from_slice(&other.groups);
        self.passed.extend_from_slice(&other.passed);
    }

    /// The named rows, in that order.
    pub fn select(&self, rows: impl Iterator<Item = usize>) -> Rows {
        let (f, c, p) = (self.features, self.columns, self.passed.len() / self.len().max(1));
        let mut out = Rows { lists: vec![ListIds::default(); self.lists.len()], ..Rows::new(f, c) };
        for i in rows {
            out.numeric.extend_from_slice(&self.numeric[i * f..(i + 1) * f]);
            out.ids.extend_from_slice(&self.ids[i * c..(i + 1) * c]);
            out.labels.push(self.labels[i]);
            out.weights.extend(self.weights.get(i));
            out.groups.extend(self.groups.get(i));
            out.passed.extend_from_slice(&self.passed[i * p..(i + 1) * p]);
            for (list, all) in out.lists.iter_mut().zip(&self.lists) {
                list.ids.extend_from_slice(all.row(i));
                list.ends.push(list.ids.len() as u32);
            }
        }
        out
    }

    /// Keeps only the rows from `keep.start` to `keep.end`.
    pub fn crop(&mut self, keep: Range<usize>) {
        fn cut<T>(v: &mut Vec<T>, width: usize, keep: &Range<usize>) {
            v.truncate(keep.end * width);
            v.drain(..keep.start * width);
        }
        let passed = self.passed.len() / self.len().max(1);
        cut(&mut self.numeric, self.features, &keep);
        cut(&mut self.ids, self.columns, &keep);
        self.lists.iter_mut().for_each(|l| l.crop(&keep));
        cut(&mut self.labels, 1, &keep);
        if !self.weights.is_empty() {
            cut(&mut self.weights, 1, &keep);
        }
        if !self.groups.is_empty() {
            cut(&mut self.groups, 1, &keep);
        }
        cut(&mut self.passed, passed, &keep);
    }
}

/// Rows left out because of `--on-bad-row skip`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SkipReport {
    /// How many.
    pub skipped: u64,
    /// The first few, each as "FILE:LINE: problem".
    pub first: Vec<String>,
    /// Each kind of problem, how often, and its first place.
    pub kinds: Vec<(&'static str, u64, String)>,
    /// Rows that were kept, but with a list cut at its column's `max_length`.
    pub cut: u64,
}

impl SkipReport {
    /// How many problems are kept word for word.
    pub const KEPT: usize = 5;

    pub(crate) fn add(&mut self, kind: &'static str, problem: impl FnOnce() -> String) {
        self.skipped += 1;
        let known = self.kinds.iter().position(|k| k.0 == kind);
        if let Some(k) = known {
            self.kinds[k].1 += 1;
        }
        if known.is_some() && self.first.len() >= Self::KEPT {
            return;
        }
        let text = problem();
        if known.is_none() {
            self.kinds.push((kind, 1, text.clone()));
        }
        if self.first.len() < Self::KEPT {
            self.first.push(text);
        }
    }
}

/// A whole file's encoded rows in memory.
#[derive(Clone, Debug, Default)]
pub struct Dataset {
    /// The rows, in file order.
    pub rows: Rows,
    /// Whether the rows have labels (all of them or none).
    pub labelled: bool,
    /// Rows left out.
    pub skipped: SkipReport,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn append_and_crop_keep_rows_together() {
        let row = |i: u32| Rows {
            features: 2,
            columns: 3,
            numeric: vec![i as f32, 0.5],
            ids: vec![i, i + 1, i + 2],
            lists: vec![ListIds { ends: vec![i], ids: vec![i; i as usize] }],
            labels: vec![(i % 2) as u8],
            weights: vec![i as f32],
            groups: vec![u64::from(i)],
            passed: vec![i.to_string(), "b".into()],
        };
        let mut rows = Rows { lists: vec![ListIds::default()], ..Rows::new(2, 3) };
        (0..5).for_each(|i| rows.append(&row(i)));
        assert_eq!((rows.len(), rows.positives()), (5, 2));
        rows.crop(1..3);
        assert_eq!(rows.numeric, [1.0, 0.5, 2.0, 0.5]);
        assert_eq!((rows.lists[0].row(0), rows.lists[0].row(1)), (&[1][..], &[2, 2][..]));
        assert_eq!((rows.weights.clone(), rows.groups.clone()), (vec![1.0, 2.0], vec![1, 2]));
        assert_eq!(rows.passed, ["1", "b", "2", "b"]);
        assert_eq!((rows.ids.clone(), rows.labels.clone()), (vec![1, 2, 3, 2, 3, 4], vec![1, 0]));
        rows.crop(1..1);
        assert!(rows.is_empty() && rows.lists[0].ids.is_empty());
    }
}
