//! The door of a rank: where others connect. Whoever does not prove the secret is turned away with a line in the log, and
//! holds up nobody.

use super::auth::{self, Hello};
use crate::sync::lock;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Handshakes at a time; who comes beyond is turned away.
const CROWD: usize = 64;

/// Refusals that are told one by one in each [`WHILE`]; of the rest only their number is: a stranger who comes again and
/// again must not fill the log.
const TOLD: u32 = 10;
/// See [`TOLD`].
const WHILE: Duration = Duration::from_secs(60);

/// A connection: group, rank in it, lane. Joining ones have the lane [`JOIN`].
type Key = (u64, u32, u32);
/// The lane of connections that join.
pub const JOIN: u32 = u32::MAX;

#[derive(Debug)]
struct Inside {
    arrived: Mutex<HashMap<Key, (TcpStream, Hello)>>,
    bell: Condvar,
    closed: AtomicBool,
    crowd: AtomicUsize,
    /// Ranks that have joined; `None` once nobody may any more.
    joined: Mutex<Option<Vec<u32>>>,
    /// Refusals since a moment.
    refused: Mutex<(Instant, u32)>,
    secret: Vec<u8>,
    job: u64,
    world: u32,
}

impl Inside {
    /// Tells of a refusal, if not too many were told of.
    fn refused(&self, from: SocketAddr, why: &str) {
        let untold = {
            let (since, n) = &mut *lock(&self.refused);
            let mut untold = 0;
            if since.elapsed() > WHILE {
                untold = n.saturating_sub(TOLD);
                (*since, *n) = (Instant::now(), 0);
            }
            *n += 1;
            if *n > TOLD {
                return;
            }
            untold
        };
        match untold {
            0 => tracing::warn!("refused a connection from {from}: {why}"),
            n => tracing::warn!("refused a connection from {from}: {why} (and {n} before it)"),
        }
    }
}

/// See the module's documentation. Closes when dropped.
#[derive(Debug)]
pub struct Door {
    inside: Arc<Inside>,
    address: SocketAddr,
}

impl Door {
    /// Opens at `listener`. `joins`: whether ranks may join here.
    pub fn open(
        listener: TcpListener,
        secret: &[u8],
        job: u64,
        world: usize,
        joins: bool,
    ) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        let inside = Arc::new(Inside {
            arrived: Mutex::default(),
            bell: Condvar::new(),
            closed: AtomicBool::new(false),
            crowd: AtomicUsize::new(0),
            joined: Mutex::new(joins.then(|| vec![0])),
            refused: Mutex::new((Instant::now(), 0)),
            secret: secret.to_vec(),
            job,
            world: world as u32,
        });
        let keeper = inside.clone();
        std::thread::Builder::new().name("collective door".into()).spawn(move || keep(&listener, &keeper))?;
        Ok(Door { inside, address })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// A connection that has arrived or arrives before `deadline`.
    pub fn wait(&self, key: Key, deadline: Instant) -> Option<TcpStream> {
        let mut arrived = lock(&self.inside.arrived);
        loop {
            if let Some((stream, _)) = arrived.remove(&key) {
                return Some(stream);
            }
            let rest = deadline.checked_duration_since(Instant::now())?;
            arrived = self.inside.bell.wait_timeout(arrived, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The connections of all ranks that join, in their order from 1, each with its address and the port of its door.
    /// Afterwards nobody joins any more.
    ///
    /// # Errors
    /// The ranks that are missing.
    pub fn wait_for_all(&self, deadline: Instant) -> Result<Vec<(TcpStream, IpAddr, u16)>, Vec<u32>> {
        let world = self.inside.world;
        let mut arrived = lock(&self.inside.arrived);
        loop {
            let missing: Vec<u32> = (1..world).filter(|r| !arrived.contains_key(&(0, *r, JOIN))).collect();
            if missing.is_empty() {
                break;
            }
            let Some(rest) = deadline.checked_duration_since(Instant::now()) else { return Err(missing) };
            arrived = self.inside.bell.wait_timeout(arrived, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        *lock(&self.inside.joined) = None;
        let all = (1..world).map(|r| {
            let (stream, hello) = arrived.remove(&(0, r, JOIN)).expect("none is missing");
            let ip = stream.peer_addr().map_or(IpAddr::from([127, 0, 0, 1]), |a| a.ip());
            (stream, ip, hello.port)
        });
        Ok(all.collect())
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.inside.closed.store(true, Ordering::SeqCst);
        // the keeper waits for someone to come
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

fn keep(listener: &TcpListener, inside: &Arc<Inside>) {
    loop {
        let (stream, from) = match listener.accept() {
            Ok(x) => x,
            Err(e) => {
                // out of file descriptors, or a caller who left: neither lasts
                tracing::debug!("accept: {e}");
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
        };
        if inside.closed.load(Ordering::SeqCst) {
            return;
        }
        if inside.crowd.fetch_add(1, Ordering::SeqCst) >= CROWD {
            inside.crowd.fetch_sub(1, Ordering::SeqCst);
            inside.refused(from, &format!("{CROWD} others are being asked who they are"));
            continue;
        }
        let (inside, keeper) = (inside.clone(), inside);
        let spawned = std::thread::Builder::new().name("collective handshake".into()).spawn(move || {
            if let Err(why) = receive(stream, &inside) {
                inside.refused(from, &why);
            }
            inside.crowd.fetch_sub(1, Ordering::SeqCst);
        });
        if let Err(e) = spawned {
            keeper.refused(from, &e.to_string());
        }
    }
}

fn receive(mut stream: TcpStream, inside: &Inside) -> Result<(), String> {
    let hello = auth::answer(&mut stream, &inside.secret, inside.job, |h| {
        if !h.joins {
            return Ok(());
        }
        if h.world != inside.world {
            return Err(format!("it was started in a world of {}, this one has {}", h.world, inside.world));
        }
        if h.rank >= inside.world {
            return Err(format!("there is no rank {} in a world of {}", h.rank, inside.world));
        }
        match &mut *lock(&inside.joined) {
            None => Err("the group is complete: was this rank started twice?".into()),
            Some(j) if j.contains(&h.rank) => {
                Err(format!("rank {} has joined already: was it started twice?", h.rank))
            }
            Some(j) => {
                j.push(h.rank);
                Ok(())
            }
        }
    })?;
    let lane = if hello.joins { JOIN } else { hello.lane };
    lock(&inside.arrived).insert((hello.group, hello.rank, lane), (stream, hello));
    inside.bell.notify_all();
    Ok(())
}
