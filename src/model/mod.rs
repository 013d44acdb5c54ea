//! Configuration to graph: features, interaction modules, ensemble layer, residual modes, head.
//!
//! [`build::model`] turns a [`config::ModelConfig`] and a [`build::FeatureSpec`] into the forward graph and
//! the list of its parameters; `train::step` appends loss, backward and update.

pub mod build;
pub mod config;
pub mod layer;
pub mod modules;
pub mod params;
pub mod residual;
