//! `birkhoff launch` from outside: signals, orphans and restarts of real processes. The ranks are shell scripts here.
#![cfg(unix)]

mod program;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use program::{fails, s};

struct Stage {
    dir: tempfile::TempDir,
    script: PathBuf,
}

/// A folder with the ranks' script. A rank finds the folder in `$DIR`.
fn stage(script: &str) -> Stage {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rank.sh");
    std::fs::write(&path, format!("#!/bin/sh\nDIR={}\n{script}\n", s(dir.path()))).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    Stage { script: path, dir }
}

impl Stage {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    fn command(&self, options: &[&str], ranks: &[&str]) -> Command {
        let mut c = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
        c.args(["launch", "--program", s(&self.script)]).args(options).arg("--").args(ranks);
        c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        c
    }

    fn start(&self, options: &[&str]) -> Child {
        self.command(options, &["eval", "r", "--data", "d"]).spawn().unwrap()
    }

    fn run(&self, options: &[&str], ranks: &[&str]) -> Output {
        self.command(options, ranks).output().unwrap()
    }

    fn wait_for(&self, names: &[&str]) {
        let begin = Instant::now();
        while !names.iter().all(|n| self.path(n).exists()) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{names:?} never came");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The process ids that ranks wrote into files `pidN`.
    fn pids(&self, ranks: usize) -> Vec<u32> {
        let names: Vec<String> = (0..ranks).map(|r| format!("pid{r}")).collect();
        self.wait_for(&names.iter().map(String::as_str).collect::<Vec<_>>());
        names.iter().map(|n| self.read(n).trim().parse().expect("a whole number")).collect()
    }
}

fn kill(name: &str, target: &str) {
    assert!(Command::new("kill").args([name, "--", target]).status().unwrap().success(), "{name} {target}");
}

fn alive(pid: u32) -> bool {
    let o = Command::new("ps").args(["-o", "stat=", "-p", &pid.to_string()]).output().unwrap();
    let state = String::from_utf8_lossy(&o.stdout);
    !state.trim().is_empty() && !state.starts_with('Z')
}

fn stderr(o: &Output) -> String {
    String::from_utf8_lossy(&o.stderr).into_owned()
}

/// Writes its id in one step, then waits to be ended.
const WAITS: &str = "echo $$ > $DIR/.pid$RANK; mv $DIR/.pid$RANK $DIR/pid$RANK
while :; do sleep 0.02; done";

#[test]
fn killed_it_leaves_no_rank_behind() {
    let stage = stage(WAITS);
    let mut launcher = stage.start(&["--nproc", "3"]);
    let pids = stage.pids(3);
    assert!(pids.iter().all(|p| alive(*p)));
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    if cfg!(target_os = "linux") {
        let begin = Instant::now();
        while pids.iter().any(|p| alive(*p)) {
            assert!(begin.elapsed() < Duration::from_secs(10), "{pids:?} are still there");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn signals_reach_each_rank_once() {
    // under nohup a launcher leaves SIGHUP ignored, for itself and the ranks
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored =
        status.lines().find_map(|l| u64::from_str_radix(l.strip_prefix("SigIgn:")?.trim(), 16).ok());
    let hup = ignored.unwrap_or(0) & 1 == 0;
    if !hup {
        println!("SKIP: SIGHUP is ignored here (nohup)");
    }
    for (name, code) in
        [("-INT", 130), ("-TERM", 130), ("-HUP", 130)].into_iter().take(if hup { 3 } else { 2 })
    {
        let stage = stage(&format!(
            "trap 'echo $RANK INT >> $DIR/told; exit 130' INT
             trap 'echo $RANK TERM >> $DIR/told; exit 130' TERM
             trap 'echo $RANK HUP >> $DIR/told; exit 130' HUP\n{WAITS}"
        ));
        let mut c = stage.command(&["--nproc", "3"], &["eval", "r", "--data", "d"]);
        // Ctrl-C of a terminal goes to the launcher's whole process group
        let launcher = std::os::unix::process::CommandExt::process_group(&mut c, 0).spawn().unwrap();
        stage.pids(3);
        kill(name, &format!("-{}", launcher.id()));
        let o = launcher.wait_with_output().unwrap();
        assert_eq!(o.status.code(), Some(code), "{name}: {}", stderr(&o));
        let mut told: Vec<String> = stage.read("told").lines().map(str::to_owned).collect();
        told.sort();
        assert_eq!(told, (0..3).map(|r| format!("{r} {}", &name[1..])).collect::<Vec<_>>());
        assert!(!stderr(&o).contains("error"), "{}", stderr(&o));
    }
}

#[test]
fn a_second_signal_kills_ranks_that_do_not_listen() {
    let stage = stage(&format!("trap 'touch $DIR/told$RANK' TERM\n{WAITS}"));
    let launcher = stage.start(&["--nproc", "2"]);
    let (pids, id) = (stage.pids(2), launcher.id().to_string());
    kill("-TERM", &id);
    stage.wait_for(&["told0", "told1"]);
    assert!(pids.iter().all(|p| alive(*p)));
    kill("-TERM", &id);
    let o = launcher.wait_with_output().unwrap();
    assert_eq!(o.status.code(), Some(130), "{}", stderr(&o));
    assert!(!pids.iter().any(|p| alive(*p)));
}

#[test]
fn a_killed_rank_restarts_training_from_its_checkpoint() {
    let stage = stage(
        r#"echo "$BIRKHOFF_RESTART $RANK: $*" >> $DIR/calls
        if [ $BIRKHOFF_RESTART = 1 ]; then exit 0; fi
        if [ $RANK = 0 ]; then
            mkdir -p $DIR/run/checkpoints; echo '# birkhoff run' > $DIR/run/config.toml
            touch $DIR/run/checkpoints/step-000000030.safetensors
        fi
        if [ $RANK = 1 ]; then
            while [ ! -e $DIR/run/checkpoints/step-000000030.safetensors ]; do sleep 0.02; done
            kill -9 $$
        fi
        while [ ! -e $DIR/run/checkpoints/step-000000030.safetensors ]; do sleep 0.02; done
        exit 75"#,
    );
    let run = stage.path("run");
    let train =
        ["train", "--train", "a.tsv", "--valid", "v.tsv", "--out", s(&run), "--seed", "7", "--device", "cpu"];
    let o = stage.run(&["--nproc", "2", "--json"], &train);
    assert_eq!(o.status.code(), Some(0), "{}", stderr(&o));
    let said = "launch: rank 1 was killed by signal 9 (SIGKILL); restart 1 of 3 from step 30";
    assert!(stderr(&o).contains(said), "{}", stderr(&o));
    let mut calls: Vec<String> = stage.read("calls").lines().map(str::to_owned).collect();
    calls.sort();
    let (first, then) = (train.join(" "), format!("train --resume {} --device=cpu", s(&run)));
    assert_eq!(
        calls,
        [format!("0 0: {first}"), format!("0 1: {first}"), format!("1 0: {then}"), format!("1 1: {then}")]
    );
    let events: Vec<serde_json::Value> =
        String::from_utf8_lossy(&o.stdout).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let kinds: Vec<_> = events.iter().map(|e| e["event"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["start", "restart", "start", "end"]);
    assert_eq!((&events[1]["step"], &events[3]["code"]), (&30.into(), &0.into()));
    assert_eq!(events[0]["pids"].as_object().unwrap().len(), 2);
    // now that a run stands there, it is not taken for one that is launched anew
    std::fs::remove_file(stage.path("calls")).unwrap();
    std::fs::write(&stage.script, format!("#!/bin/sh\necho \"$*\" >> {}\nexit 1\n", s(&stage.path("calls"))))
        .unwrap();
    let o = stage.run(&["--nproc", "1", "--max-restarts", "1"], &train);
    assert_eq!(o.status.code(), Some(1));
    assert_eq!(stage.read("calls"), format!("{first}\n{first}\n"));
}

#[test]
fn outputs_are_kept_apart_and_the_code_is_passed_on() {
    let stage = stage("echo result $RANK; echo message $RANK >&2; exit $((RANK * 3))");
    let o =
        stage.run(&["--nproc", "2", "--max-restarts", "0"], &["predict", "r", "--data", "d", "--out", "o"]);
    assert_eq!(o.status.code(), Some(3));
    let sorted = |bytes: &[u8]| {
        let mut lines: Vec<String> = String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&o.stdout), ["[rank 1] result 1", "result 0"]);
    let err = sorted(&o.stderr);
    assert!(
        err.contains(&"message 0".to_owned()) && err.contains(&"[rank 1] message 1".to_owned()),
        "{err:?}"
    );
    let end = "error: rank 1 ended with code 3; --max-restarts 0 allows no restart";
    assert!(err.contains(&end.to_owned()), "{err:?}");
}

#[test]
fn mistakes_are_one_line() {
    let wrong = |options: &str, command: &str, parts: &[&str]| {
        let words: Vec<&str> =
            ["launch"].into_iter().chain(options.split(' ')).chain(command.split(' ')).collect();
        fails(&words, parts);
    };
    let train = "-- train --train a --valid b --out c";
    wrong("--nproc 0", train, &["--nproc", "0 is not in 1..=1024"]);
    fails(&["launch", "--nproc", "2"], &["no command after --"]);
    wrong("--nproc 2", "-- synth --rows 1", &["`synth` is not a command that ranks run together"]);
    wrong("--nproc 2 --nnodes 2 --node-rank 0", train, &["--master HOST:PORT"]);
    wrong("--nproc 2 --grace=-1", train, &["--grace"]);
    wrong("--nproc 2", "-- train --train a", &["train:", "--valid"]);
    wrong("--nproc 2", "-- eval r --data d", &["eval is done by one process"]);
    // of the ranks themselves: it is shown once, and none is started again
    let dir = tempfile::tempdir().unwrap();
    let (none, run) = (Path::new("/nonexistent/rows.tsv"), dir.path().join("run"));
    let o = program::birkhoff(&[
        "launch",
        "--nproc",
        "2",
        "--",
        "train",
        "--train",
        s(none),
        "--valid",
        s(none),
        "--out",
        s(&run),
    ]);
    assert_eq!(o.status.code(), Some(2));
    let err = stderr(&o);
    assert_eq!(err.matches("/nonexistent/rows.tsv").count(), 1, "{err}");
    assert!(err.contains("launch: one more rank ended with it"), "{err}");
    assert!(err.contains("ended with code 2; not started again: the same input would fail again"), "{err}");
}
