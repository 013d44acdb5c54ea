//! `--device`: from the word to an open device.

use crate::gpu::{DeviceChoice, GpuOptions, Selected};
use crate::graph::exec::Device;
use anyhow::Context;

/// Opens what the user asked for.
pub fn open(word: &str) -> anyhow::Result<Device> {
    let choice: DeviceChoice = word.parse()?;
    Ok(match crate::gpu::select(&choice, &GpuOptions::default()).context("cannot open the device")? {
        Selected::Cpu => Device::Cpu,
        Selected::Gpu(gpu) => Device::tuned(gpu),
    })
}
