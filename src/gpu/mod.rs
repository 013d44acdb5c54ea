//! wgpu: adapters, limits, pipelines (reflected by naga), buffers, profiler.

pub mod kernel;
