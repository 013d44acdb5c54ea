//! The transport of clusters: the MPI library that is there, under `mpirun` or `srun` (cargo feature `mpi`).
//!
//! Schedules run over its point-to-point messages, each with a head of 8 bytes that names the operation; sums of f32 that
//! travel as they are go by `MPI_Iallreduce`. Nothing blocks in the library: this polls, yields, and sleeps a little when
//! nothing moves, so that a rank that makes no progress is noticed. There are no heartbeats as over TCP: a rank is taken
//! for lost when an operation makes no progress for the timeout, which must therefore be longer than any difference
//! between ranks. A process that dies is noticed by `mpirun`, which ends the others.

mod library;
#[cfg(test)]
mod tests;

use super::element::Reduction;
use super::error::{CollectiveError, Result};
use super::schedule::{Action, Schedule, Step};
use super::transport::{Operation, Transport};
use super::work::Work;
use library::{Code, Flight, Group};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes that name the operation.
const HEAD: usize = 8;
/// Frames to or from one rank that are under way at once.
const AHEAD: usize = 8;
const FRAMES: i32 = 1;
const QUESTIONS: i32 = 2;
/// Elements of one native sum, less than its count can say.
const SUM: usize = 1 << 30;

/// One rank of a group under MPI.
pub struct Mpi {
    group: Group,
    rank: usize,
    world: usize,
    timeout: Duration,
    /// The group of all, by which the library ends.
    whole: bool,
}

/// Waits longer the longer nothing moves.
struct Idle {
    since: Instant,
    naps: u32,
}

impl Idle {
    fn new() -> Self {
        Idle { since: Instant::now(), naps: 0 }
    }

    /// False when nothing has moved for `timeout`.
    fn nap(&mut self, timeout: Duration) -> bool {
        match self.naps {
            // other ranks may be waiting for this processor
            0..40 => std::thread::yield_now(),
            n => std::thread::sleep(Duration::from_micros(20 << ((n - 40) / 16).min(5))),
        }
        self.naps = self.naps.saturating_add(1);
        self.since.elapsed() < timeout
    }
}

impl Mpi {
    /// All processes that mpirun or srun started; a process that neither started is a rank alone.
    ///
    /// # Errors
    /// If the library does not start or allows too few threads.
    pub fn join(timeout: Duration) -> Result<Mpi> {
        let group = Group::world()?;
        Ok(Mpi { group, rank: group.rank(), world: group.size(), timeout, whole: true })
    }

    fn broken(op: &Operation, rank: usize, code: Code) -> CollectiveError {
        CollectiveError::Lost { rank, operation: op.to_string(), why: format!("MPI reports: {code}") }
    }

    fn disagree(&self, peer: usize, why: String) -> CollectiveError {
        CollectiveError::Mismatch { rank: self.rank, peer, why }
    }

    /// Nothing has moved for the timeout: asks every rank for a sign of life, as they all ask when they notice. `peer`: one
    /// that was waited for.
    fn silent(&self, op: &Operation, peer: usize) -> CollectiveError {
        let mut asked = vec![];
        let mut unheard = vec![];
        for other in (0..self.world).filter(|r| *r != self.rank) {
            asked.extend(self.group.send(vec![0], 8, other, QUESTIONS));
            match self.group.receive(8, other, QUESTIONS) {
                Ok(flight) => unheard.push((other, flight)),
                Err(e) => return Self::broken(op, other, e),
            }
        }
        let end =
            Instant::now() + (self.timeout / 4).clamp(Duration::from_millis(500), Duration::from_secs(5));
        while !unheard.is_empty() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
            for flight in &mut asked {
                // whether it has gone does not matter; testing is what makes the library move
                let _ = flight.test();
            }
            unheard.retain_mut(|(_, flight)| !matches!(flight.test(), Ok(Some(_))));
        }
        match unheard.first() {
            Some((rank, _)) => CollectiveError::silent(*rank, &op.to_string(), self.timeout),
            None => self.disagree(
                peer,
                format!("{op} made no progress within --collective-timeout, though every rank is alive"),
            ),
        }
    }

    fn take(&self, op: &Operation, step: &Step, flight: &mut Flight, work: &mut dyn Work) -> Result<bool> {
        let len = work.len(step);
        let got = match flight.test() {
            Ok(None) => return Ok(false),
            Ok(Some(got)) => got,
            Err(e) if e.is_truncation() => {
                let why = format!("a longer frame arrived in {}, which expects {len} bytes", op.kind);
                return Err(self.disagree(step.peer, why));
            }
            Err(e) => return Err(Self::broken(op, step.peer, e)),
        };
        let bytes = flight.bytes(got);
        if got != HEAD + len || bytes[..HEAD] != head(op) {
            let why = format!(
                "a frame of {} bytes for another operation arrived in {}, which expects {len} bytes",
                got.saturating_sub(HEAD),
                op.kind
            );
            return Err(self.disagree(step.peer, why));
        }
        work.absorb(step, &bytes[HEAD..]);
        Ok(true)
    }

    fn execute(&self, op: &Operation, schedule: &Schedule, work: &mut dyn Work) -> Result<()> {
        let steps = &schedule.steps;
        let queues = || vec![VecDeque::new(); self.world];
        let (mut sends, mut receipts): (Vec<VecDeque<usize>>, _) = (queues(), queues());
        for (i, s) in steps.iter().enumerate() {
            if s.action.sends() { sends[s.peer].push_back(i) } else { receipts[s.peer].push_back(i) }
        }
        let mut leaving: Vec<VecDeque<Flight>> = (0..self.world).map(|_| VecDeque::new()).collect();
        let mut coming: Vec<VecDeque<(usize, Flight)>> = (0..self.world).map(|_| VecDeque::new()).collect();
        let mut spare: Vec<Vec<u64>> = vec![];
        let mut done = vec![false; steps.len()];
        let ready = |done: &[bool], s: &Step| s.after.is_none_or(|a| done[a]);
        let mut left = steps.len();
        let mut idle = Idle::new();
        while left > 0 {
            let mut moved = false;
            for (peer, queue) in sends.iter_mut().enumerate() {
                let away = &mut leaving[peer];
                while let Some(flight) = away.front_mut() {
                    if flight.test().map_err(|e| Self::broken(op, peer, e))?.is_none() {
                        break;
                    }
                    spare.extend(away.pop_front().map(Flight::into_buffer));
                    (moved, left) = (true, left - 1);
                }
                while let Some(&i) = queue.front() {
                    let s = &steps[i];
                    // a copy is taken before the next receipt changes the data
                    if !ready(&done, s) || away.len() >= AHEAD && s.action != Action::SendCopy {
                        break;
                    }
                    let (bytes, len) = stage(op, s, work, spare.pop().unwrap_or_default());
                    away.push_back(
                        self.group.send(bytes, len, peer, FRAMES).map_err(|e| Self::broken(op, peer, e))?,
                    );
                    queue.pop_front();
                    (done[i], moved) = (true, true);
                }
            }
            for (peer, queue) in receipts.iter_mut().enumerate() {
                while coming[peer].len() < AHEAD
                    && let Some(i) = queue.pop_front()
                {
                    let flight = self.group.receive(HEAD + work.len(&steps[i]), peer, FRAMES);
                    coming[peer].push_back((i, flight.map_err(|e| Self::broken(op, peer, e))?));
                }
                let Some((i, flight)) = coming[peer].front_mut() else { continue };
                let i = *i;
                // one frame, then what it made ready is sent, from the data as they are then
                if ready(&done, &steps[i]) && self.take(op, &steps[i], flight, work)? {
                    coming[peer].pop_front();
                    (done[i], moved, left) = (true, true, left - 1);
                    break;
                }
            }
            if moved {
                idle = Idle::new();
            } else if left > 0 && !idle.nap(self.timeout) {
                let waited = coming.iter().position(|c| !c.is_empty());
                let waited = waited.or_else(|| leaving.iter().position(|l| !l.is_empty()));
                return Err(self.silent(op, waited.unwrap_or(self.rank)));
            }
        }
        Ok(())
    }

    fn native_sum(&self, op: &Operation, data: &mut [f32]) -> Result<()> {
        for part in data.chunks_mut(SUM) {
            let mut flight = self.group.sum(part).map_err(|e| Self::broken(op, self.rank, e))?;
            let mut idle = Idle::new();
            while flight.test().map_err(|e| Self::broken(op, self.rank, e))?.is_none() {
                if !idle.nap(self.timeout) {
                    return Err(self.silent(op, (self.rank + 1) % self.world));
                }
            }
            part.copy_from_slice(flight.floats());
        }
        Ok(())
    }
}

fn head(op: &Operation) -> [u8; HEAD] {
    xxh3_64(op.kind.as_bytes()).to_le_bytes()
}

/// Head and payload of a sending step, in `buffer`; and their length.
fn stage(op: &Operation, step: &Step, work: &mut dyn Work, mut buffer: Vec<u64>) -> (Vec<u64>, usize) {
    let len = HEAD + work.len(step);
    if buffer.len() * 8 < len {
        buffer.resize(len.div_ceil(8), 0);
    }
    let place: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut buffer)[..len];
    place[..HEAD].copy_from_slice(&head(op));
    match work.view(step) {
        Some(view) => place[HEAD..].copy_from_slice(view),
        None => {
            let mut bytes = Vec::with_capacity(len);
            work.encode(step, &mut bytes);
            place[HEAD..].copy_from_slice(&bytes);
        }
    }
    (buffer, len)
}

impl Transport for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }
    fn rank(&self) -> usize {
        self.rank
    }
    fn world(&self) -> usize {
        self.world
    }
    fn lanes(&self) -> usize {
        1
    }

    fn run(&self, op: &Operation, schedule: &Schedule, work: &mut dyn Work) -> Result<()> {
        self.execute(op, schedule, work)
    }

    fn native_all_reduce(&self, op: &Operation, data: &mut [f32], how: Reduction) -> Option<Result<()>> {
        (how == Reduction::Sum && self.world > 1).then(|| self.native_sum(op, data))
    }

    fn split(&self, id: u64, members: &[usize], _: u32) -> Result<Box<dyn Transport>> {
        // only the members call this, so it cannot be MPI_Comm_split; groups made at once have no member in common
        let group = self.group.some(members, (id % 0x4000) as i32).map_err(|e| {
            CollectiveError::Join(format!("MPI cannot make a group of ranks {members:?}: {e}"))
        })?;
        Ok(Box::new(Mpi {
            group,
            rank: group.rank(),
            world: group.size(),
            timeout: self.timeout,
            whole: false,
        }))
    }

    /// Ends every process of the job: MPI has no way to tell them why, so it is said here.
    fn abort(&self, why: &str, for_good: bool) {
        eprintln!("rank {} stops, and with it the job: {why}", self.rank);
        // as this program's own exit codes: bad input, or another try may do
        self.group.abort(if for_good { 2 } else { 75 });
    }

    fn finish(&self) {
        if self.whole {
            library::end();
        }
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if self.whole && !library::has_ended() {
            if self.world > 1 {
                self.abort("it ended without saying so", false);
            }
            library::end();
        }
    }
}
