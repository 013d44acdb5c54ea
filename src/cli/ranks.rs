//! Training as one of several ranks: who this is, the connection to the others, where the tables lie.

use super::args::TrainArgs;
use super::run_args::seconds;
use crate::collective::connect::{Kind, Options, connect};
use crate::collective::env::Place;
use crate::collective::{CollectiveError, Communicator, Wire};
use crate::data::witness::Stamp;
use crate::data::{FittedEncoder, input};
use crate::graph::exec::Device;
use crate::model::config::{Config, EmbeddingOptimizer};
use crate::parallel::cost::Cluster;
use crate::parallel::dense::DenseOptions;
use crate::parallel::layout::{Layout, Part};
use crate::parallel::placement::Placement;
use crate::parallel::planner::{self, Cuts};
use crate::parallel::tables;
use crate::text::error_line;
use crate::train::infer::Inputs;
use crate::train::ranks::{RankOptions, Ranks};
use crate::train::resume::step_size;
use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes.
    On,
    /// No.
    Off,
}

/// What ranks that train together can be told.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Several ranks (birkhoff launch, torchrun, mpirun, srun)")]
pub struct RankArgs {
    /// Train as several ranks that are threads of this process, without a launcher: rank N takes the N-th of the best GPUs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..))]
    pub ranks: Option<u8>,
    /// How ranks reach one another: auto, local (see --ranks), tcp, mpi (needs the feature mpi), nccl (needs the feature nccl and GPUs)
    #[arg(long, value_name = "KIND", default_value = "auto")]
    pub collective: Kind,
    /// The longest silence of a rank that is not taken for its death
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = |s: &str| seconds(s, 0.5))]
    pub collective_timeout: f64,
    /// How long to wait for all ranks at the start
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0, value_parser = |s: &str| seconds(s, 0.5))]
    pub collective_join_timeout: f64,
    /// The address at which this rank listens [default: that by which it reaches rank 0]
    #[arg(long, value_name = "ADDRESS")]
    pub collective_bind: Option<IpAddr>,
    /// Connections between two ranks: several may help on a fast network
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub collective_lanes: u8,
    /// What gradients of dense layers look like on the way: f32, bf16, f16 or int8 (with error feedback)
    /// [default: f32, or as the run began]
    #[arg(long, value_name = "FORMAT")]
    pub grad_wire: Option<Wire>,
    /// What rows of embedding tables and their gradients look like on the way [default: f32, or as the run began]
    #[arg(long, value_name = "FORMAT")]
    pub table_wire: Option<Wire>,
    /// Whether gradients are summed while the next ones are computed
    #[arg(long, value_name = "ON|OFF", value_enum, default_value_t = Switch::On)]
    pub overlap: Switch,
    /// Gradients summed by one operation, in KiB [default: 4096, or as the run began]
    #[arg(long, value_name = "KIB", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub bucket: Option<u32>,
    /// Where the embedding tables lie: a file of `birkhoff plan` [default: planned anew]
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
}

/// A checksum of files by their sizes, beginnings and ends: stale copies on another host are found by it.
fn files(patterns: &[&[PathBuf]]) -> u64 {
    let mut hash = Xxh3Default::new();
    let places = patterns.iter().filter_map(|p| input::places(p).ok()).flatten();
    for place in places {
        if let Ok(Some(stamp)) = Stamp::of(&place.name()) {
            hash.update(&stamp.bytes.to_le_bytes());
            hash.update(&stamp.ends.to_le_bytes());
        }
    }
    hash.digest()
}

/// Joins the other ranks, where a launcher says that there are some.
pub fn join(args: &TrainArgs) -> anyhow::Result<Option<Communicator>> {
    let place = Place::of_this_process()?;
    let r = &args.ranks;
    if place.as_ref().is_none_or(|p| p.world == 1)
        && matches!(r.collective, Kind::Auto | Kind::Tcp | Kind::Local)
    {
        ensure!(
            r.plan.is_none(),
            "--plan is for several ranks: start them with `birkhoff launch` or --ranks, or leave it out"
        );
        if !args.quiet && (r.grad_wire.is_some() || r.table_wire.is_some()) {
            eprintln!("note: --grad-wire and --table-wire are for several ranks");
        }
        return Ok(None);
    }
    check(args)?;
    let options = Options {
        secret: std::env::var("BIRKHOFF_SECRET").ok(),
        timeout: Duration::from_secs_f64(r.collective_timeout),
        join_timeout: Duration::from_secs_f64(r.collective_join_timeout),
        bind: r.collective_bind,
        lanes: r.collective_lanes.into(),
    };
    if let Some(p) = place.as_ref().filter(|p| p.rank == 0 && !p.master.is_empty() && !args.quiet) {
        let others =
            if p.world == 2 { "the other rank".into() } else { format!("{} other ranks", p.world - 1) };
        eprintln!("waiting for {others} at {}:{}", p.master, p.port);
    }
    let comm = connect(r.collective, place.as_ref(), &options)?;
    if comm.world() == 1 {
        comm.finish()?;
        return Ok(None);
    }
    if comm.rank() == 0 && !args.quiet {
        eprintln!("{} ranks over {}", comm.world(), comm.transport());
    }
    Ok(Some(comm))
}

/// The ranks of `--ranks`: one end of their group for each.
pub fn threads(args: &TrainArgs) -> anyhow::Result<Option<Vec<Communicator>>> {
    let r = &args.ranks;
    let Some(n) = r.ranks else { return Ok(None) };
    ensure!(
        matches!(r.collective, Kind::Auto | Kind::Local),
        "--ranks {n}: they are threads of one process, --collective {} is for processes; leave one of the two out",
        r.collective
    );
    if let Some(p) = Place::of_this_process()?.filter(|p| p.world > 1) {
        bail!(
            "--ranks {n} is for one process, this one is rank {} of {} ({}); leave it out",
            p.rank,
            p.world,
            p.source
        );
    }
    check(args)?;
    if !args.quiet {
        eprintln!("{n} ranks, threads of this process");
    }
    Ok(Some(Communicator::local(n.into(), Duration::from_secs_f64(r.collective_timeout))))
}

/// Whether this rank is a thread of a process with others.
pub fn is_thread(comm: &Communicator) -> bool {
    comm.transport() == "local" && comm.world() > 1
}

/// Runs `work` as each of these ranks: what comes of the first one, or the error that was the reason of the others'.
pub fn as_threads<T>(
    mut group: Vec<Communicator>,
    work: impl Fn(&Communicator) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<T> {
    let first = group.remove(0);
    let (done, others) = std::thread::scope(|scope| {
        let mut others = vec![];
        for comm in group {
            let (work, name) = (&work, format!("rank {}", comm.rank()));
            let rank = move || work(&comm).map(|_| ());
            match std::thread::Builder::new().name(name).spawn_scoped(scope, rank) {
                Ok(thread) => others.push(thread),
                // its end of the group is gone, which the others hear
                Err(e) => return (Err(e.into()), others.into_iter().map(join_thread).collect()),
            }
        }
        let done = work(&first);
        // one that failed without a word ends the others
        drop(first);
        (done, others.into_iter().map(join_thread).collect::<Vec<_>>())
    });
    let mut errors: Vec<anyhow::Error> = others.into_iter().filter_map(Result::err).collect();
    match done {
        Ok(done) if errors.is_empty() => return Ok(done),
        other => errors.splice(0..0, other.err()),
    };
    // of equals the first stays the first
    errors.sort_by_key(|e| e.downcast_ref().and_then(CollectiveError::because_of).is_some());
    Err(errors.swap_remove(0))
}

/// A thread's result; its panic is this one's.
fn join_thread<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// How a run that ended before its time is gone on with by as many ranks.
pub fn go_on(comm: Option<&Communicator>, run: &Path) -> String {
    let run = run.display();
    match comm {
        None => format!("birkhoff train --resume {run}"),
        Some(c) if is_thread(c) => format!("birkhoff train --ranks {} --resume {run}", c.world()),
        Some(c) => {
            format!("{} ranks, such as: birkhoff launch --nproc {0} -- train --resume {run}", c.world())
        }
    }
}

/// The configuration. The steps of a run that goes on keep their size, whatever the number of ranks, unless `--set
/// train.batch` asks for another.
pub fn config(args: &TrainArgs, comm: Option<&Communicator>) -> anyhow::Result<Config> {
    let mut cfg = args.resolve_config()?;
    let world = comm.map_or(1, Communicator::world);
    let given =
        args.config.sets.iter().any(|s| s.split('=').next().is_some_and(|k| k.trim() == "train.batch"));
    let Some(run) = args.resume.as_ref().filter(|_| !given) else { return Ok(cfg) };
    let Some((batch, was)) = step_size(run).filter(|(_, was)| *was != world) else { return Ok(cfg) };
    let rows = batch * was;
    ensure!(
        rows.is_multiple_of(world),
        "{}: its steps have {rows} rows (train.batch = {batch} on {was} ranks so far), which {world} ranks cannot share \
         evenly; start another number of ranks, or say with --set train.batch=N how many rows each has from here on",
        run.display()
    );
    cfg.train.batch = rows / world;
    Ok(cfg)
}

/// What several ranks cannot do.
fn check(args: &TrainArgs) -> anyhow::Result<()> {
    ensure!(!args.debug_nan, "--debug-nan looks at one rank's operations; train without other ranks for it");
    let given =
        args.data.train.iter().chain(&args.data.valid).chain(&args.config.config).chain(&args.data.schema);
    if let Some(pipe) = given.into_iter().find(|p| input::is_pipe(p)) {
        let name = if pipe.as_os_str() == "-" { "standard input".into() } else { pipe.display().to_string() };
        bail!(
            "several ranks cannot read {name}, a pipe that can be read once only; write it to a file first"
        );
    }
    no_dashboard(args)
}

/// A window beside one of several ranks is refused.
pub fn no_dashboard(args: &TrainArgs) -> anyhow::Result<()> {
    ensure!(
        !args.dashboard,
        "--dashboard is for one rank; open `birkhoff dashboard {}` beside them",
        args.folder().display()
    );
    Ok(())
}

/// Opens `--device`: ranks of a host take different ones where there are several of the kind.
pub fn device(word: &str, comm: Option<&Communicator>) -> anyhow::Result<Device> {
    let number = match comm {
        None => 0,
        Some(c) if is_thread(c) => c.rank(),
        Some(_) => Place::of_this_process()?.map_or(0, |p| p.local_rank),
    };
    super::device::open_nth(word, number)
}

/// Runs `work`, telling the other ranks if it fails; of a failure because of another rank's the error is that rank's.
pub fn together<T>(
    comm: Option<&Communicator>,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let done = work();
    let Some(comm) = comm else { return done };
    match done {
        Ok(x) => Ok(x),
        // all leave at the same step
        Err(e) if e.is::<crate::train::events::Interrupted>() => {
            comm.finish()?;
            Err(e)
        }
        Err(e) => {
            let e = comm.failure().map_or(e, Into::into);
            comm.abort(&error_line(&e), super::exit_code(&e) == super::FAILED);
            Err(e)
        }
    }
}

/// What the trainer needs of the other ranks: all must mean the same.
pub fn ranks(
    args: &TrainArgs,
    comm: &Communicator,
    cfg: &Config,
    encoder: &FittedEncoder,
    inputs: &Inputs,
) -> anyhow::Result<Ranks> {
    let (world, r) = (comm.world(), &args.ranks);
    let tables = tables::of_encoder(encoder, cfg);
    let (placement, name) = match &r.plan {
        Some(file) => {
            let name = file.display().to_string();
            let text = std::fs::read_to_string(file).with_context(|| format!("{name}: cannot be read"))?;
            (Placement::from_toml(&name, &text, &tables)?, format!("{name}: "))
        }
        None => {
            let cuts = match cfg.train.embedding {
                // a row's accumulator is one number
                EmbeddingOptimizer::Adagrad => Cuts::Rows,
                EmbeddingOptimizer::Adam => Cuts::Auto,
            };
            (planner::plan(&tables, &Cluster::new(world), cfg.train.batch as u64, cuts)?, String::new())
        }
    };
    ensure!(
        placement.world() == world,
        "{name}the plan is for {} ranks, {world} were started; make one with `birkhoff plan --world {world}`",
        placement.world()
    );
    let parts: Vec<Part<'_>> = placement
        .shards()
        .iter()
        .map(|s| Part {
            column: &tables[s.table].name,
            rows: s.rows.start as u32..s.rows.end as u32,
            columns: s.columns.start as usize..s.columns.end as usize,
            rank: s.rank,
        })
        .collect();
    let layout = Layout::new(world, &inputs.features, cfg.model.width, &parts)
        .map_err(|e| anyhow::anyhow!("{name}{e}"))?;
    if layout.splits_columns() && cfg.train.embedding == EmbeddingOptimizer::Adagrad {
        bail!(
            "{name}a table is split by columns, but row-wise Adagrad keeps one number for a whole row; split it by rows, \
             or set train.embedding=adam"
        );
    }
    let options = RankOptions {
        dense: DenseOptions {
            bucket: r.bucket.unwrap_or(4096) as usize * 1024,
            overlap: r.overlap == Switch::On,
            wire: r.grad_wire.unwrap_or_default(),
        },
        tables: r.table_wire.unwrap_or_default(),
    };
    let how = format!("{:?}", (&options, placement.shards()));
    let ranks = Ranks::new(comm.clone(), layout, options)?;
    ranks.agree_or(args.resume.is_some().into(), |rank| {
        format!(
            "of ranks 0 and {rank} one goes on with {}, the other would begin it: do their hosts see the same folder? Going on \
             needs one that all share",
            args.folder().display()
        )
    })?;
    ranks.agree("version of birkhoff", xxh3_64(env!("CARGO_PKG_VERSION").as_bytes()))?;
    ranks.agree("configuration", xxh3_64(cfg.to_toml()?.as_bytes()))?;
    ranks.agree("number of training rows", encoder.rows)?;
    ranks.agree(
        "content of the data files (--train, --valid)",
        files(&[&args.data.train, &args.data.valid]),
    )?;
    ranks.agree("--plan, --grad-wire, --table-wire or --bucket", xxh3_64(how.as_bytes()))?;
    Ok(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_end_with_the_reason_of_the_one_that_failed() {
        let group = || Communicator::local(3, Duration::from_secs(30));
        let sums = |comm: &Communicator| {
            let mut data = [comm.rank() as f32];
            comm.all_reduce(&mut data, crate::collective::Reduction::Sum)?;
            comm.finish()?;
            Ok(data[0])
        };
        assert_eq!(as_threads(group(), sums).unwrap(), 3.0);
        for wrong in 0..3 {
            let one = |comm: &Communicator| {
                together(Some(comm), || {
                    ensure!(comm.rank() != wrong, "no such file");
                    comm.barrier()?;
                    Ok(())
                })
            };
            let e = as_threads(group(), one).unwrap_err();
            assert_eq!(e.to_string(), "no such file", "rank {wrong}");
            assert_eq!(super::super::exit_code(&e), super::super::FAILED);
        }
    }
}
