//! [`Communicator`]: the operations, blocking and not, over any transport.

use super::element::{Element, Reduction};
use super::error::{CollectiveError, Result};
use super::local::Local;
use super::schedule::{Cut, Schedule, even, stretches};
use super::transport::{Operation, Transport};
use super::wire::{BLOCK, Wire};
use super::work::{Between, InPlace, Narrow, NarrowBetween, Work};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bytes a frame: large enough to be cheap, small enough to stay in a cache and to keep a ring moving.
const FRAME: usize = 256 << 10;
/// Below, everything is exchanged with everyone's partner at once.
const DOUBLING: usize = 32 << 10;
/// Below, halves are.
const HALVING: usize = 256 << 10;

type Job = Box<dyn FnOnce(&Inner) + Send>;

struct Inner {
    transport: Box<dyn Transport>,
    /// Held while an operation runs: one at a time.
    turn: Mutex<()>,
    /// Operations handed to the worker and not done.
    pending: Mutex<usize>,
    idle: Condvar,
    number: AtomicU64,
    splits: AtomicU64,
    busy_nanos: AtomicU64,
    waited_nanos: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
    /// What first went wrong, here or in a group within.
    failure: Arc<Mutex<Option<CollectiveError>>>,
}

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

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.transport.name())
    }
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

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    /// Remembers the first failure: who gets it as text, out of a graph's run, finds it there.
    fn noted<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(e) = &result
            && !matches!(e, CollectiveError::Argument(_))
        {
            lock(&self.failure).get_or_insert_with(|| e.clone());
        }
        result
    }

    fn rank(&self) -> usize {
        self.transport.rank()
    }
    fn world(&self) -> usize {
        self.transport.world()
    }

    /// Frames of so many bytes an element as it travels.
    fn cut(&self, element: usize) -> Cut {
        let chunk = (FRAME / element.max(1)) / BLOCK * BLOCK;
        Cut { chunk: chunk.max(BLOCK), lanes: self.transport.lanes() }
    }

    fn run(&self, op: &Operation, schedule: &Schedule, work: &mut dyn Work) -> Result<()> {
        for s in &schedule.steps {
            let to = if s.action.sends() { &self.sent } else { &self.received };
            to.fetch_add(work.len(s) as u64, Ordering::Relaxed);
        }
        self.transport.run(op, schedule, work)
    }

    fn operation(&self, kind: &'static str, bytes: usize) -> Operation {
        Operation { kind, number: self.number.fetch_add(1, Ordering::Relaxed) + 1, bytes }
    }

    fn all_reduce<T: Element>(&self, data: &mut [T], how: Reduction) -> Result<()> {
        if let Some(wire) = T::THROUGH_F32 {
            let mut wide: Vec<f32> = data.iter().map(|x| x.to_f32()).collect();
            match how {
                Reduction::Sum => self.all_reduce_wire(&mut wide, wire, None)?,
                // a choice among values loses nothing
                _ => self.all_reduce(&mut wide, how)?,
            }
            data.iter_mut().zip(wide).for_each(|(d, w)| *d = T::from_f32(w));
            return Ok(());
        }
        let bytes = size_of_val(data);
        let op = self.operation("all_reduce", bytes);
        let (rank, world, n, cut) = (self.rank(), self.world(), data.len(), self.cut(size_of::<T>()));
        if world == 1 {
            return Ok(());
        }
        let schedule = if bytes <= DOUBLING {
            Schedule::doubling_all_reduce(rank, world, n, cut)
        } else if bytes <= HALVING {
            Schedule::halving_all_reduce(rank, world, n, cut)
        } else {
            Schedule::ring_all_reduce(rank, world, n, cut)
        };
        self.run(&op, &schedule, &mut InPlace { data, how })
    }

    fn all_reduce_wire(&self, data: &mut [f32], wire: Wire, lost: Option<&mut [f32]>) -> Result<()> {
        if wire.is_exact() {
            let op = self.operation("all_reduce", size_of_val(data));
            return match self.transport.native_all_reduce(&op, data, Reduction::Sum) {
                Some(done) => done,
                None => self.all_reduce(data, Reduction::Sum),
            };
        }
        let op = self.operation("all_reduce", size_of_val(data));
        let (rank, world) = (self.rank(), self.world());
        if world == 1 {
            return Ok(());
        }
        // stretches are whole blocks, so that rounding does not depend on where a frame ends
        let ranges = blocks(data.len(), world);
        let schedule = Schedule::direct_reduce(rank, &ranges, true, self.cut(4));
        self.run(&op, &schedule, &mut Narrow::new(data, wire, lost))
    }

    fn reduce_scatter(&self, mut data: Vec<f32>, counts: &[usize], wire: Wire) -> Result<Vec<f32>> {
        let op = self.operation("reduce_scatter", 4 * data.len());
        self.check("reduce_scatter", counts, data.len())?;
        let (rank, ranges) = (self.rank(), stretches(counts));
        if self.world() > 1 {
            let cut = self.cut(4);
            if wire.is_exact() {
                let small = data.len() <= HALVING / 4;
                let schedule = match small {
                    true => Schedule::direct_reduce(rank, &ranges, false, cut),
                    false => Schedule::ring_reduce_scatter(rank, &ranges, cut),
                };
                self.run(&op, &schedule, &mut InPlace { data: &mut data, how: Reduction::Sum })?;
            } else {
                let schedule = Schedule::direct_reduce(rank, &ranges, false, cut);
                self.run(&op, &schedule, &mut Narrow::new(&mut data, wire, None))?;
            }
        }
        data.truncate(ranges[rank].end);
        Ok(data.split_off(ranges[rank].start))
    }

    fn all_gather<T: Element>(&self, own: &[T], counts: &[usize]) -> Result<Vec<T>> {
        let ranges = stretches(counts);
        let total = counts.iter().sum();
        let rank = self.rank();
        let op = self.operation("all_gather", total * size_of::<T>());
        self.check("all_gather", &counts[..counts.len().min(self.world())], total)?;
        self.check_own("all_gather", own.len(), counts[rank])?;
        let mut data = vec![T::ZERO; total];
        data[ranges[rank].clone()].copy_from_slice(own);
        if self.world() > 1 {
            let cut = self.cut(size_of::<T>());
            let schedule = match total * size_of::<T>() <= HALVING {
                true => Schedule::direct_all_gather(rank, &ranges, cut),
                false => Schedule::ring_all_gather(rank, &ranges, cut),
            };
            self.run(&op, &schedule, &mut InPlace { data: &mut data, how: Reduction::Sum })?;
        }
        Ok(data)
    }

    fn all_gather_wire(&self, own: &[f32], counts: &[usize], wire: Wire) -> Result<Vec<f32>> {
        if wire.is_exact() || self.world() == 1 {
            return self.all_gather(own, counts);
        }
        let ranges = stretches(counts);
        let total = counts.iter().sum();
        let rank = self.rank();
        let op = self.operation("all_gather", total * 4);
        self.check("all_gather", counts, total)?;
        self.check_own("all_gather", own.len(), counts[rank])?;
        let mut data = vec![0.0; total];
        data[ranges[rank].clone()].copy_from_slice(own);
        let cut = self.cut(4);
        let schedule = Schedule::direct_all_gather(rank, &ranges, cut);
        let mut work = Narrow::new(&mut data, wire, None);
        self.run(&op, &schedule, &mut work)?;
        // what the others got is what counts here too
        work.round(ranges[rank].clone(), cut);
        Ok(data)
    }

    fn all_to_all<T: Element>(&self, data: &[T], sent: &[usize], received: &[usize]) -> Result<Vec<T>> {
        let mut into = vec![T::ZERO; received.iter().sum()];
        self.all_to_all_into(data, sent, &mut into, received)?;
        Ok(into)
    }

    fn all_to_all_into<T: Element>(
        &self,
        data: &[T],
        sent: &[usize],
        into: &mut [T],
        received: &[usize],
    ) -> Result<()> {
        let op = self.operation("all_to_all", size_of_val(data));
        let schedule = self.exchange(data, sent, into, received)?;
        if self.world() > 1 {
            self.run(&op, &schedule, &mut Between { from: data, into })?;
        }
        Ok(())
    }

    fn all_to_all_wire(
        &self,
        data: &[f32],
        sent: &[usize],
        received: &[usize],
        wire: Wire,
    ) -> Result<Vec<f32>> {
        if wire.is_exact() {
            return self.all_to_all(data, sent, received);
        }
        let op = self.operation("all_to_all", size_of_val(data));
        let mut into = vec![0.0; received.iter().sum()];
        let schedule = self.exchange(data, sent, &mut into, received)?;
        if self.world() > 1 {
            self.run(&op, &schedule, &mut NarrowBetween { from: data, into: &mut into, wire })?;
        }
        Ok(into)
    }

    /// Checks an all_to_all's arguments and puts the own part in place.
    fn exchange<T: Element>(
        &self,
        data: &[T],
        sent: &[usize],
        into: &mut [T],
        received: &[usize],
    ) -> Result<Schedule> {
        self.check("all_to_all", sent, data.len())?;
        self.check("all_to_all", received, into.len())?;
        let rank = self.rank();
        self.check_own("all_to_all (to itself)", sent[rank], received[rank])?;
        let (from, to) = (stretches(sent), stretches(received));
        into[to[rank].clone()].copy_from_slice(&data[from[rank].clone()]);
        Ok(Schedule::all_to_all(rank, &from, &to, self.cut(size_of::<T>())))
    }

    fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        self.check_rank(root)?;
        let op = self.operation("broadcast", size_of_val(data));
        let cut = self.cut(size_of::<T>());
        let schedule = Schedule::broadcast(self.rank(), self.world(), root, data.len(), cut);
        self.run(&op, &schedule, &mut InPlace { data, how: Reduction::Sum })
    }

    fn check(&self, what: &str, counts: &[usize], total: usize) -> Result<()> {
        let (world, sum) = (self.world(), counts.iter().sum::<usize>());
        if counts.len() != world || sum != total {
            return Err(CollectiveError::Argument(format!(
                "{what}: {} counts that add up to {sum} were given; expected {world}, one a rank, that add up to {total}",
                counts.len()
            )));
        }
        Ok(())
    }

    fn check_own(&self, what: &str, got: usize, expected: usize) -> Result<()> {
        if got == expected {
            return Ok(());
        }
        let rank = self.rank();
        Err(CollectiveError::Argument(format!(
            "{what}: rank {rank} has {got} elements of its own; its count says {expected}"
        )))
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        if rank < self.world() {
            return Ok(());
        }
        Err(CollectiveError::Argument(format!("there is no rank {rank} among {}", self.world())))
    }
}

/// `n` elements in `world` stretches of whole blocks (the last may end early).
fn blocks(n: usize, world: usize) -> Vec<std::ops::Range<usize>> {
    even(n.div_ceil(BLOCK), world).into_iter().map(|r| n.min(r.start * BLOCK)..n.min(r.end * BLOCK)).collect()
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

    /// Tells the other ranks that this one stops, and why: they end with an error that says so.
    pub fn abort(&self, why: &str) {
        self.inner.transport.abort(why);
    }
}

impl Inner {
    fn send<T: Element>(&self, data: &[T], to: usize) -> Result<()> {
        self.check_peer(to)?;
        let op = self.operation("send", size_of_val(data));
        let schedule = Schedule::send(to, data.len(), self.cut(size_of::<T>()));
        self.run(&op, &schedule, &mut Between { from: data, into: &mut [] })
    }

    fn receive<T: Element>(&self, data: &mut [T], from: usize) -> Result<()> {
        self.check_peer(from)?;
        let op = self.operation("send", size_of_val(data));
        let schedule = Schedule::receive(from, data.len(), self.cut(size_of::<T>()));
        self.run(&op, &schedule, &mut Between { from: &[], into: data })
    }

    fn barrier(&self) -> Result<()> {
        let op = self.operation("barrier", 0);
        let cut = self.cut(1);
        let schedule = Schedule::doubling_all_reduce(self.rank(), self.world(), 1, cut);
        self.run(&op, &schedule, &mut InPlace { data: &mut [0u8], how: Reduction::Max })
    }

    fn check_peer(&self, peer: usize) -> Result<()> {
        self.check_rank(peer)?;
        if peer == self.rank() {
            return Err(CollectiveError::Argument(format!("rank {peer} cannot send to itself")));
        }
        Ok(())
    }
}
