//! Batches built on a second thread, a few ahead of whoever uses them.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

use super::batch::{Batch, BatchBuilder, GroupLayout};
use super::criteo::{CriteoReader, ReadOptions, check_columns};
use super::encoder::FittedEncoder;
use super::error::DataError;
use super::rows::{Dataset, RawRows, SkipReport};

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
        Loader::start(builder, options, move |mut out| {
            let n = data.rows.len();
            let order = match order {
                Order::Sequential => None,
                Order::Shuffled { seed, epoch } => Some(permutation(n as u32, seed, epoch)),
            };
            for start in (0..n).step_by(options.batch).skip(options.skip) {
                let range = start..(start + options.batch).min(n);
                let sent = out.send(|builder| match &order {
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

    /// Batches of a Criteo file in file order; a file of any length, never held whole.
    pub fn criteo_file(
        path: &Path,
        encoder: Arc<FittedEncoder>,
        groups: Arc<[GroupLayout]>,
        read: ReadOptions,
        options: LoaderOptions,
    ) -> Result<Loader, DataError> {
        check_columns(&encoder.schema)?;
        let mut reader = CriteoReader::open(path, read)?;
        let mut pending = encoder.empty_rows();
        let builder = BatchBuilder::new(options.batch, pending.features, pending.columns, groups)?;
        Loader::start(builder, options, move |mut out| {
            let encode = |raw: RawRows| {
                let mut rows = encoder.empty_rows();
                encoder.encode(&raw, &mut rows);
                rows
            };
            let mut skip = options.skip;
            let mut ended = false;
            while !ended {
                match reader.next_chunks(encode) {
                    Ok(Some(chunks)) => chunks.iter().for_each(|chunk| pending.append(chunk)),
                    Ok(None) => ended = true,
                    Err(error) => {
                        out.fail(error);
                        break;
                    }
                }
                let mut start = 0;
                while start < pending.len() && (ended || pending.len() - start >= options.batch) {
                    let end = (start + options.batch).min(pending.len());
                    if skip > 0 {
                        skip -= 1;
                    } else if !out.send(|builder| builder.range(&pending, start..end)) {
                        return reader.skipped().clone();
                    }
                    start = end;
                }
                pending.crop(start..pending.len());
            }
            reader.skipped().clone()
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

/// The loader thread's side.
struct Outlet {
    builder: BatchBuilder,
    batches: SyncSender<Result<Batch, DataError>>,
    returned: Receiver<Batch>,
}

impl Outlet {
    /// Builds and sends a batch; `false` when nobody wants more.
    fn send(&mut self, build: impl FnOnce(&mut BatchBuilder) -> Batch) -> bool {
        self.returned.try_iter().for_each(|batch| self.builder.recycle(batch));
        let batch = build(&mut self.builder);
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
