//! `cargo bench --bench step [-- software]`: one training step at B = 1024, m = 27 (1 dense + 26
//! categorical), d = 32, four layers of attention (4 heads, ffn 2d) + linear, with shortcuts and with mHC
//! (n = 4, t = 20), in CPU time and wall time; then the share of a default step (batch 4096) that the CPU
//! executor spends outside its operations.
//!
//! For orientation: JAX 0.10 (XLA, two threads) takes 0.82 s of CPU time with shortcuts and 1.63 s with mHC.

use birkhoff::gpu::{DeviceChoice, GpuOptions, Selected};
use birkhoff::graph::exec::{Device, Program, State};
use birkhoff::model::build::{EmbeddingSpec, FeatureSpec, model, table_inputs};
use birkhoff::model::config::Config;
use birkhoff::ops::sparse_index::SparseIndex;
use birkhoff::train::step::{GUARD, RUNNING, hyper, training_step};
use std::time::Instant;

const ROWS: usize = 1000;

/// User and system time of this process, in seconds.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit(')').next().unwrap_or_default();
    let f: Vec<f64> = after.split_whitespace().map(|x| x.parse().unwrap_or(0.0)).collect();
    if f.len() > 12 { (f[11] + f[12]) / 100.0 } else { f64::NAN }
}

fn config(sets: &[&str]) -> Config {
    Config::load(None, &sets.iter().map(|s| s.to_string()).collect::<Vec<_>>())
        .expect("a valid configuration")
}

/// A compiled step with a random batch uploaded.
fn prepare(cfg: &Config, device: &Device) -> (Program, State) {
    let b = cfg.train.batch;
    let columns = (1..=26).map(|c| (format!("C{c}"), ROWS)).collect();
    let f = FeatureSpec { numeric: 26, tables: vec![EmbeddingSpec { columns, ..Default::default() }] };
    let step = training_step(model(&cfg.model, &f, b, true, 0.01, -1.0).expect("a model"), &cfg.train);
    let mut s = State::new(device);
    for p in &step.params {
        s.set(&p.name, &p.initial(1)).expect("room");
    }
    for (n, len) in &step.optimizer {
        s.set(n, &vec![0.0; *len]).expect("room");
    }
    s.set(RUNNING, &[0.0]).expect("room");
    s.set(GUARD, &[0.0; 2]).expect("room");
    let mut p =
        Program::compile(device, &s, &step.graph, &[step.loss, step.norm2], "step").expect("compiles");
    let mut x = 12345u64;
    let mut next = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) as u32
    };
    let ids: Vec<u32> = (0..b * 26).map(|i| (i % 26 * ROWS) as u32 + next() % ROWS as u32).collect();
    let index = SparseIndex::plain(&ids);
    let n = table_inputs(0);
    p.set_ids(&n.ids, &ids).expect("fits");
    p.set_ids(&n.order, &index.order).expect("fits");
    p.set_ids(&n.segments, &index.segments).expect("fits");
    p.set_ids(&n.unique, &index.unique).expect("fits");
    let floats = |n: usize, f: &mut dyn FnMut() -> f32| (0..n).map(|_| f()).collect::<Vec<f32>>();
    p.set("numeric", &floats(b * 26, &mut || next() as f32 / 2e9)).expect("fits");
    p.set("label", &floats(b, &mut || (next() % 4 == 0) as u8 as f32)).expect("fits");
    p.set("weight", &vec![1.0; b]).expect("fits");
    p.set("hyper", &hyper(&cfg.train, 1, 1.0)).expect("fits");
    (p, s)
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

fn main() {
    let software = std::env::args().any(|a| a == "software");
    let device = match birkhoff::gpu::select(&DeviceChoice::Software, &GpuOptions::default()) {
        Ok(Selected::Gpu(g)) if software => Device::tuned(g),
        _ if software => return println!("SKIP: no software Vulkan adapter"),
        _ => Device::Cpu,
    };
    println!("device: {}", device.name());
    let modes = ["shortcut", "mhc"];
    let mut runs: Vec<_> = modes
        .iter()
        .map(|mode| {
            let mode_set = format!("model.residual.mode={mode}");
            let heads = "model.modules=[{kind=\"attention\",heads=4},{kind=\"linear\"}]";
            let cfg = config(&["train.batch=1024", "model.width=32", heads, &mode_set]);
            prepare(&cfg, &device)
        })
        .collect();
    let mut once = |i: usize| {
        let (p, s) = &mut runs[i];
        let (w, c) = (Instant::now(), cpu_seconds());
        p.run(s).expect("runs");
        pollster::block_on(p.read(&[0])).expect("reads");
        [w.elapsed().as_secs_f64(), cpu_seconds() - c]
    };
    // in turn, so that what else the machine does falls on both
    let rounds = if software { 5 } else { 15 };
    let times: Vec<[[f64; 2]; 2]> = (0..=rounds).map(|_| [once(0), once(1)]).skip(1).collect();
    for (i, mode) in modes.iter().enumerate() {
        let [wall, cpu] = [0, 1].map(|k| median(times.iter().map(|t| t[i][k]).collect()));
        println!("{mode:<9} wall {wall:.3} s   CPU {cpu:.3} s   (medians of {rounds})");
    }
    let ratio = median(times.iter().map(|t| t[1][0] / t[0][0]).collect());
    println!("mHC / shortcut: {ratio:.2} (median of the pairs' wall times)");
    if std::env::args().any(|a| a == "profile") {
        for (p, s) in &mut runs {
            p.start_profile();
            p.run(s).expect("runs");
            println!("{}", pollster::block_on(p.profile_table()).expect("a table"));
        }
    }
    if !software {
        let cfg = config(&["train.batch=4096"]);
        let (mut p, mut s) = prepare(&cfg, &device);
        p.run(&mut s).expect("runs");
        p.start_profile();
        let w = Instant::now();
        for _ in 0..3 {
            p.run(&mut s).expect("runs");
        }
        let total = w.elapsed().as_secs_f64();
        let inside = p.seconds_in_operations();
        println!(
            "default step, batch 4096: {:.3} s, {:.1} % outside operations",
            total / 3.0,
            100.0 * (1.0 - inside / total)
        );
    }
}
