//! NE, log loss, AUC and calibration. The code is in [`crate::data::metrics`], see there why.

pub use crate::data::metrics::{Metrics, MetricsAccumulator, entropy, evaluate, sigmoid, softplus};
