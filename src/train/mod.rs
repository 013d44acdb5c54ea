//! Trainer, run folder, checkpoints, metrics, schedules.

pub mod checkpoint;
pub mod infer;
pub mod metrics;
pub mod run;
pub mod schedule;
pub mod step;
pub mod store;
pub mod trainer;
