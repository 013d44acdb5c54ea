//! What moves bytes: the part of the collective layer that differs between `local`, `tcp`, `mpi` and `nccl`.

use super::element::Reduction;
use super::error::Result;
use super::schedule::Schedule;
use super::work::Work;
use std::fmt;

/// An operation, for messages.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// `all_reduce` and its like.
    pub kind: &'static str,
    /// Its place among this communicator's operations.
    pub number: u64,
    /// Bytes of the data.
    pub bytes: usize,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{} ({})", self.kind, self.number, crate::text::human_bytes(self.bytes as u64))
    }
}

/// One rank's end of a group.
pub trait Transport: Send + Sync {
    /// `local`, `tcp`, `mpi` or `nccl`.
    fn name(&self) -> &'static str;
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// Ranks in the group.
    fn world(&self) -> usize;
    /// Connections between two ranks.
    fn lanes(&self) -> usize;
    /// Executes a schedule. Every rank calls with the schedules of the same operation; calls of one rank come one at a time.
    ///
    /// # Errors
    /// If a rank is lost, silent, or does something else. The group is unusable afterwards.
    fn run(&self, op: &Operation, schedule: &Schedule, work: &mut dyn Work) -> Result<()>;
    /// The library's own all_reduce in f32, if there is one and it is to be preferred.
    fn native_all_reduce(&self, _: &Operation, _: &mut [f32], _: Reduction) -> Option<Result<()>> {
        None
    }
    /// A group of the given ranks of this one, in that order; this rank is among them. `id` is the same on all of them and
    /// differs between calls; groups of one call differ in `color`.
    fn split(&self, id: u64, members: &[usize], color: u32) -> Result<Box<dyn Transport>>;
    /// Tells the others that this rank will not go on, and why; `for_good` where another try would fail alike.
    fn abort(&self, why: &str, for_good: bool);
    /// From now on it is no failure that this rank goes away.
    fn finish(&self);
}
