//! wgpu: adapters, limits, pipelines, buffers, command lists, profiler.
//!
//! - [`adapter`]: `--device`, and what `birkhoff devices` lists ([`report`]).
//! - [`device`]: an open device, [`Gpu`]; every wgpu error becomes a [`GpuError`].
//! - [`kernel`]: one shader launch as plain data, which operations produce without a device.
//! - [`interface`], [`reflect`], [`translate`], [`pipeline`]: what a shader declares, as naga reads it, the same in
//!   other languages, compiled.
//! - [`buffer`]: storage buffers, upload, batched read-back.
//! - [`commands`]: many launches, prepared once and run often; [`profile`] says how long each took.
//!
//! What waits for the device is an `async fn` (a browser cannot block); natively each has a blocking
//! twin without `_async`.

pub mod adapter;
pub mod buffer;
pub mod commands;
pub mod device;
pub mod error;
pub mod interface;
pub mod kernel;
pub mod pipeline;
pub mod profile;
#[cfg(not(target_arch = "wasm32"))]
pub mod reflect;
pub mod report;
#[cfg(not(target_arch = "wasm32"))]
pub mod translate;

pub use adapter::{
    AdapterReport, DeviceChoice, Selected, list_adapters_async, select_async, select_nth_async,
};
#[cfg(not(target_arch = "wasm32"))]
pub use adapter::{list_adapters, select, select_nth};
pub use buffer::{Buffer, Region};
pub use commands::{CommandList, Launch};
pub use device::{Gpu, GpuOptions, LimitsMode};
pub use error::GpuError;
pub use kernel::{Bind, Kernel, fold_groups};
pub use profile::Profile;
pub use report::{CpuReport, cpu_report, render_devices};
