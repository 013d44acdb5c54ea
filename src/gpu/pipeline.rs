//! Compiled kernels, made once per (source, entry point, constants) and shared.

use std::collections::HashMap;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::device::{Doing, Gpu};
use super::error::GpuError;
use super::interface::{BindingKind, Interface};
use super::kernel::Kernel;
use crate::sync::lock;

/// A compiled kernel with the layout that its bind groups need.
#[derive(Debug)]
pub struct Pipeline {
    pub(crate) raw: wgpu::ComputePipeline,
    pub(crate) layout: wgpu::BindGroupLayout,
    interface: Interface,
}

impl Pipeline {
    /// The shader's bindings.
    pub fn interface(&self) -> &Interface {
        &self.interface
    }
}

/// What makes two kernels the same pipeline. Lengths are hashed too, so that fields cannot run together.
fn key(kernel: &Kernel) -> u128 {
    let mut hash = Xxh3::new();
    for text in [kernel.source.as_ref(), kernel.entry] {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    for (name, value) in &kernel.constants {
        hash.update(&(name.len() as u64).to_le_bytes());
        hash.update(name.as_bytes());
        hash.update(&value.to_bits().to_le_bytes());
    }
    hash.digest128()
}

impl Gpu {
    /// Compiles what is not compiled yet, in parallel, and returns a pipeline for each kernel in order.
    ///
    /// Fails with the first kernel, in order, that does not compile or contradicts its shader. In a
    /// browser, await [`Gpu::settle`] afterwards: its compiler answers late.
    pub fn compile_all<'a>(
        &self,
        kernels: impl IntoIterator<Item = &'a Kernel>,
    ) -> Result<Vec<Arc<Pipeline>>, GpuError> {
        let kernels: Vec<(u128, &Kernel)> = kernels.into_iter().map(|k| (key(k), k)).collect();
        let mut missing: Vec<(u128, &Kernel)> = Vec::new();
        {
            let cache = lock(&self.inner.pipelines);
            let mut seen = HashMap::new();
            for &(key, kernel) in &kernels {
                if !cache.contains_key(&key) && seen.insert(key, ()).is_none() {
                    missing.push((key, kernel));
                }
            }
        }
        // The lock is not held while compiling; two callers may compile the same kernel, to no harm.
        for (&(key, _), compiled) in missing.iter().zip(self.compile_each(&missing)) {
            lock(&self.inner.pipelines).insert(key, Arc::new(compiled?));
        }
        let cache = lock(&self.inner.pipelines);
        kernels
            .iter()
            .map(|(key, kernel)| {
                let pipeline = cache
                    .get(key)
                    .ok_or_else(|| GpuError::shader(&kernel.label, "was dropped from the pipeline cache"))?;
                // Per kernel, as kernels that share a pipeline may still give different parameters.
                pipeline.interface.check_contract(kernel)?;
                Ok(pipeline.clone())
            })
            .collect()
    }

    #[cfg(not(target_arch = "wasm32"))]
    fn compile_each(&self, missing: &[(u128, &Kernel)]) -> Vec<Result<Pipeline, GpuError>> {
        use rayon::prelude::*;
        missing.par_iter().map(|(_, kernel)| self.compile(kernel)).collect()
    }

    #[cfg(target_arch = "wasm32")]
    fn compile_each(&self, missing: &[(u128, &Kernel)]) -> Vec<Result<Pipeline, GpuError>> {
        missing.iter().map(|(_, kernel)| self.compile(kernel)).collect()
    }

    /// Validated and held to the device's limits, so that errors name the line.
    #[cfg(not(target_arch = "wasm32"))]
    fn interface(&self, kernel: &Kernel) -> Result<Interface, GpuError> {
        use super::reflect::{check_limits, check_scan, device_capabilities, parse};
        let reflected = parse(kernel, device_capabilities(self.features()))?.reflected;
        check_limits(&kernel.label, &reflected, self.limits())?;
        if cfg!(test) {
            check_scan(kernel, &reflected.interface)?;
        }
        Ok(reflected.interface)
    }

    /// The browser validates, and knows its limits.
    #[cfg(target_arch = "wasm32")]
    fn interface(&self, kernel: &Kernel) -> Result<Interface, GpuError> {
        super::interface::scan(kernel)
    }

    fn compile(&self, kernel: &Kernel) -> Result<Pipeline, GpuError> {
        let interface = self.interface(kernel)?;
        interface.check_contract(kernel)?;

        let entries: Vec<_> = interface
            .bindings
            .iter()
            .map(|b| wgpu::BindGroupLayoutEntry {
                binding: b.index,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: match b.kind {
                        BindingKind::Uniform => wgpu::BufferBindingType::Uniform,
                        kind => {
                            let read_only = kind == BindingKind::ReadOnly;
                            wgpu::BufferBindingType::Storage { read_only }
                        }
                    },
                    has_dynamic_offset: false,
                    // Known here, so wgpu checks sizes when a bind group is made, not at each dispatch.
                    min_binding_size: wgpu::BufferSize::new(b.min_size),
                },
                count: None,
            })
            .collect();
        let label = Some(kernel.label.as_ref());
        let device = self.device();
        self.scoped(Doing::Compile(kernel.label.to_string()), || {
            let descriptor = wgpu::ShaderModuleDescriptor {
                label,
                source: wgpu::ShaderSource::Wgsl(kernel.source.as_ref().into()),
            };
            let module = if self.checked() {
                device.create_shader_module(descriptor)
            } else {
                // SAFETY: kernels are birkhoff's own and not user input; their launch code proves every
                // index in range and every loop finite, and the tests run them with checks on as well
                // (BIRKHOFF_CHECKED=1).
                unsafe {
                    device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
                }
            };
            let layout = device
                .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label, entries: &entries });
            let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label,
                bind_group_layouts: &[Some(&layout)],
                immediate_size: 0,
            });
            let raw = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label,
                layout: Some(&pipeline_layout),
                module: &module,
                entry_point: Some(kernel.entry),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &kernel.constants,
                    // Where the hardware has no such feature, naga has one invocation write all of it.
                    // Kernels write workgroup memory before they read it.
                    zero_initialize_workgroup_memory: self.checked(),
                },
                cache: None,
            });
            Pipeline { raw, layout, interface }
        })
    }
}
