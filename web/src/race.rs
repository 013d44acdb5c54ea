//! The race: the three residual modes on the same rows with the same seed, their curves side by side.

use std::cell::RefCell;
use std::rc::Rc;

use birkhoff::dashboard::theme::Palette;
use birkhoff::dashboard::{Dashboard, SharedRun, View};
use birkhoff::graph::exec::Device;
use birkhoff::text::error_line;
use birkhoff::train::schema::schema;
use birkhoff::train::trainer::Event;
use eframe::egui::{
    self, Button, DragValue, Frame, Grid, Margin, Panel, RichText, ScrollArea, Slider, Ui, vec2,
};

use crate::chart::{self, Line};
use crate::host;
use crate::pace::Pace;
use crate::rows;
use crate::session::{Phase, Session};
use crate::setup::{DataChoice, DeviceWord, Setup};
use crate::widgets::{device, half_button, heading, paragraph, primary};

/// A setting of the race.
pub struct Preset {
    /// What it is called.
    pub title: &'static str,
    /// What it shows.
    pub about: &'static str,
    /// Layers.
    pub layers: usize,
    /// Streams of HC and mHC.
    pub streams: usize,
    /// Learning rate.
    pub lr: f64,
    /// Steps.
    pub steps: u64,
    /// Rows generated.
    pub rows: u64,
    /// Seed.
    pub seed: u64,
    /// Further settings, `key=value`.
    pub set: &'static [&'static str],
}

/// The setting in which HC's composite gain leaves [1/3, 3] while mHC's stays inside.
pub const RACE_PRESET: Preset = Preset {
    title: "HC leaves the band",
    about: "Six layers at a learning rate of 1e-2: HC's composite gain passes 3 within some 60 steps and reaches \
            about 7, mHC's stays at 1.",
    layers: 6,
    streams: 4,
    lr: 1e-2,
    steps: 200,
    rows: 25_600,
    seed: 1,
    set: &["model.width=8", "train.batch=128", "train.log_every=5", "train.diagnose_every=10"],
};

/// Gains between these are called harmless, as in the dashboard.
const BAND: (f64, f64) = (1.0 / 3.0, 3.0);

const MODES: [(&str, &str); 3] = [("shortcut", "shortcut"), ("hc", "HC"), ("mhc", "mHC")];

/// The part of the page.
pub struct Race {
    layers: usize,
    streams: usize,
    lr: f64,
    steps: u64,
    rows: u64,
    seed: u64,
    more: String,
    device: DeviceWord,
    running: Vec<Session>,
    /// What the preparation says, until the sessions are there.
    preparing: Rc<RefCell<Preparing>>,
    dashboard: Dashboard,
    details: bool,
}

#[derive(Default)]
struct Preparing {
    doing: Option<String>,
    error: Option<String>,
    sessions: Vec<(Session, &'static str, SharedRun)>,
}

impl Default for Race {
    fn default() -> Self {
        let p = &RACE_PRESET;
        Race {
            layers: p.layers,
            streams: p.streams,
            lr: p.lr,
            steps: p.steps,
            rows: p.rows,
            seed: p.seed,
            more: p.set.join("\n"),
            device: DeviceWord::Auto,
            running: vec![],
            preparing: Rc::default(),
            dashboard: new_dashboard(),
            details: false,
        }
    }
}

fn new_dashboard() -> Dashboard {
    let mut d = Dashboard::new().as_part();
    d.set_exporter(Box::new(host::Downloads));
    d.show(View::Gains);
    d
}

/// What a row of the table says.
struct Standing {
    title: &'static str,
    loss: Option<f64>,
    ne: Option<f64>,
    /// Largest and least composite gain so far, forward or backward.
    gains: Option<(f64, f64)>,
    /// First step outside the band.
    left: Option<u64>,
    step: (u64, u64),
    note: Option<String>,
}

/// The extremes over depth and both ways of the composite gains of a diagnosis.
fn extremes(r: &birkhoff::diagnose::Record) -> (f64, f64) {
    let all = r.composite_forward.iter().chain(&r.composite_backward);
    all.fold((0.0, f64::INFINITY), |(hi, lo), &g| (f64::max(hi, g), f64::min(lo, g)))
}

fn standing(session: &Session, title: &'static str) -> Standing {
    let p = session.0.borrow();
    let mut s = Standing { title, loss: None, ne: None, gains: None, left: None, step: p.step, note: None };
    for e in &p.events {
        match e {
            Event::Step { loss, .. } => s.loss = Some(s.loss.map_or(*loss, |l| 0.8 * l + 0.2 * loss)),
            Event::Eval { metrics, .. } => s.ne = metrics.ne,
            Event::Diagnose(r) => {
                let (hi, lo) = extremes(r);
                let (a, b) = s.gains.unwrap_or((hi, lo));
                s.gains = Some((a.max(hi), b.min(lo)));
                if s.left.is_none() && (hi > BAND.1 || lo < BAND.0 || !hi.is_finite()) {
                    s.left = Some(r.step);
                }
            }
            Event::Ranks(_) => {}
        }
    }
    if let Phase::Failed(e) = &p.phase {
        s.note = Some(e.clone());
    }
    s
}

impl Race {
    /// Whether it is on its way.
    pub fn busy(&self) -> bool {
        self.preparing.borrow().doing.is_some() || self.running.iter().any(Session::running)
    }

    /// For tests.
    pub fn state(&self) -> serde_json::Value {
        let runs: Vec<_> = self.running.iter().map(Session::state).collect();
        let p = self.preparing.borrow();
        serde_json::json!({"busy": self.busy(), "error": p.error, "runs": runs})
    }

    fn setup(&self, mode: &str) -> Setup {
        let mut set = vec![
            format!("model.residual.mode={mode}"),
            format!("model.layers={}", self.layers),
            format!("train.lr={:e}", self.lr),
            format!("train.seed={}", self.seed),
        ];
        if mode != "shortcut" {
            set.push(format!("model.residual.streams={}", self.streams));
        }
        set.extend(self.more.lines().map(str::trim).filter(|l| !l.is_empty()).map(str::to_string));
        let data = DataChoice::planted(self.seed, self.rows);
        Setup { set, data, device: self.device, steps: self.steps }
    }

    fn start(&mut self) {
        self.running.clear();
        self.dashboard = new_dashboard();
        let shared =
            Rc::new(RefCell::new(Preparing { doing: Some("starting".into()), ..Default::default() }));
        self.preparing = shared.clone();
        let setups: Vec<(Setup, &'static str)> =
            MODES.iter().map(|(word, title)| (self.setup(word), *title)).collect();
        wasm_bindgen_futures::spawn_local(async move {
            let first = &setups[0].0;
            let loaded = async {
                let cfg = first.config()?;
                let mut say = |text| shared.borrow_mut().doing = Some(text);
                let mut pace = Pace::new(&Device::Cpu);
                rows::load(&first.data, &schema(&cfg.data)?, &mut pace, &mut say).await
            };
            let loaded = loaded.await.map(Rc::new);
            let mut p = shared.borrow_mut();
            p.doing = None;
            match loaded {
                Err(e) => p.error = Some(error_line(&e)),
                Ok(rows) => {
                    for (setup, title) in setups {
                        let run = SharedRun::new();
                        let session = Session::start(setup, run.clone(), Some(rows.clone()));
                        p.sessions.push((session, title, run));
                    }
                }
            }
        });
    }

    fn take_sessions(&mut self) {
        for (session, title, run) in self.preparing.borrow_mut().sessions.drain(..) {
            self.dashboard.add(Box::new(run.source(title)));
            self.running.push(session);
        }
    }

    /// Draws it.
    pub fn ui(&mut self, ui: &mut Ui) {
        self.take_sessions();
        let p = Palette::of(ui);
        let side = Frame::new().fill(p.background).inner_margin(Margin::symmetric(14, 10));
        Panel::left("race").resizable(false).exact_size(286.0).frame(side).show(ui, |ui| {
            ScrollArea::vertical().auto_shrink([false, false]).show(ui, |ui| self.choices(ui));
        });
        if self.details && !self.dashboard.is_empty() {
            self.dashboard.ui(ui);
            return;
        }
        let body = Frame::new().inner_margin(Margin::same(12));
        egui::CentralPanel::default().frame(body).show(ui, |ui| self.track(ui));
    }

    fn choices(&mut self, ui: &mut Ui) {
        let p = Palette::of(ui);
        ui.label(RichText::new("Three residual modes, one race").size(18.0).strong());
        ui.label(
            RichText::new(
                "The same rows, seed and modules. A composite gain above 3 or below 1/3 means that a \
                 signal grows or fades threefold on its way through the layers.",
            )
            .small()
            .color(p.weak),
        );
        let busy = self.busy();
        ui.add_enabled_ui(!busy, |ui| {
            heading(ui, "Setting");
            let r = ui.button(RACE_PRESET.title).on_hover_text(RACE_PRESET.about);
            host::name("race.preset", &r);
            if r.clicked() {
                let device = self.device;
                *self = Race { device, ..Race::default() };
            }
            Grid::new("race").num_columns(2).spacing(vec2(10.0, 6.0)).show(ui, |ui| {
                ui.label("layers");
                ui.add(Slider::new(&mut self.layers, 1..=32));
                ui.end_row();
                ui.label("streams");
                ui.add(Slider::new(&mut self.streams, 2..=8));
                ui.end_row();
                ui.label("learning rate");
                let lr = Slider::new(&mut self.lr, 1e-4..=1.0).logarithmic(true);
                ui.add(lr.custom_formatter(|v, _| format!("{v:.1e}")));
                ui.end_row();
                ui.label("steps");
                host::name("race.steps", &ui.add(DragValue::new(&mut self.steps).range(10..=20_000)));
                ui.end_row();
                ui.label("rows");
                ui.add(DragValue::new(&mut self.rows).range(500..=200_000).speed(100.0));
                ui.end_row();
                ui.label("seed");
                ui.add(DragValue::new(&mut self.seed).range(0..=1_000_000));
                ui.end_row();
                ui.label("device");
                device(ui, &mut self.device);
                ui.end_row();
            });
            ui.collapsing("More settings", |ui| {
                let edit = egui::TextEdit::multiline(&mut self.more).desired_rows(4);
                ui.add(edit.code_editor().desired_width(f32::INFINITY));
            });
        });
        ui.add_space(8.0);
        let error = self.setup("mhc").config().err().map(|e| e.to_string());
        if let Some(e) = error.as_ref().or(self.preparing.borrow().error.as_ref()) {
            ui.label(RichText::new(e).small().color(p.warn));
        }
        ui.horizontal(|ui| {
            let half = half_button(ui);
            let r = primary(ui, "Start", half, !busy && error.is_none());
            host::name("race.go", &r);
            if r.clicked() {
                self.start();
            }
            let r = ui.add_enabled(busy, Button::new("Stop").min_size(vec2(half, 32.0)));
            if r.clicked() {
                self.running.iter().for_each(Session::stop);
            }
        });
        if let Some(doing) = &self.preparing.borrow().doing {
            ui.label(RichText::new(format!("{doing}…")).small().color(p.weak));
        }
        if !self.dashboard.is_empty() {
            ui.add_space(6.0);
            let text = if self.details { "back to the race" } else { "all of it: the dashboard" };
            if ui.button(text).clicked() {
                self.details = !self.details;
            }
        }
    }

    /// The curves and the table.
    fn track(&mut self, ui: &mut Ui) {
        let p = Palette::of(ui);
        if self.running.is_empty() {
            ui.vertical_centered(|ui| {
                ui.add_space((ui.available_height() * 0.3).max(20.0));
                ui.label(RichText::new("Why mHC is stable where HC is not").size(26.0).strong());
                ui.add_space(6.0);
                let text = "Start the race. The left plot shows how the losses fall, the right one how \
                            much the residual streams multiply a signal from the first layer to the last.";
                paragraph(ui, text);
            });
            return;
        }
        let all: Vec<Standing> =
            self.running.iter().zip(MODES).map(|(s, (_, title))| standing(s, title)).collect();
        self.table(ui, &all);
        ui.add_space(8.0);
        let mut losses = vec![];
        let mut most = vec![];
        let mut along = vec![];
        for (i, (session, (_, title))) in self.running.iter().zip(MODES).enumerate() {
            let events = &session.0.borrow().events;
            let (mut loss, mut gain, mut average) = (vec![], vec![], None);
            let mut last = None;
            for e in events {
                match e {
                    Event::Step { step, loss: l, .. } => {
                        let a = average.map_or(*l, |a: f64| 0.8 * a + 0.2 * l);
                        average = Some(a);
                        loss.push([*step as f64, a]);
                    }
                    Event::Diagnose(r) => {
                        gain.push([r.step as f64, extremes(r).0]);
                        last = Some(r);
                    }
                    Event::Eval { .. } | Event::Ranks(_) => {}
                }
            }
            let forward = last.map_or(vec![], |r| {
                r.composite_forward.iter().enumerate().map(|(l, &g)| [l as f64, g]).collect()
            });
            let line = |points| Line { name: title.to_string(), color: p.run(i), points };
            losses.push(line(loss));
            most.push(line(gain));
            along.push(line(forward));
        }
        let height = ((ui.available_height() - 16.0) / 2.0).max(180.0);
        let half = vec2((ui.available_width() - 10.0) / 2.0, height);
        let wide = vec2(ui.available_width(), height);
        ui.horizontal(|ui| {
            chart::card(ui, half, "Training loss", "nats, smoothed", |ui| {
                chart::plot(ui, "race loss", "step", false, None, &losses);
            });
            chart::card(
                ui,
                half,
                "Largest composite gain",
                "any depth, forward or backward; band 1/3 to 3",
                |ui| {
                    chart::plot(ui, "race gain", "step", true, Some(BAND), &most);
                },
            );
        });
        chart::card(
            ui,
            wide,
            "Composite gain along depth",
            "forward, layers 0 to l, newest diagnosis",
            |ui| {
                chart::plot(ui, "race depth", "layer", true, Some(BAND), &along);
            },
        );
    }

    fn table(&self, ui: &mut Ui, all: &[Standing]) {
        let p = Palette::of(ui);
        let frame = Frame::new().fill(p.card).inner_margin(Margin::same(10)).corner_radius(6);
        frame.show(ui, |ui| {
            ui.set_width(ui.available_width());
            Grid::new("standings").num_columns(6).spacing(vec2(28.0, 6.0)).show(ui, |ui| {
                for h in ["", "step", "loss", "NE", "composite gain so far", "outside 1/3 to 3"] {
                    ui.label(RichText::new(h).small().color(p.weak));
                }
                ui.end_row();
                for (i, s) in all.iter().enumerate() {
                    ui.label(RichText::new(s.title).strong().color(p.run(i)));
                    ui.label(format!("{} of {}", s.step.0, s.step.1));
                    ui.label(s.loss.map_or("…".into(), |v| format!("{v:.4}")));
                    ui.label(s.ne.map_or("…".into(), |v| format!("{v:.4}")));
                    ui.label(
                        s.gains.map_or("…".into(), |(hi, lo)| format!("{} to {}", short(lo), short(hi))),
                    );
                    match (&s.note, s.left, s.gains) {
                        (Some(note), ..) => {
                            ui.add(egui::Label::new(RichText::new(note).color(p.warn)).truncate());
                        }
                        (None, Some(step), _) => {
                            ui.label(RichText::new(format!("from step {step}")).color(p.warn));
                        }
                        (None, None, Some(_)) => {
                            ui.label(if s.step.0 < s.step.1 { "not so far" } else { "never" });
                        }
                        (None, None, None) => {
                            ui.label("…");
                        }
                    }
                    ui.end_row();
                }
            });
        });
    }
}

/// A gain for people.
fn short(v: f64) -> String {
    match v {
        _ if !v.is_finite() => "infinite".into(),
        v if (0.01..1000.0).contains(&v) => format!("{v:.2}"),
        v => format!("{v:.1e}"),
    }
}
