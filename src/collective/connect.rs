//! Forms the group that the launcher started: chooses a transport and joins.

use super::Communicator;
use super::env::Place;
use super::error::{CollectiveError, Result};
use super::tcp::{Tcp, TcpOptions};
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

/// What moves the bytes: `--collective`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// [`Kind::Mpi`] under mpirun or srun where it is built in and no secret is set, else [`Kind::Tcp`].
    #[default]
    Auto,
    /// Threads of this process; as a process of its own one rank alone.
    Local,
    /// Processes over TCP.
    Tcp,
    /// The MPI library of a cluster (cargo feature `mpi`).
    Mpi,
    /// NVIDIA's library between their devices (cargo feature `nccl`).
    Nccl,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 5] = [Kind::Auto, Kind::Local, Kind::Tcp, Kind::Mpi, Kind::Nccl];

    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Auto => "auto",
            Kind::Local => "local",
            Kind::Tcp => "tcp",
            Kind::Mpi => "mpi",
            Kind::Nccl => "nccl",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;
    fn from_str(s: &str) -> std::result::Result<Self, String> {
        Kind::ALL
            .into_iter()
            .find(|k| k.name() == s)
            .ok_or_else(|| format!("{s:?} is no transport; expected auto, local, tcp, mpi or nccl"))
    }
}

/// How ranks find and watch one another.
#[derive(Clone)]
pub struct Options {
    /// What every rank of the job knows and nobody else: `BIRKHOFF_SECRET`. tcp needs it.
    pub secret: Option<String>,
    /// The longest silence of a rank that is not taken for its death.
    pub timeout: Duration,
    /// How long to wait for all ranks at the start.
    pub join_timeout: Duration,
    /// The address at which this rank listens (tcp), if not that by which it reaches the master.
    pub bind: Option<IpAddr>,
    /// Connections between two ranks (tcp); large data use them all.
    pub lanes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            secret: None,
            timeout: Duration::from_secs(60),
            join_timeout: Duration::from_secs(120),
            bind: None,
            lanes: 1,
        }
    }
}

impl fmt::Debug for Options {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Options(timeout {:?}, join {:?}, lanes {})", self.timeout, self.join_timeout, self.lanes)
    }
}

/// Joins the group of `place`; without one, this is a rank alone.
///
/// # Errors
/// If the transport is not there, or the others do not come.
pub fn connect(kind: Kind, place: Option<&Place>, options: &Options) -> Result<Communicator> {
    let secret = options.secret.as_deref().unwrap_or_default();
    let kind = match (kind, place) {
        (Kind::Auto, None) => Kind::Local,
        (Kind::Auto, Some(p)) => match p.source {
            "mpirun" | "srun" if cfg!(feature = "mpi") && secret.is_empty() => Kind::Mpi,
            _ => Kind::Tcp,
        },
        (kind, _) => kind,
    };
    let one = place.is_none_or(|p| p.world == 1);
    match (kind, place) {
        (Kind::Mpi, _) => mpi(place, options),
        (Kind::Nccl, _) => nccl(place, options),
        (Kind::Local, Some(p)) if !one => Err(CollectiveError::Argument(format!(
            "--collective local is for ranks that are threads of one process; this process is rank {} of {} ({}): use tcp",
            p.rank, p.world, p.source
        ))),
        (_, Some(p)) if !one => Ok(Communicator::new(Box::new(tcp(p, options)?))),
        _ => Ok(Communicator::alone()),
    }
}

/// Joins over TCP.
fn tcp(place: &Place, options: &Options) -> Result<Tcp> {
    if place.master.is_empty() {
        return Err(CollectiveError::Setup(format!(
            "MASTER_ADDR is not set: rank {} of {} does not know rank 0's host; set it for all, as by \
             `mpirun -x MASTER_ADDR=HOST -x BIRKHOFF_SECRET`, or use --collective mpi",
            place.rank, place.world
        )));
    }
    let options = TcpOptions {
        rank: place.rank,
        world: place.world,
        master: place.master.clone(),
        port: place.port,
        bind: options.bind,
        secret: options.secret.clone().unwrap_or_default().into_bytes(),
        job: place.job.clone(),
        timeout: options.timeout,
        join_timeout: options.join_timeout,
        lanes: options.lanes,
        several_hosts: place.several_hosts,
    };
    Tcp::join(&options)
}

#[cfg(feature = "mpi")]
fn mpi(place: Option<&Place>, options: &Options) -> Result<Communicator> {
    let group = super::mpi::Mpi::join(options.timeout)?;
    let world = super::transport::Transport::world(&group);
    if let Some(p) = place
        && p.world != world
    {
        return Err(CollectiveError::Setup(format!(
            "{} started {} processes, but MPI sees {world}: it is another MPI's launcher (or srun without --mpi=pmix); \
             use the mpirun of the MPI that birkhoff was built with, or --collective tcp",
            p.source, p.world
        )));
    }
    Ok(Communicator::new(Box::new(group)))
}

#[cfg(not(feature = "mpi"))]
fn mpi(_: Option<&Place>, _: &Options) -> Result<Communicator> {
    Err(CollectiveError::Unavailable {
        transport: "mpi",
        why: "this program was built without it".into(),
        instead: "build with `cargo build --release --features mpi` (Debian: libopenmpi-dev libclang-dev), or use --collective tcp"
            .into(),
    })
}

#[cfg(all(feature = "nccl", target_os = "linux"))]
fn nccl(place: Option<&Place>, options: &Options) -> Result<Communicator> {
    // before the others are waited for
    super::nccl::devices(place.map_or(1, |p| p.local_world.max(p.local_rank + 1)))?;
    match place {
        Some(p) if p.world > 1 => {
            let group = super::nccl::Nccl::join(tcp(p, options)?, p.local_rank)?;
            Ok(Communicator::new(Box::new(group)))
        }
        _ => Ok(Communicator::alone()),
    }
}

#[cfg(not(all(feature = "nccl", target_os = "linux")))]
fn nccl(_: Option<&Place>, _: &Options) -> Result<Communicator> {
    Err(CollectiveError::Unavailable {
        transport: "nccl",
        why: "this program was built without it".into(),
        instead: "on Linux build with `cargo build --release --features nccl`, or use --collective tcp"
            .into(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::all_operations;
    use super::*;

    #[test]
    fn names() {
        for kind in Kind::ALL {
            assert_eq!(kind.to_string().parse::<Kind>(), Ok(kind));
        }
        assert!("gloo".parse::<Kind>().unwrap_err().contains("expected auto, local, tcp, mpi or nccl"));
    }

    fn options(secret: Option<&str>) -> Options {
        Options {
            secret: secret.map(String::from),
            join_timeout: Duration::from_secs(20),
            ..Options::default()
        }
    }

    fn place(rank: usize, world: usize, port: u16) -> Place {
        let set = |name: &str| match name {
            "RANK" => Some(rank.to_string()),
            "WORLD_SIZE" => Some(world.to_string()),
            "MASTER_ADDR" => Some("127.0.0.1".into()),
            "MASTER_PORT" => Some(port.to_string()),
            _ => None,
        };
        Place::from_env(&set).expect("fits").expect("launched")
    }

    #[test]
    fn alone_where_nobody_launched_it() {
        for kind in [Kind::Auto, Kind::Local, Kind::Tcp] {
            for place in [None, Some(&place(0, 1, 1))] {
                let c = connect(kind, place, &options(None)).expect("needs nobody");
                assert_eq!((c.rank(), c.world()), (0, 1));
            }
        }
    }

    #[test]
    fn launched_ranks_meet_over_tcp() {
        let port =
            std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("loopback").port();
        std::thread::scope(|s| {
            for rank in 0..3 {
                s.spawn(move || {
                    let c =
                        connect(Kind::Auto, Some(&place(rank, 3, port)), &options(Some("x"))).expect("joins");
                    assert!(format!("{c:?}").contains(&format!("tcp, rank {rank} of 3")));
                    all_operations(&c, 100);
                    c.finish().expect("ends");
                });
            }
        });
    }

    #[test]
    fn what_is_missing_is_named() {
        let refused =
            |kind, place: &Place| connect(kind, Some(place), &options(None)).unwrap_err().to_string();
        let p = place(1, 2, 1);
        assert!(refused(Kind::Tcp, &p).contains("BIRKHOFF_SECRET is not set"));
        assert!(refused(Kind::Local, &p).contains("rank 1 of 2 (torchrun or birkhoff launch): use tcp"));
        let lost = Place { master: String::new(), ..p };
        assert!(refused(Kind::Tcp, &lost).contains("MASTER_ADDR is not set"));
    }
}
