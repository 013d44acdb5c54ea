//! Every matrix product kernel: valid for naga, inside WebGPU's default limits, and numerically right
//! on the software Vulkan driver, for both transpositions, every batch rule and every extra input.

mod matmul_harness;

use birkhoff::gpu::kernel::Kernel;
use birkhoff::gpu::reflect::reflect;
use birkhoff::ops::matmul_wgsl::{Epilogue, Extra, MatmulSpec, Variant, kernels, scratch_len};
use matmul_harness::{Gpu, Random};

const VARIANTS: [Variant; 14] = [
    Variant::Naive,
    Variant::register(8, 8),
    Variant::register(4, 8),
    Variant::register(4, 4),
    Variant::register(8, 4),
    Variant::register(16, 4),
    Variant::register(8, 16),
    Variant::register(1, 4),
    Variant::register(8, 1),
    Variant::register(3, 12),
    Variant::Shared { tile: 4, split: 1 },
    Variant::Shared { tile: 8, split: 1 },
    Variant::register(16, 8),
    Variant::register(12, 12),
];

/// Translates a kernel to the languages of the backends that are not here: Metal and DX12 (and Vulkan).
fn translate(kernel: &Kernel) {
    let module = naga::front::wgsl::parse_str(&kernel.source).expect("parsed before");
    let info = validator().validate(&module).expect("validated before");
    naga::back::spv::write_vec(&module, &info, &Default::default(), None).expect("SPIR-V");
    naga::back::msl::write_string(&module, &info, &Default::default(), &Default::default()).expect("MSL");
    let mut text = String::new();
    let (options, pipeline) = (Default::default(), Default::default());
    naga::back::hlsl::Writer::new(&mut text, &options, &pipeline).write(&module, &info, None).expect("HLSL");
}

fn validator() -> naga::valid::Validator {
    naga::valid::Validator::new(naga::valid::ValidationFlags::all(), naga::valid::Capabilities::empty())
}

/// Parses and validates one kernel, and holds it to WebGPU's default limits and the launch contract.
fn check(kernel: &Kernel) {
    let module = naga::front::wgsl::parse_str(&kernel.source)
        .unwrap_or_else(|e| panic!("{}", e.emit_to_string(&kernel.source)));
    validator().validate(&module).unwrap_or_else(|e| panic!("{}", e.emit_to_string(&kernel.source)));

    let storage = |g: &&naga::GlobalVariable| matches!(g.space, naga::AddressSpace::Storage { .. });
    let globals = || module.global_variables.iter().map(|(_, g)| g);
    assert!(kernel.bindings.len() <= 8, "{} storage buffers", kernel.bindings.len());
    assert_eq!(globals().filter(storage).count(), kernel.bindings.len());
    assert!(kernel.groups.iter().all(|&g| (1..=65_535).contains(&g)), "groups {:?}", kernel.groups);
    assert!(module.entry_points[0].workgroup_size.iter().product::<u32>() <= 256);
    let mut layouter = naga::proc::Layouter::default();
    layouter.update(module.to_ctx()).expect("layouts");
    let shared: u32 =
        globals().filter(|g| g.space == naga::AddressSpace::WorkGroup).map(|g| layouter[g.ty].size).sum();
    assert!(shared <= 16_384, "{shared} bytes of workgroup memory");
    let uniform = globals().find(|g| g.space == naga::AddressSpace::Uniform).expect("a uniform block");
    assert_eq!(layouter[uniform.ty].size as usize, kernel.params.len());
    assert_eq!(uniform.binding.expect("bound").binding as usize, kernel.bindings.len());
    // What the page would bind, which has no naga.
    reflect(kernel).unwrap();
}

fn epilogue(wgsl: &str, extras: &[Extra]) -> Option<Epilogue> {
    Some(Epilogue { wgsl: wgsl.into(), extras: extras.to_vec() })
}

#[test]
fn every_variant_is_valid() {
    let all_extras =
        [Extra::Full, Extra::Row, Extra::Col, Extra::Scalar, Extra::Strided { batch: 100, row: 10, col: 1 }];
    let epilogues = [
        None,
        epilogue("max(acc + x0, 0.0)", &[Extra::Row]),
        epilogue("acc * x3 + x1 * x2 + tanh(x4) + x0", &all_extras),
    ];
    let sizes = [[1, 1, 1], [5, 7, 9], [8, 16, 4], [70, 66, 36], [64, 64, 64], [128, 128, 33]];
    let mut seen = std::collections::HashSet::new();
    for variant in VARIANTS {
        for [m, n, k] in sizes {
            for bits in 0..32u32 {
                let bit = |i: u32| bits >> i & 1 == 1;
                for e in &epilogues {
                    for accumulate in [None, Some(0)] {
                        // Rows and batch rules do not change what an epilogue looks like.
                        let epilogue_matters = bits & 7 == bits;
                        if (accumulate.is_some() || e.is_some()) && !epilogue_matters {
                            continue;
                        }
                        let spec = MatmulSpec {
                            batch: 3,
                            m,
                            n,
                            k,
                            trans_a: bit(0),
                            trans_b: bit(1),
                            a_batched: bit(2),
                            b_batched: bit(3),
                            reduce_batch: bit(4),
                            accumulate,
                        };
                        let split = if bits & 8 == 0 || bits & 4 == 0 { 1 } else { 3 };
                        for kernel in kernels(&spec, e.as_ref(), variant.with_split(split)) {
                            if seen.insert(kernel.source.to_string()) {
                                check(&kernel);
                                if seen.len() % 8 == 1 {
                                    translate(&kernel);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(seen.len() > 1_000, "{} kernels", seen.len());
}

/// One case: a product, its epilogue in WGSL and in f64, and how to compute it.
struct Case {
    spec: MatmulSpec,
    epilogue: Option<Epilogue>,
    oracle: fn(f64, &[f64]) -> f64,
    variant: Variant,
}

/// Runs the case on the device and compares every element with an f64 loop.
fn compare(gpu: &Gpu, case: &Case, seed: u64) {
    let s = case.spec;
    let mut random = Random(seed);
    let [a_len, b_len, c_len] = s.lens();
    let (a, b) = (random.floats(a_len), random.floats(b_len));
    let (bo, m, n, k) = (s.out_batch() as usize, s.m as usize, s.n as usize, s.k as usize);
    let extras: Vec<Extra> = match &case.epilogue {
        Some(e) => e.extras.clone(),
        None => s.accumulate.iter().map(|_| Extra::Full).collect(),
    };
    let at = |x: &Extra, b: usize, i: usize, j: usize| match *x {
        Extra::Full => (b * m + i) * n + j,
        Extra::Row => j,
        Extra::Col => b * m + i,
        Extra::Scalar => 0,
        Extra::Strided { batch, row, col } => b * batch as usize + i * row as usize + j * col as usize,
    };
    let tensors: Vec<Vec<f32>> =
        extras.iter().map(|x| random.floats(at(x, bo - 1, m - 1, n - 1) + 1)).collect();
    let mut inputs: Vec<&[f32]> = vec![&a, &b];
    inputs.extend(tensors.iter().map(|t| t.as_slice()));

    let launches = kernels(&s, case.epilogue.as_ref(), case.variant);
    launches.iter().for_each(check);
    let scratch = scratch_len(&s, case.epilogue.as_ref(), case.variant);
    assert_eq!(scratch > 0, launches.len() == 2);
    let job = gpu.job(&launches, &inputs, scratch, c_len);
    gpu.run(&job);
    let got = gpu.read(&job);

    let value = |bb: usize, i: usize, j: usize| -> (f64, f64) {
        let a0 = if s.a_batched { bb * m * k } else { 0 };
        let b0 = if s.b_batched { bb * k * n } else { 0 };
        (0..k).fold((0.0, 0.0), |(sum, size), q| {
            let x = a[a0 + if s.trans_a { q * m + i } else { i * k + q }] as f64;
            let y = b[b0 + if s.trans_b { j * k + q } else { q * n + j }] as f64;
            (sum + x * y, size + (x * y).abs())
        })
    };
    for bb in 0..bo {
        for i in 0..m {
            for j in 0..n {
                let products = if s.reduce_batch { 0..s.batch as usize } else { bb..bb + 1 };
                let (mut sum, size) =
                    products.map(|q| value(q, i, j)).fold((0.0, 0.0), |(s, t), (x, y)| (s + x, t + y));
                let xs: Vec<f64> =
                    extras.iter().zip(&tensors).map(|(x, t)| t[at(x, bb, i, j)] as f64).collect();
                if let Some(q) = s.accumulate {
                    sum += xs[q];
                }
                let want = (case.oracle)(sum, &xs);
                let have = got[(bb * m + i) * n + j] as f64;
                let tolerance = 4e-6 * (1.0 + size);
                assert!(
                    (want - have).abs() <= tolerance,
                    "{:?} {s:?} at [{bb}, {i}, {j}]: {have}, not {want}",
                    case.variant
                );
            }
        }
    }
}

fn plain(acc: f64, _: &[f64]) -> f64 {
    acc
}

/// Random sizes, layouts, batch rules, splits and epilogues for every variant.
fn random_cases(trusted: bool, count: u64, seed: u64) {
    let Some(gpu) = Gpu::open(trusted) else { return };
    let mut random = Random(seed);
    for round in 0..count {
        let variant = VARIANTS[round as usize % VARIANTS.len()];
        let mut size = |most: u64| {
            let n = 1 + random.below(most) as u32;
            if random.below(3) == 0 { n.next_multiple_of(4) } else { n }
        };
        let (batch, m, n, k) = (size(5), size(40), size(40), size(90));
        let bits = random.next();
        let bit = |i: u32| bits >> i & 1 == 1;
        let (epilogue, oracle): (_, fn(f64, &[f64]) -> f64) = match bits >> 8 & 3 {
            0 => (None, plain),
            1 => (epilogue("max(acc + x0, 0.0)", &[Extra::Row]), |acc, x| (acc + x[0]).max(0.0)),
            2 => (
                epilogue(
                    "acc * x3 + x1 * x2 + x0 * x4",
                    &[
                        Extra::Full,
                        Extra::Row,
                        Extra::Col,
                        Extra::Scalar,
                        Extra::Strided { batch: 2 * m, row: 1, col: m + 3 },
                    ],
                ),
                |acc, x| acc * x[3] + x[1] * x[2] + x[0] * x[4],
            ),
            _ => (
                epilogue("x1 - acc", &[Extra::Full, Extra::Strided { batch: 4 * m, row: 4, col: 0 }]),
                |acc, x| x[1] - acc,
            ),
        };
        let full_first = epilogue.as_ref().is_none_or(|e: &Epilogue| matches!(e.extras[0], Extra::Full));
        let spec = MatmulSpec {
            batch,
            m,
            n,
            k,
            trans_a: bit(0),
            trans_b: bit(1),
            a_batched: bit(2),
            b_batched: bit(3),
            reduce_batch: bit(4) && bit(5),
            accumulate: (bit(6) && full_first).then_some(0),
        };
        let variant = variant.with_split(1 + (bits >> 16 & 3) as u32);
        compare(&gpu, &Case { spec, epilogue, oracle, variant }, round);
    }
}

#[test]
fn random_products_match_f64() {
    random_cases(false, 42, 1);
}

#[test]
fn random_products_match_f64_unchecked() {
    random_cases(true, 14, 2);
}

/// The product's own shapes, with fewer examples in the batch.
#[test]
fn product_shapes_match_f64() {
    let Some(gpu) = Gpu::open(false) else { return };
    let mix = MatmulSpec { batch: 5, trans_a: true, b_batched: true, ..MatmulSpec::plain(27, 32, 27) };
    let both = MatmulSpec { a_batched: true, b_batched: true, batch: 5, ..MatmulSpec::plain(27, 27, 32) };
    let specs = [
        mix,
        MatmulSpec { trans_b: true, ..both },
        MatmulSpec { trans_b: true, reduce_batch: true, batch: 150, ..both },
        MatmulSpec { reduce_batch: true, batch: 40, ..both },
        MatmulSpec { trans_a: true, ..MatmulSpec::plain(32, 64, 4000) },
        MatmulSpec { trans_a: true, ..MatmulSpec::plain(1, 1, 5001) },
        MatmulSpec::plain(300, 24, 128),
        MatmulSpec::plain(130, 64, 864),
        MatmulSpec::plain(100, 1, 64),
        MatmulSpec::plain(1, 100, 64),
        MatmulSpec::plain(200, 200, 1),
    ];
    let variants = [Variant::register(8, 8), Variant::register(16, 8), VARIANTS[10], VARIANTS[11]];
    for (i, spec) in specs.into_iter().enumerate() {
        for (split, turn) in [(1, 0), (7, 1)] {
            let variant = variants[(i + turn) % variants.len()].with_split(split);
            compare(&gpu, &Case { spec, epilogue: None, oracle: plain, variant }, i as u64);
        }
    }
}

/// More workgroups than one dimension may have: the grid folds into two.
#[test]
fn a_folded_grid_covers_everything() {
    let Some(gpu) = Gpu::open(true) else { return };
    for (threads, groups) in [(1, 70_000), (8, 70_001)] {
        let variant = Variant::Register { tm: 1, tn: 1, threads, split: 1 };
        let spec = MatmulSpec::plain(groups * threads, 1, 3);
        assert!(kernels(&spec, None, variant)[0].groups[1] > 1);
        compare(&gpu, &Case { spec, epilogue: None, oracle: plain, variant }, 9);
    }
}

#[test]
fn the_same_inputs_give_the_same_bits() {
    let Some(gpu) = Gpu::open(true) else { return };
    let spec = MatmulSpec { trans_a: true, ..MatmulSpec::plain(32, 32, 5000) };
    let variant = Variant::register(8, 8).with_split(16);
    let mut random = Random(3);
    let (a, b) = (random.floats(spec.lens()[0]), random.floats(spec.lens()[1]));
    let run = || {
        let job = gpu.job(
            &kernels(&spec, None, variant),
            &[&a, &b],
            scratch_len(&spec, None, variant),
            spec.lens()[2],
        );
        gpu.run(&job);
        gpu.read(&job)
    };
    let first = run();
    assert!(first.iter().any(|x| *x != 0.0));
    for _ in 0..3 {
        assert!(first.iter().zip(run()).all(|(x, y)| x.to_bits() == y.to_bits()));
    }
}
