//! birkhoff in a browser tab: the library's own trainer, executors and dashboard, compiled to WebAssembly.
//!
//! | file | what |
//! |---|---|
//! | `setup` | what a user chooses: model, data, device |
//! | `pace` | training in slices of a frame, so that the page never freezes |
//! | `rows` | rows made in the page or read from a file, in slices as well |
//! | `session` | one training run in the page |
//! | `score` | a run folder's files and a data file to scores |
//! | `api` | `window.birkhoff`: what the browser tests call |

pub mod setup;

#[cfg(target_arch = "wasm32")]
mod api;
#[cfg(target_arch = "wasm32")]
mod pace;
#[cfg(target_arch = "wasm32")]
mod rows;
#[cfg(target_arch = "wasm32")]
mod session;
