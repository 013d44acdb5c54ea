//! Trainer, run folder, checkpoints, metrics, schedules.
