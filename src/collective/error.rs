//! What can go wrong between ranks: every message names the rank and the operation.

use std::fmt;
use std::time::Duration;

/// An error of a collective operation, of a transport, or of joining a group.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CollectiveError {
    /// A rank is gone or silent. Every other rank of the group gets this error, with the same rank in it.
    #[error("rank {rank} was lost during {operation}: {why}")]
    Lost {
        /// The rank that failed first.
        rank: usize,
        /// What this rank was doing when it heard.
        operation: String,
        /// What happened.
        why: String,
    },
    /// A rank stopped on its own account, and said why. Every other rank of the group gets this error.
    #[error("rank {rank} stopped: {why}")]
    Stopped {
        /// The rank that failed first.
        rank: usize,
        /// Its own words.
        why: String,
        /// Whether another try would fail alike: wrong data, another configuration.
        for_good: bool,
    },
    /// Two ranks are not doing the same thing.
    #[error(
        "ranks {rank} and {peer} disagree: {why}; every rank must call the same operations in the same order"
    )]
    Mismatch {
        /// This rank.
        rank: usize,
        /// The other.
        peer: usize,
        /// How they differ.
        why: String,
    },
    /// Bytes arrived damaged.
    #[error("a damaged frame from rank {rank} during {operation}: {why}")]
    Damaged {
        /// The sender.
        rank: usize,
        /// What this rank was doing.
        operation: String,
        /// What is wrong with it.
        why: String,
    },
    /// The group could not be formed: others are late, or gone. Another try may do.
    #[error("{0}")]
    Join(String),
    /// The group could not be formed because of what this rank was told: another try would fail alike.
    #[error("{0}")]
    Setup(String),
    /// A transport that this machine or build lacks.
    #[error("--collective {transport} is not available: {why}; {instead}")]
    Unavailable {
        /// Its name.
        transport: &'static str,
        /// What is missing.
        why: String,
        /// What to install, and what to use meanwhile.
        instead: String,
    },
    /// Arguments that do not fit together.
    #[error("{0}")]
    Argument(String),
}

/// What ended a group, as all of its ranks hear of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The rank that failed first.
    pub rank: usize,
    /// In which way.
    pub cause: Cause,
    /// What happened.
    pub why: String,
}

/// In which way a rank failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Others noticed that it is gone, silent or damaged.
    Lost,
    /// It says so itself; another try may do.
    Stopped,
    /// It says so itself, and another try would fail alike.
    Refused,
}

impl Cause {
    /// That of a rank that says itself that it stops.
    pub fn stopped(for_good: bool) -> Self {
        if for_good { Cause::Refused } else { Cause::Stopped }
    }
}

impl Failure {
    /// Of this rank.
    pub fn new(rank: usize, cause: Cause, why: impl Into<String>) -> Self {
        Failure { rank, cause, why: why.into() }
    }

    /// The error of a rank that hears of it during `operation`.
    pub fn during(self, operation: &dyn fmt::Display) -> CollectiveError {
        let Failure { rank, cause, why } = self;
        match cause {
            Cause::Lost => CollectiveError::Lost { rank, operation: operation.to_string(), why },
            Cause::Stopped | Cause::Refused => {
                CollectiveError::Stopped { rank, why, for_good: cause == Cause::Refused }
            }
        }
    }
}

impl CollectiveError {
    /// The other rank because of which this one fails; `None` where it fails on its own account.
    pub fn because_of(&self) -> Option<usize> {
        match self {
            CollectiveError::Lost { rank, .. } | CollectiveError::Stopped { rank, .. } => Some(*rank),
            _ => None,
        }
    }

    /// Whether another try may do.
    pub fn may_pass(&self) -> bool {
        use CollectiveError::{Damaged, Join, Lost, Stopped};
        matches!(self, Lost { .. } | Damaged { .. } | Join(_) | Stopped { for_good: false, .. })
    }

    /// A silent peer.
    pub fn silent(rank: usize, operation: &str, timeout: Duration) -> Self {
        let why =
            format!("nothing was heard of it for {:.0} s (--collective-timeout)", timeout.as_secs_f64());
        CollectiveError::Lost { rank, operation: operation.into(), why }
    }
}

/// Shorthand.
pub type Result<T> = std::result::Result<T, CollectiveError>;
