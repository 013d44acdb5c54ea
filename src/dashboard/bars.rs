//! Horizontal bars: a label, a bar of coloured parts, a text.

use egui::{Align2, Color32, FontId, Rect, ScrollArea, Sense, Ui, pos2, vec2};

use super::text::shorten;
use super::theme::Palette;

/// A bar.
pub(crate) struct Bar {
    pub label: String,
    /// What stands after it.
    pub text: String,
    /// Lengths and colours, in order.
    pub parts: Vec<(f64, Color32)>,
    /// Shown when the pointer is on it.
    pub tip: String,
}

impl Bar {
    fn total(&self) -> f64 {
        self.parts.iter().map(|p| p.0).sum()
    }
}

/// Draws bars below each other, the longest over the whole width; scrolls where they do not fit.
pub(crate) fn bars(ui: &mut Ui, bars: &[Bar]) {
    let p = Palette::of(ui);
    let most = bars.iter().map(Bar::total).fold(0.0, f64::max);
    let font = FontId::proportional(12.0);
    let width = |ui: &Ui, s: &str| ui.painter().layout_no_wrap(s.into(), font.clone(), p.text).size().x;
    let labels: Vec<String> = bars.iter().map(|b| shorten(&b.label, 24)).collect();
    let left = labels.iter().map(|l| width(ui, l)).fold(0.0, f32::max) + 10.0;
    let right = bars.iter().map(|b| width(ui, &b.text)).fold(0.0, f32::max) + 10.0;
    ScrollArea::vertical().auto_shrink(false).show(ui, |ui| {
        ui.spacing_mut().item_spacing.y = 2.0;
        for (b, label) in bars.iter().zip(&labels) {
            let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), 19.0), Sense::hover());
            let painter = ui.painter();
            let y = rect.center().y;
            painter.text(pos2(rect.left(), y), Align2::LEFT_CENTER, label, font.clone(), p.text);
            let track = (rect.width() - left - right).max(8.0);
            let mut x = rect.left() + left;
            for &(v, color) in &b.parts {
                let w = if most > 0.0 { (v / most) as f32 * track } else { 0.0 };
                painter.rect_filled(Rect::from_min_max(pos2(x, y - 6.0), pos2(x + w, y + 6.0)), 1.5, color);
                x += w;
            }
            painter.text(pos2(x + 6.0, y), Align2::LEFT_CENTER, &b.text, font.clone(), p.weak);
            if !b.tip.is_empty() {
                response.on_hover_text(&b.tip);
            }
        }
    });
}
