//! The training loop: batches in, steps on a device, evaluation, early stopping, checkpoints.
//!
//! Nothing here knows which device it runs on, and nothing waits for it except where numbers are read: every
//! `log_every` steps, at evaluations and at checkpoints. The loop is an `async fn` so that a browser can run it too.
//! What the next step depends on is in [`Progress`], in the state on the device and in the data: a checkpoint is the
//! first two ([`super::resume`]).

use super::checkpoint::TensorSpec;
use super::describe::{model_card, time_report};
use super::diagnose::Diagnoser;
use super::infer::{Inputs, Scorer, Together, run_with_pauses, tensor_specs, upload_step};
use super::nan::Watched;
use super::progress::Progress;
use super::ranks::{Exchange, Ranks};
use super::save::{StateTensors, state_tensors};
use super::schedule::{Decay, Schedule};
use super::step::{GUARD, HYPER, RUNNING, check_overrides, hyper, slots, training_step, training_step_over};
use super::store::Store;
use super::tally::Tally;
use super::tally::Told;
use super::{memory, run};
use crate::data::batch::Batch;
use crate::data::feed::Feed;
use crate::data::loader::{Loader, LoaderOptions, Order};
use crate::diagnose::ModelCard;
use crate::graph::StateId;
use crate::graph::exec::{Device, Program, State};
use crate::model::config::{self, Config};
use crate::model::params::Param;
use anyhow::Context;
use web_time::Instant;
use xxhash_rust::xxh3::Xxh3Default;

pub use super::events::{Event, Interrupted, Report, Summary};

/// A run in progress.
pub struct Trainer {
    pub(super) cfg: Config,
    pub(super) inputs: Inputs,
    pub(super) device: Device,
    pub(super) state: State,
    program: Program,
    pub(super) scorer: Scorer,
    pub(super) params: Vec<Param>,
    card: ModelCard,
    /// Names and shapes of the weights.
    pub(super) specs: Vec<TensorSpec>,
    /// The whole training state.
    pub(super) saved: Vec<StateTensors>,
    pub(super) schedule: Schedule,
    pub(super) train_rows: u64,
    /// Checksum of the vocabularies.
    pub(super) vocab: String,
    pub(super) progress: Progress,
    /// When this process began to train, and the run's seconds before.
    began: (Instant, f64),
    pub(super) last_checkpoint: Instant,
    /// The newest checkpoint's step.
    pub(super) kept_step: Option<u64>,
    /// The other ranks, and how the training step's tables reach them.
    pub(super) ranks: Option<Ranks>,
    exchange: Option<Exchange>,
    tally: Tally,
    /// Whether the run's store keeps checkpoints: that of the first rank, which all help to make.
    pub(super) keeps: bool,
    /// Which ranks write their parts of checkpoints there themselves.
    pub(super) sees: Vec<bool>,
    /// Whether the run ends with this step.
    pub(super) stopping: bool,
    /// Where every operation's result is looked at.
    pub(super) watched: Option<Watched>,
}

/// The step whose operations are timed: late enough for caches and allocations to be warm, early enough for whoever
/// watches.
const PROFILED: u64 = 8;

/// Positions in the training program's kept values.
const NORM2: usize = 1;

impl Trainer {
    /// Builds and compiles; parameters start from the configuration's seed.
    pub fn new(cfg: &Config, inputs: Inputs, device: &Device, train_rows: usize) -> anyhow::Result<Self> {
        Self::over(cfg, inputs, device, train_rows, None)
    }

    /// The same as one of several ranks: `train.batch` rows are each rank's share of a step.
    pub fn over(
        cfg: &Config,
        inputs: Inputs,
        device: &Device,
        train_rows: usize,
        ranks: Option<Ranks>,
    ) -> anyhow::Result<Self> {
        let mut cfg = cfg.clone();
        let world = ranks.as_ref().map_or(1, Ranks::world);
        // a batch of more rows than there are would be padding
        cfg.train.batch = cfg.train.batch.min(train_rows.div_ceil(world).max(1));
        let cfg = &cfg;
        let t = &cfg.train;
        let step = match &ranks {
            None => training_step(inputs.model(cfg, t.batch, true)?, t),
            Some(r) => training_step_over(&inputs.model_without_index(cfg, t.batch)?, t, r),
        };
        check_overrides(&step.params, t)?;
        let mut card = model_card(&cfg.model, &step, t.batch);
        card.device = device.name();
        // what is here whole
        let here = |p: &Param| ranks.is_none() || !p.is_table();
        if device.is_cpu() {
            let own: usize = ranks.iter().flat_map(Ranks::own).map(|p| p.rows() * p.width()).sum();
            let values: usize = step.params.iter().filter(|p| here(p)).map(|p| p.shape().len()).sum();
            // weights and at most two numbers of the optimiser for each
            memory::check(12 * (values + own) + card.memory_planned)?;
        }
        let mut state = State::new(device);
        for p in step.params.iter().filter(|p| here(p)) {
            state.set(&p.name, &p.initial(t.seed))?;
        }
        let is_here = |id: &StateId| step.params.iter().any(|p| here(p) && p.id().name == id.name);
        for (id, n) in step.optimizer.iter().filter(|o| is_here(&o.0)) {
            state.set(id, &vec![0.0; *n])?;
        }
        if let Some(r) = &ranks {
            r.begin_tables(&mut state, &step.params, t.seed, |p| slots(p, t))?;
        }
        state.set(RUNNING, &[0.0])?;
        state.set(GUARD, &[0.0; 2])?;
        let program =
            Program::compile(device, &state, &step.graph, &[step.loss, step.norm2], "training step")?;
        let scorer = Scorer::over(cfg, &inputs, device, &state, ranks.as_ref())?;
        let per_epoch = train_rows.div_ceil(t.batch * world).div_ceil(t.accumulate) as u64;
        let schedule = Schedule {
            warmup: t.warmup as u64,
            total: per_epoch * t.epochs as u64,
            decay: match t.schedule {
                config::Schedule::Constant | config::Schedule::Plateau => Decay::Constant,
                config::Schedule::Cosine => Decay::Cosine { floor: t.schedule_floor },
                config::Schedule::Linear => Decay::Linear { floor: t.schedule_floor },
                config::Schedule::Step => Decay::Step { factor: t.step_factor, at: t.step_at.clone() },
            },
        };
        let specs = tensor_specs(&step.params);
        let saved = state_tensors(&step.params, &step.optimizer);
        let vocab = vocab_hash(&inputs)?;
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
            saved,
            schedule,
            train_rows: train_rows as u64,
            vocab,
            progress: Progress::default(),
            began: (Instant::now(), 0.0),
            last_checkpoint: Instant::now(),
            kept_step: None,
            ranks,
            exchange: step.exchange,
            tally: Tally::default(),
            keeps: false,
            sees: vec![],
            stopping: false,
            watched: None,
        })
    }

    /// Trainable numbers.
    pub fn parameters(&self) -> usize {
        self.params.iter().map(|p| p.shape().len()).sum()
    }

    /// A checksum of the vocabularies.
    pub fn vocabulary(&self) -> u64 {
        xxhash_rust::xxh3::xxh3_64(self.vocab.as_bytes())
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

    /// The `hyper` input of a step with so many examples.
    pub(super) fn hyper(&self, step: u64, rows: usize) -> [f32; HYPER] {
        let mut h = hyper(&self.cfg.train, step, self.factor(step - 1));
        h[HYPER - 1] = rows as f32;
        h
    }

    /// The factor of the peak learning rate at update `t`, from 0.
    fn factor(&self, t: u64) -> f64 {
        let c = &self.cfg.train;
        let cut = match c.schedule {
            config::Schedule::Plateau => c.plateau_factor.powi(self.progress.cuts as i32).max(c.plateau_min),
            _ => 1.0,
        };
        cut * self.schedule.factor(t)
    }

    /// The factor of the peak learning rate at the next update.
    pub fn rate_factor(&self) -> f64 {
        self.factor(self.progress.step)
    }

    /// Where the run stands.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Whether there is nothing left to train: every epoch is over, or patience has run out.
    pub fn is_done(&self) -> bool {
        let patience = self.cfg.train.patience;
        let out = self.progress.stopped_early && patience > 0 && self.progress.bad_evals >= patience;
        out || self.progress.epoch >= self.cfg.train.epochs
    }

    /// Seconds of the run, those of earlier processes included.
    pub(super) fn elapsed(&self) -> f64 {
        self.began.1 + self.began.0.elapsed().as_secs_f64()
    }

    /// The batches of an epoch in training order, from the `skip`-th on. With [`Trainer::valid_batches`] the only place
    /// that makes loaders.
    pub(super) fn train_batches(&self, train: &Feed, epoch: usize, skip: u64) -> anyhow::Result<Loader> {
        let t = &self.cfg.train;
        let order = Order::Shuffled { seed: t.seed, epoch: epoch as u64 };
        let options = LoaderOptions { skip: skip as usize, ..LoaderOptions::new(t.batch) };
        Ok(train.loader(self.inputs.groups.clone(), order, self.share(options))?)
    }

    /// The next step's batches; none after the last.
    fn fetch(&mut self, loader: &mut Loader) -> anyhow::Result<(Vec<Batch>, Together)> {
        let k = self.cfg.train.accumulate;
        let waiting = Instant::now();
        let batches = loader.by_ref().take(k).collect::<Result<Vec<_>, _>>()?;
        self.progress.window.waited += waiting.elapsed().as_secs_f64();
        let together = Together::new(&batches, k, self.ranks.as_ref().zip(self.exchange.as_ref()));
        Ok((batches, together))
    }

    /// The batches of an evaluation.
    pub(super) fn valid_batches(&self, valid: &Feed) -> anyhow::Result<Loader> {
        let options = self.share(LoaderOptions::new(self.scorer.batch));
        Ok(valid.loader(self.inputs.groups.clone(), Order::Sequential, options)?)
    }

    fn share(&self, options: LoaderOptions) -> LoaderOptions {
        self.ranks.as_ref().map_or(options, |r| r.share(options))
    }

    /// What all ranks agree to do after the step that was just run; of one rank alone what its report wants.
    fn told(&self, report: &mut dyn Report) -> Told {
        match &self.ranks {
            Some(r) => r.told(),
            None => Told {
                stop: report.stop(),
                interrupt: report.interrupt(),
                checkpoint: self.checkpoint_is_due(),
            },
        }
    }

    /// Trains to the end, or until patience runs out, from wherever the run stands. `report` gets every event and every
    /// batch's rows. Ends in [`Interrupted`] if the report wants it.
    pub async fn run(
        &mut self,
        train: impl Into<Feed>,
        valid: impl Into<Feed>,
        store: &mut dyn Store,
        report: &mut dyn Report,
    ) -> anyhow::Result<Summary> {
        let (train, valid) = (train.into(), valid.into());
        let t = self.cfg.train.clone();
        self.began = (Instant::now(), self.progress.seconds);
        self.last_checkpoint = Instant::now();
        let mut interrupted = false;
        self.keeps = store.keeps_checkpoints();
        if let Some(r) = &self.ranks {
            self.keeps = r.largest(u64::from(self.keeps))? == 1;
            self.sees = if self.keeps { r.who_sees(store)? } else { vec![] };
        }
        store.file(run::MODEL, &serde_json::to_vec_pretty(&self.card)?)?;
        let mut diagnoser = Diagnoser::new(
            &self.cfg,
            &self.inputs,
            &self.device,
            &self.state,
            &valid,
            self.schedule.total,
            self.ranks.as_ref(),
        )?;
        if let Some(d) = &mut diagnoser {
            d.measured = self.progress.diagnoses;
        }
        if self.progress.step == 0 {
            self.diagnose(&mut diagnoser, store, report).await?;
        }
        if !self.is_done() {
            self.progress.stopped_early = false;
        }
        self.tally = Tally::new(&self.progress.window);
        self.progress.window.resume();
        'epochs: while !self.is_done() && !self.progress.stopped_early {
            let mut loader = self.train_batches(&train, self.progress.epoch, self.progress.batch)?;
            if self.progress.evaluate && self.evaluate(&valid, store, report).await? {
                break 'epochs;
            }
            let mut next = self.fetch(&mut loader)?;
            loop {
                let (batches, together) = next;
                if batches.is_empty() {
                    break;
                }
                let rows: usize = batches.iter().map(|b| b.total).sum();
                let factor = self.rate_factor();
                self.progress.step += 1;
                let step = self.progress.step;
                let hyper = self.hyper(step, rows);
                self.watch(&batches, hyper).await?;
                if let Some(r) = &self.ranks {
                    let (stop, interrupt) = (report.stop(), report.interrupt());
                    r.wish(Told { stop, interrupt, checkpoint: r.rank() == 0 && self.checkpoint_is_due() });
                    self.tally.begin(r);
                }
                let over = self.ranks.as_ref().zip(self.exchange.as_ref());
                upload_step(&mut self.program, &batches, together, &t, step, over)?;
                self.program.set("hyper", &hyper)?;
                // while this step is computed, the ranks ask for the rows of the next
                next = self.fetch(&mut loader)?;
                let timed = step == PROFILED.min(self.schedule.total) && self.can_be_timed();
                let ran = match timed {
                    true => self.timed_step(store).await,
                    false => {
                        run_with_pauses(&mut self.program, &mut self.state, report).await.map_err(Into::into)
                    }
                };
                ran.with_context(|| format!("step {step}"))?;
                if let Some(r) = &self.ranks {
                    self.tally.end(r);
                }
                let p = &mut self.progress;
                p.batch += batches.len() as u64;
                p.rows += rows as u64;
                p.window.rows += rows as u64;
                p.window.steps += 1;
                for batch in batches {
                    report.batch(batch.total);
                    loader.recycle(batch);
                }
                if let Some(wait) = report.pause() {
                    wait.await;
                }
                let Told { stop, interrupt, checkpoint } = self.told(report);
                self.stopping = stop;
                let last = stop || step == self.schedule.total;
                let look = self.device.is_cpu()
                    || self.watched.is_some()
                    || last
                    || [t.log_every, t.diagnose_every, t.eval_every, t.checkpoint_every]
                        .iter()
                        .any(|e| due(*e, step));
                if look {
                    self.check_finite(&train).await?;
                }
                if due(t.log_every, step) || last {
                    for e in self.log_step(factor).await? {
                        store.log(&e)?;
                        report.event(&e)?;
                    }
                }
                if due(t.diagnose_every, step) || last {
                    self.diagnose(&mut diagnoser, store, report).await?;
                }
                self.progress.evaluate = due(t.eval_every, step) && !last;
                if self.progress.evaluate && self.evaluate(&valid, store, report).await? {
                    break 'epochs;
                }
                if interrupt {
                    self.check_finite(&train).await?;
                    self.checkpoint(store).await?;
                    return Err(Interrupted { step }.into());
                }
                if due(t.checkpoint_every, step) || checkpoint {
                    self.check_finite(&train).await?;
                    self.checkpoint(store).await?;
                }
                if stop {
                    self.finish_epoch(&valid, store, report).await?;
                    interrupted = true;
                    break 'epochs;
                }
            }
            self.check_finite(&train).await?;
            self.stopping = self.ranks.is_none() && report.stop();
            let already = due(t.eval_every, self.progress.step) && self.progress.epoch + 1 < t.epochs;
            if already {
                self.progress.epoch += 1;
                self.progress.batch = 0;
            } else if self.finish_epoch(&valid, store, report).await? {
                break;
            }
        }
        let window = self.progress.window.take();
        self.progress.times.add(&window);
        let p = &self.progress;
        let best = p.best.clone().context("no evaluation took place")?;
        let summary = Summary {
            r#type: "summary",
            metrics: best.detail.metrics,
            grouped: best.detail.grouped,
            deciles: best.detail.deciles,
            steps: p.step,
            best_step: best.step,
            epochs: if p.batch > 0 { p.epoch + 1 } else { p.epoch },
            stopped_early: p.stopped_early || interrupted,
            interrupted,
            train_rows: self.train_rows,
            parameters: self.parameters(),
            rows_per_s: p.rows as f64 / p.times.training().max(1e-9),
            diagnosis_seconds: p.times.diagnosis,
            times: p.times.clone(),
            seconds: self.elapsed(),
            device: self.device.name(),
            seed: t.seed,
            ranks: self.ranks.as_ref().map(Ranks::report).transpose()?,
        };
        store.log(&summary)?;
        store.finish(&serde_json::to_value(&summary)?)?;
        Ok(summary)
    }

    fn checkpoint_is_due(&self) -> bool {
        let minutes = self.cfg.train.checkpoint_minutes;
        minutes > 0.0 && self.last_checkpoint.elapsed().as_secs_f64() > 60.0 * minutes
    }

    /// Measures the residual stream, if it is to be, and hands out what was found.
    async fn diagnose(
        &mut self,
        diagnoser: &mut Option<Diagnoser>,
        store: &mut dyn Store,
        report: &mut dyn Report,
    ) -> anyhow::Result<()> {
        let Some(d) = diagnoser else { return Ok(()) };
        self.progress.window.pause();
        let now = Instant::now();
        let (step, rows, seconds) = (self.progress.step, self.progress.rows, self.elapsed());
        let (record, snapshot) = d.measure(&mut self.state, step, rows, seconds, report).await?;
        if let Some(s) = snapshot {
            store.snapshot(&s)?;
            report.snapshot(&s)?;
        }
        let e = Event::Diagnose(record);
        store.log(&e)?;
        self.progress.diagnoses = d.measured;
        self.progress.times.diagnosis += now.elapsed().as_secs_f64();
        report.event(&e)?;
        self.progress.window.resume();
        Ok(())
    }

    /// Whether a step can be timed by the way: not where `--profile` does it already, nor on a GPU without
    /// timestamps, where each dispatch would wait for the one before.
    fn can_be_timed(&self) -> bool {
        if self.device.is_cpu() {
            !self.program.is_profiling()
        } else {
            // communication is no dispatch
            self.ranks.is_none() && self.device.has_timestamps()
        }
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
        let report = time_report(self.device.name(), clock, self.progress.step, wall * 1e6, &times);
        store.file(run::PROFILE, &serde_json::to_vec_pretty(&report)?)
    }

    async fn log_step(&mut self, factor: f64) -> anyhow::Result<Vec<Event>> {
        let step = self.progress.step;
        let steps = self.progress.window.steps;
        let loss = self.state.get(&[RUNNING]).await?[0][0] as f64 / steps.max(1) as f64;
        let norm2 = self.program.read(&[NORM2]).await?[0][0] as f64;
        self.state.set(RUNNING, &[0.0])?;
        let seconds = self.elapsed();
        let p = &mut self.progress;
        let window = p.window.take();
        p.times.add(&window);
        let mut events = vec![Event::Step {
            step,
            total_steps: self.schedule.total,
            epoch: p.epoch + 1,
            rows: p.rows,
            loss,
            lr: self.cfg.train.lr * factor,
            grad_norm: norm2.max(0.0).sqrt(),
            rows_per_s: window.rows as f64 / window.seconds.max(1e-9),
            data_wait: window.waited / window.seconds.max(1e-9),
            seconds,
        }];
        if let Some(r) = self.ranks.as_ref().filter(|r| r.world() > 1) {
            events.push(Event::Ranks(self.tally.take(r, step, seconds, &window)?));
        }
        Ok(events)
    }
}

/// A checksum of the vocabularies and statistics that the model's tables belong to.
fn vocab_hash(inputs: &Inputs) -> anyhow::Result<String> {
    struct Hash(Xxh3Default);
    impl std::io::Write for Hash {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.update(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut hash = Hash(Xxh3Default::new());
    inputs.encoder.write_to(std::io::BufWriter::new(&mut hash))?;
    Ok(format!("{:016x}", hash.0.digest()))
}

/// Whether something that happens every so many steps, never for 0, happens after this one.
fn due(every: usize, step: u64) -> bool {
    every > 0 && step.is_multiple_of(every as u64)
}
