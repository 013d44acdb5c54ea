//! The scalars of one diagnosis: a line of `metrics.jsonl`.

use serde::{Deserialize, Serialize};

/// Everything that is a number, measured on one fixed batch after `step` updates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Updates done.
    pub step: u64,
    /// Rows trained on.
    pub rows: u64,
    /// Seconds since the start of training.
    pub seconds: f64,
    /// Layer by layer.
    pub layers: Vec<LayerStats>,
    /// Forward gain of the token-averaged composite of layers s..=l for each l, s the first layer of its
    /// segment (a layer that changes the slot count ends one; math.md section 8).
    pub composite_forward: Vec<f64>,
    /// Backward gain of the token-averaged composite of layers l..=e for each l, e the last of its segment.
    pub composite_backward: Vec<f64>,
    /// As `composite_forward`, but the mean over tokens of each token's own gain.
    pub token_composite_forward: Vec<f64>,
    /// As `composite_backward`, but the mean over tokens of each token's own gain.
    pub token_composite_backward: Vec<f64>,
}

/// The scalars of a layer. In `shortcut` mode there is one stream: res = pre = post = 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerStats {
    /// max_o |Σ_i res[o, i]| of the token-averaged matrix.
    pub forward_gain: f64,
    /// max_i |Σ_o res[o, i]| of the token-averaged matrix.
    pub backward_gain: f64,
    /// The mean over tokens of each token's forward gain.
    pub token_forward_gain: f64,
    /// The mean over tokens of each token's backward gain.
    pub token_backward_gain: f64,
    /// Least row sum of any token.
    pub row_sum_min: f64,
    /// Greatest row sum of any token.
    pub row_sum_max: f64,
    /// Least column sum of any token.
    pub col_sum_min: f64,
    /// Greatest column sum of any token.
    pub col_sum_max: f64,
    /// Second singular value, mean over tokens; 0 with one stream.
    pub second_singular: f64,
    /// Entropy of the rows in nats, mean over tokens and rows.
    pub row_entropy: f64,
    /// Cosine between the streams that leave the layer, mean over pairs and tokens; 1 with one stream.
    pub stream_cosine: f64,
    /// Root mean square of the residual state that leaves the layer.
    pub state_rms: f64,
    /// Norm of the gradient of all the layer's parameters on the diagnosis batch.
    pub grad_norm: f64,
    /// The interaction modules.
    pub modules: Vec<ModuleStats>,
}

/// The scalars of an interaction module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModuleStats {
    /// Its name in the layer: `attention`, `linear`, `attention_1`.
    pub name: String,
    /// Root mean square of what it contributes (its weight in the ensemble included).
    pub rms: f64,
    /// Its weight in a `weighted` ensemble, else 1.
    pub weight: f64,
}
