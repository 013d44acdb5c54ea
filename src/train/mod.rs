//! Trainer, run folder, checkpoints, metrics, schedules.

pub mod metrics;
pub mod schedule;
