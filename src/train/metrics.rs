//! NE, log loss, AUC and calibration. The code is in [`crate::data::metrics`], see there why.

pub use crate::data::metrics::{
    Decile, Detail, GroupedAuc, Metrics, MetricsAccumulator, entropy, evaluate, sigmoid, softplus,
};
