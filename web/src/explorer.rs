//! The Sinkhorn explorer: logits by hand, the iterations, and what composing such matrices does.

use birkhoff::dashboard::theme::Palette;
use birkhoff::diagnose::Matrix;
use eframe::egui::{
    self, Align2, Color32, CursorIcon, FontId, Frame, Margin, Panel, Rect, RichText, ScrollArea, Sense,
    Slider, Stroke, StrokeKind, Ui, pos2, vec2,
};

use crate::chart::{self, Line};
use crate::host;
use crate::sinkhorn::{Composed, Preset, column_error, compose, normal, trace};
use crate::widgets::heading;

/// Iterations drawn in the plot of errors.
const MOST: usize = 40;
/// Logits a point of dragging.
const DRAG: f64 = 0.03;

/// The part of the page.
pub struct Explorer {
    n: usize,
    h: Vec<f64>,
    iterations: usize,
    layers: usize,
    /// Standard deviation of what is added to the logits of each further layer.
    noise: f64,
    seed: u64,
    preset: Option<Preset>,
    shown: Option<Shown>,
}

/// What follows from the choices; made anew only when they change.
struct Shown {
    trace: Vec<Matrix>,
    matrix: Matrix,
    singular: Vec<f64>,
    composed: Composed,
    product: Matrix,
}

impl Default for Explorer {
    fn default() -> Self {
        let n = 4;
        Explorer {
            n,
            h: Preset::Random.logits(n, 1),
            iterations: 20,
            layers: 12,
            noise: 0.0,
            seed: 1,
            preset: Some(Preset::Random),
            shown: None,
        }
    }
}

impl Explorer {
    /// For tests.
    pub fn state(&self) -> serde_json::Value {
        let m = self.shown.as_ref().map(|s| &s.matrix);
        serde_json::json!({
            "n": self.n,
            "logits": self.h,
            "matrix": m.map(Matrix::data),
            "column_error": m.map(column_error),
            "iterations": self.iterations,
        })
    }

    fn preset(&mut self, preset: Preset) {
        self.h = preset.logits(self.n, self.seed);
        self.preset = Some(preset);
        self.shown = None;
    }

    fn make(&self) -> Shown {
        let trace = trace(&self.h, self.n, MOST.max(self.iterations));
        let matrix = trace[self.iterations].clone();
        let layers: Vec<Matrix> = (0..self.layers)
            .map(|l| {
                if l == 0 || self.noise == 0.0 {
                    return matrix.clone();
                }
                let noise = normal(1000 * self.seed + l as u64, self.n * self.n);
                let h: Vec<f64> = self.h.iter().zip(noise).map(|(h, e)| h + self.noise * e).collect();
                crate::sinkhorn::trace(&h, self.n, self.iterations).pop().unwrap_or_else(|| matrix.clone())
            })
            .collect();
        let composed = compose(&layers);
        let product = layers.iter().fold(Matrix::identity(self.n), |p, m| m * &p);
        Shown { singular: matrix.singular_values(), trace, matrix, composed, product }
    }

    /// Draws it.
    pub fn ui(&mut self, ui: &mut Ui) {
        let p = Palette::of(ui);
        let side = Frame::new().fill(p.background).inner_margin(Margin::symmetric(14, 10));
        Panel::left("sinkhorn").resizable(false).exact_size(286.0).frame(side).show(ui, |ui| {
            ScrollArea::vertical().auto_shrink([false, false]).show(ui, |ui| self.choices(ui));
        });
        let shown = self.shown.take().unwrap_or_else(|| self.make());
        let body = Frame::new().inner_margin(Margin::same(12));
        let mut changed = false;
        egui::CentralPanel::default().frame(body).show(ui, |ui| {
            ScrollArea::vertical().auto_shrink([false, false]).show(ui, |ui| {
                changed = self.body(ui, &shown);
            });
        });
        if !changed {
            self.shown = Some(shown);
        } else {
            ui.ctx().request_repaint();
        }
    }

    fn choices(&mut self, ui: &mut Ui) {
        let p = Palette::of(ui);
        ui.label(RichText::new("From logits to the Birkhoff polytope").size(18.0).strong());
        let text = "Sinkhorn's iterations divide a positive matrix by its column sums, then by its row sums, \
                    over and over. It becomes doubly stochastic: it mixes streams and never makes them larger.";
        ui.label(RichText::new(text).small().color(p.weak));
        heading(ui, "Matrix");
        let mut n = self.n;
        let r = ui.add(Slider::new(&mut n, 2..=8).text("streams n"));
        host::name("sinkhorn.n", &r);
        if n != self.n {
            self.n = n;
            self.preset(self.preset.unwrap_or(Preset::Random));
        }
        ui.horizontal_wrapped(|ui| {
            ui.spacing_mut().item_spacing = vec2(4.0, 4.0);
            for preset in Preset::ALL {
                let r = ui.selectable_label(self.preset == Some(preset), preset.title());
                host::name(format!("sinkhorn.preset.{preset:?}").to_lowercase(), &r);
                if r.clicked() {
                    if preset == Preset::Random && self.preset == Some(Preset::Random) {
                        self.seed += 1;
                    }
                    self.preset(preset);
                }
            }
        });
        ui.label(RichText::new("Press random again for other numbers.").small().color(p.weak));
        heading(ui, "Iterations");
        let r = ui.add(Slider::new(&mut self.iterations, 0..=MOST).text("iterations"));
        host::name("sinkhorn.iterations", &r);
        if r.changed() {
            self.shown = None;
        }
        ui.label(RichText::new("mHC takes 20.").small().color(p.weak));
        heading(ui, "Depth");
        let a = ui.add(Slider::new(&mut self.layers, 1..=64).text("layers L"));
        let b = ui.add(Slider::new(&mut self.noise, 0.0..=3.0).text("layers differ by"));
        if a.changed() || b.changed() {
            self.shown = None;
        }
        let text =
            "0: the same matrix in every layer. Else each layer's logits get normal noise of this size.";
        ui.label(RichText::new(text).small().color(p.weak));
    }

    /// True if the logits changed.
    fn body(&mut self, ui: &mut Ui, shown: &Shown) -> bool {
        let p = Palette::of(ui);
        let width = ui.available_width();
        let columns = [760.0, 420.0].into_iter().filter(|&w| width > w).count() + 1;
        let room = ((width - 10.0 * (columns - 1) as f32) / columns as f32).floor();
        let top = vec2(room, (room + 46.0).min(ui.available_height() * 0.56).max(240.0));
        let mut changed = false;
        ui.horizontal_wrapped(|ui| {
            ui.spacing_mut().item_spacing = vec2(10.0, 10.0);
            chart::card(ui, top, "Logits", "drag a cell up or down", |ui| changed = self.logits(ui));
            let hint = match self.iterations {
                0 => "exp of the logits, scaled".to_string(),
                1 => "after 1 iteration, with sums".to_string(),
                t => format!("after {t} iterations, with sums"),
            };
            chart::card(ui, top, "Matrix", &hint, |ui| heat(ui, &shown.matrix, "sinkhorn.matrix"));
            let hint = format!("{} layers, one after the other", self.layers);
            chart::card(ui, top, "Product", &hint, |ui| heat(ui, &shown.product, "sinkhorn.product"));
        });
        ui.add_space(10.0);
        let bottom = vec2(room, (ui.available_height() - 12.0).max(230.0));
        let errors: Vec<[f64; 2]> =
            shown.trace.iter().enumerate().map(|(t, m)| [t as f64, column_error(m)]).collect();
        let by_layer = |v: &[f64]| v.iter().enumerate().map(|(l, &g)| [(l + 1) as f64, g]).collect();
        let line = |name: &str, i: usize, points| Line { name: name.into(), color: p.run(i), points };
        ui.horizontal_wrapped(|ui| {
            ui.spacing_mut().item_spacing = vec2(10.0, 10.0);
            chart::card(ui, bottom, "Column error", "largest |column sum − 1|; rows are exact", |ui| {
                chart::plot(ui, "column error", "iteration", true, None, &[line("error", 0, errors)]);
            });
            chart::card(ui, bottom, "Singular values", "1: the mean; the rest shrinks", |ui| {
                spectrum(ui, &shown.singular);
            });
            let c = &shown.composed;
            let lines = [
                line("forward gain", 0, by_layer(&c.forward)),
                line("backward gain", 1, by_layer(&c.backward)),
                line("differences left", 2, by_layer(&c.differences)),
            ];
            chart::card(ui, bottom, "Through the layers", "gains and differences", |ui| {
                chart::plot(ui, "through layers", "layers", true, None, &lines);
            });
        });
        changed
    }

    /// The cells of the logits; true if one was dragged.
    fn logits(&mut self, ui: &mut Ui) -> bool {
        let p = Palette::of(ui);
        let n = self.n;
        let (cells, font) = square(ui, n, 4.0, 4.0);
        let most = self.h.iter().fold(1.0f64, |m, v| m.max(v.abs()));
        let mut changed = false;
        for k in 0..n * n {
            let rect = cell(cells, n, k);
            let r = ui.interact(rect, ui.scope_id().with(("logit", k)), Sense::click_and_drag());
            host::name(format!("sinkhorn.logit.{}.{}", k / n, k % n), &r);
            let r = r.on_hover_and_drag_cursor(CursorIcon::ResizeVertical);
            if r.dragged() {
                let step =
                    DRAG * (most / 8.0).max(1.0) * if ui.input(|i| i.modifiers.shift) { 0.1 } else { 1.0 };
                let to = (self.h[k] - f64::from(r.drag_delta().y) * step).clamp(-80.0, 80.0);
                changed |= to != self.h[k];
                self.h[k] = to;
                self.preset = None;
            }
            if r.double_clicked() {
                self.h[k] = 0.0;
                self.preset = None;
                changed = true;
            }
            let fill = p.diverging(self.h[k] / most);
            ui.painter().rect_filled(rect.shrink(1.0), 3.0, fill);
            if r.hovered() || r.dragged() {
                ui.painter().rect_stroke(
                    rect.shrink(1.0),
                    3.0,
                    Stroke::new(2.0, p.accent),
                    StrokeKind::Inside,
                );
            }
            let text = if self.h[k].abs() >= 10.0 {
                format!("{:.0}", self.h[k])
            } else {
                format!("{:.1}", self.h[k])
            };
            ui.painter().text(rect.center(), Align2::CENTER_CENTER, text, font.clone(), p.on(fill));
        }
        changed
    }
}

/// The largest square that is left, with room for sums right and below, and the font of its cells.
fn square(ui: &mut Ui, n: usize, right: f32, below: f32) -> (Rect, FontId) {
    let room = ui.available_size() - vec2(2.0, 4.0);
    let side = (room.x - right).min(room.y - below).max(40.0);
    let (area, _) = ui.allocate_exact_size(room, Sense::hover());
    let left = area.left() + ((room.x - right - side) / 2.0).max(0.0);
    let rect = Rect::from_min_size(pos2(left, area.top() + 2.0), vec2(side, side));
    (rect, FontId::proportional((side / n as f32 * 0.28).clamp(8.0, 16.0)))
}

fn cell(cells: Rect, n: usize, k: usize) -> Rect {
    let size = cells.size() / n as f32;
    Rect::from_min_size(cells.min + vec2(size.x * (k % n) as f32, size.y * (k / n) as f32), size)
}

/// A matrix with its sums.
fn heat(ui: &mut Ui, m: &Matrix, name: &str) {
    let p = Palette::of(ui);
    let n = m.n();
    let (cells, font) = square(ui, n, 44.0, 26.0);
    host::place(name, cells);
    let most = m.data().iter().fold(1.0f64, |a, v| a.max(*v));
    for (k, v) in m.data().iter().enumerate() {
        let rect = cell(cells, n, k);
        let fill = p.sequential(v / most);
        ui.painter().rect_filled(rect.shrink(1.0), 3.0, fill);
        ui.painter().text(rect.center(), Align2::CENTER_CENTER, format!("{v:.2}"), font.clone(), p.on(fill));
    }
    let small = FontId::proportional(11.0);
    let color = |s: f64| -> Color32 { if (s - 1.0).abs() < 0.005 { p.weak } else { p.warn } };
    for (o, s) in m.row_sums().iter().enumerate() {
        let c = cell(cells, n, o * n + n - 1);
        let at = pos2(cells.right() + 6.0, c.center().y);
        ui.painter().text(at, Align2::LEFT_CENTER, format!("{s:.2}"), small.clone(), color(*s));
    }
    for (i, s) in m.col_sums().iter().enumerate() {
        let c = cell(cells, n, i);
        let at = pos2(c.center().x, cells.bottom() + 4.0);
        ui.painter().text(at, Align2::CENTER_TOP, format!("{s:.2}"), small.clone(), color(*s));
    }
}

/// Bars of the singular values.
fn spectrum(ui: &mut Ui, values: &[f64]) {
    let p = Palette::of(ui);
    let (area, _) = ui.allocate_exact_size(ui.available_size() - vec2(2.0, 4.0), Sense::hover());
    let most = values.iter().fold(1.0f64, |a, &v| a.max(v));
    let row = (area.height() / values.len().max(1) as f32).min(34.0);
    let font = FontId::proportional(12.0);
    let (left, right) = (area.left() + 28.0, area.right() - 52.0);
    for (k, &v) in values.iter().enumerate() {
        let top = area.top() + row * k as f32;
        let track = Rect::from_min_max(pos2(left, top + 3.0), pos2(right, top + row - 3.0));
        ui.painter().rect_filled(track, 3.0, p.track);
        let mut bar = track;
        bar.set_right(left + track.width() * (v / most) as f32);
        ui.painter().rect_filled(bar, 3.0, p.run(0));
        let middle = track.center().y;
        let at = pos2(area.left(), middle);
        ui.painter().text(at, Align2::LEFT_CENTER, format!("σ{}", k + 1), font.clone(), p.weak);
        let at = pos2(right + 8.0, middle);
        ui.painter().text(at, Align2::LEFT_CENTER, chart::number(v), font.clone(), p.text);
    }
}
