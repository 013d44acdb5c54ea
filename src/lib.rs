//! **birkhoff**: a portable WebGPU compute engine that trains and runs deep ranking models.
//!
//! Two papers in one system: DHEN (layers of different interaction modules side by side, KDD 2022)
//! and mHC (a residual stream widened to `n` streams, mixed by doubly stochastic matrices, 2025).
//! See `ARCHITECTURE.md` for the plan of the house; a module here imports only from those below it.

pub mod cli;
pub mod data;
pub mod gpu;
pub mod graph;
pub mod model;
pub mod ops;
pub mod train;
