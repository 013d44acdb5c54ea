//! Two hosts: network namespaces joined by a link of limited rate. Needs root and iproute2.
#![cfg(target_os = "linux")]

mod program;

use std::path::{Path, PathBuf};
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
        assert!(rate > 0.0 && rate < 55.0, "{said}");
        Some(trip)
    };
    let Some(trip) = measured("0ms") else { return };
    // the median: other work of the machine delays some
    assert!(trip < 10.0, "{trip}");
    let Some(trip) = measured("12.5ms") else { return };
    assert!((25.0..250.0).contains(&trip), "{trip}");

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

/// An `/etc/hosts` of one host: `ip netns exec` puts it in the place of the machine's. Gone when dropped.
struct Names(PathBuf);

impl Names {
    fn new(host: &str, text: &str) -> Option<Names> {
        let names = Names(Path::new("/etc/netns").join(host));
        let written =
            std::fs::create_dir_all(&names.0).and_then(|()| std::fs::write(names.0.join("hosts"), text));
        written.is_ok().then_some(names)
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
        // only if nobody else has something there
        let _ = std::fs::remove_dir("/etc/netns");
    }
}

/// Debian gives a host's own name 127.0.1.1: where others are to come in, rank 0 says so at once instead of waiting there.
#[test]
fn a_masters_name_that_is_its_own_loopback_is_refused() {
    let hosts = match Hosts::new("n") {
        Ok(h) => h,
        Err(e) => return println!("SKIP: no network namespaces (root and iproute2 are needed): {e}"),
    };
    let Some(_names) = Names::new(&hosts.name(0), "127.0.0.1 localhost\n127.0.1.1 node1.cluster node1\n")
    else {
        return println!("SKIP: /etc/netns cannot be written");
    };
    let job = Job::new(50);
    let argv = job.training(&job.path("run"), &["train.batch=8"]);
    let rank_0 = |local_world: &str, join: &str| {
        let mut c = hosts.program(0);
        c.args(&argv).args(["--collective-join-timeout", join]);
        for (name, value) in [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", local_world)] {
            c.env(name, value);
        }
        c.env("MASTER_ADDR", "node1").env("MASTER_PORT", "29500").env("BIRKHOFF_SECRET", "x");
        Started::new(&mut c, job.file()).end()
    };
    let (code, err) = rank_0("1", "60");
    let [line] = errors(&err)[..] else { panic!("one line: {err}") };
    println!("{line}");
    assert_eq!(code, Some(2), "{line}");
    let parts = ["MASTER_ADDR \"node1\" is 127.0.1.1 on this host", "/etc/hosts", "--master", ":29500"];
    assert!(parts.iter().all(|p| line.contains(p)), "{line}");
    // where all ranks are on this host it will do
    let (code, err) = rank_0("2", "0.5");
    assert!(code == Some(75) && err.contains("rank 1 did not join within"), "{code:?} {err}");
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
