//! A list of launches with everything made ahead: running it creates nothing but the command encoder.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use super::buffer::Region;
use super::device::{Doing, Gpu};
use super::error::GpuError;
use super::interface::{Binding, BindingKind};
use super::kernel::Kernel;
use super::pipeline::Pipeline;

/// A kernel with the buffers that its bindings stand for, in binding order.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// One region for each of `kernel.bindings`.
    pub regions: Vec<Region>,
}

/// One prepared dispatch.
#[derive(Debug)]
pub(crate) struct Dispatch {
    pub label: Cow<'static, str>,
    pub pipeline: Arc<Pipeline>,
    pub bind_group: wgpu::BindGroup,
    pub groups: [u32; 3],
    /// Offset and size of the uniform block in the list's uniform buffer.
    params: Option<(u64, u64)>,
}

/// A prepared list of dispatches, run as often as wanted.
#[derive(Debug)]
pub struct CommandList {
    pub(crate) gpu: Gpu,
    pub(crate) label: String,
    pub(crate) dispatches: Vec<Dispatch>,
    uniforms: Option<wgpu::Buffer>,
}

/// Uniform offsets are multiples of this on every device.
const UNIFORM_ALIGN: u64 = 256;

impl CommandList {
    /// Compiles the kernels, checks every launch, packs all uniform blocks into one buffer, and makes the
    /// bind groups. `label` names the list in errors, e.g. `training step`.
    pub fn new(gpu: &Gpu, label: &str, launches: &[Launch<'_>]) -> Result<CommandList, GpuError> {
        let pipelines = gpu.compile_all(launches.iter().map(|l| l.kernel))?;
        for (launch, pipeline) in launches.iter().zip(&pipelines) {
            check_launch(gpu, launch, pipeline)?;
        }

        let mut packed: Vec<u8> = Vec::new();
        let mut params = Vec::with_capacity(launches.len());
        for launch in launches {
            let bytes = &launch.kernel.params;
            if bytes.is_empty() {
                params.push(None);
            } else {
                packed.resize(packed.len().next_multiple_of(UNIFORM_ALIGN as usize), 0);
                params.push(Some((packed.len() as u64, bytes.len() as u64)));
                packed.extend_from_slice(bytes);
            }
        }
        let uniforms = if packed.is_empty() { None } else { Some(upload_uniforms(gpu, label, packed)?) };

        let doing = Doing::Step(format!("preparing {label}"));
        let dispatches = gpu.scoped(doing, || {
            launches
                .iter()
                .zip(pipelines)
                .zip(params)
                .map(|((launch, pipeline), params)| {
                    let entries: Vec<_> = pipeline
                        .interface()
                        .bindings
                        .iter()
                        .filter_map(|b| {
                            let (buffer, offset, size) = match b.kind {
                                BindingKind::Uniform => {
                                    let (offset, size) = params?;
                                    (uniforms.as_ref()?, offset, size)
                                }
                                _ => {
                                    let r = launch.regions.get(b.index as usize)?;
                                    (r.buffer.raw(), r.offset, r.size)
                                }
                            };
                            let size = wgpu::BufferSize::new(size);
                            Some(wgpu::BindGroupEntry {
                                binding: b.index,
                                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                                    buffer,
                                    offset,
                                    size,
                                }),
                            })
                        })
                        .collect();
                    let bind_group = gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
                        label: Some(&launch.kernel.label),
                        layout: &pipeline.layout,
                        entries: &entries,
                    });
                    Dispatch {
                        label: launch.kernel.label.clone(),
                        pipeline,
                        bind_group,
                        groups: launch.kernel.groups,
                        params,
                    }
                })
                .collect()
        })?;
        Ok(CommandList { gpu: gpu.clone(), label: label.to_string(), dispatches, uniforms })
    }

    /// Number of dispatches.
    pub fn len(&self) -> usize {
        self.dispatches.len()
    }

    /// Whether there is nothing to run.
    pub fn is_empty(&self) -> bool {
        self.dispatches.is_empty()
    }

    /// The device that the list runs on.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Replaces the uniform block of dispatch `index`, e.g. with this step's learning rate. It takes
    /// effect in whatever is submitted next.
    pub fn set_params(&self, index: usize, bytes: &[u8]) -> Result<(), GpuError> {
        let Some(dispatch) = self.dispatches.get(index) else {
            let message = format!("there is no dispatch {index} of {}", self.len());
            return Err(GpuError::launch(&self.label, message));
        };
        match (&self.uniforms, dispatch.params) {
            (Some(uniforms), Some((offset, size))) if size == bytes.len() as u64 => {
                let queue = self.gpu.queue();
                if bytes.len().is_multiple_of(4) {
                    queue.write_buffer(uniforms, offset, bytes);
                } else {
                    // wgpu copies whole words; a block of f16 may end in half of one.
                    let mut words = bytes.to_vec();
                    words.resize(bytes.len().next_multiple_of(4), 0);
                    queue.write_buffer(uniforms, offset, &words);
                }
                self.gpu.check("updating parameters")?;
                Ok(())
            }
            (_, params) => {
                let has = params.map_or(0, |p| p.1);
                let message = format!("has {has} bytes of params, {} were given", bytes.len());
                Err(GpuError::launch(&dispatch.label, message))
            }
        }
    }

    /// Submits all dispatches and returns without waiting for them.
    pub fn run(&self) -> Result<(), GpuError> {
        self.run_range(0..self.len())
    }

    /// Submits a part of the list: a segment between two points where the host has work to do.
    pub fn run_range(&self, range: Range<usize>) -> Result<(), GpuError> {
        let Some(dispatches) = self.dispatches.get(range.clone()) else {
            let message = format!("has {} dispatches, {range:?} was asked for", self.len());
            return Err(GpuError::launch(&self.label, message));
        };
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            let mut current: Option<&Arc<Pipeline>> = None;
            for dispatch in dispatches {
                if current.is_none_or(|p| !Arc::ptr_eq(p, &dispatch.pipeline)) {
                    pass.set_pipeline(&dispatch.pipeline.raw);
                    current = Some(&dispatch.pipeline);
                }
                dispatch.encode(&mut pass);
            }
        }
        self.gpu.submit(encoder.finish(), &self.label)?;
        Ok(())
    }
}

impl Dispatch {
    /// Records everything but the pipeline.
    pub(crate) fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        let [x, y, z] = self.groups;
        pass.set_bind_group(0, &self.bind_group, &[]);
        pass.dispatch_workgroups(x, y, z);
    }
}

fn upload_uniforms(gpu: &Gpu, label: &str, mut packed: Vec<u8>) -> Result<wgpu::Buffer, GpuError> {
    packed.resize(packed.len().next_multiple_of(16), 0);
    let size = packed.len() as u64;
    let doing = Doing::Allocate(format!("parameters of {label}"), size);
    let buffer = gpu.scoped(doing, || {
        gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: Some("parameters"),
            size,
            usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    })?;
    gpu.queue().write_buffer(&buffer, 0, &packed);
    Ok(buffer)
}

/// Checks a launch against its shader and the device, in words that name the kernel and the binding.
fn check_launch(gpu: &Gpu, launch: &Launch<'_>, pipeline: &Pipeline) -> Result<(), GpuError> {
    let kernel = launch.kernel;
    let limits = gpu.limits();
    let fail = |message: String| Err(GpuError::launch(&kernel.label, message));
    if launch.regions.len() != kernel.bindings.len() {
        return fail(format!(
            "has {} bindings, {} buffers were given",
            kernel.bindings.len(),
            launch.regions.len()
        ));
    }
    for groups in kernel.groups {
        if groups > limits.max_compute_workgroups_per_dimension {
            return Err(GpuError::TooLarge {
                what: format!("kernel {}", kernel.label),
                needed: groups.into(),
                limit: limits.max_compute_workgroups_per_dimension.into(),
                limit_name: "maxComputeWorkgroupsPerDimension",
                hint: "fold the workgroups over two dimensions (fold_groups)".to_string(),
            });
        }
    }
    let align = u64::from(limits.min_storage_buffer_offset_alignment);
    let mut bound: Vec<(&Binding, &Region)> = Vec::new();
    for binding in pipeline.interface().bindings.iter().filter(|b| b.kind != BindingKind::Uniform) {
        let Some(region) = launch.regions.get(binding.index as usize) else { continue };
        let at = format!("@binding({}) {} ({})", binding.index, binding.name, region.buffer.label());
        let total = region.buffer.raw().size();
        if region.offset.checked_add(region.size).is_none_or(|end| end > total) {
            return fail(format!("{at}: {} bytes at {} of {total}", region.size, region.offset));
        }
        if !region.offset.is_multiple_of(align) || !region.size.is_multiple_of(4) {
            return fail(format!(
                "{at}: offset {} must be a multiple of {align} and size {} of 4",
                region.offset, region.size
            ));
        }
        if region.size < binding.min_size {
            return fail(format!("{at}: {} bytes, the shader needs {}", region.size, binding.min_size));
        }
        if region.size > limits.max_storage_buffer_binding_size {
            return Err(GpuError::TooLarge {
                what: format!("kernel {} {at}", kernel.label),
                needed: region.size,
                limit: limits.max_storage_buffer_binding_size,
                limit_name: "maxStorageBufferBindingSize",
                hint: "bind a part of the buffer, or split it".to_string(),
            });
        }
        bound.push((binding, region));
    }
    for (i, (a, ra)) in bound.iter().enumerate() {
        for (b, rb) in &bound[i + 1..] {
            if let Some(problem) = conflict(a, ra, b, rb) {
                return fail(format!(
                    "buffer {} is bound as @binding({}) {} and @binding({}) {}: {problem}",
                    ra.buffer.label(),
                    a.index,
                    a.name,
                    b.index,
                    b.name
                ));
            }
        }
    }
    Ok(())
}

/// Why WebGPU forbids two bindings in one dispatch, if it does.
fn conflict(a: &Binding, ra: &Region, b: &Binding, rb: &Region) -> Option<&'static str> {
    let same = ra.buffer.raw() == rb.buffer.raw();
    let writes = |x: &Binding| x.kind == BindingKind::ReadWrite;
    if !same || !(writes(a) || writes(b)) {
        return None;
    }
    if writes(a) != writes(b) {
        // Even where the regions do not overlap: use is tracked by buffer.
        return Some("read-only and read_write of one buffer cannot meet in one dispatch");
    }
    let overlap = ra.offset < rb.offset + rb.size && rb.offset < ra.offset + ra.size;
    overlap.then_some("written regions overlap; an in-place kernel binds its buffer once")
}
