//! Optimisers and clipping against the reference values (`../shared/reference`, or `BIRKHOFF_REFERENCE`):
//! every case of those kinds that the index lists, in f64, in f32 and on the software Vulkan device.

use birkhoff::graph::cpu::{CpuProgram, CpuState};
use birkhoff::graph::exec::{Device, Program, State};
use birkhoff::graph::testing::software_device;
use birkhoff::graph::{Graph, Tensor};
use birkhoff::ops::embedding::SparseInputs;
use birkhoff::ops::embedding_grad::EmbeddingGrad;
use birkhoff::ops::optim::{Adam, HYPER, hyper};
use birkhoff::ops::sparse_index::SparseIndex;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

fn folder() -> PathBuf {
    std::env::var_os("BIRKHOFF_REFERENCE")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/reference"), PathBuf::from)
}

struct Case {
    name: String,
    config: Value,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
}

impl Case {
    fn number(&self, key: &str) -> f64 {
        self.config[key].as_f64().unwrap_or_else(|| panic!("{}: config has no number {key}", self.name))
    }
    fn data(&self, key: &str) -> &[f64] {
        &self.tensors.get(key).unwrap_or_else(|| panic!("{}: no tensor {key}", self.name)).1
    }
    fn shape(&self, key: &str) -> &[usize] {
        &self.tensors[key].0
    }
    fn steps(&self) -> usize {
        self.number("steps") as usize
    }
    fn adam(&self) -> Adam {
        Adam {
            beta1: self.number("beta1"),
            beta2: self.number("beta2"),
            eps: self.number("eps"),
            decay: self.number("weight_decay"),
            ..Adam::default()
        }
    }
}

/// Every case whose name begins with one of `kinds`; `None`, with a printed line, without the folder.
fn cases(kinds: &[&str]) -> Option<Vec<Case>> {
    let dir = folder();
    let Ok(index) = std::fs::read(dir.join("index.json")) else {
        println!("SKIP: no reference values at {}", dir.display());
        return None;
    };
    let index: Value = serde_json::from_slice(&index).expect("index.json");
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut out = vec![];
    for c in index["cases"].as_array().expect("cases") {
        let name = c["name"].as_str().expect("name");
        if !kinds.iter().any(|k| name.starts_with(k)) {
            continue;
        }
        let file = c["file"].as_str().expect("file");
        let bytes = files
            .entry(file.into())
            .or_insert_with(|| std::fs::read(dir.join(file)).unwrap_or_else(|e| panic!("{file}: {e}")));
        let st = SafeTensors::deserialize(bytes).expect("safetensors");
        let prefix = format!("{name}/");
        let tensors = st
            .iter()
            .filter_map(|(k, v)| {
                let k = k.strip_prefix(&prefix)?;
                let b = v.data();
                let data = match v.dtype() {
                    Dtype::F64 => b.as_chunks().0.iter().map(|x: &[u8; 8]| f64::from_le_bytes(*x)).collect(),
                    Dtype::F32 => {
                        b.as_chunks().0.iter().map(|x: &[u8; 4]| f32::from_le_bytes(*x) as f64).collect()
                    }
                    Dtype::I32 => {
                        b.as_chunks().0.iter().map(|x: &[u8; 4]| i32::from_le_bytes(*x) as f64).collect()
                    }
                    other => panic!("{name}/{k} is {other:?}"),
                };
                Some((k.to_string(), (v.shape().to_vec(), data)))
            })
            .collect();
        out.push(Case { name: name.into(), config: c["config"].clone(), tensors });
    }
    for k in kinds {
        let count = out.iter().filter(|c| c.name.starts_with(k)).count();
        println!("{k}*: {count} cases");
        assert!(count > 0, "the index lists no case {k}");
    }
    Some(out)
}

/// An executor with its state.
enum Exec {
    F64(CpuState<f64>),
    F32(Device, State),
}

impl Exec {
    fn all() -> Vec<Exec> {
        let on = |d: Device| {
            let s = State::new(&d);
            Exec::F32(d, s)
        };
        let mut v = vec![Exec::F64(CpuState::default()), on(Device::Cpu)];
        v.extend(software_device().map(on));
        v
    }

    fn name(&self) -> String {
        match self {
            Exec::F64(_) => "f64".into(),
            Exec::F32(d, _) => d.name(),
        }
    }

    /// Tolerance: 1e-9 in f64, `f32` elsewhere.
    fn gate(&self, f32: f64) -> f64 {
        if matches!(self, Exec::F64(_)) { 1e-9 } else { f32 }
    }

    fn set(&mut self, name: &str, data: &[f64]) {
        match self {
            Exec::F64(s) => {
                s.values.insert(name.into(), data.to_vec().into());
            }
            Exec::F32(_, s) => s.set(name, &data.iter().map(|x| *x as f32).collect::<Vec<_>>()).unwrap(),
        }
    }

    fn get(&self, name: &str) -> Vec<f64> {
        match self {
            Exec::F64(s) => s.values[&name.into()].floats().into_owned(),
            Exec::F32(_, s) => {
                pollster::block_on(s.get(&[name])).unwrap()[0].iter().map(|x| *x as f64).collect()
            }
        }
    }

    fn run(&mut self, g: &Graph, keep: &[Tensor], ids: &[(&str, &[u32])]) -> Vec<Vec<f64>> {
        match self {
            Exec::F64(s) => {
                let mut p = CpuProgram::<f64>::new(g.clone(), keep);
                for (n, v) in ids {
                    p.set_ids(n, v);
                }
                p.run(s);
                keep.iter().map(|t| p.read(*t)).collect()
            }
            Exec::F32(d, s) => {
                let mut p = Program::compile(d, s, g, keep, "reference").unwrap();
                for (n, v) in ids {
                    p.set_ids(n, v).unwrap();
                }
                p.run(s).unwrap();
                let all: Vec<usize> = (0..keep.len()).collect();
                let got = pollster::block_on(p.read(&all)).unwrap();
                got.into_iter().map(|v| v.into_iter().map(f64::from).collect()).collect()
            }
        }
    }
}

/// max|Δ| / max|want| must be within `tol`.
fn close(what: &str, got: &[f64], want: &[f64], tol: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let top = want.iter().fold(0f64, |m, x| m.max(x.abs()));
    let worst = got.iter().zip(want).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
    assert!(worst <= tol * top, "{what}: off by {:e} of the largest, allowed {tol:e}", worst / top);
    assert!(got.iter().all(|x| x.is_finite()), "{what}");
}

fn hyper_constant(g: &mut Graph, h: [f64; HYPER]) -> Tensor {
    g.constant([HYPER], h.to_vec())
}

#[test]
fn reference_adamw() {
    let Some(cases) = cases(&["adamw"]) else { return };
    for c in &cases {
        for mut x in Exec::all() {
            let zeros = vec![0.0; c.data("theta0").len()];
            x.set("theta", c.data("theta0"));
            x.set("m", &zeros);
            x.set("v", &zeros);
            for t in 1..=c.steps() {
                let mut g = Graph::new();
                let s = c.shape("theta0");
                let (theta, m, v) = (g.state("theta", s), g.state("m", s), g.state("v", s));
                let grad = g.constant(s, c.data(&format!("g{t}")).to_vec());
                let a = c.adam();
                let h = hyper_constant(&mut g, hyper(c.number("lr"), 0.0, a.beta1, a.beta2, t as u64, 0.0));
                let n = g.sum_squares(&[grad]);
                g.adamw(a, theta, m, v, grad, h, n);
                x.run(&g, &[], &[]);
                for k in ["theta", "m", "v"] {
                    let what = format!("{} {k}{t} on {}", c.name, x.name());
                    close(&what, &x.get(k), c.data(&format!("{k}{t}")), x.gate(1e-6));
                }
            }
            let step =
                |end: &[f64]| -> Vec<f64> { end.iter().zip(c.data("theta0")).map(|(a, b)| a - b).collect() };
            let want = step(c.data(&format!("theta{}", c.steps())));
            close(&format!("{} whole step", c.name), &step(&x.get("theta")), &want, x.gate(5e-5));
        }
    }
}

/// Runs the steps of a table's case: `update` appends the optimiser, `names` are its states.
fn rows_case(
    c: &Case,
    names: &[&str],
    start: &[&[f64]],
    update: impl Fn(&mut Graph, &[Tensor], Tensor, Tensor, Tensor, u64),
) {
    let (rows, d) = (c.shape("table0")[0], c.shape("table0")[1]);
    for mut x in Exec::all() {
        for (n, v) in names.iter().zip(start) {
            x.set(n, v);
        }
        for t in 1..=c.steps() {
            let ids: Vec<u32> = c.data(&format!("ids{t}")).iter().map(|i| *i as u32).collect();
            let index = SparseIndex::plain(&ids);
            let before: Vec<Vec<f64>> = names.iter().map(|n| x.get(n)).collect();
            let mut g = Graph::new();
            let states: Vec<Tensor> = names
                .iter()
                .zip(start)
                .map(|(n, v)| if v.len() == rows { g.state(n, [rows]) } else { g.state(n, [rows, d]) })
                .collect();
            let s = SparseInputs::new(&mut g, "s", ids.len(), false);
            let dy = g.constant([ids.len(), d], c.data(&format!("g{t}")).to_vec());
            let grad = g.push(EmbeddingGrad, &[dy, s.order, s.segments]);
            let n = g.sum_squares(&[grad]);
            update(&mut g, &states, grad, s.unique, n, t as u64);
            let given = [
                ("s.order", &index.order[..]),
                ("s.segments", &index.segments[..]),
                ("s.unique", &index.unique[..]),
            ];
            x.run(&g, &[], &given);
            for (n, before) in names.iter().zip(&before) {
                let what = format!("{} {n}{t} on {}", c.name, x.name());
                let now = x.get(n);
                close(&what, &now, c.data(&format!("{n}{t}")), x.gate(1e-6));
                let w = now.len() / rows;
                for r in (0..rows).filter(|r| !ids.contains(&(*r as u32))) {
                    let row = r * w..(r + 1) * w;
                    assert_eq!(now[row.clone()], before[row], "{what}: row {r} is not in the batch");
                }
            }
        }
    }
}

#[test]
fn reference_rowwise_adagrad() {
    let Some(cases) = cases(&["rowwise"]) else { return };
    for c in &cases {
        let start = [c.data("table0"), c.data("acc0")];
        rows_case(c, &["table", "acc"], &start, |g, s, grad, unique, n, t| {
            let h = hyper_constant(g, hyper(0.0, c.number("lr"), 0.9, 0.95, t, 0.0));
            g.row_adagrad(c.number("eps"), s[0], s[1], grad, unique, h, n);
        });
    }
}

#[test]
fn reference_lazy_adam() {
    let Some(cases) = cases(&["lazy"]) else { return };
    for c in &cases {
        let zeros = vec![0.0; c.data("table0").len()];
        rows_case(
            c,
            &["table", "m", "v"],
            &[c.data("table0"), &zeros, &zeros],
            |g, s, grad, unique, n, t| {
                let a = c.adam();
                let h = hyper_constant(g, hyper(0.0, c.number("lr"), a.beta1, a.beta2, t, 0.0));
                g.lazy_adam(a, s[0], s[1], s[2], grad, unique, h, n);
            },
        );
    }
}

/// With β1 = 0 the first moment after a step is the clipped gradient.
#[test]
fn reference_clipping_by_global_norm() {
    let Some(cases) = cases(&["clip_"]) else { return };
    for c in &cases {
        let count = (0..).take_while(|i| c.tensors.contains_key(&format!("g{i}"))).count();
        assert!(count > 0, "{}", c.name);
        for mut x in Exec::all() {
            let mut g = Graph::new();
            let grads: Vec<Tensor> = (0..count)
                .map(|i| {
                    let k = format!("g{i}");
                    g.constant(c.shape(&k), c.data(&k).to_vec())
                })
                .collect();
            let n = g.sum_squares(&grads);
            let options = Adam { beta1: 0.0, beta2: 0.0, eps: 1e-8, ..Adam::default() };
            let h = hyper_constant(&mut g, hyper(0.1, 0.1, 0.0, 0.0, 1, c.number("max_norm")));
            for (i, grad) in grads.iter().enumerate() {
                let zeros = vec![0.0; grad.shape().len()];
                let mut state = |k: &str| {
                    x.set(&format!("{k}{i}"), &zeros);
                    g.state(format!("{k}{i}"), grad.shape())
                };
                let (theta, m, v) = (state("theta"), state("m"), state("v"));
                g.adamw(options, theta, m, v, *grad, h, n);
            }
            let norm2 = x.run(&g, &[n], &[])[0][0];
            let what = format!("{} on {}", c.name, x.name());
            close(&format!("{what}: norm"), &[norm2.sqrt()], c.data("norm"), x.gate(1e-6));
            for i in 0..count {
                let want = c.data(&format!("clipped{i}"));
                close(&format!("{what}: gradient {i}"), &x.get(&format!("m{i}")), want, x.gate(1e-6));
            }
        }
    }
}
