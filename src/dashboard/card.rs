//! The frame around a plot: title, unit, export buttons, and the legend of its picture. And a grid of them.

use egui::{
    Align, Color32, CornerRadius, Frame, Id, Label, Layout, Margin, Rect, RichText, Stroke, Ui, UiBuilder,
    vec2,
};

use super::export::{Exports, Table};
use super::theme::Palette;

/// An entry of a legend.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Key {
    pub text: String,
    pub color: Color32,
    pub dashed: bool,
}

/// What stands around a plot.
pub(crate) struct Card<'a> {
    pub title: &'a str,
    /// The unit, or what is shown, in a few words.
    pub hint: &'a str,
    /// Start of the names of exported files.
    pub file: String,
    /// What tells its lines apart, always shown.
    pub keys: Vec<Key>,
    /// The runs, shown in the plot's picture; on the screen the list of runs says it.
    pub legend: Vec<Key>,
}

impl Card<'_> {
    /// Draws the card over all of `ui`, and the plot inside.
    pub fn show(
        self,
        ui: &mut Ui,
        exports: &Exports,
        table: impl FnOnce() -> Table,
        body: impl FnOnce(&mut Ui),
    ) {
        let p = Palette::of(ui);
        let id: Id = ui.scope_id().with(&self.file);
        let poses = exports.poses(id);
        let outer = ui.max_rect();
        let frame = Frame::new()
            .fill(p.card)
            .stroke(Stroke::new(1.0, p.border))
            .corner_radius(CornerRadius::same(6))
            .inner_margin(Margin::same(8));
        frame.show(ui, |ui| {
            ui.set_min_size(outer.size() - vec2(18.0, 18.0));
            ui.allocate_ui_with_layout(
                vec2(ui.available_width(), 20.0),
                Layout::right_to_left(Align::Center),
                |ui| {
                    if !poses {
                        self.buttons(ui, exports, id, table);
                    }
                    ui.with_layout(Layout::left_to_right(Align::Center), |ui| {
                        ui.add(Label::new(RichText::new(self.title).strong()).truncate());
                        if ui.available_width() > 24.0 {
                            ui.add(Label::new(RichText::new(self.hint).small().color(p.weak)).truncate());
                        }
                    });
                },
            );
            if poses && !self.legend.is_empty() {
                legend(ui, &self.legend);
            }
            if !self.keys.is_empty() {
                legend(ui, &self.keys);
            }
            body(ui);
        });
        if poses {
            exports.posed(id, outer);
        }
    }
}

impl Card<'_> {
    fn buttons(&self, ui: &mut Ui, exports: &Exports, id: Id, table: impl FnOnce() -> Table) {
        let tip = |what: &str| format!("Save “{}” as {what}", self.title);
        let button = |ui: &mut Ui, word: &str, what: &str, file: &str| {
            let r = ui.small_button(word).on_hover_text(tip(what));
            exports.button(file.to_string(), r.rect);
            r.clicked()
        };
        let file = format!("{}.png", self.file);
        if button(ui, "PNG", "a picture", &file) {
            exports.picture(id, file);
            ui.ctx().request_repaint();
        }
        let file = format!("{}.csv", self.file);
        if button(ui, "CSV", "numbers", &file) {
            exports.save(&file, table().to_csv().into_bytes());
        }
    }
}

/// Draws a legend, as many lines as it needs.
pub(crate) fn legend(ui: &mut Ui, keys: &[Key]) {
    ui.horizontal_wrapped(|ui| {
        ui.spacing_mut().item_spacing.x = 5.0;
        for k in keys {
            let (r, _) = ui.allocate_exact_size(vec2(16.0, 10.0), egui::Sense::hover());
            let y = r.center().y;
            let line = [egui::pos2(r.left(), y), egui::pos2(r.right(), y)];
            let stroke = Stroke::new(2.5, k.color);
            if k.dashed {
                ui.painter().extend(egui::Shape::dashed_line(&line, stroke, 4.0, 3.0));
            } else {
                ui.painter().line_segment(line, stroke);
            }
            ui.label(RichText::new(&k.text).small());
            ui.add_space(6.0);
        }
    });
}

/// How many tiles of a width fit beside each other.
pub(crate) fn fit(ui: &Ui, least: f32) -> usize {
    ((visible_width(ui) + GAP) / (least + GAP)) as usize
}

/// What is left to the right, and not cut off.
fn visible_width(ui: &Ui) -> f32 {
    ui.available_width().min(ui.clip_rect().right() - ui.cursor().left() - GAP)
}

/// Room between tiles.
const GAP: f32 = 8.0;

/// Lays `n` tiles out in at most `most` columns, each at least so large, filling what is there; scrolls
/// where they do not fit.
pub(crate) fn grid(
    ui: &mut Ui,
    n: usize,
    most: usize,
    least: egui::Vec2,
    mut tile: impl FnMut(&mut Ui, usize),
) {
    let gap = GAP;
    // what stands above may have been wider than the view
    let room = vec2(visible_width(ui), ui.available_height());
    let columns = (((room.x + gap) / (least.x + gap)) as usize).clamp(1, most.max(1)).min(n.max(1));
    let rows = n.div_ceil(columns).max(1);
    let fit = (room.y - gap * (rows - 1) as f32) / rows as f32;
    let height = fit.max(least.y).floor();
    egui::ScrollArea::vertical().auto_shrink(false).show(ui, |ui| {
        // where it scrolls, the bar takes its room from the tiles
        let whole = ui.available_width().min(room.x);
        let width = ((whole - gap * (columns - 1) as f32) / columns as f32).floor();
        let total = vec2(whole, height * rows as f32 + gap * (rows - 1) as f32);
        let (area, _) = ui.allocate_exact_size(total, egui::Sense::hover());
        for i in 0..n {
            let (c, r) = ((i % columns) as f32, (i / columns) as f32);
            let min = area.min + vec2(c * (width + gap), r * (height + gap));
            let rect = Rect::from_min_size(min, vec2(width, height));
            ui.scope_builder(UiBuilder::new().max_rect(rect).id_salt(("tile", i)), |ui| tile(ui, i));
        }
    });
}

/// An empty place, and what would fill it.
pub(crate) fn empty(ui: &mut Ui, what: &str, how: &str) {
    let p = Palette::of(ui);
    ui.vertical_centered(|ui| {
        ui.add_space((ui.available_height() * 0.3).max(12.0));
        ui.label(RichText::new(what).size(15.0).strong());
        ui.add_space(4.0);
        for (i, part) in how.split('`').enumerate() {
            if part.trim().is_empty() {
                continue;
            }
            let text = RichText::new(part.trim());
            ui.label(if i % 2 == 1 { text.monospace().color(p.text) } else { text.color(p.weak) });
        }
    });
}
