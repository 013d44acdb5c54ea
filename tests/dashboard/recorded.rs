//! Recorded runs, made by a formula: the same bytes on every machine.

use std::fs;
use std::path::{Path, PathBuf};

use birkhoff::data::metrics::Metrics;
use birkhoff::diagnose::matrix::composites;
use birkhoff::diagnose::{
    LayerSnapshot, LayerStats, Matrix, ModelCard, ModuleSnapshot, ModuleStats, PartCard, Record, Snapshot,
    TimeReport, TimeRow,
};
use birkhoff::train::tally::{RankLine, RankRecord};
use birkhoff::train::trainer::Event;
use serde_json::json;

pub const LAYERS: usize = 6;
const STREAMS: usize = 4;
const SLOTS: usize = 27;
pub const TOTAL: u64 = 3000;
const EVERY: u64 = 10;
pub const DIAGNOSE: u64 = 150;
const BATCH: u64 = 512;

/// Uniform in −1..1, of the numbers it is asked about.
pub fn noise(key: &[u64]) -> f64 {
    let mut h = 0x9e37_79b9_7f4a_7c15u64;
    for &k in key {
        h = (h ^ k.wrapping_add(0x632b_e59b_d9b4_e019)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        h ^= h >> 32;
    }
    (h >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// A run of a mode, its folder still to be written.
#[derive(Clone, Copy)]
pub struct Recorded {
    pub mode: &'static str,
    pub seed: u64,
    /// Steps done of [`TOTAL`].
    pub done: u64,
}

impl Recorded {
    fn streams(self) -> usize {
        if self.mode == "shortcut" { 1 } else { STREAMS }
    }

    /// res of a layer, `t` of the way through training.
    fn res(self, layer: usize, t: f64) -> Matrix {
        let n = self.streams();
        let at = |k: usize| noise(&[self.seed, layer as u64, k as u64]);
        let diagonal = |k: usize| if k / n == k % n { 1.0 } else { 0.0 };
        match self.mode {
            "shortcut" => Matrix::identity(1),
            "hc" => Matrix::new(
                n,
                (0..n * n).map(|k| diagonal(k) * (1.0 + 0.1 * t) + t * (0.11 + 0.3 * at(k))).collect(),
            ),
            _ => {
                let logit = |k: usize| diagonal(k) * (5.0 - 3.4 * t) + 1.3 * t * at(k);
                let mut m: Vec<f64> = (0..n * n).map(|k| logit(k).exp()).collect();
                for _ in 0..20 {
                    for r in m.chunks_mut(n) {
                        let s: f64 = r.iter().sum();
                        r.iter_mut().for_each(|x| *x /= s);
                    }
                    for c in 0..n {
                        let s: f64 = (0..n).map(|r| m[r * n + c]).sum();
                        (0..n).for_each(|r| m[r * n + c] /= s);
                    }
                }
                Matrix::new(n, m)
            }
        }
    }

    fn matrices(self, t: f64) -> Vec<Matrix> {
        (0..LAYERS).map(|l| self.res(l, t)).collect()
    }

    pub fn step(self, step: u64) -> Event {
        let t = step as f64 / TOTAL as f64;
        let wobble = |k| noise(&[self.seed, 77, step, k]);
        let worse = if self.mode == "hc" { 0.012 + 0.02 * t } else { 0.0 };
        let gain = if self.mode == "hc" { 1.0 + 2.5 * t * t } else { 1.0 };
        Event::Step {
            step,
            total_steps: TOTAL,
            epoch: 1 + (step * 2 / (TOTAL + 1)) as usize,
            rows: step * BATCH,
            loss: 0.46 + worse + 0.23 * (-7.0 * t).exp() + 0.018 * wobble(1),
            lr: 2e-3 * (0.5 + 0.5 * (std::f64::consts::PI * t).cos()) * (step as f64 / 100.0).min(1.0),
            grad_norm: gain * (0.32 + 0.5 * (-5.0 * t).exp()) * (0.4 * wobble(2)).exp(),
            rows_per_s: 5900.0 + 350.0 * wobble(3) - 900.0 * f64::from(self.streams() as u32 - 1) / 3.0,
            data_wait: 0.0,
            seconds: step as f64 * BATCH as f64 / 5800.0,
        }
    }

    pub fn eval(self, step: u64) -> Event {
        let t = step as f64 / TOTAL as f64;
        let good = if self.mode == "mhc" { 0.012 } else { 0.0 };
        let ne = 0.872 - good + 0.09 * (-5.0 * t).exp() + 0.002 * noise(&[self.seed, 5, step]);
        let metrics = Metrics {
            rows: 20_000,
            positives: 5011,
            ne: Some(ne),
            logloss: ne * 0.5623,
            auc: Some(0.5 + (1.0 - ne) * 1.93),
            calibration: Some(1.0 + 0.03 * noise(&[self.seed, 6, step])),
        };
        Event::Eval { step, epoch: 1, metrics, best: true, seconds: step as f64 * BATCH as f64 / 5800.0 }
    }

    fn modules(self, layer: usize, t: f64) -> Vec<ModuleStats> {
        let names = ["attention", "cross", "linear"];
        let module = |(k, name): (usize, &&str)| ModuleStats {
            name: name.to_string(),
            rms: (0.5 + 0.25 * k as f64 + 0.1 * layer as f64 * (k as f64 - 0.8)).max(0.05) * (0.4 + t)
                + 0.05 * noise(&[self.seed, 8, layer as u64, k as u64]),
            weight: 1.0,
        };
        names.iter().enumerate().map(module).collect()
    }

    pub fn record(self, step: u64) -> Record {
        let t = step as f64 / TOTAL as f64;
        let m = self.matrices(t);
        let all = composites(&m);
        let layer = |(l, m): (usize, &Matrix)| {
            let sums =
                |v: Vec<f64>| v.into_iter().fold((f64::MAX, f64::MIN), |(a, b), x| (a.min(x), b.max(x)));
            let (rows, cols) = (sums(m.row_sums()), sums(m.col_sums()));
            LayerStats {
                forward_gain: m.forward_gain(),
                backward_gain: m.backward_gain(),
                token_forward_gain: m.forward_gain() * (1.0 + 0.05 * t),
                token_backward_gain: m.backward_gain() * (1.0 + 0.05 * t),
                row_sum_min: rows.0,
                row_sum_max: rows.1,
                col_sum_min: cols.0,
                col_sum_max: cols.1,
                second_singular: m.second_singular(),
                row_entropy: m.row_entropy(),
                stream_cosine: if m.n() == 1 { 1.0 } else { 0.95 - 0.5 * t + 0.07 * l as f64 * t },
                state_rms: 1.0 + (0.25 + if self.mode == "hc" { 0.5 * t } else { 0.0 }) * l as f64,
                grad_norm: 0.11 + 0.03 * (LAYERS - l) as f64 + 0.01 * noise(&[self.seed, 9, l as u64, step]),
                modules: self.modules(l, t),
            }
        };
        let forward: Vec<f64> = (0..LAYERS).map(|l| all[0][l].forward_gain()).collect();
        let backward: Vec<f64> = (0..LAYERS).map(|l| all[l][LAYERS - 1 - l].backward_gain()).collect();
        Record {
            step,
            rows: step * BATCH,
            seconds: step as f64 * 0.09,
            layers: m.iter().enumerate().map(layer).collect(),
            token_composite_forward: forward.iter().map(|g| g * (1.0 + 0.1 * t)).collect(),
            token_composite_backward: backward.iter().map(|g| g * (1.0 + 0.1 * t)).collect(),
            composite_forward: forward,
            composite_backward: backward,
        }
    }

    pub fn snapshot(self, step: u64) -> Snapshot {
        let t = step as f64 / TOTAL as f64;
        let m = self.matrices(t);
        let n = self.streams();
        let f32s = |m: &Matrix| m.data().iter().map(|&v| v as f32).collect::<Vec<f32>>();
        let layer = |l: usize| {
            let weight = |k: u64, i: usize| {
                let x = noise(&[self.seed, k, l as u64, i as u64]);
                if self.mode == "hc" {
                    x * t + if i == l % n { 1.0 } else { 0.0 }
                } else {
                    0.5 + 0.45 * x * t
                }
            };
            let one = |k| if n == 1 { vec![1.0] } else { (0..n).map(|i| weight(k, i) as f32).collect() };
            LayerSnapshot {
                pre: one(20),
                post: one(21),
                res: f32s(&m[l]),
                modules: vec![ModuleSnapshot {
                    name: "attention".into(),
                    slots: SLOTS,
                    attention: self.attention(l, t),
                }],
            }
        };
        let packed = composites(&m).into_iter().flatten().flat_map(|m| f32s(&m)).collect();
        Snapshot {
            step,
            rows: step * BATCH,
            mode: self.mode.into(),
            streams: n,
            layers: (0..LAYERS).map(layer).collect(),
            composites: packed,
        }
    }

    fn attention(self, l: usize, t: f64) -> Vec<f32> {
        let mut out = vec![];
        for q in 0..SLOTS as u64 {
            let logit = |k: u64| {
                let popular = 1.6 * noise(&[self.seed, 30, l as u64, k]);
                t * (popular + 0.8 * noise(&[self.seed, 31, l as u64, q, k]))
                    + if q == k { 1.5 * t } else { 0.0 }
            };
            let e: Vec<f64> = (0..SLOTS as u64).map(|k| logit(k).exp()).collect();
            let s: f64 = e.iter().sum();
            out.extend(e.iter().map(|x| (x / s) as f32));
        }
        out
    }

    pub fn card(self) -> ModelCard {
        let leaf = |name: &str, output: &str, parameters: usize, flops: f64| PartCard {
            name: name.into(),
            output: output.into(),
            parameters,
            flops_forward: flops,
            flops_backward: 2.05 * flops,
            children: vec![],
        };
        let mut parts = vec![
            leaf("numeric", "[512, 1, 16]", 2_704, 2.7e6),
            leaf("embeddings", "[512, 26, 16]", 412_960, 4.3e5),
        ];
        for l in 0..LAYERS {
            let mut children = vec![
                leaf("attention", "[512, 27, 16]", 1_088, 5.3e7),
                leaf("cross", "[512, 27, 16]", 7_344, 9.1e7),
                leaf("linear", "[512, 27, 16]", 756, 1.2e7),
                leaf("ln", "[512, 27, 16]", 32, 2.2e6),
            ];
            if self.mode != "shortcut" {
                children.push(leaf("mhc", "[512, 27, 4, 16]", 1_563, 3.1e7));
            }
            let sum = |f: fn(&PartCard) -> f64, c: &[PartCard]| c.iter().map(f).sum();
            let flops = sum(|c| c.flops_forward, &children);
            let parameters = children.iter().map(|c| c.parameters).sum();
            let output = if self.mode == "shortcut" { "[512, 27, 16]" } else { "[512, 27, 4, 16]" };
            parts.push(PartCard { children, ..leaf(&format!("layers.{l}"), output, parameters, flops) });
        }
        parts.push(leaf("head", "[512]", 28_225, 2.8e7));
        parts.push(leaf("loss", "[1]", 0, 8e3));
        let parameters = parts.iter().map(|p| p.parameters).sum();
        ModelCard {
            device: "llvmpipe".into(),
            batch: BATCH as usize,
            width: 16,
            mode: self.mode.into(),
            streams: self.streams(),
            parameters,
            flops_per_step: parts.iter().map(|p| p.flops_forward + p.flops_backward).sum(),
            bytes_per_step: 1.34e9,
            memory_planned: 61 << 20,
            memory_unshared: 214 << 20,
            parts,
        }
    }

    pub fn time(self) -> TimeReport {
        let mut rows = vec![];
        let mut add = |op: &str, stage: &str, scope: String, calls: usize, micros: f64| {
            rows.push(TimeRow { op: op.into(), stage: stage.into(), scope, calls, micros });
        };
        add("embedding", "forward", "embeddings".into(), 1, 610.0);
        for l in 0..LAYERS {
            let scope = |s: &str| format!("layers.{l}.{s}");
            for (op, s, f) in [
                ("attention", "attention", 1900.0),
                ("matmul", "attention", 1200.0),
                ("matmul", "cross", 2300.0),
                ("matmul", "linear", 420.0),
                ("layer_norm", "ln", 240.0),
                ("mhc_project", "mhc", 530.0),
                ("sinkhorn", "mhc", 880.0),
                ("stream_merge", "mhc", 310.0),
            ] {
                if self.mode == "shortcut" && s == "mhc" {
                    continue;
                }
                let f = f * (1.0 + 0.08 * noise(&[self.seed, l as u64, f as u64]));
                add(op, "forward", scope(s), 2, f);
                add(op, "backward", scope(s), 4, 2.1 * f);
            }
        }
        add("matmul", "forward", "head".into(), 2, 700.0);
        add("matmul", "backward", "head".into(), 4, 1500.0);
        add("embedding_grad", "backward", "embeddings".into(), 1, 1900.0);
        add("adam", "update", "update".into(), 40, 1450.0);
        add("adagrad_rows", "update", "update".into(), 1, 820.0);
        TimeReport {
            device: "llvmpipe".into(),
            clock: "device".into(),
            step: 200,
            wall_micros: 163_000.0,
            rows,
        }
    }

    /// Writes the run folder `parent/name`.
    pub fn write(self, parent: &Path, name: &str) -> PathBuf {
        let path = parent.join(name);
        fs::create_dir_all(path.join("snapshots")).expect("folder");
        let put = |file: &str, bytes: &[u8]| fs::write(path.join(file), bytes).expect(file);
        let mode = self.mode;
        put(
            "config.toml",
            format!(
                "# birkhoff run\n[model.residual]\nmode = \"{mode}\"\n[model.features]\ndense_slots = 1\n"
            )
            .as_bytes(),
        );
        let names =
            |c: char, n: usize| (1..=n).map(|i| json!({"name": format!("{c}{i}")})).collect::<Vec<_>>();
        let head = json!({"schema": {"numeric": names('I', 13), "categorical": names('C', 26)}});
        put("vocab.json", format!("{head}\n[]\n").as_bytes());
        put("metrics.jsonl", self.log().as_bytes());
        let mut step = 0;
        while step <= self.done {
            let s = self.snapshot(step);
            put(&format!("snapshots/{}", Snapshot::file_name(step)), &s.to_bytes());
            step += DIAGNOSE;
        }
        put("model.json", &serde_json::to_vec(&self.card()).expect("json"));
        put("profile.json", &serde_json::to_vec(&self.time()).expect("json"));
        if self.done == TOTAL {
            put("summary.json", json!({"type": "summary", "device": "llvmpipe"}).to_string().as_bytes());
        }
        path
    }

    /// `metrics.jsonl`.
    pub fn log(self) -> String {
        let mut out = String::new();
        let mut line = |e: &Event| out += &(serde_json::to_string(e).expect("json") + "\n");
        line(&Event::Diagnose(self.record(0)));
        for step in (EVERY..=self.done).step_by(EVERY as usize) {
            line(&self.step(step));
            if step % DIAGNOSE == 0 {
                line(&Event::Diagnose(self.record(step)));
            }
            if step % 300 == 0 {
                line(&self.eval(step));
            }
        }
        out
    }
}

/// A run on several ranks.
pub fn on_ranks(parent: &Path, name: &str, world: u64) -> PathBuf {
    let run = Recorded { mode: "mhc", seed: 4, done: 900 };
    let path = run.write(parent, name);
    let mut out = String::new();
    for line in run.log().lines() {
        out += line;
        out += "\n";
        let v: serde_json::Value = serde_json::from_str(line).expect("json");
        if v["type"] != "step" {
            continue;
        }
        let step = v["step"].as_u64().expect("step");
        let rank = |r: u64| {
            let busy = 0.31 + 0.04 * noise(&[41, step, r]);
            let waiting = busy * (0.25 + 0.6 * (-(step as f64) / 200.0).exp() + 0.04 * r as f64);
            RankLine::new(busy, waiting, (3 + r) << 20, 5 << 20, 412_960 / world + 1000 * r)
        };
        let record = RankRecord {
            step,
            seconds: v["seconds"].as_f64().expect("seconds"),
            steps: EVERY,
            steps_seconds: 0.9,
            ranks: (0..world).map(rank).collect(),
        };
        out += &(serde_json::to_string(&Event::Ranks(record)).expect("json") + "\n");
    }
    fs::write(path.join("metrics.jsonl"), out).expect("metrics");
    path
}

/// A run of each mode; the last is still going on.
pub fn three(parent: &Path) -> [PathBuf; 3] {
    [
        Recorded { mode: "shortcut", seed: 1, done: TOTAL }.write(parent, "shortcut"),
        Recorded { mode: "hc", seed: 2, done: TOTAL }.write(parent, "hc"),
        Recorded { mode: "mhc", seed: 3, done: 2400 }.write(parent, "mhc"),
    ]
}
