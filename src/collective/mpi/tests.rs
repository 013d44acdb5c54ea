//! Each test runs itself again under `mpirun -n 4`.

use super::super::tests::{all_operations, in_flight, splits, vector};
use super::super::{Communicator, Reduction};
use super::*;
use std::process::{Command, Output};

/// Set for the processes that a test starts: which part they play.
const PART: &str = "BIRKHOFF_MPI_TEST";

/// Runs the test of this name under mpirun; `None` where there is none.
fn under_mpirun(test: &str) -> Option<Output> {
    if Command::new("mpirun").arg("--version").output().is_err() {
        eprintln!("SKIP {test}: no mpirun (Debian: openmpi-bin)");
        return None;
    }
    let own = std::env::current_exe().expect("this program");
    let mut c = Command::new("mpirun");
    c.args(["--allow-run-as-root", "--oversubscribe", "-n", "4"]).arg(own);
    c.args(["--exact", "--nocapture", "--test-threads=1", test]).env(PART, test);
    Some(c.output().expect("mpirun starts"))
}

fn plays(test: &str) -> bool {
    std::env::var(PART).is_ok_and(|p| p == test)
}

fn join(timeout: Duration) -> Communicator {
    Communicator::new(Box::new(Mpi::join(timeout).expect("under mpirun")))
}

fn text(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

const ALL: &str = "collective::mpi::tests::every_operation_under_mpirun";

#[test]
fn every_operation_under_mpirun() {
    if !plays(ALL) {
        let Some(out) = under_mpirun(ALL) else { return };
        let said = text(&out);
        assert!(out.status.success(), "{said}");
        assert_eq!(said.matches("all is well").count(), 4, "{said}");
        return;
    }
    let c = join(Duration::from_secs(60));
    assert_eq!(c.world(), 4);
    for n in [0, 1, 1237, 70_001, 1 << 20] {
        all_operations(&c, n);
    }
    in_flight(&c);
    splits(&c);
    // the own algorithms give the bits that threads give
    let mut own = vector(c.rank(), 200_000);
    c.all_reduce(&mut own, Reduction::Sum).expect("a sum");
    let threads = super::super::tests::on(Communicator::local(4, Duration::from_secs(60)), |t| {
        let mut v = vector(t.rank(), 200_000);
        t.all_reduce(&mut v, Reduction::Sum).expect("a sum");
        v
    });
    assert!(own.iter().zip(&threads[0]).all(|(a, b)| a.to_bits() == b.to_bits()));
    c.finish().expect("ends");
    println!("all is well");
}

const SILENT: &str = "collective::mpi::tests::a_silent_rank_is_named_by_all";

#[test]
fn a_silent_rank_is_named_by_all() {
    if !plays(SILENT) {
        let Some(out) = under_mpirun(SILENT) else { return };
        let said = text(&out);
        assert!(!out.status.success(), "{said}");
        assert_eq!(said.matches("rank 2 was lost during all_reduce").count(), 3, "{said}");
        return;
    }
    let timeout = Duration::from_secs(2);
    let c = join(timeout);
    c.barrier().expect("all are there");
    if c.rank() == 2 {
        // longer than the others wait and ask
        std::thread::sleep(Duration::from_secs(8));
        c.abort("it slept", false);
    }
    let mut data = vec![1f32; 100_000];
    let e = match c.rank() {
        0 => c.all_reduce_wire(&mut data, super::super::Wire::F32, None),
        _ => c.all_reduce(&mut data, Reduction::Sum),
    };
    println!("{}", e.expect_err("rank 2 is silent"));
    std::thread::sleep(Duration::from_secs(20));
}

const DIFFERENT: &str = "collective::mpi::tests::different_operations_are_told";

#[test]
fn different_operations_are_told() {
    if !plays(DIFFERENT) {
        let Some(out) = under_mpirun(DIFFERENT) else { return };
        let said = text(&out);
        assert!(!out.status.success() && said.contains("disagree: a frame of 36 bytes"), "{said}");
        return;
    }
    let c = join(Duration::from_secs(30));
    let e = match c.rank() {
        0 => c.broadcast(&mut [0f32; 9], 0).and_then(|()| c.barrier()),
        _ => c.all_reduce(&mut [0f32; 10], Reduction::Sum),
    };
    if let Err(e) = e {
        c.abort(&e.to_string(), false);
    }
}
