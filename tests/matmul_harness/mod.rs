//! A minimal wgpu runner for matrix product kernels, shared by the test and the benchmark.

#![allow(dead_code)]

use std::time::Instant;

use birkhoff::gpu::kernel::{Bind, Kernel};
use wgpu::util::DeviceExt as _;

/// A device with the default WebGPU limits (larger buffers allowed).
pub struct Gpu {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub info: wgpu::AdapterInfo,
    /// Shaders get no bounds checks.
    pub trusted: bool,
}

/// Kernels with pipelines and bind groups, ready to run again and again.
pub struct Job {
    launches: Vec<(wgpu::ComputePipeline, wgpu::BindGroup, [u32; 3])>,
    out: wgpu::Buffer,
}

impl Gpu {
    /// The software Vulkan adapter, else any Vulkan adapter; `None` (and a line) when there is none.
    pub fn open(trusted: bool) -> Option<Self> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
            backends: wgpu::Backends::VULKAN,
            ..wgpu::InstanceDescriptor::new_without_display_handle()
        });
        let mut adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::VULKAN));
        adapters.sort_by_key(|a| a.get_info().device_type != wgpu::DeviceType::Cpu);
        let Some(adapter) = adapters.into_iter().next() else {
            println!("SKIP: no Vulkan adapter");
            return None;
        };
        let desc = wgpu::DeviceDescriptor { required_limits: wgpu::Limits::default(), ..Default::default() };
        let (device, queue) = pollster::block_on(adapter.request_device(&desc)).expect("a device");
        Some(Self { device, queue, info: adapter.get_info(), trusted })
    }

    /// Builds the pipelines of `kernels` over the given inputs.
    pub fn job(&self, kernels: &[Kernel], inputs: &[&[f32]], scratch: u64, out_len: usize) -> Job {
        let storage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        let upload = |data: &[f32]| {
            self.device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
                label: None,
                contents: bytemuck::cast_slice(data),
                usage: storage,
            })
        };
        let inputs: Vec<_> = inputs.iter().map(|d| upload(d)).collect();
        let scratch = upload(&vec![f32::from_bits(0x7fc0_0000); scratch.max(1) as usize]);
        let out = upload(&vec![-12345.0; out_len]);
        let mut launches = Vec::new();
        for kernel in kernels {
            let pipeline = self.pipeline(kernel);
            let mut entries: Vec<_> = kernel
                .bindings
                .iter()
                .map(|bind| match bind {
                    Bind::In(i) => &inputs[*i],
                    Bind::Out(_) => &out,
                    Bind::Scratch(_) => &scratch,
                })
                .enumerate()
                .map(|(i, b)| wgpu::BindGroupEntry { binding: i as u32, resource: b.as_entire_binding() })
                .collect();
            let params = self.device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
                label: None,
                contents: &kernel.params,
                usage: wgpu::BufferUsages::UNIFORM,
            });
            entries.push(wgpu::BindGroupEntry {
                binding: entries.len() as u32,
                resource: params.as_entire_binding(),
            });
            let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &pipeline.get_bind_group_layout(0),
                entries: &entries,
            });
            launches.push((pipeline, group, kernel.groups));
        }
        Job { launches, out }
    }

    fn pipeline(&self, kernel: &Kernel) -> wgpu::ComputePipeline {
        let desc = wgpu::ShaderModuleDescriptor {
            label: Some(&kernel.label),
            source: wgpu::ShaderSource::Wgsl(kernel.source.clone()),
        };
        let module = if self.trusted {
            // SAFETY: every index is clamped or guarded by the kernel against sizes that `job`'s callers
            // allocate; tests run the same kernels with checks on.
            unsafe { self.device.create_shader_module_trusted(desc, wgpu::ShaderRuntimeChecks::unchecked()) }
        } else {
            self.device.create_shader_module(desc)
        };
        self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(&kernel.label),
            layout: None,
            module: &module,
            entry_point: Some(kernel.entry),
            compilation_options: Default::default(),
            cache: None,
        })
    }

    /// Runs the job once and waits; seconds.
    pub fn run(&self, job: &Job) -> f64 {
        let start = Instant::now();
        let mut encoder = self.device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            for (pipeline, group, [x, y, z]) in &job.launches {
                pass.set_pipeline(pipeline);
                pass.set_bind_group(0, group, &[]);
                pass.dispatch_workgroups(*x, *y, *z);
            }
        }
        self.queue.submit([encoder.finish()]);
        self.device.poll(wgpu::PollType::wait_indefinitely()).expect("the device lives");
        start.elapsed().as_secs_f64()
    }

    /// The job's result.
    pub fn read(&self, job: &Job) -> Vec<f32> {
        let size = job.out.size();
        let staging = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = self.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(&job.out, 0, &staging, 0, size);
        self.queue.submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, .., |r| r.expect("readable"));
        self.device.poll(wgpu::PollType::wait_indefinitely()).expect("the device lives");
        let view = staging.get_mapped_range(..).expect("mapped");
        bytemuck::cast_slice(&view).to_vec()
    }
}

/// Numbers in (-1, 1) from a seed, the same everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    }
}
