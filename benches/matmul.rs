//! Matrix products on the software Vulkan driver: the tuner's choice beside the naive kernel and the
//! `matrixmultiply` crate on one thread. `cargo bench --bench matmul`.
//!
//! All three are run in turn, several times, and the medians compared. On a machine that is busy with
//! other work wall time favours the single thread, so rates per CPU-second are printed too (Linux):
//! `x mm cpu` is (rate per CPU-second × 2 threads) / matrixmultiply's rate per CPU-second.

#[path = "../tests/matmul_harness/mod.rs"]
mod matmul_harness;

use std::time::Instant;

use birkhoff::gpu::kernel::Kernel;
use birkhoff::ops::matmul_tune::{AdapterKey, Tuner};
use birkhoff::ops::matmul_wgsl::{MatmulSpec, Variant, kernels, scratch_len};
use matmul_harness::{Gpu, Job, Random};

const ROUNDS: usize = 5;

/// CPU seconds of all threads so far; 0 where /proc does not tell.
fn cpu_seconds() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanos = tasks.filter_map(|t| {
        let text = std::fs::read_to_string(t.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    nanos.sum::<f64>() * 1e-9
}

/// Wall and CPU seconds of one run, over at least 60 ms of runs (the kernel's clock ticks in 4 ms).
fn time(mut run: impl FnMut()) -> [f64; 2] {
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let mut runs = 0.0;
    while start.elapsed().as_millis() < 60 {
        run();
        runs += 1.0;
    }
    [start.elapsed().as_secs_f64() / runs, (cpu_seconds() - cpu) / runs]
}

fn median(times: &[[f64; 2]], which: usize) -> f64 {
    let mut all: Vec<f64> = times.iter().map(|t| t[which]).collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn sgemm(spec: &MatmulSpec, a: &[f32], b: &[f32], c: &mut [f32]) {
    let (m, n, k) = (spec.m as usize, spec.n as usize, spec.k as usize);
    let strides = |trans: bool, rows: usize, cols: usize| {
        if trans { (1, rows as isize) } else { (cols as isize, 1) }
    };
    let ((ra, ca), (rb, cb)) = (strides(spec.trans_a, m, k), strides(spec.trans_b, k, n));
    let sum = if spec.reduce_batch { 1.0 } else { 0.0 };
    c[..m * n].fill(0.0);
    for i in 0..spec.batch as usize {
        let a = &a[if spec.a_batched { i * m * k } else { 0 }..][..m * k];
        let b = &b[if spec.b_batched { i * k * n } else { 0 }..][..k * n];
        let c = &mut c[if spec.reduce_batch { 0 } else { i * m * n }..][..m * n];
        // SAFETY: the slices hold m·k, k·n and m·n elements, and the strides stay inside them.
        unsafe {
            let out = c.as_mut_ptr();
            matrixmultiply::sgemm(
                m,
                k,
                n,
                1.0,
                a.as_ptr(),
                ra,
                ca,
                b.as_ptr(),
                rb,
                cb,
                sum,
                out,
                n as isize,
                1,
            );
        }
    }
}

fn main() {
    let Some(gpu) = Gpu::open(true) else { return };
    println!("{} ({})", gpu.info.name, gpu.info.driver_info);
    let plain = MatmulSpec::plain;
    let both = MatmulSpec { batch: 1024, a_batched: true, b_batched: true, ..plain(27, 27, 32) };
    let mix = MatmulSpec { batch: 1024, trans_a: true, b_batched: true, ..plain(27, 32, 27) };
    let shapes = [
        ("dense, asked for", plain(4096, 256, 256)),
        ("dense, asked for", plain(16_384, 64, 64)),
        ("square, asked for", plain(1024, 1024, 1024)),
        ("dense", plain(27_648, 32, 32)),
        ("dense", plain(27_648, 64, 32)),
        ("dense, B transposed", MatmulSpec { trans_b: true, ..plain(27_648, 32, 64) }),
        ("head", plain(1024, 64, 864)),
        ("cross, low rank", plain(1024, 16, 864)),
        ("mHC projection", plain(27_648, 24, 128)),
        ("slot mix, batched", mix),
        ("Gram, batched", MatmulSpec { trans_b: true, ..both }),
        ("weight gradient", MatmulSpec { trans_a: true, ..plain(32, 32, 27_648) }),
        ("sum over the batch", MatmulSpec { trans_b: true, reduce_batch: true, ..both }),
    ];
    // A memory of its own: the choice is measured anew.
    let mut tuner = Tuner::in_dir(AdapterKey::from(&gpu.info), None);
    println!(
        "{:20} {:>18} {:18} {:>6} {:>7} {:>7} {:>7} {:>7} {:>6} {:>8}",
        "shape", "b·m·n·k", "chosen", "tune s", "naive", "chosen", "mm", "x naive", "x mm", "x mm cpu"
    );
    for (name, spec) in shapes {
        let mut random = Random(1);
        let [a_len, b_len, c_len] = spec.lens();
        let (a, b, mut c) = (random.floats(a_len), random.floats(b_len), vec![0.0; c_len]);
        let build = |ks: &[Kernel], scratch| gpu.job(ks, &[&a, &b], scratch, c_len);
        let of = |v| -> Job { build(&kernels(&spec, None, v), scratch_len(&spec, None, v)) };

        let start = Instant::now();
        let mut measure = |ks: &[Kernel], scratch| {
            let job = build(ks, scratch);
            gpu.run(&job);
            gpu.run(&job).min(gpu.run(&job))
        };
        let variant = tuner.choose(&spec, Some(&mut measure));
        let tuning = start.elapsed().as_secs_f64();

        let (naive, chosen) = (of(Variant::Naive), of(variant));
        gpu.run(&chosen);
        let mut times = [const { Vec::new() }; 3];
        for round in 0..ROUNDS {
            if round < 3 {
                times[0].push(time(|| _ = gpu.run(&naive)));
            }
            times[1].push(time(|| _ = gpu.run(&chosen)));
            times[2].push(time(|| sgemm(&spec, &a, &b, &mut c)));
        }
        let rate = |i: usize, which| spec.flops() / median(&times[i], which) / 1e9;
        println!(
            "{name:20} {:>18} {:18} {tuning:6.2} {:7.2} {:7.2} {:7.1} {:7.1} {:6.3} {:8.3}",
            format!("{}·{}·{}·{}", spec.batch, spec.m, spec.n, spec.k),
            &variant.label()["matmul_".len()..],
            rate(0, 0),
            rate(1, 0),
            rate(2, 0),
            rate(1, 0) / rate(0, 0),
            rate(1, 0) / rate(2, 0),
            2.0 * rate(1, 1) / rate(2, 1),
        );
    }
}
