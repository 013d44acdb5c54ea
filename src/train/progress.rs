//! Where a run stands: everything beside the numbers on the device that the next step depends on.

use crate::data::metrics::Detail;
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
    pub detail: Detail,
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
    /// Where the time went up to the last logged line.
    pub times: Times,
    /// Seconds since the start, those of earlier processes included.
    pub seconds: f64,
    /// Diagnoses done.
    pub diagnoses: u64,
    /// The best evaluation.
    pub best: Option<Best>,
    /// Evaluations since then.
    pub bad_evals: usize,
    /// Times that a plateau has lowered the learning rate.
    pub cuts: u32,
    /// Evaluations without a better one since the last of these, or since the best.
    pub flat: usize,
    /// Whether patience has run out.
    pub stopped_early: bool,
}

/// Seconds of a run by what they went to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// Waiting for batches.
    pub data: f64,
    /// Steps.
    pub compute: f64,
    /// Evaluations.
    pub evaluation: f64,
    /// Diagnoses of the residual stream.
    pub diagnosis: f64,
    /// Writing checkpoints and the best weights.
    pub checkpoints: f64,
}

/// What happened since the last logged line; the clock stands while something else than training goes on.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Window {
    #[serde(skip)]
    begin: Option<Instant>,
    /// Seconds of training, those included that were spent waiting.
    pub seconds: f64,
    /// Seconds of waiting for batches.
    pub waited: f64,
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

    /// What the window has come to; it begins anew, and its clock stands if it stood.
    pub fn take(&mut self) -> Window {
        let running = self.begin.is_some();
        self.pause();
        let fresh = Window { begin: running.then(Instant::now), ..Window::default() };
        std::mem::replace(self, fresh)
    }
}

impl Times {
    /// Adds a window of training.
    pub fn add(&mut self, w: &Window) {
        self.data += w.waited;
        self.compute += w.seconds - w.waited;
    }

    /// Seconds of training.
    pub fn training(&self) -> f64 {
        self.data + self.compute
    }
}
