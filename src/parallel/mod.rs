//! How one training step spreads over ranks.
//!
//! - [`tables`], [`cost`], [`traffic`], [`planner`], [`placement`]: which rank holds which part of which embedding table.
//! - [`layout`], [`exchange`], [`dense`]: the rewrites of the step's graph that follow from it.

pub mod cost;
pub mod dense;
pub mod exchange;
pub mod layout;
pub mod placement;
pub mod planner;
pub mod tables;
pub mod traffic;
