//! `birkhoff sweep`: many runs from one file, and one table of what they came to.
//!
//! Each run is a process of its own, so that one that fails ends no other. A run folder that is finished with the
//! configuration that the file asks for is not trained again: a sweep that was interrupted goes on where it stopped.

mod file;
mod report;

use super::args::{Cli, Command as Subcommand, SweepArgs};
use super::output;
use crate::model::config::Config;
use crate::train::run::RunFolder;
use anyhow::{Context, bail};
use clap::Parser;
use file::{SweepFile, Variant};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Set by Ctrl-C: what runs is told to end, and nothing further begins.
static STOP: AtomicBool = AtomicBool::new(false);

/// Processes of the runs in progress.
static CHILDREN: Mutex<Vec<u32>> = Mutex::new(vec![]);

/// The record of the data that a sweep's runs were trained on.
const RECORD: &str = "sweep.json";

/// One training run of the sweep.
#[derive(Clone, Debug)]
struct Job {
    /// Which variant it is of.
    variant: usize,
    /// `layers=2/seed-1`.
    name: String,
    folder: PathBuf,
    /// What `birkhoff` is called with.
    argv: Vec<String>,
    /// The configuration that results.
    config: Config,
}

/// What became of a job.
#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    /// Trained now.
    Done,
    /// It was finished before.
    Kept,
    /// The error's line.
    Failed(String),
    /// Ctrl-C came first.
    Interrupted,
}

/// Runs the subcommand.
pub fn run(args: &SweepArgs) -> anyhow::Result<()> {
    let file = SweepFile::read(&args.file)?;
    let out = args.out.clone().unwrap_or_else(|| args.file.with_extension(""));
    let jobs = jobs(&file, &out, args)?;
    if args.list {
        return jobs
            .iter()
            .try_for_each(|j| output::line(&format!("{}: birkhoff {}", j.name, j.argv.join(" "))));
    }
    if out.is_file() {
        bail!("{} is a file; --out takes a folder", out.display());
    }
    let waiting = check(&jobs)?;
    std::fs::create_dir_all(&out).with_context(|| format!("{}: cannot create the folder", out.display()))?;
    check_data(&out, &jobs)?;
    let outcomes = train(&jobs, &waiting, args);
    let report = report::Report::new(&file.variants, &jobs, &outcomes);
    if let Some(csv) = &args.csv {
        output::not_an_input(csv, &[&args.file])?;
        report.csv().write_csv(csv)?;
    }
    if args.json {
        output::json(&report.json())?;
    } else {
        report.table().print()?;
    }
    let failed: Vec<&Job> =
        jobs.iter().zip(&outcomes).filter(|(_, o)| matches!(o, Outcome::Failed(_))).map(|(j, _)| j).collect();
    for (j, o) in jobs.iter().zip(&outcomes) {
        if let Outcome::Failed(line) = o {
            eprintln!("failed: {}: {line}", j.name);
        }
    }
    if outcomes.contains(&Outcome::Interrupted) {
        eprintln!("interrupted; the same command goes on with the runs that are missing");
        return Err(crate::train::events::Interrupted { step: 0 }.into());
    }
    if let Some(first) = failed.first() {
        bail!("{} of {} runs failed, the first {}", failed.len(), jobs.len(), first.name);
    }
    Ok(())
}

/// Every run of the file: variants in order, and for each its seeds. Mistakes in any of them are found here,
/// before the first begins.
fn jobs(file: &SweepFile, out: &Path, args: &SweepArgs) -> anyhow::Result<Vec<Job>> {
    let mut jobs = vec![];
    for (variant, v) in file.variants.iter().enumerate() {
        for &seed in &file.seeds {
            let name = format!("{}/seed-{seed}", v.name);
            let folder = out.join(&v.name).join(format!("seed-{seed}"));
            let argv = argv(file, v, seed, &folder, &args.train);
            let config =
                config_of(&argv).with_context(|| format!("{}: run {}", args.file.display(), v.name))?;
            jobs.push(Job { variant, name, folder, argv, config });
        }
    }
    Ok(jobs)
}

/// The command line of one run. What the user gave after `--` comes last, and counts.
fn argv(file: &SweepFile, v: &Variant, seed: u64, folder: &Path, further: &[String]) -> Vec<String> {
    let further: Vec<String> = file.options.iter().chain(further).cloned().collect();
    let mut a: Vec<String> = vec!["train".into()];
    let mut option = |name: &str, value: String| {
        let given =
            further.iter().any(|f| f == name || f.strip_prefix(name).is_some_and(|r| r.starts_with('=')));
        // these may be given once only
        if !given || name == "--set" {
            a.extend([name.to_owned(), value]);
        }
    };
    for (name, path) in [("--train", &file.train), ("--valid", &file.valid), ("--config", &file.config)] {
        if let Some(path) = path {
            option(name, path.display().to_string());
        }
    }
    v.sets.iter().for_each(|set| option("--set", set.clone()));
    option("--seed", seed.to_string());
    option("--out", folder.display().to_string());
    // an interrupted run looks finished, so that it needs --force; a finished one is never trained again
    let flags = ["--quiet", "--json", "--force"].into_iter().filter(|f| !further.iter().any(|g| g == f));
    a.extend(flags.map(String::from));
    a.extend(further);
    a
}

/// The configuration that a command line of `birkhoff train` gives.
fn config_of(argv: &[String]) -> anyhow::Result<Config> {
    let cli = Cli::try_parse_from(std::iter::once("birkhoff").chain(argv.iter().map(String::as_str)));
    let cli = cli.map_err(|e| anyhow::anyhow!("{}", super::usage_line(&e.to_string())))?;
    let Subcommand::Train(train) = cli.command else { bail!("what stands after -- is for `birkhoff train`") };
    Ok(train.resolve_config()?)
}

/// Which jobs are still to be trained. A finished run of another configuration is an error.
fn check(jobs: &[Job]) -> anyhow::Result<Vec<bool>> {
    jobs.iter().map(waits).collect()
}

fn waits(job: &Job) -> anyhow::Result<bool> {
    let Ok(folder) = RunFolder::open(&job.folder) else { return Ok(true) };
    if !folder.is_finished() || folder.read_summary()?["interrupted"] == true {
        return Ok(true);
    }
    let flat = |c: &Config| -> anyhow::Result<_> { Ok(super::compare::flat(&serde_json::to_value(c)?)) };
    let (there, wanted) = (flat(&folder.read_config()?)?, flat(&job.config)?);
    if there == wanted {
        return Ok(false);
    }
    let keys: Vec<&String> = wanted.keys().chain(there.keys()).collect();
    let key = keys.into_iter().find(|k| there.get(*k) != wanted.get(*k)).cloned().unwrap_or_default();
    let show = |v: Option<&Value>| v.map_or("nothing".into(), Value::to_string);
    bail!(
        "{} is finished with another configuration ({key} is {} there, {} here); remove it, or name another folder with --out",
        job.folder.display(),
        show(there.get(&key)),
        show(wanted.get(&key)),
    )
}

/// Refuses to mix runs of different data in one table: path, size and time of the files are kept in the folder.
fn check_data(out: &Path, jobs: &[Job]) -> anyhow::Result<()> {
    let Some(job) = jobs.first() else { return Ok(()) };
    let of = |name: &str| {
        let after = job.argv.iter().rposition(|a| a == name).and_then(|i| job.argv.get(i + 1)).cloned();
        let path = after.or_else(|| {
            job.argv.iter().rev().find_map(|a| a.strip_prefix(&format!("{name}=")).map(str::to_owned))
        })?;
        let path = PathBuf::from(path);
        let path = path.canonicalize().unwrap_or(path);
        let meta = std::fs::metadata(&path).ok();
        let time = meta.as_ref().and_then(|m| m.modified().ok());
        let seconds = time.and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok()).map(|d| d.as_secs());
        Some(json!({"path": path, "bytes": meta.map(|m| m.len()), "modified": seconds}))
    };
    // what else decides the rows
    let word = |name: &str| {
        let at = job.argv.iter().rposition(|a| a == name);
        let joined =
            || job.argv.iter().rev().find_map(|a| a.strip_prefix(&format!("{name}=")).map(str::to_owned));
        at.and_then(|i| job.argv.get(i + 1)).cloned().or_else(joined)
    };
    let now = json!({
        "train": of("--train"),
        "valid": of("--valid"),
        "split": word("--split"),
        "split_by": word("--split-by"),
        "on_bad_row": word("--on-bad-row"),
    });
    let path = out.join(RECORD);
    let Ok(text) = std::fs::read(&path) else {
        let bytes = serde_json::to_vec_pretty(&now)?;
        return Ok(crate::train::run::write_atomic(&path, |w| std::io::Write::write_all(w, &bytes))?);
    };
    let then: Value = serde_json::from_slice(&text).with_context(|| {
        format!("{}: not valid JSON; remove it, or name another folder with --out", path.display())
    })?;
    for key in ["split", "split_by", "on_bad_row"] {
        if then[key] != now[key] {
            let show = |v: &Value| v.as_str().map_or("nothing".into(), str::to_owned);
            bail!(
                "the runs in {} were trained with --{} {}, not {}; name another folder with --out",
                out.display(),
                key.replace('_', "-"),
                show(&then[key]),
                show(&now[key])
            );
        }
    }
    for key in ["train", "valid"] {
        if then[key] != now[key] {
            let name = now[key]["path"].as_str().or(then[key]["path"].as_str()).unwrap_or("(none)");
            bail!(
                "{name}: not the file, or not as it was, that the runs in {} were trained on; name another folder with --out",
                out.display()
            );
        }
    }
    Ok(())
}

/// Trains what waits, `--jobs` at a time.
fn train(jobs: &[Job], waiting: &[bool], args: &SweepArgs) -> Vec<Outcome> {
    let kept = waiting.iter().filter(|w| !**w).count();
    let bar = bar(jobs.len() as u64, kept as u64);
    let say = |line: String| bar.suspend(|| eprintln!("{line}"));
    if kept > 0 {
        say(format!("{kept} of {} runs are finished already", jobs.len()));
    }
    let handler = ctrlc::set_handler(|| {
        let again = STOP.swap(true, Ordering::SeqCst);
        CHILDREN.lock().into_iter().for_each(|c| c.iter().for_each(|&id| interrupt(id)));
        if again {
            std::process::exit(130);
        }
        eprintln!(
            "\ninterrupted: the runs in progress save what they have learned; once more to quit at once"
        );
    });
    if let Err(e) = handler {
        tracing::debug!("no handler for Ctrl-C: {e}");
    }
    let outcomes: Mutex<Vec<Outcome>> =
        Mutex::new(waiting.iter().map(|w| if *w { Outcome::Interrupted } else { Outcome::Kept }).collect());
    let queue: Mutex<VecDeque<usize>> = Mutex::new((0..jobs.len()).filter(|&i| waiting[i]).collect());
    let done = Mutex::new(kept);
    let work = || {
        while let Some(i) = queue.lock().ok().and_then(|mut q| q.pop_front()) {
            if STOP.load(Ordering::SeqCst) {
                break;
            }
            let job = &jobs[i];
            let begin = Instant::now();
            let outcome = one(job, |text| bar.set_message(format!("{}  {text}", job.name)));
            let Ok(mut done) = done.lock() else { return };
            *done += 1;
            let result = match &outcome {
                Outcome::Failed(line) => format!("failed: {line}"),
                Outcome::Interrupted => "interrupted".into(),
                _ => super::compare::read(&job.folder)
                    .ok()
                    .and_then(|r| r.ne)
                    .map_or("finished".into(), |ne| format!("NE {ne:.5}")),
            };
            let seconds = begin.elapsed().as_secs_f64();
            say(format!("[{done}/{}] {}: {result} ({seconds:.1} s)", jobs.len(), job.name));
            bar.inc(1);
            if let Ok(mut all) = outcomes.lock() {
                all[i] = outcome;
            }
        }
    };
    std::thread::scope(|s| {
        for _ in 0..args.jobs {
            s.spawn(work);
        }
    });
    bar.finish_and_clear();
    outcomes.into_inner().unwrap_or_else(|e| e.into_inner())
}

/// One run as a process; `progress` is told how it goes on.
fn one(job: &Job, progress: impl Fn(String)) -> Outcome {
    let fail = |e: std::io::Error| Outcome::Failed(format!("cannot run birkhoff: {e}"));
    let program = match program() {
        Ok(p) => p,
        Err(e) => return fail(e),
    };
    progress("begins".into());
    let mut command = Command::new(program);
    command.args(&job.argv).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // a second signal would end a run at once: it gets ours alone, not the terminal's as well
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = match command.spawn() {
        Ok(c) => c,
        Err(e) => return fail(e),
    };
    let id = child.id();
    if let Ok(mut c) = CHILDREN.lock() {
        c.push(id);
        // the signal may have come while the process was made
        if STOP.load(Ordering::SeqCst) {
            interrupt(id);
        }
    }
    let stderr = child.stderr.take();
    let errors = std::thread::spawn(move || {
        let mut text = vec![];
        let _ = stderr.map(|mut s| s.read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    });
    for line in child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
        let Ok(v) = serde_json::from_str::<Value>(&line.unwrap_or_default()) else { continue };
        if v["type"] == "step" {
            let loss = v["loss"].as_f64().unwrap_or(f64::NAN);
            progress(format!("step {}/{}  loss {loss:.4}", v["step"], v["total_steps"]));
        }
    }
    let status = child.wait();
    if let Ok(mut c) = CHILDREN.lock() {
        c.retain(|&c| c != id);
    }
    let status = match status {
        Ok(s) => s,
        Err(e) => return fail(e),
    };
    let errors = errors.join().unwrap_or_default();
    if status.success() {
        return Outcome::Done;
    }
    if status.code() == Some(i32::from(super::INTERRUPTED)) || STOP.load(Ordering::SeqCst) {
        return Outcome::Interrupted;
    }
    let line = errors.lines().rev().find_map(|l| l.strip_prefix("error: "));
    let last = || errors.lines().rev().find(|l| !l.trim().is_empty()).map(str::to_owned);
    Outcome::Failed(line.map(str::to_owned).or_else(last).unwrap_or_else(|| status.to_string()))
}

/// Tells a run to end with an evaluation and saved weights. (On Windows the console tells it.)
fn interrupt(id: u32) {
    if cfg!(unix) {
        let _ = Command::new("sh").args(["-c", &format!("kill -INT {id}")]).status();
    }
}

/// This program, also where its file has been replaced by another build since the sweep began.
fn program() -> std::io::Result<PathBuf> {
    let own = Path::new("/proc/self/exe");
    if own.exists() { Ok(own.to_owned()) } else { std::env::current_exe() }
}

fn bar(total: u64, done: u64) -> ProgressBar {
    let bar = ProgressBar::new(total).with_position(done);
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template("{pos}/{len} runs [{bar:20}]  {msg}  {elapsed}");
    if let Ok(style) = style {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
