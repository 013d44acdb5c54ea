//! Trainer, run folder, checkpoints, metrics, schedules.

pub mod checkpoint;
pub mod describe;
pub mod diagnose;
pub mod history;
pub mod infer;
pub mod memory;
pub mod metrics;
pub mod run;
pub mod schedule;
pub mod step;
pub mod store;
#[cfg(not(target_arch = "wasm32"))]
pub mod tensorboard;
pub mod trainer;
