//! Trainer, run folder, checkpoints, metrics, schedules.

pub mod checkpoint;
pub mod describe;
pub mod diagnose;
mod evaluate;
pub mod events;
pub mod history;
pub mod infer;
pub mod memory;
pub mod metrics;
pub mod nan;
pub mod progress;
#[cfg(not(target_arch = "wasm32"))]
pub mod ranks;
#[cfg(target_arch = "wasm32")]
#[path = "ranks_web.rs"]
pub mod ranks;
#[cfg(not(target_arch = "wasm32"))]
mod ranks_state;
pub mod resume;
pub mod run;
pub mod save;
pub mod schedule;
pub mod schema;
pub mod sharded;
pub mod step;
pub mod store;
pub mod tables;
pub mod tally;
#[cfg(not(target_arch = "wasm32"))]
pub mod tensorboard;
pub(crate) mod trained_as;
pub mod trainer;
mod values;
