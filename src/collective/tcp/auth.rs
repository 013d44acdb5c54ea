//! The handshake: both ends prove that they know the job's secret before either believes anything.
//!
//! client → server: [`Hello`] with a nonce. Server → client: its own nonce and HMAC-SHA256(secret, "server", hello, nonce).
//! Client → server: HMAC-SHA256(secret, "client", hello, nonce). Server → client: welcome, or why not. Everything has a
//! fixed or bounded size and five seconds. This proves who is there; it does not hide or sign what follows: for networks
//! whose wires are not trusted use a tunnel.

use super::super::error::{CollectiveError, Result};
use hmac::{Hmac, KeyInit, Mac};
use rand::TryRng;
use sha2::Sha256;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// An error as people say it: the system's word for a time that ran out is another's.
pub fn words(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "no answer came in time".into(),
        _ => e.to_string(),
    }
}

/// Changes with every change of a message's layout.
pub const VERSION: u32 = 2;
const MAGIC: &[u8; 8] = b"birkhoff";
const NONCE: usize = 32;
const MAC: usize = 32;
const HELLO: usize = 8 + 4 + 1 + 8 + 8 + 4 + 4 + 4 + 2 + NONCE;
/// A stranger who sends nothing is gone after this.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Who calls, and what for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// To join the job, or to carry data.
    pub joins: bool,
    /// The job, hashed.
    pub job: u64,
    /// The group that the connection is for.
    pub group: u64,
    /// The caller's rank in that group.
    pub rank: u32,
    /// Its size, as the caller knows it.
    pub world: u32,
    /// Which of several connections.
    pub lane: u32,
    /// Where the caller listens.
    pub port: u16,
}

impl Hello {
    fn to_bytes(self, nonce: &[u8; NONCE]) -> [u8; HELLO] {
        let mut b = Vec::with_capacity(HELLO);
        b.extend_from_slice(MAGIC);
        b.extend_from_slice(&VERSION.to_le_bytes());
        b.push(u8::from(self.joins));
        b.extend_from_slice(&self.job.to_le_bytes());
        b.extend_from_slice(&self.group.to_le_bytes());
        b.extend_from_slice(&self.rank.to_le_bytes());
        b.extend_from_slice(&self.world.to_le_bytes());
        b.extend_from_slice(&self.lane.to_le_bytes());
        b.extend_from_slice(&self.port.to_le_bytes());
        b.extend_from_slice(nonce);
        b.try_into().expect("the sizes add up")
    }

    fn parse(b: &[u8; HELLO]) -> std::result::Result<Self, String> {
        let mut rest = &b[8..];
        let mut take = |n: usize| {
            let (head, tail) = rest.split_at(n);
            rest = tail;
            let mut le = [0; 8];
            le[..n].copy_from_slice(head);
            u64::from_le_bytes(le)
        };
        if &b[..8] != MAGIC {
            return Err("it does not speak birkhoff's protocol".into());
        }
        let version = take(4) as u32;
        if version != VERSION {
            return Err(format!("it speaks version {version} of the protocol, here is version {VERSION}"));
        }
        Ok(Hello {
            joins: take(1) == 1,
            job: take(8),
            group: take(8),
            rank: take(4) as u32,
            world: take(4) as u32,
            lane: take(4) as u32,
            port: take(2) as u16,
        })
    }
}

fn nonce() -> io::Result<[u8; NONCE]> {
    let mut n = [0; NONCE];
    rand::rngs::SysRng.try_fill_bytes(&mut n).map_err(io::Error::other)?;
    Ok(n)
}

fn mac(secret: &[u8], side: &str, hello: &[u8], nonce: &[u8]) -> Hmac<Sha256> {
    let mut m = Hmac::<Sha256>::new_from_slice(secret).expect("a key of any length will do");
    m.update(side.as_bytes());
    m.update(hello);
    m.update(nonce);
    m
}

/// Makes text of a stranger fit for a message.
fn tame(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().filter(|c| !c.is_control()).take(200).collect()
}

/// Sends 0, and why not.
fn refuse(stream: &mut TcpStream, why: &str) {
    let why = &why.as_bytes()[..why.len().min(200)];
    let mut b = vec![0, why.len() as u8];
    b.extend_from_slice(why);
    // it may be gone already
    let _ = stream.write_all(&b);
}

/// 1, or the other's reason.
fn verdict(stream: &mut TcpStream) -> io::Result<std::result::Result<(), String>> {
    let mut status = [0];
    stream.read_exact(&mut status)?;
    match status[0] {
        0 => {}
        1 => return Ok(Ok(())),
        _ => return Ok(Err("what answers there is not birkhoff".into())),
    }
    let mut len = [0];
    stream.read_exact(&mut len)?;
    let mut text = vec![0; usize::from(len[0])];
    stream.read_exact(&mut text)?;
    Ok(Err(tame(&text)))
}

/// The client's side. An `Err` inside says why the other end refused or cannot be trusted: trying again is no use.
pub fn call(
    stream: &mut TcpStream,
    secret: &[u8],
    hello: Hello,
) -> io::Result<std::result::Result<(), String>> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let bytes = hello.to_bytes(&nonce()?);
    stream.write_all(&bytes)?;
    if let Err(why) = verdict(stream)? {
        return Ok(Err(why));
    }
    let mut answer = [0; NONCE + MAC];
    stream.read_exact(&mut answer)?;
    let (theirs, proof) = answer.split_at(NONCE);
    if mac(secret, "server", &bytes, theirs).verify_slice(proof).is_err() {
        return Ok(Err(
            "it does not know this job's secret: BIRKHOFF_SECRET differs, or it is another program".into(),
        ));
    }
    let proof = mac(secret, "client", &bytes, theirs).finalize().into_bytes();
    stream.write_all(&proof)?;
    verdict(stream)
}

/// The server's side; `admit` decides when the caller has proven itself.
pub fn answer(
    stream: &mut TcpStream,
    secret: &[u8],
    job: u64,
    admit: impl FnOnce(&Hello) -> std::result::Result<(), String>,
) -> std::result::Result<Hello, String> {
    let io = |e: io::Error| format!("the handshake broke off: {}", words(&e));
    stream.set_read_timeout(Some(PATIENCE)).map_err(io)?;
    stream.set_write_timeout(Some(PATIENCE)).map_err(io)?;
    let mut bytes = [0; HELLO];
    stream.read_exact(&mut bytes).map_err(io)?;
    let no = |stream: &mut TcpStream, why: String| {
        refuse(stream, &why);
        Err(why)
    };
    let hello = match Hello::parse(&bytes) {
        Ok(h) => h,
        Err(why) => return no(stream, why),
    };
    if hello.job != job {
        return no(stream, "this port belongs to another job (or BIRKHOFF_SECRET differs, from which a job's name may follow)".into());
    }
    let ours = nonce().map_err(io)?;
    let proof = mac(secret, "server", &bytes, &ours).finalize().into_bytes();
    let mut challenge = vec![1];
    challenge.extend_from_slice(&ours);
    challenge.extend_from_slice(&proof);
    stream.write_all(&challenge).map_err(io)?;
    let mut theirs = [0; MAC];
    let unproven = |_| "it did not prove that it knows the job's secret (BIRKHOFF_SECRET)".to_string();
    stream.read_exact(&mut theirs).map_err(unproven)?;
    if mac(secret, "client", &bytes, &ours).verify_slice(&theirs).is_err() {
        return no(stream, "it does not know the job's secret (BIRKHOFF_SECRET)".into());
    }
    if let Err(why) = admit(&hello) {
        return no(stream, why);
    }
    stream.write_all(&[1]).map_err(io)?;
    Ok(hello)
}

/// For errors while a group forms.
pub fn join_error(what: impl Into<String>) -> CollectiveError {
    CollectiveError::Join(what.into())
}

/// For errors that another try would meet again.
pub fn setup_error(what: impl Into<String>) -> CollectiveError {
    CollectiveError::Setup(what.into())
}

/// How long a caller tries again who is turned away without a word.
const INSIST: Duration = Duration::from_secs(3);

/// [`call`] with errors in words. A door at which too many strangers stand turns everybody away: `again` connects anew.
pub fn introduce(
    mut stream: TcpStream,
    again: impl Fn() -> io::Result<TcpStream>,
    secret: &[u8],
    hello: Hello,
    at: &str,
) -> Result<TcpStream> {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    let (begin, mut wait) = (Instant::now(), Duration::from_millis(10));
    loop {
        let e = match call(&mut stream, secret, hello) {
            Ok(Ok(())) => return Ok(stream),
            Ok(Err(why)) => return Err(setup_error(format!("{at} refused rank {}: {why}", hello.rank))),
            Err(e) => e,
        };
        let turned_away =
            matches!(e.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof);
        let next = (turned_away && begin.elapsed() < INSIST).then(|| {
            std::thread::sleep(wait);
            again().ok()
        });
        let Some(next) = next.flatten() else {
            return Err(join_error(format!("the handshake with {at} broke off: {}", words(&e))));
        };
        stream = next;
        wait = (wait * 2).min(Duration::from_millis(300));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_turned_away_comes_again() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let hello = Hello { joins: true, job: 1, group: 0, rank: 1, world: 2, lane: 0, port: 9 };
        let come = || {
            introduce(TcpStream::connect(at).unwrap(), || TcpStream::connect(at), b"s", hello, "the master")
        };
        std::thread::scope(|s| {
            let door = s.spawn(|| {
                for _ in 0..3 {
                    drop(listener.accept().unwrap());
                }
                answer(&mut listener.accept().unwrap().0, b"s", 1, |_| Ok(())).unwrap()
            });
            come().expect("at last");
            assert_eq!(door.join().unwrap(), hello);
        });
        // a door that is gone is not waited for
        let first = TcpStream::connect(at).unwrap();
        drop(listener);
        let begin = Instant::now();
        let e = introduce(first, || TcpStream::connect(at), b"s", hello, "the master").unwrap_err();
        assert!(e.to_string().contains("the handshake with the master broke off"), "{e}");
        assert!(begin.elapsed() < INSIST);
    }

    #[test]
    fn a_hello_keeps_its_fields() {
        let h = Hello { joins: true, job: 1 << 40, group: 7, rank: 3, world: 4, lane: 2, port: 65_000 };
        let mut b = h.to_bytes(&[9; NONCE]);
        assert_eq!(Hello::parse(&b), Ok(h));
        b[8] += 1;
        assert!(Hello::parse(&b).unwrap_err().contains("version 3"));
        b[0] = b'G';
        assert!(Hello::parse(&b).unwrap_err().contains("does not speak"));
    }
}
