//! Measures the variants of a matrix product on the device at hand, once a shape class, remembered on disk.

use super::exec::Device;
use crate::gpu::kernel::{Bind, Kernel};
use crate::gpu::{CommandList, Gpu, GpuError, Launch};
use crate::ops::MatmulChoice;
use crate::ops::matmul_tune::{AdapterKey, Tuner};
use crate::ops::matmul_wgsl::{MatmulSpec, Variant};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Products smaller than this are not worth measuring: they take the default of the device type.
const WORTH_MEASURING: f64 = 3e7;

/// A [`MatmulChoice`] that measures on its device.
#[derive(Debug)]
pub struct Measured {
    gpu: Gpu,
    tuner: Mutex<Tuner>,
}

impl Device {
    /// A wgpu device whose matrix products are chosen by measurement (see `BIRKHOFF_NO_TUNE`).
    pub fn tuned(gpu: Gpu) -> Self {
        let tuner = Mutex::new(Tuner::open(AdapterKey::from(gpu.info())));
        Device::gpu(gpu.clone(), Arc::new(Measured { gpu, tuner }))
    }
}

impl MatmulChoice for Measured {
    fn choose(&self, spec: &MatmulSpec) -> Variant {
        let mut tuner = self.tuner.lock().unwrap_or_else(PoisonError::into_inner);
        if spec.flops() < WORTH_MEASURING {
            return tuner.choose(spec, None);
        }
        // a variant that fails to run is not chosen; a broken device shows itself in the real run
        let mut measure = |kernels: &[Kernel], scratch: u64| {
            time(&self.gpu, spec, kernels, scratch).unwrap_or(f64::INFINITY)
        };
        tuner.choose(spec, Some(&mut measure))
    }
}

fn time(gpu: &Gpu, spec: &MatmulSpec, kernels: &[Kernel], scratch: u64) -> Result<f64, GpuError> {
    let [a, b, c] = spec.lens().map(|n| 4 * n as u64);
    let (a, b) = (gpu.create_buffer("measured A", a)?, gpu.create_buffer("measured B", b)?);
    let c = gpu.create_buffer("measured C", c)?;
    let s = gpu.create_buffer("measured partial sums", 4 * scratch.max(1))?;
    let launches: Vec<Launch<'_>> = kernels
        .iter()
        .map(|kernel| {
            let regions = kernel
                .bindings
                .iter()
                .map(|b_| match b_ {
                    Bind::In(0) => a.whole(),
                    Bind::In(_) => b.whole(),
                    Bind::Out(_) => c.whole(),
                    Bind::Scratch(_) => s.whole(),
                })
                .collect();
            Launch { kernel, regions }
        })
        .collect();
    let list = CommandList::new(gpu, "measuring a matrix product", &launches)?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let begin = Instant::now();
        list.run()?;
        gpu.wait("measuring a matrix product")?;
        best = best.min(begin.elapsed().as_secs_f64());
    }
    Ok(best)
}
