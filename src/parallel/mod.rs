//! How one training step spreads over ranks: rewrites of the step's graph.

pub mod dense;
pub mod exchange;
pub mod layout;
