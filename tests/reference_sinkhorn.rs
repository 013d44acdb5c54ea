//! Sinkhorn-Knopp against `mhc.json` of the reference values (`../shared/reference`, or `BIRKHOFF_REFERENCE`):
//! every case that the file lists (logits up to ±80), forward and gradient, in f64, in f32 and on the software
//! Vulkan device.

use birkhoff::graph::cpu::{CpuProgram, CpuState};
use birkhoff::graph::exec::{Device, Program, State};
use birkhoff::graph::testing::software_device;
use birkhoff::graph::{Graph, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// All cases of one size and iteration count, one token each.
#[derive(Default)]
struct Batch {
    names: Vec<String>,
    logits: Vec<f64>,
    weights: Vec<f64>,
    res: Vec<f64>,
    grad: Vec<f64>,
}

fn matrix(v: &Value) -> Vec<f64> {
    v.as_array()
        .expect("a matrix")
        .iter()
        .flat_map(|r| r.as_array().expect("a row"))
        .map(|x| x.as_f64().expect("a number"))
        .collect()
}

/// (n, iterations) → cases; `None`, with a printed line, without the folder.
fn batches() -> Option<BTreeMap<(usize, usize), Batch>> {
    let dir = std::env::var_os("BIRKHOFF_REFERENCE")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/reference"), PathBuf::from);
    let Ok(text) = std::fs::read(dir.join("mhc.json")) else {
        println!("SKIP: no reference values at {}", dir.display());
        return None;
    };
    let all: Value = serde_json::from_slice(&text).expect("mhc.json");
    let mut out: BTreeMap<(usize, usize), Batch> = BTreeMap::new();
    for c in all["sinkhorn"].as_array().expect("a list of cases") {
        let n = c["n"].as_u64().expect("n") as usize;
        for (key, v) in c.as_object().expect("a case") {
            // t1, t3, t20; not the variants that are marked otherwise
            let Some(t) = key.strip_prefix('t').and_then(|t| t.parse::<usize>().ok()) else { continue };
            let b = out.entry((n, t)).or_default();
            b.names.push(format!("{} n {n} t {t}", c["name"].as_str().expect("a name")));
            b.logits.extend(matrix(&c["logits"]));
            b.weights.extend(matrix(&c["W"]));
            b.res.extend(matrix(&v["H"]));
            b.grad.extend(matrix(&v["grad_logits"]));
        }
    }
    assert!(!out.is_empty(), "mhc.json lists no Sinkhorn cases");
    Some(out)
}

/// res and the gradient of Σ W·res.
fn graph(n: usize, t: usize, b: &Batch) -> (Graph, Vec<Tensor>) {
    let mut g = Graph::new();
    let shape = [b.names.len(), n, n];
    let h = g.state("h", shape);
    let w = g.constant(shape, b.weights.clone());
    let res = g.sinkhorn(h, t);
    let d = g.gradients_from(&[(res, w)], &[h]);
    (g, vec![res, d[0]])
}

fn compare(b: &Batch, nn: usize, got: &[Vec<f64>], tol: [f64; 2], on: &str) {
    for (which, (got, want)) in got.iter().zip([&b.res, &b.grad]).enumerate() {
        assert_eq!(got.len(), want.len());
        for (k, (x, y)) in got.iter().zip(want).enumerate() {
            let what = ["res", "gradient"][which];
            let e = (x - y).abs();
            assert!(e <= tol[which], "{} on {on}: {what} {x}, reference {y} ({e:e})", b.names[k / nn]);
        }
    }
}

#[test]
fn reference_sinkhorn_in_f64() {
    let Some(all) = batches() else { return };
    for ((n, t), b) in &all {
        let (g, keep) = graph(*n, *t, b);
        let mut p = CpuProgram::<f64>::new(g, &keep);
        let mut s = CpuState { values: [("h".into(), b.logits.clone().into())].into() };
        p.run(&mut s);
        let got: Vec<Vec<f64>> = keep.iter().map(|t| p.read(*t)).collect();
        compare(b, n * n, &got, [1e-12, 1e-12], "the CPU in f64");
    }
}

#[test]
fn reference_sinkhorn_in_f32_and_on_the_device() {
    let Some(all) = batches() else { return };
    let mut devices = vec![Device::Cpu];
    devices.extend(software_device());
    for d in devices {
        for ((n, t), b) in &all {
            let (g, keep) = graph(*n, *t, b);
            let mut s = State::new(&d);
            let h: Vec<f32> = b.logits.iter().map(|x| *x as f32).collect();
            s.set("h", &h).unwrap();
            let mut p = Program::compile(&d, &s, &g, &keep, "test").unwrap();
            p.run(&mut s).unwrap();
            let got = pollster::block_on(p.read(&[0, 1])).unwrap();
            let got: Vec<Vec<f64>> = got.iter().map(|v| v.iter().map(|x| *x as f64).collect()).collect();
            compare(b, n * n, &got, [5e-6, 5e-6], &d.name());
            for row in got[0].chunks(*n) {
                let sum: f64 = row.iter().sum();
                assert!((sum - 1.0).abs() < 1e-6, "a row sums to {sum} on {}", d.name());
            }
        }
    }
}
