//! Trainer, run folder, checkpoints, metrics, schedules.

pub mod checkpoint;
pub mod run;
pub mod metrics;
pub mod schedule;
