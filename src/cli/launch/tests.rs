//! The launcher with shell scripts as ranks.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::group::{Ended, Event, Launcher, Output, Work, parse_master};
use super::output::Printer;
use super::process::Notice;

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Sink {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// In an order that does not depend on which rank was faster.
    fn sorted(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.text().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A script that every rank runs; "saves" by writing a step into a file.
struct Script<'a> {
    script: &'a str,
    folder: &'a Path,
    saves: bool,
}

impl Work for Script<'_> {
    fn arguments(&mut self, attempt: u32) -> Vec<OsString> {
        ["-c", self.script, "rank", &attempt.to_string()].map(OsString::from).to_vec()
    }

    fn saved(&self) -> Option<u64> {
        std::fs::read_to_string(self.folder.join("step")).ok()?.trim().parse().ok()
    }

    fn saves(&self) -> bool {
        self.saves
    }
}

struct Run {
    ended: Ended,
    out: Sink,
    err: Sink,
    events: Vec<Event>,
    took: Duration,
    folder: tempfile::TempDir,
}

impl Run {
    fn reason(&self) -> &str {
        self.ended.reason.as_deref().unwrap_or("")
    }

    fn starts(&self) -> usize {
        self.events.iter().filter(|e| matches!(e, Event::Start { .. })).count()
    }

    fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }
}

fn launcher(nproc: usize) -> Launcher {
    Launcher {
        program: "/bin/sh".into(),
        nproc,
        nnodes: 1,
        node_rank: 0,
        master: None,
        environment: vec![],
        attempt: 0,
        max_restarts: 0,
        grace: Duration::from_millis(400),
        output: Output::All,
        printer: Arc::new(Printer::new(Box::new(Sink::default()), Box::new(Sink::default()))),
    }
}

/// Runs a script; `meanwhile` is told of the start, as a thread of its own.
fn run_with(
    mut launcher: Launcher,
    script: &str,
    saves: bool,
    meanwhile: impl Fn(&Event, &Path, Sender<Notice>) + Send + Sync + Clone + 'static,
) -> Run {
    let folder = tempfile::tempdir().unwrap();
    let (out, err) = (Sink::default(), Sink::default());
    launcher.printer = Arc::new(Printer::new(Box::new(out.clone()), Box::new(err.clone())));
    launcher.environment.push(("DIR", folder.path().to_str().unwrap().to_owned()));
    let (send, receive) = mpsc::channel();
    let mut events = vec![];
    let begin = Instant::now();
    let mut work = Script { script, folder: folder.path(), saves };
    let ended = launcher
        .run(&mut work, &receive, &mut |e| {
            events.push(e.clone());
            let (e, send, path) = (e.clone(), send.clone(), folder.path().to_owned());
            let meanwhile = meanwhile.clone();
            std::thread::spawn(move || meanwhile(&e, &path, send));
            Ok(())
        })
        .unwrap();
    for e in &events {
        let Event::Start { pids, .. } = e else { continue };
        for (rank, pid) in pids {
            assert!(!exists(*pid), "rank {rank} is still there");
        }
    }
    Run { ended, out, err, events, took: begin.elapsed(), folder }
}

fn run(launcher: Launcher, script: &str) -> Run {
    run_with(launcher, script, false, |_, _, _| {})
}

fn exists(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists() || (!cfg!(target_os = "linux") && signal(pid, "0"))
}

fn signal(pid: u32, name: &str) -> bool {
    let o = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).output().unwrap();
    o.status.success()
}

fn wait_for(path: &Path) {
    let begin = Instant::now();
    while !path.exists() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{} never came", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn each_rank_knows_its_place_and_its_lines_are_marked() {
    let mut l = launcher(3);
    (l.nnodes, l.node_rank, l.master) = (2, 1, Some(("10.0.0.1".into(), 4000)));
    l.environment.push(("BIRKHOFF_JOB", "j".into()));
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $BIRKHOFF_JOB $BIRKHOFF_RESTART
        echo to stderr >&2; printf unfinished";
    let r = run(l, script);
    assert_eq!(r.ended, Ended { code: 0, reason: None });
    let mut expected: Vec<String> = (0..3)
        .flat_map(|i| {
            let rank = 3 + i;
            [format!("[rank {rank}] {rank} {i} 6 3 10.0.0.1 4000 j 0"), format!("[rank {rank}] unfinished")]
        })
        .collect();
    expected.sort();
    assert_eq!(r.out.sorted(), expected);
    assert_eq!(r.err.sorted(), ["[rank 3] to stderr", "[rank 4] to stderr", "[rank 5] to stderr"]);
}

#[test]
fn long_lines_of_many_ranks_are_never_mixed() {
    let script = "i=0; line=$(printf %02000d 0 | tr 0 $RANK)
        while [ $i -lt 60 ]; do echo $line; i=$((i+1)); done";
    let r = run(launcher(4), script);
    let text = r.out.text();
    let count = |rank: usize| {
        let line = format!(
            "{}{}",
            if rank == 0 { String::new() } else { format!("[rank {rank}] ") },
            rank.to_string().repeat(2000)
        );
        text.lines().filter(|l| *l == line).count()
    };
    assert_eq!((0..4).map(count).collect::<Vec<_>>(), [60; 4]);
    assert_eq!(text.lines().count(), 240);
}

#[test]
fn the_exit_code_is_that_of_rank_0_or_of_the_rank_that_failed() {
    let r = run(launcher(2), "exit $((5 * (1 - RANK)))");
    assert_eq!(
        (r.ended.code, r.reason()),
        (5, "rank 0 ended with code 5; --max-restarts 0 allows no restart")
    );
    let r = run(launcher(2), "exit $((7 * RANK))");
    assert_eq!(r.ended.code, 7);
    let r = run(launcher(2), "[ $RANK = 1 ] && kill -9 $$; exit 0");
    assert_eq!(r.ended.code, 137);
    assert!(r.reason().starts_with("rank 1 was killed by signal 9 (SIGKILL);"), "{}", r.reason());
    // 512 + 0 must not come out as success: the system cuts it, the others say what happened
    assert_eq!(run(launcher(1), "exit 255").ended.code, 255);
}

#[test]
fn the_group_starts_again_from_what_was_saved_until_it_ends_well() {
    let mut l = launcher(3);
    l.max_restarts = 3;
    let script = r#"echo "$RANK $1 $BIRKHOFF_RESTART $MASTER_PORT" >> $DIR/log
        [ $RANK = 0 ] && echo $((10 * ($1 + 1))) > $DIR/step
        if [ $1 -lt 2 ]; then [ $RANK = 2 ] && kill -9 $$; exit 75; fi; exit 0"#;
    let r = run_with(l, script, true, |_, _, _| {});
    assert_eq!(r.ended, Ended { code: 0, reason: None });
    assert_eq!(r.starts(), 3);
    let restarts: Vec<_> = r.events.iter().filter(|e| matches!(e, Event::Restart { .. })).cloned().collect();
    let reason = "rank 2 was killed by signal 9 (SIGKILL)".to_owned();
    let restart = |n| Event::Restart { attempt: n, reason: reason.clone(), step: Some(10 * u64::from(n)) };
    assert_eq!(restarts, [restart(1), restart(2)]);
    let said = "launch: rank 2 was killed by signal 9 (SIGKILL); restart 1 of 3 from step 10";
    assert!(r.err.text().contains(said), "{}", r.err.text());
    let log = r.file("log");
    let ports: std::collections::BTreeSet<_> = log.lines().map(|l| l.rsplit(' ').next().unwrap()).collect();
    assert_eq!((log.lines().count(), ports.len()), (9, 3), "{log}");
    assert!(log.lines().all(|l| l.split(' ').nth(1) == l.split(' ').nth(2)));
}

#[test]
fn restarts_end_at_their_number_and_earlier_without_progress() {
    let mut l = launcher(2);
    l.max_restarts = 4;
    let r = run_with(l, "echo $1 > $DIR/step; exit 1", true, |_, _, _| {});
    assert_eq!((r.starts(), r.ended.code), (5, 1));
    assert!(r.reason().ends_with("--max-restarts 4: no further restart"), "{}", r.reason());

    let mut l = launcher(2);
    l.max_restarts = 9;
    let r = run_with(l, "[ $1 = 0 ] && echo 7 > $DIR/step; exit 1", true, |_, _, _| {});
    assert_eq!(r.starts(), 3, "{:?}", r.events);
    assert!(
        r.reason().ends_with("without progress: step 7 is still the newest checkpoint"),
        "{}",
        r.reason()
    );

    // with several hosts each attempt has its port
    let mut l = launcher(1);
    (l.max_restarts, l.master) = (2, Some(("h".into(), 65534)));
    let r = run(l, "echo $MASTER_PORT; [ $1 = 1 ]");
    assert_eq!(r.out.text(), "65534\n65535\n");
}

#[test]
fn what_would_fail_again_is_not_started_again() {
    for (code, why) in [
        (2, "the same input would fail again"),
        (130, "the rank itself was told to end"),
        (141, "nobody reads the output"),
    ] {
        let mut l = launcher(2);
        l.max_restarts = 3;
        // the rank with the reason ends last: the others lost it
        let r = run(l, &format!("[ $RANK = 0 ] && exit 75; sleep 0.1; exit {code}"));
        assert_eq!(r.starts(), 1, "{code}: {}", r.reason());
        assert!(r.reason().starts_with(&format!("rank 1 ended with code {code}")), "{}", r.reason());
        assert!(r.reason().ends_with(why), "{}", r.reason());
    }
}

#[test]
fn a_rank_that_hangs_is_asked_then_killed() {
    // rank 0 ends when asked, rank 1 ignores it, rank 2 was killed from outside
    let script = r#"case $RANK in
        0) trap 'echo asked >> $DIR/asked; exit 0' TERM;;
        1) trap '' TERM;;
        2) while [ ! -e $DIR/ready0 ] || [ ! -e $DIR/ready1 ]; do sleep 0.02; done; kill -9 $$;;
        esac
        touch $DIR/ready$RANK; while :; do sleep 0.02; done"#;
    let mut l = launcher(3);
    l.grace = Duration::from_secs(2);
    let r = run(l, script);
    assert_eq!(r.file("asked"), "asked\n");
    assert!(r.reason().starts_with("rank 2 was killed by signal 9"), "{}", r.reason());
    // the grace, and as long again
    assert!(r.took >= Duration::from_secs(4), "{:?}", r.took);
    // where all others lost it, the one that hung is the reason
    let script = "[ $RANK = 0 ] && exit 75; trap '' TERM; while :; do sleep 0.02; done";
    let r = run(launcher(2), script);
    assert!(r.reason().starts_with("rank 1 did not end by itself"), "{}", r.reason());
}

#[test]
fn others_that_end_by_themselves_are_not_pushed() {
    let script = "[ $RANK = 1 ] && exit 3; trap 'touch $DIR/asked' TERM; sleep 0.2; exit 75";
    let mut l = launcher(3);
    l.grace = Duration::from_secs(30);
    let r = run(l, script);
    assert!(r.reason().starts_with("rank 1 ended with code 3"), "{}", r.reason());
    assert!(!r.folder.path().join("asked").exists());
    assert!(r.took < Duration::from_secs(10), "{:?}", r.took);
}

#[test]
fn a_signal_is_passed_on_once_and_waited_for() {
    // longer than the grace: an order to end is no failure, and rank 0 may take its time to save
    let script = r#"trap 'echo $RANK >> $DIR/told; sleep $((1 - RANK)); exit 130' INT
        touch $DIR/ready$RANK; while :; do sleep 0.02; done"#;
    let r = run_with(launcher(2), script, false, |e, dir, send| {
        if matches!(e, Event::Start { .. }) {
            (0..2).for_each(|i| wait_for(&dir.join(format!("ready{i}"))));
            send.send(Notice::End(2)).unwrap();
        }
    });
    assert_eq!(r.ended, Ended { code: 130, reason: None });
    let mut told: Vec<String> = r.file("told").lines().map(str::to_owned).collect();
    told.sort();
    assert_eq!(told, ["0", "1"]);
    assert!(r.took > Duration::from_millis(900), "{:?}", r.took);
}

#[test]
fn a_second_signal_kills() {
    let script = r#"trap 'touch $DIR/told$RANK' TERM; touch $DIR/ready$RANK; while :; do sleep 0.02; done"#;
    let r = run_with(launcher(2), script, false, |e, dir, send| {
        if matches!(e, Event::Start { .. }) {
            (0..2).for_each(|i| wait_for(&dir.join(format!("ready{i}"))));
            send.send(Notice::End(15)).unwrap();
            (0..2).for_each(|i| wait_for(&dir.join(format!("told{i}"))));
            send.send(Notice::End(15)).unwrap();
        }
    });
    assert_eq!(r.ended, Ended { code: 130, reason: None });
}

#[test]
fn what_a_rank_started_goes_with_it() {
    // the sleep outlives its shell and holds its pipe open
    let script = "sleep 300 & echo $! > $DIR/pid$RANK; exit 0";
    let r = run(launcher(2), script);
    assert_eq!(r.ended.code, 0);
    let begin = Instant::now();
    for i in 0..2 {
        let pid: u32 = r.file(&format!("pid{i}")).trim().parse().unwrap();
        // the signal was sent; whoever inherited the process collects it
        let gone = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z")
        };
        while !gone() {
            assert!(begin.elapsed() < Duration::from_secs(20), "{pid} is still there");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    assert!(r.took < Duration::from_secs(60), "{:?}", r.took);
}

#[test]
fn quiet_ranks_show_errors_and_the_end_of_the_one_that_failed() {
    let mut l = launcher(3);
    l.output = Output::Quiet;
    let script = "echo note $RANK >&2; [ $RANK = 2 ] && { echo 'error: broken' >&2; exit 3; }; exit 75";
    let r = run(l, script);
    assert_eq!(r.err.sorted(), ["[rank 2] error: broken", "[rank 2] note 2", "note 0"]);
}

/// Leaves a note: `note BECAUSE_OF ALONE LINE`.
const NOTE: &str = r#"note() { echo "{\"because_of\":$1,\"alone\":$2,\"line\":\"$3\"}" > $BIRKHOFF_ERROR_FILE; }
"#;

#[test]
fn one_reason_is_shown_once() {
    // the one that failed ends last
    let script = "if [ $RANK = 2 ]; then sleep 0.2; note null false 'no such file'; exit 2; fi
        note 2 false 'rank 2 stopped: no such file'; exit 2";
    let mut l = launcher(4);
    let dir = tempfile::tempdir().unwrap();
    (l.max_restarts, l.output) = (3, Output::Files(dir.path().join("logs")));
    let logs = dir.path().join("logs");
    let r = run(l, &format!("{NOTE}{script}"));
    assert_eq!((r.starts(), r.ended.code), (1, 2));
    assert_eq!(r.reason(), "rank 2 ended with code 2; not started again: the same input would fail again");
    let all = format!("launch: all that it wrote is in {}/rank-2.log", logs.display());
    assert_eq!(
        r.err.text().lines().collect::<Vec<_>>(),
        ["[rank 2] error: no such file", "launch: 3 more ranks ended with it", &all]
    );
    let log = |i| std::fs::read_to_string(logs.join(format!("rank-{i}.log"))).unwrap();
    assert_eq!(
        (log(2).as_str(), log(0).as_str()),
        ("error: no such file\n", "error: rank 2 stopped: no such file\n")
    );

    // all for the same reason
    let r = run(launcher(4), &format!("{NOTE}note null false same; exit 2"));
    let text = r.err.text();
    assert!(
        text.matches("error: same").count() == 1 && text.contains("3 more ranks ended with it"),
        "{text}"
    );

    // each for its own
    let r = run(launcher(3), &format!("{NOTE}note null false $RANK; exit 2"));
    assert_eq!(r.err.sorted(), ["[rank 1] error: 1", "[rank 2] error: 2", "error: 0"]);

    // a rank of another host is the reason
    let mut l = launcher(2);
    (l.nnodes, l.master, l.max_restarts) = (2, Some(("127.0.0.1".into(), 4000)), 3);
    let r = run(l, &format!("{NOTE}note 3 false 'rank 3 stopped: x'; exit 2"));
    let text = r.err.text();
    assert!(text.matches("error: rank 3 stopped: x\n").count() == 1, "{text}");
    assert!(text.contains("launch: one more rank ended with it"), "{text}");
    assert!(
        r.reason().contains(" ended with code 2 (because of rank 3); not started again"),
        "{}",
        r.reason()
    );

    // the launcher's own line says it all
    let script = "[ $RANK = 1 ] && kill -9 $$; note 1 false 'rank 1 was lost'; exit 75";
    let r = run(launcher(3), &format!("{NOTE}{script}"));
    assert_eq!(r.err.text(), "");
    assert!(r.reason().starts_with("rank 1 was killed by signal 9 (SIGKILL)"), "{}", r.reason());
}

#[test]
fn those_who_cannot_hear_of_a_failure_are_not_waited_for() {
    let mut l = launcher(3);
    l.grace = Duration::from_secs(60);
    let script = "[ $RANK = 0 ] && { note null true taken; exit 75; }; while :; do sleep 0.02; done";
    let r = run(l, &format!("{NOTE}{script}"));
    assert_eq!(r.err.text(), "error: taken\n");
    assert!(r.reason().starts_with("rank 0 ended with code 75 (another try may do)"), "{}", r.reason());
    assert!(r.took < Duration::from_secs(30), "{:?}", r.took);
}

#[test]
fn logs_hold_every_rank_over_restarts() {
    let mut l = launcher(2);
    let dir = tempfile::tempdir().unwrap();
    let logs = dir.path().join("a/logs");
    (l.output, l.max_restarts) = (Output::Files(logs.clone()), 1);
    let r =
        run(l, "for i in 1 2 3; do echo out $i; echo err $i >&2; done; exit $(((1 - $1) * (1 + 74 * RANK)))");
    assert_eq!(r.ended.code, 0);
    let read = |i| std::fs::read_to_string(logs.join(format!("rank-{i}.log"))).unwrap();
    let life: String = (1..4).map(|i| format!("out {i}\nerr {i}\n")).collect();
    assert_eq!(read(1), format!("{life}---- restart 1\n{life}"));
    // rank 0's two outputs are shown apart, so that only the order within each is certain
    let part = |begin: &str| read(0).lines().filter(|l| l.starts_with(begin)).collect::<Vec<_>>().join(" ");
    assert_eq!(
        (part("out").as_str(), part("err").as_str()),
        ("out 1 out 2 out 3 out 1 out 2 out 3", "err 1 err 2 err 3 err 1 err 2 err 3")
    );
    assert_eq!(r.out.text(), "out 1\nout 2\nout 3\n".repeat(2));
    assert_eq!(r.err.text().matches("err ").count(), 6, "{}", r.err.text());
}

#[test]
fn a_reader_that_goes_away_ends_the_ranks_that_write() {
    struct Closed;
    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut l = launcher(1);
    l.printer = Arc::new(Printer::new(Box::new(Closed), Box::new(Sink::default())));
    let dir = tempfile::tempdir().unwrap();
    let mut work =
        Script { script: "while echo x; do sleep 0.01; done; exit 141", folder: dir.path(), saves: false };
    let (_send, receive) = mpsc::channel();
    let ended = l.run(&mut work, &receive, &mut |_| Ok(())).unwrap();
    assert_eq!(ended.code, 141);
}

#[test]
fn a_program_that_is_not_there_is_an_error() {
    let mut l = launcher(2);
    l.program = "/nonexistent/birkhoff".into();
    let dir = tempfile::tempdir().unwrap();
    let mut work = Script { script: "", folder: dir.path(), saves: false };
    let (_send, receive) = mpsc::channel();
    let e = l.run(&mut work, &receive, &mut |_| Ok(())).unwrap_err();
    assert!(format!("{e:#}").starts_with("cannot start /nonexistent/birkhoff as rank 0: "), "{e:#}");
}

#[test]
fn masters() {
    assert_eq!(parse_master("node1:29500").unwrap(), ("node1".into(), 29500));
    assert_eq!(parse_master("[fd00::1]:1").unwrap(), ("fd00::1".into(), 1));
    for bad in ["node1", "node1:", "node1:0", "node1:70000", ":29500", "fd00::1:29500", "[fd00::1:5"] {
        let e = parse_master(bad).unwrap_err().to_string();
        assert!(e.contains(bad) && e.contains("HOST:PORT"), "{e}");
    }
}
