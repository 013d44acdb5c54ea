//! Batches built on a second thread, a few ahead of whoever uses them.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

use super::batch::{Batch, BatchBuilder, GroupLayout};
use super::cache::{CacheReader, CacheWriter, Found};
use super::error::DataError;
use super::feed::Files;
use super::order::permutation_of_block;
use super::packed::BLOCK_ROWS;
use super::reader::Reader;
use super::rows::{Dataset, Rows, SkipReport};

pub use super::order::{LoaderOptions, Order, permutation};

/// An iterator over batches. Dropping it early stops its thread.
#[derive(Debug)]
pub struct Loader {
    batches: Option<Receiver<Result<Batch, DataError>>>,
    used: Sender<Batch>,
    thread: Option<JoinHandle<SkipReport>>,
    report: SkipReport,
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
        let fit = builder.fit();
        Loader::start(builder, options, move |mut out| {
            let n = data.rows.len();
            let order = match order {
                Order::Sequential => None,
                Order::Shuffled { seed, epoch } => Some(permutation(n as u32, seed, epoch)),
            };
            for (total, range) in fit.batches(&data.rows, order.as_deref(), n, options).skip(options.skip) {
                let sent = out.send(total, |builder| match &order {
                    Some(order) => builder.gather(&data.rows, &order[range]),
                    None => builder.range(&data.rows, range),
                });
                if !sent {
                    break;
                }
            }
            data.skipped.clone()
        })
    }

    /// Batches of files of any length, which are never held whole. Shuffled rows are permuted in blocks of
    /// `files.shuffle` rows; what fits into one block comes in the same order as from memory. The next block is
    /// read while batches are made of one.
    pub fn files(
        files: Arc<Files>,
        groups: Arc<[GroupLayout]>,
        order: Order,
        options: LoaderOptions,
    ) -> Result<Loader, DataError> {
        let rows = Stream::open(&files)?;
        let empty = files.encoder.empty_rows();
        let builder = BatchBuilder::new(options.batch, empty.features, empty.columns, groups)?;
        let fit = builder.fit();
        Loader::start(builder, options, move |mut out| {
            let (blocks, read) = sync_channel::<Block>(0);
            std::thread::scope(|scope| {
                let reader = scope.spawn(move || rows.blocks(&files, order, options.together(), &blocks));
                let mut skip = options.skip;
                'blocks: for block in &read {
                    let order = block.order.as_deref();
                    for (total, range) in fit.batches(&block.rows, order, block.whole, options) {
                        if skip > 0 {
                            skip -= 1;
                            continue;
                        }
                        let sent = out.send(total, |builder| match order {
                            Some(order) => builder.gather(&block.rows, &order[range]),
                            None => builder.range(&block.rows, range),
                        });
                        if !sent {
                            break 'blocks;
                        }
                    }
                }
                // without a receiver the reader's next block is its last
                drop(read);
                match reader.join() {
                    Ok((report, None)) => report,
                    Ok((report, Some(error))) => {
                        out.fail(error);
                        report
                    }
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            })
        })
    }

    fn start(
        builder: BatchBuilder,
        options: LoaderOptions,
        work: impl FnOnce(Outlet) -> SkipReport + Send + 'static,
    ) -> Result<Loader, DataError> {
        let (batch_sender, batches) = sync_channel(options.prefetch.max(1));
        let (used, returned) = channel();
        let outlet = Outlet { builder, batches: batch_sender, returned };
        let thread = std::thread::Builder::new().name("birkhoff-loader".into());
        let thread = thread.spawn(move || work(outlet));
        let thread = thread.map_err(|e| DataError::Loader { problem: e.to_string() })?;
        Ok(Loader { batches: Some(batches), used, thread: Some(thread), report: SkipReport::default() })
    }

    /// Gives a used batch's memory back, so that no step after the first few allocates.
    pub fn recycle(&self, batch: Batch) {
        // A thread that has ended needs no memory.
        let _ = self.used.send(batch);
    }

    /// Rows left out; complete once the iterator has ended.
    pub fn skipped(&self) -> &SkipReport {
        &self.report
    }

    /// Waits for the thread and takes its report; a panic becomes an error.
    fn join(&mut self) -> Result<(), DataError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        match thread.join() {
            Ok(report) => self.report = report,
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
                return Err(DataError::Loader { problem: text.escape_debug().to_string() });
            }
        }
        Ok(())
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(item) = self.batches.as_ref().and_then(|b| b.recv().ok()) {
            return Some(item);
        }
        self.batches = None;
        self.join().err().map(Err)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Without a receiver the thread's next send fails, and it ends.
        self.batches = None;
        let _ = self.join();
    }
}

/// Rows to make batches of.
struct Block {
    rows: Rows,
    /// In which order; the order of the rows without one.
    order: Option<Vec<u32>>,
    /// Rows that batches are made of; what follows comes with the next block.
    whole: usize,
}

/// Encoded rows of files, from a cache where they are kept.
struct Stream {
    input: Input,
    /// The pass fills a cache.
    writer: Option<CacheWriter>,
    /// Rows for its next block.
    block: Rows,
    /// Rows so far.
    count: u64,
    /// The first so many have come from a cache before it proved damaged.
    known: u64,
}

enum Input {
    Cached(CacheReader),
    Parsed(Box<Reader>),
}

impl Stream {
    fn open(files: &Files) -> Result<Stream, DataError> {
        let cached = files.cache.as_ref().map(|c| c.read()).transpose()?.flatten();
        let (input, writer) = match cached {
            Some(reader) => (Input::Cached(reader), None),
            None => {
                let mut reader = files.source.open(&files.encoder.schema)?;
                if files.seen.is_some() {
                    reader.count_values(&files.encoder);
                }
                (Input::Parsed(reader.into()), files.cache.as_ref().map(|c| c.write()))
            }
        };
        Ok(Stream { input, writer, block: files.encoder.empty_rows(), count: 0, known: 0 })
    }

    fn report(&self) -> SkipReport {
        match &self.input {
            Input::Cached(reader) => reader.found.report(),
            Input::Parsed(reader) => reader.skipped().clone(),
        }
    }

    /// Sends all rows, block by block, until nobody wants more. An error ends them.
    fn blocks(
        mut self,
        files: &Files,
        order: Order,
        batch: usize,
        out: &SyncSender<Block>,
    ) -> (SkipReport, Option<DataError>) {
        let most = match order {
            Order::Sequential => batch,
            Order::Shuffled { .. } => files.shuffle.max(batch),
        };
        let mut pending = files.encoder.empty_rows();
        let (mut number, mut ended, mut error) = (0, false, None);
        loop {
            // More than a block, or the end: a block is the last one only if nothing follows it.
            while !ended && pending.len() <= most {
                match self.more(files, &mut pending) {
                    Ok(more) => ended = !more,
                    // the rows before the bad one are whole
                    Err(e) => (ended, error) = (true, Some(e)),
                }
            }
            // A shuffled block has `most` rows, however the file was read.
            let (n, order) = match order {
                Order::Sequential => (pending.len(), None),
                Order::Shuffled { seed, epoch } => {
                    let n = pending.len().min(most);
                    (n, Some(permutation_of_block(n as u32, seed, epoch, number)))
                }
            };
            number += 1;
            let last = ended && n == pending.len();
            let whole = if last { n } else { n - n % batch };
            // What is left of a block goes in front of the next.
            let rest = match &order {
                None => pending.select(whole..pending.len()),
                Some(order) => {
                    let left = order[whole..].iter().map(|&i| i as usize);
                    pending.select(left.chain(n..pending.len()))
                }
            };
            let rows = std::mem::replace(&mut pending, rest);
            if out.send(Block { rows, order, whole }).is_err() || last {
                return (self.report(), error);
            }
        }
    }

    /// Appends more rows; `false` at the end.
    fn more(&mut self, files: &Files, rows: &mut Rows) -> Result<bool, DataError> {
        let before = rows.len();
        if let Input::Cached(reader) = &mut self.input {
            if let Some(more) = reader.next(rows) {
                self.count += (rows.len() - before) as u64;
                return Ok(more);
            }
            // the same rows in the same order, from the data, into a new cache
            files.cache.iter().for_each(|c| c.damaged());
            (self.known, self.count) = (self.count, 0);
            self.input = Input::Parsed(files.source.open(&files.encoder.schema)?.into());
            self.writer = files.cache.as_ref().map(|c| c.write());
        }
        let Input::Parsed(reader) = &mut self.input else { return Ok(false) };
        let more = reader.encode_more(&files.encoder, rows)?;
        if !more && let (Some(told), Some(seen)) = (&files.seen, reader.seen()) {
            // a later pass has the same to tell
            let _ = told.set(seen.clone());
        }
        let new = (rows.len() - before) as u64;
        let known = self.known.saturating_sub(self.count).min(new) as usize;
        self.count += new;
        if let Some(writer) = &mut self.writer {
            self.block.append(&rows.select(before..rows.len()));
            if self.block.len() >= BLOCK_ROWS || !more {
                writer.push(&self.block);
                self.block = files.encoder.empty_rows();
            }
        }
        if !more && let Some(writer) = self.writer.take() {
            let skipped = reader.skipped();
            writer.finish(Found {
                rows: self.count,
                labelled: reader.labelled(),
                skipped: skipped.skipped,
                first: skipped.first.clone(),
                cut: skipped.cut,
            });
        }
        if known > 0 {
            *rows = rows.select((0..before).chain(before + known..rows.len()));
        }
        Ok(more)
    }
}

/// The loader thread's side.
struct Outlet {
    builder: BatchBuilder,
    batches: SyncSender<Result<Batch, DataError>>,
    returned: Receiver<Batch>,
}

impl Outlet {
    /// Builds and sends a batch; `false` when nobody wants more.
    fn send(&mut self, total: usize, build: impl FnOnce(&mut BatchBuilder) -> Batch) -> bool {
        self.returned.try_iter().for_each(|batch| self.builder.recycle(batch));
        let mut batch = build(&mut self.builder);
        batch.total = total;
        self.batches.send(Ok(batch)).is_ok()
    }

    fn fail(&self, error: DataError) {
        let _ = self.batches.send(Err(error));
    }
}

#[cfg(test)]
#[path = "loader_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "loader_web.rs"]
#[allow(dead_code, reason = "natively only compared with the loader above")]
mod web;
