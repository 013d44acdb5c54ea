//! What can go wrong between ranks: every message names the rank and the operation.

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

impl CollectiveError {
    /// A silent peer.
    pub fn silent(rank: usize, operation: &str, timeout: Duration) -> Self {
        let why =
            format!("nothing was heard of it for {:.0} s (--collective-timeout)", timeout.as_secs_f64());
        CollectiveError::Lost { rank, operation: operation.into(), why }
    }
}

/// Shorthand.
pub type Result<T> = std::result::Result<T, CollectiveError>;
