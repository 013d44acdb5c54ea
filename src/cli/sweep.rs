//! `birkhoff sweep`: many runs from one file, and one table of what they came to.
//!
//! Each run is a process of its own, so that one that fails ends no other. A run folder that is finished with the
//! configuration that the file asks for is not trained again, and one that was stopped goes on by `train --resume`: a
//! sweep that was interrupted goes on where it stopped.

mod file;
mod report;

use super::args::{Cli, Command as Subcommand, SweepArgs, TrainArgs};
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
    /// What `birkhoff` is called with for a new run.
    argv: Vec<String>,
    /// What that says.
    args: TrainArgs,
    /// The configuration that results.
    config: Config,
}

/// What there is to do for a job.
#[derive(Clone, Debug, PartialEq)]
enum Begin {
    /// Nothing: it is finished.
    Kept,
    /// A run from the first step.
    New,
    /// The rest of one that was stopped.
    GoOn,
    /// A run from the first step, over one that cannot go on: why it cannot.
    Again(String),
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
    let begins = jobs.iter().map(begin).collect::<anyhow::Result<Vec<Begin>>>()?;
    std::fs::create_dir_all(&out).with_context(|| format!("{}: cannot create the folder", out.display()))?;
    check_data(&out, &jobs)?;
    let outcomes = train(&jobs, &begins, args);
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
            let (args, config) =
                parse(&argv).with_context(|| format!("{}: run {}", args.file.display(), v.name))?;
            jobs.push(Job { variant, name, folder, argv, args, config });
        }
    }
    Ok(jobs)
}

/// The command line of one run. What the user gave after `--` comes last, and counts.
fn argv(file: &SweepFile, v: &Variant, seed: u64, folder: &Path, further: &[String]) -> Vec<String> {
    let further: Vec<String> = file.options.iter().chain(further).cloned().collect();
    let given = |name: &str| {
        further.iter().any(|f| f == name || f.strip_prefix(name).is_some_and(|r| r.starts_with('=')))
    };
    let mut a: Vec<String> = vec!["train".into()];
    let mut option = |name: &str, values: &[String]| {
        // these may be given once only, and --valid and --split exclude each other
        let other = match name {
            "--valid" => given("--split"),
            "--split" | "--split-by" => given("--valid"),
            _ => false,
        };
        if !values.is_empty() && !other && (!given(name) || name == "--set") {
            a.push(name.to_owned());
            a.extend_from_slice(values);
        }
    };
    let path = |p: &Option<PathBuf>| p.iter().map(|p| p.display().to_string()).collect::<Vec<_>>();
    let word = |w: &Option<String>| w.iter().cloned().collect::<Vec<_>>();
    option("--train", &file.train);
    option("--valid", &file.valid);
    option("--split", &word(&file.split));
    option("--split-by", &word(&file.split_by));
    option("--config", &path(&file.config));
    option("--schema", &path(&file.schema));
    option("--cache", &path(&file.cache));
    v.sets.iter().for_each(|set| option("--set", std::slice::from_ref(set)));
    option("--seed", &[seed.to_string()]);
    option("--out", &[folder.display().to_string()]);
    let flags = ["--quiet", "--json"].into_iter().filter(|f| !further.iter().any(|g| g == f));
    a.extend(flags.map(String::from));
    a.extend(further);
    a
}

/// What a command line of `birkhoff train` says, and the configuration that it gives.
fn parse(argv: &[String]) -> anyhow::Result<(TrainArgs, Config)> {
    let cli = Cli::try_parse_from(std::iter::once("birkhoff").chain(argv.iter().map(String::as_str)));
    let cli = cli.map_err(|e| anyhow::anyhow!("{}", super::usage_line(&e.to_string())))?;
    let Subcommand::Train(train) = cli.command else { bail!("what stands after -- is for `birkhoff train`") };
    let config = train.resolve_config()?;
    Ok((train, config))
}

impl Job {
    /// The command line that goes on with the job's run: what is not in its folder, or may have moved.
    fn resume(&self) -> Vec<String> {
        let TrainArgs { data, device, profile, debug_nan, dashboard, .. } = &self.args;
        let mut a: Vec<String> = ["train", "--quiet", "--json", "--resume"].map(String::from).into();
        a.push(self.folder.display().to_string());
        for (name, files) in [("--train", &data.train), ("--valid", &data.valid)] {
            if !files.is_empty() {
                a.push(name.into());
                a.extend(files.iter().map(|f| f.display().to_string()));
            }
        }
        if let Some(cache) = &data.cache {
            a.push(format!("--cache={}", cache.display()));
        }
        a.extend(["--device".into(), device.device.clone()]);
        for (flag, set) in [("--profile", profile), ("--debug-nan", debug_nan), ("--dashboard", dashboard)] {
            a.extend(set.then(|| flag.to_owned()));
        }
        a
    }

    /// The command line of a new run over the one in the folder.
    fn again(&self) -> Vec<String> {
        let force = (!self.args.force).then(|| "--force".to_owned());
        self.argv.iter().cloned().chain(force).collect()
    }
}

/// What there is to do for a job. A finished run of another configuration is an error.
fn begin(job: &Job) -> anyhow::Result<Begin> {
    if !RunFolder::is_run(&job.folder) {
        return Ok(Begin::New);
    }
    let finished = match RunFolder::open(&job.folder) {
        // older versions gave runs that were stopped a summary
        Ok(folder) => folder.is_finished() && folder.read_summary()?["interrupted"] != true,
        // stopped before its first evaluation
        Err(_) => false,
    };
    let flat = |c: &Config| -> anyhow::Result<_> { Ok(super::compare::flat(&serde_json::to_value(c)?)) };
    let there = Config::load(Some(&job.folder.join(crate::train::run::CONFIG)), &[]);
    let there = match there {
        Ok(c) => flat(&c)?,
        Err(e) if finished => return Err(e.into()),
        Err(e) => return Ok(Begin::Again(e.to_string())),
    };
    let wanted = flat(&job.config)?;
    let keys: Vec<&String> = wanted.keys().chain(there.keys()).collect();
    let Some(key) = keys.into_iter().find(|k| there.get(*k) != wanted.get(*k)) else {
        return Ok(match (finished, job.args.force) {
            (true, _) => Begin::Kept,
            (false, true) => Begin::Again("--force is given".into()),
            (false, false) => Begin::GoOn,
        });
    };
    let show = |v: Option<&Value>| v.map_or("nothing".into(), Value::to_string);
    let difference = format!("{key} is {} there, {} here", show(there.get(key)), show(wanted.get(key)));
    if !finished {
        return Ok(Begin::Again(format!("its configuration is another: {difference}")));
    }
    bail!(
        "{} is finished with another configuration ({difference}); remove it, or name another folder with --out",
        job.folder.display(),
    )
}

/// Refuses to mix runs of different data in one table: path, size and time of the files are kept in the folder.
fn check_data(out: &Path, jobs: &[Job]) -> anyhow::Result<()> {
    let Some(job) = jobs.first() else { return Ok(()) };
    let file = |path: PathBuf| {
        let path = path.canonicalize().unwrap_or(path);
        let meta = std::fs::metadata(&path).ok();
        let time = meta.as_ref().and_then(|m| m.modified().ok());
        let seconds = time.and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok()).map(|d| d.as_secs());
        json!({"path": path, "bytes": meta.map(|m| m.len()), "modified": seconds})
    };
    let of = |patterns: &[PathBuf]| -> anyhow::Result<Value> {
        let places = crate::data::input::places(patterns)?;
        let mut files: Vec<Value> = places.iter().map(|p| file(p.name())).collect();
        Ok(match files.len() {
            0 | 1 => json!(files.pop()),
            _ => json!(files),
        })
    };
    let data = &job.args.data;
    let given = data.train.iter().chain(&data.valid).chain(&job.args.config.config).chain(&data.schema);
    if let Some(pipe) = given.into_iter().find(|p| crate::data::input::is_pipe(p)) {
        let name =
            if pipe.as_os_str() == "-" { "standard input (-)".into() } else { pipe.display().to_string() };
        bail!(
            "a sweep reads its files once a run, which {name} cannot be, as it is a pipe; write it to a file first"
        );
    }
    // what else decides the rows
    let now = json!({
        "train": of(&data.train)?,
        "valid": of(&data.valid)?,
        "split": data.split,
        "split_by": data.split_by,
        "on_bad_row": data.on_bad_row,
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
            let list = |v: &Value| v.as_array().cloned().unwrap_or_else(|| vec![v.clone()]);
            let (now, then) = (list(&now[key]), list(&then[key]));
            let other = now.iter().find(|f| !then.contains(f)).or(then.iter().find(|f| !now.contains(f)));
            let name = other.and_then(|f| f["path"].as_str()).unwrap_or("(another order of the files)");
            bail!(
                "{name}: not the file, or not as it was, that the runs in {} were trained on; name another folder with --out",
                out.display()
            );
        }
    }
    Ok(())
}

/// Trains what waits, `--jobs` at a time.
fn train(jobs: &[Job], begins: &[Begin], args: &SweepArgs) -> Vec<Outcome> {
    let kept = begins.iter().filter(|b| **b == Begin::Kept).count();
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
    let before = |b: &Begin| if *b == Begin::Kept { Outcome::Kept } else { Outcome::Interrupted };
    let outcomes: Mutex<Vec<Outcome>> = Mutex::new(begins.iter().map(before).collect());
    let waits = |&i: &usize| begins[i] != Begin::Kept;
    let queue: Mutex<VecDeque<usize>> = Mutex::new((0..jobs.len()).filter(waits).collect());
    let done = Mutex::new(kept);
    let work = || {
        while let Some(i) = queue.lock().ok().and_then(|mut q| q.pop_front()) {
            if STOP.load(Ordering::SeqCst) {
                break;
            }
            let job = &jobs[i];
            let begin = Instant::now();
            let progress = |text: String| bar.set_message(format!("{}  {text}", job.name));
            let again = |why: &str| {
                say(format!("{}: begins again at its first step: {why}", job.name));
                one(&job.again(), progress).0
            };
            let outcome = match &begins[i] {
                Begin::Again(why) => again(why),
                Begin::GoOn => {
                    say(format!("{}: was stopped, goes on", job.name));
                    match one(&job.resume(), progress) {
                        // it never came to its first step
                        (Outcome::Failed(why), false) => again(&why),
                        (outcome, _) => outcome,
                    }
                }
                Begin::New | Begin::Kept => one(&job.argv, progress).0,
            };
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

/// One run as a process; `progress` is told how it goes on. Beside the outcome, whether it came to a step or an
/// evaluation.
fn one(argv: &[String], progress: impl Fn(String)) -> (Outcome, bool) {
    let fail = |e: std::io::Error| (Outcome::Failed(format!("cannot run birkhoff: {e}")), true);
    let program = match program() {
        Ok(p) => p,
        Err(e) => return fail(e),
    };
    progress("begins".into());
    let mut command = Command::new(program);
    command.args(argv).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
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
    let mut began = false;
    for line in child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
        let Ok(v) = serde_json::from_str::<Value>(&line.unwrap_or_default()) else { continue };
        // what is told of the rows comes before all steps
        began |= v["type"] != "drift";
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
        return (Outcome::Done, began);
    }
    if status.code() == Some(i32::from(super::INTERRUPTED)) || STOP.load(Ordering::SeqCst) {
        return (Outcome::Interrupted, began);
    }
    let line = errors.lines().rev().find_map(|l| l.strip_prefix("error: "));
    let last = || errors.lines().rev().find(|l| !l.trim().is_empty()).map(str::to_owned);
    let line = line.map(str::to_owned).or_else(last).unwrap_or_else(|| status.to_string());
    (Outcome::Failed(line), began)
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
