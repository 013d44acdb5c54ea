//! `birkhoff train`.

use super::args::{DataArgs, OnBadRow, TrainArgs};
use super::files::FileRecord;
use super::{interrupt, output, ranks};
use crate::collective::{Communicator, Wire};
use crate::data::FittedEncoder;
use crate::data::feed::Feed;
use crate::data::input::is_pipe;
use crate::data::reader::RowPolicy;
use crate::data::rows::SkipReport;
use crate::data::split::Split;
use crate::graph::exec::Device;
use crate::model::config::{self, Config, Schedule};
use crate::text::{group, human_bytes};
use crate::train::infer::Inputs;
use crate::train::resume::Resumed;
use crate::train::run::{DATA, RunFolder, VOCAB, write_atomic};
use crate::train::store::BesideStore;
use crate::train::trainer::{Event, Interrupted, Report, Summary, Trainer};
use anyhow::{Context, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Serialize};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Runs the subcommand.
pub fn run(args: &TrainArgs) -> anyhow::Result<()> {
    if !args.dashboard {
        return train(args);
    }
    #[cfg(not(feature = "dashboard"))]
    bail!(super::dashboard::MISSING);
    #[cfg(feature = "dashboard")]
    {
        let own = args.clone();
        super::dashboard::beside(args.folder(), move || train(&own))
    }
}

/// `data.json`: what a run was trained on, for `--resume`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct DataRecord {
    /// The rows' options, with absolute paths.
    #[serde(flatten)]
    data: DataArgs,
    /// The split that they came to.
    #[serde(rename = "parts", default, skip_serializing_if = "Option::is_none")]
    split: Option<Split>,
    /// Bytes of each training file.
    #[serde(default)]
    sizes: Vec<u64>,
    /// The training and the validation files, patterns resolved; runs of older versions have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    files: Vec<FileRecord>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    valid_files: Vec<FileRecord>,
    /// As it was given: `cpu`, `auto`, a part of a name.
    device: String,
    /// What travels between ranks, where that was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    grad_wire: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    table_wire: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bucket: Option<u32>,
}

impl DataRecord {
    /// What the arguments say; for a run that goes on, over what it began with.
    fn new(args: &TrainArgs) -> anyhow::Result<Self> {
        let absolute = |p: &PathBuf| match p.as_os_str() == "-" {
            true => p.clone(),
            false => std::path::absolute(p).unwrap_or_else(|_| p.clone()),
        };
        let pipe = |files: &[PathBuf]| files.iter().find(|p| is_pipe(p)).cloned();
        let path = args.folder().join(DATA);
        let before: Option<DataRecord> = match (&args.resume, std::fs::read(&path)) {
            (None, _) => None,
            (Some(_), Ok(bytes)) => {
                let read = serde_json::from_slice(&bytes);
                Some(read.with_context(|| format!("{}: cannot be read", path.display()))?)
            }
            (Some(_), Err(_)) => None,
        };
        let b = before.as_ref();
        let files = |given: &[PathBuf], old: Option<&Vec<PathBuf>>| match given.is_empty() {
            false => given.iter().map(absolute).collect(),
            true => old.cloned().unwrap_or_default(),
        };
        let mut data = args.data.clone();
        data.train = files(&args.data.train, b.map(|b| &b.data.train));
        data.valid = files(&args.data.valid, b.map(|b| &b.data.valid));
        data.split = data.split.or(b.and_then(|b| b.data.split.clone()));
        data.split_by = data.split_by.or(b.and_then(|b| b.data.split_by.clone()));
        data.cache = data.cache.or(b.and_then(|b| b.data.cache.clone()));
        data.cache = data.cache.map(|c| if c == Path::new("memory") { c } else { absolute(&c) });
        data.on_bad_row = data.on_bad_row.or(b.and_then(|b| b.data.on_bad_row));
        for (files, option) in [(&data.train, "--train"), (&data.valid, "--valid")] {
            ensure!(
                !files.is_empty() || (option == "--valid" && data.split.is_some()),
                "{} is missing: say with {option} FILE where the rows are",
                path.display()
            );
        }
        // what was piped in is gone
        for (files, option) in [(&data.train, "--train"), (&data.valid, "--valid")] {
            if let (Some(_), Some(pipe)) = (&args.resume, pipe(files)) {
                let name = if pipe.as_os_str() == "-" {
                    "standard input".into()
                } else {
                    pipe.display().to_string()
                };
                bail!(
                    "the run began with {option} {name}, a pipe, which cannot be read again; give the same rows as \
                     {option} FILE"
                );
            }
        }
        let size = |p: &PathBuf| std::fs::metadata(p).map_or(0, |m| m.len());
        let sizes: Vec<u64> = data.train.iter().map(size).collect();
        let device = match (args.device.device.as_str(), b) {
            ("auto", Some(b)) => b.device.clone(),
            (word, _) => word.to_owned(),
        };
        if let Some(b) = b
            && b.sizes != sizes
            && pipe(&b.data.train).is_none()
            && data.train.iter().all(|p| p.exists())
        {
            bail!(
                "{}: the training files are not those that the run began with (bytes: {:?}, then {:?}); give the same ones with --train",
                data.train.first().map_or_else(String::new, |p| p.display().to_string()),
                sizes,
                b.sizes
            );
        }
        let (files, valid_files) = (FileRecord::of(&data.train), FileRecord::of(&data.valid));
        if let Some(b) = b {
            FileRecord::same(&b.files, &files, "--train")?;
            // other validation rows are taken where they are named
            if args.data.valid.is_empty() {
                FileRecord::same(&b.valid_files, &valid_files, "--valid")?;
            }
        }
        let r = &args.ranks;
        let wire = |given: Option<Wire>, old: Option<&String>| given.map(|w| w.to_string()).or(old.cloned());
        Ok(DataRecord {
            data,
            split: b.and_then(|b| b.split.clone()),
            sizes,
            files,
            valid_files,
            device,
            grad_wire: wire(r.grad_wire, b.and_then(|b| b.grad_wire.as_ref())),
            table_wire: wire(r.table_wire, b.and_then(|b| b.table_wire.as_ref())),
            bucket: r.bucket.or(b.and_then(|b| b.bucket)),
        })
    }

    /// The arguments, with what a run that goes on had from its start.
    fn complete(&self, args: &TrainArgs) -> anyhow::Result<TrainArgs> {
        let mut args = args.clone();
        let wire = |word: &Option<String>| word.as_deref().map(str::parse::<Wire>).transpose();
        let r = &mut args.ranks;
        r.grad_wire = wire(&self.grad_wire).map_err(anyhow::Error::msg)?;
        r.table_wire = wire(&self.table_wire).map_err(anyhow::Error::msg)?;
        r.bucket = self.bucket;
        (args.data.train, args.data.valid) = (self.data.train.clone(), self.data.valid.clone());
        Ok(args)
    }
}

/// Trains.
fn train(args: &TrainArgs) -> anyhow::Result<()> {
    let done = match ranks::threads(args)? {
        Some(group) => ranks::as_threads(group, |comm| one(args, Some(comm)))?,
        None => one(args, ranks::join(args)?.as_ref())?,
    };
    done.map_or(Ok(()), |d| d.conclude(args))
}

/// One rank's part, or all of it; the first one has the run.
fn one(args: &TrainArgs, comm: Option<&Communicator>) -> anyhow::Result<Option<Done>> {
    let done = match comm {
        Some(c) if c.rank() > 0 => {
            let quiet = TrainArgs { quiet: true, json: false, ..args.clone() };
            ranks::together(comm, || train_beside(&quiet, c).map(|()| None))?
        }
        _ => ranks::together(comm, || train_first(args, comm).map(Some))?,
    };
    if let Some(comm) = comm {
        comm.finish()?;
    }
    Ok(done)
}

/// A trained run, still to be told of.
struct Done {
    folder: RunFolder,
    device: Device,
    test: Option<Feed>,
    summary: Summary,
    profile: Option<String>,
}

/// The rows. Of a run that goes on the vocabularies and the split are those of its start.
fn open_data(
    args: &TrainArgs,
    cfg: &mut Config,
    record: &mut DataRecord,
    spinner: &ProgressBar,
) -> anyhow::Result<super::data::Opened> {
    let vocab = args.folder().join(VOCAB);
    let known = args
        .resume
        .is_some()
        .then(|| super::data::Known::load(&vocab, cfg, record.split.clone()))
        .transpose()?;
    let data = super::data::open(&record.data, cfg, known, spinner)?;
    record.split = data.split.clone();
    if cfg.data.header == config::Header::Auto && cfg.data.format != config::Format::Criteo {
        let word = |header| if header { config::Header::Yes } else { config::Header::No };
        cfg.data.header = data.header.map_or(cfg.data.header, word);
    }
    Ok(data)
}

/// The trainer, alone or as one of several ranks.
fn trainer(
    args: &TrainArgs,
    cfg: &Config,
    encoder: &Arc<FittedEncoder>,
    device: &Device,
    comm: Option<&Communicator>,
) -> anyhow::Result<Trainer> {
    let inputs = Inputs::new(encoder.clone(), cfg, device)?;
    let over = comm.map(|c| ranks::ranks(args, c, cfg, encoder, &inputs)).transpose()?;
    let trainer = Trainer::over(cfg, inputs, device, encoder.rows as usize, over.clone())?;
    if let Some(over) = over {
        over.agree("vocabulary", trainer.vocabulary())?;
    }
    Ok(trainer)
}

/// A rank beside that which keeps the run's folder.
fn train_beside(args: &TrainArgs, comm: &Communicator) -> anyhow::Result<()> {
    let mut cfg = ranks::config(args, Some(comm))?;
    let mut record = DataRecord::new(args)?;
    let args = &record.complete(args)?;
    let device = ranks::device(&record.device, Some(comm))?;
    let data = open_data(args, &mut cfg, &mut record, &spinner(true, ""))?;
    let mut trainer = trainer(args, &cfg, &data.encoder, &device, Some(comm))?;
    if args.resume.is_some() {
        trainer.follow(args.folder())?;
    }
    let mut report = Console::new(args, &cfg, data.encoder.rows);
    // of threads the first rank does it, and says so
    if !ranks::is_thread(comm) {
        interrupt::ask(args.quiet);
    }
    let mut store = BesideStore::new(args.folder());
    pollster::block_on(trainer.run(data.train.clone(), data.valid.clone(), &mut store, &mut report))?;
    Ok(())
}

/// The run, by its only or first rank.
fn train_first(args: &TrainArgs, comm: Option<&Communicator>) -> anyhow::Result<Done> {
    let resumed = args.resume.as_deref().map(RunFolder::resume).transpose()?;
    let mut cfg = ranks::config(args, comm)?;
    let mut record = DataRecord::new(args)?;
    let args = &record.complete(args)?;
    let device = ranks::device(&record.device, comm)?;
    let folder = match resumed {
        Some(folder) => folder,
        None => RunFolder::create(args.folder(), args.force)?,
    };
    let say = |text: String| {
        if !args.quiet {
            eprintln!("{text}");
        }
    };
    if let Some(n) = folder.notice() {
        say(n.to_string());
    }

    let spinner = spinner(args.quiet, "reading the training rows: vocabularies");
    let data = open_data(args, &mut cfg, &mut record, &spinner)?;
    spinner.finish_and_clear();
    data.notes.iter().for_each(|n| say(n.clone()));
    if let Some(drift) = &data.drift {
        drift.warn("validation rows");
        if args.json {
            output::json(drift)?;
        }
    }
    let encoder = data.encoder.clone();

    let begin = Instant::now();
    let mut trainer = trainer(args, &cfg, &encoder, &device, comm)?;
    let resumed = match args.resume {
        Some(_) => take_up(args, &cfg, &folder, &mut trainer)?,
        None => None,
    };
    if resumed.is_none() {
        folder.begin(&cfg)?;
        encoder.save(&folder.vocab_path())?;
    } else if !folder.vocab_path().exists() {
        // the checkpoint has their checksum: they are the same
        encoder.save(&folder.vocab_path())?;
        say(format!("{}: was gone; made again from the training rows", folder.vocab_path().display()));
    }
    let text = serde_json::to_vec_pretty(&record)?;
    write_atomic(&folder.data_path(), |w| w.write_all(&text))?;
    say(format!(
        "{} training rows ({:.2} % positive); {} parameters; {} (ready in {:.1} s)",
        group(encoder.rows),
        100.0 * encoder.positives as f64 / encoder.rows as f64,
        group(trainer.parameters() as u64),
        device.name(),
        begin.elapsed().as_secs_f64(),
    ));
    if args.resume.is_some() {
        let from = resumed.map_or("no checkpoint yet, begins at the first step".into(), |r| {
            format!("goes on after step {} of {}", group(r.step), group(trainer.total_steps()))
        });
        say(format!("{}: {from}", folder.path().display()));
    }
    if args.profile {
        trainer.program().start_profile();
    }
    if args.debug_nan {
        trainer.watch_every_operation()?;
    }
    let mut report = Console::new(args, &cfg, encoder.rows);
    let world = comm.map_or(1, Communicator::world);
    report.start(trainer.progress().batch * (cfg.train.batch * world) as u64);
    let mut store = folder.store()?;
    interrupt::ask(false);
    let summary =
        pollster::block_on(trainer.run(data.train.clone(), data.valid.clone(), &mut store, &mut report));
    report.bar.finish_and_clear();
    let summary = match summary {
        Err(e) if e.is::<Interrupted>() => {
            eprintln!("{e}; everything is saved. Go on with: {}", ranks::go_on(comm, folder.path()));
            return Err(e);
        }
        other => other?,
    };
    let profile = match args.profile {
        true => Some(pollster::block_on(trainer.program().profile_table())?),
        false => None,
    };
    drop(trainer);
    drop(store);
    Ok(Done { folder, device, test: data.test.clone(), summary, profile })
}

impl Done {
    /// What stands at a run's end.
    fn conclude(self, args: &TrainArgs) -> anyhow::Result<()> {
        let Done { folder, device, test, summary, profile } = self;
        if let Some(table) = profile {
            let span = if device.is_cpu() { "all steps together" } else { "one step" };
            eprintln!("time by kernel, {span}:\n{table}");
        }
        if args.json {
            output::json(&summary)?;
        } else {
            print_summary(&summary, &folder)?;
        }
        if let Some(test) = &test {
            super::eval::test_part(folder.path(), &device, test, args.json)?;
        }
        if !args.quiet && summary.metrics.ne.is_some_and(|ne| ne >= 1.0) {
            eprintln!(
                "note: a normalized entropy of 1 or more is no better than predicting the average click rate"
            );
        }
        Ok(())
    }
}

/// Takes a run up from its newest checkpoint and its folder back to there; `None` where there is none yet.
fn take_up(
    args: &TrainArgs,
    cfg: &Config,
    folder: &RunFolder,
    trainer: &mut Trainer,
) -> anyhow::Result<Option<Resumed>> {
    let name = folder.path().display();
    let finished = folder.is_finished();
    let on_purpose: Vec<String> = args
        .config
        .sets
        .iter()
        .filter_map(|s| Some(s.split_once('=')?.0.trim().to_owned()))
        .chain(args.epochs.map(|_| "train.epochs".into()))
        .collect();
    let resumed = trainer.resume(folder, &on_purpose, &mut |line| eprintln!("{line}"))?;
    let Some(r) = &resumed else {
        ensure!(
            !went_past_a_checkpoint(&folder.metrics_path()),
            "{name}: its checkpoints are gone, though its log goes on after the first of them; put them back, or train again \
             with --out {name} --force, which replaces all that is there"
        );
        ensure!(
            !finished,
            "{name}: finished, and its checkpoints are gone: it cannot go on; train again with --out {name} --force"
        );
        return Ok(None);
    };
    let p = trainer.progress();
    if finished && trainer.is_done() {
        match p.epoch < cfg.train.epochs {
            true => bail!(
                "{name}: finished: it stopped early, at step {} after {} evaluations without a better one; go on \
                 with --set train.patience={} or more (0 = never stop early)",
                p.step,
                p.bad_evals,
                p.bad_evals + 1
            ),
            false => bail!(
                "{name}: finished: {0} of {0} epochs are trained; make it longer with --epochs {1} or more",
                p.epoch,
                p.epoch + 1
            ),
        }
    }
    if finished && matches!(cfg.train.schedule, Schedule::Cosine | Schedule::Linear | Schedule::Step) {
        eprintln!(
            "note: the run was finished; its learning rate now follows the {} schedule of {} epochs, from {:.3} times \
             the peak on",
            cfg.train.schedule,
            cfg.train.epochs,
            trainer.rate_factor()
        );
    }
    folder.rewind(cfg, r.step, r.lines)?;
    Ok(resumed)
}

/// Whether a log has steps after an evaluation: with it a checkpoint was written.
fn went_past_a_checkpoint(log: &Path) -> bool {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let mut kinds = text.lines().filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok());
    kinds.by_ref().any(|l| l["type"] == "eval") && kinds.any(|l| l["type"] == "step")
}

/// The reader's policy for `--on-bad-row`.
pub fn row_policy(word: OnBadRow) -> RowPolicy {
    match word {
        OnBadRow::Error => RowPolicy::Error,
        OnBadRow::Skip => RowPolicy::Skip,
    }
}

/// Says on stderr how many rows were left out, and the first few.
pub fn report_skipped(path: &Path, skipped: &SkipReport) {
    if skipped.skipped > 0 {
        eprintln!("{}: {} bad rows skipped, e.g.", path.display(), group(skipped.skipped));
        for line in &skipped.first {
            eprintln!("  {line}");
        }
    }
}

/// A spinner on stderr, where there is a terminal to spin on.
pub fn spinner(quiet: bool, message: &'static str) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if quiet {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    bar.set_message(message);
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// Progress bar on a terminal, a line every few seconds elsewhere, JSON lines on stdout if asked for.
struct Console {
    bar: ProgressBar,
    json: bool,
    quiet: bool,
    terminal: bool,
    rows_per_epoch: u64,
    epochs: usize,
    last_line: Instant,
    loss: f64,
}

impl Console {
    fn new(args: &TrainArgs, cfg: &Config, rows: u64) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = ProgressBar::new(rows);
        if args.quiet || !terminal {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        let style = ProgressStyle::with_template(
            "{prefix} [{bar:30}] {human_pos}/{human_len} rows  {per_sec}  {msg}  {eta} left",
        );
        if let Ok(style) = style {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(format!("epoch 1/{}", cfg.train.epochs));
        Console {
            bar,
            json: args.json,
            quiet: args.quiet,
            terminal,
            rows_per_epoch: rows,
            epochs: cfg.train.epochs,
            last_line: Instant::now(),
            loss: f64::NAN,
        }
    }

    /// Begins in the middle of an epoch.
    fn start(&mut self, rows: u64) {
        self.bar.set_position(rows);
        self.bar.reset_eta();
    }

    fn line(&self, text: &str) {
        if !self.quiet {
            self.bar.suspend(|| eprintln!("{text}"));
        }
    }
}

impl Report for Console {
    fn batch(&mut self, rows: usize) {
        if self.bar.position() >= self.rows_per_epoch {
            self.bar.set_position(0);
        }
        self.bar.inc(rows as u64);
    }

    fn interrupt(&mut self) -> bool {
        interrupt::asked()
    }

    fn event(&mut self, e: &Event) -> anyhow::Result<()> {
        match e {
            Event::Step { epoch, step, total_steps, rows, loss, rows_per_s, data_wait, .. } => {
                self.loss = *loss;
                self.bar.set_prefix(format!("epoch {epoch}/{}", self.epochs));
                let wait = format!("waits for data {:.0} %", 100.0 * data_wait);
                self.bar.set_message(format!("loss {loss:.4}  {wait}"));
                let first = *step == *total_steps || self.last_line.elapsed() > Duration::from_secs(4);
                if !self.terminal && first {
                    self.last_line = Instant::now();
                    self.line(&format!(
                        "epoch {epoch}/{}  step {step}/{total_steps}  {} rows  {} rows/s  loss {loss:.4}  {wait}",
                        self.epochs,
                        group(*rows),
                        group(*rows_per_s as u64)
                    ));
                }
            }
            Event::Eval { step, epoch, metrics, best, .. } => {
                let show = |v: Option<f64>| v.map_or("undefined".into(), |v| format!("{v:.4}"));
                self.line(&format!(
                    "epoch {epoch}/{}  step {step}  validation: NE {}  log loss {:.4}  AUC {}  calibration {}{}",
                    self.epochs,
                    show(metrics.ne),
                    metrics.logloss,
                    show(metrics.auc),
                    show(metrics.calibration),
                    if *best { "  (best, kept)" } else { "" }
                ));
            }
            Event::Diagnose(_) | Event::Ranks(_) => {}
        }
        if self.json {
            output::json(e)?;
        }
        Ok(())
    }
}

fn print_summary(s: &Summary, folder: &RunFolder) -> anyhow::Result<()> {
    let line = |k: &str, v: String| output::line(&format!("{k:<20} {v}"));
    output::line("best weights on the validation rows:")?;
    super::metrics::print(&s.metrics, s.grouped.as_ref(), &s.deciles)?;
    line("step", format!("{} of {}", s.best_step, s.steps))?;
    line("rows/s", group(s.rows_per_s as u64))?;
    if let Some(r) = &s.ranks {
        line("ranks", format!("{} over {}", r.world, r.transport))?;
        for (i, l) in r.ranks.iter().enumerate() {
            line(
                &format!("  rank {i}"),
                format!(
                    "sent {}, communicated {:.1} s, {:.1} s of it beside computing ({:.0} %); {} table values",
                    human_bytes(l.sent),
                    l.communicating,
                    (l.communicating - l.waiting).max(0.0),
                    100.0 * l.overlap,
                    group(l.table_values)
                ),
            )?;
        }
    }
    line("time", format!("{:.1} s on {}", s.seconds, s.device))?;
    let t = &s.times;
    let parts = [
        ("steps", t.compute),
        ("waiting for data", t.data),
        ("evaluation", t.evaluation),
        ("diagnosis", t.diagnosis),
        ("checkpoints", t.checkpoints),
    ];
    for (what, seconds) in parts {
        line(
            &format!("  {what}"),
            format!("{seconds:.1} s  ({:.0} %)", 100.0 * seconds / s.seconds.max(1e-9)),
        )?;
    }
    let early = if s.stopped_early { " (stopped early)" } else { "" };
    output::line(&format!("run folder: {}{early}", folder.path().display()))
}
