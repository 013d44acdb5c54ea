//! Metrics and schedules against the reference folder (`BIRKHOFF_REFERENCE`, else `../shared/reference`).

use std::path::PathBuf;

use birkhoff::train::metrics::evaluate;
use birkhoff::train::schedule::{Decay, Schedule};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

struct Folder {
    path: PathBuf,
    index: Value,
}

impl Folder {
    /// `None`, with a printed line, where the folder is absent.
    fn open() -> Option<Folder> {
        let path = std::env::var_os("BIRKHOFF_REFERENCE")
            .map(PathBuf::from)
            .unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/reference"));
        let Ok(text) = std::fs::read_to_string(path.join("index.json")) else {
            println!("skipped: no reference values at {}", path.display());
            return None;
        };
        Some(Folder { path, index: serde_json::from_str(&text).expect("index.json") })
    }

    /// Calls `check` with each case whose name starts with one of `prefixes` and the text of its file.
    fn each(&self, prefixes: &[&str], mut check: impl FnMut(&str, &Value, &SafeTensors)) {
        let mut seen = 0;
        for case in self.index["cases"].as_array().expect("cases") {
            let name = case["name"].as_str().expect("name");
            if prefixes.iter().any(|p| name.starts_with(p)) {
                let bytes =
                    std::fs::read(self.path.join(case["file"].as_str().expect("file"))).expect("file");
                check(name, case, &SafeTensors::deserialize(&bytes).expect("safetensors"));
                seen += 1;
            }
        }
        println!("{seen} reference cases of {prefixes:?}");
        assert!(seen > 0, "the index lists no case of {prefixes:?}");
    }
}

fn values(file: &SafeTensors, key: &str) -> Vec<f64> {
    let t = file.tensor(key).unwrap_or_else(|e| panic!("{key}: {e}"));
    match t.dtype() {
        Dtype::F32 => t.data().as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
        Dtype::F64 => t.data().as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        Dtype::I32 => t.data().as_chunks().0.iter().map(|b| f64::from(i32::from_le_bytes(*b))).collect(),
        other => panic!("{key}: unexpected dtype {other:?}"),
    }
}

fn floats(file: &SafeTensors, key: &str) -> Vec<f32> {
    values(file, key).into_iter().map(|v| v as f32).collect()
}

fn close(name: &str, what: &str, got: Option<f64>, want: &Value) {
    match (got, want.as_f64()) {
        (None, None) => {}
        (Some(g), Some(w)) => {
            assert!((g - w).abs() <= 1e-9 * w.abs().max(1e-3), "{name} {what}: got {g}, expected {w}");
        }
        (g, w) => panic!("{name} {what}: got {g:?}, expected {w:?}"),
    }
}

#[test]
fn reference_metrics() {
    let Some(folder) = Folder::open() else { return };
    folder.each(&["metrics_", "weighted_metrics_"], |name, case, file| {
        let inputs = case["inputs"].as_array().expect("inputs");
        let weights = inputs.iter().any(|i| i == "w").then(|| floats(file, &format!("{name}/w")));
        let labels = floats(file, &format!("{name}/y"));
        let m = evaluate(&floats(file, &format!("{name}/logit")), &labels, weights.as_deref());
        let want = &case["expected"];
        close(name, "ne", m.ne, &want["ne"]);
        close(name, "logloss", Some(m.logloss), &want["logloss"]);
        close(name, "auc", m.auc, &want["auc"]);
        close(name, "calibration", m.calibration, &want["calibration"]);
        let counts = |i: usize| weights.as_ref().is_none_or(|w| w[i] > 0.0);
        assert_eq!(m.rows, (0..labels.len()).filter(|&i| counts(i)).count() as u64, "{name} rows");
        let positives = (0..labels.len()).filter(|&i| counts(i) && labels[i] == 1.0).count() as u64;
        assert_eq!(m.positives, positives, "{name} positives");
    });
}

#[test]
fn reference_schedules() {
    let Some(folder) = Folder::open() else { return };
    folder.each(&["schedule_"], |name, case, file| {
        let c = &case["config"];
        let decay = match c["kind"].as_str().expect("kind") {
            "constant" => Decay::Constant,
            "cosine" => Decay::Cosine { floor: 0.0 },
            "step" => Decay::Step { factor: c["factor"].as_f64().expect("factor"), at: vec![0.8, 0.9] },
            other => panic!("{name}: schedule {other}"),
        };
        let (warmup, total) = (c["warmup"].as_u64().expect("warmup"), c["total"].as_u64().expect("total"));
        let schedule = Schedule { warmup, total, decay };
        let (steps, want) = (values(file, &format!("{name}/step")), values(file, &format!("{name}/factor")));
        assert_eq!(steps.len(), want.len());
        for (t, want) in steps.iter().zip(want) {
            let got = schedule.factor(*t as u64);
            assert!((got - want).abs() <= 1e-12, "{name} at step {t}: got {got}, expected {want}");
        }
    });
}
