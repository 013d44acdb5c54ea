//! **birkhoff**: a portable WebGPU compute engine that trains and runs deep ranking models.
//!
//! Two papers in one system: DHEN (layers of different interaction modules side by side, KDD 2022)
//! and mHC (a residual stream widened to `n` streams, mixed by doubly stochastic matrices, 2025).
//! See `ARCHITECTURE.md` for the plan of the house; a module here imports only from those below it.
//!
//! A model starts as a configuration, which says what is wrong with it before anything is built:
//!
//! ```
//! use birkhoff::model::config::Config;
//!
//! let file = "[model]\nlayers = 2\nwidth = 16";
//! let config = Config::from_text("dhen.toml", file, &["model.residual.streams=2".to_string()])?;
//! let layers = config.model.resolve(27)?; // 27 slots: Criteo's numbers as one, and 26 categories
//! assert_eq!((layers.len(), layers[0].slots_out), (2, 27));
//!
//! let error = Config::from_text("dhen.toml", file, &["model.widht=8".to_string()]).unwrap_err();
//! assert!(error.to_string().contains("did you mean `model.width`?"));
//! # Ok::<(), birkhoff::model::config::ConfigError>(())
//! ```

// a page has no other ranks: what would be done with them is code that nothing reaches (train::ranks)
#![cfg_attr(target_arch = "wasm32", allow(unreachable_code, unused_variables))]

#[cfg(feature = "cli")]
pub mod cli;
#[cfg(not(target_arch = "wasm32"))]
pub mod collective;
#[cfg(feature = "views")]
pub mod dashboard;
pub mod data;
pub mod diagnose;
#[cfg(not(target_arch = "wasm32"))]
pub mod export;
pub mod gpu;
pub mod graph;
pub mod memory;
pub mod model;
pub mod ops;
mod par;
#[cfg(not(target_arch = "wasm32"))]
pub mod parallel;
mod sync;
pub mod text;
pub mod train;
