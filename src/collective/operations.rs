//! What the operations of a [`Communicator`](super::Communicator) do: which schedule, on which data.

use super::element::{Element, Reduction};
use super::error::{CollectiveError, Result};
use super::schedule::{Cut, Schedule, even, stretches};
use super::transport::{Operation, Transport};
use super::wire::{BLOCK, Wire};
use super::work::{Between, InPlace, Narrow, NarrowBetween, Work};
use crate::sync::lock;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// Bytes a frame: large enough to be cheap, small enough to stay in a cache and to keep a ring moving.
const FRAME: usize = 256 << 10;
/// Below, everything is exchanged with everyone's partner at once.
const DOUBLING: usize = 32 << 10;
/// Below, halves are.
const HALVING: usize = 2 << 20;

/// One end of a group, shared by its clones and its worker.
pub(super) struct Inner {
    pub(super) transport: Box<dyn Transport>,
    /// Held while an operation runs: one at a time.
    pub(super) turn: Mutex<()>,
    /// Operations handed to the worker and not done.
    pub(super) pending: Mutex<usize>,
    pub(super) idle: Condvar,
    pub(super) number: AtomicU64,
    pub(super) splits: AtomicU64,
    pub(super) busy_nanos: AtomicU64,
    pub(super) waited_nanos: AtomicU64,
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    /// What first went wrong, here or in a group within.
    pub(super) failure: Arc<Mutex<Option<CollectiveError>>>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.transport.name())
    }
}

impl Inner {
    /// Remembers the first failure: who gets it as text, out of a graph's run, finds it there.
    pub(super) fn noted<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(e) = &result
            && !matches!(e, CollectiveError::Argument(_))
        {
            lock(&self.failure).get_or_insert_with(|| e.clone());
        }
        result
    }

    pub(super) fn rank(&self) -> usize {
        self.transport.rank()
    }
    pub(super) fn world(&self) -> usize {
        self.transport.world()
    }

    /// Frames of so many bytes an element as it travels.
    pub(super) fn cut(&self, element: usize) -> Cut {
        let chunk = (FRAME / element.max(1)) / BLOCK * BLOCK;
        Cut { chunk: chunk.max(BLOCK), lanes: self.transport.lanes() }
    }

    pub(super) fn run(&self, op: &Operation, schedule: &Schedule, work: &mut dyn Work) -> Result<()> {
        for s in &schedule.steps {
            let to = if s.action.sends() { &self.sent } else { &self.received };
            to.fetch_add(work.len(s) as u64, Ordering::Relaxed);
        }
        self.transport.run(op, schedule, work)
    }

    pub(super) fn operation(&self, kind: &'static str, bytes: usize) -> Operation {
        Operation { kind, number: self.number.fetch_add(1, Ordering::Relaxed) + 1, bytes }
    }

    pub(super) fn all_reduce<T: Element>(&self, data: &mut [T], how: Reduction) -> Result<()> {
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

    pub(super) fn all_reduce_wire(
        &self,
        data: &mut [f32],
        wire: Wire,
        lost: Option<&mut [f32]>,
    ) -> Result<()> {
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

    pub(super) fn reduce_scatter(
        &self,
        mut data: Vec<f32>,
        counts: &[usize],
        wire: Wire,
    ) -> Result<Vec<f32>> {
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

    pub(super) fn all_gather<T: Element>(&self, own: &[T], counts: &[usize]) -> Result<Vec<T>> {
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

    pub(super) fn all_gather_wire(&self, own: &[f32], counts: &[usize], wire: Wire) -> Result<Vec<f32>> {
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

    pub(super) fn all_to_all<T: Element>(
        &self,
        data: &[T],
        sent: &[usize],
        received: &[usize],
    ) -> Result<Vec<T>> {
        let mut into = vec![T::ZERO; received.iter().sum()];
        self.all_to_all_into(data, sent, &mut into, received)?;
        Ok(into)
    }

    pub(super) fn all_to_all_parts<T: Element>(
        &self,
        data: &[T],
        lengths: &[u32],
        parts: &[usize],
        own: usize,
    ) -> Result<(Vec<T>, Vec<u32>)> {
        let theirs = self.all_to_all(lengths, parts, &vec![own; self.world()])?;
        let total = |lengths: &[u32]| lengths.iter().map(|n| *n as usize).sum::<usize>();
        let mut rest = lengths;
        let sent: Vec<usize> = parts
            .iter()
            .map(|n| {
                let (head, tail) = rest.split_at(*n);
                rest = tail;
                total(head)
            })
            .collect();
        let received: Vec<usize> =
            (0..self.world()).map(|r| total(&theirs[r * own..(r + 1) * own])).collect();
        Ok((self.all_to_all(data, &sent, &received)?, theirs))
    }

    pub(super) fn all_to_all_into<T: Element>(
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

    pub(super) fn all_to_all_wire(
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
    pub(super) fn exchange<T: Element>(
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

    pub(super) fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        self.check_rank(root)?;
        let op = self.operation("broadcast", size_of_val(data));
        let cut = self.cut(size_of::<T>());
        let schedule = Schedule::broadcast(self.rank(), self.world(), root, data.len(), cut);
        self.run(&op, &schedule, &mut InPlace { data, how: Reduction::Sum })
    }

    pub(super) fn check(&self, what: &str, counts: &[usize], total: usize) -> Result<()> {
        let (world, sum) = (self.world(), counts.iter().sum::<usize>());
        if counts.len() != world || sum != total {
            return Err(CollectiveError::Argument(format!(
                "{what}: {} counts that add up to {sum} were given; expected {world}, one a rank, that add up to {total}",
                counts.len()
            )));
        }
        Ok(())
    }

    pub(super) fn check_own(&self, what: &str, got: usize, expected: usize) -> Result<()> {
        if got == expected {
            return Ok(());
        }
        let rank = self.rank();
        Err(CollectiveError::Argument(format!(
            "{what}: rank {rank} has {got} elements of its own; its count says {expected}"
        )))
    }

    pub(super) fn check_rank(&self, rank: usize) -> Result<()> {
        if rank < self.world() {
            return Ok(());
        }
        Err(CollectiveError::Argument(format!("there is no rank {rank} among {}", self.world())))
    }

    pub(super) fn send<T: Element>(&self, data: &[T], to: usize) -> Result<()> {
        self.check_peer(to)?;
        let op = self.operation("send", size_of_val(data));
        let schedule = Schedule::send(to, data.len(), self.cut(size_of::<T>()));
        self.run(&op, &schedule, &mut Between { from: data, into: &mut [] })
    }

    pub(super) fn receive<T: Element>(&self, data: &mut [T], from: usize) -> Result<()> {
        self.check_peer(from)?;
        let op = self.operation("send", size_of_val(data));
        let schedule = Schedule::receive(from, data.len(), self.cut(size_of::<T>()));
        self.run(&op, &schedule, &mut Between { from: &[], into: data })
    }

    pub(super) fn barrier(&self) -> Result<()> {
        let op = self.operation("barrier", 0);
        let cut = self.cut(1);
        let schedule = Schedule::doubling_all_reduce(self.rank(), self.world(), 1, cut);
        self.run(&op, &schedule, &mut InPlace { data: &mut [0u8], how: Reduction::Max })
    }

    pub(super) fn check_peer(&self, peer: usize) -> Result<()> {
        self.check_rank(peer)?;
        if peer == self.rank() {
            return Err(CollectiveError::Argument(format!("rank {peer} cannot send to itself")));
        }
        Ok(())
    }
}

/// `n` elements in `world` stretches of whole blocks (the last may end early).
fn blocks(n: usize, world: usize) -> Vec<std::ops::Range<usize>> {
    even(n.div_ceil(BLOCK), world).into_iter().map(|r| n.min(r.start * BLOCK)..n.min(r.end * BLOCK)).collect()
}
