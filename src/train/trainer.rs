//! The training loop: batches in, steps on a device, evaluation, early stopping, checkpoints.
//!
//! Nothing here knows which device it runs on, and nothing waits for it except where numbers are read: every
//! `log_every` steps and at evaluations. The loop is an `async fn` so that a browser can run it too.

use super::checkpoint::{CheckpointMeta, TensorSpec};
use super::describe::{model_card, time_report};
use super::diagnose::Diagnoser;
use super::infer::{Inputs, Scorer, run_with_pauses, tensor_specs, to_tensors, upload};
use super::schedule::{Decay, Schedule};
use super::step::{RUNNING, hyper, training_step};
use super::store::{Store, Weights};
use super::{memory, run};
use crate::data::feed::Feed;
use crate::data::loader::{LoaderOptions, Order};
use crate::data::metrics::Metrics;
use crate::diagnose::record::number;
use crate::diagnose::{ModelCard, Record, Snapshot};
use crate::graph::exec::{Device, Program, State};
use crate::model::config::{self, Config};
use crate::model::params::Param;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::future::Future;
use std::pin::Pin;
use web_time::Instant;

/// What the loop reports while it runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Event {
    /// Every `log_every` steps.
    Step {
        /// Steps done.
        step: u64,
        /// Steps of the whole run.
        total_steps: u64,
        /// Epoch, from 1.
        epoch: usize,
        /// Rows seen in this run.
        rows: u64,
        /// Mean training loss (cross-entropy, nats) since the last report.
        #[serde(deserialize_with = "number")]
        loss: f64,
        /// Dense learning rate of the last step.
        #[serde(deserialize_with = "number")]
        lr: f64,
        /// Global gradient norm of the last step, before clipping.
        #[serde(deserialize_with = "number")]
        grad_norm: f64,
        /// Rows a second since the last report.
        #[serde(deserialize_with = "number")]
        rows_per_s: f64,
        /// Seconds since the start of training.
        #[serde(deserialize_with = "number")]
        seconds: f64,
    },
    /// After each evaluation.
    Eval {
        /// Steps done.
        step: u64,
        /// Epoch, from 1.
        epoch: usize,
        /// Metrics on the validation rows.
        #[serde(flatten)]
        metrics: Metrics,
        /// Whether these are the best so far (lowest NE), and kept.
        best: bool,
        /// Seconds since the start of training.
        #[serde(deserialize_with = "number")]
        seconds: f64,
    },
    /// Every `diagnose_every` steps.
    Diagnose(Record),
}

/// How a run ended.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Always "summary".
    pub r#type: &'static str,
    /// Metrics of the best weights on the validation rows.
    #[serde(flatten)]
    pub metrics: Metrics,
    /// Steps done, and the step of the best weights.
    pub steps: u64,
    /// Step of the best weights.
    pub best_step: u64,
    /// Epochs begun.
    pub epochs: usize,
    /// Whether patience ran out before the last epoch.
    pub stopped_early: bool,
    /// Whether whoever watched asked for the end ([`Report::stop`]).
    pub interrupted: bool,
    /// Training rows a pass.
    pub train_rows: u64,
    /// Trainable numbers.
    pub parameters: usize,
    /// Training rows a second, evaluation not counted.
    pub rows_per_s: f64,
    /// Seconds spent on diagnoses.
    pub diagnosis_seconds: f64,
    /// Seconds, all in all.
    pub seconds: f64,
    /// Name of the device.
    pub device: String,
    /// Seed.
    pub seed: u64,
}

/// A run in progress.
pub struct Trainer {
    cfg: Config,
    inputs: Inputs,
    device: Device,
    state: State,
    program: Program,
    scorer: Scorer,
    params: Vec<Param>,
    card: ModelCard,
    specs: Vec<TensorSpec>,
    schedule: Schedule,
    train_rows: u64,
    step: u64,
    best: Option<(f64, u64, Metrics)>,
    bad_evals: usize,
}

/// The step whose operations are timed: late enough for caches and allocations to be warm, early enough for whoever
/// watches.
const PROFILED: u64 = 8;

/// Positions in the training program's kept values.
const NORM2: usize = 1;

impl Trainer {
    /// Builds and compiles; parameters start from the configuration's seed.
    pub fn new(cfg: &Config, inputs: Inputs, device: &Device, train_rows: usize) -> anyhow::Result<Self> {
        let mut cfg = cfg.clone();
        // a batch of more rows than there are would be padding
        cfg.train.batch = cfg.train.batch.min(train_rows.max(1));
        let cfg = &cfg;
        let t = &cfg.train;
        let step = training_step(inputs.model(cfg, t.batch, true)?, t);
        let mut card = model_card(&cfg.model, &step, t.batch);
        card.device = device.name();
        if device.is_cpu() {
            let states: usize = step.optimizer.iter().map(|o| o.1).sum();
            memory::check(4 * (card.parameters + states) + card.memory_planned)?;
        }
        let mut state = State::new(device);
        for p in &step.params {
            state.set(&p.name, &p.initial(t.seed))?;
        }
        for (name, len) in &step.optimizer {
            state.set(name, &vec![0.0; *len])?;
        }
        state.set(RUNNING, &[0.0])?;
        let program =
            Program::compile(device, &state, &step.graph, &[step.loss, step.norm2], "training step")?;
        let scorer = Scorer::new(cfg, &inputs, device, &state)?;
        let per_epoch = train_rows.div_ceil(t.batch) as u64;
        let schedule = Schedule {
            warmup: t.warmup as u64,
            total: per_epoch * t.epochs as u64,
            decay: match t.schedule {
                config::Schedule::Constant => Decay::Constant,
                config::Schedule::Cosine => Decay::Cosine { floor: 0.0 },
                config::Schedule::Step => Decay::step(),
            },
        };
        let specs = tensor_specs(&step.params);
        Ok(Trainer {
            cfg: cfg.clone(),
            inputs,
            device: device.clone(),
            state,
            program,
            scorer,
            params: step.params,
            card,
            specs,
            schedule,
            train_rows: train_rows as u64,
            step: 0,
            best: None,
            bad_evals: 0,
        })
    }

    /// Trainable numbers.
    pub fn parameters(&self) -> usize {
        self.params.iter().map(|p| p.shape().len()).sum()
    }

    /// The training step's program, for reports.
    pub fn program(&mut self) -> &mut Program {
        &mut self.program
    }

    /// Makes the whole run shorter: the learning rate's schedule ends after so many steps. The [`Report`] ends
    /// the run.
    pub fn limit_steps(&mut self, steps: u64) {
        self.schedule.total = self.schedule.total.min(steps);
    }

    /// Steps of the whole run.
    pub fn total_steps(&self) -> u64 {
        self.schedule.total
    }

    /// Trains to the end, or until patience runs out. `report` gets every event and every batch's rows.
    pub async fn run(
        &mut self,
        train: impl Into<Feed>,
        valid: impl Into<Feed>,
        store: &mut dyn Store,
        report: &mut dyn Report,
    ) -> anyhow::Result<Summary> {
        let (train, valid) = (train.into(), valid.into());
        let t = self.cfg.train.clone();
        let begin = Instant::now();
        let mut training = 0.0;
        let mut rows = 0u64;
        let (mut stopped_early, mut interrupted) = (false, false);
        let mut epochs = 0;
        store.file(run::MODEL, &serde_json::to_vec_pretty(&self.card)?)?;
        let mut diagnoser =
            Diagnoser::new(&self.cfg, &self.inputs, &self.device, &self.state, &valid, self.schedule.total)?;
        let mut diagnosing = 0.0;
        self.diagnose(&mut diagnoser, &mut diagnosing, 0, store, report, begin).await?;
        let mut window = Window::begin();
        'epochs: for epoch in 0..t.epochs {
            epochs = epoch + 1;
            let order = Order::Shuffled { seed: t.seed, epoch: epoch as u64 };
            let mut loader = train.loader(self.inputs.groups.clone(), order, LoaderOptions::new(t.batch))?;
            while let Some(batch) = loader.next() {
                let batch = batch?;
                let factor = self.schedule.factor(self.step);
                self.step += 1;
                upload(&mut self.program, &batch)?;
                self.program.set("hyper", &hyper(&t, self.step, factor))?;
                let timed = self.step == PROFILED.min(self.schedule.total) && self.can_be_timed();
                let ran = match timed {
                    true => self.timed_step(store).await,
                    false => {
                        run_with_pauses(&mut self.program, &mut self.state, report).await.map_err(Into::into)
                    }
                };
                ran.with_context(|| format!("step {}", self.step))?;
                rows += batch.rows as u64;
                window.rows += batch.rows as u64;
                window.steps += 1;
                report.batch(batch.rows);
                loader.recycle(batch);
                if let Some(wait) = report.pause() {
                    wait.await;
                }
                let stop = report.stop();
                let last = stop || self.step == self.schedule.total;
                if due(t.log_every, self.step) || last {
                    let e = self.log_step(&mut window, &mut training, epoch, rows, factor, begin).await?;
                    store.log(&e)?;
                    report.event(&e)?;
                }
                if due(t.diagnose_every, self.step) || last {
                    window.pause();
                    self.diagnose(&mut diagnoser, &mut diagnosing, rows, store, report, begin).await?;
                    window.resume();
                }
                if due(t.checkpoint_every, self.step) {
                    self.save(store, Weights::Last, None).await?;
                }
                if due(t.eval_every, self.step) && !last {
                    window.pause();
                    let worse = self.evaluate(&valid, epoch, store, report, begin).await?;
                    window.resume();
                    if worse {
                        stopped_early = true;
                        break 'epochs;
                    }
                }
                if stop {
                    window.pause();
                    self.evaluate(&valid, epoch, store, report, begin).await?;
                    (stopped_early, interrupted) = (true, true);
                    break 'epochs;
                }
            }
            window.pause();
            let already = due(t.eval_every, self.step) && epochs < t.epochs;
            if !already && self.evaluate(&valid, epoch, store, report, begin).await? {
                stopped_early = epochs < t.epochs;
                break;
            }
            window.resume();
        }
        training += window.take();
        if t.checkpoint_every > 0 {
            self.save(store, Weights::Last, None).await?;
        }
        let (_, best_step, metrics) = self.best.clone().context("no evaluation took place")?;
        let summary = Summary {
            r#type: "summary",
            metrics,
            steps: self.step,
            best_step,
            epochs,
            stopped_early,
            interrupted,
            train_rows: self.train_rows,
            parameters: self.parameters(),
            rows_per_s: rows as f64 / training.max(1e-9),
            diagnosis_seconds: diagnosing,
            seconds: begin.elapsed().as_secs_f64(),
            device: self.device.name(),
            seed: t.seed,
        };
        store.log(&summary)?;
        store.finish(&serde_json::to_value(&summary)?)?;
        Ok(summary)
    }

    /// Measures the residual stream, if it is to be, and hands out what was found.
    async fn diagnose(
        &mut self,
        diagnoser: &mut Option<Diagnoser>,
        spent: &mut f64,
        rows: u64,
        store: &mut dyn Store,
        report: &mut dyn Report,
        begin: Instant,
    ) -> anyhow::Result<()> {
        let Some(d) = diagnoser else { return Ok(()) };
        let now = Instant::now();
        let seconds = begin.elapsed().as_secs_f64();
        let (record, snapshot) = d.measure(&mut self.state, self.step, rows, seconds, report).await?;
        if let Some(s) = snapshot {
            store.snapshot(&s)?;
            report.snapshot(&s)?;
        }
        let e = Event::Diagnose(record);
        store.log(&e)?;
        *spent += now.elapsed().as_secs_f64();
        report.event(&e)
    }

    /// Whether a step can be timed by the way: not where `--profile` does it already, nor on a GPU without
    /// timestamps, where each dispatch would wait for the one before.
    fn can_be_timed(&self) -> bool {
        if self.device.is_cpu() { !self.program.is_profiling() } else { self.device.has_timestamps() }
    }

    /// Takes a step and writes where its time went.
    async fn timed_step(&mut self, store: &mut dyn Store) -> anyhow::Result<()> {
        let mut wall = 0.0;
        let clock = if self.device.is_cpu() {
            self.program.start_profile();
            let before = Instant::now();
            self.program.run(&mut self.state)?;
            wall = before.elapsed().as_secs_f64();
            "host"
        } else {
            "device"
        };
        // on a device this is what takes the step
        let times = self.program.node_times().await?;
        let report = time_report(self.device.name(), clock, self.step, wall * 1e6, &times);
        store.file(run::PROFILE, &serde_json::to_vec_pretty(&report)?)
    }

    async fn log_step(
        &mut self,
        window: &mut Window,
        training: &mut f64,
        epoch: usize,
        rows: u64,
        factor: f64,
        begin: Instant,
    ) -> anyhow::Result<Event> {
        let loss = self.state.get(&[RUNNING]).await?[0][0] as f64 / window.steps.max(1) as f64;
        let norm2 = self.program.read(&[NORM2]).await?[0][0] as f64;
        self.state.set(RUNNING, &[0.0])?;
        if !loss.is_finite() {
            let kept = match self.best {
                Some((_, s, _)) => format!("the weights of step {s} are kept"),
                None => "no weights were saved yet".into(),
            };
            bail!(
                "the loss became {loss} between steps {} and {}; {kept}; lower train.lr or train.embedding_lr, or set train.clip",
                self.step - window.steps,
                self.step
            );
        }
        let rows_in_window = window.rows;
        let seconds = window.take();
        *training += seconds;
        Ok(Event::Step {
            step: self.step,
            total_steps: self.schedule.total,
            epoch: epoch + 1,
            rows,
            loss,
            lr: self.cfg.train.lr * factor,
            grad_norm: norm2.max(0.0).sqrt(),
            rows_per_s: rows_in_window as f64 / seconds.max(1e-9),
            seconds: begin.elapsed().as_secs_f64(),
        })
    }

    /// Evaluates, keeps the weights if they are the best; true if patience has run out.
    async fn evaluate(
        &mut self,
        valid: &Feed,
        epoch: usize,
        store: &mut dyn Store,
        report: &mut dyn Report,
        begin: Instant,
    ) -> anyhow::Result<bool> {
        let options = LoaderOptions::new(self.scorer.batch);
        let mut loader = valid.loader(self.inputs.groups.clone(), Order::Sequential, options)?;
        let metrics = self.scorer.evaluate(&mut self.state, &mut loader, |_| (), report).await?;
        // one class only: NE is undefined, the log loss decides
        let score = metrics.ne.unwrap_or(metrics.logloss);
        if !score.is_finite() {
            bail!("the validation loss is not finite at step {}; lower train.lr", self.step);
        }
        let best = self.best.as_ref().is_none_or(|(b, ..)| score < *b);
        if best {
            self.best = Some((score, self.step, metrics.clone()));
            self.bad_evals = 0;
            self.save(store, Weights::Best, Some(&metrics)).await?;
        } else {
            self.bad_evals += 1;
        }
        let e = Event::Eval {
            step: self.step,
            epoch: epoch + 1,
            metrics,
            best,
            seconds: begin.elapsed().as_secs_f64(),
        };
        store.log(&e)?;
        report.event(&e)?;
        Ok(self.cfg.train.patience > 0 && self.bad_evals >= self.cfg.train.patience)
    }

    async fn save(
        &self,
        store: &mut dyn Store,
        which: Weights,
        metrics: Option<&Metrics>,
    ) -> anyhow::Result<()> {
        let names: Vec<&str> = self.params.iter().map(|p| p.name.as_str()).collect();
        let values = self.state.get(&names).await?;
        let mut meta =
            CheckpointMeta { step: self.step, seed: self.cfg.train.seed, ..CheckpointMeta::default() };
        if let Some(ne) = metrics.and_then(|m| m.ne) {
            meta.extra.insert("valid_ne".into(), ne.to_string());
        }
        store.weights(which, &to_tensors(&self.specs, &self.params, &values), &meta)
    }
}

/// Whether something that happens every so many steps, never for 0, happens after this one.
fn due(every: usize, step: u64) -> bool {
    every > 0 && step.is_multiple_of(every as u64)
}

/// What happened since the last logged line; the clock stands while something else than training goes on.
struct Window {
    begin: Option<Instant>,
    seconds: f64,
    rows: u64,
    steps: u64,
}

impl Window {
    fn begin() -> Self {
        Window { begin: Some(Instant::now()), seconds: 0.0, rows: 0, steps: 0 }
    }

    /// Stops the clock.
    fn pause(&mut self) {
        self.seconds += self.begin.take().map_or(0.0, |b| b.elapsed().as_secs_f64());
    }

    /// Starts it again.
    fn resume(&mut self) {
        self.begin = Some(Instant::now());
    }

    /// Seconds of training in the window, which begins anew; its clock stands if it stood.
    fn take(&mut self) -> f64 {
        let running = self.begin.is_some();
        self.pause();
        let seconds = self.seconds;
        *self = Window { begin: running.then(Instant::now), seconds: 0.0, rows: 0, steps: 0 };
        seconds
    }
}

/// Who watches a run.
pub trait Report {
    /// So many rows were trained on.
    fn batch(&mut self, rows: usize);
    /// A step was logged, an evaluation or a diagnosis done.
    fn event(&mut self, e: &Event) -> anyhow::Result<()>;
    /// The matrices of a diagnosis.
    fn snapshot(&mut self, _: &Snapshot) -> anyhow::Result<()> {
        Ok(())
    }
    /// Asked after each step and each batch of an evaluation: something to wait for before the next, such as
    /// a browser's next frame. `None` costs nothing.
    fn pause(&mut self) -> Option<Pin<Box<dyn Future<Output = ()> + '_>>> {
        None
    }
    /// Asked between the operations of a step on the CPU: whether it is time for a [`Report::pause`].
    fn pause_due(&mut self) -> bool {
        false
    }
    /// Asked after each step: whether to end here, as if the last epoch were over.
    fn stop(&mut self) -> bool {
        false
    }
}

/// Nobody.
impl Report for () {
    fn batch(&mut self, _: usize) {}
    fn event(&mut self, _: &Event) -> anyhow::Result<()> {
        Ok(())
    }
}
