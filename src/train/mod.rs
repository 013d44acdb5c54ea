//! Trainer, run folder, checkpoints, metrics, schedules.

pub mod checkpoint;
pub mod metrics;
pub mod run;
pub mod schedule;
