//! Rows as read ([`RawRows`]) and as the model sees them ([`Rows`], [`Dataset`]).

use std::ops::Range;

/// Marks a row without a label.
pub const UNLABELLED: u8 = 2;

/// Parsed rows of one block of a file, column values still as text. No allocation per field.
#[derive(Clone, Debug, Default)]
pub struct RawRows {
    /// The block's bytes; `fields` points into it.
    pub text: Vec<u8>,
    /// `[rows, numeric columns]`, NaN = missing.
    pub numeric: Vec<f64>,
    /// `[rows, categorical columns]`, start and end in `text`; an empty range = missing.
    pub fields: Vec<(u32, u32)>,
    /// `[rows]`, 0, 1 or [`UNLABELLED`].
    pub labels: Vec<u8>,
    /// `[rows]`, line in the file, from 1.
    pub lines: Vec<u64>,
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
    pub fn field(&self, index: usize) -> &[u8] {
        let (start, end) = self.fields[index];
        &self.text[start as usize..end as usize]
    }
}

/// Encoded rows, column by column of the schema, row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// Numeric features a row, F.
    pub features: usize,
    /// Categorical columns a row, C.
    pub columns: usize,
    /// `[rows, F]`.
    pub numeric: Vec<f32>,
    /// `[rows, C]`, column-local ids.
    pub ids: Vec<u32>,
    /// `[rows]`, 0, 1 or [`UNLABELLED`].
    pub labels: Vec<u8>,
}

impl Rows {
    /// No rows of the given width.
    pub fn new(features: usize, columns: usize) -> Rows {
        Rows { features, columns, ..Rows::default() }
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

    /// Appends rows of the same width.
    pub fn append(&mut self, other: &Rows) {
        debug_assert_eq!((self.features, self.columns), (other.features, other.columns));
        self.numeric.extend_from_slice(&other.numeric);
        self.ids.extend_from_slice(&other.ids);
        self.labels.extend_from_slice(&other.labels);
    }

    /// Keeps only the rows from `keep.start` to `keep.end`.
    pub fn crop(&mut self, keep: Range<usize>) {
        fn cut<T>(v: &mut Vec<T>, width: usize, keep: &Range<usize>) {
            v.truncate(keep.end * width);
            v.drain(..keep.start * width);
        }
        cut(&mut self.numeric, self.features, &keep);
        cut(&mut self.ids, self.columns, &keep);
        cut(&mut self.labels, 1, &keep);
    }
}

/// Rows left out because of `--on-bad-row skip`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SkipReport {
    /// How many.
    pub skipped: u64,
    /// The first few, each as "FILE:LINE: problem".
    pub first: Vec<String>,
}

impl SkipReport {
    /// How many problems are kept word for word.
    pub const KEPT: usize = 5;

    pub(crate) fn add(&mut self, problem: impl FnOnce() -> String) {
        self.skipped += 1;
        if self.first.len() < Self::KEPT {
            self.first.push(problem());
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
            labels: vec![(i % 2) as u8],
        };
        let mut rows = Rows::new(2, 3);
        (0..5).for_each(|i| rows.append(&row(i)));
        assert_eq!((rows.len(), rows.positives()), (5, 2));
        rows.crop(1..3);
        assert_eq!(rows.numeric, [1.0, 0.5, 2.0, 0.5]);
        assert_eq!((rows.ids, rows.labels), (vec![1, 2, 3, 2, 3, 4], vec![1, 0]));
    }
}
