//! The real program on a virtual screen.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::pictures::image_of;
use super::recorded::three;

/// A process that ends with the test.
pub struct Owned(pub Child);

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A virtual screen whose pixels are in a file; `None`, with a line that says so, where there is no Xvfb.
pub fn screen(folder: &Path) -> Option<(Owned, String)> {
    let spawned = Command::new("Xvfb")
        .args(["-displayfd", "1", "-screen", "0", "1200x800x24", "-nolisten", "tcp", "-noreset", "-fbdir"])
        .arg(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut child) = spawned else {
        println!("SKIP: no Xvfb (Debian: apt-get install xvfb)");
        return None;
    };
    let out = child.stdout.take().expect("stdout");
    let child = Owned(child);
    let mut line = String::new();
    BufReader::new(out).read_line(&mut line).expect("display number");
    assert!(!line.trim().is_empty(), "Xvfb did not start");
    Some((child, format!(":{}", line.trim())))
}

pub fn program(display: &str) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_birkhoff"));
    c.env("DISPLAY", display).env_remove("WAYLAND_DISPLAY").env("XDG_RUNTIME_DIR", "/nonexistent/birkhoff");
    c
}

/// The pixels of an XWD file, as 0xRRGGBB, with the width.
pub fn pixels(file: &Path) -> Option<(usize, Vec<u32>)> {
    let bytes = fs::read(file).ok()?;
    let field = |i: usize| Some(u32::from_be_bytes(bytes.get(4 * i..4 * i + 4)?.try_into().ok()?) as usize);
    let (header, width, height) = (field(0)?, field(4)?, field(5)?);
    let (little, bits, line, colors) = (field(7)? == 0, field(11)?, field(12)?, field(19)?);
    assert_eq!(bits, 32);
    let data = bytes.get(header + 12 * colors..)?;
    let mut out = Vec::with_capacity(width * height);
    for y in 0..height {
        for p in data.get(y * line..y * line + 4 * width)?.chunks(4) {
            let p: [u8; 4] = p.try_into().ok()?;
            out.push(if little { u32::from_le_bytes(p) } else { u32::from_be_bytes(p) } & 0xff_ffff);
        }
    }
    Some((width, out))
}

/// How many pixels have about this colour.
pub fn count(pixels: &[u32], rgb: u32) -> usize {
    let near = |a: u32, b: u32, shift: u32| (a >> shift & 255).abs_diff(b >> shift & 255) <= 3;
    pixels.iter().filter(|&&p| near(p, rgb, 0) && near(p, rgb, 8) && near(p, rgb, 16)).count()
}

#[test]
fn the_window_shows_the_runs() {
    let t = tempfile::tempdir().expect("folder");
    let Some((_screen, display)) = screen(t.path()) else { return };
    let runs = t.path().join("runs");
    three(&runs);
    let child = program(&display)
        .args(["dashboard", "--view", "gains", "--theme", "light", "--size", "1100x700"])
        .arg(&runs)
        .stderr(Stdio::piped())
        .spawn()
        .expect("birkhoff");
    let mut child = Owned(child);
    let begin = Instant::now();
    // the ground of the light theme, and the colour of each run
    let expected = [(0xf4f5f7, 20_000), (0xffffff, 100_000), (0x0072b2, 50), (0xd55e00, 50), (0x008f68, 50)];
    loop {
        std::thread::sleep(Duration::from_millis(300));
        let seen = pixels(&t.path().join("Xvfb_screen0")).map_or(vec![], |p| p.1);
        if expected.iter().all(|&(rgb, n)| count(&seen, rgb) >= n) {
            break;
        }
        if let Some(status) = child.0.try_wait().expect("wait") {
            let mut text = String::new();
            let mut err = child.0.stderr.take().expect("stderr");
            std::io::Read::read_to_string(&mut err, &mut text).expect("read");
            panic!("the program ended with {status}: {text}");
        }
        let counts: Vec<usize> = expected.iter().map(|e| count(&seen, e.0)).collect();
        assert!(begin.elapsed() < Duration::from_secs(90), "the window did not appear: {counts:?}");
    }
}

#[test]
fn a_screenshot_is_written_and_the_window_closes() {
    let t = tempfile::tempdir().expect("folder");
    let Some((_screen, display)) = screen(t.path()) else { return };
    let runs = t.path().join("runs");
    three(&runs);
    let file = t.path().join("shot.png");
    let out = program(&display)
        .args(["dashboard", "--theme", "dark", "--size", "900x600", "--screenshot"])
        .arg(&file)
        .arg(&runs)
        .output()
        .expect("birkhoff");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let (w, h, rgba) = image_of(&fs::read(&file).expect("picture"));
    assert_eq!((w, h), (900, 600));
    let pixels: Vec<u32> = rgba.chunks(4).map(|p| u32::from_be_bytes([0, p[0], p[1], p[2]])).collect();
    for (rgb, n) in [(0x14171c, 20_000), (0x4fa8e0, 50), (0xee7d2f, 50), (0x2dbf94, 50)] {
        assert!(count(&pixels, rgb) >= n, "{rgb:06x}: {}", count(&pixels, rgb));
    }
}

#[test]
fn without_a_screen_it_says_so_in_a_line() {
    let out = Command::new(env!("CARGO_BIN_EXE_birkhoff"))
        .args(["dashboard", "nothing-here"])
        .env_remove("DISPLAY")
        .env_remove("WAYLAND_DISPLAY")
        .env_remove("WAYLAND_SOCKET")
        .output()
        .expect("birkhoff");
    let text = String::from_utf8_lossy(&out.stderr);
    if cfg!(target_os = "linux") {
        assert_eq!(out.status.code(), Some(2), "{text}");
        assert!(
            text.starts_with("error: no window can be opened here") && text.lines().count() == 1,
            "{text}"
        );
    }
}
