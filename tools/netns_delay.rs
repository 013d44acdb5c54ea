//! The delay of tools/netns.sh for kernels without netem: two network devices whose packets take a while from one to the
//! other; and a measurement of what a link is like. Nothing but std, so that `rustc` alone builds it.
//!
//!   netns_delay join DELAY DEVICE DEVICE    makes two TUN devices and forwards until it is killed
//!   netns_delay answer ADDRESS:PORT         the other end of `ask`
//!   netns_delay ask ADDRESS:PORT BYTES      prints the median round trip in ms and the Mbit/s of so many bytes
//!
//! DELAY is like tc's: 10ms, 500us, 1s.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Of linux/if_tun.h: a layer-3 device, packets without a header before them.
const TUNSETIFF: std::ffi::c_ulong = 0x4004_54ca;
const IFF_TUN: i16 = 0x0001;
const IFF_NO_PI: i16 = 0x1000;
/// A packet at most.
const LARGEST: usize = 1 << 16;
/// Round trips of a measurement.
const TRIPS: usize = 21;

unsafe extern "C" {
    fn ioctl(fd: std::ffi::c_int, request: std::ffi::c_ulong, ...) -> std::ffi::c_int;
}

/// `struct ifreq` of linux/if.h, as TUNSETIFF reads and writes it.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: i16,
    rest: [u8; 22],
}

fn delay(text: &str) -> Result<Duration> {
    let wrong = || format!("{text}: expected a time such as 10ms, 500us or 1s");
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
    let (number, unit) = text.split_at(at);
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let scale = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return Err(wrong().into()),
    };
    Ok(Duration::try_from_secs_f64(number * scale)?)
}

fn device(name: &str) -> Result<File> {
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    let file = file.map_err(|e| format!("/dev/net/tun: {e}"))?;
    let mut request = Request { name: [0; 16], flags: IFF_TUN | IFF_NO_PI, rest: [0; 22] };
    // the kernel wants a zero after it
    let place =
        request.name[..15].get_mut(..name.len()).ok_or_else(|| format!("{name}: longer than 15 bytes"))?;
    place.copy_from_slice(name.as_bytes());
    // SAFETY: the file is open, and the request is as large as the kernel's `struct ifreq` (40 bytes).
    if unsafe { ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) } < 0 {
        return Err(format!("{name}: cannot be made: {}", std::io::Error::last_os_error()).into());
    }
    Ok(file)
}

/// What comes out of one device goes into the other, each packet so much later.
fn forward(mut from: File, mut to: File, delay: Duration) {
    let (send, receive) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        for (due, packet) in receive {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            // a device that is down takes none, as a wire that is cut
            let _ = to.write_all(&packet);
        }
    });
    thread::spawn(move || {
        let mut buffer = vec![0; LARGEST];
        loop {
            match from.read(&mut buffer) {
                Ok(n) => {
                    if send.send((Instant::now() + delay, buffer[..n].to_vec())).is_err() {
                        return;
                    }
                }
                // down, or not up yet
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        }
    });
}

fn join(delay: Duration, names: [&str; 2]) -> Result<()> {
    let [a, b] = [device(names[0])?, device(names[1])?];
    forward(a.try_clone()?, b.try_clone()?, delay);
    forward(b, a, delay);
    println!("ready");
    loop {
        thread::park();
    }
}

fn answer(at: &str) -> Result<()> {
    let (mut stream, _) = TcpListener::bind(at)?.accept()?;
    stream.set_nodelay(true)?;
    let mut byte = [0];
    for _ in 0..TRIPS {
        stream.read_exact(&mut byte)?;
        stream.write_all(&byte)?;
    }
    // then all that comes, and a byte once it is here
    let mut size = [0; 8];
    stream.read_exact(&mut size)?;
    std::io::copy(&mut (&stream).take(u64::from_le_bytes(size)), &mut std::io::sink())?;
    stream.write_all(&byte)?;
    Ok(())
}

fn ask(at: &str, bytes: usize) -> Result<()> {
    let begin = Instant::now();
    let mut stream = loop {
        match TcpStream::connect(at) {
            Ok(stream) => break stream,
            Err(e) if begin.elapsed() > Duration::from_secs(10) => return Err(format!("{at}: {e}").into()),
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    };
    stream.set_nodelay(true)?;
    let mut trips = vec![];
    let mut byte = [7];
    for _ in 0..TRIPS {
        let begin = Instant::now();
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        trips.push(begin.elapsed());
    }
    trips.sort();
    let begin = Instant::now();
    stream.write_all(&(bytes as u64).to_le_bytes())?;
    stream.write_all(&vec![0; bytes])?;
    stream.read_exact(&mut byte)?;
    let rate = bytes as f64 * 8e-6 / begin.elapsed().as_secs_f64();
    println!("{:.2} {rate:.1}", trips[TRIPS / 2].as_secs_f64() * 1e3);
    Ok(())
}

fn run(words: &[&str]) -> Result<()> {
    match words {
        ["join", time, a, b] => join(delay(time)?, [a, b]),
        ["answer", at] => answer(at),
        ["ask", at, bytes] => ask(at, bytes.parse()?),
        _ => Err("expected join DELAY DEVICE DEVICE, answer ADDRESS:PORT, or ask ADDRESS:PORT BYTES".into()),
    }
}

fn main() -> std::process::ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("netns_delay: {e}");
            std::process::ExitCode::from(2)
        }
    }
}
