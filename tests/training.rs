//! Whole runs: repeatability, the two executors side by side, overfitting, depth, memory, kernels.

use birkhoff::data::criteo::{self, ReadOptions, RowPolicy};
use birkhoff::data::rows::Dataset;
use birkhoff::data::schema::{Encoding, Schema, Transform};
use birkhoff::data::synth::{DEFAULT_WORLD, Synth};
use birkhoff::diagnose::TimeReport;
use birkhoff::gpu::reflect::{check_default_limits, reflect};
use birkhoff::gpu::translate::translate;
use birkhoff::gpu::{DeviceChoice, GpuOptions, LimitsMode, Selected};
use birkhoff::graph::exec::Device;
use birkhoff::graph::gpu::lower;
use birkhoff::graph::testing::software_device;
use birkhoff::graph::{fuse::fuse, plan};
use birkhoff::model::build::{BuildOptions, EmbeddingSpec, FeatureSpec, model, model_with};
use birkhoff::model::config::Config;
use birkhoff::ops::{GpuCaps, matmul::ByDevice};
use birkhoff::train::infer::Inputs;
use birkhoff::train::run::RunFolder;
use birkhoff::train::step::training_step;
use birkhoff::train::trainer::{Event, Report, Summary, Trainer};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// One test at a time: they all want both cores and the one software device.
static ALONE: Mutex<()> = Mutex::new(());

#[derive(Default)]
struct Losses(Vec<f64>);

impl Report for Losses {
    fn batch(&mut self, _: usize) {}
    fn event(&mut self, e: &Event) -> anyhow::Result<()> {
        if let Event::Step { loss, .. } = e {
            self.0.push(*loss);
        }
        Ok(())
    }
}

fn config(sets: &[&str]) -> Config {
    let sets: Vec<String> = ["train.log_every=1"].iter().chain(sets).map(|s| s.to_string()).collect();
    Config::load(None, &sets).unwrap()
}

/// Trains on `rows` synthetic rows (validation: the same rows); every step's loss and the summary.
fn train(cfg: &Config, rows: u64, device: &Device) -> (Vec<f64>, Summary) {
    let dir = tempfile::tempdir().unwrap();
    let mut losses = Losses::default();
    let summary = train_in(dir.path(), cfg, rows, device, &mut losses);
    (losses.0, summary)
}

/// The same, with the run in the folder `run` of `dir`.
fn train_in(dir: &Path, cfg: &Config, rows: u64, device: &Device, report: &mut dyn Report) -> Summary {
    let file = dir.join("rows.tsv");
    Synth::new(DEFAULT_WORLD, 7).write_file(&file, rows).unwrap();
    let schema = Schema::criteo(Transform::Log, true, Encoding::Vocabulary { min_count: 1, max_size: None });
    let (encoder, _) = criteo::fit(&file, &schema, RowPolicy::Error).unwrap();
    let encoder = Arc::new(encoder);
    let data: Arc<Dataset> = Arc::new(criteo::load(&file, &encoder, ReadOptions::default()).unwrap());
    let inputs = Inputs::new(encoder, cfg, device).unwrap();
    let mut trainer = Trainer::new(cfg, inputs, device, data.rows.len()).unwrap();
    let run = RunFolder::create(&dir.join("run"), false).unwrap();
    run.begin(cfg).unwrap();
    pollster::block_on(trainer.run(data.clone(), data, &mut run.store().unwrap(), report)).unwrap()
}

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

#[test]
fn a_cpu_run_repeats_bit_for_bit() {
    let _alone = alone();
    let cfg = config(&["train.batch=128", "train.seed=3"]);
    let (a, _) = train(&cfg, 1500, &Device::Cpu);
    let (b, _) = train(&cfg, 1500, &Device::Cpu);
    assert_eq!(a.len(), 12);
    assert_eq!(a, b);
    let (c, _) = train(&config(&["train.batch=128", "train.seed=4"]), 1500, &Device::Cpu);
    assert_ne!(a, c, "the seed must matter");
}

/// After which step a file was there first.
struct Appears {
    file: PathBuf,
    steps: u64,
    at: Option<u64>,
}

impl Report for Appears {
    fn batch(&mut self, _: usize) {
        self.steps += 1;
        if self.at.is_none() && self.file.exists() {
            self.at = Some(self.steps);
        }
    }
    fn event(&mut self, _: &Event) -> anyhow::Result<()> {
        Ok(())
    }
}

#[test]
fn where_the_time_goes_is_known_early_in_a_run() {
    let _alone = alone();
    let cfg = config(&["train.batch=20", "model.layers=1", "model.width=4", "train.diagnose_every=0"]);
    for device in [Some(Device::Cpu), software_device()].into_iter().flatten() {
        if !device.is_cpu() && !device.has_timestamps() {
            println!("SKIP: {} has no timestamps", device.name());
            continue;
        }
        // of a shorter run the last step is timed
        for (steps, at) in [(12, 8), (3, 3)] {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("run/profile.json");
            let mut report = Appears { file: file.clone(), steps: 0, at: None };
            train_in(dir.path(), &cfg, 20 * steps, &device, &mut report);
            assert_eq!((report.steps, report.at), (steps, Some(at)), "{}", device.name());
            let time: TimeReport = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
            assert_eq!(
                (time.step, time.clock.as_str()),
                (at, if device.is_cpu() { "host" } else { "device" })
            );
            for stage in ["forward", "backward", "update"] {
                let micros = time.rows.iter().filter(|r| r.stage == stage).map(|r| r.micros).sum::<f64>();
                assert!(micros > 0.0, "{}: {stage}", device.name());
            }
        }
    }
}

#[test]
fn a_logged_loss_is_the_mean_of_its_steps_whatever_happens_between() {
    let _alone = alone();
    let base = ["train.batch=100", "model.layers=1", "model.width=4", "train.eval_batch=256"];
    let with = |more: &[&'static str]| config(&[&base[..], more].concat());
    let (each, _) = train(&with(&["train.diagnose_every=0"]), 1200, &Device::Cpu);
    assert_eq!(each.len(), 12);
    for between in
        [["train.diagnose_every=0", "train.eval_every=0"], ["train.diagnose_every=3", "train.eval_every=5"]]
    {
        let (logged, _) = train(&with(&[&["train.log_every=4"][..], &between].concat()), 1200, &Device::Cpu);
        assert_eq!(logged.len(), 3, "{between:?}");
        for (l, steps) in logged.iter().zip(each.chunks(4)) {
            let mean = steps.iter().sum::<f64>() / 4.0;
            assert!((l - mean).abs() < 1e-5, "{between:?}: {logged:?} of {each:?}");
        }
    }
    let (last, _) = train(&with(&["train.log_every=0"]), 1200, &Device::Cpu);
    assert_eq!(last.len(), 1, "the last step is always reported");
}

/// Fifty free-running steps. How far two runs part depends on the optimiser as much as on the executors: at the
/// default learning rates one step turns a fresh embedding row (length 0.05) by as much as its own length, and a
/// rounding error of 1e-7 grows fivefold a step, on the CPU alone just so. Rows of length 1 keep the steps small
/// beside what they change, so that what is left to see is the executors. `tests/parity.rs` holds every
/// step of a run at the default rates, each from the same state.
#[test]
fn steps_agree_between_cpu_and_vulkan() {
    let _alone = alone();
    let Some(device) = software_device() else { return };
    for mode in ["mhc", "hc", "shortcut"] {
        let mode = format!("model.residual.mode={mode}");
        let calm = ["train.lr=1e-3", "train.embedding_lr=0.02", "train.embedding_init=1.0"];
        let mut sets = vec!["train.batch=64", "train.eval_batch=256", mode.as_str()];
        sets.extend(calm);
        let cfg = config(&sets);
        let (a, _) = train(&cfg, 3200, &Device::Cpu);
        let (b, _) = train(&cfg, 3200, &device);
        assert_eq!((a.len(), b.len()), (50, 50));
        let gap = a.iter().zip(&b).map(|(x, y)| (x - y).abs() / x.abs()).fold(0.0, f64::max);
        println!("{mode}: worst relative difference of 50 losses {gap:.1e}");
        assert!(gap < 1e-3, "{mode}: {gap:e}\n{a:?}\n{b:?}");
        assert!(a[40..].iter().sum::<f64>() < a[..10].iter().sum::<f64>(), "it learns: {a:?}");
    }
}

#[test]
fn the_default_limits_of_webgpu_suffice() {
    let _alone = alone();
    let options = GpuOptions { limits: LimitsMode::Default, checked: true };
    let gpu = match birkhoff::gpu::select(&DeviceChoice::Software, &options) {
        Ok(Selected::Gpu(g)) => g,
        _ => return println!("SKIP: no software Vulkan adapter"),
    };
    let device = Device::gpu(gpu, Arc::new(ByDevice { is_cpu: true }));
    let all = "model.modules=[{kind=\"attention\"},{kind=\"linear\"},{kind=\"cross\",form=\"low-rank\",rank=4},\
               {kind=\"gram\"},{kind=\"dlrm\"},{kind=\"conv\"},{kind=\"fm\"},{kind=\"mlp\"}]";
    let cfg = config(&["train.batch=32", "train.eval_batch=64", "model.layers=2", "model.width=8", all]);
    let (a, _) = train(&cfg, 160, &Device::Cpu);
    let (b, _) = train(&cfg, 160, &device);
    for (x, y) in a.iter().zip(&b) {
        assert!((x - y).abs() < 1e-3 * x.abs(), "{a:?} {b:?}");
    }
}

#[test]
fn two_hundred_and_fifty_six_rows_are_learned_by_heart() {
    let _alone = alone();
    let cfg = config(&[
        "train.batch=64",
        "train.eval_batch=256",
        "train.epochs=60",
        "train.lr=3e-3",
        "train.embedding_lr=0.1",
        "train.weight_decay=0.0",
        "train.schedule=constant",
        "train.patience=0",
        "model.layers=2",
    ]);
    let (_, s) = train(&cfg, 256, &Device::Cpu);
    let ne = s.metrics.ne.unwrap();
    println!("NE after {} steps on 256 rows: {ne:.4}", s.steps);
    assert!(ne < 0.05, "NE {ne}");
}

#[test]
fn twenty_two_layers_train_without_nan() {
    let _alone = alone();
    let cfg = config(&["model.layers=22", "model.width=8", "train.batch=64", "train.eval_batch=512"]);
    let (a, s) = train(&cfg, 1920, &Device::Cpu);
    assert_eq!(a.len(), 30);
    assert!(a.iter().all(|l| l.is_finite()) && s.metrics.ne.is_some_and(f64::is_finite));
    let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len() as f64;
    assert!(mean(&a[20..]) < mean(&a[..5]), "it must learn: {a:?}");
}

#[test]
fn device_memory_is_flat_over_two_thousand_steps() {
    let _alone = alone();
    // in a process of its own: what the other tests take would count here
    const ALONE: &str = "BIRKHOFF_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let own = std::env::current_exe().unwrap();
        let name = "device_memory_is_flat_over_two_thousand_steps";
        let o =
            std::process::Command::new(own).args(["--exact", name, "--nocapture"]).env(ALONE, "1").output();
        let o = o.unwrap();
        let said = String::from_utf8_lossy(&o.stdout);
        print!("{said}");
        assert!(o.status.success() && said.contains("1 passed"), "{}", String::from_utf8_lossy(&o.stderr));
        return;
    }
    let Some(device) = software_device() else { return };
    struct Watch(Vec<(usize, u64)>, usize);
    impl Report for Watch {
        fn batch(&mut self, _: usize) {
            self.1 += 1;
            if self.1 == 200 || self.1 == 2000 {
                let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
                let kb = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
                let kb = kb.and_then(|v| v.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
                self.0.push((self.1, kb));
            }
        }
        fn event(&mut self, _: &Event) -> anyhow::Result<()> {
            Ok(())
        }
    }
    let mut cfg = config(&["train.batch=16", "model.layers=1", "model.width=4", "train.eval_batch=64"]);
    cfg.train.epochs = 20;
    cfg.train.patience = 0;
    cfg.train.log_every = 20;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rows.tsv");
    Synth::new(DEFAULT_WORLD, 7).write_file(&file, 1600).unwrap();
    let schema = Schema::criteo(Transform::Log, true, Encoding::Hash { buckets: 50 });
    let (encoder, _) = criteo::fit(&file, &schema, RowPolicy::Error).unwrap();
    let encoder = Arc::new(encoder);
    let data = Arc::new(criteo::load(&file, &encoder, ReadOptions::default()).unwrap());
    let mut trainer =
        Trainer::new(&cfg, Inputs::new(encoder, &cfg, &device).unwrap(), &device, 1600).unwrap();
    let run = RunFolder::create(&dir.path().join("run"), false).unwrap();
    run.begin(&cfg).unwrap();
    let mut watch = Watch(vec![], 0);
    pollster::block_on(trainer.run(data.clone(), data, &mut run.store().unwrap(), &mut watch)).unwrap();
    println!("resident memory: {:?}", watch.0);
    let [(_, a), (_, b)] = watch.0[..] else { panic!("2,000 steps: {:?}", watch.0) };
    assert!(b <= a + 8 * 1024, "resident memory grew from {a} to {b} KiB");
}

fn features(rows: usize) -> FeatureSpec {
    let columns = (1..=26).map(|c| (format!("C{c}"), rows)).collect();
    FeatureSpec { numeric: 26, tables: vec![EmbeddingSpec { columns, ..Default::default() }] }
}

#[test]
fn the_memory_plan_halves_an_eight_layer_model() {
    let cfg = config(&["model.layers=8"]);
    let m = model(&cfg.model, &features(100), cfg.train.batch, true, 0.01, 0.0).unwrap();
    let step = training_step(m, &cfg.train);
    let (g, keep) = fuse(&step.graph, &[step.loss, step.norm2]);
    for is_cpu in [true, false] {
        let caps = GpuCaps { is_cpu, matmul: Arc::new(ByDevice { is_cpu }) };
        let (p, _) = lower(&g, &keep, &caps);
        plan::verify(&g, &keep, &p).unwrap();
        let share = p.peak() as f64 / p.unshared as f64;
        println!("planned / unshared: {share:.3}");
        assert!(share <= 0.5, "{share}");
    }
}

/// Every kernel of every module, ensemble and residual mode, at even and odd sizes, for hardware and
/// software devices: valid WGSL inside the default limits, without subgroups, and translatable to SPIR-V,
/// MSL and HLSL, so that a Mac or a Windows host is not the first to find one that is not.
#[test]
fn every_kernel_is_portable() {
    let modules = "model.modules=[{kind=\"attention\"},{kind=\"linear\"},{kind=\"cross\"},\
                   {kind=\"cross\",form=\"low-rank\",rank=3},{kind=\"cross\",form=\"vector\"},\
                   {kind=\"gram\"},{kind=\"dlrm\"},{kind=\"conv\"},{kind=\"fm\"},{kind=\"mlp\"}]";
    let mut seen = HashSet::new();
    let mut exported = vec![];
    for (mode, width, streams) in
        [("shortcut", 8, 1), ("mhc", 8, 4), ("mhc", 6, 3), ("mhc", 5, 1), ("mhc", 4, 8), ("hc", 6, 2)]
    {
        for ensemble in ["sum", "concat", "weighted"] {
            let slots = if ensemble == "concat" { "model.slots=20" } else { "model.slots=7" };
            let mut sets = vec![
                modules.to_string(),
                format!("model.residual.mode={mode}"),
                format!("model.width={width}"),
                format!("model.residual.streams={streams}"),
                format!("model.ensemble={ensemble}"),
                "model.layers=2".into(),
                slots.into(),
            ];
            if ensemble == "weighted" {
                sets.push("train.embedding=adam".into());
                let more =
                    ["embedding_l2=0.1", "mlp_dropout=0.1", "embedding_dropout=0.1", "label_smoothing=0.1"];
                sets.extend(more.map(|s| format!("train.{s}")));
                sets.push("train.positive_weight=2".into());
            }
            if ensemble == "concat" && mode == "hc" {
                sets.push("train.accumulate=2".into());
            }
            if width == 5 {
                sets.push("model.modules[0].heads=5".into());
            }
            let refs: Vec<&str> = sets.iter().map(String::as_str).collect();
            let cfg = config(&refs);
            let options = BuildOptions::new(&cfg.train, true, 0.0);
            let m = model_with(&cfg.model, &features(10), 6, &options).unwrap();
            let step = training_step(m, &cfg.train);
            let (g, keep) = fuse(&step.graph, &[step.loss, step.norm2]);
            for is_cpu in [true, false] {
                let caps = GpuCaps { is_cpu, matmul: Arc::new(ByDevice { is_cpu }) };
                for (_, l) in lower(&g, &keep, &caps).1 {
                    for k in l.kernels {
                        if !seen.insert((k.source.clone(), format!("{:?}", k.constants))) {
                            continue;
                        }
                        let constants: std::collections::BTreeMap<_, _> =
                            k.constants.iter().copied().collect();
                        exported.push(serde_json::json!({
                            "label": k.label, "entry": k.entry, "source": k.source, "constants": constants,
                        }));
                        let r = reflect(&k).unwrap_or_else(|e| panic!("{e}\n{}", k.source));
                        check_default_limits(&k.label, &r).unwrap();
                        assert!(!r.uses_subgroups, "{} needs subgroups", k.label);
                        let t = translate(&k).unwrap_or_else(|e| panic!("{e}\n{}", k.source));
                        assert!(!t.spirv.is_empty() && !t.msl.is_empty() && !t.hlsl.is_empty());
                    }
                }
            }
        }
    }
    println!("{} distinct kernels", seen.len());
    // for the browser tests, whose compiler is stricter about uniformity
    if let Some(path) = std::env::var_os("BIRKHOFF_KERNELS") {
        std::fs::write(path, serde_json::to_vec(&exported).unwrap()).unwrap();
    }
    assert!(seen.len() > 100);
}
