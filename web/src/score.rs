//! Score: a run folder's files and a file of rows become scores, in this tab.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use anyhow::Context;
use birkhoff::dashboard::theme::Palette;
use birkhoff::data::criteo::check_columns;
use birkhoff::data::loader::{Loader, LoaderOptions, Order};
use birkhoff::data::metrics::{Metrics, MetricsAccumulator, sigmoid};
use birkhoff::data::reader::{Labels, ReadOptions, RowPolicy};
use birkhoff::text::error_line;
use birkhoff::train::infer::LoadedRun;
use birkhoff::train::trainer::{Event, Report};
use eframe::egui::{self, Button, Frame, Margin, Panel, ProgressBar, RichText, ScrollArea, Stroke, Ui, vec2};

use crate::host::{self, Given};
use crate::pace::Pace;
use crate::rows;
use crate::session::{device_name, open};
use crate::setup::DeviceWord;
use crate::widgets::{device, heading, primary};

/// Rows scored at a time: short enough for a frame.
const BATCH: usize = 256;

/// The files of a run that are needed, and what for.
const NEEDED: [(&str, &str); 3] = [
    ("config.toml", "the model's shape"),
    ("vocab.json", "categories and statistics"),
    ("weights.safetensors", "the trained weights"),
];

/// What scoring needs.
#[derive(Clone, Default)]
pub struct Files {
    run: [Option<Rc<Vec<u8>>>; 3],
    data: Option<(String, Rc<Vec<u8>>)>,
}

impl Files {
    /// Takes a file by its name; `false` if it is another file of a run folder, which is not needed.
    pub fn give(&mut self, file: Given) -> bool {
        if let Some(k) = NEEDED.iter().position(|(name, _)| *name == file.name) {
            self.run[k] = Some(Rc::new(file.bytes));
            return true;
        }
        let others = [".safetensors", ".jsonl", ".json", ".toml", ".lock"];
        if others.iter().any(|end| file.name.ends_with(end)) {
            return false;
        }
        self.data = Some((file.name, Rc::new(file.bytes)));
        true
    }

    /// What is missing still, for people.
    pub fn missing(&self) -> Option<String> {
        let mut names: Vec<&str> =
            NEEDED.iter().zip(&self.run).filter(|(_, f)| f.is_none()).map(|((n, _), _)| *n).collect();
        if self.data.is_none() {
            names.push("a file of rows");
        }
        (!names.is_empty()).then(|| format!("Still missing: {}.", names.join(", ")))
    }
}

/// The scores of a file.
#[derive(Clone, Debug)]
pub struct Scored {
    /// Logits in the order of the file.
    pub logits: Vec<f32>,
    /// Labels, where the file has them.
    pub labels: Option<Vec<u8>>,
    /// How good the scores are, where there are labels.
    pub metrics: Option<Metrics>,
    /// Name of the device.
    pub device: String,
}

impl Scored {
    /// As `birkhoff predict` writes it.
    pub fn to_csv(&self) -> String {
        let mut text = String::from("score,logit\n");
        for s in &self.logits {
            text += &format!("{},{s}\n", sigmoid(f64::from(*s)));
        }
        text
    }
}

/// Where scoring stands.
#[derive(Default)]
pub struct Progress {
    doing: Option<(String, f32)>,
    error: Option<String>,
    done: Option<Rc<Scored>>,
}

/// Scores all rows; `say` hears how far it is.
pub async fn score(files: &Files, word: DeviceWord, say: &dyn Fn(String, f32)) -> anyhow::Result<Scored> {
    if let Some(text) = files.missing() {
        anyhow::bail!("{text}");
    }
    let [Some(config), Some(vocab), Some(weights)] = &files.run else { anyhow::bail!("files are missing") };
    let (name, data) = files.data.as_ref().context("a file of rows is missing")?;
    say("opening the device".into(), 0.0);
    let device = open(word).await?;
    let config = std::str::from_utf8(config).context("config.toml is not text")?;
    let mut run = LoadedRun::from_bytes(config, vocab, weights, BATCH, &device)?;
    device.settle("building the model").await?;
    let encoder = run.inputs.encoder.clone();
    check_columns(&encoder.schema)?;
    let options = ReadOptions { policy: RowPolicy::Error, labels: Labels::Optional };
    let mut pace = Pace::new(&device);
    let rows = rows::encode(name, data, &encoder, options, &mut pace, &mut |t| say(t, 0.0)).await?;
    let (n, labelled) = (rows.rows.len(), rows.labelled);
    let labels = labelled.then(|| rows.rows.labels.clone());
    let groups = run.inputs.groups.clone();
    let mut loader =
        Loader::dataset(rows.into(), groups, Order::Sequential, LoaderOptions::new(run.scorer.batch))?;
    let mut watch = Paced(pace);
    let mut logits = Vec::with_capacity(n);
    let mut metrics = MetricsAccumulator::new();
    while let Some(batch) = loader.next() {
        let batch = batch?;
        let s = run.scorer.logits_with_pauses(&mut run.state, &batch, &mut watch).await?;
        if labelled {
            metrics.push(&s, &batch.labels[..batch.rows], None);
        }
        logits.extend(s);
        loader.recycle(batch);
        say(format!("{} of {n} rows", logits.len()), logits.len() as f32 / n.max(1) as f32);
        watch.0.stepped();
        if let Some(wait) = watch.pause() {
            wait.await;
        }
    }
    let metrics = labelled.then(|| metrics.finish());
    Ok(Scored { logits, labels, metrics, device: device_name(&device) })
}

/// Pauses and nothing else.
struct Paced(Pace);

impl Report for Paced {
    fn batch(&mut self, _: usize) {}

    fn event(&mut self, _: &Event) -> anyhow::Result<()> {
        Ok(())
    }

    fn pause(&mut self) -> Option<Pin<Box<dyn Future<Output = ()> + '_>>> {
        self.0.pause()
    }

    fn pause_due(&mut self) -> bool {
        self.0.due()
    }
}

/// The part of the page.
#[derive(Default)]
pub struct Score {
    files: Files,
    device: DeviceWord,
    progress: Rc<RefCell<Progress>>,
    ignored: usize,
}

impl Score {
    /// A file of the run, or of rows.
    pub fn give(&mut self, file: Given) {
        if !self.files.give(file) {
            self.ignored += 1;
        }
        self.progress = Rc::default();
    }

    /// Whether it is on its way.
    pub fn busy(&self) -> bool {
        self.progress.borrow().doing.is_some()
    }

    /// For tests.
    pub fn state(&self) -> serde_json::Value {
        let p = self.progress.borrow();
        serde_json::json!({
            "missing": self.files.missing(),
            "error": p.error,
            "doing": p.doing.as_ref().map(|d| &d.0),
            "rows": p.done.as_ref().map(|d| d.logits.len()),
            "device": p.done.as_ref().map(|d| &d.device),
        })
    }

    fn start(&mut self) {
        let progress: Rc<RefCell<Progress>> = Rc::default();
        progress.borrow_mut().doing = Some(("starting".into(), 0.0));
        self.progress = progress.clone();
        let (files, word) = (self.files.clone(), self.device);
        wasm_bindgen_futures::spawn_local(async move {
            let say = |text: String, share: f32| progress.borrow_mut().doing = Some((text, share));
            let result = score(&files, word, &say).await;
            let mut p = progress.borrow_mut();
            p.doing = None;
            match result {
                Ok(s) => p.done = Some(Rc::new(s)),
                Err(e) => p.error = Some(error_line(&e)),
            }
            host::wake();
        });
    }

    /// Draws it.
    pub fn ui(&mut self, ui: &mut Ui) {
        let p = Palette::of(ui);
        let side = Frame::new().fill(p.background).inner_margin(Margin::symmetric(14, 10));
        Panel::left("score").resizable(false).exact_size(286.0).frame(side).show(ui, |ui| {
            ScrollArea::vertical().auto_shrink([false, false]).show(ui, |ui| self.choices(ui));
        });
        let body = Frame::new().inner_margin(Margin::same(14));
        egui::CentralPanel::default().frame(body).show(ui, |ui| self.body(ui));
    }

    fn choices(&mut self, ui: &mut Ui) {
        let p = Palette::of(ui);
        ui.label(RichText::new("Score rows with a trained run").size(18.0).strong());
        let text =
            "Drop a run folder (or its files) and a file of rows. They are read here and sent nowhere.";
        ui.label(RichText::new(text).small().color(p.weak));
        heading(ui, "The run");
        for ((name, what), file) in NEEDED.iter().zip(&self.files.run) {
            file_line(ui, name, file.as_ref().map(|b| b.len()), what);
        }
        heading(ui, "The rows");
        match &self.files.data {
            Some((name, bytes)) => file_line(ui, name, Some(bytes.len()), ""),
            None => file_line(ui, "a file in Criteo's format", None, "labels may be missing"),
        }
        ui.add_space(6.0);
        let r = ui.add_sized([ui.available_width(), 28.0], Button::new("Choose files…"));
        host::name("score.choose", &r);
        if r.clicked() {
            host::choose_files("", true);
        }
        if self.ignored > 0 {
            let text = match self.ignored {
                1 => "1 other file is not needed.".to_string(),
                n => format!("{n} other files are not needed."),
            };
            ui.label(RichText::new(text).small().color(p.weak));
        }
        heading(ui, "Device");
        device(ui, &mut self.device);
        ui.add_space(8.0);
        let busy = self.busy();
        let ready = self.files.missing().is_none() && !busy;
        let r = primary(ui, "Score", ui.available_width(), ready);
        host::name("score.go", &r);
        if r.clicked() {
            self.start();
        }
        if let Some((text, share)) = &self.progress.borrow().doing {
            ui.label(RichText::new(text).small().color(p.weak));
            ui.add(ProgressBar::new(*share).desired_height(8.0));
        }
        if let Some(e) = &self.progress.borrow().error {
            ui.add(egui::Label::new(RichText::new(e).color(p.warn)).wrap().selectable(true));
        }
    }

    fn body(&self, ui: &mut Ui) {
        let p = Palette::of(ui);
        let done = self.progress.borrow().done.clone();
        let Some(s) = done else {
            ui.vertical_centered(|ui| {
                ui.add_space((ui.available_height() * 0.3).max(20.0));
                let missing = self.files.missing();
                let title = if missing.is_some() { "No scores yet" } else { "Ready to score" };
                ui.label(RichText::new(title).size(26.0).strong());
                ui.add_space(6.0);
                let text = missing.unwrap_or_else(|| "Press Score.".into());
                ui.label(RichText::new(text).color(p.weak));
                ui.add_space(10.0);
                ui.label(RichText::new("A run folder is what this writes:").small().color(p.weak));
                ui.label(
                    RichText::new("birkhoff train --train train.tsv --valid valid.tsv --out runs/first")
                        .small()
                        .monospace(),
                );
            });
            return;
        };
        ui.horizontal(|ui| {
            let n = s.logits.len();
            ui.label(RichText::new(format!("{n} scores")).size(18.0).strong());
            ui.label(RichText::new(&s.device).small().color(p.weak));
            ui.with_layout(egui::Layout::right_to_left(egui::Align::Center), |ui| {
                let r = ui.button("Download CSV");
                host::name("score.download", &r);
                if r.clicked() {
                    host::save("scores.csv", s.to_csv().as_bytes());
                }
            });
        });
        if let Some(m) = &s.metrics {
            let show = |v: Option<f64>| v.map_or("undefined".into(), |v| format!("{v:.5}"));
            ui.horizontal_wrapped(|ui| {
                for (name, value) in [
                    ("NE", show(m.ne)),
                    ("log loss", format!("{:.5}", m.logloss)),
                    ("AUC", show(m.auc)),
                    ("calibration", show(m.calibration)),
                ] {
                    ui.label(RichText::new(name).color(p.weak));
                    ui.label(RichText::new(value).strong());
                    ui.add_space(12.0);
                }
            });
        }
        ui.add_space(6.0);
        table(ui, &s);
    }
}

fn file_line(ui: &mut Ui, name: &str, size: Option<usize>, what: &str) {
    let p = Palette::of(ui);
    ui.horizontal(|ui| {
        let (mark, _) = ui.allocate_exact_size(vec2(12.0, 12.0), egui::Sense::hover());
        match size {
            Some(_) => ui.painter().circle_filled(mark.center(), 4.5, p.run(2)),
            None => ui.painter().circle_stroke(mark.center(), 4.0, Stroke::new(1.5, p.weak)),
        };
        ui.label(RichText::new(name).monospace());
        let note = match size {
            Some(n) if n < 1000 => format!("{n} bytes"),
            Some(n) if n >= 100_000 => format!("{:.1} MB", n as f64 / 1e6),
            Some(n) => format!("{:.1} kB", n as f64 / 1e3),
            None => what.to_string(),
        };
        ui.label(RichText::new(note).small().color(p.weak));
    });
}

/// All rows; only those in sight are drawn.
fn table(ui: &mut Ui, s: &Scored) {
    let p = Palette::of(ui);
    let frame = Frame::new().fill(p.card).inner_margin(Margin::same(10)).corner_radius(6);
    frame.show(ui, |ui| {
        let widths = [80.0, 110.0, 110.0, 70.0];
        let columns = if s.labels.is_some() { 4 } else { 3 };
        let row = |ui: &mut Ui, cells: [RichText; 4], bar: Option<f32>| {
            ui.horizontal(|ui| {
                for (text, width) in cells.into_iter().zip(widths).take(columns) {
                    let cell = egui::Layout::right_to_left(egui::Align::Center);
                    ui.allocate_ui_with_layout(vec2(width, 18.0), cell, |ui| ui.label(text));
                }
                if let Some(share) = bar {
                    let width = (ui.available_width() - 30.0).clamp(20.0, 260.0);
                    let (r, _) = ui.allocate_exact_size(vec2(width, 8.0), egui::Sense::hover());
                    ui.painter().rect_filled(r, 3.0, p.track);
                    let mut filled = r;
                    filled.set_right(r.left() + r.width() * share);
                    ui.painter().rect_filled(filled, 3.0, p.run(0));
                }
            });
        };
        let head = |t: &str| RichText::new(t).small().color(p.weak);
        row(ui, [head("row"), head("score"), head("logit"), head("label")], None);
        ScrollArea::vertical().auto_shrink([false, false]).show_rows(
            ui,
            18.0,
            s.logits.len(),
            |ui, range| {
                for k in range {
                    let score = sigmoid(f64::from(s.logits[k]));
                    let label = s.labels.as_ref().map_or(String::new(), |l| l[k].to_string());
                    let cells = [
                        RichText::new((k + 1).to_string()).color(p.weak),
                        RichText::new(format!("{score:.5}")).monospace(),
                        RichText::new(format!("{:.4}", s.logits[k])).monospace(),
                        RichText::new(label).monospace(),
                    ];
                    row(ui, cells, Some(score as f32));
                }
            },
        );
    });
}
