//! How many different rows of a table a batch names, and how they lie among its rows.
//!
//! Ids are drawn independently from a Zipf distribution over the rows, p(r) ∝ (r + 1)^−s. Of n draws
//! Σ_r 1 − (1 − p(r))^n ≈ Σ_r 1 − exp(−n·p(r)) rows are named; the exponent s is the one for which that is the share of
//! distinct ids that was measured. s = 0, all rows alike, where none was, or where it is no smaller than that gives.

use std::ops::Range;

use super::placement::Table;

/// Rows that are counted one by one; those behind are counted in blocks.
const SINGLE: u64 = 64;
/// Each block is longer than the one before by this factor.
const GROWTH: f64 = 1.1;
/// The steepest distribution that is considered.
const STEEPEST: f64 = 4.0;

/// Expected numbers of rows of a table that are named by a batch of one rank, and by those of all.
#[derive(Clone, Debug)]
pub struct Traffic {
    /// First rows of the blocks, and at last the number of rows.
    starts: Vec<u64>,
    /// Rows before each of them that one batch names.
    one: Vec<f64>,
    /// Likewise the batches of all ranks together.
    all: Vec<f64>,
    /// Whether the named rows lie at the front, or are scattered evenly.
    ranked: bool,
}

impl Traffic {
    /// Of batches with `batch` examples on each of `world` ranks.
    pub fn new(table: &Table, batch: u64, world: usize) -> Traffic {
        let draws = table.lookups * batch as f64;
        let starts = blocks(table.rows);
        let uniform = *named(&starts, 0.0, draws).last().unwrap_or(&0.0);
        let measured = table.unique * draws;
        let mut exponent = 0.0;
        // near s = 0 the share hardly depends on s: a small difference is chance
        if measured < 0.99 * uniform {
            let (mut low, mut high) = (0.0, STEEPEST);
            for _ in 0..30 {
                exponent = 0.5 * (low + high);
                match named(&starts, exponent, draws).last() {
                    Some(&n) if n > measured => low = exponent,
                    _ => high = exponent,
                }
            }
        }
        let (one, all) = (named(&starts, exponent, draws), named(&starts, exponent, draws * world as f64));
        Traffic { starts, one, all, ranked: table.ranked }
    }

    /// Distinct rows among `rows` that the batch of one rank names.
    pub fn one(&self, rows: &Range<u64>) -> f64 {
        self.before(&self.one, rows.end) - self.before(&self.one, rows.start)
    }

    /// Distinct rows among `rows` that the batches of all ranks name together.
    pub fn all(&self, rows: &Range<u64>) -> f64 {
        self.before(&self.all, rows.end) - self.before(&self.all, rows.start)
    }

    /// Cuts the rows into ranges that one batch names equally many rows of.
    pub fn equal_parts(&self, parts: u64) -> Vec<Range<u64>> {
        let rows = self.starts[self.starts.len() - 1];
        let whole = self.one(&(0..rows));
        let cut = |i: u64| {
            let (mut low, mut high) = (i, rows - (parts - i));
            if whole <= 0.0 {
                return rows * i / parts;
            }
            let target = whole * i as f64 / parts as f64;
            while low < high {
                let middle = low + (high - low) / 2;
                if self.before(&self.one, middle) < target { low = middle + 1 } else { high = middle }
            }
            low
        };
        let mut ends: Vec<u64> = (1..parts).map(cut).chain([rows]).collect();
        // at least one row each
        for i in 1..ends.len() {
            ends[i] = ends[i].max(ends[i - 1] + 1);
        }
        let mut start = 0;
        ends.into_iter().map(|end| std::mem::replace(&mut start, end)..end).collect()
    }

    /// The count before a row; inside a block rows are alike.
    fn before(&self, counts: &[f64], row: u64) -> f64 {
        let last = self.starts.len() - 1;
        if !self.ranked {
            return counts[last] * row as f64 / self.starts[last] as f64;
        }
        let at = self.starts.partition_point(|&s| s <= row).clamp(1, last);
        let (start, end) = (self.starts[at - 1], self.starts[at]);
        let part = (row - start) as f64 / (end - start) as f64;
        counts[at - 1] + part * (counts[at] - counts[at - 1])
    }
}

/// First rows of blocks of growing length, then the number of rows.
fn blocks(rows: u64) -> Vec<u64> {
    let mut starts: Vec<u64> = (0..rows.min(SINGLE)).collect();
    let mut at = rows.min(SINGLE);
    while at < rows {
        starts.push(at);
        at = ((at as f64 * GROWTH) as u64).max(at + 1);
    }
    starts.push(rows);
    starts
}

/// Expected distinct rows before each start, of so many draws.
fn named(starts: &[u64], exponent: f64, draws: f64) -> Vec<f64> {
    // the middle of a block in the logarithm stands for all its rows
    let weight = |b: &[u64]| {
        let middle = 0.5 * (((b[0] + 1) as f64).ln() + (b[1] as f64).ln());
        (-exponent * middle).exp()
    };
    let length = |b: &[u64]| (b[1] - b[0]) as f64;
    let whole: f64 = starts.windows(2).map(|b| length(b) * weight(b)).sum();
    let mut sum = 0.0;
    let counts = starts.windows(2).map(|b| {
        sum -= length(b) * (-draws * weight(b) / whole).exp_m1();
        sum
    });
    std::iter::once(0.0).chain(counts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use std::collections::HashSet;

    fn table(rows: u64, lookups: f64, unique: f64, ranked: bool) -> Table {
        Table { name: "t".into(), rows, width: 16, lookups, unique, ranked, row_state: 1, value_state: 0 }
    }

    #[test]
    fn counts_are_those_of_draws() {
        // 4 batches of 500 draws from a Zipf distribution over 2000 rows
        let (rows, draws, world) = (2000u64, 500usize, 4usize);
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(3);
        for s in [0.0, 0.8, 1.2] {
            let weights: Vec<f64> = (0..rows).map(|r| ((r + 1) as f64).powf(-s)).collect();
            let whole: f64 = weights.iter().sum();
            let mut pick = || {
                let mut x = rng.random::<f64>() * whole;
                weights
                    .iter()
                    .position(|w| {
                        x -= w;
                        x < 0.0
                    })
                    .unwrap_or(0) as u64
            };
            let (mut one, mut front, mut all, trials) = (0.0, 0.0, 0.0, 60);
            for _ in 0..trials {
                let mut union = HashSet::new();
                for rank in 0..world {
                    let batch: HashSet<u64> = (0..draws).map(|_| pick()).collect();
                    if rank == 0 {
                        one += batch.len() as f64 / f64::from(trials);
                        front += batch.iter().filter(|&&r| r < 300).count() as f64 / f64::from(trials);
                    }
                    union.extend(batch);
                }
                all += union.len() as f64 / f64::from(trials);
            }
            // only the share of distinct ids is told, as a measurement would
            let t = Traffic::new(&table(rows, 1.0, one / draws as f64, true), draws as u64, world);
            let close = |got: f64, expected: f64, what: &str| {
                assert!((got - expected).abs() < 0.03 * expected, "s = {s}, {what}: {got} not {expected}");
            };
            close(t.one(&(0..rows)), one, "one batch");
            close(t.all(&(0..rows)), all, "all batches");
            close(t.one(&(0..300)), front, "the front");
        }
    }

    #[test]
    fn parts_are_equal_and_whole() {
        for (t, batch) in [
            (table(100_000, 1.0, 0.4, true), 512),
            (table(100_000, 3.0, 0.4, false), 512),
            (table(7, 1.0, 0.01, true), 512),
            (table(1 << 32, 1.0, 1.0, true), 65_536),
            (table(9, 0.0, 1.0, true), 16),
        ] {
            let traffic = Traffic::new(&t, batch, 4);
            for parts in 1..=7u64.min(t.rows) {
                let ranges = traffic.equal_parts(parts);
                assert_eq!((ranges.len() as u64, ranges[0].start), (parts, 0));
                assert_eq!(ranges[ranges.len() - 1].end, t.rows);
                assert!(ranges.windows(2).all(|r| r[0].end == r[1].start));
                assert!(ranges.iter().all(|r| r.start < r.end), "{ranges:?}");
                let whole = traffic.one(&(0..t.rows));
                let sum: f64 = ranges.iter().map(|r| traffic.one(r)).sum();
                assert!((sum - whole).abs() <= 1e-9 * whole);
                if t.rows > 100 {
                    for r in &ranges {
                        assert!(
                            (traffic.one(r) - whole / parts as f64).abs() < 1.0 + 1e-6 * whole,
                            "{ranges:?}"
                        );
                    }
                }
            }
            assert!(traffic.one(&(0..t.rows)) <= (batch as f64 * t.lookups).min(t.rows as f64) + 1e-9);
        }
        // the front of a vocabulary has more than its share, that of a hashed column has not
        let front = |ranked| {
            let t = Traffic::new(&table(100_000, 1.0, 0.4, ranked), 512, 1);
            t.one(&(0..50_000)) / t.one(&(0..100_000))
        };
        assert!(front(true) > 0.8 && (front(false) - 0.5).abs() < 1e-9);
    }
}
