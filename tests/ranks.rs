//! Several ranks train what one would: the same losses, whatever lies where and however values travel.

mod world;

use birkhoff::collective::{Communicator, Wire};
use birkhoff::graph::exec::Device;
use birkhoff::model::build::FeatureSpec;
use birkhoff::model::config::Config;
use birkhoff::parallel::dense::DenseOptions;
use birkhoff::parallel::layout::{Layout, Part};
use birkhoff::train::history::History;
use birkhoff::train::infer::Inputs;
use birkhoff::train::ranks::{RankOptions, Ranks};
use birkhoff::train::run::RunFolder;
use birkhoff::train::store::{MemoryStore, NoStore, Store};
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
                        let mut store: Box<dyn Store> = Box::new(NoStore);
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
                                trainer.follow().unwrap();
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
