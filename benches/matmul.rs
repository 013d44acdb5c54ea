//! Matrix products on the Vulkan adapter here.
#[path = "../tests/matmul_harness/mod.rs"]
mod matmul_harness;

use birkhoff::ops::matmul_wgsl::{MatmulSpec, Variant, kernels, scratch_len};
use matmul_harness::{Gpu, Random};
use std::time::Instant;

fn main() {
    let gpu = Gpu::open(true).unwrap();
    let shapes: Vec<MatmulSpec> = vec![
        MatmulSpec::plain(4096, 256, 256),
        MatmulSpec::plain(16384, 64, 64),
        MatmulSpec::plain(1024, 1024, 1024),
        MatmulSpec::plain(27648, 32, 32),
        MatmulSpec { trans_b: true, ..MatmulSpec::plain(27648, 32, 64) },
        MatmulSpec { batch: 1024, trans_a: true, b_batched: true, ..MatmulSpec::plain(27, 32, 27) },
        MatmulSpec {
            batch: 1024,
            a_batched: true,
            trans_b: true,
            b_batched: true,
            ..MatmulSpec::plain(27, 27, 32)
        },
        MatmulSpec { trans_a: true, ..MatmulSpec::plain(32, 32, 27648) },
        MatmulSpec {
            batch: 1024,
            a_batched: true,
            trans_b: true,
            b_batched: true,
            reduce_batch: true,
            ..MatmulSpec::plain(27, 27, 32)
        },
    ];
    let vars = [
        Variant::register(8, 8),
        Variant::register(4, 8),
        Variant::register(8, 16),
        Variant::register(16, 8),
        Variant::register(16, 4),
        Variant::register(16, 16),
        Variant::register(12, 12),
        Variant::Shared { tile: 8, split: 1 },
        Variant::Naive,
    ];
    for s in &shapes {
        println!("{s:?}");
        let mut r = Random(1);
        let [la, lb, lc] = s.lens();
        let (a, b) = (r.floats(la), r.floats(lb));
        for v in vars {
            let splits: &[u32] = if s.reduce_batch || s.k > 5000 { &[8, 32, 128] } else { &[1] };
            for &sp in splits {
                let v = v.with_split(sp);
                let ks = kernels(s, None, v);
                let t0 = Instant::now();
                let job = gpu.job(&ks, &[&a, &b], scratch_len(s, None, v), lc);
                gpu.run(&job);
                let first = t0.elapsed().as_secs_f64();
                let reps = if v == Variant::Naive { 2 } else { 5 };
                let mut ts: Vec<f64> = (0..reps).map(|_| gpu.run(&job)).collect();
                ts.sort_by(f64::total_cmp);
                println!(
                    "  {:24} split {sp:3} first {first:.2}s {:7.2} GFLOP/s (best {:.2}) {} chars",
                    v.label(),
                    s.flops() / ts[reps / 2] / 1e9,
                    s.flops() / ts[0] / 1e9,
                    ks[0].source.len()
                );
            }
        }
    }
}
