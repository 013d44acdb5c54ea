//! Train in your browser: choices on the left, the dashboard on the right.

use std::rc::Rc;

use birkhoff::dashboard::theme::Palette;
use birkhoff::dashboard::{Dashboard, SharedRun};
use birkhoff::model::config::Config;
use eframe::egui::{
    self, Button, ComboBox, DragValue, Frame, Grid, Margin, Panel, ProgressBar, RichText, ScrollArea, Slider,
    Ui, vec2,
};

use crate::host::{self, Given};
use crate::session::{Phase, Session};
use crate::setup::{DataChoice, DeviceWord, Setup, page_defaults};
use crate::widgets::{device, half_button, heading, paragraph, primary};

/// The modules that the page offers: their kind, and what they do.
const MODULES: [(&str, &str); 7] = [
    ("attention", "self-attention over the slots"),
    ("linear", "a linear mix of the slots"),
    ("cross", "deep and cross network"),
    ("dlrm", "dot products of all pairs, then an MLP"),
    ("gram", "dot products of all pairs"),
    ("fm", "factorisation machine"),
    ("mlp", "an MLP over all slots"),
];

/// The choices of the form.
#[derive(Clone, Debug)]
pub struct Form {
    /// Residual mode: `shortcut`, `hc`, `mhc`.
    pub mode: &'static str,
    streams: usize,
    layers: usize,
    width: usize,
    modules: [bool; MODULES.len()],
    lr: f64,
    batch: usize,
    steps: u64,
    seed: u64,
    rows: u64,
    file: Option<(String, Rc<Vec<u8>>)>,
    from_file: bool,
    device: DeviceWord,
    more: String,
}

impl Default for Form {
    fn default() -> Self {
        let Config { model, train, .. } = page_defaults();
        let modules = MODULES.map(|(word, _)| model.modules.iter().any(|m| m.kind.kind().name() == word));
        Form {
            mode: model.residual.mode.name(),
            streams: model.residual.streams,
            layers: model.layers,
            width: model.width,
            modules,
            lr: train.lr,
            batch: train.batch,
            steps: 400,
            seed: train.seed,
            rows: 20_000,
            file: None,
            from_file: false,
            device: DeviceWord::Auto,
            more: String::new(),
        }
    }
}

impl Form {
    /// What to run.
    pub fn setup(&self) -> Setup {
        let modules: Vec<String> = MODULES
            .iter()
            .zip(self.modules)
            .filter(|(_, on)| *on)
            .map(|((kind, _), _)| format!("{{kind=\"{kind}\"}}"))
            .collect();
        let mut set = vec![
            format!("model.residual.mode={}", self.mode),
            format!("model.layers={}", self.layers),
            format!("model.width={}", self.width),
            format!("model.modules=[{}]", modules.join(",")),
            format!("train.lr={:e}", self.lr),
            format!("train.batch={}", self.batch),
            format!("train.seed={}", self.seed),
        ];
        if self.mode != "shortcut" {
            set.push(format!("model.residual.streams={}", self.streams));
        }
        set.extend(self.more.lines().map(str::trim).filter(|l| !l.is_empty()).map(str::to_string));
        let data = match &self.file {
            Some((name, bytes)) if self.from_file => {
                DataChoice::File { name: name.clone(), bytes: bytes.clone() }
            }
            _ => DataChoice::planted(self.seed, self.rows),
        };
        Setup { set, data, device: self.device, steps: self.steps }
    }

    fn problem(&self) -> Option<String> {
        if !self.modules.contains(&true) {
            return Some("Choose at least one module.".into());
        }
        if self.from_file && self.file.is_none() {
            return Some("Choose a file, or drop one on the page.".into());
        }
        self.setup().config().err().map(|e| e.to_string())
    }
}

/// The part of the page.
pub struct Train {
    form: Form,
    session: Option<Session>,
    dashboard: Dashboard,
    count: usize,
}

impl Default for Train {
    fn default() -> Self {
        let mut dashboard = Dashboard::new().as_part();
        dashboard.set_exporter(Box::new(host::Downloads));
        Train { form: Form::default(), session: None, dashboard, count: 0 }
    }
}

impl Train {
    /// A file of rows.
    pub fn give(&mut self, file: Given) {
        self.form.file = Some((file.name, Rc::new(file.bytes)));
        self.form.from_file = true;
    }

    /// Whether a run is on its way.
    pub fn busy(&self) -> bool {
        self.session.as_ref().is_some_and(Session::running)
    }

    /// For tests.
    pub fn state(&self) -> serde_json::Value {
        self.session.as_ref().map_or(serde_json::Value::Null, Session::state)
    }

    fn start(&mut self) {
        self.count += 1;
        let shared = SharedRun::new();
        let (mode, layers) = (self.form.mode, self.form.layers);
        let layers = format!("{layers} layer{}", if layers == 1 { "" } else { "s" });
        self.dashboard.add(Box::new(shared.source(format!("{}: {mode}, {layers}", self.count))));
        self.dashboard.select(self.dashboard.len() - 1);
        self.session = Some(Session::start(self.form.setup(), shared, None));
    }

    /// Draws it.
    pub fn ui(&mut self, ui: &mut Ui) {
        let p = Palette::of(ui);
        let side = Frame::new().fill(p.background).inner_margin(Margin::symmetric(14, 10));
        Panel::left("choices").resizable(false).exact_size(286.0).frame(side).show(ui, |ui| {
            Panel::bottom("go").frame(Frame::new().inner_margin(Margin::symmetric(0, 6))).show(ui, |ui| {
                self.go(ui);
            });
            ScrollArea::vertical().auto_shrink([false, false]).show(ui, |ui| {
                ui.add_enabled_ui(!self.busy(), |ui| self.choices(ui));
            });
        });
        if self.dashboard.is_empty() {
            self.welcome(ui);
        } else {
            self.dashboard.ui(ui);
            host::name_exports(&self.dashboard);
        }
    }

    fn welcome(&self, ui: &mut Ui) {
        ui.vertical_centered(|ui| {
            ui.add_space((ui.available_height() * 0.26).max(20.0));
            ui.label(RichText::new("Train a click model in this tab").size(26.0).strong());
            ui.add_space(6.0);
            let text = "The same trainer as the command line, compiled to WebAssembly: on WebGPU where the \
                        browser has a hardware GPU, else on the CPU. The rows are generated here from a model \
                        that is known, or come from a file that never leaves this tab.";
            paragraph(ui, text);
            ui.add_space(14.0);
            ui.label("Press Train. Losses, residual matrices and gains appear here while it learns.");
        });
    }

    fn go(&mut self, ui: &mut Ui) {
        let p = Palette::of(ui);
        let busy = self.busy();
        if let Some(s) = &self.session {
            status(ui, s);
            ui.add_space(4.0);
        }
        let problem = self.form.problem();
        if let Some(text) = problem.as_ref().filter(|_| !busy) {
            ui.label(RichText::new(text).small().color(p.warn));
        }
        ui.horizontal(|ui| {
            let half = half_button(ui);
            let r = primary(ui, "Train", half, !busy && problem.is_none());
            host::name("train.go", &r);
            if r.clicked() {
                self.start();
            }
            let r = ui.add_enabled(busy, Button::new("Stop").min_size(vec2(half, 32.0)));
            host::name("train.stop", &r);
            if r.clicked()
                && let Some(s) = &self.session
            {
                s.stop();
            }
        });
    }

    fn choices(&mut self, ui: &mut Ui) {
        let f = &mut self.form;
        heading(ui, "Rows");
        ui.horizontal(|ui| {
            let r = ui.selectable_label(!f.from_file, "generated here");
            host::name("train.generated", &r);
            if r.clicked() {
                f.from_file = false;
            }
            let r = ui.selectable_label(f.from_file, "a file of mine");
            host::name("train.file", &r);
            if r.clicked() {
                f.from_file = true;
                if f.file.is_none() {
                    host::choose_files(".tsv,.txt,.csv", false);
                }
            }
        });
        Grid::new("rows").num_columns(2).spacing(vec2(10.0, 6.0)).show(ui, |ui| {
            if f.from_file {
                ui.label("file");
                let name = f
                    .file
                    .as_ref()
                    .map_or("none yet".into(), |(n, b)| format!("{n} ({:.1} MB)", b.len() as f64 / 1e6));
                if ui
                    .add_sized([170.0, 20.0], Button::new(name).truncate())
                    .on_hover_text("Criteo's format: label, 13 integers, 26 categories, tabs")
                    .clicked()
                {
                    host::choose_files(".tsv,.txt,.csv", false);
                }
                ui.end_row();
            } else {
                ui.label("rows");
                let drag = DragValue::new(&mut f.rows).range(500..=200_000).speed(100.0);
                host::name("train.rows", &ui.add(drag));
                ui.end_row();
            }
            ui.label("seed");
            ui.add(DragValue::new(&mut f.seed).range(0..=1_000_000));
            ui.end_row();
        });
        heading(ui, "Model");
        Grid::new("model").num_columns(2).spacing(vec2(10.0, 6.0)).show(ui, |ui| {
            ui.label("residual");
            ui.horizontal(|ui| {
                ui.spacing_mut().item_spacing.x = 2.0;
                for (word, title, tip) in [
                    ("shortcut", "shortcut", "One stream, as DHEN has it"),
                    ("hc", "HC", "Several streams, mixed by free matrices"),
                    ("mhc", "mHC", "Several streams, mixed by doubly stochastic matrices"),
                ] {
                    let r = ui.selectable_label(f.mode == word, title).on_hover_text(tip);
                    host::name(format!("train.mode.{word}"), &r);
                    if r.clicked() {
                        f.mode = word;
                    }
                }
            });
            ui.end_row();
            if f.mode != "shortcut" {
                ui.label("streams");
                ui.add(Slider::new(&mut f.streams, 1..=8));
                ui.end_row();
            }
            ui.label("layers");
            ui.add(Slider::new(&mut f.layers, 1..=24));
            ui.end_row();
            ui.label("width");
            ComboBox::from_id_salt("width").width(70.0).selected_text(f.width.to_string()).show_ui(
                ui,
                |ui| {
                    for w in [4, 8, 16, 32, 64] {
                        ui.selectable_value(&mut f.width, w, w.to_string());
                    }
                },
            );
            ui.end_row();
        });
        ui.label("modules of a layer");
        ui.horizontal_wrapped(|ui| {
            ui.spacing_mut().item_spacing = vec2(4.0, 4.0);
            for ((kind, tip), on) in MODULES.iter().zip(&mut f.modules) {
                let r = ui.selectable_label(*on, *kind).on_hover_text(*tip);
                if r.clicked() {
                    *on = !*on;
                }
            }
        });
        heading(ui, "Training");
        Grid::new("training").num_columns(2).spacing(vec2(10.0, 6.0)).show(ui, |ui| {
            ui.label("learning rate");
            ui.add(
                Slider::new(&mut f.lr, 1e-5..=1e-1)
                    .logarithmic(true)
                    .custom_formatter(|v, _| format!("{v:.1e}")),
            );
            ui.end_row();
            ui.label("rows a step");
            ComboBox::from_id_salt("batch").width(70.0).selected_text(f.batch.to_string()).show_ui(
                ui,
                |ui| {
                    for b in [32, 64, 128, 256, 512, 1024] {
                        ui.selectable_value(&mut f.batch, b, b.to_string());
                    }
                },
            );
            ui.end_row();
            ui.label("steps");
            let r = ui.add(DragValue::new(&mut f.steps).range(10..=100_000).speed(5.0));
            host::name("train.steps", &r);
            ui.end_row();
            ui.label("device");
            device(ui, &mut f.device);
            ui.end_row();
        });
        ui.collapsing("More settings", |ui| {
            let p = Palette::of(ui);
            let text = "One key=value a line, as --set of the command line.";
            ui.label(RichText::new(text).small().color(p.weak));
            let hint = "train.weight_decay=0.0\nmodel.ensemble=concat";
            let edit = egui::TextEdit::multiline(&mut f.more).hint_text(hint).desired_rows(3);
            ui.add(edit.code_editor().desired_width(f32::INFINITY));
        });
    }
}

/// Where a run stands, in two lines and a bar.
pub fn status(ui: &mut Ui, session: &Session) {
    let p = Palette::of(ui);
    let s = session.0.borrow();
    let weak = |t: String| RichText::new(t).small().color(p.weak);
    match &s.phase {
        Phase::Preparing => {
            ui.label(weak(format!("{}…", s.doing)));
            ui.add(ProgressBar::new(0.0).animate(true).desired_height(8.0));
        }
        Phase::Training => {
            let (at, of) = s.step;
            ui.label(weak(format!("step {at} of {of} · {}", s.device)));
            if s.step_ms > 0.0 {
                let frames = match s.steps_per_frame {
                    k if k >= 1.5 => format!("{k:.0} steps a frame"),
                    k if k > 0.6 => "1 step a frame".into(),
                    k => format!("a step takes {:.0} frames", 1.0 / k.max(1e-3)),
                };
                ui.label(weak(format!("{} a step, {frames}", time(s.step_ms))));
            }
            ui.add(ProgressBar::new(at as f32 / of.max(1) as f32).desired_height(8.0));
        }
        Phase::Finished(sum) => {
            let ne = sum.metrics.ne.map_or("undefined".into(), |v| format!("{v:.4}"));
            let truth = s.truth_ne.map_or(String::new(), |t| format!(" (best possible {t:.4})"));
            ui.label(RichText::new(format!("NE {ne}{truth}")).strong());
            ui.label(weak(format!(
                "{} steps, {:.0} rows a second · {}",
                sum.steps, sum.rows_per_s, s.device
            )));
        }
        Phase::Failed(text) => {
            ui.add(egui::Label::new(RichText::new(text).color(p.warn)).wrap().selectable(true));
        }
    }
}

/// Milliseconds for people.
fn time(ms: f64) -> String {
    if ms < 10.0 { format!("{ms:.1} ms") } else { format!("{ms:.0} ms") }
}
