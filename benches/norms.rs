//! Layer norm, RMS norm, softmax and attention on the software Vulkan driver and on the CPU executor, beside
//! one thread's memcpy in the same run. Bytes are counted as: every input read once, every output written once.

use birkhoff::graph::exec::{Device, Program, State};
use birkhoff::graph::testing::{noise, software_device};
use birkhoff::graph::{Graph, Tensor};
use std::time::Instant;

/// Median of five, after one that compiles and warms.
fn seconds(mut f: impl FnMut()) -> f64 {
    f();
    let mut t: Vec<f64> = (0..5)
        .map(|_| {
            let t = Instant::now();
            f();
            t.elapsed().as_secs_f64()
        })
        .collect();
    t.sort_by(f64::total_cmp);
    t[2]
}

fn case(
    device: &Device,
    shape: &[usize],
    backward: bool,
    build: &dyn Fn(&mut Graph, Tensor) -> Tensor,
) -> f64 {
    let mut g = Graph::new();
    let x = g.state("x", shape);
    let y = build(&mut g, x);
    let mut keep = vec![y];
    if backward {
        let dy = g.state("dy", shape);
        keep = g.gradients_from(&[(y, dy)], &[x]);
    }
    let mut s = State::new(device);
    for (i, (name, shape)) in g.states().into_iter().enumerate() {
        let data: Vec<f32> = noise(shape.len(), i as u64).iter().map(|v| *v as f32).collect();
        s.set(&name, &data).unwrap();
    }
    let mut p = Program::compile(device, &s, &g, &keep, "bench").unwrap();
    seconds(|| {
        p.run(&mut s).unwrap();
        if let Device::Gpu(gpu, _) = device {
            gpu.wait("bench").unwrap();
        }
    })
}

fn main() {
    const LEN: usize = 1 << 22;
    let from = vec![1f32; LEN];
    let mut to = vec![0f32; LEN];
    let copy = seconds(|| {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&to);
    });
    let memcpy = 8.0 * LEN as f64 / copy / 1e9;
    println!("memcpy, one thread: {memcpy:.1} GB/s");
    let mut devices = vec![Device::Cpu];
    devices.extend(software_device());
    for d in &devices {
        println!("{}", d.name());
        for width in [64, 256] {
            let shape = [LEN / width, width];
            let params = |g: &mut Graph| (g.state("gamma", [width]), g.state("beta", [width]));
            type Build<'a> = &'a dyn Fn(&mut Graph, Tensor) -> Tensor;
            let ops: [(&str, Build<'_>); 3] = [
                ("layer_norm", &|g, x| {
                    let (gamma, beta) = params(g);
                    g.layer_norm(x, gamma, beta)
                }),
                ("rms_norm", &|g, x| g.rms_norm(x, None, 1e-6)),
                ("softmax", &|g, x| g.softmax(x)),
            ];
            for (name, build) in ops {
                let t = case(d, &shape, false, build);
                let rate = 8.0 * LEN as f64 / t / 1e9;
                let t2 = case(d, &shape, true, build);
                println!(
                    "  {name:12} width {width:4}: {rate:6.2} GB/s, {:.2} of memcpy; with its gradient {:.2} ms",
                    rate / memcpy,
                    t2 * 1e3
                );
            }
        }
        let shape = [1024, 27, 32];
        let attention = |g: &mut Graph, x: Tensor| {
            let (k, v) = (g.state("k", shape), g.state("v", shape));
            g.attention(x, k, v, 4)
        };
        let (f, b) = (case(d, &shape, false, &attention), case(d, &shape, true, &attention));
        println!("  attention {shape:?}, 4 heads: {:.2} ms, with its gradient {:.2} ms", f * 1e3, b * 1e3);
    }
}
