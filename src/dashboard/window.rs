//! The native window around the dashboard.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use eframe::egui;
use egui::{ColorImage, ViewportBuilder, ViewportCommand};

use super::app::{Dashboard, View};
use super::export::{self, Exporter};
use super::folder::{FolderSource, runs_in};

/// What the window shows first.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The view.
    pub view: View,
    /// Dark or light; `None` is the system's.
    pub dark: Option<bool>,
    /// Takes a screenshot of the window into this PNG file, then closes it.
    pub screenshot: Option<PathBuf>,
    /// Width and height in points.
    pub size: Option<[f32; 2]>,
    /// Folder that exported files go to.
    pub export: PathBuf,
}

/// Writes exported files into a folder; a name that is taken gets a number.
#[derive(Debug)]
pub struct FileExporter {
    folder: PathBuf,
}

impl FileExporter {
    /// Into this folder.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        FileExporter { folder: folder.into() }
    }
}

impl Exporter for FileExporter {
    fn save(&mut self, file_name: &str, bytes: Vec<u8>) -> Result<String, String> {
        let (stem, ext) = file_name.rsplit_once('.').unwrap_or((file_name, ""));
        let free = (1..10_000).map(|k| match k {
            1 => file_name.to_string(),
            _ => format!("{stem}-{k}.{ext}"),
        });
        let path = free.map(|n| self.folder.join(n)).find(|p| !p.exists());
        let path = path.ok_or_else(|| format!("{file_name} was not saved: too many of that name"))?;
        std::fs::write(&path, bytes).map_err(|e| format!("{}: cannot be written: {e}", path.display()))?;
        let full = std::fs::canonicalize(&path).unwrap_or(path);
        Ok(format!("Saved {}", full.display()))
    }
}

/// Opens a window on run folders (or folders of run folders) and returns when it is closed. `alive` is asked
/// now and then; when it says no, the window closes.
pub fn open(paths: &[PathBuf], options: Options, alive: impl Fn() -> bool + 'static) -> Result<(), String> {
    let size = options.size.unwrap_or([1360.0, 860.0]);
    let viewport = ViewportBuilder::default()
        .with_title("birkhoff")
        .with_app_id("birkhoff")
        .with_inner_size(size)
        .with_min_inner_size([520.0, 360.0]);
    let native = eframe::NativeOptions {
        viewport,
        renderer: eframe::Renderer::Wgpu,
        centered: options.screenshot.is_none(),
        ..eframe::NativeOptions::default()
    };
    let app = Window::new(paths.to_vec(), options, Box::new(alive));
    let failed = app.failed.clone();
    let run = eframe::run_native("birkhoff", native, Box::new(|cx| Ok(Box::new(app.set_up(&cx.egui_ctx)))));
    run.map_err(|e| format!("no window can be opened here: {e}"))?;
    match failed.lock().ok().and_then(|mut f| f.take()) {
        Some(e) => Err(e),
        None => Ok(()),
    }
}

struct Window {
    dashboard: Dashboard,
    paths: Vec<PathBuf>,
    known: Vec<PathBuf>,
    looked: Instant,
    options: Options,
    alive: Box<dyn Fn() -> bool>,
    frames: u32,
    shot: Arc<Mutex<Option<Arc<ColorImage>>>>,
    failed: Arc<Mutex<Option<String>>>,
}

impl Window {
    fn new(paths: Vec<PathBuf>, options: Options, alive: Box<dyn Fn() -> bool>) -> Self {
        let mut dashboard = Dashboard::new();
        dashboard.show(options.view);
        dashboard.set_exporter(Box::new(FileExporter::new(&options.export)));
        let mut w = Window {
            dashboard,
            paths,
            known: vec![],
            looked: Instant::now(),
            options,
            alive,
            frames: 0,
            shot: Arc::default(),
            failed: Arc::default(),
        };
        w.look();
        w
    }

    fn set_up(self, ctx: &egui::Context) -> Self {
        super::theme::install(ctx);
        if let Some(dark) = self.options.dark {
            ctx.set_theme(if dark { egui::Theme::Dark } else { egui::Theme::Light });
        }
        self
    }

    /// Adds the runs that have appeared.
    fn look(&mut self) {
        self.looked = Instant::now();
        for p in runs_in(&self.paths) {
            if !self.known.contains(&p) {
                let source = match self.known.iter().any(|k| k.file_name() == p.file_name()) {
                    true => FolderSource::named(&p, p.display().to_string()),
                    false => FolderSource::new(&p),
                };
                self.dashboard.add(Box::new(source));
                self.known.push(p);
            }
        }
    }

    /// Takes the screenshot that was asked for, once the data are there and the layout has settled.
    fn photograph(&mut self, ctx: &egui::Context, file: &Path) {
        ctx.request_repaint();
        self.frames += 1;
        let arrived = self.shot.lock().ok().and_then(|mut s| s.take());
        if let Some(image) = arrived {
            let write = |bytes: Vec<u8>| {
                std::fs::write(file, bytes).map_err(|e| format!("{}: cannot be written: {e}", file.display()))
            };
            let result = export::png(&image).and_then(write);
            if let (Err(e), Ok(mut f)) = (result, self.failed.lock()) {
                *f = Some(e);
            }
            ctx.send_viewport_cmd(ViewportCommand::Close);
        } else if self.frames == 20 {
            let shot = self.shot.clone();
            ctx.request_screenshot(move |image| {
                if let Ok(mut s) = shot.lock() {
                    *s = Some(image);
                }
            });
        } else if self.frames > 600 {
            if let Ok(mut f) = self.failed.lock() {
                *f = Some("the window gave no screenshot".into());
            }
            ctx.send_viewport_cmd(ViewportCommand::Close);
        }
    }
}

impl eframe::App for Window {
    fn ui(&mut self, ui: &mut egui::Ui, _: &mut eframe::Frame) {
        if self.looked.elapsed() > Duration::from_secs(2) {
            self.look();
            if !(self.alive)() {
                ui.ctx().send_viewport_cmd(ViewportCommand::Close);
            }
        }
        self.dashboard.ui(ui);
        if let Some(file) = self.options.screenshot.clone()
            && !self.dashboard.behind()
        {
            self.photograph(ui.ctx(), &file);
        }
    }
}
