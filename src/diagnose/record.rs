//! The scalars of one diagnosis: a line of `metrics.jsonl`.

use serde::{Deserialize, Deserializer, Serialize};

/// JSON has no NaN and no infinity, which a diverging run has: they are written as null and read as NaN.
pub(crate) fn number<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(d)?.unwrap_or(f64::NAN))
}

fn numbers<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<f64>, D::Error> {
    let v = Vec::<Option<f64>>::deserialize(d)?;
    Ok(v.into_iter().map(|x| x.unwrap_or(f64::NAN)).collect())
}

/// Everything that is a number, measured on one fixed batch after `step` updates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Updates done.
    pub step: u64,
    /// Rows trained on.
    pub rows: u64,
    /// Seconds since the start of training.
    #[serde(deserialize_with = "number")]
    pub seconds: f64,
    /// Layer by layer.
    pub layers: Vec<LayerStats>,
    /// Forward gain of the token-averaged composite of layers s..=l for each l, s the first layer of its
    /// segment (a layer that changes the slot count ends one; math.md section 8).
    #[serde(deserialize_with = "numbers")]
    pub composite_forward: Vec<f64>,
    /// Backward gain of the token-averaged composite of layers l..=e for each l, e the last of its segment.
    #[serde(deserialize_with = "numbers")]
    pub composite_backward: Vec<f64>,
    /// As `composite_forward`, but the mean over tokens of each token's own gain.
    #[serde(deserialize_with = "numbers")]
    pub token_composite_forward: Vec<f64>,
    /// As `composite_backward`, but the mean over tokens of each token's own gain.
    #[serde(deserialize_with = "numbers")]
    pub token_composite_backward: Vec<f64>,
}

/// The scalars of a layer. In `shortcut` mode there is one stream: res = pre = post = 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerStats {
    /// max_o |Σ_i res[o, i]| of the token-averaged matrix.
    #[serde(deserialize_with = "number")]
    pub forward_gain: f64,
    /// max_i |Σ_o res[o, i]| of the token-averaged matrix.
    #[serde(deserialize_with = "number")]
    pub backward_gain: f64,
    /// The mean over tokens of each token's forward gain.
    #[serde(deserialize_with = "number")]
    pub token_forward_gain: f64,
    /// The mean over tokens of each token's backward gain.
    #[serde(deserialize_with = "number")]
    pub token_backward_gain: f64,
    /// Least row sum of any token.
    #[serde(deserialize_with = "number")]
    pub row_sum_min: f64,
    /// Greatest row sum of any token.
    #[serde(deserialize_with = "number")]
    pub row_sum_max: f64,
    /// Least column sum of any token.
    #[serde(deserialize_with = "number")]
    pub col_sum_min: f64,
    /// Greatest column sum of any token.
    #[serde(deserialize_with = "number")]
    pub col_sum_max: f64,
    /// Second singular value, mean over tokens; 0 with one stream.
    #[serde(deserialize_with = "number")]
    pub second_singular: f64,
    /// Entropy of the rows in nats, mean over tokens and rows.
    #[serde(deserialize_with = "number")]
    pub row_entropy: f64,
    /// Cosine between the streams that leave the layer, mean over pairs and tokens; 1 with one stream.
    #[serde(deserialize_with = "number")]
    pub stream_cosine: f64,
    /// Root mean square of the residual state that leaves the layer.
    #[serde(deserialize_with = "number")]
    pub state_rms: f64,
    /// Norm of the gradient of all the layer's parameters on the diagnosis batch.
    #[serde(deserialize_with = "number")]
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
    #[serde(deserialize_with = "number")]
    pub rms: f64,
    /// Its weight in a `weighted` ensemble, else 1.
    #[serde(deserialize_with = "number")]
    pub weight: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diverged_diagnosis_is_read_back() {
        let layer = LayerStats { forward_gain: f64::NAN, grad_norm: f64::INFINITY, ..LayerStats::default() };
        let r =
            Record { step: 7, layers: vec![layer], composite_forward: vec![f64::NAN], ..Record::default() };
        let back: Record = serde_json::from_str(&serde_json::to_string(&r).unwrap()).unwrap();
        assert_eq!(back.step, 7);
        assert!(back.layers[0].forward_gain.is_nan() && back.layers[0].grad_norm.is_nan());
        assert!(back.composite_forward[0].is_nan());
    }
}
