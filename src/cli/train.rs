//! `birkhoff train`.

use super::args::{OnBadRow, TrainArgs};
use super::output;
use crate::data::reader::RowPolicy;
use crate::data::rows::SkipReport;
use crate::model::config::Config;
use crate::text::group;
use crate::train::infer::Inputs;
use crate::train::run::RunFolder;
use crate::train::trainer::{Event, Report, Summary, Trainer};
#[cfg(not(feature = "dashboard"))]
use anyhow::bail;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
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
        super::dashboard::beside(&args.out, move || train(&own))
    }
}

/// Trains.
fn train(args: &TrainArgs) -> anyhow::Result<()> {
    let cfg = args.resolve_config()?;
    let device = super::device::open(&args.device.device)?;
    let folder = RunFolder::create(&args.out, args.force)?;
    let say = |text: String| {
        if !args.quiet {
            eprintln!("{text}");
        }
    };
    if let Some(n) = folder.notice() {
        say(n.to_string());
    }

    let spinner = spinner(args.quiet, "reading the training rows: vocabularies");
    let data = super::data::open(&args.data, &cfg, &spinner)?;
    spinner.finish_and_clear();
    data.notes.iter().for_each(|n| say(n.clone()));
    let encoder = data.encoder.clone();

    let inputs = Inputs::new(encoder.clone(), &cfg, &device)?;
    let begin = Instant::now();
    let mut trainer = Trainer::new(&cfg, inputs, &device, encoder.rows as usize)?;
    folder.begin(&cfg)?;
    encoder.save(&folder.vocab_path())?;
    say(format!(
        "{} training rows ({:.2} % positive); {} parameters; {} (ready in {:.1} s)",
        group(encoder.rows),
        100.0 * encoder.positives as f64 / encoder.rows as f64,
        group(trainer.parameters() as u64),
        device.name(),
        begin.elapsed().as_secs_f64(),
    ));
    if args.profile {
        trainer.program().start_profile();
    }
    let mut report = Console::new(args, &cfg, encoder.rows);
    let mut store = folder.store()?;
    end_gracefully();
    let summary =
        pollster::block_on(trainer.run(data.train.clone(), data.valid.clone(), &mut store, &mut report));
    report.bar.finish_and_clear();
    let summary = summary?;
    if args.profile {
        let span = if device.is_cpu() { "all steps together" } else { "one step" };
        eprintln!("time by kernel, {span}:\n{}", pollster::block_on(trainer.program().profile_table())?);
    }
    if args.json {
        output::json(&summary)?;
    } else {
        print_summary(&summary, &folder)?;
    }
    if let Some(test) = &data.test {
        super::eval::test_part(&args.out, &device, test, args.json)?;
    }
    if summary.metrics.ne.is_some_and(|ne| ne >= 1.0) {
        say("note: a normalized entropy of 1 or more is no better than predicting the average click rate"
            .into());
    }
    if summary.interrupted { Err(Interrupted.into()) } else { Ok(()) }
}

/// The user ended the run; what it had learned is saved.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Set by the first Ctrl-C (or SIGTERM).
static STOP: AtomicBool = AtomicBool::new(false);

/// From here on the first Ctrl-C ends the run after the step in progress, with an evaluation and saved weights;
/// the second ends the program at once.
fn end_gracefully() {
    let set = ctrlc::set_handler(|| {
        if STOP.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
        eprintln!("\ninterrupted: evaluating and saving what was learned; once more to quit at once");
    });
    if let Err(e) = set {
        tracing::debug!("no handler for Ctrl-C: {e}");
    }
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

    fn stop(&mut self) -> bool {
        STOP.load(Ordering::SeqCst)
    }

    fn event(&mut self, e: &Event) -> anyhow::Result<()> {
        match e {
            Event::Step { epoch, step, total_steps, rows, loss, rows_per_s, .. } => {
                self.loss = *loss;
                self.bar.set_prefix(format!("epoch {epoch}/{}", self.epochs));
                self.bar.set_message(format!("loss {loss:.4}"));
                let first = *step == *total_steps || self.last_line.elapsed() > Duration::from_secs(4);
                if !self.terminal && first {
                    self.last_line = Instant::now();
                    self.line(&format!(
                        "epoch {epoch}/{}  step {step}/{total_steps}  {} rows  {} rows/s  loss {loss:.4}",
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
            Event::Diagnose(_) => {}
        }
        if self.json {
            output::json(e)?;
        }
        Ok(())
    }
}

fn print_summary(s: &Summary, folder: &RunFolder) -> anyhow::Result<()> {
    let show = |v: Option<f64>| v.map_or("undefined (one class)".into(), |v| format!("{v:.5}"));
    let line = |k: &str, v: String| output::line(&format!("  {k:<22} {v}"));
    output::line("best weights on the validation rows:")?;
    line("normalized entropy", show(s.metrics.ne))?;
    line("log loss", format!("{:.5}", s.metrics.logloss))?;
    line("AUC", show(s.metrics.auc))?;
    line("calibration", s.metrics.calibration.map_or("undefined".into(), |v| format!("{v:.4}")))?;
    line("step", format!("{} of {}", s.best_step, s.steps))?;
    line("rows/s", group(s.rows_per_s as u64))?;
    line("time", format!("{:.1} s on {}", s.seconds, s.device))?;
    let early = match (s.interrupted, s.stopped_early) {
        (true, _) => " (interrupted)",
        (_, true) => " (stopped early)",
        _ => "",
    };
    output::line(&format!("run folder: {}{early}", folder.path().display()))
}
