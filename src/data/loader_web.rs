//! The loader of a browser, which has no second thread: the same batches, each built when it is asked for.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::data::batch::{Batch, BatchBuilder, GroupLayout};
use crate::data::error::DataError;
use crate::data::fit::Fit;
pub use crate::data::order::{LoaderOptions, Order, permutation};
use crate::data::rows::{Dataset, SkipReport};

/// An iterator over batches.
#[derive(Debug)]
pub struct Loader {
    data: Arc<Dataset>,
    order: Option<Vec<u32>>,
    builder: BatchBuilder,
    fit: Fit,
    batch: usize,
    /// Rows that have come into a piece.
    at: usize,
    /// The next batches' rows.
    pieces: VecDeque<Range<usize>>,
    used: std::cell::RefCell<Vec<Batch>>,
}

impl Loader {
    /// Batches of a data set in memory.
    pub fn dataset(
        data: Arc<Dataset>,
        groups: Arc<[GroupLayout]>,
        order: Order,
        options: LoaderOptions,
    ) -> Result<Loader, DataError> {
        let builder = BatchBuilder::new(options.batch, data.rows.features, data.rows.columns, groups)?;
        let order = match order {
            Order::Sequential => None,
            Order::Shuffled { seed, epoch } => Some(permutation(data.rows.len() as u32, seed, epoch)),
        };
        let (batch, fit) = (options.batch, builder.fit());
        let (pieces, used) = Default::default();
        let mut loader = Loader { data, order, builder, fit, batch, at: 0, pieces, used };
        (0..options.skip).for_each(|_| _ = loader.piece());
        Ok(loader)
    }

    /// The next batch's rows.
    fn piece(&mut self) -> Option<Range<usize>> {
        let rows = &self.data.rows;
        if self.pieces.is_empty() {
            let share = self.at..self.at.saturating_add(self.batch).min(rows.len());
            self.at = share.end;
            self.pieces = self.fit.pieces(rows, self.order.as_deref(), share).into();
        }
        self.pieces.pop_front()
    }

    /// Gives a used batch's memory back.
    pub fn recycle(&self, batch: Batch) {
        self.used.borrow_mut().push(batch);
    }

    /// Rows left out.
    pub fn skipped(&self) -> &SkipReport {
        &self.data.skipped
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.used.get_mut().drain(..).for_each(|batch| self.builder.recycle(batch));
        let range = self.piece()?;
        let rows = &self.data.rows;
        Some(Ok(match &self.order {
            Some(order) => self.builder.gather(rows, &order[range]),
            None => self.builder.range(rows, range),
        }))
    }
}
