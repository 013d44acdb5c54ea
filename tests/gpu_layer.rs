//! The device layer on a real Vulkan driver: the software one in CI. Prints a skip line without any.

use std::borrow::Cow;

use birkhoff::gpu::profile::Clock;
use birkhoff::gpu::{
    Bind, CommandList, DeviceChoice, Gpu, GpuError, GpuOptions, Kernel, Launch, LimitsMode, Selected,
    fold_groups, select,
};

fn open(options: GpuOptions) -> Option<Gpu> {
    match select(&DeviceChoice::Software, &options).or_else(|_| select(&DeviceChoice::Gpu, &options)) {
        Ok(Selected::Gpu(gpu)) => Some(gpu),
        Ok(Selected::Cpu) => None,
        Err(error) => {
            println!("SKIP: no Vulkan adapter ({error})");
            None
        }
    }
}

#[test]
fn devices_are_listed() {
    use birkhoff::gpu::{cpu_report, list_adapters, render_devices};
    let adapters = list_adapters();
    let text = render_devices(&cpu_report(), &adapters);
    println!("{text}");
    assert!(text.contains("cpu executor"));
    for a in &adapters {
        assert!(text.contains(&a.name) && a.limits.max_storage_buffers_per_shader_stage > 0);
        assert!(!(a.auto && a.device_type == "software"), "auto never picks a software driver");
        // Its number picks the same adapter.
        match select(&DeviceChoice::Named(a.index.to_string()), &GpuOptions::default()).unwrap() {
            Selected::Gpu(gpu) => assert_eq!(gpu.info().name, a.name),
            Selected::Cpu => panic!("a number picks an adapter"),
        }
    }
    let missing = DeviceChoice::Named("no such adapter".to_string());
    assert!(matches!(select(&missing, &GpuOptions::default()), Err(GpuError::NoAdapter { .. })));
    assert!(matches!(select(&DeviceChoice::Cpu, &GpuOptions::default()), Ok(Selected::Cpu)));
}

fn gpu() -> Option<Gpu> {
    open(GpuOptions::default())
}

const SAXPY: &str = "
struct Params { n: u32, a: f32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@group(0) @binding(2) var<uniform> p: Params;
override WG: u32 = 64u;
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) num: vec3<u32>,
        @builtin(local_invocation_index) l: u32) {
    let i = (wid.x + wid.y * num.x) * WG + l;
    if (i < p.n) { y[i] = p.a * x[i] + y[i]; }
}
";

const INCREMENT: &str = "
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < arrayLength(&y)) { y[id.x] += 1.0; }
}
";

fn params(n: u32, a: f32) -> Vec<u8> {
    [n.to_le_bytes(), a.to_le_bytes()].concat()
}

fn saxpy(n: u32, a: f32, wg: u32) -> Kernel {
    Kernel {
        label: "saxpy".into(),
        source: Cow::Borrowed(SAXPY),
        entry: "main",
        constants: vec![("WG", wg.into())],
        bindings: vec![Bind::In(0), Bind::Out(0)],
        params: params(n, a),
        groups: fold_groups(u64::from(n.div_ceil(wg))),
    }
}

fn increment(n: u32) -> Kernel {
    Kernel {
        label: "increment".into(),
        source: Cow::Borrowed(INCREMENT),
        entry: "main",
        constants: vec![],
        bindings: vec![Bind::Out(0)],
        params: vec![],
        groups: [n.div_ceil(64), 1, 1],
    }
}

#[test]
fn saxpy_in_place_and_read_many() {
    let Some(gpu) = gpu() else { return };
    let n = 1001;
    let x = gpu.create_buffer_with("x", &(0..n).map(|i| i as f32).collect::<Vec<_>>()).unwrap();
    let y = gpu.create_buffer_with("y", &vec![1.0f32; n]).unwrap();
    let (k, inc) = (saxpy(n as u32, 2.0, 32), increment(n as u32));
    let list = CommandList::new(
        &gpu,
        "test",
        &[
            Launch { kernel: &k, regions: vec![x.whole(), y.whole()] },
            Launch { kernel: &inc, regions: vec![y.whole()] },
        ],
    )
    .unwrap();
    list.run().unwrap();
    list.run_range(1..2).unwrap();
    list.set_params(0, &params(n as u32, 10.0)).unwrap();
    assert!(list.set_params(0, &[0; 4]).is_err() && list.set_params(9, &[]).is_err());
    list.run().unwrap();
    // y = 1 + 2x + 1 + 1 + 10x + 1
    let got = gpu.read_many::<f32>(&[(&y, 0..3), (&x, 1000..1001), (&y, 999..1001), (&y, 5..5)]).unwrap();
    assert_eq!(got, [vec![4.0, 16.0, 28.0], vec![1000.0], vec![11992.0, 12004.0], vec![]]);
    assert!(list.run_range(1..3).unwrap_err().to_string().contains("2 dispatches"));
    // A second list of the same kernels finds them compiled.
    let again = gpu.compile_all([&k, &inc]).unwrap();
    let third = gpu.compile_all([&saxpy(7, 1.0, 32)]).unwrap();
    assert!(std::sync::Arc::ptr_eq(&again[0], &third[0]));
}

#[test]
fn more_workgroups_than_a_dimension_holds() {
    let Some(gpu) = gpu() else { return };
    let n = 70_000u32 * 2 - 1;
    let k = saxpy(n, 3.0, 2);
    assert_eq!(k.groups, [35_000, 2, 1]);
    let x = gpu.create_buffer_with("x", &vec![1.0f32; n as usize]).unwrap();
    let y = gpu.create_buffer("y", u64::from(n) * 4).unwrap();
    let regions = vec![x.whole(), y.whole()];
    let launch = Launch { kernel: &k, regions: regions.clone() };
    CommandList::new(&gpu, "test", &[launch]).unwrap().run().unwrap();
    let got: Vec<f32> = gpu.read(&y, 0..u64::from(n)).unwrap();
    assert!(got.iter().all(|v| *v == 3.0));

    let limit = gpu.limits().max_compute_workgroups_per_dimension;
    if limit < u32::MAX {
        let flat = Kernel { groups: [limit + 1, 1, 1], ..k };
        let launch = Launch { kernel: &flat, regions };
        let text = CommandList::new(&gpu, "test", &[launch]).unwrap_err().to_string();
        assert!(text.contains("saxpy") && text.contains("fold_groups"), "{text}");
    }
}

#[test]
fn a_bad_shader_names_kernel_and_line() {
    let Some(gpu) = gpu() else { return };
    let mut bad = increment(1);
    bad.label = "broken".into();
    bad.source = INCREMENT.replace("+= 1.0", "+= ").into();
    let text = gpu.compile_all([&increment(1), &bad]).unwrap_err().to_string();
    assert!(text.starts_with("kernel broken: line 5:") && !text.contains('\n'), "{text}");
}

#[test]
fn binding_conflicts_are_found() {
    let Some(gpu) = gpu() else { return };
    let x = gpu.create_buffer("weights", 4096).unwrap();
    let k = saxpy(64, 1.0, 64);
    let make = |a, b| CommandList::new(&gpu, "test", &[Launch { kernel: &k, regions: vec![a, b] }]);
    // Not even regions that do not overlap.
    let text = make(x.region(0, 256), x.region(1024, 256)).unwrap_err().to_string();
    assert!(text.contains("kernel saxpy") && text.contains("weights"), "{text}");
    assert!(text.contains("@binding(0) x") && text.contains("@binding(1) y"), "{text}");
    let y = gpu.create_buffer("y", 4096).unwrap();
    make(x.region(0, 256), y.region(1024, 256)).unwrap().run().unwrap();
    for bad in [y.region(4, 256), y.region(0, 255), y.region(0, 0), y.region(2048, 4096)] {
        let text = make(x.whole(), bad).unwrap_err().to_string();
        assert!(text.contains("kernel saxpy: @binding(1) y (y)"), "{text}");
    }
    let few = CommandList::new(&gpu, "test", &[Launch { kernel: &k, regions: vec![x.whole()] }]);
    assert!(few.unwrap_err().to_string().contains("2 bindings, 1 buffers"));
    gpu.wait("test").unwrap();
}

#[test]
fn too_large_names_the_tensor_and_transfers_are_checked() {
    let Some(gpu) = gpu() else { return };
    let error = gpu.create_buffer("embedding.table", 1 << 50).unwrap_err();
    assert!(matches!(error, GpuError::TooLarge { needed, .. } if needed == 1 << 50));
    assert!(error.to_string().contains("embedding.table"), "{error}");
    let small = gpu.create_buffer("small", 6).unwrap();
    gpu.write(&small, 0, &[1u16, 2, 3]).unwrap();
    assert_eq!(gpu.read::<u16>(&small, 1..3).unwrap(), [2, 3]);
    assert_eq!(gpu.read::<u8>(&small, 3..5).unwrap(), [0, 3]);
    assert!(gpu.write(&small, 0, &[1u16]).is_err(), "would overwrite its neighbour");
    assert!(gpu.write(&small, 4, &[1u32]).unwrap_err().to_string().contains("small"));
    assert!(gpu.read::<u16>(&small, 0..4).is_err() && gpu.read::<u16>(&small, 0..u64::MAX).is_err());
}

#[test]
fn allocating_more_than_there_is_names_the_tensor() {
    let Some(gpu) = gpu() else { return };
    let size = gpu.limits().max_buffer_size.min(1 << 40) & !15;
    // Address space or memory ends somewhere; nothing is touched, so the host is not brought down.
    let mut held = Vec::new();
    for i in 0..64 {
        match gpu.create_arena(&format!("layer.{i}"), size) {
            Ok(buffer) => held.push(buffer),
            Err(error) => {
                assert!(matches!(error, GpuError::OutOfMemory { .. }), "{error:?}");
                assert!(error.to_string().contains(&format!("layer.{i}")), "{error}");
                println!("after {} buffers of {size} bytes: {error}", held.len());
                return;
            }
        }
    }
    println!("64 buffers of {size} bytes fit; out of memory not reached");
}

#[test]
fn default_limits_and_checks_work() {
    let Some(gpu) = open(GpuOptions { limits: LimitsMode::Default, checked: true }) else { return };
    let defaults = wgpu::Limits::default();
    assert_eq!(gpu.limits().max_storage_buffers_per_shader_stage, 8);
    assert_eq!(gpu.limits().max_storage_buffer_binding_size, defaults.max_storage_buffer_binding_size);
    assert!(gpu.checked() && !gpu.features().contains(wgpu::Features::SUBGROUP));
    let text = gpu.create_buffer("table", 129 << 20).unwrap_err().to_string();
    assert!(text.contains("table") && text.contains("134217728"), "{text}");
    let y = gpu.create_buffer("y", 256).unwrap();
    let inc = increment(64);
    let launch = Launch { kernel: &inc, regions: vec![y.whole()] };
    CommandList::new(&gpu, "test", &[launch]).unwrap().run().unwrap();
    assert_eq!(gpu.read::<f32>(&y, 0..64).unwrap(), [1.0; 64]);
}

#[test]
fn profile_times_every_dispatch() {
    let Some(gpu) = gpu() else { return };
    let n = 1 << 20;
    let x = gpu.create_buffer("x", n * 4).unwrap();
    let y = gpu.create_buffer("y", n * 4).unwrap();
    let (k, inc) = (saxpy(n as u32, 1.0, 64), increment(64));
    let mut launches = vec![Launch { kernel: &k, regions: vec![x.whole(), y.whole()] }];
    // More than one query set holds.
    for _ in 0..2100 {
        launches.push(Launch { kernel: &inc, regions: vec![y.region(0, 256)] });
    }
    let list = CommandList::new(&gpu, "test", &launches).unwrap();
    let profile = list.run_profiled().unwrap();
    println!("{:?}\n{}", profile.clock, profile.table());
    assert_eq!(profile.times.len(), 2101);
    assert!(profile.times[0].1 > 0.0);
    assert_eq!(profile.totals().iter().map(|t| t.calls).sum::<usize>(), 2101);
    if gpu.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
        assert_eq!(profile.clock, Clock::Device);
    }
    assert_eq!(gpu.read::<f32>(&y, 0..1).unwrap(), [2100.0]);
}

#[test]
fn a_lost_device_is_an_error() {
    let Some(gpu) = gpu() else { return };
    let y = gpu.create_buffer("y", 256).unwrap();
    let inc = increment(64);
    let list = CommandList::new(&gpu, "training step", &[Launch { kernel: &inc, regions: vec![y.whole()] }])
        .unwrap();
    list.run().unwrap();
    gpu.device().destroy();
    // Destroying takes effect when the queue has run dry, unlike a driver's reset.
    let error = gpu.wait("finishing the last step").unwrap_err();
    assert!(matches!(error, GpuError::DeviceLost { .. }), "{error:?}");
    let error = list.run().unwrap_err();
    assert!(matches!(error, GpuError::DeviceLost { .. }), "{error:?}");
    assert!(error.to_string().contains("training step"), "{error}");
    for error in [
        gpu.read::<f32>(&y, 0..1).unwrap_err(),
        gpu.create_buffer("z", 16).unwrap_err(),
        gpu.write(&y, 0, &[1.0f32]).unwrap_err(),
        gpu.compile_all([&saxpy(1, 1.0, 1)]).unwrap_err(),
        gpu.wait("waiting").unwrap_err(),
        list.run_profiled().unwrap_err(),
    ] {
        assert!(matches!(error, GpuError::DeviceLost { .. }), "{error:?}");
    }
}

/// `BIRKHOFF_MEASURE=1 cargo test --release --test gpu_layer -- --nocapture overheads`
#[test]
fn overheads() {
    if std::env::var_os("BIRKHOFF_MEASURE").is_none() {
        return println!("SKIP: a measurement (set BIRKHOFF_MEASURE=1)");
    }
    let Some(gpu) = gpu() else { return };
    let y = gpu.create_buffer("y", 4096).unwrap();
    let inc = increment(64);
    let launch = || Launch { kernel: &inc, regions: vec![y.region(0, 256)] };
    let time = |n: u32, f: &dyn Fn()| {
        f();
        gpu.wait("bench").unwrap();
        let best = (0..5)
            .map(|_| {
                let start = std::time::Instant::now();
                (0..n).for_each(|_| f());
                gpu.wait("bench").unwrap();
                start.elapsed().as_secs_f64() * 1e6 / f64::from(n)
            })
            .fold(f64::INFINITY, f64::min);
        println!("{best:8.1} us");
        best
    };
    let one = CommandList::new(&gpu, "one", &[launch()]).unwrap();
    let many = CommandList::new(&gpu, "many", &(0..1000).map(|_| launch()).collect::<Vec<_>>()).unwrap();
    print!("dispatch in one pass of 1000 (per dispatch x1000): ");
    time(5, &|| many.run().unwrap());
    let others: Vec<_> = (0..8).map(|i| gpu.create_buffer(&format!("y{i}"), 4096).unwrap()).collect();
    let apart: Vec<_> =
        (0..1000).map(|i| Launch { kernel: &inc, regions: vec![others[i % 8].region(0, 256)] }).collect();
    let apart = CommandList::new(&gpu, "apart", &apart).unwrap();
    print!("the same over 8 buffers: ");
    time(5, &|| apart.run().unwrap());
    print!("submit, no wait:  ");
    time(500, &|| one.run().unwrap());
    print!("submit + wait:    ");
    time(500, &|| {
        one.run().unwrap();
        gpu.wait("bench").unwrap();
    });
    print!("4 KiB read-back:  ");
    time(500, &|| drop(gpu.read::<f32>(&y, 0..1024).unwrap()));
    print!("4 KiB upload + submit + wait: ");
    let data = [0f32; 1024];
    time(500, &|| {
        gpu.write(&y, 0, &data).unwrap();
        one.run().unwrap();
        gpu.wait("bench").unwrap();
    });
    print!("host encode of 1000 dispatches: ");
    let start = std::time::Instant::now();
    many.run().unwrap();
    println!("{:8.1} us", start.elapsed().as_secs_f64() * 1e6);
    gpu.wait("bench").unwrap();
}
