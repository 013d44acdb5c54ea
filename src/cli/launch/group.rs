//! A group of ranks on this host: started together, watched, ended together, started again.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Serialize;

use super::super::{CLOSED, FAILED, INTERRUPTED, LOST};
use super::note::{self, Note, Slot};
use super::output::{Printer, Pump, Show, Tail, To};
use super::process::{self, Action, Notice, Process};
use crate::sync::lock;

/// How often ranks are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// How long after a failure the news of another host's rank is shown where no rank here is the reason.
const NEWS: Duration = Duration::from_secs(1);

/// Restarts in a row without a newer checkpoint after which there is no sense in another.
const FUTILE: u32 = 2;

/// What the ranks are to do: the command line of each attempt, and how far the work has come.
pub trait Work {
    /// What each rank is called with. Attempt 0 is the first start, N the N-th restart.
    fn arguments(&mut self, attempt: u32) -> Vec<OsString>;

    /// The step of the newest checkpoint; `None` where nothing is saved.
    fn saved(&self) -> Option<u64> {
        None
    }

    /// Whether checkpoints show how far it has come.
    fn saves(&self) -> bool {
        false
    }

    /// Whether all is done, whatever became of the ranks afterwards.
    fn finished(&self) -> bool {
        false
    }
}

/// What happens to a group, one JSON line each with `--json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// The ranks of this host run.
    Start {
        /// 0, then the number of the restart.
        attempt: u32,
        /// Ranks of all hosts.
        world: usize,
        /// Where rank 0 is met.
        master: String,
        /// Process ids by rank.
        pids: BTreeMap<usize, u32>,
    },
    /// A rank failed, and the group starts again.
    Restart {
        /// The number of the restart.
        attempt: u32,
        /// What happened.
        reason: String,
        /// The step it goes on from.
        step: Option<u64>,
    },
    /// All ranks have ended for good.
    End {
        /// The launcher's exit code.
        code: u8,
        /// What happened, if not all went well.
        reason: Option<String>,
    },
}

/// How the group ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The exit code for the launcher.
    pub code: u8,
    /// What happened, if not all went well and nobody asked for it.
    pub reason: Option<String>,
}

/// What is shown of ranks other than 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// Every line, marked.
    #[default]
    All,
    /// Errors.
    Quiet,
    /// Nothing: each rank, also rank 0, has a file `rank-N.log` in this folder.
    Files(PathBuf),
}

/// Starts and watches the ranks of one host.
#[derive(Debug)]
pub struct Launcher {
    /// The program that every rank runs.
    pub program: PathBuf,
    /// Ranks on this host.
    pub nproc: usize,
    /// Hosts.
    pub nnodes: usize,
    /// Which of them this is.
    pub node_rank: usize,
    /// Where rank 0 is met, on restart N at the N-th port after it. `None`: on this host, a new free port each time.
    pub master: Option<(String, u16)>,
    /// What each rank finds in its environment beside its place.
    pub environment: Vec<(&'static str, String)>,
    /// What to begin with: more than 0 joins hosts that have restarted so often.
    pub attempt: u32,
    /// Restarts at most, from `attempt` on.
    pub max_restarts: u32,
    /// How long the others may take to end by themselves once a rank has failed, and again after they were asked to.
    pub grace: Duration,
    /// What is shown.
    pub output: Output,
    /// Where to.
    pub printer: Arc<Printer>,
}

/// A rank that has been started.
#[derive(Debug)]
struct Running {
    rank: usize,
    process: Process,
    end: Option<End>,
    tail: Tail,
    log: Option<Arc<Mutex<File>>>,
    /// Where it leaves its error, if it fails.
    slot: Option<Slot>,
    note: Option<Note>,
    /// Its error was shown.
    shown: bool,
    /// What the launcher last did to it on its own account.
    pushed: Option<Action>,
}

/// The end of a rank.
#[derive(Clone, Copy, Debug)]
struct End {
    status: ExitStatus,
    /// Ranks that ended before it.
    before: usize,
}

impl Launcher {
    /// Runs the group until it ends for good. Ranks live as long as the calling thread at most.
    ///
    /// # Errors
    /// A program that cannot be started, a log that cannot be written, no free port.
    pub fn run(
        &self,
        work: &mut dyn Work,
        notices: &Receiver<Notice>,
        events: &mut dyn FnMut(&Event) -> anyhow::Result<()>,
    ) -> anyhow::Result<Ended> {
        let mut attempt = self.attempt;
        let mut saved = work.saved();
        let mut futile = 0;
        loop {
            let (ranks, interrupted) = self.attempt(attempt, work, notices, events)?;
            let ended = self.verdict(&ranks, interrupted);
            let mut end = |ended: Ended| {
                events(&Event::End { code: ended.code, reason: ended.reason.clone() })?;
                Ok(ended)
            };
            let Some(reason) = &ended.reason else { return end(ended) };
            self.show_last_words(&ranks);
            let now = work.saved();
            futile = if now == saved { futile + 1 } else { 0 };
            saved = now;
            let stop = if interrupted {
                Some("it was told to end".to_owned())
            } else if let Some(why) = not_again(&ranks) {
                Some(format!("not started again: {why}"))
            } else if work.finished() {
                Some("not started again: the run is finished".into())
            } else if attempt - self.attempt >= self.max_restarts {
                Some(match self.max_restarts {
                    0 => "--max-restarts 0 allows no restart".into(),
                    n => format!("--max-restarts {n}: no further restart"),
                })
            } else if work.saves() && attempt > self.attempt && futile >= FUTILE {
                let at = now.map_or("no checkpoint was written".into(), |s| {
                    format!("step {s} is still the newest checkpoint")
                });
                Some(format!("given up after {futile} attempts without progress: {at}"))
            } else {
                None
            };
            if let Some(stop) = stop {
                return end(Ended { code: ended.code, reason: Some(format!("{reason}; {stop}")) });
            }
            attempt += 1;
            let from = match now {
                Some(step) => format!("from step {step}"),
                None => "from the start".into(),
            };
            self.printer.say(&format!(
                "{reason}; restart {} of {} {from}",
                attempt - self.attempt,
                self.max_restarts
            ));
            events(&Event::Restart { attempt, reason: reason.clone(), step: now })?;
        }
    }

    /// One life of the group, to the end of its last process; and whether it was told to end.
    fn attempt(
        &self,
        attempt: u32,
        work: &mut dyn Work,
        notices: &Receiver<Notice>,
        events: &mut dyn FnMut(&Event) -> anyhow::Result<()>,
    ) -> anyhow::Result<(Vec<Running>, bool)> {
        let (host, port) = self.meeting(attempt)?;
        let arguments = work.arguments(attempt);
        // dropped by the pumps: hangs up when all of them have seen the end
        let (open, pumps) = mpsc::channel::<()>();
        let mut ranks = vec![];
        for local in 0..self.nproc {
            ranks.push(self.start(attempt, local, &arguments, (&host, port), &open)?);
        }
        drop(open);
        events(&Event::Start {
            attempt,
            world: self.nproc * self.nnodes,
            master: format!("{host}:{port}"),
            pids: ranks.iter().map(|r| (r.rank, r.process.id())).collect(),
        })?;
        let interrupted = self.watch(&mut ranks, notices)?;
        // nothing that they wrote is lost, unless some process that outlived them holds the pipes open
        let _ = pumps.recv_timeout(Duration::from_secs(2));
        self.tell(&mut ranks, true);
        self.tell_of_others(&ranks);
        Ok((ranks, interrupted))
    }

    /// Where the ranks of an attempt meet. Late comers of an earlier attempt must find nobody there.
    fn meeting(&self, attempt: u32) -> anyhow::Result<(String, u16)> {
        match &self.master {
            Some((host, port)) => {
                let port = u32::from(*port) + attempt;
                let port = u16::try_from(port).map_err(|_| {
                    anyhow::anyhow!(
                        "port {port} of restart {attempt} is above 65535; choose a lower one with --master"
                    )
                })?;
                Ok((host.clone(), port))
            }
            None => {
                let free = TcpListener::bind(("127.0.0.1", 0)).and_then(|l| l.local_addr());
                Ok(("127.0.0.1".into(), free.context("no free port on 127.0.0.1")?.port()))
            }
        }
    }

    fn start(
        &self,
        attempt: u32,
        local: usize,
        arguments: &[OsString],
        (host, port): (&str, u16),
        open: &mpsc::Sender<()>,
    ) -> anyhow::Result<Running> {
        let rank = self.node_rank * self.nproc + local;
        let mut command = Command::new(&self.program);
        command.args(arguments);
        for (name, value) in [
            ("RANK", rank),
            ("LOCAL_RANK", local),
            ("WORLD_SIZE", self.nproc * self.nnodes),
            ("LOCAL_WORLD_SIZE", self.nproc),
            ("MASTER_PORT", usize::from(port)),
            ("BIRKHOFF_RESTART", attempt as usize),
        ] {
            command.env(name, value.to_string());
        }
        command.env("MASTER_ADDR", host);
        // without a place for it the rank prints its error itself
        let slot = Slot::new().ok();
        match &slot {
            Some(slot) => command.env(note::FILE, slot.path()),
            None => command.env_remove(note::FILE),
        };
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        // it would say that torchrun's agent occupies the port
        command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
        // one standard input cannot be read by several
        command.stdin(Stdio::null());
        let file = self.log(rank, attempt)?;
        let own = |to| rank == 0 && file.is_none() && self.printer.is_terminal(to);
        let pipe = |to| if own(to) { Stdio::inherit() } else { Stdio::piped() };
        command.stdout(pipe(To::Out)).stderr(pipe(To::Err));
        // what only goes to a file comes through one pipe: in the order in which it was written
        let mut both = None;
        if rank != 0 && file.is_some() {
            let (from, to) = std::io::pipe().context("cannot make a pipe")?;
            command.stdout(to.try_clone().context("cannot make a pipe")?).stderr(to);
            both = Some((To::Out, Box::new(from) as Box<dyn Read + Send>));
        }
        let mut process = Process::start(&mut command)
            .with_context(|| format!("cannot start {} as rank {rank}", self.program.display()))?;
        let show = match (rank, &self.output) {
            (0, _) => Show::Plain,
            (_, Output::All) => Show::Marked,
            (_, Output::Quiet) => Show::Errors,
            (_, Output::Files(_)) => Show::Nothing,
        };
        let tail = Tail::default();
        let child = process.child();
        let out = child.stdout.take().map(|o| (To::Out, Box::new(o) as Box<dyn Read + Send>));
        let err = child.stderr.take().map(|e| (To::Err, Box::new(e) as Box<dyn Read + Send>));
        for (to, pipe) in both.into_iter().chain(out).chain(err) {
            let (file, tail, printer, open) =
                (file.clone(), tail.clone(), self.printer.clone(), open.clone());
            let pump = Pump { rank, to, show, file, tail, printer };
            thread::spawn(move || {
                // an error means that nobody reads on: the rank finds its own output closed
                let _ = pump.run(pipe);
                drop(open);
            });
        }
        Ok(Running {
            rank,
            process,
            end: None,
            tail,
            log: file,
            slot,
            note: None,
            shown: false,
            pushed: None,
        })
    }

    /// The file of a rank's output, one for all attempts.
    fn log(&self, rank: usize, attempt: u32) -> anyhow::Result<Option<Arc<Mutex<File>>>> {
        let Output::Files(folder) = &self.output else { return Ok(None) };
        let path = folder.join(format!("rank-{rank}.log"));
        let open = || {
            std::fs::create_dir_all(folder)?;
            let again = attempt > self.attempt;
            let mut options = OpenOptions::new();
            let options = options.create(true).write(true).append(again).truncate(!again);
            let mut file = options.open(&path)?;
            if again {
                writeln!(file, "---- restart {attempt}")?;
            }
            Ok(Some(Arc::new(Mutex::new(file))))
        };
        open().map_err(|e: std::io::Error| anyhow::anyhow!("{}: cannot be written: {e}", path.display()))
    }

    /// Until every rank has ended. True where it was told to end.
    fn watch(&self, ranks: &mut [Running], notices: &Receiver<Notice>) -> anyhow::Result<bool> {
        let mut interrupted = false;
        let mut failed: Option<Instant> = None;
        let mut pushed = Action::Continue;
        loop {
            let mut ended = ranks.iter().filter(|r| r.end.is_some()).count();
            for r in ranks.iter_mut().filter(|r| r.end.is_none()) {
                let Some(status) = r.process.poll().context("cannot wait for a rank")? else { continue };
                r.end = Some(End { status, before: ended });
                r.note = r.slot.as_mut().and_then(Slot::read);
                ended += 1;
                let obeyed = interrupted && is_interrupt(status);
                if !status.success() && !obeyed {
                    failed.get_or_insert_with(Instant::now);
                }
            }
            let late = failed.map_or(Duration::ZERO, |f| f.elapsed());
            self.tell(ranks, late > NEWS);
            if ended == ranks.len() {
                return Ok(interrupted);
            }
            // nobody hears of a rank that has met no other
            let alone = ranks.iter().any(|r| r.note.as_ref().is_some_and(|n| n.alone));
            // the others notice by themselves; those that do not are asked, then killed
            let step = match late {
                _ if failed.is_none() => Action::Continue,
                t if t >= self.grace * 2 => Action::Kill,
                t if t >= self.grace || alone => Action::Terminate,
                _ => Action::Continue,
            };
            if step != pushed {
                pushed = step;
                push(ranks, step);
            }
            match notices.recv_timeout(LOOK) {
                Ok(Notice::End(signal)) if !interrupted => {
                    interrupted = true;
                    act(ranks, Action::Signal(signal));
                }
                Ok(Notice::End(_)) => {
                    self.printer.say("told to end once more: the ranks are killed");
                    act(ranks, Action::Kill);
                }
                Ok(Notice::Pause) => {
                    act(ranks, Action::Pause);
                    let begin = Instant::now();
                    process::pause_self();
                    failed = failed.map(|f| f + begin.elapsed());
                    act(ranks, Action::Continue);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => thread::sleep(LOOK),
            }
        }
    }

    /// What the ends of all ranks come to. The code is that of the host's first rank, if it is not 0.
    fn verdict(&self, ranks: &[Running], interrupted: bool) -> Ended {
        let Some((culprit, status)) = culprit(ranks, interrupted) else {
            // ended well, or as it was told to
            let obeyed = ranks.iter().any(|r| r.end.is_some_and(|e| !e.status.success()));
            return Ended { code: if obeyed { INTERRUPTED } else { 0 }, reason: None };
        };
        let first = ranks.first().and_then(|r| r.end).map_or(0, |e| process::exit_code(e.status));
        let code = if first == 0 { process::exit_code(status) } else { first };
        let because = culprit.note.as_ref().map(|n| n.because_of);
        let what = match (process::signal_of(status), culprit.pushed) {
            (_, Some(_)) => "did not end by itself after another rank had failed".to_owned(),
            (Some(signal), _) => format!("was killed by signal {}", process::signal_name(signal)),
            (None, _) => {
                let code = process::exit_code(status);
                let meaning = match (code, because) {
                    (LOST, Some(None)) => " (another try may do)".into(),
                    (LOST, _) => " (it lost another rank)".into(),
                    (_, Some(Some(rank))) => format!(" (because of rank {rank})"),
                    (INTERRUPTED, _) => " (interrupted)".into(),
                    (CLOSED, _) => " (its standard output was closed)".into(),
                    _ => String::new(),
                };
                format!("ended with code {code}{meaning}")
            }
        };
        Ended { code, reason: Some(format!("rank {} {what}", culprit.rank)) }
    }

    /// Shows each reason once: what ranks that failed on their own account left. `all`: what another left because of such a
    /// one, if nobody here did.
    fn tell(&self, ranks: &mut [Running], all: bool) {
        let order = |r: &&mut Running| r.end.map_or(usize::MAX, |e| e.before);
        let mut told: Vec<String> =
            ranks.iter().filter(|r| r.shown).filter_map(|r| Some(r.note.as_ref()?.line.clone())).collect();
        let here = ranks.iter().any(Running::is_reason);
        let mut failed: Vec<&mut Running> =
            ranks.iter_mut().filter(|r| r.note.is_some() && !r.shown).collect();
        failed.sort_by_key(order);
        for r in failed {
            let Some(note) = &r.note else { continue };
            let first = note.because_of.is_none() || all && !here && told.is_empty();
            if first && !told.contains(&note.line) {
                let mark = if r.rank == 0 { String::new() } else { format!("[rank {}] ", r.rank) };
                let _ = self.printer.write(To::Err, format!("{mark}error: {}\n", note.line).as_bytes());
                told.push(note.line.clone());
                r.shown = true;
            }
        }
    }

    /// How many ended because of what was told; each one's log has its own error.
    fn tell_of_others(&self, ranks: &[Running]) {
        for r in ranks {
            if let (Some(note), Some(log)) = (&r.note, &r.log) {
                // one that is full must not end the run
                let _ = writeln!(lock(log), "error: {}", note.line);
            }
        }
        let shown = ranks.iter().filter(|r| r.shown).count();
        let more = ranks.iter().filter(|r| r.note.is_some() && !r.shown).count();
        match (shown, more) {
            (0, _) | (_, 0) => {}
            (_, 1) => self.printer.say("one more rank ended with it"),
            (_, n) => self.printer.say(&format!("{n} more ranks ended with it")),
        }
    }

    /// The last hidden lines of the rank that failed, where it was hidden.
    fn show_last_words(&self, ranks: &[Running]) {
        let Some((rank, _)) = culprit(ranks, false) else { return };
        if rank.rank == 0 || self.output == Output::All {
            return;
        }
        let words: String = rank.tail.take().iter().map(|l| format!("[rank {}] {l}\n", rank.rank)).collect();
        let _ = self.printer.write(To::Err, words.as_bytes());
        if let Output::Files(folder) = &self.output {
            self.printer.say(&format!(
                "all that it wrote is in {}",
                folder.join(format!("rank-{}.log", rank.rank)).display()
            ));
        }
    }
}

impl Running {
    /// Whether it has failed on its own account, as far as is known.
    fn is_reason(&self) -> bool {
        let Some(end) = self.end.filter(|e| !e.status.success() && self.pushed.is_none()) else {
            return false;
        };
        match &self.note {
            Some(note) => note.because_of.is_none(),
            None => end.status.code() != Some(i32::from(LOST)),
        }
    }
}

/// Does this to all that still run.
fn act(ranks: &mut [Running], action: Action) {
    ranks.iter_mut().filter(|r| r.end.is_none()).for_each(|r| r.process.act(action));
}

/// The same on the launcher's own account.
fn push(ranks: &mut [Running], action: Action) {
    for r in ranks.iter_mut().filter(|r| r.end.is_none()) {
        r.process.act(action);
        r.pushed = Some(action);
    }
}

/// An end that a signal to end leads to: a rank saves and says so by its code, another program just dies of it.
fn is_interrupt(status: ExitStatus) -> bool {
    status.code() == Some(i32::from(INTERRUPTED))
        || matches!(process::signal_of(status), Some(1 | 2 | 9 | 15))
}

/// The rank whose failure is the reason of the others', and how it ended: the first that ended neither well, nor because
/// it lost another, nor by the launcher's hand; then one that hung and had to be ended; then the first that lost another.
fn culprit(ranks: &[Running], interrupted: bool) -> Option<(&Running, ExitStatus)> {
    let lost = |e: &End| e.status.code() == Some(i32::from(LOST));
    let rank_of = |r: &Running, e: End| match r.is_reason() {
        true => (0, e.before),
        false => (if r.pushed.is_some() && !lost(&e) { 1 } else { 2 }, e.before),
    };
    let failed = ranks.iter().filter_map(|r| Some((r, r.end?)));
    // those told to end may be missed by one that has not got so far as to hear it
    let obeyed = |e: &End| interrupted && (is_interrupt(e.status) || lost(e));
    let failed = failed.filter(|(_, e)| !e.status.success() && !obeyed(e));
    let first = failed.min_by_key(|(r, e)| rank_of(r, *e));
    first.map(|(r, e)| (r, e.status))
}

/// Why a restart would end as this attempt did.
fn not_again(ranks: &[Running]) -> Option<&'static str> {
    let (rank, status) = culprit(ranks, false)?;
    if rank.pushed.is_some() {
        return None;
    }
    match u8::try_from(status.code()?).ok()? {
        FAILED => Some("the same input would fail again"),
        INTERRUPTED => Some("the rank itself was told to end"),
        CLOSED => Some("nobody reads the output"),
        _ => None,
    }
}

/// Where rank 0 is met, from `HOST:PORT`; an IPv6 address in brackets.
///
/// # Errors
/// What was expected.
pub fn parse_master(text: &str) -> anyhow::Result<(String, u16)> {
    let wrong = || format!("--master {text}: expected HOST:PORT, such as 10.0.0.1:29500 or [fd00::1]:29500");
    let Some((host, port)) = text.rsplit_once(':') else { bail!(wrong()) };
    let bracketed = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    let host = bracketed.unwrap_or(host);
    let port = port.parse::<u16>().ok().filter(|&p| p > 0).with_context(wrong)?;
    if host.is_empty() || (bracketed.is_none() && host.contains([':', '[', ']'])) {
        bail!(wrong());
    }
    Ok((host.to_owned(), port))
}
