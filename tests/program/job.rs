//! Training on several ranks as real processes: a folder with rows, launchers and ranks over them.

use birkhoff::train::sharded::Checkpoint;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{ok, s};

/// Longer than anything here takes on a machine with other work.
pub const LONG: Duration = Duration::from_secs(120);

/// A small model whose losses hardly depend on the order of sums (see tests/parity.rs on the tables' rate).
const SMALL: [&str; 8] = [
    "model.layers=1",
    "model.width=8",
    "train.epochs=1",
    "train.log_every=1",
    "train.diagnose_every=0",
    "train.eval_batch=16",
    "train.embedding_lr=0.002",
    "train.clip=1.0",
];

/// A folder with rows to train and validate on.
pub struct Job {
    dir: tempfile::TempDir,
    pub train: PathBuf,
    pub valid: PathBuf,
}

impl Job {
    /// Generated rows.
    pub fn new(rows: u64) -> Job {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, rows: u64, seed: &str| {
            let path = dir.path().join(name);
            ok(&["synth", "--rows", &rows.to_string(), "--seed", seed, "--out", s(&path)]);
            path
        };
        Job { train: file("train.tsv", rows, "1"), valid: file("valid.tsv", 128, "2"), dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `train … --out RUN`.
    pub fn training(&self, run: &Path, sets: &[&str]) -> Vec<String> {
        let mut argv: Vec<String> = [
            "train",
            "--train",
            s(&self.train),
            "--valid",
            s(&self.valid),
            "--out",
            s(run),
            "--device",
            "cpu",
        ]
        .map(str::to_owned)
        .into();
        for set in SMALL.iter().chain(sets) {
            argv.extend(["--set".into(), (*set).into()]);
        }
        argv
    }

    /// One process alone.
    pub fn alone(&self, name: &str, sets: &[&str]) -> Run {
        let run = self.path(name);
        ok(&self.training(&run, sets).iter().map(String::as_str).collect::<Vec<_>>());
        Run(run)
    }

    /// `birkhoff launch OPTIONS --json -- COMMAND`, its output going to files beside the run.
    pub fn launch(&self, options: &[&str], command: &[String]) -> Started {
        let mut c = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
        c.arg("launch").args(options).arg("--json").arg("--").args(command);
        Started::new(&mut c, self.file())
    }

    /// Starts a rank that nobody launched, with more in its environment.
    pub fn rank(
        &self,
        rank: usize,
        world: usize,
        port: u16,
        argv: &[String],
        more: &[(&str, &str)],
    ) -> Started {
        let mut c = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
        c.args(argv);
        for (name, value) in [("RANK", rank), ("WORLD_SIZE", world), ("MASTER_PORT", port.into())] {
            c.env(name, value.to_string());
        }
        c.env("MASTER_ADDR", "127.0.0.1").env("BIRKHOFF_SECRET", "a secret").env("RAYON_NUM_THREADS", "1");
        Started::new(c.envs(more.iter().copied()), self.file())
    }

    /// A name of its own for what a process writes.
    pub fn file(&self) -> PathBuf {
        self.path(&format!("process-{}", PROCESSES.fetch_add(1, Ordering::Relaxed)))
    }

    /// Fails if a process is left whose command line has this folder in it.
    pub fn assert_nobody_left(&self) {
        let begin = Instant::now();
        while let Some(who) = mentions(self.dir.path()) {
            assert!(begin.elapsed() < Duration::from_secs(10), "still there: {who}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

static PROCESSES: AtomicUsize = AtomicUsize::new(0);

/// A process, this one apart, whose command line names the folder. Zombies have none.
fn mentions(folder: &Path) -> Option<String> {
    let own = std::process::id().to_string();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name.to_str().is_none_or(|n| n == own || n.parse::<u32>().is_err()) {
            continue;
        }
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if line.contains(s(folder)) {
            return Some(format!("{name:?}: {line}"));
        }
    }
    None
}

/// A launcher, or a rank without one. What it writes goes to files: a pipe that nobody reads would hold it up.
pub struct Started {
    pub child: Child,
    out: PathBuf,
    err: PathBuf,
}

impl Started {
    pub fn new(command: &mut Command, name: PathBuf) -> Started {
        let (out, err) = (name.with_extension("out"), name.with_extension("err"));
        let file = |p: &Path| std::fs::File::create(p).unwrap();
        let child = command.stdin(Stdio::null()).stdout(file(&out)).stderr(file(&err)).spawn().unwrap();
        Started { child, out, err }
    }

    pub fn stderr(&self) -> String {
        std::fs::read_to_string(&self.err).unwrap_or_default()
    }

    /// The launcher's events of a kind.
    pub fn events(&self, kind: &str) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(&self.out).unwrap_or_default();
        let lines = text.lines().filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok());
        lines.filter(|e| e["event"] == kind).collect()
    }

    /// Process ids by rank, once the N-th start has taken place.
    pub fn pids(&mut self, start: usize) -> Vec<u32> {
        self.until(&format!("start {start}"), |l| l.events("start").len() > start);
        let pids = self.events("start")[start]["pids"].as_object().unwrap().clone();
        let mut pids: Vec<(usize, u32)> =
            pids.iter().map(|(r, p)| (r.parse().unwrap(), p.as_u64().unwrap() as u32)).collect();
        pids.sort();
        pids.into_iter().map(|p| p.1).collect()
    }

    /// Waits for something that comes while it runs.
    pub fn until(&mut self, what: &str, is: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        while !is(self) {
            let end = self.child.try_wait().unwrap();
            assert!(end.is_none() || is(self), "ended ({end:?}) before: {what}\n{}", self.stderr());
            assert!(begin.elapsed() < LONG, "never came: {what}\n{}", self.stderr());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its exit code and what it wrote to stderr.
    pub fn end(&mut self) -> (Option<i32>, String) {
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(begin.elapsed() < LONG, "it does not end\n{}", self.stderr());
            std::thread::sleep(Duration::from_millis(5));
        };
        let err = self.stderr();
        assert!(!err.contains("panicked"), "{err}");
        (status.code(), err)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A run folder.
pub struct Run(pub PathBuf);

impl Run {
    fn summary(&self) -> serde_json::Value {
        let path = self.0.join("summary.json");
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_str(&text).unwrap()
    }

    /// Validation: log loss and normalized entropy.
    pub fn result(&self) -> [f64; 2] {
        let s = self.summary();
        ["logloss", "ne"].map(|k| s[k].as_f64().unwrap())
    }

    /// Each step's loss, as recorded.
    pub fn losses(&self) -> Vec<(u64, f64)> {
        let text = std::fs::read_to_string(self.0.join("metrics.jsonl")).unwrap_or_default();
        let lines = text.lines().filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok());
        lines
            .filter(|l| l["type"] == "step")
            .map(|l| (l["step"].as_u64().unwrap(), l["loss"].as_f64().unwrap()))
            .collect()
    }

    /// Steps of its checkpoints.
    pub fn checkpoints(&self) -> Vec<u64> {
        self.checkpoint_files().into_iter().map(|c| c.0).collect()
    }

    /// Step and file, in order.
    fn checkpoint_files(&self) -> Vec<(u64, PathBuf)> {
        let entries = std::fs::read_dir(self.0.join("checkpoints")).into_iter().flatten().flatten();
        let step = |p: &Path| {
            p.file_name()?.to_str()?.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse().ok()
        };
        let mut all: Vec<(u64, PathBuf)> =
            entries.filter_map(|e| Some((step(&e.path())?, e.path()))).collect();
        all.sort();
        all
    }

    /// Reads each checkpoint whole and checks its sums.
    pub fn assert_readable(&self) {
        for (step, path) in self.checkpoint_files() {
            let read = Checkpoint::open(&path).and_then(|mut c| {
                assert_eq!(c.meta().step, step);
                c.verify(|_| true)
            });
            // an older one goes when a newer one is there
            assert!(read.is_ok() || !path.exists(), "{}: {}", path.display(), read.unwrap_err());
        }
    }

    /// The same steps with the same losses and the same result, to the last bit.
    pub fn assert_same(&self, other: &Run, what: &str) {
        assert_eq!(self.losses(), other.losses(), "{what}");
        assert_eq!(self.result(), other.result(), "{what}");
    }

    /// The same within a bound.
    pub fn assert_near(&self, other: &Run, bound: f64, what: &str) {
        let (a, b) = (self.losses(), other.losses());
        assert_eq!(a.len(), b.len(), "{what}");
        assert!(a.len() > 3, "{what}: {a:?}");
        let steps = a.iter().zip(&b).map(|(a, b)| (a.1 - b.1).abs());
        let ends = self.result().into_iter().zip(other.result()).map(|(a, b)| (a - b).abs());
        let worst = steps.chain(ends).fold(0.0, f64::max);
        println!("{what}: worst difference {worst:.1e} over {} steps", a.len());
        assert!(worst <= bound, "{what}: {worst}");
    }
}

/// As words for [`ok`].
pub fn text(argv: &[String]) -> Vec<&str> {
    argv.iter().map(String::as_str).collect()
}

/// A signal by its name, to one process.
pub fn signal(name: &str, pid: u32) -> bool {
    let o = Command::new("kill").args([name, &pid.to_string()]).output().unwrap();
    o.status.success()
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).unwrap().port()
}

/// Lines that begin with `error`.
pub fn errors(text: &str) -> Vec<&str> {
    text.lines().filter(|l| l.starts_with("error")).collect()
}
