//! Exported models in onnxruntime against the CPU executor: every module, residual mode, ensemble and input.

mod python;

use birkhoff::data::batch::BatchBuilder;
use birkhoff::data::criteo::{self, ReadOptions};
use birkhoff::export::{OnnxModel, TrainedRun, Weight};
use birkhoff::graph::exec::{Device, Program, State};
use birkhoff::model::build::{EmbeddingSpec, FeatureSpec, Model, Pooled, model};
use birkhoff::model::config::{Config, ConfigError};
use birkhoff::model::params::Kind;
use birkhoff::train::infer::{tensor_specs, to_tensors};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
mod program;

use program::{birkhoff, ok, s};
use std::path::Path;

/// The tolerance on scores.
const SCORE: f64 = 1e-5;
/// That on logits, relative to their size: both sides round in 32 bits, and a cross network multiplies what it rounded.
const LOGIT: f64 = 5e-5;
/// Two batch sizes, neither of them one that the exporter builds its graphs for.
const BATCHES: [usize; 2] = [1, 37];

/// One model to compare.
struct Case {
    name: String,
    config: Config,
    features: FeatureSpec,
    /// Changes parameters after they are drawn: (name, values).
    adjust: fn(&str, &mut [f32]),
}

/// Three numbers and five columns in two tables.
fn features() -> FeatureSpec {
    let table = |names: &[(&str, usize)]| EmbeddingSpec {
        columns: names.iter().map(|(n, r)| (n.to_string(), *r)).collect(),
        ..Default::default()
    };
    FeatureSpec {
        numeric: 3,
        tables: vec![table(&[("C1", 7), ("C2", 3)]), table(&[("C3", 11), ("C4", 2), ("C5", 5)])],
    }
}

fn case(name: impl Into<String>, sets: &[&str]) -> Case {
    let small =
        ["model.layers=2", "model.width=4", "model.residual.streams=3", "model.features.dense_hidden=[5]"];
    let sets: Vec<String> = small.iter().chain(sets).map(|s| s.to_string()).collect();
    let config = Config::load(None, &sets).unwrap_or_else(|e| panic!("{sets:?}: {e}"));
    Case { name: name.into(), config, features: features(), adjust: |_, _| {} }
}

fn cases() -> Vec<Case> {
    let modules = [
        r#"[{kind="attention",heads=2}]"#,
        r#"[{kind="linear"}]"#,
        r#"[{kind="cross"}]"#,
        r#"[{kind="cross",rank=2}]"#,
        r#"[{kind="cross",form="vector",depth=3}]"#,
        r#"[{kind="gram"}]"#,
        r#"[{kind="dlrm",compressed=2,hidden=[6,5]}]"#,
        r#"[{kind="conv",channels=3,kernel=[3,5]}]"#,
        r#"[{kind="fm"}]"#,
        r#"[{kind="mlp",hidden=[7]}]"#,
    ];
    let mut all = vec![];
    for mode in ["shortcut", "hc", "mhc"] {
        let mode = format!("model.residual.mode={mode}");
        for m in modules {
            all.push(case(format!("{mode} {m}"), &[&mode, &format!("model.modules={m}")]));
        }
        for ensemble in ["sum", "concat", "weighted"] {
            let e = format!("model.ensemble={ensemble}");
            let pair = r#"model.modules=[{kind="attention"},{kind="cross",rank=3}]"#;
            all.push(case(format!("{mode} {ensemble}"), &[&mode, &e, pair]));
            all.push(case(format!("{mode} {ensemble} 4 slots"), &[&mode, &e, pair, "model.slots=4"]));
            all.push(case(
                format!("{mode} {ensemble} of one"),
                &[&mode, &e, r#"model.modules=[{kind="fm"}]"#],
            ));
        }
        for (name, sets) in [
            ("one stream", vec!["model.residual.streams=1"]),
            ("eight streams", vec!["model.residual.streams=8", "model.residual.sinkhorn_iterations=3"]),
            ("sum, no norm", vec!["model.residual.collapse=sum", "model.residual.final_norm=false"]),
            ("res only", vec![r#"model.residual.learn=["res"]"#]),
            ("pre and post", vec![r#"model.residual.learn=["pre","post"]"#]),
            ("nothing learned", vec!["model.residual.learn=[]"]),
            ("res only, 4 slots", vec![r#"model.residual.learn=["res"]"#, "model.slots=4"]),
            ("deep", vec!["model.layers=6"]),
            ("two dense slots", vec!["model.features.dense_slots=2", "model.features.dense_hidden=[]"]),
            ("linear head", vec!["model.head.hidden=[]"]),
        ] {
            let sets: Vec<&str> = std::iter::once(mode.as_str()).chain(sets).collect();
            all.push(case(format!("{mode} {name}"), &sets));
        }
        let inputs = |name: &str, change: fn(&mut FeatureSpec)| {
            let mut c = case(format!("{mode} {name}"), &[&mode]);
            change(&mut c.features);
            c
        };
        all.push(inputs("no numbers", |f| f.numeric = 0));
        all.push(inputs("no columns", |f| f.tables.clear()));
        all.push(inputs("one column", |f| {
            f.tables.truncate(1);
            f.tables[0].columns.truncate(1);
        }));
        for mean in [false, true] {
            let mut c = case(format!("{mode} pooled, mean {mean}"), &[&mode]);
            let bag = EmbeddingSpec {
                columns: vec![("history".into(), 6)],
                pooled: Some(Pooled { capacity: 150, mean, bags: 1 }),
                ..Default::default()
            };
            // between two single-valued tables, so that positions are counted across it
            c.features.tables.insert(1, bag);
            all.push(c);
            // a table of two columns whose slots are no neighbours, and one with rows of another width
            let mut c = case(format!("{mode} shared and projected, mean {mean}"), &[&mode]);
            let shared = EmbeddingSpec {
                columns: vec![("item".into(), 6)],
                pooled: Some(Pooled { capacity: 300, mean, bags: 2 }),
                slots: vec![0, 6],
                ..Default::default()
            };
            c.features.tables[0].slots = vec![1, 2];
            c.features.tables[1].slots = vec![3, 4, 5];
            c.features.tables[1].columns.truncate(2);
            c.features.tables[1].slots.truncate(2);
            let wide = EmbeddingSpec {
                columns: vec![("wide".into(), 4)],
                width: Some(3),
                slots: vec![5],
                ..Default::default()
            };
            c.features.tables.insert(0, shared);
            c.features.tables.push(wide);
            all.push(c);
        }
        // rows whose mean is large beside their deviation
        all.push(Case {
            adjust: |name, v| {
                if name.starts_with("embeddings") || name == "numeric.b1" {
                    v.iter_mut().for_each(|x| *x += 30.0);
                }
            },
            ..case(format!("{mode} large means"), &[&mode, r#"model.modules=[{kind="linear"}]"#])
        });
        // residual matrices far from any that a fresh model has
        all.push(Case {
            adjust: |name, v| {
                if name.ends_with("mhc.b") || name.ends_with("hc.b_res") {
                    v.iter_mut().enumerate().for_each(|(i, x)| *x += [-30.0, 25.0, 3.0, -8.0][i % 4]);
                }
            },
            ..case(format!("{mode} extreme matrices"), &[&mode])
        });
    }
    all
}

fn noise(rng: &mut StdRng) -> f32 {
    (rng.random::<f32>() - 0.5) * 2.0
}

/// Random parameters about their initial values: none is zero, none is where training begins.
fn parameters(m: &Model, adjust: fn(&str, &mut [f32]), rng: &mut StdRng) -> Vec<Vec<f32>> {
    let one = |p: &birkhoff::model::params::Param| {
        let size = if matches!(p.kind, Kind::Embedding(_)) { 1.0 } else { 0.3 };
        let mut v = p.initial(3);
        v.iter_mut().for_each(|x| *x += size * noise(rng));
        adjust(&p.name, &mut v);
        v
    };
    m.params.iter().map(one).collect()
}

/// A batch's inputs for onnxruntime, and the logits that the CPU executor gives for them.
fn expected(case: &Case, params: &[Vec<f32>], rows: usize, rng: &mut StdRng) -> (Value, Vec<f32>) {
    let m = model(&case.config.model, &case.features, rows, false, 1.0, -0.4).unwrap();
    let mut state = State::new(&Device::Cpu);
    for (p, v) in m.params.iter().zip(params) {
        state.set(&p.name, v).unwrap();
    }
    let mut program = Program::compile(&Device::Cpu, &state, &m.graph, &[m.logits], "oracle").unwrap();
    let mut inputs = Map::new();
    let f = &case.features;
    if f.numeric > 0 {
        let x: Vec<f32> = (0..rows * f.numeric).map(|_| 2.0 * noise(rng)).collect();
        program.set("numeric", &x).unwrap();
        inputs.insert("numeric".into(), json!({"type": "float32", "shape": [rows, f.numeric], "data": x}));
    }
    let single = f.tables.iter().filter(|t| t.pooled.is_none()).map(|t| t.columns.len()).sum::<usize>();
    let mut local = vec![vec![]; rows];
    for (i, t) in f.tables.iter().enumerate() {
        let ids_name = format!("table{i}.ids");
        if let Some(bag) = t.pooled {
            let (name, table) = &t.columns[0];
            // empty bags among the others
            let lens: Vec<usize> =
                (0..rows * bag.bags).map(|_| rng.random_range(0..5usize).saturating_sub(1)).collect();
            let total: usize = lens.iter().sum();
            let mut ids: Vec<u32> = (0..total).map(|_| rng.random_range(0..*table as u32)).collect();
            let mut offsets = vec![0u32];
            lens.iter().for_each(|n| offsets.push(offsets.last().unwrap() + *n as u32));
            inputs.insert(format!("{name}.ids"), json!({"type": "int64", "shape": [total], "data": ids}));
            inputs.insert(
                format!("{name}.offsets"),
                json!({"type": "int64", "shape": [offsets.len()], "data": offsets}),
            );
            ids.resize(bag.capacity, 0);
            program.set_ids(&ids_name, &ids).unwrap();
            program.set_ids(&format!("table{i}.offsets"), &offsets).unwrap();
            continue;
        }
        let mut packed = vec![];
        for row in &mut local {
            let mut first = 0;
            for (_, table) in &t.columns {
                let id = rng.random_range(0..*table as u32);
                row.push(id);
                packed.push(first + id);
                first += *table as u32;
            }
        }
        program.set_ids(&ids_name, &packed).unwrap();
    }
    if single > 0 {
        inputs
            .insert("ids".into(), json!({"type": "int64", "shape": [rows, single], "data": local.concat()}));
    }
    program.run(&mut state).unwrap();
    let logits = pollster::block_on(program.read(&[0])).unwrap().pop().unwrap();
    (Value::Object(inputs), logits)
}

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

/// Largest differences of logits (relative to their size, at least 1) and of scores.
fn compare(name: &str, want: &[f32], got: &Value) -> (f64, f64) {
    let list = |key: &str| -> Vec<f64> {
        let v = got[key].as_array().unwrap_or_else(|| panic!("{name}: {got}"));
        v.iter().map(|x| x.as_f64().unwrap_or(f64::NAN)).collect()
    };
    let (logits, scores) = (list("logit"), list("score"));
    assert_eq!((logits.len(), scores.len()), (want.len(), want.len()), "{name}");
    assert_eq!(got["shape"], json!([want.len()]), "{name}");
    let mut worst = (0f64, 0f64);
    for ((w, l), s) in want.iter().zip(logits).zip(scores) {
        let w64 = f64::from(*w);
        // NaN must not pass
        let d = [(w64 - l).abs() / w64.abs().max(1.0), (sigmoid(*w) - s).abs()]
            .map(|d| if d.is_nan() { f64::INFINITY } else { d });
        worst = (worst.0.max(d[0]), worst.1.max(d[1]));
    }
    worst
}

fn weights(m: &Model, params: &[Vec<f32>]) -> Vec<Weight> {
    let specs = tensor_specs(&m.params);
    let values: Vec<std::borrow::Cow<'_, [f32]>> = params.iter().map(|v| v.as_slice().into()).collect();
    let tensors = to_tensors(&specs, &m.params, &values);
    tensors.iter().zip(&specs).map(|(t, s)| Weight { spec: s.clone(), data: t.data.to_vec() }).collect()
}

fn export(case: &Case, params: &[Vec<f32>]) -> anyhow::Result<OnnxModel> {
    let build =
        |b| -> Result<Model, ConfigError> { model(&case.config.model, &case.features, b, false, 1.0, -0.4) };
    OnnxModel::new(build, weights(&build(2)?, params), &BTreeMap::new())
}

#[test]
fn onnxruntime_gives_the_same_scores() {
    let Some(py) = python::python("onnxruntime_gives_the_same_scores") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut rng = StdRng::seed_from_u64(11);
    let cases = cases();
    let (mut list, mut wanted) = (vec![], vec![]);
    for (i, c) in cases.iter().enumerate() {
        let m = model(&c.config.model, &c.features, 2, false, 1.0, -0.4).unwrap();
        let params = parameters(&m, c.adjust, &mut rng);
        let file = format!("{i}.onnx");
        let onnx = export(c, &params).unwrap_or_else(|e| panic!("{}: {e}", c.name));
        std::fs::write(dir.path().join(&file), onnx.to_bytes()).unwrap();
        let (batches, logits): (Vec<Value>, Vec<Vec<f32>>) =
            BATCHES.iter().map(|&b| expected(c, &params, b, &mut rng)).unzip();
        list.push(json!({"model": file, "batches": batches}));
        wanted.push(logits);
    }
    std::fs::write(dir.path().join("cases.json"), serde_json::to_vec(&list).unwrap()).unwrap();
    python::script(&py, "score_onnx.py", &[dir.path()]);
    let text = std::fs::read(dir.path().join("scores.json")).unwrap();
    let results: Vec<Value> = serde_json::from_slice(&text).unwrap();
    assert_eq!(results.len(), cases.len());
    let (mut worst, mut wrong) = ((0f64, 0f64), vec![]);
    for ((c, r), want) in cases.iter().zip(&results).zip(&wanted) {
        for (want, got) in want.iter().zip(r["batches"].as_array().unwrap()) {
            let (logit, score) = compare(&c.name, want, got);
            if !(logit <= LOGIT && score <= SCORE) {
                wrong.push(format!("{}: logit {logit:.1e}, score {score:.1e}", c.name));
            }
            worst = (worst.0.max(logit), worst.1.max(score));
        }
        // a model that says the same of every row would prove nothing
        let spread = want[1].iter().map(|x| (x - want[1][0]).abs()).fold(0f32, f32::max);
        assert!(spread > 1e-3 && want[1].iter().all(|x| x.abs() < 60.0), "{}: {:?}", c.name, want[1]);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    println!(
        "{} models; worst difference of a logit {:.1e}, of a score {:.1e}",
        cases.len(),
        worst.0,
        worst.1
    );
}

#[test]
fn weights_beside_the_model_and_ids_out_of_range() {
    let Some(py) = python::python("weights_beside_the_model_and_ids_out_of_range") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut rng = StdRng::seed_from_u64(5);
    let c = case("apart", &[]);
    let m = model(&c.config.model, &c.features, 2, false, 1.0, -0.4).unwrap();
    let params = parameters(&m, c.adjust, &mut rng);
    let beside = export(&c, &params).unwrap().save_apart(&dir.path().join("m.onnx")).unwrap();
    assert_eq!(beside, dir.path().join("m.onnx.data"));
    let numbers: usize = m.params.iter().map(|p| p.shape().len()).sum();
    assert_eq!(std::fs::metadata(&beside).unwrap().len() as usize, 4 * numbers);
    let (batch, want) = expected(&c, &params, 5, &mut rng);
    // C1 has ids 0 to 6; 7 is the first row of C2 in birkhoff's packed table
    let mut beyond = batch.clone();
    beyond["ids"]["data"][0] = json!(7);
    let list = json!([{"model": "m.onnx", "batches": [batch, beyond]}]);
    std::fs::write(dir.path().join("cases.json"), list.to_string()).unwrap();
    python::script(&py, "score_onnx.py", &[dir.path()]);
    let text = std::fs::read(dir.path().join("scores.json")).unwrap();
    let results: Vec<Value> = serde_json::from_slice(&text).unwrap();
    let r = &results[0];
    let (logit, score) = compare("apart", &want, &r["batches"][0]);
    assert!(logit <= LOGIT && score <= SCORE);
    let error = r["batches"][1]["error"].as_str().expect("an id beyond the column is an error");
    assert!(error.contains("out of"), "{error}");
    let names = r["weights"].as_object().unwrap();
    for s in tensor_specs(&m.params) {
        assert_eq!(names[&s.name], json!(s.shape), "{}", s.name);
    }
}

/// Trains on 2000 rows into `run`, scores the rows in `valid.tsv`.
fn train(dir: &Path, run: &Path, sets: &[&str]) {
    let at = |n: &str| dir.join(n);
    ok(&["synth", "--rows", "2000", "--seed", "1", "--out", s(&at("train.tsv"))]);
    ok(&["synth", "--rows", "333", "--seed", "2", "--out", s(&at("valid.tsv"))]);
    let (train, valid) = (at("train.tsv"), at("valid.tsv"));
    let mut args = vec!["train", "--train", s(&train), "--valid", s(&valid), "--out", s(run), "--quiet"];
    args.extend(["--device", "cpu", "--set", "model.layers=2", "--set", "model.width=8"]);
    args.extend(["--set", "train.batch=128", "--set", "train.checkpoint_every=9"]);
    sets.iter().for_each(|set| args.extend(["--set", set]));
    ok(&args);
}

#[test]
fn a_trained_run_predicts_the_same_in_onnxruntime() {
    let Some(py) = python::python("a_trained_run_predicts_the_same_in_onnxruntime") else { return };
    for (i, sets) in [
        vec!["data.numeric=standardize", "data.ids=hash", "data.buckets=50", "model.residual.mode=hc"],
        vec!["data.numeric=none", "data.indicators=false", "model.residual.mode=shortcut"],
        vec![],
    ]
    .into_iter()
    .enumerate()
    {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        train(dir.path(), &run, &sets);
        let (onnx, csv, valid) =
            (dir.path().join("m.onnx"), dir.path().join("p.csv"), dir.path().join("valid.tsv"));
        let out = ok(&["export", s(&run), "--out", s(&onnx), "--with-encoder", "--json"]);
        let report: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(report["files"].as_array().unwrap().len(), 2);
        let copy = std::fs::read(dir.path().join("m.onnx.vocab.json")).unwrap();
        assert_eq!(copy, std::fs::read(run.join("vocab.json")).unwrap());
        ok(&["predict", s(&run), "--data", s(&valid), "--out", s(&csv), "--device", "cpu"]);

        let r = TrainedRun::open(&run, None).unwrap();
        let encoder = &r.inputs.encoder;
        let data = criteo::load(&valid, encoder, ReadOptions::default()).unwrap();
        let mut builder =
            BatchBuilder::new(333, data.rows.features, data.rows.columns, r.inputs.groups.clone()).unwrap();
        let b = builder.range(&data.rows, 0..333);
        let batch = json!({
            "numeric": {"type": "float32", "shape": [333, data.rows.features], "data": b.numeric},
            "ids": {"type": "int64", "shape": [333, 26], "data": b.ids},
        });
        let list = json!([{"model": "m.onnx", "batches": [batch]}]);
        std::fs::write(dir.path().join("cases.json"), list.to_string()).unwrap();
        python::script(&py, "score_onnx.py", &[dir.path()]);
        let text = std::fs::read(dir.path().join("scores.json")).unwrap();
        let results: Vec<Value> = serde_json::from_slice(&text).unwrap();
        let predicted = std::fs::read_to_string(&csv).unwrap();
        let logits: Vec<f32> =
            predicted.lines().skip(1).map(|l| l.split(',').nth(1).unwrap().parse().unwrap()).collect();
        let (logit, score) = compare("run", &logits, &results[0]["batches"][0]);
        assert!(logit <= LOGIT && score <= SCORE, "run {i}: logit {logit:.1e}, score {score:.1e}");

        let meta = &results[0]["metadata"];
        let list = |key: &str| -> Vec<Value> { serde_json::from_str(meta[key].as_str().unwrap()).unwrap() };
        let (numeric, categorical) = (list("numeric"), list("categorical"));
        assert_eq!(numeric.len(), data.rows.features);
        assert_eq!((&numeric[0], &categorical[25]["name"]), (&json!("I1"), &json!("C26")));
        assert_eq!(categorical[25]["rows"], json!(encoder.table_rows()[25]));
        assert_eq!(meta["step"], json!(report["step"].to_string()));
        assert_eq!(meta["birkhoff"], json!(env!("CARGO_PKG_VERSION")));
    }
}

#[test]
fn safetensors_and_bad_input() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(dir.path(), &run, &[]);
    let out = dir.path().join("w.safetensors");
    let text = ok(&["export", s(&run), "--out", s(&out)]);
    assert!(text.contains("tensors") && text.contains("step 16"), "{text}");
    assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(run.join("weights.safetensors")).unwrap());
    // checkpoint_every = 9 of 16 steps, and the last
    ok(&["export", s(&run), "--format", "safetensors", "--step", "16", "--out", s(&out)]);
    let fails = |args: &[&str], part: &str| {
        let o = birkhoff(args);
        let err = String::from_utf8_lossy(&o.stderr);
        assert_eq!(o.status.code(), Some(2), "{args:?}: {err}");
        assert!(err.contains(part) && err.lines().count() == 1, "{args:?}: {err}");
    };
    let other = dir.path().join("model.bin");
    fails(&["export", s(&run), "--out", s(&other)], "its ending names no format; add --format");
    fails(
        &["export", s(&run), "--out", s(&out), "--step", "7"],
        "no weights of step 7; there are those of step 9, 16",
    );
    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    fails(&["export", s(&empty), "--out", s(&out)], "has no config.toml");
    let inside = run.join("weights.safetensors");
    fails(&["export", s(&run), "--out", s(&inside)], "would replace an input");
    let mut bytes = std::fs::read(&inside).unwrap();
    let n = bytes.len();
    bytes[n - 3] ^= 1;
    std::fs::write(&inside, bytes).unwrap();
    fails(&["export", s(&run), "--out", s(&dir.path().join("m.onnx"))], "checksum");
}
