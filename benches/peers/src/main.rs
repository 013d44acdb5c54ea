//! all_reduce and all_to_all among four processes of this machine, beside Open MPI over its TCP transport.
//!
//!     cargo run --release --manifest-path benches/peers/Cargo.toml [-- ROUNDS]
//!
//! Needs `mpicc` and `mpirun` (Debian: openmpi-bin libopenmpi-dev). Every turn runs our processes, then Open MPI's,
//! yielding the processor when idle and, where every rank has one, polling as it does by itself there (on fewer it takes
//! ten to three hundred times as long). A time is the median over turns of rank 0's median over rounds; the ratio is that
//! of the faster of the two to ours: 1 and more means that ours is at least as fast.

use birkhoff_peers::collective::tcp::{Tcp, TcpOptions};
use birkhoff_peers::collective::{Communicator, Reduction};
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const WORLD: usize = 4;
/// Operation, bytes, rounds, operations a round.
const CASES: [(&str, usize, usize, usize); 6] = [
    ("all_reduce", 4 << 10, 15, 40),
    ("all_reduce", 1 << 20, 15, 3),
    ("all_reduce", 64 << 20, 3, 1),
    ("all_to_all", 4 << 10, 15, 40),
    ("all_to_all", 1 << 20, 15, 3),
    ("all_to_all", 64 << 20, 3, 1),
];
/// What the processes are told apart by, beside the command line.
const RANK: &str = "BIRKHOFF_PEERS_RANK";
const PORT: &str = "BIRKHOFF_PEERS_PORT";

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn rank(rank: usize, port: u16, only: Option<&str>) {
    let options = TcpOptions {
        rank,
        world: WORLD,
        master: "127.0.0.1".into(),
        port,
        bind: None,
        secret: b"of a measurement".to_vec(),
        job: "peers".into(),
        timeout: Duration::from_secs(30),
        join_timeout: Duration::from_secs(30),
        lanes: 1,
        several_hosts: false,
    };
    let c = Communicator::new(Box::new(Tcp::join(&options).expect("the others join")));
    for (kind, bytes, rounds, repeat) in CASES {
        let name = format!("{kind}/{bytes}");
        if only.is_some_and(|o| !name.starts_with(o)) {
            continue;
        }
        let n = bytes / 4;
        let counts = vec![n / WORLD; WORLD];
        let mut data = vec![0f32; n];
        let mut into = vec![0f32; n];
        let mut times = vec![];
        for r in 0..=rounds {
            data.iter_mut().enumerate().for_each(|(i, d)| *d = (i % 7 + rank) as f32);
            c.barrier().expect("all are there");
            let begin = Instant::now();
            for _ in 0..repeat {
                match kind {
                    "all_reduce" => c.all_reduce(&mut data, Reduction::Sum).expect("a sum"),
                    _ => c.all_to_all_into(&data, &counts, &mut into, &counts).expect("an exchange"),
                }
            }
            if r > 0 {
                times.push(begin.elapsed().as_secs_f64() / repeat as f64);
            }
        }
        if rank == 0 {
            println!("{kind} {bytes} {:.9}", median(&mut times));
        }
    }
    c.finish().expect("all end");
}

/// Adds a program's lines to what is known.
fn note(found: &mut BTreeMap<(String, usize), Vec<f64>>, output: &[u8]) {
    for line in String::from_utf8_lossy(output).lines() {
        let words: Vec<&str> = line.split(' ').collect();
        if let [kind, bytes, seconds] = words[..] {
            let key = (kind.to_string(), bytes.parse().expect("bytes"));
            found.entry(key).or_default().push(seconds.parse().expect("seconds"));
        }
    }
}

fn ours(only: Option<&str>) -> Vec<u8> {
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("loopback").port();
    let own = std::env::current_exe().expect("this program");
    let children: Vec<_> = (0..WORLD)
        .map(|rank| {
            let mut c = Command::new(&own);
            c.env(RANK, rank.to_string()).env(PORT, port.to_string()).args(only);
            c.stdout(Stdio::piped()).spawn().expect("a process")
        })
        .collect();
    let mut first = vec![];
    for (rank, child) in children.into_iter().enumerate() {
        let out = child.wait_with_output().expect("it ends");
        assert!(out.status.success(), "rank {rank}: {}", out.status);
        if rank == 0 {
            first = out.stdout;
        }
    }
    first
}

fn theirs(program: &std::path::Path, yields: bool) -> Vec<u8> {
    let mut c = Command::new("mpirun");
    c.args(["--allow-run-as-root", "--oversubscribe", "-n", &WORLD.to_string(), "--mca", "btl", "tcp,self"]);
    c.args(["--mca", "mpi_yield_when_idle", if yields { "1" } else { "0" }]).arg(program);
    for (kind, bytes, rounds, repeat) in CASES {
        c.arg(kind).args([bytes, rounds, repeat].map(|n| n.to_string()));
    }
    let out = c.stderr(Stdio::inherit()).output().expect("mpirun starts");
    assert!(out.status.success(), "mpirun: {}", out.status);
    out.stdout
}

fn main() {
    let argument = std::env::args().nth(1);
    if let (Ok(r), Ok(port)) = (std::env::var(RANK), std::env::var(PORT)) {
        return rank(r.parse().expect("a rank"), port.parse().expect("a port"), argument.as_deref());
    }
    // a case's name instead of rounds: ours alone
    let turns = match argument.as_deref().map(str::parse::<usize>) {
        Some(Err(_)) => {
            return print!("{}", String::from_utf8_lossy(&ours(argument.as_deref())));
        }
        Some(Ok(n)) => n.max(1),
        None => 9,
    };
    let folder = std::env::temp_dir().join(format!("birkhoff-peers-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let program = folder.join("mpi");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/mpi.c");
    let built = Command::new("mpicc").args(["-O3", "-o"]).arg(&program).arg(source).status();
    assert!(built.is_ok_and(|s| s.success()), "mpicc is needed (Debian: openmpi-bin libopenmpi-dev)");
    let [mut us, mut polling, mut yielding] = [const { BTreeMap::new() }; 3];
    let polls = std::thread::available_parallelism().is_ok_and(|n| n.get() >= WORLD);
    for turn in 0..turns {
        note(&mut us, &ours(None));
        if polls {
            note(&mut polling, &theirs(&program, false));
        }
        note(&mut yielding, &theirs(&program, true));
        eprintln!("turn {} of {turns}", turn + 1);
    }
    std::fs::remove_dir_all(&folder).expect("the folder goes");
    println!("operation    bytes      ours ms   Open MPI ms  polling ms   ratio   each turn");
    for (kind, bytes, ..) in CASES {
        let key = (kind.to_string(), bytes);
        let [a, b, c] = [&us, &yielding, &polling].map(|m| m.get(&key).cloned().unwrap_or_default());
        let each: Vec<f64> =
            (0..turns).map(|t| b[t].min(c.get(t).copied().unwrap_or(f64::INFINITY)) / a[t]).collect();
        let [a, b, c] = [a, b, c].map(|mut v| if v.is_empty() { f64::INFINITY } else { median(&mut v) });
        let ms = |s: f64| if s.is_finite() { format!("{:.3}", s * 1e3) } else { "-".into() };
        let each: Vec<_> = each.iter().map(|r| format!("{r:.2}")).collect();
        println!(
            "{kind:<12} {bytes:<10} {:<9} {:<12} {:<12} {:<7.2} {}",
            ms(a),
            ms(b),
            ms(c),
            b.min(c) / a,
            each.join(" ")
        );
    }
}
