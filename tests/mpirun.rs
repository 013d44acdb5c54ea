//! Training as ranks that mpirun starts, over MPI itself and over TCP. With `--features mpi`; needs Open MPI.
#![cfg(unix)]

mod program;

use std::process::Command;

use program::job::{Job, Run, Started, errors, free_port};
use program::{ok, s};

/// `mpirun -n 4 birkhoff …`; `None` where it is missing.
fn mpirun(job: &Job, argv: &[String]) -> Option<Started> {
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("SKIP: no mpirun (Debian: openmpi-bin)");
        return None;
    }
    let mut c = Command::new("mpirun");
    c.args(["--allow-run-as-root", "--oversubscribe", "-n", "4", "--mca", "btl", "tcp,self"]);
    c.args(["--mca", "mpi_yield_when_idle", "1", env!("CARGO_BIN_EXE_birkhoff")]).args(argv);
    Some(Started::new(c.env("RAYON_NUM_THREADS", "1"), job.file()))
}

fn over_mpi(mut argv: Vec<String>) -> Vec<String> {
    argv.extend(["--collective", "mpi"].map(str::to_owned));
    argv
}

#[test]
fn four_ranks_under_mpirun_train_as_one() {
    let job = Job::new(1300);
    // a rate that does not depend on how long the whole run is
    let constant = "train.schedule=constant";
    let one = job.alone("one", &["train.batch=32", constant]);
    let four = Run(job.path("four"));
    let sets = ["train.batch=8", "train.checkpoint_every=20", constant];
    let Some(mut started) = mpirun(&job, &over_mpi(job.training(&four.0, &sets))) else { return };
    let (code, err) = started.end();
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains("4 ranks over mpi"), "{err}");
    four.assert_near(&one, 1e-5, "4 ranks over MPI");
    four.assert_readable();
    // their checkpoints are those of any ranks
    ok(&["train", "--resume", s(&four.0), "--epochs", "2", "--set", "train.batch=32"]);
    let longer = job.alone("longer", &["train.batch=32", "train.epochs=2", constant]);
    four.assert_near(&longer, 1e-5, "gone on with by one rank");
}

/// One rank's error ends the job, with its reason.
#[test]
fn an_error_of_one_rank_ends_all_under_mpirun() {
    let job = Job::new(100);
    let mut argv = over_mpi(job.training(&job.path("run"), &["train.batch=16"]));
    let at = argv.iter().position(|a| a == "--valid").unwrap() + 1;
    argv[at] = "/nonexistent/rows.tsv".into();
    let Some(mut started) = mpirun(&job, &argv) else { return };
    let (code, err) = started.end();
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("stops, and with it the job: /nonexistent/rows.tsv: no such file"), "{err}");
    job.assert_nobody_left();
}

/// Ranks that nobody collects the errors of: one that ends because of another is short where that one is read too.
#[test]
fn ranks_under_mpirun_do_not_repeat_a_reason() {
    let job = Job::new(100);
    let argv = job.training(&job.path("run"), &["train.batch=16"]);
    let mut wrong = argv.clone();
    let at = wrong.iter().position(|a| a == "--train").unwrap() + 1;
    wrong[at] = "/nonexistent/rows.tsv".into();
    let port = free_port();
    let start = |rank: usize| {
        let argv = if rank == 1 { &wrong } else { &argv };
        let (rank, port) = (rank.to_string(), port.to_string());
        let mut c = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
        c.args(argv).env("OMPI_COMM_WORLD_RANK", &rank).env("OMPI_COMM_WORLD_LOCAL_RANK", &rank);
        c.env("OMPI_COMM_WORLD_SIZE", "3").env("OMPI_COMM_WORLD_LOCAL_SIZE", "3").env("MASTER_PORT", port);
        c.env("MASTER_ADDR", "127.0.0.1").env("BIRKHOFF_SECRET", "a secret").env("RAYON_NUM_THREADS", "1");
        Started::new(&mut c, job.file())
    };
    let mut ranks: Vec<Started> = (0..3).map(start).collect();
    for (rank, started) in ranks.iter_mut().enumerate() {
        let (code, err) = started.end();
        assert_eq!(code, Some(2), "{err}");
        let [line] = errors(&err)[..] else { panic!("one line: {err}") };
        match rank {
            1 => assert!(line.contains("/nonexistent/rows.tsv"), "{line}"),
            _ => assert_eq!(line, "error: ended because of rank 1"),
        }
    }
}
