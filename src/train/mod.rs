//! Trainer, run folder, checkpoints, metrics, schedules.

pub mod checkpoint;
pub mod run;
