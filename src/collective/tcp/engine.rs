//! Executes a schedule over the data connections of one group, in the caller's thread: sends what is ready, takes what
//! comes, and when there is neither yields the processor for a moment, then sleeps in the kernel.
//!
//! Frames: a head of 32 bytes (magic, group, sequence, operation, length, checksum over head and payload), then the payload.
//! The receiver knows from its own schedule how long a frame must be; nothing a peer says makes it allocate.

use super::super::error::{Cause, CollectiveError, Failure, Result};
use super::super::schedule::{Schedule, Step};
use super::super::transport::Operation;
use super::super::work::{Aligned, Work};
use super::control::Health;
use crc_fast::CrcAlgorithm::Crc64Nvme;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: u32 = 0x3146_4B42;
const HEAD: usize = 32;
/// Bytes of a socket's buffer within one host.
const LOOPBACK: usize = 512 << 10;
/// How long a rank with nothing to do gives its processor to whoever has work before it sleeps in the kernel: to be woken
/// costs more than most waits within an operation last, the more so where ranks share processors.
const YIELD: Duration = Duration::from_micros(20);
/// The longest sleep between two looks at the group's health. (Bad news close the connections, which wakes at once.)
const LOOK: Duration = Duration::from_millis(500);

/// One connection.
#[derive(Debug)]
struct Link {
    /// Its rank in the whole group.
    peer: usize,
    stream: TcpStream,
    readable: bool,
    writable: bool,
    /// Whether room to write is an event: only where it is waited for, for it would end every sleep once more.
    hears_room: bool,
    sent_frames: u64,
    received_frames: u64,
    /// Steps of the operation in progress, first first.
    sends: Vec<usize>,
    receipts: Vec<usize>,
    out: Out,
    into: In,
}

#[derive(Debug, Default)]
struct Out {
    /// A frame is under way: its head, and how much of head and payload is gone.
    active: bool,
    head: [u8; HEAD],
    gone: usize,
    /// The payload, where it is not sent from the data.
    staged: Option<Vec<u8>>,
    spare: Vec<u8>,
}

#[derive(Debug, Default)]
struct In {
    head: [u8; HEAD],
    got: usize,
    payload: Aligned,
}

/// The connections of one rank in one group.
#[derive(Debug)]
pub struct Engine {
    poll: Poll,
    events: Events,
    links: Vec<Link>,
    /// `[peer * lanes + lane]`.
    index: Vec<Option<usize>>,
    lanes: usize,
    group: u32,
}

/// An operation's name in a frame's head.
fn code(kind: &str) -> u32 {
    xxh3_64(kind.as_bytes()) as u32
}

fn head(group: u32, sequence: u64, kind: &str, payload: &[u8]) -> [u8; HEAD] {
    let mut h = [0; HEAD];
    h[..4].copy_from_slice(&MAGIC.to_le_bytes());
    h[4..8].copy_from_slice(&group.to_le_bytes());
    h[8..16].copy_from_slice(&sequence.to_le_bytes());
    h[16..20].copy_from_slice(&code(kind).to_le_bytes());
    h[20..24].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    let sum = checksum(&h, payload);
    h[24..].copy_from_slice(&sum.to_le_bytes());
    h
}

/// The payload's is a CRC because processors have instructions for it: several times as fast as a hash of SSE2's width.
fn checksum(head: &[u8; HEAD], payload: &[u8]) -> u64 {
    xxh3_64(&head[..24]) ^ crc_fast::checksum(Crc64Nvme, payload)
}

fn word(h: &[u8; HEAD], at: usize) -> u32 {
    u32::from_le_bytes(h[at..at + 4].try_into().expect("4"))
}

/// Why a link cannot go on.
enum Trouble {
    Broken(String),
    Mismatch(String),
    Damaged(String),
}

impl Engine {
    /// Of connected streams: `(peer, lane, stream)`, all of them. `members`: the ranks' numbers in the whole group, by which
    /// messages name them.
    pub fn new(
        members: &[usize],
        lanes: usize,
        group: u64,
        streams: Vec<(usize, usize, std::net::TcpStream)>,
    ) -> io::Result<Self> {
        let poll = Poll::new()?;
        let mut index = vec![None; members.len() * lanes];
        let mut links = vec![];
        for (peer, lane, stream) in streams {
            stream.set_nodelay(true)?;
            // between processes of one host the kernel's buffers have no distance to bridge: kept small they stay in the
            // processor's cache (64 MiB: a fifth less time)
            if stream.peer_addr()?.ip().is_loopback() {
                let socket = socket2::SockRef::from(&stream);
                socket.set_send_buffer_size(LOOPBACK)?;
                socket.set_recv_buffer_size(LOOPBACK)?;
            }
            stream.set_nonblocking(true)?;
            let mut stream = TcpStream::from_std(stream);
            let token = Token(links.len());
            poll.registry().register(&mut stream, token, Interest::READABLE)?;
            index[peer * lanes + lane] = Some(links.len());
            links.push(Link {
                peer: members[peer],
                stream,
                readable: true,
                writable: true,
                hears_room: false,
                sent_frames: 0,
                received_frames: 0,
                sends: vec![],
                receipts: vec![],
                out: Out::default(),
                into: In::default(),
            });
        }
        Ok(Engine { poll, events: Events::with_capacity(64), links, index, lanes, group: group as u32 })
    }

    /// See [`super::super::transport::Transport::run`].
    pub fn run(
        &mut self,
        rank: usize,
        op: &Operation,
        schedule: &Schedule,
        work: &mut dyn Work,
        health: &Health,
    ) -> Result<()> {
        let lost = |failure: Failure| failure.during(op);
        if let Some(down) = health.down() {
            return Err(lost(down));
        }
        let steps = &schedule.steps;
        for link in &mut self.links {
            link.sends.clear();
            link.receipts.clear();
        }
        // last first, so that the next is popped
        for (i, s) in steps.iter().enumerate().rev() {
            let link = self.index[s.peer * self.lanes + s.lane].expect("a link to every peer");
            let link = &mut self.links[link];
            if s.action.sends() { link.sends.push(i) } else { link.receipts.push(i) }
        }
        let mut done = vec![false; steps.len()];
        let mut left = steps.len();
        while left > 0 {
            let mut moved = false;
            let mut trouble = None;
            for link in &mut self.links {
                while let Some(&i) = link.sends.last() {
                    if !ready(&done, &steps[i]) {
                        break;
                    }
                    match link.send(self.group, op.kind, &steps[i], work) {
                        Ok(true) => {
                            link.sends.pop();
                            (done[i], moved, left) = (true, true, left - 1);
                        }
                        Ok(false) => break,
                        Err(e) => {
                            trouble = Some((link.peer, e));
                            break;
                        }
                    }
                }
            }
            // one frame a link, then what it made ready is sent, from the data as they are then
            for link in &mut self.links {
                let Some(&i) = link.receipts.last() else { continue };
                if !link.readable || !ready(&done, &steps[i]) {
                    continue;
                }
                match link.receive(self.group, op.kind, &steps[i], work) {
                    Ok(true) => {
                        link.receipts.pop();
                        (done[i], moved, left) = (true, true, left - 1);
                        break;
                    }
                    Ok(false) => {}
                    Err(e) => trouble = Some((link.peer, e)),
                }
            }
            if let Some((peer, t)) = trouble {
                return Err(match t {
                    Trouble::Broken(why) => lost(health.blame(peer, &why)),
                    Trouble::Mismatch(why) => {
                        let told = format!("it disagrees with rank {peer}: {why}");
                        health.fail(Failure::new(rank, Cause::Refused, told));
                        CollectiveError::Mismatch { rank, peer, why }
                    }
                    Trouble::Damaged(why) => {
                        let told = format!("it sent a damaged frame to rank {rank}: {why}");
                        health.fail(Failure::new(peer, Cause::Lost, told));
                        CollectiveError::Damaged { rank: peer, operation: op.to_string(), why }
                    }
                });
            }
            if moved {
                continue;
            }
            self.wait().map_err(|e| lost(health.blame(rank, &e.to_string())))?;
            if let Some(down) = health.down() {
                return Err(lost(down));
            }
        }
        Ok(())
    }

    /// Until a link can go on, or it is time to look at the group's health: yields for a moment, then sleeps.
    fn wait(&mut self) -> io::Result<()> {
        for (i, link) in self.links.iter_mut().enumerate() {
            if link.hears_room == link.writable {
                link.hears_room = !link.writable;
                let interest = match link.hears_room {
                    true => Interest::READABLE | Interest::WRITABLE,
                    false => Interest::READABLE,
                };
                // what has become true in between is an event as well
                self.poll.registry().reregister(&mut link.stream, Token(i), interest)?;
            }
        }
        let begin = Instant::now();
        let mut limit = Duration::ZERO;
        loop {
            match self.poll.poll(&mut self.events, Some(limit)) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
            if !self.events.is_empty() || limit == LOOK {
                break;
            }
            if begin.elapsed() < YIELD {
                std::thread::yield_now();
            } else {
                limit = LOOK;
            }
        }
        for e in &self.events {
            let link = &mut self.links[e.token().0];
            link.readable |= e.is_readable() || e.is_read_closed() || e.is_error();
            link.writable |= e.is_writable() || e.is_write_closed() || e.is_error();
        }
        Ok(())
    }
}

fn ready(done: &[bool], s: &Step) -> bool {
    s.after.is_none_or(|a| done[a])
}

fn broken(e: &io::Error) -> Trouble {
    Trouble::Broken(format!("the connection to it broke ({e})"))
}

impl Link {
    /// Goes on with a frame; true when it is gone.
    fn send(
        &mut self,
        group: u32,
        kind: &str,
        step: &Step,
        work: &mut dyn Work,
    ) -> std::result::Result<bool, Trouble> {
        let o = &mut self.out;
        if !o.active {
            o.staged = match work.view(step) {
                Some(_) => None,
                None => {
                    let mut bytes = std::mem::take(&mut o.spare);
                    bytes.clear();
                    work.encode(step, &mut bytes);
                    Some(bytes)
                }
            };
            let payload = o.staged.as_deref().or_else(|| work.view(step)).expect("staged or in place");
            o.head = head(group, self.sent_frames, kind, payload);
            (o.active, o.gone) = (true, 0);
            self.sent_frames += 1;
        }
        // begun all the same, so that a copy is of the data as they were before the next receipt
        if !self.writable {
            return Ok(false);
        }
        let payload = o.staged.as_deref().or_else(|| work.view(step)).expect("as when it began");
        let total = HEAD + payload.len();
        while o.gone < total {
            let head = &o.head[o.gone.min(HEAD)..];
            let rest = &payload[o.gone.saturating_sub(HEAD)..];
            match self.stream.write_vectored(&[IoSlice::new(head), IoSlice::new(rest)]) {
                Ok(0) => return Err(Trouble::Broken("the connection to it closed".into())),
                Ok(n) => o.gone += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.writable = false;
                    return Ok(false);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(broken(&e)),
            }
        }
        o.active = false;
        if let Some(bytes) = o.staged.take() {
            o.spare = bytes;
        }
        Ok(true)
    }

    /// Goes on with a frame; true when it has been taken.
    fn receive(
        &mut self,
        group: u32,
        kind: &str,
        step: &Step,
        work: &mut dyn Work,
    ) -> std::result::Result<bool, Trouble> {
        let len = work.len(step);
        let i = &mut self.into;
        let total = HEAD + len;
        loop {
            let place = match work.destination(step) {
                Some(d) => d,
                None => i.payload.bytes(len),
            };
            if i.got < total {
                let head = &mut i.head[i.got.min(HEAD)..];
                let rest = &mut place[i.got.saturating_sub(HEAD)..];
                let had = i.got;
                let read = if head.is_empty() {
                    self.stream.read(rest)
                } else {
                    self.stream.read_vectored(&mut [IoSliceMut::new(head), IoSliceMut::new(rest)])
                };
                match read {
                    Ok(0) => {
                        return Err(Trouble::Broken("its process ended or closed the connection".into()));
                    }
                    Ok(n) => i.got += n,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        self.readable = false;
                        return Ok(false);
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    Err(e) => return Err(broken(&e)),
                }
                if had < HEAD && i.got >= HEAD {
                    check(&i.head, group, self.received_frames, kind, len)?;
                }
                continue;
            }
            if checksum(&i.head, place) != u64::from_le_bytes(i.head[24..].try_into().expect("8")) {
                return Err(Trouble::Damaged("its checksum is wrong".into()));
            }
            break;
        }
        if work.destination(step).is_none() {
            work.absorb(step, i.payload.bytes(len));
        }
        i.got = 0;
        self.received_frames += 1;
        Ok(true)
    }
}

fn check(
    h: &[u8; HEAD],
    group: u32,
    sequence: u64,
    kind: &str,
    len: usize,
) -> std::result::Result<(), Trouble> {
    if word(h, 0) != MAGIC || word(h, 4) != group {
        return Err(Trouble::Damaged("it does not begin as frames of this group do".into()));
    }
    let theirs = u64::from_le_bytes(h[8..16].try_into().expect("8"));
    if theirs != sequence {
        return Err(Trouble::Damaged(format!("it is number {theirs}, number {sequence} was expected")));
    }
    if word(h, 16) != code(kind) || word(h, 20) as usize != len {
        let names =
            ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send", "barrier"];
        let theirs = names.iter().find(|n| code(n) == word(h, 16)).unwrap_or(&"an unknown operation");
        return Err(Trouble::Mismatch(format!(
            "a frame of {} bytes for {theirs} arrived in {kind}, which expects {len} bytes",
            word(h, 20)
        )));
    }
    Ok(())
}
