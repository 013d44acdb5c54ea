//! The dashboard itself: the list of runs, the tabs, the keys; polls the sources.

use egui::{
    Align, CornerRadius, Frame, Key as K, Layout, Margin, Panel, RichText, ScrollArea, Sense, Ui, UiBuilder,
    vec2,
};

use super::card::{Key, empty};
use super::export::{Exporter, Exports, NoExporter};
use super::run::RunData;
use super::source::Source;
use super::theme::{self, Palette};
use super::{gains, model, overview, residual, streams, text, time};

/// Seconds between two looks at the sources.
const POLL: f64 = 0.5;

/// The views, in the order of their keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum View {
    /// Curves of training.
    #[default]
    Overview,
    /// Residual matrices.
    Residual,
    /// Gains along depth and over training.
    Gains,
    /// Streams and modules.
    Streams,
    /// Where the time goes.
    Time,
    /// The model's parts.
    Model,
}

impl View {
    /// All of them.
    pub const ALL: [View; 6] =
        [View::Overview, View::Residual, View::Gains, View::Streams, View::Time, View::Model];

    /// Its tab.
    pub fn title(self) -> &'static str {
        match self {
            View::Overview => "Overview",
            View::Residual => "Residual matrices",
            View::Gains => "Gain curves",
            View::Streams => "Streams and modules",
            View::Time => "Time",
            View::Model => "Model",
        }
    }

    /// One word, as on the command line.
    pub fn word(self) -> &'static str {
        match self {
            View::Overview => "overview",
            View::Residual => "residual",
            View::Gains => "gains",
            View::Streams => "streams",
            View::Time => "time",
            View::Model => "model",
        }
    }

    /// From its word.
    pub fn from_word(word: &str) -> Option<View> {
        Self::ALL.into_iter().find(|v| v.word() == word)
    }
}

/// A run in the list.
pub(crate) struct Entry {
    pub data: RunData,
    pub visible: bool,
    source: Box<dyn Source>,
}

/// What the views share.
#[derive(Default)]
pub(crate) struct State {
    /// The run that views of a single run show.
    pub selected: usize,
    /// The step looked at; `None` follows the newest.
    pub step: Option<u64>,
    /// Whether the steps play.
    pub playing: bool,
    /// When the last step was played.
    pub played: f64,
    /// The layer looked at.
    pub layer: usize,
    /// Where composites begin.
    pub from: usize,
    /// Where composites end; `None`: at the last layer.
    pub to: Option<usize>,
}

/// What a view draws from.
pub(crate) struct Cx<'a> {
    pub runs: &'a [Entry],
    pub exports: &'a Exports,
    pub state: &'a mut State,
}

impl<'a> Cx<'a> {
    /// The visible runs with their places in the list, which give them their colours.
    pub fn visible(&self) -> impl Iterator<Item = (usize, &'a RunData)> + use<'a> {
        self.runs.iter().enumerate().filter(|(_, e)| e.visible).map(|(i, e)| (i, &e.data))
    }

    /// The selected run.
    pub fn selected(&self) -> Option<&'a RunData> {
        self.runs.get(self.state.selected).map(|e| &e.data)
    }

    /// A legend of the visible runs.
    pub fn legend(&self, p: &Palette) -> Vec<Key> {
        self.visible().map(|(i, r)| Key { text: label(r), color: p.run(i), dashed: false }).collect()
    }
}

/// A run's name with its mode where the name does not say it.
pub(crate) fn label(r: &RunData) -> String {
    let mode = r.mode_label();
    if mode.is_empty() || r.name.to_lowercase().contains(&mode.to_lowercase()) {
        r.name.clone()
    } else {
        format!("{} ({mode})", r.name)
    }
}

/// Chooses the run of views that show a single one.
pub(crate) fn run_picker(ui: &mut Ui, cx: &mut Cx<'_>) {
    let p = Palette::of(ui);
    let s = &mut cx.state.selected;
    *s = (*s).min(cx.runs.len().saturating_sub(1));
    let (rect, _) = ui.allocate_exact_size(vec2(12.0, 12.0), Sense::hover());
    ui.painter().rect_filled(rect, 2.0, p.run(*s));
    let name = |i: usize| cx.runs.get(i).map_or(String::new(), |e| label(&e.data));
    let combo = egui::ComboBox::from_id_salt("run").selected_text(name(*s));
    let r = combo.show_ui(ui, |ui| {
        for i in 0..cx.runs.len() {
            ui.selectable_value(s, i, name(i));
        }
    });
    r.response.widget_info(|| egui::WidgetInfo::labeled(egui::Role::ComboBox, true, "run"));
}

/// The dashboard. [`Dashboard::ui`] draws all of it into any [`Ui`].
pub struct Dashboard {
    runs: Vec<Entry>,
    view: View,
    state: State,
    exports: Exports,
    help: bool,
    part: bool,
    installed: bool,
    polled: f64,
    overview: overview::Overview,
    residual: residual::Residual,
    gains: gains::Gains,
    streams: streams::Streams,
}

impl Default for Dashboard {
    fn default() -> Self {
        Self::new()
    }
}

impl Dashboard {
    /// A dashboard without runs.
    pub fn new() -> Self {
        Dashboard {
            runs: vec![],
            view: View::default(),
            state: State::default(),
            exports: Exports::new(Box::new(NoExporter)),
            help: false,
            part: false,
            installed: false,
            polled: f64::NEG_INFINITY,
            overview: overview::Overview::default(),
            residual: residual::Residual::default(),
            gains: gains::Gains::default(),
            streams: streams::Streams::default(),
        }
    }

    /// Adds a run; its place in the list gives it its colour.
    pub fn add(&mut self, s: Box<dyn Source>) {
        self.runs.push(Entry { data: RunData::new(s.name()), visible: true, source: s });
        self.polled = f64::NEG_INFINITY;
    }

    /// Removes all runs.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.state = State::default();
    }

    /// How many runs there are.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Whether there is no run.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// A run, in the order of [`Dashboard::add`].
    pub fn run(&self, i: usize) -> Option<&RunData> {
        self.runs.get(i).map(|e| &e.data)
    }

    /// Switches the view.
    pub fn show(&mut self, view: View) {
        self.view = view;
    }

    /// The view that is shown.
    pub fn view(&self) -> View {
        self.view
    }

    /// Selects the run that views of a single run show.
    pub fn select(&mut self, run: usize) {
        self.state.selected = run.min(self.runs.len().saturating_sub(1));
    }

    /// As a part of a page that has a title and a choice of themes already.
    pub fn as_part(mut self) -> Self {
        self.part = true;
        self
    }

    /// Says where exported files go.
    pub fn set_exporter(&mut self, e: Box<dyn Exporter>) {
        self.exports.set_host(e);
    }

    /// Where the buttons stand that save a file, with the file's name: for those who drive the page.
    pub fn export_buttons(&self) -> Vec<(String, egui::Rect)> {
        self.exports.buttons()
    }

    /// Reads what is new from every source. [`Dashboard::ui`] does so by itself, twice a second.
    pub fn poll(&mut self) -> bool {
        let mut changed = false;
        for e in &mut self.runs {
            changed |= e.source.poll(&mut e.data);
        }
        changed
    }

    /// Whether a source has more to read at once.
    pub fn behind(&self) -> bool {
        self.runs.iter().any(|e| e.source.behind())
    }

    /// Draws everything, and asks for the next frame when it is due.
    pub fn ui(&mut self, ui: &mut Ui) {
        if !self.installed {
            theme::install(ui.ctx());
            self.installed = true;
        }
        let now = ui.input(|i| i.time);
        if self.behind() || now - self.polled >= POLL {
            self.poll();
            self.polled = now;
        }
        self.keys(ui);
        self.exports.begin_frame();
        let p = Palette::of(ui);
        let bar = |margin| Frame::new().fill(p.background).inner_margin(margin);
        Panel::top("tabs").frame(bar(Margin::symmetric(10, 6))).show(ui, |ui| self.tabs(ui));
        let notice = self.exports.notice(now);
        if let Some(n) = notice {
            Panel::bottom("notice").frame(bar(Margin::symmetric(10, 5))).show(ui, |ui| {
                let color = if n.ok { p.text } else { p.warn };
                ui.add(egui::Label::new(RichText::new(&n.text).color(color)).selectable(true).truncate());
            });
        }
        let width = (ui.available_width() * 0.22).clamp(150.0, 240.0);
        let list = Panel::left("runs").resizable(true).default_size(width).size_range(130.0..=420.0);
        list.frame(bar(Margin::same(10))).show(ui, |ui| self.list(ui));
        let frame = Frame::new().fill(p.background).inner_margin(Margin::same(8));
        egui::CentralPanel::default().frame(frame).show(ui, |ui| self.body(ui));
        if self.help {
            self.help_window(ui);
        }
        self.exports.end_frame(ui.ctx());
        if self.behind() {
            ui.ctx().request_repaint();
        } else if !self.runs.is_empty() {
            ui.ctx().request_repaint_after(std::time::Duration::from_secs_f64(POLL));
        }
    }

    fn body(&mut self, ui: &mut Ui) {
        if self.runs.is_empty() {
            empty(
                ui,
                "No run yet",
                "Train one: `birkhoff train --train train.tsv --valid valid.tsv --out runs/first` then open it: `birkhoff dashboard runs/first`",
            );
            return;
        }
        let mut cx = Cx { runs: &self.runs, exports: &self.exports, state: &mut self.state };
        match self.view {
            View::Overview => self.overview.ui(ui, &mut cx),
            View::Residual => self.residual.ui(ui, &mut cx),
            View::Gains => self.gains.ui(ui, &mut cx),
            View::Streams => self.streams.ui(ui, &mut cx),
            View::Time => time::ui(ui, &mut cx),
            View::Model => model::ui(ui, &mut cx),
        }
    }

    fn tabs(&mut self, ui: &mut Ui) {
        let p = Palette::of(ui);
        ui.horizontal(|ui| {
            if !self.part {
                ui.label(RichText::new("birkhoff").size(16.0).strong().color(p.accent));
                ui.add_space(8.0);
            }
            let room = ui.available_width() - 90.0;
            let full = room > 640.0;
            for (i, v) in View::ALL.into_iter().enumerate() {
                let title = if full { v.title() } else { v.title().split(' ').next().unwrap_or_default() };
                let tip = format!("{} (key {})", v.title(), i + 1);
                if ui.selectable_label(self.view == v, title).on_hover_text(tip).clicked() {
                    self.view = v;
                }
            }
            ui.with_layout(Layout::right_to_left(Align::Center), |ui| {
                if ui.button("?").on_hover_text("Keys and help (?)").clicked() {
                    self.help = !self.help;
                }
                let (icon, tip) =
                    if p.dark { ("Light", "Light theme (d)") } else { ("Dark", "Dark theme (d)") };
                if !self.part && ui.button(icon).on_hover_text(tip).clicked() {
                    toggle_theme(ui);
                }
            });
        });
    }

    fn list(&mut self, ui: &mut Ui) {
        let p = Palette::of(ui);
        ui.horizontal(|ui| {
            ui.label(RichText::new("Runs").strong());
            ui.with_layout(Layout::right_to_left(Align::Center), |ui| {
                let all = self.runs.iter().all(|e| e.visible);
                if self.runs.len() > 1 && ui.small_button(if all { "hide all" } else { "show all" }).clicked()
                {
                    self.runs.iter_mut().for_each(|e| e.visible = !all);
                }
            });
        });
        let selected = &mut self.state.selected;
        ScrollArea::vertical().auto_shrink(false).show(ui, |ui| {
            for (i, e) in self.runs.iter_mut().enumerate() {
                let chosen = *selected == i;
                let fill = if chosen { ui.visuals().selection.bg_fill } else { egui::Color32::TRANSPARENT };
                let frame = Frame::new()
                    .fill(fill)
                    .corner_radius(CornerRadius::same(4))
                    .inner_margin(Margin::same(5));
                // the entry lies under what it shows, so that the square keeps its clicks
                let entry = UiBuilder::new().id_salt(("run", i)).sense(Sense::click());
                let inside = |ui: &mut Ui| frame.show(ui, |ui| run_entry(ui, e, p.run(i)));
                let r = ui.scope_builder(entry, inside).response;
                let name = format!("select {}", e.data.name);
                r.widget_info(|| egui::WidgetInfo::selected(egui::Role::Button, true, chosen, &name));
                if r.on_hover_cursor(egui::CursorIcon::PointingHand).clicked() {
                    *selected = i;
                }
            }
        });
    }

    fn keys(&mut self, ui: &Ui) {
        // a field that is being written into keeps its keys
        if ui.ctx().egui_wants_keyboard_input() {
            return;
        }
        let digits = [K::Num1, K::Num2, K::Num3, K::Num4, K::Num5, K::Num6];
        let pressed = |k| ui.input(|i| i.key_pressed(k) && i.modifiers.is_none());
        for (k, v) in digits.into_iter().zip(View::ALL) {
            if pressed(k) {
                self.view = v;
            }
        }
        if pressed(K::D) {
            toggle_theme(ui);
        }
        if pressed(K::Questionmark) || ui.input(|i| i.modifiers.shift && i.key_pressed(K::Questionmark)) {
            self.help = !self.help;
        }
        if pressed(K::Escape) {
            self.help = false;
        }
        if pressed(K::Space) {
            self.state.playing = !self.state.playing;
        }
        let up = i64::from(pressed(K::ArrowUp)) - i64::from(pressed(K::ArrowDown));
        if up != 0 {
            self.state.layer = self.state.layer.saturating_add_signed(up as isize);
        }
        let right = i64::from(pressed(K::ArrowRight)) - i64::from(pressed(K::ArrowLeft));
        if right != 0 {
            self.move_step(right);
        }
    }

    /// Moves to the next or the previous step that anything was measured at.
    fn move_step(&mut self, by: i64) {
        let steps = super::steps::all(self.runs.iter().filter(|e| e.visible).map(|e| &e.data));
        self.state.playing = false;
        super::steps::shift(&mut self.state, &steps, by);
    }

    fn help_window(&mut self, ui: &Ui) {
        let keys = [
            ("1 to 6", "the views"),
            ("left, right", "the step before, the step after"),
            ("up, down", "the layer above, the layer below"),
            ("space", "play the steps, stop"),
            ("d", "dark, light"),
            ("?", "this help"),
            ("drag", "move a plot"),
            ("ctrl or cmd, scroll", "zoom"),
            ("right drag", "zoom into a box"),
            ("double click", "all of the plot again"),
        ];
        let mut open = true;
        egui::Window::new("Keys")
            .open(&mut open)
            .collapsible(false)
            .anchor(egui::Align2::CENTER_CENTER, vec2(0.0, 0.0))
            .resizable(false)
            .show(ui.ctx(), |ui| {
                egui::Grid::new("keys").num_columns(2).spacing(vec2(24.0, 6.0)).show(ui, |ui| {
                    for (k, what) in keys {
                        ui.label(RichText::new(k).monospace());
                        ui.label(what);
                        ui.end_row();
                    }
                });
            });
        self.help &= open;
    }
}

/// What the list says of a run.
fn run_entry(ui: &mut Ui, e: &mut Entry, color: egui::Color32) {
    let p = Palette::of(ui);
    ui.style_mut().interaction.selectable_labels = false;
    ui.set_width(ui.available_width());
    ui.spacing_mut().item_spacing.y = 2.0;
    ui.horizontal(|ui| {
        swatch(ui, &mut e.visible, color, &e.data.name);
        ui.add(egui::Label::new(RichText::new(&e.data.name).strong()).truncate());
    });
    ui.add(egui::Label::new(RichText::new(status(&e.data)).small().color(p.weak)).wrap());
    for text in e.data.problems.iter().take(2) {
        ui.add(egui::Label::new(RichText::new(text).small().color(p.warn)).wrap());
    }
    let more = e.data.problems.len().saturating_sub(2);
    if more > 0 {
        let all = e.data.problems.join("\n");
        let text = RichText::new(format!("and {more} more")).small().color(p.warn);
        ui.label(text).on_hover_text(all);
    }
}

/// The colour of a run; a click hides it or shows it again, in every view.
fn swatch(ui: &mut Ui, visible: &mut bool, color: egui::Color32, name: &str) {
    let (rect, r) = ui.allocate_exact_size(vec2(14.0, 14.0), Sense::click());
    let shape = rect.shrink(1.0);
    if *visible {
        ui.painter().rect_filled(shape, 3.0, color);
    } else {
        let stroke = egui::Stroke::new(1.5, color);
        ui.painter().rect_stroke(shape, 3.0, stroke, egui::StrokeKind::Inside);
    }
    let what = if *visible { "hide" } else { "show" };
    let text = format!("{what} {name}");
    r.widget_info(|| egui::WidgetInfo::selected(egui::Role::CheckBox, true, *visible, &text));
    if r.on_hover_text(what).clicked() {
        *visible = !*visible;
    }
}

/// Mode, progress and best value of a run in a line.
fn status(r: &RunData) -> String {
    let mut parts: Vec<String> = vec![];
    if !r.mode().is_empty() {
        parts.push(r.mode_label().to_string());
    }
    match r.progress() {
        Some(_) if r.finished() => parts.push("finished".into()),
        Some(x) => parts.push(format!("{:.0} %", 100.0 * x)),
        None if r.is_empty() => parts.push("nothing logged yet".into()),
        None => {}
    }
    if let Some(ne) = r.evals.best_ne() {
        parts.push(format!("NE {}", text::number(ne)));
    }
    parts.join(" · ")
}

fn toggle_theme(ui: &Ui) {
    let dark = ui.visuals().dark_mode;
    ui.ctx().set_theme(if dark { egui::Theme::Light } else { egui::Theme::Dark });
}
