//! A heat map: cells, what stands beside them, sums of rows and columns, a colour bar, the value under the
//! pointer.

use egui::{Align2, Color32, FontId, Rect, Sense, Shape, Stroke, Ui, pos2, vec2};

use super::text::{number, shorten};
use super::theme::Palette;

/// What colours mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scale {
    /// From 0 to this.
    Sequential(f64),
    /// From minus this to this.
    Diverging(f64),
}

impl Scale {
    /// For a matrix of a mode: entries of mHC lie in [0, 1], those of HC have signs.
    pub fn of_mode(mode: &str, values: impl Iterator<Item = f64>) -> Scale {
        let values = values.filter(|v| v.is_finite());
        let (lo, most) = values.fold((0.0f64, 0.0f64), |(l, m), v| (l.min(v), m.max(v.abs())));
        if mode == "hc" || lo < 0.0 {
            Scale::Diverging(ceil_nice(most.max(1.0)))
        } else {
            Scale::Sequential(if most <= 1.001 { 1.0 } else { ceil_nice(most) })
        }
    }

    fn color(self, p: &Palette, v: f64) -> Color32 {
        match self {
            Scale::Sequential(most) => p.sequential(v / most),
            Scale::Diverging(most) => p.diverging(v / most),
        }
    }

    fn ends(self) -> (f64, f64) {
        match self {
            Scale::Sequential(m) => (0.0, m),
            Scale::Diverging(m) => (-m, m),
        }
    }
}

/// A round number, no less than `v`.
pub(crate) fn ceil_nice(v: f64) -> f64 {
    if !(v > 0.0 && v.is_finite()) {
        return 1.0;
    }
    let unit = 10f64.powf(v.log10().floor());
    [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]
        .map(|k| k * unit)
        .into_iter()
        .find(|&s| s >= v * (1.0 - 1e-9))
        .unwrap_or(10.0 * unit)
}

/// A matrix to draw, row by row.
pub(crate) struct Heat<'a> {
    pub rows: usize,
    pub cols: usize,
    pub values: &'a [f64],
    pub row_title: &'a str,
    pub col_title: &'a str,
    pub row_names: Option<&'a [String]>,
    pub col_names: Option<&'a [String]>,
    pub scale: Scale,
    /// Whether sums of rows and columns stand beside it.
    pub sums: bool,
    /// Whether cells are squares.
    pub square: bool,
}

impl Heat<'_> {
    fn name(names: Option<&[String]>, i: usize) -> String {
        names.and_then(|n| n.get(i)).map_or_else(|| i.to_string(), |n| shorten(n, 10))
    }

    /// Draws it over the rest of `ui`.
    pub fn show(&self, ui: &mut Ui) {
        let p = Palette::of(ui);
        let room = ui.available_size().max(vec2(20.0, 20.0));
        let (area, response) = ui.allocate_exact_size(room, Sense::hover());
        if self.rows == 0 || self.cols == 0 || self.values.len() != self.rows * self.cols {
            return;
        }
        let painter = ui.painter_at(area.expand(2.0));
        let font = FontId::proportional(11.0);
        let width = |s: &str| painter.layout_no_wrap(s.into(), font.clone(), p.text).size().x;
        // what stands around the cells
        let longest = |n: usize, names| (0..n).map(|i| width(&Self::name(names, i))).fold(0.0, f32::max);
        let (names_w, names_h) = (longest(self.rows, self.row_names), longest(self.cols, self.col_names));
        let named = self.col_names.is_some();
        let (left, right) = (names_w + 24.0, if self.sums { 114.0 } else { 68.0 });
        let top = if named { names_h.min(70.0) + 8.0 } else { 36.0 };
        let bottom = if self.sums || named { 20.0 } else { 6.0 };
        let inner = area.size() - vec2(left + right, top + bottom);
        let mut cell = vec2(inner.x / self.cols as f32, inner.y / self.rows as f32).max(vec2(1.0, 1.0));
        if self.square {
            cell = vec2(cell.min_elem(), cell.min_elem());
        } else {
            cell = cell.min(vec2(cell.y * 3.5, cell.x * 3.5));
        }
        let size = vec2(cell.x * self.cols as f32, cell.y * self.rows as f32);
        let spare = (area.size() - size - vec2(left + right, top + bottom)).max(vec2(0.0, 0.0)) / 2.0;
        let cells = Rect::from_min_size((area.min + spare + vec2(left, top)).round(), size);
        let at = |r: usize, c: usize| {
            let min = cells.min + vec2(cell.x * c as f32, cell.y * r as f32);
            Rect::from_min_size(min, cell)
        };
        let gap = if cell.min_elem() > 8.0 { 1.0 } else { 0.0 };
        for r in 0..self.rows {
            for c in 0..self.cols {
                let v = self.values[r * self.cols + c];
                let fill = self.scale.color(p, v);
                painter.rect_filled(at(r, c).shrink(gap / 2.0), gap * 2.0, fill);
                let s = cell_text(v);
                if cell.x > 26.0 && cell.y > 15.0 && width(&s) < cell.x - 3.0 {
                    painter.text(at(r, c).center(), Align2::CENTER_CENTER, s, font.clone(), p.on(fill));
                }
            }
        }
        self.frame(&painter, p, &font, cells, cell, names_w);
        self.hover(ui, &response, cells, cell);
    }

    fn frame(
        &self,
        painter: &egui::Painter,
        p: &Palette,
        font: &FontId,
        cells: Rect,
        cell: egui::Vec2,
        names_w: f32,
    ) {
        let text = |pos, align, s: String, color| {
            painter.text(pos, align, s, font.clone(), color);
        };
        let turned = |pos: egui::Pos2, align: Align2, s: &str, color| {
            let galley = painter.layout_no_wrap(s.to_string(), font.clone(), color);
            // the anchor stays where it is, and the text turns around it
            let pos = align.anchor_size(pos, galley.size()).min;
            let shape = egui::epaint::TextShape::new(pos, galley, color);
            painter.add(Shape::Text(shape.with_angle_and_anchor(-std::f32::consts::FRAC_PI_2, align)));
        };
        // a name every so many cells, where they are narrow
        let every = |each: f32, need: f32| (need / each.max(0.1)).ceil().max(1.0) as usize;
        for r in (0..self.rows).step_by(every(cell.y, 12.0)) {
            let y = cells.top() + cell.y * (r as f32 + 0.5);
            text(pos2(cells.left() - 5.0, y), Align2::RIGHT_CENTER, Self::name(self.row_names, r), p.weak);
        }
        let step = if self.col_names.is_some() { every(cell.x, 12.0) } else { every(cell.x, 20.0) };
        for c in (0..self.cols).step_by(step) {
            let x = cells.left() + cell.x * (c as f32 + 0.5);
            let name = Self::name(self.col_names, c);
            if self.col_names.is_some() {
                turned(pos2(x, cells.top() - 4.0), Align2::LEFT_CENTER, &name, p.weak);
            } else {
                text(pos2(x, cells.top() - 3.0), Align2::CENTER_BOTTOM, name, p.weak);
            }
        }
        turned(
            pos2(cells.left() - names_w - 14.0, cells.center().y),
            Align2::CENTER_CENTER,
            self.row_title,
            p.text,
        );
        let above = if self.col_names.is_some() { None } else { Some(cells.top() - 18.0) };
        let place = above.unwrap_or(cells.top() - 4.0);
        if above.is_some() {
            text(pos2(cells.center().x, place), Align2::CENTER_BOTTOM, self.col_title.into(), p.text);
        } else {
            // names stand upright above the cells: the title goes below
            text(
                pos2(cells.center().x, cells.bottom() + 3.0),
                Align2::CENTER_TOP,
                self.col_title.into(),
                p.text,
            );
        }
        let mut bar_x = cells.right() + 14.0;
        if self.sums {
            bar_x += 48.0;
            let row = |r: usize| self.values[r * self.cols..(r + 1) * self.cols].iter().sum::<f64>();
            let col = |c: usize| (0..self.rows).map(|r| self.values[r * self.cols + c]).sum::<f64>();
            text(pos2(cells.right() + 6.0, cells.top() - 3.0), Align2::LEFT_BOTTOM, "row sum".into(), p.weak);
            for r in 0..self.rows {
                let y = cells.top() + cell.y * (r as f32 + 0.5);
                text(pos2(cells.right() + 6.0, y), Align2::LEFT_CENTER, number2(row(r)), p.text);
            }
            text(pos2(cells.left() - 5.0, cells.bottom() + 4.0), Align2::RIGHT_TOP, "sum".into(), p.weak);
            for c in 0..self.cols {
                let x = cells.left() + cell.x * (c as f32 + 0.5);
                let long = number2(col(c));
                let fits = painter.layout_no_wrap(long.clone(), font.clone(), p.text).size().x < cell.x - 3.0;
                let s = if fits { long } else { cell_text(col(c)) };
                text(pos2(x, cells.bottom() + 4.0), Align2::CENTER_TOP, s, p.text);
            }
        }
        // the colour bar
        let bar = Rect::from_min_max(pos2(bar_x, cells.top()), pos2(bar_x + 10.0, cells.bottom()));
        let (lo, hi) = self.scale.ends();
        let n = 48;
        for k in 0..n {
            let (t0, t1) = (k as f32 / n as f32, (k + 1) as f32 / n as f32);
            let v = hi + (lo - hi) * f64::from((t0 + t1) / 2.0);
            let (y0, y1) = (bar.top() + bar.height() * t0, bar.top() + bar.height() * t1);
            let part = Rect::from_min_max(pos2(bar.left(), y0), pos2(bar.right(), y1 + 0.5));
            painter.rect_filled(part, 0.0, self.scale.color(p, v));
        }
        painter.rect_stroke(bar, 0.0, Stroke::new(1.0, p.border), egui::StrokeKind::Outside);
        let x = bar.right() + 4.0;
        text(pos2(x, bar.top()), Align2::LEFT_CENTER, number(hi), p.weak);
        text(pos2(x, bar.bottom()), Align2::LEFT_CENTER, number(lo), p.weak);
        if lo < 0.0 {
            text(pos2(x, bar.center().y), Align2::LEFT_CENTER, "0".into(), p.weak);
        }
    }

    fn hover(&self, ui: &Ui, response: &egui::Response, cells: Rect, cell: egui::Vec2) {
        let Some(pos) = response.hover_pos().filter(|&q| cells.contains(q)) else { return };
        let p = Palette::of(ui);
        let d = pos - cells.min;
        let (c, r) =
            (((d.x / cell.x) as usize).min(self.cols - 1), ((d.y / cell.y) as usize).min(self.rows - 1));
        let v = self.values[r * self.cols + c];
        let min = cells.min + vec2(cell.x * c as f32, cell.y * r as f32);
        let stroke = Stroke::new(2.0, p.accent);
        ui.painter().rect_stroke(Rect::from_min_size(min, cell), 2.0, stroke, egui::StrokeKind::Inside);
        let (row, col) = (Self::name(self.row_names, r), Self::name(self.col_names, c));
        let words = format!("{} {row}, {} {col}: {}", self.row_title, self.col_title, number(v));
        response.clone().on_hover_text_at_pointer(words);
    }
}

/// Two decimals, and no minus before zero.
fn cell_text(v: f64) -> String {
    if !v.is_finite() || v.abs() >= 1000.0 {
        return number(v);
    }
    let s = format!("{v:.2}");
    if s == "-0.00" { "0.00".into() } else { s }
}

/// Three decimals for sums, which are compared with 1.
fn number2(v: f64) -> String {
    if v.abs() < 1000.0 { format!("{v:.3}").replace("-0.000", "0.000") } else { number(v) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_has_a_sign_where_the_values_have_one() {
        let scale = |m, v: &[f64]| Scale::of_mode(m, v.iter().copied());
        assert_eq!(scale("mhc", &[0.2, 1.0]), Scale::Sequential(1.0));
        assert_eq!(scale("hc", &[0.2, 1.3]), Scale::Diverging(1.5));
        assert_eq!(scale("mhc", &[-0.2, 1.0]), Scale::Diverging(1.0));
        assert_eq!(scale("", &[f64::NAN]), Scale::Sequential(1.0));
        assert_eq!([0.03, 1.0, 3.0, 7.0].map(ceil_nice), [0.03, 1.0, 3.0, 8.0]);
        assert_eq!((cell_text(-0.001), number2(1.0)), ("0.00".into(), "1.000".into()));
    }
}
