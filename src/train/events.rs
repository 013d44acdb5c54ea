//! What a run tells: events, its summary, and who listens.

use super::progress::Times;
use super::tally::RankRecord;
use crate::data::metrics::{Decile, GroupedAuc, Metrics};
use crate::diagnose::record::number;
use crate::diagnose::{Record, Snapshot};
use serde::{Deserialize, Serialize};
use std::future::Future;
use std::pin::Pin;

/// What the loop reports while it runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Event {
    /// Every `log_every` steps.
    Step {
        /// Steps done.
        step: u64,
        /// Steps of the whole run.
        total_steps: u64,
        /// Epoch, from 1.
        epoch: usize,
        /// Rows seen in this run.
        rows: u64,
        /// Mean training loss (cross-entropy, nats) since the last report.
        #[serde(deserialize_with = "number")]
        loss: f64,
        /// Dense learning rate of the last step.
        #[serde(deserialize_with = "number")]
        lr: f64,
        /// Global gradient norm of the last step, before clipping.
        #[serde(deserialize_with = "number")]
        grad_norm: f64,
        /// Rows a second since the last report.
        #[serde(deserialize_with = "number")]
        rows_per_s: f64,
        /// Share of that time spent waiting for batches, 0 to 1.
        #[serde(default, deserialize_with = "number")]
        data_wait: f64,
        /// Seconds since the start of training.
        #[serde(deserialize_with = "number")]
        seconds: f64,
    },
    /// After each evaluation.
    Eval {
        /// Steps done.
        step: u64,
        /// Epoch, from 1.
        epoch: usize,
        /// Metrics on the validation rows.
        #[serde(flatten)]
        metrics: Metrics,
        /// Whether these are the best so far (`train.monitor`), and kept.
        best: bool,
        /// Seconds since the start of training.
        #[serde(deserialize_with = "number")]
        seconds: f64,
    },
    /// Every `diagnose_every` steps.
    Diagnose(Record),
    /// With every `Step` of a run on several ranks: what they did since the last one.
    Ranks(RankRecord),
}

/// How a run ended.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Always "summary".
    pub r#type: &'static str,
    /// Metrics of the best weights on the validation rows.
    #[serde(flatten)]
    pub metrics: Metrics,
    /// AUC within groups, where rows have them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grouped: Option<GroupedAuc>,
    /// Calibration by decile of the score.
    pub deciles: Vec<Decile>,
    /// Steps done, and the step of the best weights.
    pub steps: u64,
    /// Step of the best weights.
    pub best_step: u64,
    /// Epochs begun.
    pub epochs: usize,
    /// Whether patience ran out before the last epoch.
    pub stopped_early: bool,
    /// Whether whoever watched asked for the end ([`Report::stop`]).
    pub interrupted: bool,
    /// Training rows a pass.
    pub train_rows: u64,
    /// Trainable numbers.
    pub parameters: usize,
    /// Training rows a second, evaluation not counted.
    pub rows_per_s: f64,
    /// Seconds spent on diagnoses.
    pub diagnosis_seconds: f64,
    /// Seconds by what they went to.
    pub times: Times,
    /// Seconds, all in all.
    pub seconds: f64,
    /// Name of the device.
    pub device: String,
    /// Seed.
    pub seed: u64,
    /// What each rank did, where there were several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<super::ranks::RankReport>,
}

/// The error of a run that [`Report::interrupt`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("interrupted at step {step}")]
pub struct Interrupted {
    /// Updates done; where the store keeps checkpoints, there is one of this step.
    pub step: u64,
}

/// Who watches a run.
pub trait Report {
    /// So many rows were trained on.
    fn batch(&mut self, rows: usize);
    /// A step was logged, an evaluation or a diagnosis done.
    fn event(&mut self, e: &Event) -> anyhow::Result<()>;
    /// The matrices of a diagnosis.
    fn snapshot(&mut self, _: &Snapshot) -> anyhow::Result<()> {
        Ok(())
    }
    /// Asked after each step and each batch of an evaluation: something to wait for before the next, such as
    /// a browser's next frame. `None` costs nothing.
    fn pause(&mut self) -> Option<Pin<Box<dyn Future<Output = ()> + '_>>> {
        None
    }
    /// Asked between the operations of a step on the CPU: whether it is time for a [`Report::pause`].
    fn pause_due(&mut self) -> bool {
        false
    }
    /// Asked after each step: whether to end here, as if the last epoch were over.
    fn stop(&mut self) -> bool {
        false
    }
    /// Asked after each step and each batch of an evaluation: whether to leave at once, with a checkpoint to go on
    /// from. The run is not finished then: it ends in [`Interrupted`].
    fn interrupt(&mut self) -> bool {
        false
    }
}

/// Nobody.
impl Report for () {
    fn batch(&mut self, _: usize) {}
    fn event(&mut self, _: &Event) -> anyhow::Result<()> {
        Ok(())
    }
}
