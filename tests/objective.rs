//! The objective and what regularises it: whole steps against their definitions, and against each other.

use birkhoff::data::criteo::{self, ReadOptions, RowPolicy};
use birkhoff::data::rows::Dataset;
use birkhoff::data::schema::{Encoding, Schema, Transform};
use birkhoff::data::synth::{DEFAULT_WORLD, Synth};
use birkhoff::graph::cpu::{CpuProgram, CpuState};
use birkhoff::graph::exec::Device;
use birkhoff::graph::testing::{noise, software_device};
use birkhoff::model::build::{BuildOptions, EmbeddingSpec, FeatureSpec, model_with};
use birkhoff::model::config::Config;
use birkhoff::ops::sparse_index::SparseIndex;
use birkhoff::train::infer::Inputs;
use birkhoff::train::store::MemoryStore;
use birkhoff::train::trainer::{Summary, Trainer};
use std::sync::{Arc, Mutex};

/// One test at a time: they share the one software device.
static ALONE: Mutex<()> = Mutex::new(());

fn config(sets: &[&str]) -> Config {
    let small = [
        "model.layers=1",
        "model.width=8",
        "train.eval_batch=128",
        "train.log_every=1",
        "train.diagnose_every=0",
        "train.patience=0",
        "train.lr=1e-3",
        "train.embedding_lr=0.02",
        "train.embedding_init=0.5",
    ];
    let all: Vec<String> = small.iter().chain(sets).map(|s| s.to_string()).collect();
    Config::load(None, &all).unwrap()
}

/// Trains on `rows` synthetic rows, every step logged: what the store holds, and the summary.
fn train(cfg: &Config, rows: u64, device: &Device) -> (MemoryStore, Summary) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rows.tsv");
    Synth::new(DEFAULT_WORLD, 7).write_file(&file, rows).unwrap();
    let schema = Schema::criteo(Transform::Log, true, Encoding::Hash { buckets: 30 });
    let (encoder, _) = criteo::fit(&file, &schema, RowPolicy::Error).unwrap();
    let encoder = Arc::new(encoder);
    let data: Arc<Dataset> = Arc::new(criteo::load(&file, &encoder, ReadOptions::default()).unwrap());
    let inputs = Inputs::new(encoder, cfg, device).unwrap();
    let mut trainer = Trainer::new(cfg, inputs, device, data.rows.len()).unwrap();
    let (mut store, mut nobody) = (MemoryStore::default(), ());
    let run = trainer.run(data.clone(), data, &mut store, &mut nobody);
    let summary = pollster::block_on(run).unwrap();
    (store, summary)
}

fn column(store: &MemoryStore, key: &str) -> Vec<f64> {
    let steps = store.records.iter().filter(|r| r["type"] == "step");
    steps.map(|r| r[key].as_f64().unwrap()).collect()
}

fn weights(store: &MemoryStore) -> Vec<f32> {
    let bytes = &store.files["weights.safetensors"];
    let t = safetensors::SafeTensors::deserialize(bytes).unwrap();
    let mut all: Vec<_> = t.tensors();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all.iter()
        .flat_map(|(_, v)| v.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())))
        .collect()
}

fn gap(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| (x - y).abs() / x.abs()).fold(0.0, f64::max)
}

/// Small batches that make one update together are the one large batch: in the loss, the gradient's norm and the weights.
#[test]
fn accumulated_batches_are_one_large_batch() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for extra in [
        &["train.embedding=adam", "train.embedding_l2=0.01"][..],
        &["train.embedding_l2=0.05", "train.embedding_l2_frequency=true", "train.positive_weight=3"],
    ] {
        let with = |more: &[&'static str]| config(&[extra, more].concat());
        // 200 rows: 3 updates of 64 and one of 8; the last of the small ones is one batch and three of padding
        let (one, a) = train(&with(&["train.batch=64"]), 200, &Device::Cpu);
        let (many, b) = train(&with(&["train.batch=16", "train.accumulate=4"]), 200, &Device::Cpu);
        assert_eq!((a.steps, b.steps), (4, 4));
        for key in ["loss", "grad_norm", "lr", "rows"] {
            let g = gap(&column(&one, key), &column(&many, key));
            assert!(g < 1e-4, "{extra:?}: {key} {g:e}");
        }
        let (x, y) = (weights(&one), weights(&many));
        let worst = x.iter().zip(&y).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
        assert!(worst < 1e-4, "{extra:?}: weights differ by {worst:e}");
        // and not the same as no accumulation
        let (small, _) = train(&with(&["train.batch=16"]), 200, &Device::Cpu);
        assert_ne!(column(&small, "loss").len(), 4);
    }
}

#[test]
fn every_option_together_agrees_between_cpu_and_vulkan() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Some(device) = software_device() else { return };
    let all = "model.modules=[{kind=\"attention\"},{kind=\"dlrm\"},{kind=\"mlp\"}]";
    for embedding in ["adagrad", "adam"] {
        let embedding = format!("train.embedding={embedding}");
        let cfg = config(&[
            all,
            &embedding,
            "train.batch=24",
            "train.accumulate=2",
            "train.embedding_dropout=0.2",
            "train.mlp_dropout=0.3",
            "train.label_smoothing=0.1",
            "train.positive_weight=2",
            "train.embedding_l2=0.01",
            "train.embedding_l2_frequency=true",
            "train.schedule=linear",
            "train.overrides=[{match=\"layers.*\",decay=0.1,lr_scale=0.5}]",
        ]);
        let (a, s) = train(&cfg, 600, &Device::Cpu);
        let (b, t) = train(&cfg, 600, &device);
        let g = gap(&column(&a, "loss"), &column(&b, "loss"));
        println!("worst relative difference of {} losses: {g:.1e}", s.steps);
        assert!(g < 1e-3, "{g:e}");
        assert!((s.metrics.logloss - t.metrics.logloss).abs() < 1e-3);
    }
}

#[test]
fn dropout_draws_anew_each_step_and_not_in_evaluations() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let features = FeatureSpec {
        numeric: 3,
        tables: vec![EmbeddingSpec { columns: vec![("a".into(), 9), ("b".into(), 9)], ..Default::default() }],
    };
    let cfg = config(&["train.embedding_dropout=0.5", "train.mlp_dropout=0.5"]);
    let dropouts = |train: bool| {
        let m = model_with(&cfg.model, &features, 8, &BuildOptions::new(&cfg.train, train, 0.0)).unwrap();
        m.graph.nodes().iter().filter(|n| n.op.name() == "dropout").count()
    };
    // embeddings, one hidden layer of the numeric MLP and of the head
    assert_eq!((dropouts(true), dropouts(false)), (3, 0));

    // with rates of nearly nothing only the masks change the loss from epoch to epoch
    let still =
        ["train.batch=200", "train.epochs=6", "train.lr=1e-12", "train.embedding_lr=1e-12", "train.warmup=0"];
    let (a, _) = train(&config(&[&still[..], &["train.mlp_dropout=0.5"]].concat()), 200, &Device::Cpu);
    let losses = column(&a, "loss");
    assert!((1..6).all(|i| losses[..i].iter().all(|l| (l - losses[i]).abs() > 1e-6)), "{losses:?}");
    let evals: Vec<f64> =
        a.records.iter().filter(|r| r["type"] == "eval").map(|r| r["logloss"].as_f64().unwrap()).collect();
    assert!(evals.len() == 6 && gap(&evals, &[evals[0]; 6]) < 1e-6, "{evals:?}");
    let (b, _) = train(&config(&still), 200, &Device::Cpu);
    let plain = column(&b, "loss");
    assert!(gap(&plain, &[plain[0]; 6]) < 1e-6, "{plain:?}");
    // the same seed draws the same, another one does not
    let again = |seed| {
        let seed = format!("train.seed={seed}");
        let sets = [&still[..], &["train.mlp_dropout=0.5", seed.as_str()]].concat();
        column(&train(&config(&sets), 200, &Device::Cpu).0, "loss")
    };
    assert_eq!(again(1), losses);
    assert_ne!(again(2), losses);
}

/// The loss of a small model against the formula, from its own logits.
#[test]
fn the_loss_is_its_formula() {
    let batch = 7;
    let features = FeatureSpec {
        numeric: 2,
        tables: vec![EmbeddingSpec { columns: vec![("a".into(), 5)], ..Default::default() }],
    };
    for (smoothing, positive) in [(0.0, 1.0), (0.2, 1.0), (0.0, 4.0), (0.1, 0.25)] {
        let mut cfg = config(&[]);
        (cfg.train.label_smoothing, cfg.train.positive_weight) = (smoothing, positive);
        let m = model_with(&cfg.model, &features, batch, &BuildOptions::new(&cfg.train, true, -1.0)).unwrap();
        let mut p = CpuProgram::<f64>::new(m.graph.clone(), &[m.loss, m.logits]);
        let ids: Vec<u32> = (0..batch as u32).map(|i| i * 3 % 5).collect();
        let index = SparseIndex::plain(&ids);
        p.set_ids("table0.ids", &ids);
        p.set_ids("table0.order", &index.order);
        p.set_ids("table0.segments", &index.segments);
        p.set64("numeric", &noise(2 * batch, 1));
        let y = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0];
        let w = [1.0, 2.0, 0.5, 0.25, 3.0, 1.0, 0.0];
        p.set64("label", &y);
        p.set64("weight", &w);
        let values = m
            .params
            .iter()
            .map(|p| (p.id(), p.initial(3).iter().map(|x| f64::from(*x)).collect::<Vec<f64>>().into()));
        let mut state = CpuState { values: values.collect() };
        p.run(&mut state);
        let (loss, logits) = (p.read(m.loss)[0], p.read(m.logits));
        let (mut sum, mut total) = (0.0, 0.0);
        for ((s, y), w) in logits.iter().zip(y).zip(w) {
            let w = if y == 1.0 { w * positive } else { w };
            let target = y * (1.0 - smoothing) + smoothing / 2.0;
            let prob = 1.0 / (1.0 + (-s).exp());
            sum -= w * (target * prob.ln() + (1.0 - target) * (1.0 - prob).ln());
            total += w;
        }
        assert!((loss - sum / total).abs() < 1e-12, "{smoothing} {positive}: {loss} {}", sum / total);
        // class weights move the start of the bias with them
        let bias = m.params.iter().find(|p| p.name == "head.b1").unwrap().initial(1)[0];
        assert!((f64::from(bias) - (-1.0 + positive.ln())).abs() < 1e-6);
        // rows that weigh nothing have no loss
        p.set64("weight", &[0.0; 7]);
        p.run(&mut state);
        assert_eq!(p.read(m.loss)[0], 0.0);
    }
}

#[test]
fn overrides_reach_what_they_name_and_nothing_else() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let named = |sets: &[&str]| {
        let (store, _) = train(&config(&[&["train.batch=50"], sets].concat()), 200, &Device::Cpu);
        let bytes = store.files["weights.safetensors"].clone();
        let t = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut v: Vec<(String, Vec<u8>)> =
            t.tensors().into_iter().map(|(n, v)| (n, v.data().to_vec())).collect();
        v.sort();
        v
    };
    let frozen = named(&["train.overrides=[{match=\"head.*\",lr_scale=0},{match=\"head.w0\",lr_scale=1}]"]);
    let features = FeatureSpec {
        numeric: 26,
        tables: vec![EmbeddingSpec {
            columns: (0..26).map(|i| (format!("{i}"), 3)).collect(),
            ..Default::default()
        }],
    };
    let cfg = config(&[]);
    let m = model_with(&cfg.model, &features, 4, &BuildOptions::new(&cfg.train, true, 0.0)).unwrap();
    let mut held = 0;
    for p in m.params.iter().filter(|p| p.name.starts_with("head.w")) {
        let start: Vec<u8> = p.initial(1).iter().flat_map(|x| x.to_le_bytes()).collect();
        let end = &frozen.iter().find(|t| t.0 == p.name).unwrap().1;
        assert!(*end == start, "{} is not to move", p.name);
        held += 1;
    }
    assert_eq!(held, 2);
    let moved = frozen.iter().find(|t| t.0 == "layers.0.attention.wq").unwrap();
    let p = m.params.iter().find(|p| p.name == "layers.0.attention.wq").unwrap();
    assert_ne!(moved.1, p.initial(1).iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    // a decay of its own, on a bias as well
    let plain = named(&[]);
    let decayed = named(&["train.overrides=[{match=\"*.ln1.gamma\",decay=5}]"]);
    for (a, b) in plain.iter().zip(&decayed) {
        assert_eq!(a.0, b.0);
        if a.0.ends_with("ln1.gamma") {
            assert_ne!(a.1, b.1, "{}", a.0);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rows.tsv");
    Synth::new(DEFAULT_WORLD, 7).write_file(&file, 50).unwrap();
    let schema = Schema::criteo(Transform::Log, true, Encoding::Hash { buckets: 5 });
    let (encoder, _) = criteo::fit(&file, &schema, RowPolicy::Error).unwrap();
    let cfg = config(&["train.overrides=[{match=\"layers.*\"},{match=\"layr.*\",decay=1}]"]);
    let inputs = Inputs::new(Arc::new(encoder), &cfg, &Device::Cpu).unwrap();
    let e = Trainer::new(&cfg, inputs, &Device::Cpu, 50).err().expect("fits nothing").to_string();
    assert!(e.contains("train.overrides[1].match = \"layr.*\" fits no dense parameter"), "{e}");
}

#[test]
fn a_plateau_lowers_the_rate_and_a_floor_holds_it() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    // rates of nothing: no evaluation is better than the first
    let cfg = config(&[
        "train.batch=50",
        "train.epochs=6",
        "train.warmup=0",
        "train.schedule=plateau",
        "train.plateau_factor=0.5",
        "train.plateau_patience=2",
        "train.plateau_min=0.2",
        "train.eval_every=1",
        "train.lr=1e-30",
        "train.embedding_lr=1e-30",
    ]);
    let (store, s) = train(&cfg, 100, &Device::Cpu);
    let factors: Vec<f64> = column(&store, "lr").iter().map(|lr| lr / 1e-30).collect();
    assert_eq!((s.steps, s.best_step), (12, 1));
    let want = [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2, 0.2, 0.2, 0.2];
    assert!(factors.iter().zip(want).all(|(f, w)| (f - w).abs() < 1e-9), "{factors:?}");
    // monitors of their own
    for (monitor, key, sign) in [("auc", "auc", -1.0), ("logloss", "logloss", 1.0), ("ne", "ne", 1.0)] {
        let monitor = format!("train.monitor={monitor}");
        let cfg = config(&["train.batch=20", "train.eval_every=1", "train.lr=3e-2", &monitor]);
        let (store, s) = train(&cfg, 160, &Device::Cpu);
        let best = store
            .records
            .iter()
            .filter(|r| r["type"] == "eval")
            .min_by(|a, b| {
                let v = |r: &serde_json::Value| sign * r[key].as_f64().unwrap();
                v(a).total_cmp(&v(b))
            })
            .unwrap();
        assert_eq!(best["step"], s.best_step, "{key}");
    }
}
