//! Layer norm, RMS norm, softmax and attention on the software Vulkan driver and on the CPU executor, beside
//! one thread's memcpy in turns. Best of fifteen. Bytes are counted as: every input read once, every output written once.

use birkhoff::graph::exec::{Device, Program, State};
use birkhoff::graph::testing::{noise, software_device};
use birkhoff::graph::{Graph, Tensor};
use std::time::Instant;

const LEN: usize = 1 << 22;

/// Best seconds of `f`, and of a copy of `LEN` floats by one thread, in turns: what else the machine does
/// in the meantime touches both. After one run that compiles and warms.
fn seconds(mut f: impl FnMut()) -> (f64, f64) {
    let from = vec![1f32; LEN];
    let mut to = vec![0f32; LEN];
    f();
    let time = |f: &mut dyn FnMut()| {
        let t = Instant::now();
        f();
        t.elapsed().as_secs_f64()
    };
    (0..15).fold((f64::MAX, f64::MAX), |(a, b), _| {
        let copy = time(&mut || {
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&to);
        });
        (a.min(time(&mut f)), b.min(copy))
    })
}

fn case(
    device: &Device,
    shape: &[usize],
    backward: bool,
    build: &dyn Fn(&mut Graph, Tensor) -> Tensor,
) -> (f64, f64) {
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
                let ((t, copy), (t2, _)) = (case(d, &shape, false, build), case(d, &shape, true, build));
                let rate = |t: f64| 8.0 * LEN as f64 / t / 1e9;
                println!(
                    "  {name:12} width {width:4}: {:6.2} GB/s, {:.2} of memcpy's {:.1}; with its gradient {:.2} ms",
                    rate(t),
                    copy / t,
                    rate(copy),
                    t2 * 1e3
                );
            }
        }
        let shape = [1024, 27, 32];
        let attention = |g: &mut Graph, x: Tensor| {
            let (k, v) = (g.state("k", shape), g.state("v", shape));
            g.attention(x, k, v, 4)
        };
        let ((f, _), (b, _)) = (case(d, &shape, false, &attention), case(d, &shape, true, &attention));
        println!("  attention {shape:?}, 4 heads: {:.2} ms, with its gradient {:.2} ms", f * 1e3, b * 1e3);
    }
}
