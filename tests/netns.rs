//! Two hosts: network namespaces joined by a link of limited rate. Needs root and iproute2.
#![cfg(target_os = "linux")]

mod program;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use program::job::{Job, LONG, Run, Started, errors};

/// Two namespaces; gone when dropped.
struct Hosts(String);

fn done(program: &str, args: &[&str]) -> Result<(), String> {
    let o = Command::new(program).args(args).output().map_err(|e| format!("{program}: {e}"))?;
    match o.status.success() {
        true => Ok(()),
        false => Err(format!("{program} {}: {}", args.join(" "), String::from_utf8_lossy(&o.stderr).trim())),
    }
}

impl Hosts {
    /// 10.213.78.1 and .2 with a link of 50 Mbit/s between them.
    fn new(name: &str) -> Result<Hosts, String> {
        let hosts = Hosts(format!("bk{}{name}", std::process::id()));
        let (a, b) = (hosts.name(0), hosts.name(1));
        for n in [&a, &b] {
            done("ip", &["netns", "add", n])?;
            done("ip", &["-n", n, "link", "set", "lo", "up"])?;
        }
        let (va, vb) = (format!("{}0", hosts.0), format!("{}1", hosts.0));
        done("ip", &["link", "add", &va, "netns", &a, "type", "veth", "peer", "name", &vb, "netns", &b])?;
        for (n, v, address) in [(&a, &va, "10.213.78.1/30"), (&b, &vb, "10.213.78.2/30")] {
            done("ip", &["-n", n, "addr", "add", address, "dev", v])?;
            done("ip", &["-n", n, "link", "set", v, "up"])?;
            let tbf = ["tbf", "rate", "50mbit", "burst", "64kb", "latency", "200ms"];
            done("tc", &[&["-n", n, "qdisc", "add", "dev", v, "root"][..], &tbf].concat())?;
        }
        Ok(hosts)
    }

    fn name(&self, host: usize) -> String {
        format!("{}{}", self.0, ["a", "b"][host])
    }

    /// The program on a host.
    fn program(&self, host: usize) -> Command {
        let mut c = Command::new("ip");
        c.args(["netns", "exec", &self.name(host), env!("CARGO_BIN_EXE_birkhoff")]);
        c
    }

    fn cut(&self) {
        done("ip", &["-n", &self.name(1), "link", "set", &format!("{}1", self.0), "down"]).unwrap();
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in 0..2 {
            let _ = done("ip", &["netns", "del", &self.name(host)]);
        }
    }
}

/// Four ranks on two hosts train what four on one do.
#[test]
fn two_hosts_train_as_one() {
    let hosts = match Hosts::new("t") {
        Ok(h) => h,
        Err(e) => return println!("SKIP: no network namespaces (root and iproute2 are needed): {e}"),
    };
    let job = Job::new(800);
    let here = Run(job.path("here"));
    let sets = ["train.batch=8"];
    let (code, err) = job.launch(&["--nproc", "4"], &job.training(&here.0, &sets)).end();
    assert_eq!(code, Some(0), "{err}");
    let run = Run(job.path("run"));
    let mut launchers: Vec<Started> = (0..2)
        .map(|host| {
            let mut c = hosts.program(host);
            c.args(["launch", "--nproc", "2", "--nnodes", "2", "--node-rank", &host.to_string()]);
            c.args(["--master", "10.213.78.1:29500", "--json", "--"]).args(job.training(&run.0, &sets));
            c.env("BIRKHOFF_SECRET", "both know it").env("RAYON_NUM_THREADS", "1");
            Started::new(&mut c, job.file())
        })
        .collect();
    for l in &mut launchers {
        let (code, err) = l.end();
        assert_eq!(code, Some(0), "{err}");
    }
    run.assert_same(&here, "on two hosts");
    job.assert_nobody_left();
}

/// `tools/netns.sh` with a link of 50 Mbit/s; `None` where it cannot be had here.
fn tool(delay: &str, argv: &[&str]) -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut c = Command::new("sh");
    c.arg(root.join("tools/netns.sh")).args(argv).env("RATE", "50mbit").env("DELAY", delay);
    let c = c.env("BIRKHOFF", env!("CARGO_BIN_EXE_birkhoff")).env("BYTES", "2000000");
    let o = c.output().unwrap();
    let err = String::from_utf8_lossy(&o.stderr);
    if o.status.code() == Some(3) {
        println!("SKIP: {err}");
        return None;
    }
    assert!(o.status.success(), "{err}");
    Some(String::from_utf8_lossy(&o.stdout).into_owned())
}

/// With and without netem: the delay is there, each way, and training over it comes to the same.
#[test]
fn a_link_can_have_a_delay() {
    let measured = |delay: &str| {
        let said = tool(delay, &["check"])?;
        println!("{}", said.trim());
        let numbers = said.split(' ').filter_map(|w| w.parse::<f64>().ok()).collect::<Vec<_>>();
        let [trip, rate] = numbers[..] else { panic!("{said}") };
        assert!(rate > 2.0 && rate < 55.0, "{said}");
        Some(trip)
    };
    let Some(trip) = measured("0ms") else { return };
    assert!(trip < 10.0, "{trip}");
    let Some(trip) = measured("12.5ms") else { return };
    assert!((25.0..60.0).contains(&trip), "{trip}");

    let job = Job::new(200);
    let here = Run(job.path("here"));
    let sets = ["train.batch=16"];
    let (code, err) = job.launch(&["--nproc", "2"], &job.training(&here.0, &sets)).end();
    assert_eq!(code, Some(0), "{err}");
    let run = Run(job.path("run"));
    let argv = job.training(&run.0, &sets);
    let words: Vec<&str> = ["run"].into_iter().chain(argv[1..].iter().map(String::as_str)).collect();
    let Some(_) = tool("10ms", &words) else { return };
    run.assert_same(&here, "over a link with a delay");
    job.assert_nobody_left();
}

/// The link fails: every rank, on either side, ends within the timeout, and says which rank it lost.
#[test]
fn a_cut_link_ends_every_rank() {
    const TIMEOUT: f64 = 2.0;
    let hosts = match Hosts::new("c") {
        Ok(h) => h,
        Err(e) => return println!("SKIP: no network namespaces (root and iproute2 are needed): {e}"),
    };
    let job = Job::new(4000);
    let run = Run(job.path("run"));
    let argv = job.training(&run.0, &["train.batch=8", "train.epochs=50", "train.checkpoint_every=5"]);
    let mut ranks: Vec<Started> = (0..4)
        .map(|rank: usize| {
            let mut c = hosts.program(rank / 2);
            c.args(&argv).args(["--collective-timeout", &TIMEOUT.to_string()]);
            for (name, value) in
                [("RANK", rank), ("WORLD_SIZE", 4), ("LOCAL_WORLD_SIZE", 2), ("MASTER_PORT", 29500)]
            {
                c.env(name, value.to_string());
            }
            c.env("MASTER_ADDR", "10.213.78.1")
                .env("BIRKHOFF_SECRET", "all know it")
                .env("RAYON_NUM_THREADS", "1");
            Started::new(&mut c, job.file())
        })
        .collect();
    wait_for_checkpoint(&run, &mut ranks);
    hosts.cut();
    let begin = Instant::now();
    let ends: Vec<_> = ranks.iter_mut().map(Started::end).collect();
    let seconds = begin.elapsed().as_secs_f64();
    println!("all ranks ended {seconds:.1} s after the link was cut");
    for (rank, (code, err)) in ends.iter().enumerate() {
        assert_eq!(*code, Some(75), "rank {rank}: {err}");
        let [line] = errors(err)[..] else { panic!("rank {rank}: one line: {err}") };
        println!("rank {rank}: {line}");
        // a rank of the other side, not a neighbour that ended because of it
        let away = if rank < 2 { [2, 3] } else { [0, 1] };
        let named = away.iter().any(|r| line.contains(&format!("rank {r} was lost during ")));
        assert!(named, "rank {rank}: {line}");
    }
    assert!(seconds < TIMEOUT + 2.0, "{seconds} s");
    run.assert_readable();
    job.assert_nobody_left();
}

fn wait_for_checkpoint(run: &Run, ranks: &mut [Started]) {
    let begin = Instant::now();
    while run.checkpoints().is_empty() {
        for r in ranks.iter_mut() {
            assert!(r.child.try_wait().unwrap().is_none(), "{}", r.stderr());
        }
        assert!(begin.elapsed() < LONG, "it does not train");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(Path::new(&run.0).join("config.toml").exists());
}
