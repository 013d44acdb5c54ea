//! Stopping and going on: a run that was stopped, in whatever way, ends as the one that never was.

mod world;

use birkhoff::graph::exec::Device;
use birkhoff::model::config::Config;
use birkhoff::train::infer::Inputs;
use birkhoff::train::run::RunFolder;
use birkhoff::train::trainer::{Event, Interrupted, Report, Summary, Trainer};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use world::{World, world};

fn s(p: &Path) -> &str {
    p.to_str().unwrap()
}

// ---------------------------------------------------------------- in process

/// Leaves after each of these steps, as by Ctrl-C.
struct Leave {
    at: Vec<u64>,
    batches: u64,
}

impl Report for Leave {
    fn batch(&mut self, _: usize) {
        self.batches += 1;
    }

    fn event(&mut self, _: &Event) -> anyhow::Result<()> {
        Ok(())
    }

    fn interrupt(&mut self) -> bool {
        let leave = self.at.first().is_some_and(|&s| self.batches >= s);
        if leave {
            self.at.remove(0);
        }
        leave
    }
}

impl World {
    fn trainer(&self, cfg: &Config, device: &Device) -> Trainer {
        let inputs = Inputs::new(self.encoder.clone(), cfg, device).unwrap();
        Trainer::new(cfg, inputs, device, self.data.rows.len()).unwrap()
    }

    /// Trains into `name`, leaving and going on after each of `at` batches (counted over the whole run).
    fn train(&self, name: &str, cfg: &Config, at: &[u64], device: &Device) -> (PathBuf, Summary) {
        let path = self.dir.path().join(name);
        let run = RunFolder::create(&path, false).unwrap();
        run.begin(cfg).unwrap();
        drop(run);
        let mut leave = Leave { at: at.to_vec(), batches: 0 };
        loop {
            let run = RunFolder::resume(&path).unwrap();
            let mut trainer = self.trainer(cfg, device);
            let resumed = trainer.resume(&run, &[], &mut |l| println!("{l}")).unwrap();
            if let Some(r) = &resumed {
                run.rewind(cfg, r.step, r.lines).unwrap();
            }
            let mut store = run.store().unwrap();
            let left = leave.at.len();
            match pollster::block_on(trainer.run(
                self.data.clone(),
                self.valid.clone(),
                &mut store,
                &mut leave,
            )) {
                Ok(summary) => return (path, summary),
                Err(e) => {
                    assert!(e.is::<Interrupted>(), "{e:#}");
                    assert_eq!(leave.at.len() + 1, left);
                    assert!(!run.is_finished(), "an interrupted run is not finished");
                }
            }
        }
    }
}

/// The log without what depends on the clock.
fn log(run: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let strip = |l: &str| {
        let mut v: serde_json::Value = serde_json::from_str(l).expect("whole lines only");
        let o = v.as_object_mut().unwrap();
        for key in ["seconds", "rows_per_s", "diagnosis_seconds", "data_wait", "times"] {
            o.remove(key);
        }
        v
    };
    text.lines().map(strip).collect()
}

fn weights(run: &Path) -> Vec<u8> {
    std::fs::read(run.join("weights.safetensors")).unwrap()
}

fn same(a: &Path, b: &Path, what: &str) {
    let (x, y) = (log(a), log(b));
    for (i, (x, y)) in x.iter().zip(&y).enumerate() {
        assert_eq!(x, y, "{what}: line {}", i + 1);
    }
    assert_eq!(x.len(), y.len(), "{what}");
    assert!(weights(a) == weights(b), "{what}: the best weights differ");
    let last = |run: &Path| {
        let all = RunFolder::open(run).unwrap().checkpoints();
        let (step, path) = all.last().expect("a checkpoint").clone();
        let t = std::fs::read(path).unwrap();
        let data = safetensors::SafeTensors::deserialize(&t).unwrap();
        let mut v: Vec<(String, Vec<u8>)> =
            data.tensors().into_iter().map(|(n, v)| (n, v.data().to_vec())).collect();
        v.sort();
        (step, v)
    };
    assert!(last(a) == last(b), "{what}: the final states differ");
}

fn config(sets: &[&str]) -> Config {
    let small = [
        "model.layers=2",
        "model.width=8",
        "train.batch=50",
        "train.eval_batch=64",
        "train.epochs=2",
        "train.log_every=3",
        "train.eval_every=7",
        "train.diagnose_every=5",
        "train.patience=0",
        "train.checkpoint_every=4",
    ];
    let all: Vec<String> = small.iter().chain(sets).map(|s| s.to_string()).collect();
    Config::load(None, &all).unwrap()
}

#[test]
fn a_run_that_was_interrupted_equals_one_that_was_not_in_every_mode() {
    let world = world(730, 150); // 15 batches an epoch, the last one short
    let extra: [&[&str]; 4] = [
        &[
            "model.residual.mode=mhc",
            "train.embedding=adam",
            "train.embedding_dropout=0.2",
            "train.mlp_dropout=0.3",
        ],
        &[
            "model.residual.mode=hc",
            "train.accumulate=1",
            "train.label_smoothing=0.1",
            "train.embedding_l2=0.01",
        ],
        &["model.residual.mode=shortcut", "train.schedule=step", "model.slots=9", "train.mlp_dropout=0.1"],
        // 15 batches are 8 updates, the last of one batch
        &[
            "train.accumulate=2",
            "train.epochs=4",
            "train.mlp_dropout=0.2",
            "train.schedule=plateau",
            "train.eval_every=3",
            "train.monitor=auc",
        ],
    ];
    for sets in extra {
        let cfg = config(sets);
        let (whole, a) = world.train(&format!("whole {sets:?}").replace('/', "_"), &cfg, &[], &Device::Cpu);
        // in a window, at an evaluation, at the end of an epoch, after its first batch, just before the end
        let (parts, b) = world.train(
            &format!("parts {sets:?}").replace('/', "_"),
            &cfg,
            &[4, 7, 15, 16, 29],
            &Device::Cpu,
        );
        same(&whole, &parts, &format!("{sets:?}"));
        assert_eq!((a.steps, a.best_step, a.metrics), (b.steps, b.best_step, b.metrics));
        assert_eq!(a.steps, if cfg.train.accumulate == 2 { 32 } else { 30 });
    }
}

#[test]
fn a_checkpoint_changes_no_loss_and_only_the_newest_are_kept() {
    let world = world(400, 150);
    let (a, _) = world.train("never", &config(&["train.checkpoint_every=0"]), &[], &Device::Cpu);
    let often = config(&["train.checkpoint_every=1", "train.keep=2"]);
    let (b, _) = world.train("often", &often, &[], &Device::Cpu);
    assert_eq!(log(&a), log(&b));
    let steps: Vec<u64> = RunFolder::open(&b).unwrap().checkpoints().iter().map(|c| c.0).collect();
    assert_eq!(steps, [15, 16]);
    let never = RunFolder::open(&a).unwrap().checkpoints();
    assert_eq!(never.len(), 3, "{never:?}");
}

#[test]
fn patience_and_the_best_so_far_survive() {
    let world = world(300, 150);
    // learns by heart: the validation gets worse soon
    let cfg = config(&[
        "train.epochs=30",
        "train.eval_every=2",
        "train.patience=4",
        "train.lr=2e-2",
        "train.diagnose_every=0",
    ]);
    let (a, s) = world.train("whole", &cfg, &[], &Device::Cpu);
    assert!(s.stopped_early && s.steps > s.best_step, "{s:?}");
    let stops: Vec<u64> = (1..s.steps).collect();
    let (b, t) = world.train("parts", &cfg, &stops, &Device::Cpu);
    same(&a, &b, "patience");
    assert_eq!((s.steps, s.best_step, s.stopped_early), (t.steps, t.best_step, t.stopped_early));
}

/// Stops after 9 batches, into a new folder.
fn stopped(world: &World, name: &str, cfg: &Config) -> PathBuf {
    let path = world.dir.path().join(name);
    let run = RunFolder::create(&path, false).unwrap();
    run.begin(cfg).unwrap();
    let mut trainer = world.trainer(cfg, &Device::Cpu);
    let mut leave = Leave { at: vec![9], batches: 0 };
    let e = pollster::block_on(trainer.run(
        world.data.clone(),
        world.valid.clone(),
        &mut run.store().unwrap(),
        &mut leave,
    ));
    assert_eq!(e.unwrap_err().downcast_ref::<Interrupted>(), Some(&Interrupted { step: 9 }));
    path
}

#[test]
fn damaged_checkpoints_are_passed_over_and_foreign_ones_refused() {
    let world = world(730, 150);
    let cfg = config(&[]);
    let (whole, _) = world.train("whole", &cfg, &[], &Device::Cpu);
    let path = stopped(&world, "stopped", &cfg);
    let run = RunFolder::resume(&path).unwrap();
    let all = run.checkpoints();
    let steps: Vec<u64> = all.iter().map(|c| c.0).collect();
    assert_eq!(steps, [7, 8, 9]);
    let good = std::fs::read(&all[2].1).unwrap();

    // of another configuration: refused, by name
    let refused = |cfg: &Config, on_purpose: &[String]| {
        let mut t = world.trainer(cfg, &Device::Cpu);
        t.resume(&run, on_purpose, &mut |l| panic!("{l}")).map(|_| ()).unwrap_err().to_string()
    };
    for (set, key) in [
        ("model.width=4", "model.width = 8, now it is 4"),
        ("model.layers=3", "model.layers = 2, now it is 3"),
        ("model.residual.mode=hc", "model.residual.mode = \"mhc\", now it is \"hc\""),
        ("train.seed=9", "train.seed = 1, now it is 9"),
        ("train.embedding=adam", "train.embedding = \"adagrad\", now it is \"adam\""),
        ("train.lr=1e-3", "train.lr = 0.005, the run's config.toml says 0.001"),
    ] {
        let e = refused(&config(&[set]), &[]);
        assert!(e.contains(key) && e.contains("step-000000009.safetensors") && !e.contains('\n'), "{e}");
    }
    let e = refused(&config(&["model.width=4"]), &["model.width".into()]);
    assert!(e.contains("model.width"), "not even on purpose: {e}");
    // but the rest of a run may have another rate, on purpose
    let mut said = vec![];
    let mut t = world.trainer(&config(&["train.lr=1e-3"]), &Device::Cpu);
    let r = t.resume(&run, &["train.lr".into()], &mut |l| said.push(l)).unwrap().unwrap();
    assert_eq!((r.step, said), (9, vec!["from step 9 on: train.lr = 0.001 (so far 0.005)".to_string()]));
    // other rows, other vocabularies
    let mut few = Trainer::new(
        &cfg,
        Inputs::new(world.encoder.clone(), &cfg, &Device::Cpu).unwrap(),
        &Device::Cpu,
        729,
    )
    .unwrap();
    let e = few.resume(&run, &[], &mut |_| ()).unwrap_err().to_string();
    assert!(e.contains("730 rows") && e.contains("729"), "{e}");
    let other = self::world(731, 150);
    let mut t = Trainer::new(
        &cfg,
        Inputs::new(other.encoder.clone(), &cfg, &Device::Cpu).unwrap(),
        &Device::Cpu,
        730,
    )
    .unwrap();
    let e = t.resume(&run, &[], &mut |_| ()).unwrap_err().to_string();
    assert!(e.contains("vocab.json") && !e.contains('\n'), "{e}");

    // damage of every kind: the one before, with a line; and the end is the same
    let flip = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 4;
        bytes
    };
    let head = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let text = String::from_utf8_lossy(&good[..head]).into_owned();
    let damage: Vec<Vec<u8>> = vec![
        good[..good.len() - 5].to_vec(),
        good[..20].to_vec(),
        vec![],
        flip(good.len() - 3),
        flip(head + 11),
        flip(text.find("bad_evals").unwrap() + 13), // a digit of the state
        flip(text.find("wq").unwrap()),             // a tensor's name
        flip(3),
    ];
    for (i, bytes) in damage.iter().enumerate() {
        std::fs::write(&all[2].1, bytes).unwrap();
        let mut said = vec![];
        let mut t = world.trainer(&cfg, &Device::Cpu);
        let r = t.resume(&run, &[], &mut |l| said.push(l)).unwrap_or_else(|e| panic!("damage {i}: {e:#}"));
        assert_eq!(r.unwrap().step, 8, "damage {i}");
        assert_eq!(said.len(), 1, "damage {i}: {said:?}");
        assert!(said[0].contains("step-000000009.safetensors") && said[0].contains("going back"), "{said:?}");
        assert!(!said[0].contains('\n'));
    }
    let mut t = world.trainer(&cfg, &Device::Cpu);
    let r = t.resume(&run, &[], &mut |_| ()).unwrap().unwrap();
    run.rewind(&cfg, r.step, r.lines).unwrap();
    let mut leave = Leave { at: vec![], batches: 0 };
    pollster::block_on(t.run(world.data.clone(), world.valid.clone(), &mut run.store().unwrap(), &mut leave))
        .unwrap();
    same(&whole, &path, "after damage");

    // nothing left to go on from
    for (_, c) in run.checkpoints() {
        std::fs::write(c, b"gone").unwrap();
    }
    let mut t = world.trainer(&cfg, &Device::Cpu);
    let e = t.resume(&run, &[], &mut |_| ()).unwrap_err().to_string();
    assert!(e.contains("none of its 3 checkpoints") && e.contains("--out"), "{e}");
}

#[test]
fn a_device_goes_on_as_well() {
    let Some(device) = birkhoff::graph::testing::software_device() else { return };
    let world = world(400, 150);
    let cfg = config(&["model.layers=1", "train.epochs=1"]);
    let (a, _) = world.train("whole", &cfg, &[], &device);
    let (b, _) = world.train("parts", &cfg, &[3, 5], &device);
    same(&a, &b, "software Vulkan");
}

// ---------------------------------------------------------------- the program

fn birkhoff(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_birkhoff")).args(args).output().expect("the binary runs")
}

fn ok(args: &[&str]) -> Output {
    let o = birkhoff(args);
    assert!(o.status.success(), "{args:?}: {}", String::from_utf8_lossy(&o.stderr));
    o
}

fn files(dir: &Path) -> [PathBuf; 2] {
    let [train, valid] = ["train.tsv", "valid.tsv"].map(|n| dir.join(n));
    ok(&["synth", "--rows", "1500", "--seed", "1", "--out", s(&train)]);
    ok(&["synth", "--rows", "300", "--seed", "2", "--out", s(&valid)]);
    [train, valid]
}

fn start<'a>(train: &'a Path, valid: &'a Path, run: &'a Path) -> Vec<&'a str> {
    let mut a = vec!["train", "--train", s(train), "--valid", s(valid), "--out", s(run), "--device", "cpu"];
    for set in [
        "model.layers=2",
        "model.width=8",
        "train.batch=32",
        "train.eval_batch=64",
        "train.epochs=3",
        "train.log_every=1",
        "train.eval_every=20",
        "train.diagnose_every=10",
        "train.patience=0",
        "train.checkpoint_every=3",
    ] {
        a.extend(["--set", set]);
    }
    a.push("--quiet");
    a
}

#[test]
fn killed_twenty_times_at_random_it_ends_as_if_it_never_was() {
    let dir = tempfile::tempdir().unwrap();
    let [train, valid] = files(dir.path());
    let (whole, run) = (dir.path().join("whole"), dir.path().join("killed"));
    let long = |run| [start(&train, &valid, run), vec!["--epochs", "5"]].concat();
    ok(&long(&whole));

    let mut random = 0x2545_F491_4F6C_DD1Du64;
    let mut share = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) as f64 / (1u64 << 53) as f64
    };
    let steps = || std::fs::read_to_string(run.join("metrics.jsonl")).map_or(0, |t| t.lines().count());
    let mut kills = 0;
    let mut reached = vec![];
    let first = long(&run);
    while kills < 20 {
        // a run that was killed before it was one has to be started again
        let resume = ["train", "--resume", s(&run), "--quiet"];
        let args: &[&str] = if run.join("config.toml").exists() { &resume } else { &first };
        let mut child = Command::new(env!("CARGO_BIN_EXE_birkhoff"))
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starts");
        // a quarter of the kills come while it starts, the others within some ten lines of the log, whatever it does then
        if kills % 4 == 3 {
            std::thread::sleep(Duration::from_secs_f64(0.25 * share()));
        } else {
            let (before, more) = (steps(), (9.0 * share()) as usize);
            while child.try_wait().expect("waits").is_none() && steps() == before {
                std::thread::sleep(Duration::from_millis(1));
            }
            let before = steps();
            while child.try_wait().expect("waits").is_none() && steps() < before + more {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_secs_f64(0.03 * share()));
        }
        if let Some(status) = child.try_wait().expect("waits") {
            let o = child.wait_with_output().unwrap();
            assert!(status.success(), "{args:?}: {}", String::from_utf8_lossy(&o.stderr));
            break;
        }
        child.kill().expect("kills");
        child.wait().expect("ends");
        kills += 1;
        let at = run.join("checkpoints");
        let newest = std::fs::read_dir(at).into_iter().flatten().flatten();
        let newest =
            newest.filter_map(|e| e.file_name().into_string().ok()).filter(|n| n.starts_with("step-"));
        reached.push(newest.max().map_or(String::new(), |n| n[5..14].trim_start_matches('0').to_string()));
    }
    println!("killed {kills} times; newest checkpoints: {reached:?}");
    assert_eq!(kills, 20, "the run ended too soon to be killed 20 times: {reached:?}");
    if !run.join("summary.json").exists() {
        ok(&["train", "--resume", s(&run), "--quiet"]);
    }
    same(&whole, &run, "killed");
    let left: Vec<String> = std::fs::read_dir(run.join("checkpoints"))
        .unwrap()
        .chain(std::fs::read_dir(&run).unwrap())
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|n| n.contains(".tmp"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_and_says_how_to_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let [train, valid] = files(dir.path());
    let (whole, run) = (dir.path().join("whole"), dir.path().join("run"));
    ok(&start(&train, &valid, &whole));
    let child = Command::new(env!("CARGO_BIN_EXE_birkhoff"))
        .args(start(&train, &valid, &run))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    let begin = Instant::now();
    let lines = || std::fs::read_to_string(run.join("metrics.jsonl")).map_or(0, |t| t.lines().count());
    while lines() < 15 {
        assert!(begin.elapsed() < Duration::from_secs(60), "it does not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let o = child.wait_with_output().unwrap();
    let err = String::from_utf8_lossy(&o.stderr);
    assert_eq!(o.status.code(), Some(130), "{err}");
    assert!(err.contains(&format!("birkhoff train --resume {}", run.display())), "{err}");
    assert!(!run.join("summary.json").exists() && o.stdout.is_empty());
    // another place for the data, and everything else as it was
    let moved = dir.path().join("moved.tsv");
    std::fs::rename(&train, &moved).unwrap();
    let o = birkhoff(&["train", "--resume", s(&run), "--quiet"]);
    assert!(!o.status.success() && String::from_utf8_lossy(&o.stderr).contains("train.tsv"));
    ok(&["train", "--resume", s(&run), "--train", s(&moved), "--quiet"]);
    same(&whole, &run, "Ctrl-C");

    // finished: more only on request
    let o = birkhoff(&["train", "--resume", s(&run), "--quiet"]);
    let err = String::from_utf8_lossy(&o.stderr);
    assert!(
        o.status.code() == Some(2) && err.contains("3 of 3 epochs") && err.contains("--epochs 4"),
        "{err}"
    );
    assert!(run.join("summary.json").exists(), "nothing is changed by the refusal");
    let o = ok(&["train", "--resume", s(&run), "--epochs", "4"]);
    let err = String::from_utf8_lossy(&o.stderr);
    assert!(err.contains("cosine schedule of 4 epochs"), "{err}");
    let steps: Vec<u64> =
        log(&run).iter().filter(|l| l["type"] == "step").map(|l| l["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=188).collect::<Vec<u64>>());
    let summaries = log(&run).iter().filter(|l| l["type"] == "summary").count();
    assert_eq!(summaries, 1);
    for (args, words) in [
        (vec!["train", "--resume", "/nonexistent/run"], "no such run folder"),
        (vec!["train", "--resume", s(dir.path())], "no config.toml"),
        (vec!["train", "--resume", s(&run), "--set", "model.width=4"], "model.width"),
        (vec!["train", "--resume", s(&run), "--epochs", "2"], "finished"),
    ] {
        let o = birkhoff(&args);
        let err = String::from_utf8_lossy(&o.stderr);
        assert!(o.status.code() == Some(2) && err.contains(words), "{args:?}: {err}");
    }
}

#[test]
fn an_absurd_rate_stops_with_the_tensor_and_leaves_a_checkpoint_to_go_on_from() {
    let dir = tempfile::tempdir().unwrap();
    let [train, valid] = files(dir.path());
    let run = dir.path().join("run");
    let mut args = start(&train, &valid, &run);
    for set in [
        "train.lr=1000",
        "train.embedding_lr=1000",
        "train.clip=0",
        "train.warmup=30",
        "train.diagnose_every=0",
    ] {
        args.extend(["--set", set]);
    }
    let o = birkhoff(&args);
    let err = String::from_utf8_lossy(&o.stderr);
    println!("{err}");
    assert_eq!((o.status.code(), err.lines().count()), (Some(2), 1), "{err}");
    let step: u64 = err.split("step ").nth(1).and_then(|t| t.split(':').next()).unwrap().parse().unwrap();
    // every step before it was logged with its loss, and none of it or after it
    let steps: Vec<u64> =
        log(&run).iter().filter(|l| l["type"] == "step").map(|l| l["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..step).collect::<Vec<u64>>());
    assert!(log(&run).iter().filter(|l| l["type"] == "step").all(|l| l["loss"].is_f64()));
    let newest = RunFolder::resume(&run).unwrap().checkpoints().last().unwrap().0;
    assert!(err.contains(&format!("the checkpoint of step {newest} is kept")), "{err}");
    assert!(newest < step && step - newest <= 4, "{newest} {step}");
    // the same again, at the same step; and the way out
    let o = birkhoff(&["train", "--resume", s(&run), "--quiet"]);
    let again = String::from_utf8_lossy(&o.stderr);
    assert_eq!(err, again);
    ok(&[
        "train",
        "--resume",
        s(&run),
        "--set",
        "train.lr=1e-6",
        "--set",
        "train.embedding_lr=1e-6",
        "--set",
        "train.clip=1",
        "--quiet",
    ]);
}
