//! Small line plots of the page's own parts.

use birkhoff::dashboard::theme::Palette;
use eframe::egui::{
    self, Color32, CornerRadius, FontId, Frame, Label, Layout, Margin, Rangef, RichText, Stroke, Ui, Vec2,
    vec2,
};
use egui_plot::{AxisHints, GridInput, GridMark, Plot, PlotPoint, PlotPoints, Points};

/// A line with its name.
pub struct Line {
    /// In the legend and under the pointer.
    pub name: String,
    /// Its colour.
    pub color: Color32,
    /// x and y; y in its own unit also where the axis is logarithmic.
    pub points: Vec<[f64; 2]>,
}

/// A white card of a fixed size with a title.
pub fn card(ui: &mut Ui, size: Vec2, title: &str, hint: &str, body: impl FnOnce(&mut Ui)) {
    let p = Palette::of(ui);
    ui.allocate_ui_with_layout(size, Layout::top_down(egui::Align::Min), |ui| {
        let frame = Frame::new()
            .fill(p.card)
            .stroke(Stroke::new(1.0, p.border))
            .corner_radius(CornerRadius::same(6))
            .inner_margin(Margin::same(10));
        frame.show(ui, |ui| {
            ui.set_min_size(size - vec2(22.0, 22.0));
            ui.set_max_size(size - vec2(22.0, 22.0));
            ui.horizontal(|ui| {
                ui.label(RichText::new(title).strong());
                ui.add(Label::new(RichText::new(hint).small().color(p.weak)).truncate());
            });
            body(ui);
        });
    });
}

/// What cannot be drawn on a logarithmic axis is drawn at its foot.
const FLOOR: f64 = 1e-17;

/// Lines over the rest of `ui`: legend, axes, a band of harmless values, the values under the pointer.
pub fn plot(ui: &mut Ui, id: &str, x: &str, log: bool, band: Option<(f64, f64)>, lines: &[Line]) {
    let p = Palette::of(ui);
    ui.horizontal_wrapped(|ui| {
        ui.spacing_mut().item_spacing.x = 5.0;
        for (i, l) in lines.iter().enumerate() {
            if i > 0 {
                ui.add_space(6.0);
            }
            let (r, _) = ui.allocate_exact_size(vec2(16.0, 10.0), egui::Sense::hover());
            let ends = [egui::pos2(r.left(), r.center().y), egui::pos2(r.right(), r.center().y)];
            ui.painter().line_segment(ends, Stroke::new(2.5, l.color));
            ui.label(RichText::new(&l.name).small());
        }
    });
    let drawn = |v: f64| if log { v.max(FLOOR).log10() } else { v };
    let small = FontId::proportional(11.5);
    // closer labels than egui_plot's, which would fade in these small plots
    let x_axis = AxisHints::new_x()
        .label(RichText::new(x).small().color(p.weak))
        .tick_label_font(small.clone())
        .tick_label_color(p.weak)
        .label_spacing(Rangef::new(14.0, 20.0))
        .formatter(|m, _| if m.value.fract() == 0.0 { format!("{:.0}", m.value) } else { String::new() });
    let y_axis = AxisHints::new_y()
        .min_thickness(42.0)
        .tick_label_font(small)
        .tick_label_color(p.weak)
        .label_spacing(Rangef::new(13.0, 22.0))
        .formatter(move |m, _| tick(m, log));
    let mut plot = Plot::new(id)
        .allow_scroll(false)
        .allow_zoom(false)
        .allow_drag(false)
        .show_background(false)
        .set_margin_fraction(vec2(0.02, 0.1))
        .grid_color(p.grid)
        .custom_x_axes(vec![x_axis])
        .custom_y_axes(vec![y_axis])
        .label_formatter(|_| None)
        .show_x(false)
        .show_y(false);
    plot = plot.x_grid_spacer(whole);
    if log {
        plot = plot.y_grid_spacer(decades);
    }
    if let Some((a, b)) = band {
        plot = plot.include_y(drawn(a)).include_y(drawn(b));
    }
    let r = plot.show(ui, |ui| {
        if let Some((a, b)) = band {
            let color = p.weak.gamma_multiply(0.7);
            for v in [a, b] {
                let line = egui_plot::HLine::new("band", drawn(v)).color(color).width(1.0);
                ui.hline(line.style(egui_plot::LineStyle::dashed_dense()).allow_hover(false));
            }
        }
        for l in lines {
            let points: Vec<[f64; 2]> =
                l.points.iter().map(|&[x, y]| [x, drawn(y)]).filter(|v| v[1].is_finite()).collect();
            if points.len() <= 40 {
                let dots = Points::new(&l.name, PlotPoints::from(points.clone())).color(l.color);
                ui.points(dots.radius(2.5).allow_hover(false));
            }
            let line = egui_plot::Line::new(&l.name, PlotPoints::from(points)).color(l.color).width(2.0);
            ui.line(line.allow_hover(false));
        }
    });
    let Some(pointer) = r.response.hover_pos() else { return };
    let at = r.transform.value_from_position(pointer).x;
    let painter = ui.painter().with_clip_rect(*r.transform.frame());
    let mut seen = vec![];
    for l in lines {
        let near = l.points.iter().min_by(|a, b| (a[0] - at).abs().total_cmp(&(b[0] - at).abs()));
        if let Some(&[px, py]) = near {
            let pos = r.transform.position_from_point(&PlotPoint::new(px, drawn(py)));
            painter.circle(pos, 3.5, l.color, Stroke::new(1.5, p.card));
            seen.push((l, px, py));
        }
    }
    if let Some(&(_, px, _)) = seen.first() {
        r.response.on_hover_ui_at_pointer(|ui| {
            ui.label(RichText::new(format!("{x} {px:.0}")).small().color(p.weak));
            for (l, _, y) in &seen {
                ui.horizontal(|ui| {
                    let (r, _) = ui.allocate_exact_size(vec2(10.0, 10.0), egui::Sense::hover());
                    ui.painter().rect_filled(r, 2.0, l.color);
                    ui.label(RichText::new(format!("{}  {}", l.name, number(*y))).small());
                });
            }
        });
    }
}

/// Four significant digits.
pub fn number(v: f64) -> String {
    match v.abs() {
        _ if !v.is_finite() => "infinite".into(),
        0.0 => "0".into(),
        a if !(1e-3..1e4).contains(&a) => format!("{v:.1e}"),
        a if a >= 100.0 => format!("{v:.1}"),
        _ => format!("{v:.4}"),
    }
}

fn tick(m: GridMark, log: bool) -> String {
    if !log {
        let digits = (-m.step_size.log10()).ceil().clamp(0.0, 6.0) as usize;
        return format!("{:.digits$}", m.value);
    }
    let v = 10f64.powf(m.value);
    match v {
        v if (1e-2..1e4).contains(&v) => {
            let s = format!("{v:.2}");
            s.trim_end_matches('0').trim_end_matches('.').to_string()
        }
        v => format!("{v:.0e}"),
    }
}

/// Marks at some eight whole numbers, all alike.
fn whole(input: GridInput) -> Vec<GridMark> {
    let (lo, hi) = input.bounds;
    if !(lo.is_finite() && hi.is_finite() && hi > lo) {
        return vec![];
    }
    let unit = 10f64.powf(((hi - lo) / 8.0).log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|k| k * unit).into_iter().find(|s| s * 8.0 >= hi - lo).unwrap_or(unit);
    let step = step.max(1.0);
    let first = (lo / step).ceil() as i64;
    let last = (hi / step).floor() as i64;
    (first..=last.min(first + 50)).map(|k| GridMark { value: k as f64 * step, step_size: step }).collect()
}

/// Marks of a logarithmic axis: decades, 2 and 5 between them where there is room.
fn decades(input: GridInput) -> Vec<GridMark> {
    let (lo, hi) = input.bounds;
    if !(lo.is_finite() && hi.is_finite()) || hi - lo > 100.0 {
        return vec![];
    }
    let skip = ((hi - lo) / 7.0).ceil().max(1.0);
    let mut marks = vec![];
    let mut d = (lo / skip).floor() * skip;
    while d <= hi {
        marks.push(GridMark { value: d, step_size: skip });
        if hi - lo < 2.5 {
            marks.extend([2.0f64, 5.0].map(|k| GridMark { value: d + k.log10(), step_size: 0.3 }));
        }
        d += skip;
    }
    marks.retain(|m| (lo..=hi).contains(&m.value));
    marks
}
