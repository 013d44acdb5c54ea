//! Where a batch ends.

use std::ops::Range;
use std::sync::Arc;

use super::batch::{Bag, GroupLayout};
use super::order::LoaderOptions;
use super::rows::Rows;

/// Which rows come together in a batch: so many, or fewer where their lists hold more ids than a batch has room for.
#[derive(Clone, Debug)]
pub struct Fit {
    capacity: usize,
    groups: Arc<[GroupLayout]>,
}

impl Fit {
    /// For batches of `capacity` rows.
    pub(super) fn new(capacity: usize, groups: Arc<[GroupLayout]>) -> Fit {
        Fit { capacity, groups }
    }

    /// How many of the rows `range` come into one batch, from the first on. `order`: where each row is in `rows`.
    fn first(&self, rows: &Rows, order: Option<&[u32]>, range: Range<usize>) -> usize {
        let mut fits = range.len();
        for pooled in self.groups.iter().filter_map(|g| g.pooled.as_ref()) {
            // without counts there is room for whatever comes
            if pooled.lengths.is_empty() {
                continue;
            }
            let (most, mut ids) = (pooled.ids(self.capacity), 0);
            let more = |bag: &Bag, row: usize| match bag {
                Bag::Single(_) => 1,
                Bag::List { column, .. } => rows.lists[*column].range(row).len().min(bag.most()),
            };
            fits = fits.min(
                range
                    .clone()
                    .take_while(|&i| {
                        let row = order.map_or(i, |o| o[i] as usize);
                        ids += pooled.bags.iter().map(|bag| more(bag, row)).sum::<usize>();
                        ids <= most
                    })
                    .count(),
            );
        }
        // a single row fits always
        fits.max(1).min(range.len())
    }

    /// The rows `range` in batches.
    pub fn pieces(&self, rows: &Rows, order: Option<&[u32]>, mut range: Range<usize>) -> Vec<Range<usize>> {
        let mut pieces = vec![];
        while !range.is_empty() {
            let end = range.start + self.first(rows, order, range.clone());
            pieces.push(range.start..end);
            range.start = end;
        }
        pieces
    }

    /// The batches of the first `n` rows: how many rows all ranks have together, and this rank's. Where a rank's share
    /// takes several batches, the others have as many, empty ones at last.
    pub fn batches<'a>(
        &'a self,
        rows: &'a Rows,
        order: Option<&'a [u32]>,
        n: usize,
        options: LoaderOptions,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + 'a {
        options.shares(n).flat_map(move |shares| {
            let pieces: Vec<_> = shares.into_iter().map(|share| self.pieces(rows, order, share)).collect();
            let count = pieces.iter().map(Vec::len).max().unwrap_or(0);
            let batch = move |k: usize| {
                let total = pieces.iter().filter_map(|p| p.get(k)).map(Range::len).sum();
                (total, pieces[options.rank].get(k).cloned().unwrap_or(0..0))
            };
            (0..count).map(batch)
        })
    }
}
