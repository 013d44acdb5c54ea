//! Configuration to graph: features, interaction modules, ensemble layer, residual modes, head.

pub mod config;
