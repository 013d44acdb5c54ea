//! Comparing the two executors; used by tests inside and outside the crate.

use super::cpu::{CpuProgram, CpuState};
use super::exec::{Device, Program, State};
use super::{DType, Graph, InputId, Source, StateId, Tensor, fuse};
use crate::gpu::{DeviceChoice, GpuOptions, Selected};
use std::sync::{Arc, Mutex, OnceLock};

/// The software Vulkan device, opened once; `None` (with a printed line) where there is none.
pub fn software_device() -> Option<Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let d =
        DEVICE.get_or_init(|| match crate::gpu::select(&DeviceChoice::Software, &GpuOptions::default()) {
            Ok(Selected::Gpu(g)) => {
                Some(Device::gpu(g, Arc::new(crate::ops::matmul::ByDevice { is_cpu: true })))
            }
            Ok(Selected::Cpu) => None,
            Err(e) => {
                println!("no software device: {e}");
                None
            }
        });
    if d.is_none() {
        println!("SKIP: no software Vulkan adapter (Debian: apt install mesa-vulkan-drivers)");
    }
    d.clone()
}

/// Deterministic numbers in (-1, 1), exact in f32.
pub fn noise(n: usize, seed: u64) -> Vec<f64> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            ((s >> 41) as f64 / (1u64 << 22) as f64 - 1.0) * 0.999
        })
        .collect()
}

/// Runs a graph on the CPU in f64, on the CPU in f32 and on the software Vulkan device; states are noise in
/// (-scale, scale), id inputs come from `ids` by name. Each output must agree within `tol` of its largest
/// element. Prints a skip line for the device where there is none.
pub fn check_device_with(
    build: impl Fn(&mut Graph) -> Vec<Tensor>,
    ids: &[(&str, Vec<u32>)],
    scale: f64,
    tol: f64,
) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let mut g = Graph::new();
    let keep = build(&mut g);
    let states: Vec<(StateId, Vec<f64>)> = g
        .states()
        .into_iter()
        .enumerate()
        .map(|(i, (n, s))| (n, noise(s.len(), i as u64 + 11).iter().map(|x| x * scale).collect()))
        .collect();
    let floats: Vec<(InputId, Vec<f64>)> = g
        .values()
        .iter()
        .filter_map(|v| match &v.source {
            Source::Input(n) if v.dtype == DType::F32 => Some((
                n.clone(),
                noise(v.shape.len(), n.name.len() as u64 + 71).iter().map(|x| x * scale).collect(),
            )),
            _ => None,
        })
        .collect();
    let f32s = |v: &[f64]| v.iter().map(|x| *x as f32).collect::<Vec<f32>>();
    let oracle = |g: &Graph, keep: &[Tensor]| {
        let mut p = CpuProgram::<f64>::new(g.clone(), keep);
        for (n, v) in &floats {
            p.set(n, &f32s(v));
        }
        for (n, v) in ids {
            p.set_ids(n, v);
        }
        let exact = |v: &[f64]| v.iter().map(|x| *x as f32 as f64).collect::<Vec<_>>().into();
        let mut s = CpuState { values: states.iter().map(|(n, v)| (n.clone(), exact(v))).collect() };
        p.run(&mut s);
        keep.iter().map(|t| p.read(*t)).collect::<Vec<_>>()
    };
    let want = oracle(&g, &keep);
    // fusion changes no number: seen in f64, where rounding hides nothing
    let (fused, kept) = fuse::fuse(&g, &keep);
    for (i, (w, x)) in want.iter().zip(oracle(&fused, &kept)).enumerate() {
        let top = w.iter().fold(1e-20f64, |m, x| m.max(x.abs()));
        let same = w.iter().zip(&x).all(|(w, x)| (w - x).abs() <= 1e-11 * top);
        assert!(same && w.len() == x.len(), "output {i}: {w:?}, of the fused graph {x:?}");
    }
    let mut devices = vec![Device::Cpu];
    devices.extend(software_device());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    for d in devices {
        let mut s = State::new(&d);
        for (n, v) in &states {
            s.set(n, &f32s(v)).unwrap();
        }
        let mut p = Program::compile(&d, &s, &g, &keep, "test").unwrap();
        for (n, v) in &floats {
            p.set(n, &f32s(v)).unwrap();
        }
        for (n, v) in ids {
            p.set_ids(n, v).unwrap();
        }
        p.run(&mut s).unwrap();
        let all: Vec<usize> = (0..keep.len()).collect();
        let got = pollster::block_on(p.read(&all)).unwrap();
        for (i, (w, g)) in want.iter().zip(&got).enumerate() {
            let top = w.iter().fold(1e-20f64, |m, x| m.max(x.abs()));
            for (j, (w, x)) in w.iter().zip(g).enumerate() {
                let e = (w - *x as f64).abs() / top;
                assert!(
                    e <= tol,
                    "{}: output {i}[{j}] is {x}, f64 says {w} (off by {e:e} of the largest)",
                    d.name()
                );
            }
        }
    }
}

/// [`check_device_with`] without ids, noise in (-1, 1), tolerance 1e-5; with the gradients of
/// Σ noise·output with respect to every state compared as well.
pub fn check_device(build: impl Fn(&mut Graph) -> Vec<Tensor>) {
    check_device_with(
        |g| {
            let mut outs = build(g);
            let seeds: Vec<(Tensor, Tensor)> = outs
                .iter()
                .enumerate()
                .map(|(i, t)| (*t, g.constant(t.shape(), noise(t.shape().len(), 900 + i as u64))))
                .collect();
            let wrt: Vec<Tensor> = (0..g.values().len())
                .filter(|&i| matches!(g.values()[i].source, Source::State(_)))
                .map(|i| Tensor { id: i as u32, shape: g.values()[i].shape })
                .collect();
            outs.extend(g.gradients_from(&seeds, &wrt));
            outs
        },
        &[],
        1.0,
        1e-5,
    );
}
