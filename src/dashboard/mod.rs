//! The dashboard: what a run does while it trains, in a window or in a browser's page.
//!
//! [`Dashboard`] draws into any [`egui::Ui`] what its [`Source`]s tell it: a run folder that grows
//! (`FolderSource`), or a trainer in the same program ([`SharedRun`]). One file a view. Nothing here opens a
//! window, a file or a thread; the feature `dashboard` adds what a native program needs (`window`, `folder`).

mod app;
mod bars;
mod card;
mod chart;
pub mod export;
#[cfg(feature = "dashboard")]
pub mod folder;
mod gains;
mod heat;
mod model;
mod overview;
mod ranks;
mod residual;
mod run;
mod series;
mod source;
mod steps;
mod streams;
mod text;
pub mod theme;
mod time;
#[cfg(feature = "dashboard")]
pub mod window;

pub use app::{Dashboard, View};
pub use export::{Exporter, NoExporter};
#[cfg(feature = "dashboard")]
pub use folder::FolderSource;
pub use run::{Evals, RankSteps, RunData, Steps};
pub use source::{LiveSource, SharedRun, Source};
