//! Operations between ranks: sums, gathers and exchanges among the processes (or threads) that train one model together.
//!
//! This room knows bytes and ranks, nothing of graphs. An operation is a [`schedule`] of frames, made by pure functions and
//! executed by a [`transport`]: threads ([`local`]), TCP ([`tcp`]). What f32 values look like on the way is a [`wire`]
//! format of its own; sums are made in f32, in an order that depends on ranks only: the same inputs give the same bits,
//! on every rank.

mod comm;
pub mod connect;
pub mod element;
pub mod env;
pub mod error;
pub mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(all(feature = "nccl", target_os = "linux"))]
pub mod nccl;
mod operations;
pub mod schedule;
pub mod tcp;
#[cfg(test)]
mod tests;
pub mod transport;
pub mod wire;
pub mod work;

pub use comm::{Communicator, Handle, Stats};
pub use connect::{Kind, Options, connect};
pub use element::{Element, Reduction};
pub use env::Place;
pub use error::{CollectiveError, Result};
pub use wire::Wire;
