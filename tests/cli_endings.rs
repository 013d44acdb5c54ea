//! How a command ends: out of memory, interrupted, on pipes, on a run that was changed; and what it leaves behind.
#![cfg(target_os = "linux")]

mod program;

use birkhoff::train::checkpoint::{self, TensorRef};
use birkhoff::train::infer::check_scores;
use program::{birkhoff, fails, ok, s};
use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const SMALL: [&str; 11] = [
    "--device",
    "cpu",
    "--quiet",
    "--epochs",
    "1",
    "--set",
    "model.layers=1",
    "--set",
    "model.width=8",
    "--set",
    "train.diagnose_every=0",
];

const SCHEMA: &str = "
[data]
min_count = 1
[[data.columns]]
name = 'click'
kind = 'label'
[[data.columns]]
name = 'user'
kind = 'categorical'
[[data.columns]]
name = 'hist'
kind = 'list'
[[data.columns]]
name = 'x'
kind = 'numeric'
transform = 'none'
";

/// 400 rows, of which one has a list so long.
fn log(longest: usize) -> String {
    let mut text = String::from("click,user,hist,x\n");
    for i in 0..400 {
        let n = if i == 7 { longest } else { 1 + i % 3 };
        let list: Vec<String> = (0..n).map(|k| (k * 31 % 99).to_string()).collect();
        let _ = writeln!(text, "{},u{},{},{}", i * 7 % 5 % 2, i % 9, list.join("|"), (i % 10) as f32 / 10.0);
    }
    text
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new(longest: usize) -> Folder {
        let f = Folder(tempfile::tempdir().unwrap());
        std::fs::write(f.at("log.csv"), log(longest)).unwrap();
        std::fs::write(f.at("s.toml"), SCHEMA).unwrap();
        f
    }

    fn at(&self, name: &str) -> String {
        s(&self.0.path().join(name)).to_owned()
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.at(folder)).unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// `train` with what else is said.
    fn train(&self, more: &[&str]) -> Vec<String> {
        let (log, schema, run) = (self.at("log.csv"), self.at("s.toml"), self.at("run"));
        let start = ["train", "--train", &log, "--split", "0.8,0.2", "--schema", &schema, "--out", &run];
        start.iter().chain(&SMALL).chain(more).map(|a| (*a).to_owned()).collect()
    }
}

fn words(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

/// The program with so many KiB of address space.
fn limited(kib: usize, args: &[&str]) -> Output {
    let mut c = Command::new("bash");
    c.args(["-c", "ulimit -v $0; exec \"$@\"", &kib.to_string(), env!("CARGO_BIN_EXE_birkhoff")]).args(args);
    c.output().expect("bash")
}

/// Exit code 2 and one line.
fn one_line(o: &Output, part: &str) {
    let err = String::from_utf8_lossy(&o.stderr);
    let errors: Vec<&str> = err.lines().filter(|l| l.starts_with("error")).collect();
    assert_eq!((o.status.code(), errors.len()), (Some(2), 1), "{:?}: {err}", o.status);
    assert!(errors[0].contains(part) && !err.contains("panicked"), "{err}");
}

/// Memory follows the lists' values, not rows times the longest list: with that, this took 4 and 40 GB.
#[test]
fn one_long_list_takes_little_memory() {
    for longest in [20_000, 200_000] {
        let f = Folder::new(longest);
        let (run, log) = (f.at("run"), f.at("log.csv"));
        let within = |args: &[&str]| {
            let o = limited(2_000_000, args);
            assert!(o.status.success(), "{longest}: {}", String::from_utf8_lossy(&o.stderr));
            String::from_utf8(o.stdout).unwrap()
        };
        within(&["schema", &log]);
        within(&["check", &log, "--schema", &f.at("s.toml")]);
        within(&words(&f.train(&[])));
        within(&["eval", &run, "--data", &log, "--device", "cpu"]);
        let scores = within(&["predict", &run, "--data", &log, "--device", "cpu", "--out", "-"]);
        assert_eq!(scores.lines().count(), 401);
        // rows whose lists are longer together than any batch of training rows: each is scored as it is alone
        let text: String = log_of_long_rows(longest);
        let (many, first) = (f.at("many.csv"), f.at("first.csv"));
        std::fs::write(&many, &text).unwrap();
        std::fs::write(&first, text.lines().take(2).map(|l| format!("{l}\n")).collect::<String>()).unwrap();
        let many = within(&["predict", &run, "--data", &many, "--device", "cpu", "--out", "-"]);
        let first = within(&["predict", &run, "--data", &first, "--device", "cpu", "--out", "-"]);
        assert_eq!(many.lines().count(), 31);
        let score = |line: &str| line.split(',').next().unwrap().parse::<f64>().unwrap();
        let one = score(first.lines().nth(1).unwrap());
        assert!(many.lines().skip(1).all(|l| (score(l) - one).abs() < 1e-6), "{many}\n{first}");
    }
}

/// Thirty rows, all with the longest list.
fn log_of_long_rows(longest: usize) -> String {
    let text = log(longest);
    let row = text.lines().nth(8).unwrap();
    std::iter::once("click,user,hist,x")
        .chain(std::iter::repeat_n(row, 30))
        .map(|l| format!("{l}\n"))
        .collect()
}

#[test]
fn what_does_not_fit_is_one_line_and_the_run_can_be_begun_again() {
    let f = Folder::new(5);
    for (kib, more) in [
        (4_000_000, &["--set", "model.width=8192"][..]),
        (1_500_000, &["--set", "model.layers=12", "--set", "model.width=1024"][..]),
        (1_500_000, &["--set", "data.ids=hash", "--set", "data.buckets=50000000"][..]),
        (1_500_000, &["--set", "train.eval_batch=4194304"][..]),
    ] {
        let args = f.train(more);
        let args: Vec<&str> = words(&args).into_iter().chain(["--force"]).collect();
        one_line(&limited(kib, &args), "memory");
    }
    // less than the program itself takes: whoever asks first
    for kib in [60_000, 90_000, 150_000, 300_000, 600_000] {
        let args = f.train(&["--force"]);
        let o = limited(kib, &words(&args));
        assert!(
            matches!(o.status.code(), Some(0 | 2)),
            "{kib}: {:?} {}",
            o.status,
            String::from_utf8_lossy(&o.stderr)
        );
    }
    ok(&words(&f.train(&["--force"])));
}

fn shell(command: &str) -> Output {
    let o = Command::new("bash").args(["-c", command]).stdin(Stdio::null()).output().unwrap();
    assert!(!String::from_utf8_lossy(&o.stderr).contains("panicked"));
    o
}

#[test]
fn pipes_are_read_like_files_or_refused_by_name() {
    let f = Folder::new(5);
    let (log, schema, bin) = (f.at("log.csv"), f.at("s.toml"), env!("CARGO_BIN_EXE_birkhoff"));
    let small = SMALL.join(" ");
    ok(&words(&f.train(&[])));
    let run = f.at("run");
    let same = |command: &str, file: &str| {
        let o = shell(command);
        let err = String::from_utf8_lossy(&o.stderr);
        assert!(o.status.success(), "{command}: {err}");
        assert!(
            err.contains("/dev/fd/") && err.contains(": a pipe; copied to a temporary file first"),
            "{err}"
        );
        let plain = shell(file);
        assert!(plain.status.success() && plain.stdout == o.stdout, "{command}: {err}");
    };
    let both = |command: &str| {
        let piped = command.replace("FILE", &format!("<(cat {log})"));
        same(&format!("{bin} {piped}"), &format!("{bin} {}", command.replace("FILE", &log)));
    };
    both(&format!("predict {run} --device cpu --out - --data FILE"));
    both(&format!("eval {run} --device cpu --json --data FILE"));
    both(&format!("check --schema {schema} --json FILE"));
    // the configuration, too, and --split on a pipe
    let train = format!(
        "{bin} train --train <(gzip -c {log}) --split 0.8,0.2 --schema <(cat {schema}) --out {}2 {small}",
        f.at("run")
    );
    let o = shell(&train);
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
    let of = |run: &str| std::fs::read(Path::new(run).join("vocab.json")).unwrap();
    assert_eq!(of(&run), of(&f.at("run2")));
    fails(
        &["train", "--resume", &f.at("run2"), "--epochs", "2"],
        &["--train /dev/fd/", "a pipe", "--train FILE"],
    );
    // an error names the pipe
    let o = shell(&format!("{bin} eval {run} --device cpu --data <(echo user)"));
    let err = String::from_utf8_lossy(&o.stderr);
    assert!(o.status.code() == Some(2) && err.lines().last().unwrap().contains("/dev/fd/"), "{err}");
    // several readers
    let o = shell(&format!("{train} --force --ranks 2"));
    one_line(&o, "a pipe that can be read once only");
    let fifo = f.at("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    fails(
        &["launch", "--nproc", "2", "--", "train", "--train", &fifo, "--valid", &log, "--out", &f.at("run3")],
        &[&fifo],
    );
}

/// Starts the program on standard input that does not end, or with a pipe that nobody writes, and interrupts it.
fn interrupted(f: &Folder, args: &[&str], signal: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_birkhoff"))
        .args(args)
        .env("TMPDIR", f.at("tmp"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    // more than formats are told from; as much as it reads before it ends
    let rows = log(5);
    let rows = format!("{rows}{}", rows.split_once('\n').unwrap().1.repeat(40));
    let writer = std::thread::spawn(move || {
        let _ = input.write_all(rows.as_bytes());
        input
    });
    let began = Instant::now();
    let temporary = || f.names("tmp").len() + f.names("out").iter().filter(|n| n.contains(".tmp-")).count();
    while temporary() == 0 && began.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(temporary() > 0, "{args:?}: it has a temporary file");
    let kill = Command::new("kill").args([signal, &child.id().to_string()]).status();
    assert!(kill.unwrap().success());
    let end = child.wait_with_output().unwrap();
    drop(writer.join().unwrap());
    end
}

#[test]
fn an_interrupted_command_leaves_nothing_and_the_next_clears_what_a_kill_left() {
    let f = Folder::new(5);
    ok(&words(&f.train(&[])));
    let (run, schema) = (f.at("run"), f.at("s.toml"));
    ["tmp", "out"].iter().for_each(|d| std::fs::create_dir(f.at(d)).unwrap());
    let scores = f.at("out/scores.csv");
    let (synth, written) = (f.at("out/synth.tsv"), f.at("out/s.toml"));
    let commands: [&[&str]; 5] = [
        &["predict", &run, "--device", "cpu", "--data", "-", "--out", &scores],
        &["synth", "--rows", "100000000", "--out", &synth],
        &["schema", "-", "--out", &written],
        &["check", "-", "--schema", &schema],
        &["eval", &run, "--device", "cpu", "--data", "-"],
    ];
    for args in commands {
        for signal in ["-INT", "-TERM"] {
            let o = interrupted(&f, args, signal);
            assert_eq!(
                o.status.code(),
                Some(130),
                "{args:?} {signal}: {}",
                String::from_utf8_lossy(&o.stderr)
            );
            assert_eq!((f.names("tmp"), f.names("out")), (vec![], vec![]), "{args:?} {signal}");
        }
    }
    for args in [commands[0], commands[3]] {
        interrupted(&f, args, "-KILL");
        assert_eq!(f.names("tmp").len() + f.names("out").len(), 1);
        let o = Command::new(env!("CARGO_BIN_EXE_birkhoff"))
            .args(["predict", &run, "--device", "cpu", "--data", &f.at("log.csv"), "--out", &scores])
            .env("TMPDIR", f.at("tmp"))
            .output()
            .unwrap();
        assert!(o.status.success());
        assert_eq!((f.names("tmp"), f.names("out")), (vec![], vec!["scores.csv".to_owned()]));
        std::fs::remove_file(&scores).unwrap();
    }
}

#[test]
fn a_run_that_was_changed_is_noticed() {
    let f = Folder::new(5);
    ok(&words(&f.train(&[])));
    let (run, log) = (f.at("run"), f.at("log.csv"));
    let config = Path::new(&run).join("config.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    let edited = text.replacen("heads = ", "heads = 1 # ", 1);
    assert_ne!(text, edited);
    std::fs::write(&config, edited).unwrap();
    let eval = ["eval", &run, "--data", &log, "--device", "cpu"];
    fails(&eval, &["config.toml: model.modules[", "].heads = 1, ", "undo the change"]);
    fails(&["predict", &run, "--data", &log, "--device", "cpu", "--out", &f.at("p.csv")], &["heads = 1"]);
    fails(&["export", &run, "--out", &f.at("m.onnx")], &["heads = 1"]);
    fails(&["export", &run, "--step", "1", "--out", &f.at("m.safetensors")], &["1"]);
    std::fs::write(&config, &text).unwrap();
    ok(&eval);
    // the vocabularies are made again where the checkpoint proves that they are the same
    let vocab = Path::new(&run).join("vocab.json");
    let before = std::fs::read(&vocab).unwrap();
    std::fs::remove_file(&vocab).unwrap();
    fails(&eval, &["vocab.json"]);
    ok(&["train", "--resume", &run, "--epochs", "2", "--quiet"]);
    assert_eq!(std::fs::read(&vocab).unwrap(), before);
    // other rows of the same number
    std::fs::remove_file(&vocab).unwrap();
    std::fs::write(&log, std::fs::read_to_string(&log).unwrap().replace(",u1,", ",v1,")).unwrap();
    let resume = ["train", "--resume", &run, "--epochs", "3", "--quiet"];
    fails(&resume, &["same size and other content"]);
    // an older version did not keep what the files were
    let record = Path::new(&run).join("data.json");
    let mut old: serde_json::Value = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
    ["files", "valid_files"].iter().for_each(|k| drop(old.as_object_mut().unwrap().remove(*k)));
    std::fs::write(&record, old.to_string()).unwrap();
    fails(&resume, &["vocab.json"]);
    assert!(!vocab.exists());
}

#[test]
fn scores_that_are_no_numbers_are_an_error_with_their_row() {
    let f = Folder::new(5);
    ok(&words(&f.train(&[])));
    let (run, bad, out) = (f.at("run"), f.at("log.csv"), f.at("p.csv"));
    // a weight behind which nothing makes a number of it again
    let file = Path::new(&run).join("weights.safetensors");
    let header = checkpoint::read_header(&file).unwrap();
    let mut weights = checkpoint::load(&file, &header.tensors).unwrap();
    let at = header.tensors.iter().position(|t| t.name == "head.b1").unwrap();
    weights.tensors[at][0] = f32::NAN;
    let tensors = header.tensors.iter().zip(&weights.tensors);
    let tensors: Vec<TensorRef<'_>> =
        tensors.map(|(t, data)| TensorRef { name: &t.name, shape: &t.shape, dtype: t.dtype, data }).collect();
    checkpoint::save(&file, &tensors, &header.meta).unwrap();
    fails(
        &["predict", &run, "--data", &bad, "--device", "cpu", "--out", &out],
        &["row 1: its score is not finite"],
    );
    assert!(!Path::new(&out).exists());
    fails(&["eval", &run, "--data", &bad, "--device", "cpu"], &["row 1: its score is not finite"]);
    let later = check_scores(&[0.5, f32::INFINITY], 40).unwrap_err().to_string();
    assert!(later.starts_with("row 42: ") && check_scores(&[0.5], 40).is_ok(), "{later}");
    // two columns of one name
    for (columns, part) in
        [("score", "score: the output"), ("logit", "logit: the output"), ("user,user", "given twice")]
    {
        let columns: Vec<&str> = columns.split(',').collect();
        let mut args = vec!["predict", &run, "--data", &bad, "--device", "cpu", "--out", &out];
        for c in columns {
            args.extend(["--columns", c]);
        }
        fails(&args, &[part]);
    }
}

#[test]
fn weights_that_are_all_0_are_refused_by_name() {
    let f = Folder::new(5);
    std::fs::write(f.at("s.toml"), SCHEMA.replace("'numeric'\ntransform = 'none'", "'weight'")).unwrap();
    let text: String = log(5)
        .lines()
        .enumerate()
        .map(|(i, l)| match i {
            0 => format!("{l}\n"),
            _ => format!("{},0\n", l.rsplit_once(',').unwrap().0),
        })
        .collect();
    std::fs::write(f.at("log.csv"), text).unwrap();
    fails(&words(&f.train(&[])), &["column x: the weights of all", "are 0"]);
}

#[test]
fn what_may_not_be_read_is_said_so() {
    use std::os::unix::fs::PermissionsExt;
    let f = Folder::new(5);
    ok(&words(&f.train(&[])));
    let run = f.at("run");
    // as nobody, where this is root; the folder of the test is everybody's
    let everybody =
        |path: &str, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    everybody(s(f.0.path()), 0o755);
    let nobody = |args: &[&str]| {
        let mut c = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
        c.args(args).current_dir("/");
        if nix_is_root() {
            c.uid(65534).gid(65534);
        }
        c.output()
    };
    everybody(&run, 0o000);
    match nobody(&["eval", &run, "--data", &f.at("log.csv"), "--device", "cpu"]) {
        Ok(o) => one_line(&o, "Permission denied"),
        Err(e) => println!("SKIP: the program cannot be started as another user: {e}"),
    }
    everybody(&run, 0o755);
    everybody(&f.at("log.csv"), 0o000);
    if let Ok(o) = nobody(&["schema", &f.at("log.csv")]) {
        one_line(&o, "Permission denied");
    }
    everybody(&f.at("log.csv"), 0o644);
}

/// Whether the tests run as root, whom permissions do not bind.
fn nix_is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    status.lines().any(|l| l.starts_with("Uid:\t0\t"))
}

#[test]
fn launch_with_json_prints_json_alone() {
    let f = Folder::new(5);
    let args = f.train(&[]);
    let mut all = vec!["launch", "--nproc", "2", "--json", "--"];
    all.extend(words(&args));
    let o = birkhoff(&all);
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
    let out = String::from_utf8(o.stdout).unwrap();
    assert!(!out.is_empty());
    for line in out.lines() {
        assert!(serde_json::from_str::<serde_json::Value>(line).is_ok_and(|v| v.is_object()), "{line}");
    }
    assert!(String::from_utf8_lossy(&o.stderr).contains("run folder"), "the summary is on stderr");
}
