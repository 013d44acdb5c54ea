//! Memory stays flat over 2,000 steps. Alone in its process, as resident memory counts every test's.

use birkhoff::gpu::{Bind, CommandList, DeviceChoice, GpuOptions, Kernel, Launch, Selected, select};

const ADD: &str = "
struct Params { n: u32, a: f32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@group(0) @binding(2) var<uniform> p: Params;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < p.n) { y[id.x] += p.a * x[id.x]; }
}
";

#[test]
fn memory_is_flat_over_2000_runs() {
    let gpu = match select(&DeviceChoice::Software, &GpuOptions::default()) {
        Ok(Selected::Gpu(gpu)) => gpu,
        other => {
            println!("SKIP: no Vulkan adapter ({:?})", other.err());
            return;
        }
    };
    let n = 4096u32;
    let x = gpu.create_buffer("x", u64::from(n) * 4).unwrap();
    let y = gpu.create_buffer("y", u64::from(n) * 4).unwrap();
    let kernel = Kernel {
        label: "add".into(),
        source: ADD.into(),
        entry: "main",
        constants: vec![],
        bindings: vec![Bind::In(0), Bind::Out(0)],
        params: [n.to_le_bytes(), 1f32.to_le_bytes()].concat(),
        groups: [n.div_ceil(64), 1, 1],
    };
    let launches: Vec<_> =
        (0..16).map(|_| Launch { kernel: &kernel, regions: vec![x.whole(), y.whole()] }).collect();
    let list = CommandList::new(&gpu, "step", &launches).unwrap();
    let batch = vec![0.5f32; n as usize];
    let step = |i: u32| {
        gpu.write(&x, 0, &batch).unwrap();
        list.run().unwrap();
        if i.is_multiple_of(20) {
            gpu.read::<f32>(&y, 0..1).unwrap();
        }
    };
    let allocated = || gpu.device().generate_allocator_report().map(|r| r.total_allocated_bytes);
    (0..200).for_each(step);
    gpu.wait("step").unwrap();
    let (before, rss_before) = (allocated(), resident());
    (0..2000).for_each(step);
    gpu.wait("step").unwrap();
    let (after, rss_after) = (allocated(), resident());
    println!("allocator {before:?} -> {after:?} bytes, resident {rss_before:?} -> {rss_after:?} KiB");
    if let (Some(before), Some(after)) = (before, after) {
        assert!(after <= before + (1 << 20), "{before} -> {after}");
    }
    if let (Some(before), Some(after)) = (rss_before, rss_after) {
        // 2,000 steps that leaked only their 16 KiB upload would take 32 MiB.
        assert!(after < before + 8 * 1024, "{before} -> {after} KiB");
    }
}

/// Resident memory in KiB, where the system tells.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}
