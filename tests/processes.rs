//! Training on several ranks, as processes and as threads of one, comes to what one rank comes to.
#![cfg(target_os = "linux")]

mod program;

use std::path::{Path, PathBuf};
use std::process::Command;

use program::job::{Job, Run, Started, errors, free_port, signal, text};
use program::{ok, s};

#[test]
fn four_processes_train_as_one() {
    let job = Job::new(1300);
    let one = job.alone("one", &["train.batch=32"]);
    let four = Run(job.path("four"));
    let (code, err) = job.launch(&["--nproc", "4"], &job.training(&four.0, &["train.batch=8"])).end();
    assert_eq!(code, Some(0), "{err}");
    four.assert_near(&one, 1e-5, "4 processes");
    // weights of the one are those of the other
    assert_eq!(four.checkpoints(), one.checkpoints());
    job.assert_nobody_left();
}

#[test]
fn two_processes_on_a_device() {
    if birkhoff::graph::testing::software_device().is_none() {
        return println!("SKIP: no software Vulkan driver");
    }
    let job = Job::new(400);
    let one = job.alone("one", &["train.batch=32"]);
    let two = Run(job.path("two"));
    let mut argv = job.training(&two.0, &["train.batch=16"]);
    let device = argv.iter().position(|a| a == "--device").unwrap() + 1;
    argv[device] = "llvmpipe".into();
    let (code, err) = job.launch(&["--nproc", "2"], &argv).end();
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains("llvmpipe"), "{err}");
    two.assert_near(&one, 1e-3, "2 processes on software Vulkan");
}

/// `--ranks`: threads instead of processes, and the same to the last bit.
#[test]
fn ranks_as_threads_of_one_process() {
    let job = Job::new(700);
    let sets = ["train.batch=8"];
    let processes = Run(job.path("processes"));
    let (code, err) = job.launch(&["--nproc", "3"], &job.training(&processes.0, &sets)).end();
    assert_eq!(code, Some(0), "{err}");
    let threads = Run(job.path("threads"));
    let argv = [job.training(&threads.0, &sets), vec!["--ranks".into(), "3".into()]].concat();
    let shown = ok(&text(&argv));
    assert!(shown.contains("rank 2"), "what each rank did: {shown}");
    threads.assert_same(&processes, "3 threads");
    assert_eq!(threads.checkpoints(), processes.checkpoints());

    let started = |argv: &[String], more: &[(&str, &str)], code: i32, parts: &[&str]| {
        let mut c = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
        let (end, err) = Started::new(c.args(argv).envs(more.iter().copied()), job.file()).end();
        let [line] = errors(&err)[..] else { panic!("one line: {err}") };
        assert!(end == Some(code) && parts.iter().all(|p| line.contains(p)), "{end:?} {line}");
    };
    let with = |words: &[&str]| [&argv[..], &words.iter().map(|w| (*w).into()).collect::<Vec<_>>()].concat();
    started(&with(&["--collective", "tcp"]), &[], 2, &["--ranks 3", "--collective tcp is for processes"]);
    started(
        &argv,
        &[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h")],
        2,
        &["--ranks 3", "rank 1 of 2"],
    );
    let mut wrong = with(&["--force"]);
    let at = wrong.iter().position(|a| a == "--train").unwrap() + 1;
    wrong[at] = "/nonexistent/rows.tsv".into();
    started(&wrong, &[], 2, &["/nonexistent/rows.tsv"]);

    // Ctrl-C is one for all, and the run goes on with as many
    let undisturbed = Run(job.path("undisturbed"));
    let long = |run: &Run| job.training(&run.0, &["train.batch=8", "train.epochs=20"]);
    let ranks = |argv: Vec<String>| [argv, vec!["--ranks".into(), "2".into()]].concat();
    ok(&text(&ranks(long(&undisturbed))));
    let run = Run(job.path("run"));
    let mut c = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
    let mut left = Started::new(c.args(ranks(long(&run))), job.file());
    left.until("a few steps", |_| run.losses().len() > 5);
    assert!(signal("-INT", left.child.id()));
    let (code, err) = left.end();
    assert!(code == Some(130) && err.matches("saving a checkpoint").count() == 1, "{code:?} {err}");
    ok(&text(&ranks(["train", "--resume", s(&run.0)].map(str::to_owned).into())));
    run.assert_same(&undisturbed, "after Ctrl-C");
}

/// `auto`, `gpu` and `software` are kinds of devices: each rank of a host takes another one, as far as there are some.
#[test]
fn ranks_take_different_devices() {
    let lavapipe = "/usr/share/vulkan/icd.d/lvp_icd.x86_64.json";
    let swiftshader = "/usr/lib/chromium/vk_swiftshader_icd.json";
    if ![lavapipe, swiftshader].iter().all(|f| Path::new(f).exists()) {
        return println!(
            "SKIP: not both of lavapipe and SwiftShader (Debian: mesa-vulkan-drivers, chromium)"
        );
    }
    let job = Job::new(100);
    let port = free_port();
    let drivers = format!("{lavapipe}:{swiftshader}");
    for device in ["software", "llvmpipe"] {
        let mut argv = job.training(&job.path(device), &["train.batch=16"]);
        let at = argv.iter().position(|a| a == "--device").unwrap() + 1;
        argv[at] = device.into();
        let start = |rank: usize| {
            let local = rank.to_string();
            let place = [("LOCAL_RANK", local.as_str()), ("LOCAL_WORLD_SIZE", "3")];
            let more = [("VK_DRIVER_FILES", drivers.as_str()), ("BIRKHOFF_LOG", "warn,birkhoff=info")];
            job.rank(rank, 3, port, &argv, &[place, more].concat())
        };
        let mut ranks: Vec<Started> = (0..3).map(start).collect();
        let names: Vec<String> = ranks
            .iter_mut()
            .map(|r| {
                let (code, err) = r.end();
                assert_eq!(code, Some(0), "{err}");
                err.lines().find_map(|l| l.split_once(" computes on ")).expect("says it").1.to_owned()
            })
            .collect();
        println!("--device {device}: {names:?}");
        // the same of threads
        let argv = [&argv[..], &["--ranks".into(), "3".into(), "--force".into()]].concat();
        let mut c = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
        c.args(argv).env("VK_DRIVER_FILES", &drivers).env("BIRKHOFF_LOG", "warn,birkhoff=info");
        let (code, err) = Started::new(&mut c, job.file()).end();
        assert_eq!(code, Some(0), "{err}");
        let mut of_threads: Vec<&str> =
            err.lines().filter_map(|l| l.split_once("INFO ")).map(|l| l.1).collect();
        of_threads.retain(|l| l.contains(" computes on "));
        of_threads.sort();
        assert_eq!(of_threads.len(), 3, "{err}");
        for (thread, name) in of_threads.iter().zip(&names) {
            assert!(thread.ends_with(name.as_str()), "{of_threads:?}");
        }
        assert_eq!(names[0], names[2]);
        assert_eq!(names[0] != names[1], device == "software", "{names:?}");
    }
}

#[test]
fn four_processes_on_real_rows() {
    let data = std::env::var_os("BIRKHOFF_DATA")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data"), PathBuf::from);
    let data = data.join("criteo_8k");
    let mut job = Job::new(64);
    (job.train, job.valid) = (data.join("train.tsv"), data.join("dev.tsv"));
    if !job.train.exists() {
        return println!("SKIP: no rows in {} (set BIRKHOFF_DATA)", data.display());
    }
    // with standardised logarithms a gradient near zero comes up at the ninth step, whose rounding AdamW makes a step of
    let sets = |batch| [batch, "data.standardize_log=false"];
    let one = job.alone("one", &sets("train.batch=256"));
    let four = Run(job.path("four"));
    let (code, err) = job.launch(&["--nproc", "4"], &job.training(&four.0, &sets("train.batch=64"))).end();
    assert_eq!(code, Some(0), "{err}");
    four.assert_near(&one, 1e-5, "4 processes on real rows");
}

/// Steps keep their rows with another number of ranks, without being told to.
#[test]
fn another_number_of_ranks_keeps_the_size_of_a_step() {
    let job = Job::new(1300);
    let sets = ["train.batch=8", "train.checkpoint_every=5", "train.epochs=2"];
    let undisturbed = job.alone("undisturbed", &["train.batch=32", "train.epochs=2"]);
    let run = Run(job.path("run"));
    let mut argv = job.training(&run.0, &sets);
    argv.extend(["--ranks", "4"].map(str::to_owned));
    let mut c = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
    let mut started = Started::new(c.args(&argv), job.file());
    started.until("a checkpoint", |_| !run.checkpoints().is_empty());
    assert!(signal("-INT", started.child.id()));
    let (code, err) = started.end();
    assert_eq!(code, Some(130), "{err}");
    assert!(err.contains(&format!("Go on with: birkhoff train --ranks 4 --resume {}", s(&run.0))), "{err}");
    let resume = |more: &[&str]| {
        let mut c = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
        c.args(["train", "--resume", s(&run.0)]).args(more);
        Started::new(&mut c, job.file()).end()
    };
    let (code, err) = resume(&["--ranks", "3"]);
    assert_eq!((code, errors(&err).len()), (Some(2), 1), "{err}");
    assert!(
        err.contains(
            "its steps have 32 rows (train.batch = 8 on 4 ranks so far), which 3 ranks cannot share"
        ),
        "{err}"
    );
    // merged before there are weights of an evaluation
    let one = job.path("state.safetensors");
    ok(&["export", s(&run.0), "--state", "--out", s(&one)]);
    let (code, err) = resume(&[]);
    assert_eq!(code, Some(0), "{err}");
    run.assert_near(&undisturbed, 1e-5, "4 ranks, then 1");
    // a log without its checkpoints is not begun again
    std::fs::remove_file(run.0.join("summary.json")).unwrap();
    std::fs::remove_dir_all(run.0.join("checkpoints")).unwrap();
    let (code, err) = resume(&["--ranks", "4"]);
    assert_eq!((code, errors(&err).len()), (Some(2), 1), "{err}");
    assert!(err.contains("its checkpoints are gone"), "{err}");
}
