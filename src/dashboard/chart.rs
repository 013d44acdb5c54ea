//! A line plot: axes with units, logarithms, a zone, and the values of all lines where the pointer is.

use egui::{Color32, Id, PopupAnchor, RichText, Stroke, Tooltip, Ui, vec2};
use egui_plot::{
    AxisHints, GridInput, GridMark, Line, LineStyle, Plot, PlotBounds, PlotMemory, PlotPoint, PlotPoints,
    Points, Polygon,
};

use super::text;
use super::theme::Palette;

/// What an axis counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Unit {
    /// A number with prefixes: 12k.
    #[default]
    Count,
    /// A number as it is.
    Plain,
    /// Seconds.
    Seconds,
    /// Whole numbers only.
    Index,
}

/// A line of a plot, its points in drawn coordinates (logarithms where the axis is logarithmic).
pub(crate) struct Curve<'a> {
    pub name: &'a str,
    pub color: Color32,
    pub points: &'a [PlotPoint],
    pub width: f32,
    pub dashed: bool,
    pub dots: bool,
}

/// What the pointer sees of one run: colour, name, value, and where the point is (in drawn coordinates).
pub(crate) struct Seen {
    pub color: Color32,
    pub name: String,
    pub value: String,
    pub at: Option<PlotPoint>,
}

/// How a plot is drawn.
pub(crate) struct Chart<'a> {
    pub id: Id,
    pub x_label: &'a str,
    pub x_unit: Unit,
    pub y_unit: Unit,
    pub log_x: bool,
    pub log_y: bool,
    /// Values of y between which all is well.
    pub band: Option<(f64, f64)>,
    /// Values of y that stay visible.
    pub fit: Option<(f64, f64)>,
    /// Plots of one group move together along x.
    pub link: Option<Id>,
    /// A value of x to mark.
    pub mark: Option<f64>,
}

impl Chart<'_> {
    /// Visible x in drawn coordinates, `None` while all is shown, and the width in pixels. As of the last
    /// frame: the plot itself knows no more.
    pub fn window(&self, ui: &Ui) -> (Option<(f64, f64)>, usize) {
        let pixels = |w: f32| ((w * ui.ctx().pixels_per_point()) as usize).clamp(16, 4096);
        match PlotMemory::load(ui.ctx(), self.id) {
            Some(m) => {
                let b = m.bounds();
                let range = (!m.auto_bounds.x && b.is_valid()).then(|| (b.min()[0], b.max()[0]));
                (range, pixels(m.transform().frame().width()))
            }
            None => (None, pixels(ui.available_width())),
        }
    }

    /// Draws it over the rest of `ui`. `seen` says what stands at x (in data coordinates).
    pub fn show(self, ui: &mut Ui, curves: &[Curve<'_>], seen: impl Fn(f64) -> Vec<Seen>) {
        let p = Palette::of(ui);
        let before = self.window(ui).0;
        let (x_unit, y_unit, log_x, log_y) = (self.x_unit, self.y_unit, self.log_x, self.log_y);
        let axis = |hints: AxisHints<'static>, color| {
            hints.tick_label_font(egui::FontId::proportional(11.5)).tick_label_color(color)
        };
        let x_axis = axis(AxisHints::new_x(), p.weak)
            .label(RichText::new(self.x_label).small().color(p.weak))
            .label_spacing(if x_unit == Unit::Index {
                egui::Rangef::new(18.0, 30.0)
            } else {
                egui::Rangef::new(40.0, 56.0)
            })
            .formatter(move |m, _| tick(m, x_unit, log_x));
        let y_axis = axis(AxisHints::new_y(), p.weak)
            .min_thickness(40.0)
            .label_spacing(egui::Rangef::new(13.0, 22.0))
            .formatter(move |m, _| tick(m, y_unit, log_y));
        let mut plot = Plot::new("plot")
            .id(self.id)
            .allow_scroll(false)
            .show_background(false)
            .show_x(false)
            .show_y(false)
            .label_formatter(|_| None)
            .grid_color(p.grid)
            .cursor_color(p.weak.gamma_multiply(0.6))
            .set_margin_fraction(vec2(0.01, 0.08))
            .custom_x_axes(vec![x_axis])
            .custom_y_axes(vec![y_axis]);
        plot = match (log_x, x_unit) {
            (true, Unit::Seconds) => plot.x_grid_spacer(log_time_marks),
            (true, _) => plot.x_grid_spacer(log_marks),
            (false, Unit::Index) => plot.x_grid_spacer(whole_marks),
            (false, Unit::Seconds) => plot.x_grid_spacer(|i| time_marks(i, 7.0)),
            (false, _) => plot.x_grid_spacer(|i| linear_marks(i, 7.0)),
        };
        plot =
            if log_y { plot.y_grid_spacer(log_marks) } else { plot.y_grid_spacer(|i| linear_marks(i, 3.0)) };
        if let Some(l) = self.link {
            plot = plot.link_axis(l, [true, false]).link_cursor(l, [true, false]);
        }
        let drawn = |v: f64| if log_y { v.max(1e-300).log10() } else { v };
        if let Some((a, b)) = self.fit {
            plot = plot.include_y(drawn(a)).include_y(drawn(b));
        }
        let r = plot.show(ui, |ui| {
            if let Some((a, b)) = self.band {
                let x = ui.plot_bounds();
                let (x0, x1) = match x.is_valid() && x.width() < 1e9 {
                    true => (x.min()[0] - x.width(), x.max()[0] + x.width()),
                    false => (-1.0, 1.0),
                };
                let corners = vec![[x0, drawn(a)], [x1, drawn(a)], [x1, drawn(b)], [x0, drawn(b)]];
                // as a background: it does not widen the bounds of x
                let zone =
                    Polygon::new("zone", PlotPoints::from(corners)).fill_color(p.band).stroke(Stroke::NONE);
                ui.add(Backdrop(zone.allow_hover(false)));
            }
            if let Some(x) = self.mark {
                let x = if log_x { x.max(f64::MIN_POSITIVE).log10() } else { x };
                let line = egui_plot::VLine::new("mark", x).color(p.weak).width(1.0);
                ui.vline(line.style(LineStyle::dashed_dense()).allow_hover(false));
            }
            for (i, c) in curves.iter().enumerate() {
                let style = if c.dashed { LineStyle::dashed_dense() } else { LineStyle::Solid };
                let line = Line::new(c.name, c.points).id(("line", i)).color(c.color).width(c.width);
                ui.line(line.style(style).allow_hover(false).allow_band(false));
                if c.dots {
                    let dots = Points::new(c.name, c.points).id(("dots", i)).color(c.color);
                    ui.points(dots.radius(c.width + 1.2).allow_hover(false));
                }
            }
        });
        if self.window(ui).0 != before {
            // zoomed: what is visible now is made finer next
            ui.ctx().request_repaint();
        }
        let Some(pointer) = r.response.hover_pos() else { return };
        let at = r.transform.value_from_position(pointer).x;
        let x = if log_x { 10f64.powf(at) } else { at };
        let list = seen(x);
        if list.is_empty() {
            return;
        }
        let painter = ui.painter().with_clip_rect(*r.transform.frame());
        for s in &list {
            if let Some(at) = s.at {
                let pos = r.transform.position_from_point(&at);
                painter.circle(pos, 3.5, s.color, Stroke::new(1.5, p.card));
            }
        }
        let x = if x_unit == Unit::Count { x.round() } else { x };
        let head = format!("{} {}", self.x_label, value(x, x_unit));
        let tip =
            Tooltip::always_open(ui.ctx().clone(), ui.layer_id(), self.id.with("tip"), PopupAnchor::Pointer);
        tip.gap(14.0).show(|ui| {
            ui.spacing_mut().item_spacing.y = 2.0;
            ui.label(RichText::new(head).small().color(p.weak));
            egui::Grid::new("seen").num_columns(3).min_col_width(0.0).spacing(vec2(8.0, 2.0)).show(
                ui,
                |ui| {
                    for s in &list {
                        let (r, _) = ui.allocate_exact_size(vec2(10.0, 10.0), egui::Sense::hover());
                        ui.painter().rect_filled(r, 2.0, s.color);
                        ui.label(RichText::new(&s.name).small());
                        ui.label(RichText::new(&s.value).small().monospace());
                        ui.end_row();
                    }
                },
            );
        });
    }
}

/// An item that does not count when the plot fits its bounds.
struct Backdrop<'a>(Polygon<'a>);

impl egui_plot::PlotItem for Backdrop<'_> {
    fn shapes(&self, ui: &Ui, transform: &egui_plot::PlotTransform, shapes: &mut Vec<egui::Shape>) {
        self.0.shapes(ui, transform, shapes);
    }

    fn initialize(&mut self, x_range: std::ops::RangeInclusive<f64>) {
        self.0.initialize(x_range);
    }

    fn color(&self) -> Color32 {
        self.0.color()
    }

    fn geometry(&self) -> egui_plot::PlotGeometry<'_> {
        egui_plot::PlotGeometry::None
    }

    fn bounds(&self) -> PlotBounds {
        PlotBounds::NOTHING
    }

    fn base(&self) -> &egui_plot::PlotItemBase {
        self.0.base()
    }

    fn base_mut(&mut self) -> &mut egui_plot::PlotItemBase {
        self.0.base_mut()
    }
}

/// A value in its unit.
pub(crate) fn value(v: f64, unit: Unit) -> String {
    match unit {
        Unit::Seconds => text::duration(v),
        Unit::Index => format!("{:.0}", v.round()),
        Unit::Count if v.abs() >= 100.0 => text::group(v.round().abs() as u64),
        Unit::Count | Unit::Plain => text::number(v),
    }
}

fn tick(m: GridMark, unit: Unit, log: bool) -> String {
    let (v, step) = match log {
        true => {
            let v = 10f64.powf(m.value);
            (v, v * (10f64.powf(m.step_size) - 1.0))
        }
        false => (m.value, m.step_size),
    };
    match unit {
        Unit::Seconds if log && v >= 1.0 => text::duration_short(v),
        Unit::Index if v.fract() != 0.0 => String::new(),
        // also for a zero that is negative
        Unit::Index => format!("{:.0}", v + 0.0),
        Unit::Seconds if step >= 3600.0 => format!("{} h", text::number(v / 3600.0)),
        Unit::Seconds if step >= 60.0 => format!("{} min", text::number(v / 60.0)),
        Unit::Seconds => format!("{} s", text::number(v)),
        Unit::Count if v.abs() >= 1000.0 && !log => prefixed(v, step),
        Unit::Count if v.abs() >= 1000.0 => text::short(v),
        Unit::Count | Unit::Plain if log => text::number(v),
        Unit::Count | Unit::Plain => fixed(v, step),
    }
}

/// As many decimals as the step needs, in thousands or millions.
fn prefixed(v: f64, step: f64) -> String {
    let (k, unit) = if v.abs() >= 1e6 { (1e6, "M") } else { (1e3, "k") };
    fixed(v / k, step / k) + unit
}

fn fixed(v: f64, step: f64) -> String {
    if v != 0.0 && step < 1e-4 {
        return format!("{v:.1e}");
    }
    let digits = (-step.log10() - 1e-9).ceil().clamp(0.0, 6.0) as usize;
    let s = format!("{v:.digits$}");
    if s.trim_start_matches('-').chars().all(|c| c == '0' || c == '.') { "0".into() } else { s }
}

/// Marks of a logarithmic axis: decades, with 2 and 5 between them; over less than a decade, round values.
fn log_marks(input: GridInput) -> Vec<GridMark> {
    let (lo, hi) = input.bounds;
    let mut marks = vec![];
    if !(lo.is_finite() && hi.is_finite()) || hi - lo > 600.0 {
        return marks;
    }
    if hi - lo < 1.0 {
        let (a, b) = (10f64.powf(lo), 10f64.powf(hi));
        let rough = (b - a) / 5.0;
        let unit = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|k| k * unit).into_iter().find(|&s| s >= rough).unwrap_or(rough);
        let mut k = (a / step).ceil();
        while k * step <= b && marks.len() < 50 {
            if k > 0.0 {
                marks.push(GridMark { value: (k * step).log10(), step_size: (hi - lo) / 5.0 });
            }
            k += 1.0;
        }
        return marks;
    }
    let skip = ((hi - lo) / 8.0).ceil().max(1.0);
    let mut d = (lo / skip).floor() * skip;
    while d <= hi {
        marks.push(GridMark { value: d, step_size: skip });
        if hi - lo < 4.0 {
            for k in [2.0f64, 5.0] {
                marks.push(GridMark { value: d + k.log10(), step_size: 0.3 });
            }
        }
        d += skip;
    }
    marks.retain(|m| (lo..=hi).contains(&m.value));
    marks
}

/// Marks at round numbers, so many times the plot's own least distance (8 pixels) apart.
fn linear_marks(input: GridInput, apart: f64) -> Vec<GridMark> {
    let rough = input.base_step_size * apart;
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|k| k * unit).into_iter().find(|&s| s >= rough).unwrap_or(rough);
    every(input.bounds, step)
}

/// Marks at round numbers of seconds, minutes, hours.
fn time_marks(input: GridInput, apart: f64) -> Vec<GridMark> {
    let rough = input.base_step_size * apart;
    let round =
        [1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 18000.0, 86400.0];
    match round.into_iter().find(|&s| s >= rough) {
        Some(step) if rough > 0.5 => every(input.bounds, step),
        _ => linear_marks(input, apart),
    }
}

/// Marks of a logarithmic axis of seconds: round ones, about five.
fn log_time_marks(input: GridInput) -> Vec<GridMark> {
    const ROUND: [f64; 20] = [
        1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14400.0,
        28800.0, 86400.0, 172_800.0, 432_000.0, 864_000.0,
    ];
    let (lo, hi) = input.bounds;
    let apart = (hi - lo) / 6.0;
    let mut marks: Vec<GridMark> = vec![];
    for value in ROUND.map(f64::log10) {
        let far = marks.last().is_none_or(|m| value - m.value >= apart);
        if (lo..=hi).contains(&value) && far {
            marks.push(GridMark { value, step_size: 2.0 * apart });
        }
    }
    if marks.len() < 2 { log_marks(input) } else { marks }
}

fn every((lo, hi): (f64, f64), step: f64) -> Vec<GridMark> {
    let mut marks = vec![];
    if !(lo.is_finite() && hi.is_finite() && step > 0.0 && (hi - lo) / step < 500.0) {
        return marks;
    }
    let mut k = (lo / step).ceil();
    while k * step <= hi {
        marks.push(GridMark { value: k * step, step_size: step });
        k += 1.0;
    }
    marks
}

/// Marks at whole numbers only.
fn whole_marks(input: GridInput) -> Vec<GridMark> {
    let (lo, hi) = input.bounds;
    every((lo, hi), ((hi - lo) / 12.0).ceil().max(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(lo: f64, hi: f64) -> Vec<String> {
        let all = log_marks(GridInput { bounds: (lo, hi), base_step_size: 0.1 });
        all.into_iter().map(|m| tick(m, Unit::Plain, true)).collect()
    }

    #[test]
    fn logarithmic_ticks_are_round_numbers() {
        assert_eq!(marks(-1.1, 1.05), ["0.1", "0.2", "0.5", "1", "2", "5", "10"]);
        assert_eq!(marks(-0.2, 0.02), ["0.7", "0.8", "0.9", "1"]);
        assert!(marks(f64::NEG_INFINITY, 0.0).is_empty());
    }

    #[test]
    fn ticks_say_as_much_as_their_step_needs() {
        let t = |value, step_size, unit| tick(GridMark { value, step_size }, unit, false);
        assert_eq!(t(0.875, 0.005, Unit::Plain), "0.875");
        assert_eq!(t(12_500.0, 500.0, Unit::Count), "12.5k");
        assert_eq!(t(0.0, 0.1, Unit::Plain), "0");
        assert_eq!(t(5400.0, 600.0, Unit::Seconds), "90 min");
        assert_eq!(t(2.5, 0.5, Unit::Index), "");
    }
}
