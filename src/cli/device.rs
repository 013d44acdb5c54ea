//! `--device`: from the word to an open device.

use crate::gpu::{DeviceChoice, GpuOptions, Selected};
use crate::graph::exec::Device;
use anyhow::Context;

/// Opens what the user asked for.
pub fn open(word: &str) -> anyhow::Result<Device> {
    open_nth(word, 0)
}

/// [`open`] for the rank with this number on its host: ranks take different devices as far as there are some.
pub fn open_nth(word: &str, number: usize) -> anyhow::Result<Device> {
    let choice: DeviceChoice = word.parse()?;
    let selected = crate::gpu::select_nth(&choice, number, &GpuOptions::default());
    let device = match selected.context("cannot open the device")? {
        Selected::Cpu => Device::Cpu,
        Selected::Gpu(gpu) => Device::tuned(gpu),
    };
    tracing::info!("process {number} of this host computes on {}", device.name());
    Ok(device)
}
