//! `birkhoff launch`: the same command as several ranks, for those who have no torchrun, Slurm or MPI.
//!
//! [`process`] starts processes that cannot outlive the launcher and hears its signals, [`output`] keeps what they print
//! apart, [`note`] is what they leave when they fail, [`group`] watches them and starts all of them again when one fails, [`work`] knows what that takes.

pub mod group;
pub mod note;
pub mod output;
pub mod process;
#[cfg(all(test, unix))]
mod tests;
pub mod work;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use rand::TryRng;
use sha2::{Digest, Sha256};

use super::run_args::LaunchArgs;
use group::{Ended, Event, Launcher, Output};
use output::Printer;

const SECRET: &str = "BIRKHOFF_SECRET";
const JOB: &str = "BIRKHOFF_JOB";
const THREADS: &str = "RAYON_NUM_THREADS";

/// The group ended with this code. What there is to say about it is the message.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failed {
    /// The exit code for this program.
    pub code: u8,
    message: String,
}

/// Runs the subcommand.
pub fn run(args: &LaunchArgs) -> anyhow::Result<()> {
    let launcher = launcher(args, &|name| std::env::var(name).ok())?;
    let mut work = work::Checked::new(&args.command, args.node_rank.unwrap_or(0) > 0 || args.restart > 0)?;
    if let (None, [word @ ("eval" | "predict"), ..]) =
        (&args.program, &args.command.iter().map(String::as_str).collect::<Vec<_>>()[..])
    {
        anyhow::bail!("{word} is done by one process: run it without launch");
    }
    // first of all threads are those of the listener and the pumps
    let notices = process::listen().context("cannot listen for signals")?;
    let printer = launcher.printer.clone();
    let mut report = |e: &Event| {
        if args.json {
            return super::output::json(e);
        }
        if let Event::Start { attempt: 0, world, master, pids } = e
            && !args.quiet_ranks
        {
            let ranks = pids.keys().map(usize::to_string).collect::<Vec<_>>().join(", ");
            printer.say(&format!("rank {ranks} of {world}; rank 0 is met at {master}"));
        }
        Ok(())
    };
    match launcher.run(&mut work, &notices, &mut report)? {
        Ended { code: 0, .. } => Ok(()),
        Ended { code, reason } => Err(Failed { code, message: reason.unwrap_or_default() }.into()),
    }
}

/// Whether what the ranks print is JSON as well; else it is no part of `launch --json`'s output.
fn speaks_json(args: &LaunchArgs) -> bool {
    args.program.is_none() && args.command.iter().any(|word| word == "--json")
}

/// The launcher that the arguments and the environment ask for.
fn launcher(args: &LaunchArgs, env: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<Launcher> {
    let (nproc, nnodes) = (usize::from(args.nproc), usize::from(args.nnodes));
    let several = nnodes > 1;
    let master = args.master.as_deref().map(group::parse_master).transpose()?;
    ensure!(
        !several || master.is_some(),
        "--nnodes {nnodes} needs --master HOST:PORT: an address of the host with --node-rank 0, the same words on every host"
    );
    ensure!(
        !several || args.node_rank.is_some(),
        "--nnodes {nnodes} needs --node-rank: 0 on the host of --master, up to {} on the others",
        nnodes - 1
    );
    let node_rank = args.node_rank.map_or(0, usize::from);
    ensure!(
        node_rank < nnodes,
        "--node-rank {node_rank}: {nnodes} {} (--nnodes) have numbers 0 to {}",
        if several { "hosts" } else { "host" },
        nnodes - 1
    );
    if let Some((_, port)) = &master {
        let last = u32::from(*port) + args.restart + args.max_restarts;
        ensure!(
            last <= u32::from(u16::MAX),
            "--master: each restart takes the next port, which would come to {last}; choose a port up to {}",
            u32::from(u16::MAX).saturating_sub(args.restart + args.max_restarts)
        );
    }
    let given = env(SECRET).filter(|s| !s.is_empty());
    let secret = match given {
        Some(s) => s,
        None => {
            ensure!(
                !several,
                "{SECRET} is not set: hosts prove by it that they belong together; make one with \
                 `openssl rand -hex 32` and set it in the environment of `birkhoff launch` on every host"
            );
            hex(&random::<32>()?)
        }
    };
    let job = match env(JOB).filter(|s| !s.is_empty()) {
        Some(job) => job,
        None if several => hex(&Sha256::digest(format!("birkhoff job {secret}"))[..8]),
        None => hex(&random::<8>()?),
    };
    let mut environment = vec![(SECRET, secret), (JOB, job)];
    if nproc > 1 && env(THREADS).is_none_or(|t| t.is_empty()) {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        environment.push((THREADS, (cores / nproc).max(1).to_string()));
    }
    let output = match &args.log_dir {
        Some(folder) => Output::Files(folder.clone()),
        None if args.quiet_ranks => Output::Quiet,
        None => Output::All,
    };
    Ok(Launcher {
        program: args.program.clone().map_or_else(program, Ok)?,
        nproc,
        nnodes,
        node_rank,
        master,
        environment,
        attempt: args.restart,
        max_restarts: args.max_restarts,
        grace: Duration::from_secs_f64(args.grace),
        output,
        printer: Arc::new(if args.json && !speaks_json(args) {
            Printer::messages()
        } else {
            Printer::standard()
        }),
    })
}

/// This program, also where its file has been replaced by another build since.
fn program() -> anyhow::Result<PathBuf> {
    let own = PathBuf::from("/proc/self/exe");
    if own.exists() { Ok(own) } else { std::env::current_exe().context("cannot find this program's file") }
}

fn random<const N: usize>() -> anyhow::Result<[u8; N]> {
    let mut bytes = [0; N];
    rand::rngs::SysRng.try_fill_bytes(&mut bytes).context("the system gives no random bytes")?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod arguments {
    use super::super::args::{Cli, Command};
    use super::*;
    use clap::Parser;

    fn args(text: &str) -> LaunchArgs {
        let words = ["birkhoff", "launch"].into_iter().chain(text.split(' '));
        match Cli::try_parse_from(words).expect("well formed").command {
            Command::Launch(args) => args,
            other => panic!("{other:?}"),
        }
    }

    fn value<'a>(l: &'a Launcher, name: &str) -> Option<&'a str> {
        l.environment.iter().find(|(n, _)| *n == name).map(|(_, v)| v.as_str())
    }

    #[test]
    fn one_host_needs_nothing_but_a_number() {
        let none = |_: &str| None;
        let l = launcher(&args("--nproc 4 -- eval r"), &none).unwrap();
        let secret = value(&l, SECRET).unwrap().to_owned();
        assert_eq!((secret.len(), l.nproc, l.master.clone()), (64, 4, None));
        let other = launcher(&args("--nproc 4 -- eval r"), &none).unwrap();
        assert_ne!(value(&other, SECRET), Some(secret.as_str()));
        assert_ne!(value(&other, JOB), value(&l, JOB));
        let threads: usize = value(&l, THREADS).unwrap().parse().unwrap();
        assert!(threads >= 1);
        let own = |n: &str| (n == THREADS).then(|| "3".to_owned());
        assert_eq!(value(&launcher(&args("--nproc 4 -- eval r"), &own).unwrap(), THREADS), None);
        assert_eq!(value(&launcher(&args("--nproc 1 -- eval r"), &none).unwrap(), THREADS), None);
    }

    #[test]
    fn several_hosts_agree_by_the_secret() {
        let env = |n: &str| (n == SECRET).then(|| "abc".to_owned());
        let host = |rank| {
            launcher(
                &args(&format!("--nproc 2 --nnodes 2 --node-rank {rank} --master h:29500 -- eval r")),
                &env,
            )
        };
        let (a, b) = (host(0).unwrap(), host(1).unwrap());
        assert_eq!((value(&a, SECRET), value(&a, JOB)), (Some("abc"), value(&b, JOB)));
        assert_eq!((a.node_rank, b.node_rank), (0, 1));
        let fails = |text: &str, part: &str| {
            let e = launcher(&args(&format!("{text} -- eval r")), &env).unwrap_err().to_string();
            assert!(e.contains(part), "{text}: {e}");
        };
        fails("--nproc 2 --nnodes 2 --node-rank 0", "needs --master HOST:PORT");
        fails("--nproc 2 --nnodes 2 --master h:1", "needs --node-rank");
        fails(
            "--nproc 2 --nnodes 2 --node-rank 2 --master h:1",
            "--node-rank 2: 2 hosts (--nnodes) have numbers 0 to 1",
        );
        fails("--nproc 2 --node-rank 1", "--node-rank 1: 1 host");
        fails("--nproc 2 --master h", "expected HOST:PORT");
        fails("--nproc 2 --master h:65534 --max-restarts 3", "choose a port up to 65532");
        let none = |_: &str| None;
        let e =
            launcher(&args("--nproc 2 --nnodes 2 --node-rank 0 --master h:1 -- eval r"), &none).unwrap_err();
        assert!(e.to_string().contains("openssl rand -hex 32"), "{e}");
    }
}
