//! One training run in the page: the library's trainer, a slice a frame.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use anyhow::{Context, bail};
use birkhoff::dashboard::SharedRun;
use birkhoff::data::FittedEncoder;
use birkhoff::diagnose::Snapshot;
use birkhoff::gpu::{DeviceChoice, GpuOptions, Selected, select_async};
use birkhoff::graph::exec::Device;
use birkhoff::model::config::Config;
use birkhoff::text::error_line;
use birkhoff::train::checkpoint::{CheckpointMeta, TensorRef};
use birkhoff::train::infer::Inputs;
use birkhoff::train::schema::schema;
use birkhoff::train::store::{MemoryStore, Store, Weights};
use birkhoff::train::trainer::{Event, Report, Summary, Trainer};

use crate::host;
use crate::pace::{Pace, next_frame};
use crate::rows::{self, Loaded};
use crate::setup::{DeviceWord, Setup};

/// Where a run stands.
#[derive(Clone, Debug, Default)]
pub enum Phase {
    /// Rows are made or read, the model is built.
    #[default]
    Preparing,
    /// Steps are taken.
    Training,
    /// It came to its end, or was stopped.
    Finished(Box<Summary>),
    /// What went wrong, as one line.
    Failed(String),
}

/// What the page and the run know of each other.
#[derive(Default)]
pub struct Progress {
    /// Where it stands.
    pub phase: Phase,
    /// What it does, for people.
    pub doing: String,
    /// Name of the device.
    pub device: String,
    /// Every event so far.
    pub events: Vec<Event>,
    /// Everything that a run folder would hold.
    pub store: MemoryStore,
    /// Steps done, and of how many.
    pub step: (u64, u64),
    /// Milliseconds a step.
    pub step_ms: f64,
    /// Steps in a frame.
    pub steps_per_frame: f64,
    /// NE of the planted truth on the validation rows.
    pub truth_ne: Option<f64>,
    /// Set by the page: end here.
    pub stop: bool,
    /// What a dashboard follows.
    pub shared: SharedRun,
}

/// A run; clones are the same.
#[derive(Clone, Default)]
pub struct Session(pub Rc<RefCell<Progress>>);

/// Opens what the page asks for.
pub async fn open(word: DeviceWord) -> anyhow::Result<Device> {
    let choice = match word {
        DeviceWord::Auto => DeviceChoice::Auto,
        // A browser has one adapter: this takes it also where it is a software driver.
        DeviceWord::WebGpu => DeviceChoice::Named("0".into()),
        DeviceWord::Cpu => DeviceChoice::Cpu,
    };
    match select_async(&choice, &GpuOptions::default()).await {
        Ok(Selected::Cpu) => Ok(Device::Cpu),
        Ok(Selected::Gpu(gpu)) => Ok(Device::tuned(gpu)),
        Err(e) if word == DeviceWord::WebGpu => bail!("this browser gives no WebGPU device: {e}"),
        Err(e) => Err(e.into()),
    }
}

/// What to call a device: browsers hide its name.
pub fn device_name(device: &Device) -> String {
    match device {
        Device::Cpu => "CPU, in WebAssembly".into(),
        Device::Gpu(g, _) => {
            let info = g.info();
            let software = if g.is_software() { " (software)" } else { "" };
            let name = [&info.name, &info.driver].into_iter().find(|t| !t.is_empty());
            name.map_or(format!("WebGPU{software}"), |n| format!("WebGPU{software}: {n}"))
        }
    }
}

impl Session {
    /// Starts a run that a dashboard follows; the page goes on at once. Rows that are there already are
    /// not made again.
    pub fn start(setup: Setup, shared: SharedRun, rows: Option<Rc<Loaded>>) -> Session {
        let session = Session::default();
        session.0.borrow_mut().shared = shared;
        let s = session.clone();
        wasm_bindgen_futures::spawn_local(async move {
            s.run(&setup, rows).await;
        });
        session
    }

    /// Runs to the end; errors are in [`Progress::phase`].
    pub async fn run(&self, setup: &Setup, rows: Option<Rc<Loaded>>) {
        let end = match self.train(setup, rows).await {
            Ok(summary) => Phase::Finished(Box::new(summary)),
            Err(e) => Phase::Failed(error_line(&e)),
        };
        let mut p = self.0.borrow_mut();
        if let Phase::Failed(text) = &end {
            p.shared.problem(text);
        }
        p.phase = end;
        drop(p);
        host::wake();
    }

    /// For tests.
    pub fn state(&self) -> serde_json::Value {
        let p = self.0.borrow();
        let (phase, error) = match &p.phase {
            Phase::Preparing => ("preparing", None),
            Phase::Training => ("training", None),
            Phase::Finished(_) => ("finished", None),
            Phase::Failed(e) => ("failed", Some(e.clone())),
        };
        serde_json::json!({
            "phase": phase, "error": error, "doing": p.doing, "device": p.device, "step": p.step.0,
            "steps": p.step.1, "events": p.events.len(), "step_ms": p.step_ms, "steps_per_frame": p.steps_per_frame,
        })
    }

    /// Ends the run after its present step.
    pub fn stop(&self) {
        self.0.borrow_mut().stop = true;
    }

    /// Whether it still runs.
    pub fn running(&self) -> bool {
        matches!(self.0.borrow().phase, Phase::Preparing | Phase::Training)
    }

    fn say(&self, text: impl Into<String>) {
        self.0.borrow_mut().doing = text.into();
    }

    async fn train(&self, setup: &Setup, rows: Option<Rc<Loaded>>) -> anyhow::Result<Summary> {
        let mut cfg = setup.config()?;
        self.say("opening the device");
        let device = open(setup.device).await?;
        {
            let mut p = self.0.borrow_mut();
            p.device = device_name(&device);
            p.shared.device(&p.device);
        }
        let data = match rows {
            Some(rows) => rows,
            None => {
                let mut pace = Pace::new(&Device::Cpu);
                let mut say = |text: String| self.say(text);
                Rc::new(rows::load(&setup.data, &schema(&cfg.data)?, &mut pace, &mut say).await?)
            }
        };
        self.0.borrow_mut().truth_ne = data.truth_ne;
        let per_epoch = data.train.rows.len().div_ceil(cfg.train.batch) as u64;
        if setup.steps > 0 {
            // so that the schedule ends with the run
            cfg.train.epochs = setup.steps.div_ceil(per_epoch.max(1)) as usize;
        }
        self.say("building the model and compiling its kernels");
        next_frame().await;
        let inputs = Inputs::new(data.encoder.clone(), &cfg, &device)?;
        let mut trainer = Trainer::new(&cfg, inputs, &device, data.train.rows.len())?;
        device.settle("building the model").await?;
        if setup.steps > 0 {
            trainer.limit_steps(setup.steps);
        }
        let limit = trainer.total_steps();
        let mut vocab = Vec::new();
        data.encoder.write_to(&mut vocab).context("out of memory")?;
        {
            let mut p = self.0.borrow_mut();
            p.phase = Phase::Training;
            p.step = (0, limit);
            p.doing = String::new();
            p.store.files.insert("vocab.json".into(), vocab);
            let config = cfg.to_toml()?;
            p.shared.config(&config);
            p.shared.slots(slot_names(&cfg, &data.encoder));
            p.store.files.insert("config.toml".into(), config.into_bytes());
        }
        let mut watch = Watch { session: self.clone(), pace: Pace::new(&device), steps: 0, limit };
        let mut store = PageStore(self.clone());
        trainer.run(data.train.clone(), data.valid.clone(), &mut store, &mut watch).await
    }
}

/// What the features' slots are called: the numbers first, then the categories.
fn slot_names(cfg: &Config, encoder: &FittedEncoder) -> Vec<String> {
    let dense = cfg.model.features.dense_slots;
    let mut names: Vec<String> = match (encoder.schema.numeric.is_empty(), dense) {
        (true, _) => vec![],
        (false, 1) => vec!["numbers".into()],
        (false, n) => (0..n).map(|i| format!("numbers {i}")).collect(),
    };
    names.extend(encoder.schema.categorical.iter().map(|c| c.name.clone()));
    names
}

struct Watch {
    session: Session,
    pace: Pace,
    steps: u64,
    limit: u64,
}

impl Report for Watch {
    fn batch(&mut self, _: usize) {
        self.steps += 1;
        self.pace.stepped();
        self.session.0.borrow_mut().step.0 = self.steps;
    }

    fn event(&mut self, e: &Event) -> anyhow::Result<()> {
        let mut p = self.session.0.borrow_mut();
        p.events.push(e.clone());
        p.shared.event(e);
        Ok(())
    }

    fn snapshot(&mut self, s: &Snapshot) -> anyhow::Result<()> {
        self.session.0.borrow().shared.snapshot(s);
        Ok(())
    }

    fn pause(&mut self) -> Option<Pin<Box<dyn Future<Output = ()> + '_>>> {
        {
            let mut p = self.session.0.borrow_mut();
            p.step_ms = self.pace.step_ms;
            p.steps_per_frame = self.pace.steps_per_frame;
        }
        self.pace.pause()
    }

    fn pause_due(&mut self) -> bool {
        self.pace.due()
    }

    fn stop(&mut self) -> bool {
        self.session.0.borrow().stop || self.steps >= self.limit
    }
}

/// The run's files, in the page's memory.
struct PageStore(Session);

impl PageStore {
    fn with<T>(&self, f: impl FnOnce(&mut MemoryStore) -> T) -> T {
        f(&mut self.0.0.borrow_mut().store)
    }
}

impl Store for PageStore {
    fn record(&mut self, record: &serde_json::Value) -> anyhow::Result<()> {
        self.with(|s| s.record(record))
    }

    fn weights(
        &mut self,
        which: Weights,
        tensors: &[TensorRef<'_>],
        meta: &CheckpointMeta,
    ) -> anyhow::Result<()> {
        self.with(|s| s.weights(which, tensors, meta))
    }

    fn snapshot(&mut self, snapshot: &Snapshot) -> anyhow::Result<()> {
        self.with(|s| s.snapshot(snapshot))
    }

    fn file(&mut self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let shared = self.0.0.borrow().shared.clone();
        match name {
            "model.json" => shared.card(serde_json::from_slice(bytes)?),
            "profile.json" => shared.time(serde_json::from_slice(bytes)?),
            _ => {}
        }
        self.with(|s| s.file(name, bytes))
    }

    fn finish(&mut self, summary: &serde_json::Value) -> anyhow::Result<()> {
        self.0.0.borrow().shared.finish(summary.clone());
        self.with(|s| s.finish(summary))
    }
}
