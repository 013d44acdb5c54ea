//! Several ranks train what one would: the same losses, whatever lies where and however values travel.

mod world;

use birkhoff::collective::{Communicator, Wire};
use birkhoff::graph::exec::Device;
use birkhoff::model::build::FeatureSpec;
use birkhoff::model::config::Config;
use birkhoff::parallel::dense::DenseOptions;
use birkhoff::parallel::layout::{Layout, Part};
use birkhoff::train::checkpoint::{self, TensorSpec};
use birkhoff::train::history::History;
use birkhoff::train::infer::Inputs;
use birkhoff::train::ranks::{RankOptions, Ranks};
use birkhoff::train::run::RunFolder;
use birkhoff::train::store::{BesideStore, MemoryStore, Store};
use birkhoff::train::tally::RankRecord;
use birkhoff::train::trainer::{Event, Interrupted, Report, Summary, Trainer};
use std::path::Path;
use std::time::Duration;
use world::{World, world};

/// Each step's loss.
#[derive(Default)]
struct Losses {
    losses: Vec<f64>,
    /// What the ranks did between them.
    ranks: Vec<RankRecord>,
    /// Interrupts the run after so many batches.
    leave: Option<usize>,
    batches: usize,
}

impl Report for Losses {
    fn event(&mut self, e: &Event) -> anyhow::Result<()> {
        match e {
            Event::Step { loss, .. } => self.losses.push(*loss),
            Event::Ranks(r) => self.ranks.push(r.clone()),
            _ => {}
        }
        Ok(())
    }
    fn batch(&mut self, _: usize) {
        self.batches += 1;
    }
    fn interrupt(&mut self) -> bool {
        self.leave.is_some_and(|n| self.batches >= n)
    }
}

impl Losses {
    /// A record of all ranks with every loss, of that step alone.
    fn check_ranks(&self, world: usize, summary: Option<&Summary>) {
        assert_eq!(self.ranks.len(), self.losses.len());
        for r in &self.ranks {
            assert_eq!((r.steps, r.ranks.len()), (1, world));
            assert!(r.steps_seconds > 0.0 && r.ranks.iter().all(|l| l.sent > 0 && l.communicating > 0.0));
        }
        let Some(whole) = summary.and_then(|s| s.ranks.as_ref()) else { return };
        for (i, all) in whole.ranks.iter().enumerate() {
            let steps: u64 = self.ranks.iter().map(|r| r.ranks[i].sent).sum();
            assert!(steps < all.sent, "evaluations are in the summary only");
        }
    }
}

fn config(sets: &[&str]) -> Config {
    let small = [
        "model.layers=2",
        "model.width=8",
        "model.residual.mode=mhc",
        "train.log_every=1",
        "train.diagnose_every=20",
        "train.eval_batch=16",
        "train.epochs=1",
        "train.clip=1.0",
        // at the usual rate a rounding grows to 1e-2 in 50 steps, whoever makes it (see tests/parity.rs)
        "train.embedding_lr=0.002",
    ];
    let sets: Vec<String> = small.iter().chain(sets).map(|s| s.to_string()).collect();
    Config::load(None, &sets).unwrap()
}

type Place = fn(usize, &FeatureSpec, usize) -> Layout;

/// Whole tables dealt to the ranks in turn, the largest first.
fn in_turn(world: usize, features: &FeatureSpec, width: usize) -> Layout {
    let mut all: Vec<&(String, usize)> = features.tables.iter().flat_map(|t| &t.columns).collect();
    all.sort_by_key(|(name, rows)| (std::cmp::Reverse(*rows), name));
    let parts: Vec<_> = all
        .iter()
        .enumerate()
        .map(|(i, (column, rows))| Part { column, rows: 0..*rows as u32, columns: 0..width, rank: i % world })
        .collect();
    Layout::new(world, features, width, &parts).unwrap()
}

/// Rows of every table over all ranks, unevenly.
fn by_rows(world: usize, features: &FeatureSpec, width: usize) -> Layout {
    let mut parts = vec![];
    for (i, (column, rows)) in features.tables.iter().flat_map(|t| &t.columns).enumerate() {
        let mut at = 0;
        for k in 0..world {
            let end = if k + 1 == world { *rows } else { (at + 1 + (i + k) % 5).min(*rows) };
            let rank = (i + k) % world;
            parts.push(Part { column, rows: at as u32..end as u32, columns: 0..width, rank });
            at = end;
        }
    }
    Layout::new(world, features, width, &parts).unwrap()
}

/// Half of the columns of every row on one rank, half on another.
fn by_columns(world: usize, features: &FeatureSpec, width: usize) -> Layout {
    let mut parts = vec![];
    for (i, (column, rows)) in features.tables.iter().flat_map(|t| &t.columns).enumerate() {
        for k in 0..2 {
            let columns = if k == 0 { 0..width / 2 } else { width / 2..width };
            parts.push(Part { column, rows: 0..*rows as u32, columns, rank: (i + k) % world });
        }
    }
    Layout::new(world, features, width, &parts).unwrap()
}

/// Everything on the last rank: the others hold nothing.
fn all_on_the_last(world: usize, features: &FeatureSpec, width: usize) -> Layout {
    let columns = features.tables.iter().flat_map(|t| &t.columns);
    let parts: Vec<_> = columns
        .map(|(column, rows)| Part { column, rows: 0..*rows as u32, columns: 0..width, rank: world - 1 })
        .collect();
    Layout::new(world, features, width, &parts).unwrap()
}

impl World {
    fn one(&self, cfg: &Config, device: &Device) -> (Vec<f64>, Summary) {
        let inputs = Inputs::new(self.encoder.clone(), cfg, device).unwrap();
        let mut trainer = Trainer::new(cfg, inputs, device, self.data.rows.len()).unwrap();
        let mut report = Losses::default();
        let mut store = MemoryStore::default();
        let run = trainer.run(self.data.clone(), self.valid.clone(), &mut store, &mut report);
        let summary = pollster::block_on(run).unwrap();
        (report.losses, summary)
    }

    /// Trains on a group of threads; what the ranks saw. With a folder rank 0 keeps its files there, and goes on from them.
    fn many(
        &self,
        cfg: &Config,
        device: &Device,
        ranks: usize,
        place: Place,
        options: &RankOptions,
        folder: Option<&Path>,
        leave: Option<usize>,
    ) -> Vec<(Vec<f64>, Option<Summary>)> {
        let group = Communicator::local(ranks, Duration::from_secs(60));
        std::thread::scope(|s| {
            let threads: Vec<_> = group
                .into_iter()
                .map(|comm| {
                    s.spawn(move || {
                        let inputs = Inputs::new(self.encoder.clone(), cfg, device).unwrap();
                        let layout = place(ranks, &inputs.features, cfg.model.width);
                        let over = Ranks::new(comm.clone(), layout, options.clone()).unwrap();
                        over.agree("configuration", 7).unwrap();
                        let rows = self.data.rows.len();
                        let mut trainer = Trainer::over(cfg, inputs, device, rows, Some(over)).unwrap();
                        let first = comm.rank() == 0;
                        let mut store: Box<dyn Store> = Box::new(BesideStore::default());
                        let mut lock = None;
                        if let Some(folder) = folder {
                            if first {
                                let run = RunFolder::resume(folder).unwrap();
                                let at = trainer.resume(&run, &[], &mut |l| println!("{l}")).unwrap();
                                if let Some(r) = &at {
                                    run.rewind(cfg, r.step, r.lines).unwrap();
                                }
                                store = Box::new(run.store().unwrap());
                                lock = Some(run);
                            } else {
                                // the last of three sees no files
                                let sees = ranks < 3 || comm.rank() + 1 < ranks;
                                let folder = if sees { folder } else { Path::new("nowhere") };
                                trainer.follow(folder).unwrap();
                                store = Box::new(BesideStore::new(folder));
                            }
                        } else if first {
                            store = Box::<MemoryStore>::default();
                        }
                        // one rank asks, all leave
                        let leave = leave.filter(|_| comm.rank() == ranks - 1);
                        let mut report = Losses { leave, ..Losses::default() };
                        let run =
                            trainer.run(self.data.clone(), self.valid.clone(), store.as_mut(), &mut report);
                        let summary = match pollster::block_on(run) {
                            Ok(s) => Some(s),
                            Err(e) if e.is::<Interrupted>() => None,
                            Err(e) => panic!("rank {}: {e:#}", comm.rank()),
                        };
                        if ranks > 1 {
                            report.check_ranks(ranks, summary.as_ref());
                        }
                        drop(lock);
                        comm.finish().unwrap();
                        (report.losses, summary)
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().expect("no panic")).collect()
        })
    }
}

fn near(a: &[f64], b: &[f64], bound: f64, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("{what}: worst difference of losses {worst:.1e} over {} steps", a.len());
    assert!(worst <= bound, "{what}: {worst}");
}

/// 1 rank x batch 4B and 4 ranks x batch B, 50 steps and a last, smaller one.
#[test]
fn four_ranks_train_as_one() {
    let world = world(1613, 155);
    let device = Device::Cpu;
    let same = |sets: &[&str], places: &[(&str, Place)]| {
        let ranks = 4;
        let b = 32 / ranks;
        let (one, summary) = world.one(&config(&[sets, &["train.batch=32"]].concat()), &device);
        assert_eq!(one.len(), 51);
        for (name, place) in places {
            let cfg = config(&[sets, &[&format!("train.batch={b}")]].concat());
            let all = world.many(&cfg, &device, ranks, *place, &RankOptions::default(), None, None);
            near(&all[0].0, &one, 1e-5, &format!("{ranks} ranks, {name}"));
            for (losses, s) in &all {
                assert_eq!(losses, &all[0].0, "all ranks see the same");
                let s = s.as_ref().unwrap();
                assert_eq!(s.metrics, all[0].1.as_ref().unwrap().metrics);
                assert_eq!((s.steps, s.metrics.rows), (summary.steps, 155));
                assert!((s.metrics.logloss - summary.metrics.logloss).abs() < 1e-5);
                let r = s.ranks.as_ref().unwrap();
                assert!(r.world == ranks && r.ranks.iter().all(|l| l.sent > 0));
            }
        }
    };
    same(&[], &[("tables in turn", in_turn), ("by rows", by_rows), ("all on the last", all_on_the_last)]);
    same(&["train.embedding=adam", "train.embedding_lr=1e-3"], &[("by columns", by_columns)]);
    // the penalty of a row counts its occurrences on all ranks
    let penalty = ["train.embedding_l2=20", "train.embedding_l2_frequency=true"];
    same(&penalty, &[("with a penalty", by_rows)]);
}

/// A step of two batches a rank.
#[test]
fn ranks_accumulate() {
    let world = world(800, 155);
    let (one, _) = world.one(&config(&["train.batch=32"]), &Device::Cpu);
    let cfg = config(&["train.batch=8", "train.accumulate=2"]);
    let all = world.many(&cfg, &Device::Cpu, 2, by_rows, &RankOptions::default(), None, None);
    near(&all[0].0, &one, 1e-5, "2 ranks x 2 batches");
}

/// Narrow formats and small buckets change little, and nothing between ranks; without overlap nothing at all changes.
#[test]
fn formats_buckets_overlap() {
    let world = world(800, 155);
    let cfg = config(&["train.batch=8"]);
    let losses = |options: &RankOptions| {
        let all = world.many(&cfg, &Device::Cpu, 3, in_turn, options, None, None);
        assert!(all.iter().all(|a| a.0 == all[0].0), "all ranks see the same");
        all.into_iter().next().unwrap().0
    };
    let exact = losses(&RankOptions::default());
    let dense = |bucket, overlap, wire| DenseOptions { bucket, overlap, wire };
    let apart = RankOptions { dense: dense(4 << 20, false, Wire::F32), tables: Wire::F32 };
    assert_eq!(losses(&apart), exact, "overlap changes when, not what");
    let small = RankOptions { dense: dense(4096, true, Wire::F32), tables: Wire::F32 };
    near(&losses(&small), &exact, 1e-5, "small buckets");
    for (wire, bound) in [(Wire::Bf16, 0.03), (Wire::Int8, 0.05)] {
        let narrow = RankOptions { dense: dense(4 << 20, true, wire), tables: Wire::Bf16 };
        let narrow = losses(&narrow);
        near(&narrow, &exact, bound, &wire.to_string());
        assert_ne!(narrow, exact);
    }
}

/// Stopped on two ranks by the wish of one, gone on with on three, and on one: as if never stopped.
#[test]
fn another_number_of_ranks_goes_on() {
    let world = world(960, 155);
    let device = Device::Cpu;
    let (whole, summary) = world.one(&config(&["train.batch=24"]), &device);
    let folder = world.dir.path().join("run");
    let run = RunFolder::create(&folder, false).unwrap();
    let on = |ranks: usize, leave| {
        let cfg = config(&[&format!("train.batch={}", 24 / ranks)]);
        world.many(&cfg, &device, ranks, by_rows, &RankOptions::default(), Some(&folder), leave)
    };
    run.begin(&config(&["train.batch=12"])).unwrap();
    drop(run);
    let mut seen = on(2, Some(10))[0].0.clone();
    // what is wished after the tenth is known to all with the eleventh
    assert_eq!(seen.len(), 11);
    seen.extend(on(3, Some(7))[0].0.clone());
    assert_eq!(seen.len(), 19);
    let last = on(1, None);
    seen.extend(last[0].0.clone());
    near(&seen, &whole, 1e-5, "2, 3 and 1 ranks");
    // what they did is in the log, step by step, as if never stopped
    let log = History::read(&folder).unwrap();
    assert!(log.problems.is_empty(), "{:?}", log.problems);
    let ranks = |e: &Event| if let Event::Ranks(r) = e { Some((r.step, r.ranks.len())) } else { None };
    let told: Vec<_> = log.events.iter().filter_map(ranks).collect();
    let expected: Vec<_> = (1..=19).map(|s| (s, if s <= 11 { 2 } else { 3 })).collect();
    assert_eq!(told, expected);
    let end = last[0].1.as_ref().unwrap();
    assert!((end.metrics.logloss - summary.metrics.logloss).abs() < 1e-5);
}

/// What rounding took away is a part of the state: stopped and gone on with, the losses are the same to the last bit.
#[test]
fn rounding_is_remembered() {
    let world = world(640, 155);
    let cfg = config(&["train.batch=16"]);
    let dense = DenseOptions { bucket: 16 << 10, wire: Wire::Int8, ..DenseOptions::default() };
    let options = RankOptions { dense, ..RankOptions::default() };
    let train = |name: &str, leave| {
        let run = world.dir.path().join(name);
        if !run.exists() {
            RunFolder::create(&run, false).unwrap().begin(&cfg).unwrap();
        }
        world.many(&cfg, &Device::Cpu, 2, in_turn, &options, Some(&run), leave)[0].0.clone()
    };
    let whole = train("whole", None);
    let mut parts = train("parts", Some(8));
    assert_eq!(parts.len(), 9);
    parts.extend(train("parts", None));
    assert_eq!(parts, whole);
}

/// What lies in a run's newest checkpoint, as one file, by name.
fn gathered(run: &Path) -> (u64, Vec<(TensorSpec, Vec<f32>)>) {
    let file = run.join("gathered.safetensors");
    let (step, specs) = birkhoff::export::save_state(run, None, &file).unwrap();
    let read = checkpoint::load(&file, &specs).unwrap();
    (step, specs.into_iter().zip(read.tensors).collect())
}

/// Each rank writes what lies on it; put together, the files are the same bits whatever lay where and whoever wrote them, and
/// training goes on from them as from one.
#[test]
fn checkpoints_in_parts_are_one() {
    let world = world(960, 155);
    let device = Device::Cpu;
    let folder = |name: &str| world.dir.path().join(name);
    let train = |run: &Path, ranks: usize, place: Place, leave| {
        // without clipping, whose norm is a sum by ranks
        let batch = format!("train.batch={}", 24 / ranks);
        let sets = [batch.as_str(), "train.embedding=adam", "train.embedding_lr=1e-3", "train.clip=0"];
        let cfg = config(&sets);
        if !run.exists() {
            RunFolder::create(run, false).unwrap().begin(&cfg).unwrap();
        }
        // an evaluation: eval and export want weights
        let cfg = config(&[&sets[..], &["train.eval_every=5", "train.patience=0"]].concat());
        world.many(&cfg, &device, ranks, place, &RankOptions::default(), Some(run), leave)[0].0.clone()
    };
    let mut seen: Vec<(u64, Vec<(TensorSpec, Vec<f32>)>)> = vec![];
    let places: [(&str, Place); 4] =
        [("rows", by_rows), ("columns", by_columns), ("turn", in_turn), ("last", all_on_the_last)];
    for (name, place) in places {
        let run = folder(name);
        train(&run, 3, place, Some(9));
        let files =
            |rank: usize| run.join(format!("checkpoints/step-000000010-{rank:05}-of-00003.safetensors"));
        let there: Vec<bool> = (0..3).map(|r| files(r).exists()).collect();
        assert_eq!(there, [name != "last", name != "last", true], "{name}");
        let alone = checkpoint::read_header(&run.join("checkpoints/step-000000010.safetensors")).unwrap();
        assert!(alone.tensors.iter().all(|t| !t.name.starts_with("embeddings.")), "{name}: no tables");
        seen.push(gathered(&run));
    }
    assert_eq!(seen[0].0, 10);
    for (i, s) in seen.iter().enumerate().skip(1) {
        assert!(s == &seen[0], "{}", places[i].0);
    }
    // the weights were put together on the way
    let weights = |name: &str| std::fs::read(folder(name).join("weights.safetensors")).unwrap();
    assert!(places.iter().all(|(name, _)| weights(name) == weights("rows")));

    // from its one file, on one rank and on others; and from the parts
    let copy = |name: &str| {
        let run = folder(name);
        RunFolder::create(&run, false).unwrap().begin(&config(&["train.batch=24"])).unwrap();
        std::fs::create_dir(run.join("checkpoints")).unwrap();
        for file in ["metrics.jsonl", "config.toml", "weights.safetensors"] {
            std::fs::copy(folder("rows").join(file), run.join(file)).unwrap();
        }
        std::fs::rename(folder("rows").join("gathered.safetensors"), folder("rows").join("one")).ok();
        std::fs::copy(folder("rows").join("one"), run.join("checkpoints/step-000000010.safetensors"))
            .unwrap();
        run
    };
    let (one, two, three) = (copy("one"), copy("two"), copy("three"));
    let by_three = train(&three, 3, in_turn, None);
    assert_eq!(by_three.len(), 30);
    assert_eq!(
        train(&folder("columns"), 3, by_rows, None),
        by_three,
        "from parts as from one, to the last bit"
    );
    near(&train(&two, 2, by_columns, None), &by_three, 1e-5, "2 ranks");
    near(&train(&one, 1, in_turn, None), &by_three, 1e-5, "1 rank");
    near(&train(&folder("turn"), 1, in_turn, None), &by_three, 1e-5, "1 rank from parts");

    // a damaged part: all ranks go back to the checkpoint before
    let run = folder("rows");
    let saved = RunFolder::resume(&run).unwrap().checkpoints();
    assert_eq!(saved.iter().map(|c| c.0).collect::<Vec<_>>(), [5, 10]);
    let part = run.join("checkpoints/step-000000010-00001-of-00003.safetensors");
    let mut bytes = std::fs::read(&part).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&part, bytes).unwrap();
    assert_eq!(train(&run, 3, by_rows, None).len(), 35, "from step 5");
}

/// The device executor works in segments between communication.
#[test]
fn ranks_on_a_device() {
    let Some(device) = birkhoff::graph::testing::software_device() else { return };
    let world = world(400, 155);
    let cfg = config(&["train.batch=8", "model.layers=1"]);
    let on = |device: &Device| {
        world.many(&cfg, device, 2, in_turn, &RankOptions::default(), None, None)[0].0.clone()
    };
    near(&on(&device), &on(&Device::Cpu), 1e-3, "software Vulkan");
}
