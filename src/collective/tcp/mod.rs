//! The portable transport: one process a rank, over TCP.
//!
//! Rank 0 listens at the master's address; the others join there, prove that they know the job's secret ([`auth`]), and
//! get the addresses of all. Then every pair is connected ([`door`]). The connection by which a rank joined stays, for
//! heartbeats and bad news ([`control`]).

mod auth;
mod control;
mod door;
mod engine;
#[cfg(test)]
mod tests;

use super::error::{Cause, Failure, Result};
use super::schedule::Schedule;
use super::transport::{Operation, Transport};
use super::work::Work;
use auth::{Hello, introduce, join_error, setup_error};
use control::Health;
use door::Door;
use engine::Engine;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// How to find the others.
#[derive(Clone)]
pub struct TcpOptions {
    /// This rank.
    pub rank: usize,
    /// Ranks in all.
    pub world: usize,
    /// Where rank 0 listens: a name or an address.
    pub master: String,
    /// Its port.
    pub port: u16,
    /// The address at which this rank listens, if not that by which it reaches the master.
    pub bind: Option<IpAddr>,
    /// What every rank of the job knows and nobody else.
    pub secret: Vec<u8>,
    /// A name for the job: two jobs at one port tell each other apart by it.
    pub job: String,
    /// The longest silence of a rank that is not taken for its death.
    pub timeout: Duration,
    /// How long to wait for all ranks at the start.
    pub join_timeout: Duration,
    /// Connections between two ranks; large data use them all.
    pub lanes: usize,
    /// Whether some ranks are known to be on other hosts than rank 0's.
    pub several_hosts: bool,
}

impl std::fmt::Debug for TcpOptions {
    /// Without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TcpOptions(rank {} of {} at {}:{})", self.rank, self.world, self.master, self.port)
    }
}

struct Shared {
    health: Arc<Health>,
    door: Door,
    /// The doors of all ranks of the whole group.
    doors: Vec<SocketAddr>,
    secret: Vec<u8>,
    job: u64,
    join_timeout: Duration,
}

/// One rank of a group of processes.
pub struct Tcp {
    rank: usize,
    /// Ranks of the whole group, by rank in this one.
    members: Vec<usize>,
    id: u64,
    lanes: usize,
    engine: Mutex<Engine>,
    shared: Arc<Shared>,
}

impl Tcp {
    /// Finds the other ranks and connects to all.
    ///
    /// # Errors
    /// If they do not come in time, refuse this one, or the address is taken.
    pub fn join(options: &TcpOptions) -> Result<Self> {
        let o = options;
        if o.rank >= o.world {
            return Err(setup_error(format!("rank {} does not exist in a world of {}", o.rank, o.world)));
        }
        if o.secret.is_empty() {
            return Err(setup_error(
                "BIRKHOFF_SECRET is not set: ranks prove to one another that they belong together; set it to the same \
                 long random text for all, such as that of `openssl rand -hex 32` (mpirun hands it on by -x BIRKHOFF_SECRET), or \
                 start them by `birkhoff launch`",
            ));
        }
        let job = xxh3_64(o.job.as_bytes());
        let deadline = Instant::now() + o.join_timeout;
        let (door, doors, control) = match o.rank {
            0 => Self::receive_all(o, job, deadline)?,
            _ => Self::join_master(o, job, deadline)?,
        };
        let health = Health::new(o.rank, o.timeout, control).map_err(|e| join_error(e.to_string()))?;
        let shared = Arc::new(Shared {
            health,
            door,
            doors,
            secret: o.secret.clone(),
            job,
            join_timeout: o.join_timeout,
        });
        let members = (0..o.world).collect();
        let health = shared.health.clone();
        Self::connect(shared, members, o.rank, 0, o.lanes.max(1)).map_err(|e| health.explain(e))
    }

    /// What ended the group, if something did.
    pub fn down(&self) -> Option<Failure> {
        self.shared.health.down()
    }

    /// See [`Transport::split`].
    ///
    /// # Errors
    /// If a member does not connect.
    pub fn some(&self, id: u64, members: &[usize], color: u32) -> Result<Tcp> {
        let rank = members.iter().position(|m| *m == self.rank).expect("this rank is a member");
        let mut name = self.id.to_le_bytes().to_vec();
        name.extend_from_slice(&id.to_le_bytes());
        name.extend_from_slice(&color.to_le_bytes());
        let members = members.iter().map(|m| self.members[*m]).collect();
        Self::connect(self.shared.clone(), members, rank, xxh3_64(&name), self.lanes)
    }

    fn listen(o: &TcpOptions, ip: IpAddr, port: u16) -> Result<TcpListener> {
        let at = SocketAddr::new(o.bind.unwrap_or(ip), port);
        let rank = o.rank;
        TcpListener::bind(at).map_err(|e| match e.kind() {
            ErrorKind::AddrInUse => join_error(format!(
                "rank {rank} cannot listen at {at}: {e}: the port is taken, by another job or program; choose another \
                 one by --master HOST:PORT of birkhoff launch, or MASTER_PORT"
            )),
            ErrorKind::PermissionDenied => setup_error(format!(
                "rank {rank} cannot listen at {at}: {e}; choose a port from 1024 on"
            )),
            _ => setup_error(format!(
                "rank {rank} cannot listen at {at}: {e}; the master's address must be one of rank 0's host (or say which \
                 by --collective-bind)"
            )),
        })
    }

    fn resolve(o: &TcpOptions) -> Result<Vec<SocketAddr>> {
        let found = (o.master.as_str(), o.port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        match found {
            Ok(v) if !v.is_empty() => Ok(v),
            Ok(_) => Err(join_error(format!("MASTER_ADDR {:?} has no address", o.master))),
            Err(e) => Err(join_error(format!("MASTER_ADDR {:?} cannot be resolved: {e}", o.master))),
        }
    }

    fn receive_all(o: &TcpOptions, job: u64, deadline: Instant) -> Result<Joined> {
        let at = Self::resolve(o)?;
        let at: Vec<IpAddr> = at.iter().map(SocketAddr::ip).collect();
        let ip = match choose(&at, &o.master, o.several_hosts && o.bind.is_none()) {
            Some(ip) => ip,
            None => {
                let example = outward().map_or("10.0.0.1".into(), |ip| ip.to_string());
                return Err(setup_error(format!(
                    "MASTER_ADDR {:?} is {} on this host itself (/etc/hosts), where ranks of other hosts cannot come in; \
                     give an address of this host that they reach, such as {example}, to all ranks (--master \
                     {example}:{} of birkhoff launch, or MASTER_ADDR)",
                    o.master, at[0], o.port
                )));
            }
        };
        if ip.is_loopback() && o.bind.is_none() && !is_meant(&o.master) {
            tracing::warn!(
                "MASTER_ADDR {:?} is {ip} on this host: ranks of other hosts will not reach it; give them an address",
                o.master
            );
        }
        let listener = Self::listen(o, ip, o.port)?;
        let io = |e: std::io::Error| join_error(e.to_string());
        let own = listener.local_addr().map_err(io)?;
        let door = Door::open(listener, &o.secret, job, o.world, true).map_err(io)?;
        let joined = door.wait_for_all(deadline).map_err(|missing| {
            let names: Vec<_> = missing.iter().map(u32::to_string).collect();
            join_error(format!(
                "rank{} {} did not join within {:.0} s at {own}",
                if names.len() == 1 { "" } else { "s" },
                names.join(", "),
                o.join_timeout.as_secs_f64()
            ))
        })?;
        let mut doors = vec![own];
        doors.extend(joined.iter().map(|(_, ip, port)| SocketAddr::new(*ip, *port)));
        let table = doors.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join("\n");
        let mut control = vec![];
        for (i, (stream, ..)) in joined.into_iter().enumerate() {
            control::send_table(&stream, &table)
                .map_err(|e| join_error(format!("rank {} left: {e}", i + 1)))?;
            control.push((i + 1, stream));
        }
        Ok((door, doors, control))
    }

    fn join_master(o: &TcpOptions, job: u64, deadline: Instant) -> Result<Joined> {
        let mut wait = Duration::from_millis(5);
        let stream = loop {
            // the master may not be up yet, nor its name
            let why = match Self::resolve(o) {
                Ok(at) => match at.iter().find_map(|a| connect(*a).ok()) {
                    Some(s) => break s,
                    None => format!("nothing listens at {}:{}", o.master, o.port),
                },
                Err(e) => e.to_string(),
            };
            if Instant::now() + wait > deadline {
                let seconds = o.join_timeout.as_secs_f64();
                return Err(join_error(format!(
                    "rank {} found no master within {seconds:.0} s: {why}",
                    o.rank
                )));
            }
            std::thread::sleep(wait);
            wait = (wait * 2).min(Duration::from_millis(500));
        };
        let io = |e: std::io::Error| join_error(format!("rank {}: {e}", o.rank));
        let master = stream.peer_addr().map_err(io)?;
        let own = stream.local_addr().map_err(io)?.ip();
        let door = Door::open(Self::listen(o, own, 0)?, &o.secret, job, o.world, false).map_err(io)?;
        let (rank, world) = (o.rank as u32, o.world as u32);
        let hello = Hello { joins: true, job, group: 0, rank, world, lane: 0, port: door.port() };
        let name = format!("the master at {master}");
        let mut stream = introduce(stream, || connect(master), &o.secret, hello, &name)?;
        let rest = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(10));
        let table = control::receive_table(&mut stream, rest).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                let why = format!("its process at {master} ended before all ranks had joined");
                Failure::new(0, Cause::Lost, why).during(&"joining")
            }
            _ => join_error(format!(
                "rank {} joined at {master} but the group did not get complete: {}",
                o.rank,
                auth::words(&e)
            )),
        })?;
        let mut doors: Vec<SocketAddr> = table.lines().filter_map(|l| l.parse().ok()).collect();
        if doors.len() != o.world {
            return Err(join_error("the master sent a table of another size".to_string()));
        }
        // as this rank sees it: the master may be behind a name
        doors[0] = master;
        Ok((door, doors, vec![(0, stream)]))
    }

    /// Connects the members of a group: the higher ranks call, the lower ones answer.
    fn connect(shared: Arc<Shared>, members: Vec<usize>, rank: usize, id: u64, lanes: usize) -> Result<Self> {
        let deadline = Instant::now() + shared.join_timeout;
        let mut streams = vec![];
        for (peer, &member) in members.iter().enumerate().take(rank) {
            let at = shared.doors[member];
            for lane in 0..lanes {
                let stream = connect(at)
                    .map_err(|e| join_error(format!("rank {rank} cannot reach rank {peer} at {at}: {e}")))?;
                let hello = Hello {
                    joins: false,
                    job: shared.job,
                    group: id,
                    rank: rank as u32,
                    world: members.len() as u32,
                    lane: lane as u32,
                    port: 0,
                };
                let name = format!("rank {peer} at {at}");
                let stream = introduce(stream, || connect(at), &shared.secret, hello, &name)?;
                streams.push((peer, lane, stream));
            }
        }
        for peer in rank + 1..members.len() {
            for lane in 0..lanes {
                let key = (id, peer as u32, lane as u32);
                let stream = shared.door.wait(key, deadline).ok_or_else(|| {
                    join_error(format!(
                        "rank {peer} did not connect to rank {rank} within {:.0} s: is a firewall between them?",
                        shared.join_timeout.as_secs_f64()
                    ))
                })?;
                streams.push((peer, lane, stream));
            }
        }
        let io = |e: std::io::Error| join_error(e.to_string());
        for (_, _, s) in &streams {
            let socket = socket2::SockRef::from(s);
            #[cfg(target_os = "linux")]
            socket.set_tcp_user_timeout(Some(shared.health.timeout())).map_err(io)?;
            socket.set_keepalive(true).map_err(io)?;
            shared.health.guard(s.try_clone().map_err(io)?);
        }
        let engine = Engine::new(&members, lanes, id ^ shared.job, streams).map_err(io)?;
        Ok(Tcp { rank, members, id, lanes, engine: Mutex::new(engine), shared })
    }
}

/// Where rank 0 listens, of the addresses that the master's name has: IPv4 first, as the others try both. `abroad`: ranks
/// of other hosts are to come in, for whom a name's loopback address is none (Debian gives a host's own name 127.0.1.1);
/// then `None` if there is no other. Who writes such an address as it is, or `localhost`, means it.
fn choose(at: &[IpAddr], master: &str, abroad: bool) -> Option<IpAddr> {
    let fits = |ip: &&IpAddr| !abroad || is_meant(master) || !ip.is_loopback();
    at.iter().filter(fits).find(|ip| ip.is_ipv4()).or_else(|| at.iter().find(fits)).copied()
}

fn is_meant(master: &str) -> bool {
    master == "localhost" || master.parse::<IpAddr>().is_ok()
}

/// The address from which this host reaches others, as an example. Nothing is sent.
fn outward() -> Option<IpAddr> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    // of the block for documentation: no host has it
    socket.connect("192.0.2.1:9").ok()?;
    socket.local_addr().ok().map(|a| a.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
}

type Joined = (Door, Vec<SocketAddr>, Vec<(usize, TcpStream)>);

fn connect(at: SocketAddr) -> std::io::Result<TcpStream> {
    let s = TcpStream::connect_timeout(&at, auth::PATIENCE)?;
    // a port that nobody listens at can connect to itself
    if s.local_addr()? == s.peer_addr()? {
        return Err(ErrorKind::ConnectionRefused.into());
    }
    Ok(s)
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }
    fn rank(&self) -> usize {
        self.rank
    }
    fn world(&self) -> usize {
        self.members.len()
    }
    fn lanes(&self) -> usize {
        self.lanes
    }

    fn run(&self, op: &Operation, schedule: &Schedule, work: &mut dyn Work) -> Result<()> {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        engine.run(self.members[self.rank], op, schedule, work, &self.shared.health)
    }

    fn split(&self, id: u64, members: &[usize], color: u32) -> Result<Box<dyn Transport>> {
        Ok(Box::new(self.some(id, members, color)?))
    }

    fn abort(&self, why: &str, for_good: bool) {
        let health = &self.shared.health;
        health.fail(Failure::new(self.members[self.rank], Cause::stopped(for_good), why));
        // of a rank that was lost the others hear in any case, and it may never answer
        if health.down().is_some_and(|f| f.cause != Cause::Lost) {
            health.linger();
        }
    }

    fn finish(&self) {
        if self.id == 0 {
            self.shared.health.close();
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        if self.id != 0 {
            return;
        }
        if !self.shared.health.is_closing() {
            let why = "it ended without saying so";
            self.shared.health.fail(Failure::new(self.members[self.rank], Cause::Lost, why));
        }
        self.shared.health.leave();
    }
}
