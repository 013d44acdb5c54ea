//! [`Communicator`]: the operations, blocking and not, over any transport.

use super::element::{Element, Reduction};
use super::error::{CollectiveError, Result};
use super::local::Local;
use super::operations::Inner;
use super::transport::Transport;
use super::wire::Wire;
use crate::sync::lock;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

type Job = Box<dyn FnOnce(&Inner) + Send>;

/// What a communicator has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Operations.
    pub operations: u64,
    /// Seconds in which operations ran, in the background or not.
    pub busy: f64,
    /// Seconds in which a caller waited for one.
    pub waited: f64,
    /// Bytes sent, without frame headers.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
}

/// A rank's end of a group of ranks, which all call the same operations in the same order.
///
/// Every operation has a form that waits and one whose name ends in `_start`, which takes ownership of the data, runs in
/// the background in the order of the calls and gives them back by [`Handle::wait`]. Clones are the same end.
#[derive(Clone)]
pub struct Communicator {
    inner: Arc<Inner>,
    worker: Arc<OnceLock<Sender<Job>>>,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = &self.inner.transport;
        write!(f, "Communicator({}, rank {} of {})", t.name(), t.rank(), t.world())
    }
}

/// An operation in progress.
#[derive(Debug)]
#[must_use = "an operation in progress has to be waited for"]
pub struct Handle<T> {
    answer: Receiver<Result<T>>,
    inner: std::sync::Weak<Inner>,
    early: Option<Result<T>>,
}

impl<T> Handle<T> {
    /// Waits for the result.
    ///
    /// # Errors
    /// As the operation that waits.
    pub fn wait(mut self) -> Result<T> {
        if let Some(r) = self.early.take() {
            return r;
        }
        let begin = Instant::now();
        let answer = self.answer.recv();
        if let Some(inner) = self.inner.upgrade() {
            count(&inner.waited_nanos, begin.elapsed());
        }
        answer.unwrap_or_else(|_| Err(CollectiveError::Argument("the communicator is gone".into())))
    }

    /// Whether the result is there.
    pub fn is_done(&mut self) -> bool {
        if self.early.is_none() {
            self.early = self.answer.try_recv().ok();
        }
        self.early.is_some()
    }
}

fn count(to: &AtomicU64, time: Duration) {
    to.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
}

impl Communicator {
    /// Over a transport.
    pub fn new(transport: Box<dyn Transport>) -> Self {
        let inner = Inner {
            transport,
            turn: Mutex::new(()),
            pending: Mutex::new(0),
            idle: Condvar::new(),
            number: AtomicU64::new(0),
            splits: AtomicU64::new(0),
            busy_nanos: AtomicU64::new(0),
            waited_nanos: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            failure: Arc::default(),
        };
        Communicator { inner: Arc::new(inner), worker: Arc::default() }
    }

    /// One rank alone: every operation is done at once.
    pub fn alone() -> Self {
        Self::local(1, Duration::from_secs(1)).pop().expect("one")
    }

    /// A group of threads: an end for each.
    pub fn local(world: usize, timeout: Duration) -> Vec<Self> {
        Local::group(world, timeout).into_iter().map(|l| Self::new(Box::new(l))).collect()
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.inner.rank()
    }

    /// Ranks in the group.
    pub fn world(&self) -> usize {
        self.inner.world()
    }

    /// The transport's name.
    pub fn transport(&self) -> &'static str {
        self.inner.transport.name()
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let i = &self.inner;
        let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
        Stats {
            operations: get(&i.number),
            busy: get(&i.busy_nanos) as f64 * 1e-9,
            waited: get(&i.waited_nanos) as f64 * 1e-9,
            sent: get(&i.sent),
            received: get(&i.received),
        }
    }

    /// Runs an operation in this thread, after those started before.
    fn now<T>(&self, f: impl FnOnce(&Inner) -> Result<T>) -> Result<T> {
        let begin = Instant::now();
        let mut pending = lock(&self.inner.pending);
        while *pending > 0 {
            pending = self.inner.idle.wait(pending).unwrap_or_else(PoisonError::into_inner);
        }
        drop(pending);
        let turn = lock(&self.inner.turn);
        let working = Instant::now();
        let result = self.inner.noted(f(&self.inner));
        drop(turn);
        count(&self.inner.busy_nanos, working.elapsed());
        count(&self.inner.waited_nanos, begin.elapsed());
        result
    }

    /// Runs an operation in the background, after those started before.
    fn start<T: Send + 'static>(&self, f: impl FnOnce(&Inner) -> Result<T> + Send + 'static) -> Handle<T> {
        let (tell, answer) = channel();
        *lock(&self.inner.pending) += 1;
        let job: Job = Box::new(move |inner| {
            let turn = lock(&inner.turn);
            let working = Instant::now();
            let result = inner.noted(f(inner));
            drop(turn);
            count(&inner.busy_nanos, working.elapsed());
            // whoever asked may have gone
            let _ = tell.send(result);
            let mut pending = lock(&inner.pending);
            *pending -= 1;
            if *pending == 0 {
                inner.idle.notify_all();
            }
        });
        let queue = self.worker.get_or_init(|| {
            let (queue, jobs) = channel::<Job>();
            let inner = self.inner.clone();
            let work = move || {
                while let Ok(job) = jobs.recv() {
                    job(&inner);
                }
            };
            std::thread::Builder::new()
                .name(format!("collective {}", self.rank()))
                .spawn(work)
                .expect("a thread can be started");
            queue
        });
        queue.send(job).expect("the worker lives as long as the queue");
        Handle { answer, inner: Arc::downgrade(&self.inner), early: None }
    }

    /// Combines `data` with those of all ranks, element by element; all get the same. f16 and bf16 are summed in f32.
    ///
    /// # Errors
    /// As every operation: if a rank is lost or disagrees, see [`CollectiveError`].
    pub fn all_reduce<T: Element>(&self, data: &mut [T], how: Reduction) -> Result<()> {
        self.now(|i| i.all_reduce(data, how))
    }

    /// [`Communicator::all_reduce`] in the background.
    pub fn all_reduce_start<T: Element>(&self, mut data: Vec<T>, how: Reduction) -> Handle<Vec<T>> {
        self.start(move |i| i.all_reduce(&mut data, how).map(|()| data))
    }

    /// The sum of f32 that travel as `wire`. `lost`, as long as `data`, keeps what rounding took away and adds it the next
    /// time (error feedback): give the same one, at first of zeros, for the same data of each step.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    ///
    /// # Panics
    /// If `lost` has another length than `data`.
    pub fn all_reduce_wire(&self, data: &mut [f32], wire: Wire, lost: Option<&mut [f32]>) -> Result<()> {
        self.now(|i| i.all_reduce_wire(data, wire, lost))
    }

    /// [`Communicator::all_reduce_wire`] in the background; `lost` empty for none.
    pub fn all_reduce_wire_start(
        &self,
        mut data: Vec<f32>,
        wire: Wire,
        mut lost: Vec<f32>,
    ) -> Handle<(Vec<f32>, Vec<f32>)> {
        self.start(move |i| {
            let keep = (!lost.is_empty()).then_some(&mut lost[..]);
            i.all_reduce_wire(&mut data, wire, keep).map(|()| (data, lost))
        })
    }

    /// Sums `data` over all ranks; rank i gets its stretch of `counts[i]` elements.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; also if the counts do not fit.
    pub fn reduce_scatter(&self, data: Vec<f32>, counts: &[usize], wire: Wire) -> Result<Vec<f32>> {
        self.now(|i| i.reduce_scatter(data, counts, wire))
    }

    /// [`Communicator::reduce_scatter`] in the background.
    pub fn reduce_scatter_start(&self, data: Vec<f32>, counts: Vec<usize>, wire: Wire) -> Handle<Vec<f32>> {
        self.start(move |i| i.reduce_scatter(data, &counts, wire))
    }

    /// Everyone's elements, one rank's after the other's: `counts[i]` from rank i.
    ///
    /// # Errors
    /// As [`Communicator::reduce_scatter`].
    pub fn all_gather<T: Element>(&self, own: &[T], counts: &[usize]) -> Result<Vec<T>> {
        self.now(|i| i.all_gather(own, counts))
    }

    /// [`Communicator::all_gather`] of f32 that travel as `wire`. A rank's own are rounded too: all get the same.
    ///
    /// # Errors
    /// As [`Communicator::reduce_scatter`].
    pub fn all_gather_wire(&self, own: &[f32], counts: &[usize], wire: Wire) -> Result<Vec<f32>> {
        self.now(|i| i.all_gather_wire(own, counts, wire))
    }

    /// [`Communicator::all_gather`] in the background.
    pub fn all_gather_start<T: Element>(&self, own: Vec<T>, counts: Vec<usize>) -> Handle<Vec<T>> {
        self.start(move |i| i.all_gather(&own, &counts))
    }

    /// [`Communicator::all_gather_wire`] in the background.
    pub fn all_gather_wire_start(&self, own: Vec<f32>, counts: Vec<usize>, wire: Wire) -> Handle<Vec<f32>> {
        self.start(move |i| i.all_gather_wire(&own, &counts, wire))
    }

    /// `sent[i]` elements to rank i, `received[i]` from it, both in the order of ranks.
    ///
    /// # Errors
    /// As [`Communicator::reduce_scatter`].
    pub fn all_to_all<T: Element>(&self, data: &[T], sent: &[usize], received: &[usize]) -> Result<Vec<T>> {
        self.now(|i| i.all_to_all(data, sent, received))
    }

    /// [`Communicator::all_to_all`] into a place that is there already, as long as `received` adds up to.
    ///
    /// # Errors
    /// As [`Communicator::reduce_scatter`].
    pub fn all_to_all_into<T: Element>(
        &self,
        data: &[T],
        sent: &[usize],
        into: &mut [T],
        received: &[usize],
    ) -> Result<()> {
        self.now(|i| i.all_to_all_into(data, sent, into, received))
    }

    /// [`Communicator::all_to_all`] in the background.
    pub fn all_to_all_start<T: Element>(
        &self,
        data: Vec<T>,
        sent: Vec<usize>,
        received: Vec<usize>,
    ) -> Handle<Vec<T>> {
        self.start(move |i| i.all_to_all(&data, &sent, &received))
    }

    /// [`Communicator::all_to_all`] in the background, of parts whose lengths only their sender knows: `parts[i]` of them
    /// go to rank i, each rank sends this one `own`, and `lengths` has those of all that are sent. Gives what arrived, rank
    /// after rank, and the lengths of its parts.
    pub fn all_to_all_parts_start<T: Element>(
        &self,
        data: Vec<T>,
        lengths: Vec<u32>,
        parts: Vec<usize>,
        own: usize,
    ) -> Handle<(Vec<T>, Vec<u32>)> {
        self.start(move |i| i.all_to_all_parts(&data, &lengths, &parts, own))
    }

    /// [`Communicator::all_to_all`] of f32 that travel as `wire`; what a rank keeps is not rounded.
    ///
    /// # Errors
    /// As [`Communicator::reduce_scatter`].
    pub fn all_to_all_wire(
        &self,
        data: &[f32],
        sent: &[usize],
        received: &[usize],
        wire: Wire,
    ) -> Result<Vec<f32>> {
        self.now(|i| i.all_to_all_wire(data, sent, received, wire))
    }

    /// [`Communicator::all_to_all_wire`] in the background.
    pub fn all_to_all_wire_start(
        &self,
        data: Vec<f32>,
        sent: Vec<usize>,
        received: Vec<usize>,
        wire: Wire,
    ) -> Handle<Vec<f32>> {
        self.start(move |i| i.all_to_all_wire(&data, &sent, &received, wire))
    }

    /// `data` of `root` for all.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        self.now(|i| i.broadcast(data, root))
    }

    /// [`Communicator::broadcast`] in the background.
    pub fn broadcast_start<T: Element>(&self, mut data: Vec<T>, root: usize) -> Handle<Vec<T>> {
        self.start(move |i| i.broadcast(&mut data, root).map(|()| data))
    }

    /// To one rank, which calls [`Communicator::receive`] with the same length.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn send<T: Element>(&self, data: &[T], to: usize) -> Result<()> {
        self.now(|i| i.send(data, to))
    }

    /// [`Communicator::send`] in the background.
    pub fn send_start<T: Element>(&self, data: Vec<T>, to: usize) -> Handle<Vec<T>> {
        self.start(move |i| i.send(&data, to).map(|()| data))
    }

    /// From one rank.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn receive<T: Element>(&self, data: &mut [T], from: usize) -> Result<()> {
        self.now(|i| i.receive(data, from))
    }

    /// [`Communicator::receive`] of `n` elements in the background.
    pub fn receive_start<T: Element>(&self, n: usize, from: usize) -> Handle<Vec<T>> {
        let mut data = vec![T::ZERO; n];
        self.start(move |i| i.receive(&mut data, from).map(|()| data))
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn barrier(&self) -> Result<()> {
        self.now(Inner::barrier)
    }

    /// [`Communicator::barrier`] in the background.
    pub fn barrier_start(&self) -> Handle<()> {
        self.start(Inner::barrier)
    }

    /// A group of those that give the same color, ordered by key, then by rank; `None` for a rank without a color. Its
    /// operations run beside this group's.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Communicator>> {
        let mine = [u32::from(color.is_some()), color.unwrap_or(0), key];
        let all = self.all_gather(&mine, &vec![3; self.world()])?;
        let id = self.inner.splits.fetch_add(1, Ordering::Relaxed);
        let Some(color) = color else { return Ok(None) };
        let mut members: Vec<(u32, usize)> = all
            .chunks_exact(3)
            .enumerate()
            .filter(|(_, c)| c[0] == 1 && c[1] == color)
            .map(|(rank, c)| (c[2], rank))
            .collect();
        members.sort_unstable();
        let members: Vec<usize> = members.into_iter().map(|m| m.1).collect();
        let mut part = Self::new(self.inner.transport.split(id, &members, color)?);
        let inner = Arc::get_mut(&mut part.inner).expect("just made");
        inner.failure = self.inner.failure.clone();
        Ok(Some(part))
    }

    /// What first went wrong in this group or one made of it.
    pub fn failure(&self) -> Option<CollectiveError> {
        lock(&self.inner.failure).clone()
    }

    /// Ends the group in good order: waits for the others, after which it is no failure that this rank goes away.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn finish(&self) -> Result<()> {
        self.barrier()?;
        self.inner.transport.finish();
        Ok(())
    }

    /// Tells the other ranks that this one stops, and why: they end with an error that says so. `for_good`: another try
    /// would fail alike.
    pub fn abort(&self, why: &str, for_good: bool) {
        self.inner.transport.abort(why, for_good);
    }
}
