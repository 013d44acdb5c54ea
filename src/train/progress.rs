//! Where a run stands: everything beside the numbers on the device that the next step depends on.

use crate::data::metrics::Metrics;
use serde::{Deserialize, Serialize};
use web_time::Instant;

/// The best evaluation so far.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Best {
    /// What is compared; lower is better.
    pub score: f64,
    /// Updates that led to it.
    pub step: u64,
    /// All of its metrics.
    pub metrics: Metrics,
}

/// A run's place between two steps. A checkpoint holds it as JSON.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Updates done.
    pub step: u64,
    /// Epoch in progress, from 0.
    pub epoch: usize,
    /// Batches of the epoch that were used.
    pub batch: u64,
    /// Whether an evaluation in the middle of the epoch is due before the next batch.
    pub evaluate: bool,
    /// Rows trained on.
    pub rows: u64,
    /// What happened since the last logged line.
    pub window: Window,
    /// Seconds of training up to the last logged line.
    pub training: f64,
    /// Seconds since the start, those of earlier processes included.
    pub seconds: f64,
    /// Seconds spent on diagnoses.
    pub diagnosing: f64,
    /// Diagnoses done.
    pub diagnoses: u64,
    /// The best evaluation.
    pub best: Option<Best>,
    /// Evaluations since then.
    pub bad_evals: usize,
    /// Whether patience has run out.
    pub stopped_early: bool,
}

/// What happened since the last logged line; the clock stands while something else than training goes on.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Window {
    #[serde(skip)]
    begin: Option<Instant>,
    seconds: f64,
    /// Rows.
    pub rows: u64,
    /// Updates.
    pub steps: u64,
}

impl Window {
    /// Stops the clock.
    pub fn pause(&mut self) {
        self.seconds += self.begin.take().map_or(0.0, |b| b.elapsed().as_secs_f64());
    }

    /// Starts it again.
    pub fn resume(&mut self) {
        self.begin = Some(Instant::now());
    }

    /// Seconds of training in the window, which begins anew; its clock stands if it stood.
    pub fn take(&mut self) -> f64 {
        let running = self.begin.is_some();
        self.pause();
        let seconds = self.seconds;
        *self = Window { begin: running.then(Instant::now), ..Window::default() };
        seconds
    }
}
