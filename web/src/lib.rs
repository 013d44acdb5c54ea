//! birkhoff in a browser tab: the library's own trainer, executors and dashboard, compiled to WebAssembly.
//!
//! | file | what |
//! |---|---|
//! | `setup` | what a user chooses: model, rows, device |
//! | `pace` | work in slices of a frame, so that the page never freezes |
//! | `rows` | rows made in the page or read from a file, in slices as well |
//! | `session` | one training run in the page |
//! | `page` | the bar and its four parts: `train`, `race`, `explorer` (over `sinkhorn`), `score` |
//! | `chart`, `widgets`, `host` | plots and buttons of the page's own; files, downloads, where things are drawn |
//! | `api` | what JavaScript calls: the page's start, and what the browser tests use |

pub mod setup;
pub mod sinkhorn;

#[cfg(target_arch = "wasm32")]
mod api;
#[cfg(target_arch = "wasm32")]
mod chart;
#[cfg(target_arch = "wasm32")]
mod explorer;
#[cfg(target_arch = "wasm32")]
mod host;
#[cfg(target_arch = "wasm32")]
mod pace;
#[cfg(target_arch = "wasm32")]
mod page;
#[cfg(target_arch = "wasm32")]
mod race;
#[cfg(target_arch = "wasm32")]
mod rows;
#[cfg(target_arch = "wasm32")]
mod score;
#[cfg(target_arch = "wasm32")]
mod session;
#[cfg(target_arch = "wasm32")]
mod train;
#[cfg(target_arch = "wasm32")]
mod widgets;
