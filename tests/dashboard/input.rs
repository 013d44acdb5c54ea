//! The real program's window under real keys and clicks: each must lead to the picture that the dashboard draws
//! of that state without a window.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use birkhoff::dashboard::{Dashboard, FolderSource, View};
use egui::{Pos2, Theme};
use egui_kittest::kittest::Queryable;

use super::pictures::{App, harness, vulkan};
use super::program::{Owned, count, pixels, program, screen};
use super::recorded::three;

const SIZE: (usize, usize) = (1100, 700);

/// `xdotool` with these words; what it says, `None` if it fails.
fn xdotool(display: &str, words: &[&str]) -> Option<String> {
    let mut c = Command::new("xdotool");
    let out = c.env("DISPLAY", display).args(words).stderr(Stdio::null()).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).into_owned())
}

/// The dashboard without a window, on the same folders.
fn on(folders: &[PathBuf]) -> App {
    let mut d = Dashboard::new();
    for f in folders {
        d.add(Box::new(FolderSource::new(f.clone())));
    }
    harness(d, Theme::Light)
}

/// Its picture as 0xRRGGBB.
fn drawn(h: &mut App) -> Vec<u32> {
    h.run_steps(6);
    let image = h.render().expect("picture");
    assert_eq!((image.width() as usize, image.height() as usize), SIZE);
    image.pixels().map(|p| u32::from_be_bytes([0, p[0], p[1], p[2]])).collect()
}

/// Pixels that differ clearly.
fn apart(a: &[u32], b: &[u32]) -> usize {
    let far = |x: u32, y: u32| (0..3).any(|k| (x >> (8 * k) & 255).abs_diff(y >> (8 * k) & 255) > 24);
    a.iter().zip(b).filter(|(x, y)| far(**x, **y)).count()
}

/// Whether both show the same: another driver's letters and edges may differ, a view differs in far more.
fn near(a: &[u32], b: &[u32]) -> bool {
    apart(a, b) < SIZE.0 * SIZE.1 / 100
}

/// The window of the program.
struct Live<'a> {
    display: &'a str,
    id: String,
    corner: (usize, usize),
    screen: PathBuf,
}

impl<'a> Live<'a> {
    /// Waits for the window.
    fn find(display: &'a str, folder: &Path, child: &mut Owned) -> Live<'a> {
        let begin = Instant::now();
        loop {
            let found = xdotool(display, &["search", "--onlyvisible", "--name", "^birkhoff$"]);
            let id = found.and_then(|t| t.lines().next().map(str::to_string));
            let place = id.as_ref().and_then(|id| xdotool(display, &["getwindowgeometry", "--shell", id]));
            if let (Some(id), Some(place)) = (id, place) {
                let field = |name: &str| {
                    let line = place.lines().find_map(|l| l.strip_prefix(name));
                    line.and_then(|v| v.trim_start_matches('=').parse().ok()).expect(name)
                };
                assert_eq!((field("WIDTH"), field("HEIGHT")), SIZE);
                let corner = (field("X"), field("Y"));
                return Live { display, id, corner, screen: folder.join("Xvfb_screen0") };
            }
            if let Some(status) = child.0.try_wait().expect("wait") {
                panic!("the program ended with {status}");
            }
            assert!(begin.elapsed() < Duration::from_secs(90), "no window");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// What stands in it.
    fn seen(&self) -> Vec<u32> {
        let (width, all) = pixels(&self.screen).expect("the screen's pixels");
        let rows = all.chunks(width).skip(self.corner.1).take(SIZE.1);
        rows.flat_map(|r| r[self.corner.0..self.corner.0 + SIZE.0].to_vec()).collect()
    }

    /// Presses a key. Without a window manager nobody else gives the window the keyboard.
    fn key(&self, key: &str) {
        xdotool(self.display, &["windowfocus", "--sync", &self.id]);
        xdotool(self.display, &["key", key]).expect("a key");
    }

    fn click(&self, at: Pos2) {
        let (x, y) = (at.x as usize + self.corner.0, at.y as usize + self.corner.1);
        let (x, y) = (x.to_string(), y.to_string());
        xdotool(self.display, &["mousemove", &x, &y, "sleep", "0.2", "click", "1", "sleep", "0.3"])
            .expect("a click");
        // off every tab and plot, so that nothing is lit
        let (x, y) = (self.corner.0 + SIZE.0 - 4, self.corner.1 + SIZE.1 - 4);
        xdotool(self.display, &["mousemove", &x.to_string(), &y.to_string()]).expect("a move");
    }

    /// Waits until the window shows the first of the pictures rather than one of the others; `again` repeats what
    /// is to lead there, as a key can come before the window listens.
    fn shows(&self, what: &str, picture: &[u32], others: &[&[u32]], mut again: impl FnMut()) {
        let begin = Instant::now();
        let mut asked = Instant::now();
        again();
        loop {
            std::thread::sleep(Duration::from_millis(250));
            let seen = self.seen();
            let gap = apart(&seen, picture);
            let rest: Vec<usize> = others.iter().map(|o| apart(&seen, o)).collect();
            if near(&seen, picture) && rest.iter().all(|&r| r > 2 * gap) {
                println!("{what}: {gap} pixels apart, from the others {rest:?}");
                return;
            }
            if begin.elapsed() > Duration::from_secs(60) {
                let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("window.ppm");
                let rgb = seen.iter().flat_map(|p| p.to_be_bytes()[1..].to_vec());
                let head = format!("P6 {} {} 255\n", SIZE.0, SIZE.1).into_bytes();
                fs::write(&file, head.into_iter().chain(rgb).collect::<Vec<u8>>()).expect("write");
                panic!("{what}: {gap} pixels apart, from the others {rest:?}; see {}", file.display());
            }
            if asked.elapsed() > Duration::from_secs(5) {
                asked = Instant::now();
                again();
            }
        }
    }
}

#[test]
fn keys_and_clicks_move_between_the_views() {
    let t = tempfile::tempdir().expect("folder");
    if Command::new("xdotool").arg("version").output().is_err() {
        return println!("SKIP: no xdotool (Debian: apt-get install xdotool)");
    }
    let Some((_screen, display)) = screen(t.path()) else { return };
    if !vulkan() {
        return;
    }
    let runs = three(&t.path().join("runs"));
    let mut h = on(&runs);
    let mut pictures = vec![];
    for v in View::ALL {
        h.state_mut().show(v);
        pictures.push(drawn(&mut h));
    }
    let tabs: Vec<Pos2> = View::ALL.map(|v| h.get_by_label(v.title()).rect().center()).to_vec();
    let swatch = h.get_by_label("hide hc").rect().center();
    h.state_mut().show(View::Gains);
    h.get_by_label("hide hc").click_accesskit();
    let without = drawn(&mut h);
    let name = h.get_by_label("select mhc").rect().center();
    h.state_mut().select(2);
    let selected = drawn(&mut h);

    let mut child = Owned(
        program(&display)
            .args(["dashboard", "--view", "overview", "--theme", "light", "--size", "1100x700"])
            .args(&runs)
            .spawn()
            .expect("birkhoff"),
    );
    let live = Live::find(&display, t.path(), &mut child);
    let others = |i: usize| -> Vec<&[u32]> {
        pictures.iter().enumerate().filter(|p| p.0 != i).map(|p| p.1.as_slice()).collect()
    };
    let at_rest = || live.click(egui::pos2(SIZE.0 as f32 - 4.0, SIZE.1 as f32 - 4.0));
    live.shows("the first view", &pictures[0], &others(0), at_rest);
    for i in [4, 2, 1, 5, 3] {
        let title = View::ALL[i].title();
        live.shows(&format!("key {}, {title}", i + 1), &pictures[i], &others(i), || {
            live.key(&(i + 1).to_string())
        });
    }
    for i in [0, 5, 2] {
        live.shows(&format!("a click on {}", View::ALL[i].title()), &pictures[i], &others(i), || {
            live.click(tabs[i])
        });
    }
    // a second click would bring the run back
    let click = || {
        if near(&live.seen(), &pictures[2]) {
            live.click(swatch);
        }
    };
    live.shows("hc hidden", &without, &[&pictures[2]], click);
    live.shows("mhc selected", &selected, &[&without], || live.click(name));
    live.key("d");
    let begin = Instant::now();
    while count(&live.seen(), 0x14171c) < 20_000 {
        assert!(begin.elapsed() < Duration::from_secs(60), "it is still light");
        std::thread::sleep(Duration::from_millis(250));
    }
}
