//! What happens to training on several ranks when processes die, hang or do not belong there, with real processes.
//! Links that fail are in tests/netns.rs.
#![cfg(target_os = "linux")]

mod program;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use program::job::{Job, LONG, Run, Started, errors, free_port, signal, text};
use program::{ok, s};
use rand::{RngExt, SeedableRng};

/// Twenty kills of any rank at any moment: before the ranks have met, at a step, while a checkpoint is written.
#[test]
fn killed_ranks_cost_nothing_but_time() {
    const KILLS: usize = 20;
    let job = Job::new(2500);
    let sets = ["train.batch=16", "train.checkpoint_every=6"];
    let launch = |name: &str| {
        let run = Run(job.path(name));
        let argv = job.training(&run.0, &sets);
        (job.launch(&["--nproc", "3", "--max-restarts", "6", "--grace", "3"], &argv), run)
    };
    let (mut launched, undisturbed) = launch("undisturbed");
    let (code, err) = launched.end();
    assert_eq!(code, Some(0), "{err}");
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(5);
    let mut kills = 0;
    for launches in 0.. {
        assert!(launches < 2 * KILLS, "{kills} kills met a run");
        if kills >= KILLS {
            break;
        }
        let (mut launched, run) = launch(&format!("run-{launches}"));
        let mut met = 0;
        // every second one comes at the start, the others after a new checkpoint: two in a row without progress end it
        for k in 0..4 {
            let pids = launched.pids(k);
            let before = run.checkpoints().last().copied();
            let newer = |run: &Run| run.checkpoints().last().copied() > before;
            let wait = match k % 2 {
                0 => rng.random_range(0..400),
                _ => {
                    let begin = Instant::now();
                    while !newer(&run) && launched.child.try_wait().unwrap().is_none() {
                        assert!(begin.elapsed() < LONG, "no new checkpoint\n{}", launched.stderr());
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    rng.random_range(0..150)
                }
            };
            std::thread::sleep(Duration::from_millis(wait));
            if run.0.join("summary.json").exists() || launched.child.try_wait().unwrap().is_some() {
                break;
            }
            let victim = rng.random_range(0..3);
            let hit = signal("-KILL", pids[victim]);
            // what is on disk at any moment can be read
            run.assert_readable();
            // it may have come after the rank's end
            if !hit || run.0.join("summary.json").exists() {
                break;
            }
            met += 1;
            launched
                .until("a restart", |l| l.events("restart").len() > k || run.0.join("summary.json").exists());
            if launched.events("restart").len() <= k {
                break;
            }
        }
        let (code, err) = launched.end();
        kills += met;
        // a rank that is killed once the run is written fails the launch, not the run
        let finished = err.contains("not started again: the run is finished");
        assert!(code == Some(0) || finished, "{code:?} {err}");
        run.assert_readable();
        run.assert_same(&undisturbed, &format!("run {launches} after {met} kills\n{err}"));
        job.assert_nobody_left();
    }
    println!("{kills} kills");
}

/// A rank that is stopped, any but the first or the first: the others say which within the timeout.
#[test]
fn a_frozen_rank_is_named() {
    const TIMEOUT: f64 = 2.0;
    let job = Job::new(6000);
    for frozen in [2, 0] {
        let run = Run(job.path(&format!("run-{frozen}")));
        let mut argv = job.training(&run.0, &["train.batch=8", "train.epochs=50"]);
        argv.extend(["--collective-timeout".into(), TIMEOUT.to_string()]);
        let port = free_port();
        let mut ranks: Vec<Started> = (0..3).map(|r| job.rank(r, 3, port, &argv, &[])).collect();
        wait_for_steps(&run, 3);
        let lost = ranks.remove(frozen);
        assert!(signal("-STOP", lost.child.id()));
        let begin = Instant::now();
        let others: Vec<_> = ranks.into_iter().map(|mut r| r.end()).collect();
        let seconds = begin.elapsed().as_secs_f64();
        let state = std::fs::read_to_string(format!("/proc/{}/stat", lost.child.id())).unwrap();
        assert!(state.contains(") T "), "it is still stopped: {state}");
        drop(lost);
        for (code, err) in others {
            assert_eq!(code, Some(75), "{err}");
            let [line] = errors(&err)[..] else { panic!("one line: {err}") };
            assert!(line.contains(&format!("rank {frozen} was lost during ")), "{line}");
            assert!(line.contains("nothing was heard of it within --collective-timeout 2 s"), "{line}");
        }
        println!("rank {frozen} frozen: the others ended after {seconds:.1} s");
        assert!(seconds < TIMEOUT + 2.0, "{seconds} s");
        job.assert_nobody_left();
    }
}

fn wait_for_steps(run: &Run, steps: usize) {
    let begin = Instant::now();
    while run.losses().len() < steps {
        assert!(begin.elapsed() < LONG, "it does not train");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_launcher_starts_again_where_a_rank_is_frozen() {
    let job = Job::new(2500);
    let launch = |name: &str| {
        let run = Run(job.path(name));
        let mut argv = job.training(&run.0, &["train.batch=16", "train.checkpoint_every=10"]);
        argv.extend(["--collective-timeout".into(), "2".into()]);
        (job.launch(&["--nproc", "3", "--grace", "2"], &argv), run)
    };
    let (mut launched, undisturbed) = launch("undisturbed");
    assert_eq!(launched.end().0, Some(0));
    let (mut launched, run) = launch("run");
    let pids = launched.pids(0);
    launched.until("a checkpoint", |_| !run.checkpoints().is_empty());
    assert!(signal("-STOP", pids[1]));
    let (code, err) = launched.end();
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains("rank 1 did not end by itself") && err.contains("restart 1 of 3"), "{err}");
    assert!(err.contains("rank 1 was lost during"), "{err}");
    run.assert_same(&undisturbed, "after a restart");
    job.assert_nobody_left();
}

/// Who does not belong to the group is told so in a line; the group does not notice.
#[test]
fn strangers_harm_nobody() {
    let job = Job::new(3000);
    let sets = ["train.batch=16", "train.epochs=3"];
    let undisturbed = Run(job.path("undisturbed"));
    let (code, err) = job.launch(&["--nproc", "2"], &job.training(&undisturbed.0, &sets)).end();
    assert_eq!(code, Some(0), "{err}");

    let run = Run(job.path("run"));
    let argv = job.training(&run.0, &sets);
    let port = free_port();
    let mut first = job.rank(0, 2, port, &argv, &[]);
    let refused = |mut started: Started, why: &str| {
        let (code, err) = started.end();
        let [line] = errors(&err)[..] else { panic!("one line: {err}") };
        assert!(line.contains(why), "{line:?} does not say {why:?}");
        // a port may become free; what this rank was told stays wrong
        let expected = if why.contains("is taken") { 75 } else { 2 };
        assert_eq!(code, Some(expected), "{line}");
    };
    // before the group is complete
    refused(job.rank(1, 2, port, &argv, &[("BIRKHOFF_SECRET", "another")]), "BIRKHOFF_SECRET");
    refused(job.rank(1, 2, port, &argv, &[("BIRKHOFF_JOB", "another")]), "this port belongs to another job");
    refused(job.rank(2, 3, port, &argv, &[]), "it was started in a world of 3, this one has 2");
    let mut second = job.rank(1, 2, port, &argv, &[]);
    wait_for_steps(&run, 2);
    // while it trains
    let done = AtomicBool::new(false);
    let tried = std::thread::scope(|scope| {
        let noise = scope.spawn(|| make_noise(port, &done));
        let enough = Enough(&done);
        refused(job.rank(1, 2, port, &argv, &[]), "was this rank started twice?");
        refused(
            job.rank(0, 2, port, &argv, &[]),
            &format!(
                "rank 0 cannot listen at 127.0.0.1:{port}: Address already in use (os error 98): the port is taken"
            ),
        );
        let other = job.training(&job.path("other"), &sets);
        refused(
            job.rank(0, 2, port, &other, &[("BIRKHOFF_JOB", "another")]),
            "the port is taken, by another job or program; choose another one by --master",
        );
        assert!(!run.0.join("summary.json").exists(), "it trains too short a time for this test");
        for (code, err) in [first.end(), second.end()] {
            assert_eq!(code, Some(0), "{err}");
        }
        assert!(!first.stderr().contains('\x1b'), "a log in a file has no colours");
        let told = first.stderr().lines().filter(|l| l.contains("refused a connection")).count();
        assert!((4..40).contains(&told), "a stranger cannot fill the log: {told} lines");
        drop(enough);
        noise.join().unwrap()
    });
    println!("{tried} connections of a stranger");
    assert!(tried > 20, "{tried}");
    run.assert_same(&undisturbed, "beside strangers");
    assert!(!job.path("other").join("config.toml").exists());
    job.assert_nobody_left();
}

/// Ends the noise, also where the test fails.
struct Enough<'a>(&'a AtomicBool);

impl Drop for Enough<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Random bytes to a port, also after a right beginning, until it is enough: connections made.
fn make_noise(port: u16, done: &AtomicBool) -> usize {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(9);
    let mut tried = 0;
    while !done.load(Ordering::SeqCst) {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        tried += 1;
        let length = [0, 1, 40, 76, 4096, 200_000][rng.random_range(0..6)];
        let bytes: Vec<u8> = (0..length).map(|_| rng.random()).collect();
        // the other end may hang up in between
        let _ = stream.write_all(&bytes);
        if rng.random() {
            let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
            let _ = stream.read(&mut [0; 64]);
        }
    }
    tried
}

/// Ranks that do not mean the same: all end, and say in what they differ.
#[test]
fn ranks_that_differ_are_told_in_what() {
    let job = Job::new(300);
    let rows = Job::new(301);
    let argv = job.training(&job.path("run"), &["train.batch=16"]);
    let mut other_rows = argv.clone();
    let at = other_rows.iter().position(|a| a == "--train").unwrap() + 1;
    other_rows[at] = s(&rows.train).into();
    let mut other_valid = argv.clone();
    let at = other_valid.iter().position(|a| a == "--valid").unwrap() + 1;
    other_valid[at] = s(&rows.train).into();
    let cases = [
        (job.training(&job.path("run"), &["train.batch=16", "train.lr=0.5"]), "another configuration"),
        (other_rows, "another number of training rows"),
        (other_valid, "another content of the data files"),
        ([argv.clone(), vec!["--grad-wire".into(), "bf16".into()]].concat(), "another --plan, --grad-wire"),
    ];
    for (other, what) in cases {
        let port = free_port();
        let ranks: Vec<Started> =
            (0..3).map(|r| job.rank(r, 3, port, if r == 1 { &other } else { &argv }, &[])).collect();
        let begin = Instant::now();
        for (rank, mut started) in ranks.into_iter().enumerate() {
            let (code, err) = started.end();
            let [line] = errors(&err)[..] else { panic!("rank {rank}, {what}: one line: {err}") };
            assert!(line.contains(&format!("rank 1 has {what}")), "rank {rank}: {line}");
            assert_eq!(code, Some(2), "{line}");
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "at once, not at a timeout");
        assert!(!job.path("run").join("config.toml").exists(), "no run was begun");
        job.assert_nobody_left();
    }
}

/// A refusal for good reaches the ranks of other hosts as what it is: no launcher starts again.
#[test]
fn hosts_that_differ_do_not_start_again() {
    let job = Job::new(300);
    let argv = job.training(&job.path("run"), &["train.batch=16"]);
    let with = |name: &str, value: String| {
        let mut other = argv.clone();
        let at = other.iter().position(|a| a == name).unwrap() + 1;
        other[at] = value;
        other
    };
    let cases = [
        (job.training(&job.path("run"), &["train.batch=16", "train.lr=0.5"]), "another configuration"),
        (with("--valid", s(&job.train).into()), "another content of the data files"),
        (with("--train", "/nonexistent/rows.tsv".into()), "/nonexistent/rows.tsv"),
    ];
    for (other, what) in cases {
        let port = free_port();
        let launch = |host: usize| {
            let mut c = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
            c.args(["launch", "--nproc", "2", "--nnodes", "2", "--node-rank", &host.to_string(), "--json"]);
            c.args(["--master", &format!("127.0.0.1:{port}"), "--"]).args([&argv, &other][host]);
            Started::new(c.env("BIRKHOFF_SECRET", "both know it"), job.file())
        };
        let mut hosts = [launch(0), launch(1)];
        for (host, l) in hosts.iter_mut().enumerate() {
            let (code, err) = l.end();
            println!("host {host}:\n{err}");
            assert_eq!(code, Some(2), "host {host}, {what}: {err}");
            assert_eq!(err.matches(what).count(), 1, "host {host} says it once: {err}");
            assert!(err.contains("not started again") && !err.contains("was lost"), "host {host}: {err}");
            assert_eq!(l.events("start").len(), 1, "host {host}: {err}");
        }
        assert!(!job.path("run").join("config.toml").exists(), "no run was begun");
        job.assert_nobody_left();
    }
}

/// The master's port is taken: said once, with what to do, and no rank is blamed for it.
#[test]
fn a_port_that_is_taken_is_said_once() {
    let job = Job::new(100);
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = other.local_addr().unwrap();
    let argv = job.training(&job.path("run"), &["train.batch=16"]);
    let begin = Instant::now();
    let mut launched =
        job.launch(&["--nproc", "3", "--master", &at.to_string(), "--max-restarts", "0"], &argv);
    let (code, err) = launched.end();
    println!("{err}");
    assert_eq!(code, Some(75), "{err}");
    let lines: Vec<&str> = err.lines().filter(|l| l.contains("error") || l.contains("ended")).collect();
    let [first, last] = lines[..] else { panic!("{err}") };
    let said = format!(
        "error: rank 0 cannot listen at {at}: Address already in use (os error 98): the port is taken"
    );
    assert!(first.starts_with(&said) && first.contains("--master HOST:PORT"), "{first}");
    assert_eq!(
        last,
        "error: rank 0 ended with code 75 (another try may do); --max-restarts 0 allows no restart"
    );
    assert!(
        begin.elapsed() < Duration::from_secs(10),
        "the others are not waited for: {:?}",
        begin.elapsed()
    );
    // the next port is free
    let mut launched =
        job.launch(&["--nproc", "3", "--master", &at.to_string(), "--max-restarts", "1"], &argv);
    let (code, err) = launched.end();
    assert_eq!(code, Some(0), "{err}");
}

/// Ctrl-C: saved, and gone on with to the same end.
#[test]
fn interrupted_ranks_save_and_go_on() {
    let job = Job::new(2500);
    let sets = ["train.batch=16", "train.epochs=2"];
    // how gradients travel is a part of the run
    let training = |run: &Path| {
        let mut argv = job.training(run, &sets);
        argv.extend(["--grad-wire", "int8", "--table-wire", "bf16", "--bucket", "16"].map(str::to_owned));
        argv
    };
    let undisturbed = Run(job.path("undisturbed"));
    let (code, err) = job.launch(&["--nproc", "3"], &training(&undisturbed.0)).end();
    assert_eq!(code, Some(0), "{err}");
    let run = Run(job.path("run"));
    let mut launched = job.launch(&["--nproc", "3"], &training(&run.0));
    launched.until("a few steps", |_| run.losses().len() > 5);
    assert!(signal("-INT", launched.child.id()));
    let (code, err) = launched.end();
    assert_eq!(code, Some(130), "{err}");
    assert!(errors(&err).is_empty() && err.contains("everything is saved"), "{err}");
    let how =
        format!("Go on with: 3 ranks, such as: birkhoff launch --nproc 3 -- train --resume {}", s(&run.0));
    assert!(err.contains(&how), "{err}");
    job.assert_nobody_left();
    assert!(!run.0.join("summary.json").exists(), "it was interrupted too late for this test");
    run.assert_readable();
    let saved = *run.checkpoints().last().expect("a checkpoint");
    assert_eq!(run.losses().last().unwrap().0, saved, "the last step is saved");
    let argv: Vec<String> = ["train", "--resume", s(&run.0)].map(str::to_owned).into();
    let (code, err) = job.launch(&["--nproc", "3"], &argv).end();
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains(&format!("goes on after step {saved} of")), "{err}");
    run.assert_same(&undisturbed, "after Ctrl-C");
}

/// Ctrl-C before the ranks have met, or before all have got so far as to save: they just end.
#[test]
fn ranks_that_begin_can_be_interrupted() {
    let job = Job::new(2500);
    for (i, wait) in [0, 20, 60, 120, 250].into_iter().enumerate() {
        let run = job.path(&format!("run-{i}"));
        let mut launched =
            job.launch(&["--nproc", "3"], &job.training(&run, &["train.batch=16", "train.epochs=50"]));
        launched.pids(0);
        std::thread::sleep(Duration::from_millis(wait));
        assert!(signal("-INT", launched.child.id()));
        let begin = Instant::now();
        let (code, err) = launched.end();
        assert_eq!(code, Some(130), "after {wait} ms: {err}");
        assert!(begin.elapsed() < Duration::from_secs(10), "after {wait} ms: {:?}", begin.elapsed());
        job.assert_nobody_left();
    }
}

/// A mounted tmpfs. Goes away when dropped.
struct Small(PathBuf);

impl Small {
    fn mount(at: PathBuf, size: &str) -> Option<Small> {
        std::fs::create_dir(&at).unwrap();
        let options = format!("size={size}");
        let mut c = Command::new("mount");
        c.args(["-t", "tmpfs", "-o", &options, "birkhoff-test", s(&at)]);
        c.output().is_ok_and(|o| o.status.success()).then(|| Small(at))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_is_an_error_and_the_run_goes_on_when_there_is_room() {
    let job = Job::new(2500);
    let Some(disk) = Small::mount(job.path("disk"), "64m") else {
        return println!("SKIP: a small disk cannot be mounted (needs root)");
    };
    let sets = ["train.batch=16", "train.epochs=4", "train.checkpoint_every=10"];
    let undisturbed = Run(job.path("undisturbed"));
    let (code, err) = job.launch(&["--nproc", "2"], &job.training(&undisturbed.0, &sets)).end();
    assert_eq!(code, Some(0), "{err}");
    let run = Run(disk.0.join("run"));
    let mut launched = job.launch(&["--nproc", "2"], &job.training(&run.0, &sets));
    launched.until("a checkpoint", |_| run.checkpoints().len() > 1);
    // filled until the system says that it is full
    let ballast = disk.0.join("ballast");
    let mut file = std::fs::File::create(&ballast).unwrap();
    for block in [1 << 20, 4096] {
        while file.write_all(&vec![1; block]).is_ok() {}
    }
    let full = Instant::now();
    let (code, err) = launched.end();
    println!("ended {:.1} s after the disk was full", full.elapsed().as_secs_f64());
    assert_eq!(code, Some(2), "{err}");
    let mine: Vec<&str> = errors(&err);
    assert!(mine[0].contains(s(&run.0)) && mine[0].contains("No space left on device"), "{err}");
    assert!(err.contains("rank 0 ended with code 2; not started again"), "{err}");
    job.assert_nobody_left();
    assert!(!run.checkpoints().is_empty());
    run.assert_readable();
    let saved = run.checkpoints().last().copied().unwrap();
    drop(file);
    std::fs::remove_file(&ballast).unwrap();
    let argv: Vec<String> = ["train", "--resume", s(&run.0)].map(str::to_owned).into();
    let (code, err) = job.launch(&["--nproc", "2"], &argv).end();
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains(&format!("goes on after step {saved} of")), "{err}");
    run.assert_same(&undisturbed, "after there was room again");
    ok(&text(&["eval", s(&run.0), "--data", s(&job.valid), "--device", "cpu"].map(str::to_owned)));
}
