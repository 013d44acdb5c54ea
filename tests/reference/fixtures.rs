//! Reading the reference folder, running a case on the three executors, comparing.

use crate::cases::{Built, build};
use birkhoff::graph::cpu::{CpuProgram, CpuState};
use birkhoff::graph::exec::{Device, Program, State};
use birkhoff::graph::testing::software_device;
use birkhoff::graph::{Graph, Tensor};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::HashMap;
use std::path::PathBuf;

/// A stored tensor.
#[derive(Clone)]
pub struct Stored {
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
    /// Rounded to float32 when it was stored.
    pub rounded: bool,
}

pub struct Fixtures {
    dir: PathBuf,
    index: Value,
}

/// One case of the index with its tensors.
pub struct Case {
    pub name: String,
    pub config: Value,
    pub file: String,
    pub inputs: Vec<String>,
    pub params: Vec<String>,
    pub tensors: HashMap<String, Stored>,
    entry: Value,
}

impl Fixtures {
    pub fn open() -> Option<Self> {
        let dir = std::env::var_os("BIRKHOFF_REFERENCE")
            .map(PathBuf::from)
            .unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/reference"));
        let Ok(text) = std::fs::read(dir.join("index.json")) else {
            println!("SKIP: no reference values in {} (set BIRKHOFF_REFERENCE)", dir.display());
            return None;
        };
        let index = serde_json::from_slice(&text).expect("index.json is JSON");
        Some(Fixtures { dir, index })
    }

    fn cases(&self, file: &str) -> Vec<Case> {
        let path = self.dir.join(file);
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let st = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let mut all: HashMap<String, HashMap<String, Stored>> = HashMap::new();
        for (key, view) in st.tensors() {
            let (case, name) = key.split_once('/').expect("<case>/<tensor>");
            let b = view.data();
            let (data, rounded) = match view.dtype() {
                Dtype::F32 => {
                    (b.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x) as f64).collect(), true)
                }
                Dtype::F64 => (b.as_chunks::<8>().0.iter().map(|x| f64::from_le_bytes(*x)).collect(), false),
                Dtype::I32 => {
                    (b.as_chunks::<4>().0.iter().map(|x| i32::from_le_bytes(*x) as f64).collect(), false)
                }
                other => panic!("{key}: unexpected dtype {other:?}"),
            };
            let s = Stored { shape: view.shape().to_vec(), data, rounded };
            all.entry(case.into()).or_default().insert(name.into(), s);
        }
        let names = |v: &Value| -> Vec<String> {
            v.as_array()
                .map(|a| a.iter().map(|x| x.as_str().unwrap().to_string()).collect())
                .unwrap_or_default()
        };
        self.index["cases"]
            .as_array()
            .expect("cases")
            .iter()
            .filter(|c| c["file"] == file)
            .map(|c| {
                let name = c["name"].as_str().unwrap().to_string();
                Case {
                    config: c["config"].clone(),
                    file: file.into(),
                    inputs: names(&c["inputs"]),
                    params: names(&c["params"]),
                    tensors: all.remove(&name).unwrap_or_else(|| panic!("{name}: no tensors")),
                    entry: c.clone(),
                    name,
                }
            })
            .collect()
    }
}

impl Case {
    pub fn get(&self, name: &str) -> &Stored {
        self.tensors.get(name).unwrap_or_else(|| panic!("{}: no tensor {name}", self.name))
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// A number of the configuration.
    pub fn n(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap_or_else(|| panic!("{}: no {key}", self.name)) as usize
    }

    /// Gates of `dhen.README.md` for float32: (outputs, gradients).
    fn gates(&self) -> (f64, f64) {
        let n = self.name.as_str();
        let starts = |p: &[&str]| p.iter().any(|p| n.starts_with(p));
        match self.file.as_str() {
            "modules.safetensors" if starts(&["attention"]) => (5e-6, 1e-5),
            "modules.safetensors" if starts(&["cross", "dlrm", "mlp"]) => (1e-5, 1e-5),
            "modules.safetensors" => (3e-6, 5e-6),
            "norms.safetensors" if n.contains("const_row") => (2e-6, 1e-5),
            "norms.safetensors" if n.contains("mean1e4") => (3e-6, 5e-6),
            "norms.safetensors" => (2e-6, 5e-6),
            "ensembles.safetensors" => (1e-5, 2e-5),
            "streams.safetensors" => (3e-6, 4e-5),
            _ if n.contains("_hc_") => (3e-6, 1e-4),
            _ => (3e-6, 2e-5),
        }
    }
}

/// Runs every case of a file and reports all failures at once.
pub fn run_family(f: &Fixtures, file: &str) {
    let device = software_device();
    let cases = f.cases(file);
    assert!(!cases.is_empty(), "no cases in {file}");
    let mut failures = vec![];
    for c in &cases {
        let b = build(c);
        check(c, &b, "CPU f64", run64(c, &b), (1e-9, 1e-9), &mut failures);
        check(c, &b, "CPU f32", run32(c, &b, &Device::Cpu), c.gates(), &mut failures);
        if let Some(d) = &device {
            check(c, &b, "device", run32(c, &b, d), c.gates(), &mut failures);
        }
    }
    println!("{file}: {} cases, {} executors", cases.len(), 2 + usize::from(device.is_some()));
    assert!(failures.is_empty(), "{} differences:\n{}", failures.len(), failures.join("\n"));
}

/// Outputs, then gradients, as (name, tensor).
fn kept(g: &mut Graph, b: &Built, c: &Case) -> Vec<(String, Tensor)> {
    let seeds: Vec<(Tensor, Tensor)> = b
        .outputs
        .iter()
        .filter(|(n, _)| !n.starts_with("aux."))
        .map(|(n, t)| {
            let ct = match c.tensors.get(&format!("G.{n}")) {
                Some(s) => s.data.clone(),
                None => vec![1.0; t.shape().len()],
            };
            (*t, g.constant(t.shape(), ct))
        })
        .collect();
    let wrt: Vec<Tensor> = b.wrt.iter().map(|(_, t)| *t).collect();
    let grads = g.gradients_from(&seeds, &wrt);
    let mut keep = b.outputs.clone();
    keep.extend(b.wrt.iter().zip(grads).map(|((n, _), t)| (format!("grad.{n}"), t)));
    keep
}

fn run64(c: &Case, b: &Built) -> Vec<(String, Vec<f64>)> {
    let mut g = b.graph.clone();
    let keep = kept(&mut g, b, c);
    let tensors: Vec<Tensor> = keep.iter().map(|k| k.1).collect();
    let mut p = CpuProgram::<f64>::new(g, &tensors);
    for (n, v) in &b.floats {
        if p.has_input(n) {
            p.set64(n, v);
        }
    }
    for (n, v) in &b.ids {
        if p.has_input(n) {
            p.set_ids(n, v);
        }
    }
    let mut s = CpuState { values: b.states.iter().map(|(n, v)| (n.into(), v.clone().into())).collect() };
    p.run(&mut s);
    keep.iter().map(|(n, t)| (n.clone(), p.read(*t))).collect()
}

fn run32(c: &Case, b: &Built, d: &Device) -> Vec<(String, Vec<f64>)> {
    let mut g = b.graph.clone();
    let keep = kept(&mut g, b, c);
    let tensors: Vec<Tensor> = keep.iter().map(|k| k.1).collect();
    let f32s = |v: &[f64]| v.iter().map(|x| *x as f32).collect::<Vec<f32>>();
    let mut s = State::new(d);
    for (n, v) in &b.states {
        s.set(n, &f32s(v)).unwrap();
    }
    let mut p =
        Program::compile(d, &s, &g, &tensors, "reference").unwrap_or_else(|e| panic!("{}: {e}", c.name));
    for (n, v) in &b.floats {
        if p.has_input(n) {
            p.set(n, &f32s(v)).unwrap();
        }
    }
    for (n, v) in &b.ids {
        if p.has_input(n) {
            p.set_ids(n, v).unwrap();
        }
    }
    p.run(&mut s).unwrap();
    let all: Vec<usize> = (0..keep.len()).collect();
    let got = pollster::block_on(p.read(&all)).unwrap();
    keep.into_iter().zip(got).map(|((n, _), v)| (n, v.into_iter().map(f64::from).collect())).collect()
}

fn check(
    c: &Case,
    b: &Built,
    who: &str,
    got: Vec<(String, Vec<f64>)>,
    (gate_out, gate_grad): (f64, f64),
    failures: &mut Vec<String>,
) {
    let gmax = c.entry["gmax"].as_f64().unwrap_or(0.0);
    let exact = who == "CPU f64";
    let mut fail = |what: &str, e: f64, gate: f64| {
        if e.is_nan() || e > gate {
            failures.push(format!("{} {who}: {what} off by {e:.2e} (gate {gate:.0e})", c.name));
        }
    };
    let zero: Vec<&str> = c.entry["zero_gradients"]
        .as_array()
        .map(|a| a.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    for (name, v) in got {
        let v = match name.strip_prefix("grad.").and_then(|n| b.dense.get(n)) {
            Some(index) => index.expand(&v),
            None => v,
        };
        let Some(param) = name.strip_prefix("grad.") else {
            let r = c.get(&name);
            assert_eq!(r.data.len(), v.len(), "{}: {name}", c.name);
            // aux values (coefficients, logits) have the output's gate
            let gate = if exact && r.rounded { 2e-7 } else { gate_out };
            fail(&name, diff(&r.data, &v) / top(&r.data).max(1e-30), gate);
            continue;
        };
        if zero.contains(&param) {
            fail(&name, top(&v) / gmax, if exact { 1e-9 } else { 1e-6 });
            continue;
        }
        if !c.has(&name) {
            sampled(c, &name, &v, if exact { 1e-9 } else { gate_grad }, gmax, &mut fail);
            continue;
        }
        let r = c.get(&name);
        assert_eq!(r.data.len(), v.len(), "{}: {name}", c.name);
        let gate = if exact && r.rounded {
            2e-7
        } else if exact {
            1e-9
        } else {
            gate_grad
        };
        for (part, range, scale) in segments(c, param, r.data.len()) {
            let (a, x): (Vec<f64>, Vec<f64>) = range.iter().map(|&i| (r.data[i], v[i])).unzip();
            let e = diff(&a, &x) / (top(&a) + 0.1 * gmax);
            fail(&format!("{name}{part}"), e, gate);
            // against the segment's own largest entry, where that is not rounding noise (README)
            if !exact && c.file.starts_with("models") && scale > 0.0 && top(&a) > 1e-4 * gmax {
                fail(&format!("{name}{part} (own scale)"), diff(&a, &x) / top(&a), scale);
            }
        }
    }
}

/// pre | post | res of phi and b, compared one by one; everything else whole.
fn segments(c: &Case, param: &str, len: usize) -> Vec<(String, Vec<usize>, f64)> {
    let k = match c.config["n"].as_u64() {
        Some(n) if param.ends_with("mhc.phi") || param.ends_with("mhc.b") => n as usize,
        _ => return vec![(String::new(), (0..len).collect(), 0.0)],
    };
    let cols = 2 * k + k * k;
    let parts = [("pre", 0..k, 2e-5), ("post", k..2 * k, 2e-5), ("res", 2 * k..cols, 4e-4)];
    // layer 0 sees equal streams: its pre and res gradients vanish analytically
    let first = param.starts_with("layer0.");
    parts
        .into_iter()
        .map(|(n, r, gate)| {
            let own = if first && n != "post" { 0.0 } else { gate };
            (format!(" [{n}]"), (0..len).filter(|i| r.contains(&(i % cols))).collect(), own)
        })
        .collect()
}

/// A gradient stored as samples and axis sums.
fn sampled(c: &Case, name: &str, v: &[f64], gate: f64, gmax: f64, fail: &mut dyn FnMut(&str, f64, f64)) {
    let index = c.get(&format!("{name}.index"));
    let want = c.get(&format!("{name}.sample"));
    let got: Vec<f64> = index.data.iter().map(|&i| v[i as usize]).collect();
    let scale = top(&want.data) + 0.1 * gmax;
    fail(
        &format!("{name}.sample"),
        diff(&want.data, &got) / scale,
        gate.max(if want.rounded { 2e-7 } else { 0.0 }),
    );
    let last = c.get(&format!("{name}.sum_axis0")).data.len();
    let rows = v.len() / last;
    let s0: Vec<f64> = (0..last).map(|j| (0..rows).map(|i| v[i * last + j]).sum()).collect();
    let want = c.get(&format!("{name}.sum_axis0"));
    fail(&format!("{name}.sum_axis0"), diff(&want.data, &s0) / (top(&want.data) + scale), gate);
}

fn top(v: &[f64]) -> f64 {
    v.iter().map(|x| x.abs()).fold(0.0, f64::max)
}

fn diff(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
}
