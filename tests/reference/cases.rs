//! From a case of the index to a graph of birkhoff's own modules and layers.

use crate::fixtures::Case;
use birkhoff::graph::{Graph, Tensor};
use birkhoff::model::build::{EmbeddingSpec, FeatureSpec, Pooled, model, table_inputs};
use birkhoff::model::config::{
    Collapse, CrossForm, Ensemble, LayerConfig, LayerPlan, ModelConfig, ModuleConfig, ModuleKind, ModulePlan,
    ResidualConfig, ResidualMode,
};
use birkhoff::model::layer::shortcut_layer;
use birkhoff::model::modules::module;
use birkhoff::model::params::Builder;
use birkhoff::model::residual::stream_layer;
use birkhoff::ops::embedding::Pool;
use birkhoff::ops::sparse_index::SparseIndex;
use serde_json::Value;
use std::collections::HashMap;

/// A case as a graph, with everything to run it.
pub struct Built {
    pub graph: Graph,
    /// (reference name, tensor); names that start with `aux.` have no cotangent.
    pub outputs: Vec<(String, Tensor)>,
    /// Float inputs and parameters: (reference name, tensor).
    pub wrt: Vec<(String, Tensor)>,
    pub states: Vec<(String, Vec<f64>)>,
    pub floats: Vec<(String, Vec<f64>)>,
    pub ids: Vec<(String, Vec<u32>)>,
    /// Compact embedding gradients: how to make them dense.
    pub dense: HashMap<String, Dense>,
}

/// Compact gradient rows → a dense table.
pub struct Dense {
    pub unique: Vec<u32>,
    pub rows: usize,
}

impl Dense {
    pub fn expand(&self, g: &[f64]) -> Vec<f64> {
        let d = g.len() / self.unique.len();
        let mut out = vec![0.0; self.rows * d];
        for (u, row) in self.unique.iter().zip(g.chunks_exact(d)) {
            match *u {
                u32::MAX => assert!(row.iter().all(|x| *x == 0.0), "padding rows are zero"),
                u => out[u as usize * d..][..d].copy_from_slice(row),
            }
        }
        out
    }
}

/// Builds any case but metrics and optimisers.
pub fn build(c: &Case) -> Built {
    match c.file.as_str() {
        "modules.safetensors" => simple(c, "X", |b, x| {
            let kind = kind(&c.config);
            vec![("U".into(), module(b, &kind, x, c.n("l")))]
        }),
        "norms.safetensors" => norm(c),
        "ensembles.safetensors" => simple(c, "X", |b, x| {
            let p = plan(&c.config, 0, c.n("m"), c.n("l_out"));
            vec![("Y".into(), shortcut_layer(b, &p, x).0)]
        }),
        "streams.safetensors" => simple(c, "S", |b, x| {
            let p = plan(&c.config, 0, c.n("m"), c.n("l"));
            let (y, k, _) = stream_layer(b, &p, &residual(c), x);
            let mut out = vec![("S_out".to_string(), y)];
            for (n, t) in [("aux.pre", k.pre), ("aux.post", k.post), ("aux.res", k.res)] {
                out.extend(t.map(|t| (n.to_string(), t)));
            }
            out
        }),
        _ => whole(c),
    }
}

/// `Wq` → `wq`, `mlp.W0` → `mlp.w0`, `layer1.0.attention.Wq` → `layers.1.attention.wq`.
fn ours(c: &Case, name: &str) -> String {
    if !c.file.starts_with("models") {
        return name.to_lowercase();
    }
    if let Some(rest) = name.strip_prefix("num.") {
        return format!("numeric.{}", rest.to_lowercase());
    }
    if let Some(rest) = name.strip_prefix("emb.") {
        let cats = c.config["categorical"].as_array().unwrap();
        let i = cats.iter().position(|x| x["name"] == rest).expect("a categorical column");
        return format!("embeddings.{i}");
    }
    if let Some(rest) = name.strip_prefix("layer") {
        let (t, rest) = rest.split_once('.').unwrap();
        let rest = match rest.split_once('.') {
            Some((k, tail)) if k.parse::<usize>().is_ok() => tail,
            _ => rest,
        };
        return format!("layers.{t}.{}", rest.to_lowercase());
    }
    name.to_lowercase()
}

fn simple(c: &Case, x: &str, f: impl FnOnce(&mut Builder<'_>, Tensor) -> Vec<(String, Tensor)>) -> Built {
    let mut graph = Graph::new();
    let mut b = Builder::new(&mut graph);
    let input = b.g.state("the input", &c.get(x).shape[..]);
    let outputs = f(&mut b, input);
    let params = b.params;
    let mut wrt = vec![(x.to_string(), input)];
    let mut states = vec![("the input".to_string(), c.get(x).data.clone())];
    for name in &c.params {
        let p = params
            .iter()
            .find(|p| p.name == ours(c, name))
            .unwrap_or_else(|| panic!("{}: the model has no {}", c.name, ours(c, name)));
        assert_eq!(p.shape().len(), c.get(name).data.len(), "{}: {name}", c.name);
        wrt.push((name.clone(), p.tensor));
        states.push((p.name.clone(), c.get(name).data.clone()));
    }
    assert_eq!(params.len(), c.params.len(), "{}: parameters the reference does not have", c.name);
    Built { graph, outputs, wrt, states, floats: vec![], ids: vec![], dense: HashMap::new() }
}

fn norm(c: &Case) -> Built {
    let mut graph = Graph::new();
    let mut wrt = vec![];
    let mut states = vec![];
    for n in c.inputs.iter().chain(&c.params) {
        wrt.push((n.clone(), graph.state(n, &c.get(n).shape[..])));
        states.push((n.clone(), c.get(n).data.clone()));
    }
    let t = |n: &str| wrt.iter().find(|(k, _)| k == n).map(|(_, t)| *t);
    let g = &mut graph;
    let y = if c.name.starts_with("layer_norm") {
        ("y", g.layer_norm(t("x").unwrap(), t("gamma").unwrap(), t("beta").unwrap()))
    } else if c.name.starts_with("rms_norm") {
        ("y", g.rms_norm(t("x").unwrap(), t("w"), c.config["eps"].as_f64().unwrap()))
    } else if c.name.starts_with("softmax") {
        ("y", g.softmax(t("z").unwrap()))
    } else {
        ("res", g.sinkhorn(t("h").unwrap(), c.n("t")))
    };
    let outputs = vec![(y.0.to_string(), y.1)];
    Built { graph, outputs, wrt, states, floats: vec![], ids: vec![], dense: HashMap::new() }
}

fn kind(q: &Value) -> ModuleKind {
    let n = |k: &str| q[k].as_u64().unwrap_or(0) as usize;
    let hidden = || q["hidden"].as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect();
    match q["kind"].as_str().unwrap() {
        "linear" => ModuleKind::Linear,
        "attention" => ModuleKind::Attention { heads: n("heads"), ffn: n("ffn") },
        "cross" => {
            let form = match q["form"].as_str().unwrap() {
                "full" => CrossForm::Full,
                "low-rank" => CrossForm::LowRank,
                _ => CrossForm::Vector,
            };
            ModuleKind::Cross { form, rank: n("rank"), depth: n("L") }
        }
        "gram" => ModuleKind::Gram,
        "dlrm" => ModuleKind::Dlrm { compressed: n("c"), hidden: hidden() },
        "conv" => ModuleKind::Conv { channels: n("channels"), kernel: [n("k_m"), n("k_d")] },
        "fm" => ModuleKind::Fm,
        "mlp" => ModuleKind::Mlp { hidden: hidden() },
        other => panic!("unknown module {other}"),
    }
}

fn ensemble_of(q: &Value) -> Ensemble {
    match q["ensemble"].as_str().unwrap() {
        "concat" => Ensemble::Concat,
        "sum" => Ensemble::Sum,
        _ => Ensemble::Weighted,
    }
}

/// A layer whose modules are named as in the reference: `0.attention`, `1.linear`.
fn plan(q: &Value, index: usize, m: usize, l: usize) -> LayerPlan {
    let modules = q["modules"].as_array().unwrap().iter().enumerate();
    LayerPlan {
        index,
        slots_in: m,
        slots_out: l,
        modules: modules
            .map(|(k, x)| ModulePlan {
                name: format!("{k}.{}", x["kind"].as_str().unwrap()),
                kind: kind(x),
                slots: x["l"].as_u64().unwrap() as usize,
            })
            .collect(),
        ensemble: ensemble_of(q),
        shortcut_weight: m != l,
    }
}

fn residual(c: &Case) -> ResidualConfig {
    let mode = match c.config["residual"].as_str().unwrap() {
        "hc" => ResidualMode::Hc,
        "mhc" => ResidualMode::Mhc,
        _ => ResidualMode::Shortcut,
    };
    let sum = c.config["collapse"] == "sum";
    ResidualConfig {
        mode,
        streams: c.config["n"].as_u64().unwrap_or(1) as usize,
        sinkhorn_iterations: c.config["sk_t"].as_u64().unwrap_or(20) as usize,
        collapse: if sum { Collapse::Sum } else { Collapse::Mean },
        final_norm: c.config["final_norm"].as_bool().unwrap_or(false),
        ..ResidualConfig::default()
    }
}

fn whole(c: &Case) -> Built {
    let q = &c.config;
    let list = |k: &str| q[k].as_array().unwrap().clone();
    let usizes = |k: &str| list(k).iter().map(|x| x.as_u64().unwrap() as usize).collect::<Vec<_>>();
    let (batch, num_mlp) = (c.n("B"), usizes("num_mlp"));
    let mut cfg = ModelConfig { width: c.n("d"), residual: residual(c), ..ModelConfig::default() };
    cfg.layers = list("layers").len();
    cfg.layer = list("layers")
        .iter()
        .map(|l| LayerConfig {
            slots: None,
            ensemble: Some(ensemble_of(l)),
            modules: Some(
                l["modules"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|m| ModuleConfig { kind: kind(m), slots: m["l"].as_u64().unwrap() as usize })
                    .collect(),
            ),
        })
        .collect();
    // the layer's slots follow from its modules
    for (l, j) in cfg.layer.iter_mut().zip(list("layers")) {
        let ls = j["modules"].as_array().unwrap().iter().map(|m| m["l"].as_u64().unwrap() as usize);
        l.slots = Some(if j["ensemble"] == "concat" { ls.sum() } else { ls.max().unwrap() });
    }
    cfg.features.dense_slots = c.n("m_dense");
    cfg.features.dense_hidden = num_mlp[1..num_mlp.len() - 1].to_vec();
    cfg.head.hidden = vec![c.n("head_hidden")];

    let mut tables = vec![];
    let mut ids = vec![];
    let mut floats = vec![];
    let mut dense = HashMap::new();
    for (i, cat) in list("categorical").iter().enumerate() {
        let name = cat["name"].as_str().unwrap();
        let rows = cat["rows"].as_u64().unwrap() as usize;
        let these: Vec<u32> = c.get(&format!("ids_{name}")).data.iter().map(|x| *x as u32).collect();
        let n = table_inputs(i);
        let pooled =
            cat["pool"].as_str().map(|p| Pooled { capacity: these.len(), mean: p == "mean", bags: 1 });
        let s = match pooled {
            None => SparseIndex::plain(&these),
            Some(p) => {
                let offsets: Vec<u32> =
                    c.get(&format!("offsets_{name}")).data.iter().map(|x| *x as u32).collect();
                let s =
                    SparseIndex::bags(&these, &offsets, None, if p.mean { Pool::Mean } else { Pool::Sum });
                // 1/len at full precision: the index holds it in f32
                let scale = |&bag: &u32| {
                    let len = offsets[bag as usize + 1] - offsets[bag as usize];
                    if p.mean { 1.0 / f64::from(len.max(1)) } else { 1.0 }
                };
                floats.push((n.scale, s.order.iter().map(scale).collect()));
                ids.push((n.offsets, offsets));
                s
            }
        };
        ids.push((n.ids, these));
        ids.push((n.order, s.order.clone()));
        ids.push((n.segments, s.segments.clone()));
        ids.push((n.unique, s.unique.clone()));
        dense.insert(format!("emb.{name}"), Dense { unique: s.unique, rows });
        tables.push(EmbeddingSpec { columns: vec![(name.to_string(), rows)], pooled, ..Default::default() });
    }
    floats.push(("numeric".into(), numeric(c, batch)));
    floats.push(("label".into(), c.get("y").data.clone()));
    floats.push(("weight".into(), if c.has("w") { c.get("w").data.clone() } else { vec![1.0; batch] }));
    let features = FeatureSpec { numeric: num_mlp[0], tables };
    let m = model(&cfg, &features, batch, true, 0.01, 0.0).unwrap_or_else(|e| panic!("{}: {e}", c.name));

    let mut outputs =
        vec![("loss".to_string(), m.loss), ("aux.logit".into(), m.logits), ("aux.X0".into(), m.x0)];
    for (t, k) in m.coefficients.iter().enumerate() {
        for (n, x) in [("pre", k.pre), ("post", k.post), ("res", k.res)] {
            outputs.push((format!("aux.layer{t}.{n}"), x.expect("learned")));
        }
    }
    let mut wrt = vec![];
    let mut states = vec![];
    for name in &c.params {
        let p = m.params.iter().find(|p| p.name == ours(c, name));
        let p = p.unwrap_or_else(|| panic!("{}: the model has no {}", c.name, ours(c, name)));
        wrt.push((name.clone(), p.tensor));
        states.push((p.name.clone(), c.get(name).data.clone()));
    }
    assert_eq!(m.params.len(), c.params.len(), "{}: parameters the reference does not have", c.name);
    Built { graph: m.graph, outputs, wrt, states, floats, ids, dense }
}

/// Transformed numeric columns and indicators, `[B, F]`, from the raw values with NaN for missing.
fn numeric(c: &Case, batch: usize) -> Vec<f64> {
    let raw = c.get("numeric_raw");
    let f = raw.data.len() / batch;
    let columns = c.config["numeric"].as_array().unwrap();
    let mut out = vec![];
    for row in raw.data.chunks_exact(f) {
        for (v, col) in row.iter().zip(columns) {
            let n = |k: &str| col[k].as_f64().unwrap();
            out.push(match (v.is_nan(), col["transform"].as_str().unwrap()) {
                (true, _) => 0.0,
                (_, "log") => (1.0 + v.max(0.0)).ln(),
                (_, "standardize") => (v - n("mean")) / n("std"),
                _ => *v,
            });
        }
        for k in c.config["indicators"].as_array().unwrap() {
            out.push(if row[k.as_u64().unwrap() as usize].is_nan() { 1.0 } else { 0.0 });
        }
    }
    out
}
