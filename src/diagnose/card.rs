//! What a run says about its model and its time: `model.json` and `profile.json`.

use serde::{Deserialize, Serialize};

/// `model.json`: the graph as layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// Device that trains it.
    #[serde(default)]
    pub device: String,
    /// Rows a training step.
    pub batch: usize,
    /// Embedding width d.
    pub width: usize,
    /// `shortcut`, `hc`, `mhc`.
    pub mode: String,
    /// Streams n (1 for `shortcut`).
    pub streams: usize,
    /// Trainable numbers of the whole model.
    pub parameters: usize,
    /// FLOPs of a training step (forward, backward, update).
    pub flops_per_step: f64,
    /// Bytes that its operations read and write.
    pub bytes_per_step: f64,
    /// Peak of the memory plan, in bytes.
    pub memory_planned: usize,
    /// Sum of all tensors, in bytes.
    pub memory_unshared: usize,
    /// In order: the features (`numeric`, `embeddings`), each layer (`layers.0`), `head`, `loss`, `update`.
    pub parts: Vec<PartCard>,
}

/// A part of the model: a layer, the features, the head.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PartCard {
    /// Its scope in the graph, such as `layers.2`.
    pub name: String,
    /// Shape of its output as text, `[512, 27, 4, 16]`.
    pub output: String,
    /// Trainable numbers.
    pub parameters: usize,
    /// FLOPs of its forward pass.
    pub flops_forward: f64,
    /// FLOPs of its backward pass.
    pub flops_backward: f64,
    /// What stands inside: modules (`attention`), coefficients (`mhc`), `ln`, `shortcut`.
    pub children: Vec<PartCard>,
}

/// `profile.json`: where the time of one training step goes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimeReport {
    /// Device.
    pub device: String,
    /// `device` (its timestamps) or `host` (the host's clock).
    pub clock: String,
    /// The step that was measured.
    pub step: u64,
    /// Wall time of that step in microseconds, 0 if unknown.
    pub wall_micros: f64,
    /// One row an operation, stage and scope.
    pub rows: Vec<TimeRow>,
}

/// The time of one kind of operation in one place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimeRow {
    /// Operation: `matmul`, `sinkhorn`.
    pub op: String,
    /// `forward`, `backward` or `update`.
    pub stage: String,
    /// The scope: `layers.0.attention`.
    pub scope: String,
    /// Executions.
    pub calls: usize,
    /// Sum of their times.
    pub micros: f64,
}
