//! How one training step spreads over ranks.

pub mod cost;
pub mod placement;
pub mod planner;
pub mod tables;
pub mod traffic;
