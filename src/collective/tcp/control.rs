//! Who is alive. Each rank has one connection to rank 0 beside those for data. Both ends send a heartbeat on it; when one
//! falls silent, or its connection breaks, rank 0 tells all others which rank it was, so that every rank ends with the same
//! reason and not with that of a neighbour which stopped because of it.

use super::super::error::{Cause, CollectiveError, Failure};
use crate::sync::lock;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

const HEARTBEAT: u8 = 1;
const ABORT: u8 = 2;
const GOODBYE: u8 = 3;
const TABLE: u8 = 4;
/// Bytes of a message beyond its head; the table of a thousand ranks has 18,000.
const LIMIT: u32 = 1 << 20;
const HEAD: usize = 9;

fn write(stream: &Mutex<TcpStream>, kind: u8, rank: usize, text: &[u8]) -> io::Result<()> {
    let mut m = vec![kind];
    m.extend_from_slice(&(rank as u32).to_le_bytes());
    m.extend_from_slice(&(text.len() as u32).to_le_bytes());
    m.extend_from_slice(text);
    lock(stream).write_all(&m)
}

/// Sends the addresses of all doors, as text.
pub fn send_table(stream: &TcpStream, table: &str) -> io::Result<()> {
    write(&Mutex::new(stream.try_clone()?), TABLE, 0, table.as_bytes())
}

/// Waits for the addresses of all doors.
pub fn receive_table(stream: &mut TcpStream, timeout: Duration) -> io::Result<String> {
    stream.set_read_timeout(Some(timeout))?;
    let mut head = [0; HEAD];
    stream.read_exact(&mut head)?;
    let len = u32::from_le_bytes(head[5..].try_into().expect("4"));
    if head[0] != TABLE || len > LIMIT {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "expected the table of addresses"));
    }
    let mut text = vec![0; len as usize];
    stream.read_exact(&mut text)?;
    String::from_utf8(text).map_err(io::Error::other)
}

/// The group's health, shared by everything of one rank.
#[derive(Debug)]
pub struct Health {
    rank: usize,
    down: Mutex<Option<Failure>>,
    bell: Condvar,
    closing: AtomicBool,
    timeout: Duration,
    /// Connections to others: to rank 0, or from rank 0 to all.
    control: Mutex<Vec<(usize, Arc<Mutex<TcpStream>>)>>,
    /// Data connections: shut down when the group is down, so that whoever waits on one wakes.
    data: Mutex<Vec<TcpStream>>,
    /// Connections that are watched.
    watching: Mutex<usize>,
    told: Condvar,
}

impl Health {
    /// Of a group that is well. `control`: the other rank and the connection.
    pub fn new(rank: usize, timeout: Duration, control: Vec<(usize, TcpStream)>) -> io::Result<Arc<Self>> {
        let mut readers = vec![];
        let mut writers = vec![];
        for (peer, stream) in control {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(interval(timeout)))?;
            // a peer that does not read must not hold up the others' news
            stream.set_write_timeout(Some(interval(timeout)))?;
            writers.push((peer, Arc::new(Mutex::new(stream.try_clone()?))));
            readers.push((peer, stream));
        }
        let health = Arc::new(Health {
            rank,
            down: Mutex::default(),
            bell: Condvar::new(),
            closing: AtomicBool::new(false),
            timeout,
            control: Mutex::new(writers),
            data: Mutex::default(),
            watching: Mutex::new(readers.len()),
            told: Condvar::new(),
        });
        for (peer, stream) in readers {
            let h = health.clone();
            std::thread::Builder::new().name(format!("collective watch {peer}")).spawn(move || {
                h.watch(peer, stream);
                *lock(&h.watching) -= 1;
                h.told.notify_all();
            })?;
        }
        Ok(health)
    }

    /// The limit of silence.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A data connection to shut when the group is down.
    pub fn guard(&self, stream: TcpStream) {
        let down = lock(&self.down);
        if down.is_some() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        lock(&self.data).push(stream);
    }

    /// The first failure.
    pub fn down(&self) -> Option<Failure> {
        lock(&self.down).clone()
    }

    /// A connection to `peer` broke: the reason, which may be another rank's failure that is on its way here.
    pub fn blame(&self, peer: usize, why: &str) -> Failure {
        let grace = Instant::now() + Duration::from_secs(1).min(self.timeout / 4);
        let mut down = lock(&self.down);
        while down.is_none() {
            let Some(rest) = grace.checked_duration_since(Instant::now()) else { break };
            down = self.bell.wait_timeout(down, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(down);
        self.fail(Failure::new(peer, Cause::Lost, why));
        self.down().expect("just failed")
    }

    /// An error of the time when the group forms: if a rank has left, that is the reason.
    pub fn explain(&self, error: CollectiveError) -> CollectiveError {
        let grace = Instant::now() + Duration::from_secs(1).min(self.timeout / 4);
        let mut down = lock(&self.down);
        while down.is_none() {
            let Some(rest) = grace.checked_duration_since(Instant::now()) else { return error };
            down = self.bell.wait_timeout(down, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        down.clone().map_or(error, |failure| failure.during(&"joining"))
    }

    /// Records the first failure, tells everyone, wakes everyone.
    pub fn fail(&self, failure: Failure) {
        let rank = failure.rank;
        let mut text = vec![failure.cause as u8];
        text.extend_from_slice(&failure.why.as_bytes()[..failure.why.len().min(1000)]);
        {
            let mut down = lock(&self.down);
            if down.is_some() || self.closing.load(Ordering::SeqCst) && rank != self.rank {
                // late news change nothing; after the end nobody is lost
                if down.is_some() {
                    return;
                }
            }
            *down = Some(failure);
            self.bell.notify_all();
        }
        for (peer, stream) in &*lock(&self.control) {
            if *peer != rank {
                let _ = write(stream, ABORT, rank, &text);
            }
        }
        for s in &*lock(&self.data) {
            let _ = s.shutdown(Shutdown::Both);
        }
    }

    /// Stays until the others have heard of the failure, for a second at most: news in a connection that is closed
    /// before what came in was read are lost.
    pub fn linger(&self) {
        for (_, stream) in &*lock(&self.control) {
            let _ = lock(stream).shutdown(Shutdown::Write);
        }
        let end = Instant::now() + Duration::from_secs(1);
        let mut watching = lock(&self.watching);
        while *watching > 0 {
            let Some(rest) = end.checked_duration_since(Instant::now()) else { return };
            watching = self.told.wait_timeout(watching, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The orderly end.
    pub fn close(&self) {
        if self.closing.swap(true, Ordering::SeqCst) {
            return;
        }
        for (_, stream) in &*lock(&self.control) {
            let _ = write(stream, GOODBYE, self.rank, &[]);
        }
    }

    /// Whether [`Health::close`] was called.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Ends the watching threads.
    pub fn leave(&self) {
        for (_, s) in &*lock(&self.control) {
            let _ = lock(s).shutdown(Shutdown::Both);
        }
    }

    fn writer(&self, peer: usize) -> Option<Arc<Mutex<TcpStream>>> {
        lock(&self.control).iter().find(|c| c.0 == peer).map(|c| c.1.clone())
    }

    fn watch(&self, peer: usize, mut stream: TcpStream) {
        let Some(writer) = self.writer(peer) else { return };
        let (mut heard, mut beat) = (Instant::now(), None::<Instant>);
        let mut bytes = vec![];
        let mut buffer = [0; 4096];
        loop {
            if beat.is_none_or(|b| b.elapsed() >= interval(self.timeout)) {
                // what is wrong shows when reading
                let _ = write(&writer, HEARTBEAT, self.rank, &[]);
                beat = Some(Instant::now());
            }
            match stream.read(&mut buffer) {
                Ok(0) => {
                    self.gone(peer, "its process ended");
                    // it may wait for this (see `linger`); all that it said was read
                    let _ = stream.shutdown(Shutdown::Both);
                    return;
                }
                Ok(n) => {
                    heard = Instant::now();
                    bytes.extend_from_slice(&buffer[..n]);
                    loop {
                        match self.message(peer, &mut bytes) {
                            Ok(Some(GOODBYE)) => return,
                            Ok(Some(_)) => {}
                            Ok(None) => break,
                            Err(why) => return self.gone(peer, why),
                        }
                    }
                }
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return self.gone(peer, &format!("its connection broke ({e})")),
            }
            if heard.elapsed() > self.timeout.mul_f64(0.85) {
                let limit = self.timeout.as_secs_f64();
                let why = format!(
                    "nothing was heard of it within --collective-timeout {limit} s: it hangs, or its host or link is down"
                );
                return self.gone(peer, &why);
            }
        }
    }

    fn gone(&self, peer: usize, why: &str) {
        if !self.is_closing() {
            self.fail(Failure::new(peer, Cause::Lost, why));
        }
    }

    /// Takes one whole message off the front.
    fn message(&self, peer: usize, bytes: &mut Vec<u8>) -> Result<Option<u8>, &'static str> {
        let Some(head) = bytes.first_chunk::<HEAD>() else { return Ok(None) };
        let kind = head[0];
        let rank = u32::from_le_bytes(head[1..5].try_into().expect("4")) as usize;
        let len = u32::from_le_bytes(head[5..].try_into().expect("4"));
        if len > LIMIT || !(HEARTBEAT..=GOODBYE).contains(&kind) {
            return Err("it sent something else than control messages");
        }
        let end = HEAD + len as usize;
        if bytes.len() < end {
            return Ok(None);
        }
        if kind == ABORT {
            let (cause, why) = bytes[HEAD..end].split_first().ok_or("it sent half a message")?;
            let cause =
                [Cause::Lost, Cause::Stopped, Cause::Refused].into_iter().find(|c| *c as u8 == *cause);
            let cause = cause.ok_or("it sent something else than control messages")?;
            let why = String::from_utf8_lossy(why).into_owned();
            // it speaks for itself, or passes on what it knows; rank 0 tells all others
            tracing::debug!("rank {peer} says that rank {rank} failed: {why}");
            self.fail(Failure::new(rank, cause, why));
        }
        bytes.drain(..end);
        Ok(Some(kind))
    }
}

/// Between heartbeats.
fn interval(timeout: Duration) -> Duration {
    (timeout / 6).clamp(Duration::from_millis(50), Duration::from_secs(2))
}
