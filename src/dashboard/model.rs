//! The model's parts: parameters, arithmetic, shapes.

use egui::{
    Align, Align2, FontId, Frame, Layout, Margin, Rect, RichText, ScrollArea, Sense, Stroke, Ui, pos2, vec2,
};

use super::app::{Cx, label, run_picker};
use super::card::{Card, Key, empty};
use super::export::Table;
use super::text::{bytes, file_name, group, short, shorten};
use super::theme::Palette;
use crate::diagnose::{ModelCard, PartCard};

pub(crate) fn ui(ui: &mut Ui, cx: &mut Cx<'_>) {
    ui.horizontal_wrapped(|ui| run_picker(ui, cx));
    ui.add_space(4.0);
    let Some(r) = cx.selected() else { return };
    let Some(m) = &r.card else {
        let what = format!("{} does not describe its model", r.name);
        empty(
            ui,
            &what,
            "A run begun by this version does: `birkhoff train … --out RUN` A configuration's costs are shown by `birkhoff inspect CONFIG`",
        );
        return;
    };
    facts(ui, m);
    ui.add_space(8.0);
    let p = Palette::of(ui);
    let keys = vec![
        Key { text: "forward".into(), color: p.kind(0), dashed: false },
        Key { text: "backward".into(), color: p.kind(1), dashed: false },
        Key { text: "parameters".into(), color: p.kind(2), dashed: false },
    ];
    let title = format!("Parts of {}", label(r));
    let card = Card {
        title: &title,
        hint: "in order",
        file: format!("model-{}", file_name(&r.name)),
        keys,
        legend: vec![],
    };
    let rows = flat(&m.parts);
    let table = || {
        let mut t = Table::new(["part", "output", "parameters", "flops_forward", "flops_backward"]);
        for (_, path, c) in &rows {
            let (out, n) = (c.output.as_str().into(), c.parameters.into());
            t.row([path.as_str().into(), out, n, c.flops_forward.into(), c.flops_backward.into()]);
        }
        t
    };
    let rect = ui.available_rect_before_wrap();
    ui.scope_builder(egui::UiBuilder::new().max_rect(rect), |ui| {
        card.show(ui, cx.exports, table, |ui| parts(ui, &rows));
    });
}

/// The numbers of the whole model, each in a box.
fn facts(ui: &mut Ui, m: &ModelCard) {
    let p = Palette::of(ui);
    let mode = match m.mode.as_str() {
        "mhc" => "mHC",
        "hc" => "HC",
        other => other,
    };
    let streams = if m.streams == 1 { "one stream".into() } else { format!("{} streams", m.streams) };
    let saved = 100.0 * (1.0 - m.memory_planned as f64 / m.memory_unshared.max(1) as f64);
    let facts = [
        ("parameters", short(m.parameters as f64), group(m.parameters as u64)),
        ("arithmetic", spaced(m.flops_per_step), "a training step".to_string()),
        ("traffic", bytes(m.bytes_per_step), "moved a step".to_string()),
        ("memory", bytes(m.memory_planned as f64), format!("{saved:.0} % saved by reuse")),
        ("batch", group(m.batch as u64), format!("rows, width {}", m.width)),
        ("residual", mode.to_string(), streams),
    ];
    let gap = 8.0;
    let columns = ((ui.available_width() / 128.0) as usize).clamp(2, facts.len());
    let width = (ui.available_width() - gap * (columns - 1) as f32) / columns as f32;
    for line in facts.chunks(columns) {
        ui.horizontal(|ui| {
            ui.spacing_mut().item_spacing.x = gap;
            for (name, big, small) in line {
                let frame = Frame::new()
                    .fill(p.card)
                    .stroke(Stroke::new(1.0, p.border))
                    .corner_radius(6)
                    .inner_margin(Margin::symmetric(10, 6));
                frame.show(ui, |ui| {
                    ui.set_width(width - 22.0);
                    ui.with_layout(Layout::top_down(Align::LEFT), |ui| {
                        ui.spacing_mut().item_spacing.y = 1.0;
                        ui.label(RichText::new(*name).small().color(p.weak));
                        ui.label(RichText::new(big).size(17.0).strong());
                        ui.label(RichText::new(small).small().color(p.weak));
                    });
                });
            }
        });
    }
}

/// 3.6 GFLOP.
fn spaced(flops: f64) -> String {
    let s = short(flops);
    match s.strip_suffix(|c: char| c.is_ascii_alphabetic()) {
        Some(digits) => format!("{digits} {}FLOP", &s[digits.len()..]),
        None => format!("{s} FLOP"),
    }
}

/// The parts with their depth and full name, children after their parent.
fn flat(parts: &[PartCard]) -> Vec<(usize, String, &PartCard)> {
    fn walk<'a>(
        depth: usize,
        above: &str,
        parts: &'a [PartCard],
        out: &mut Vec<(usize, String, &'a PartCard)>,
    ) {
        for p in parts {
            let full = above.is_empty() || p.name.starts_with(above);
            let path = if full { p.name.clone() } else { format!("{above}.{}", p.name) };
            out.push((depth, path.clone(), p));
            walk(depth + 1, &path, &p.children, out);
        }
    }
    let mut out = vec![];
    walk(0, "", parts, &mut out);
    out
}

/// A line a part: name, shape, arithmetic, parameters.
fn parts(ui: &mut Ui, rows: &[(usize, String, &PartCard)]) {
    let p = Palette::of(ui);
    let font = FontId::proportional(12.5);
    let tops = || rows.iter().filter(|r| r.0 == 0).map(|r| r.2);
    let most_flops = tops().map(|c| c.flops_forward + c.flops_backward).fold(1.0, f64::max);
    let most_params = tops().map(|c| c.parameters).max().unwrap_or(1).max(1) as f64;
    let room = ui.available_width();
    // names, shapes, then two bars
    let x = [0.0, (room * 0.24).max(130.0), (room * 0.44).max(250.0), (room * 0.73).max(400.0)];
    let bar_room = [x[3] - x[2] - 80.0, room - x[3] - 76.0].map(|w: f32| w.max(20.0));
    let head = |ui: &mut Ui| {
        let (rect, _) = ui.allocate_exact_size(vec2(room, 18.0), Sense::hover());
        for (x, s) in x.iter().zip(["part", "output shape", "arithmetic a step (FLOP)", "parameters"]) {
            let pos = pos2(rect.left() + x, rect.center().y);
            ui.painter().text(pos, Align2::LEFT_CENTER, s, FontId::proportional(11.0), p.weak);
        }
    };
    head(ui);
    ScrollArea::vertical().auto_shrink(false).show(ui, |ui| {
        ui.spacing_mut().item_spacing.y = 1.0;
        for (depth, path, c) in rows {
            let (rect, response) = ui.allocate_exact_size(vec2(room, 21.0), Sense::hover());
            let painter = ui.painter_at(rect);
            if response.hovered() {
                painter.rect_filled(rect, 3.0, p.track);
            }
            let y = rect.center().y;
            let indent = *depth as f32 * 16.0;
            let color = if *depth == 0 { p.text } else { p.weak };
            let short_name = c.name.rsplit('.').next().unwrap_or(&c.name);
            let name = if *depth == 0 { &c.name } else { short_name };
            // what belongs to no part of the model
            let name = if name.is_empty() { "other" } else { name };
            let text = |dx: f32, s: String, color| {
                painter.text(pos2(rect.left() + dx, y), Align2::LEFT_CENTER, s, font.clone(), color);
            };
            text(x[0] + indent, shorten(name, 24), color);
            let shape_room = ((x[2] - x[1]) / 7.0) as usize;
            text(x[1], shorten(&c.output, shape_room), p.weak);
            let bar = |from: f32, w: f32, color| {
                let h = if *depth == 0 { 6.0 } else { 4.0 };
                let r =
                    Rect::from_min_max(pos2(rect.left() + from, y - h), pos2(rect.left() + from + w, y + h));
                painter.rect_filled(r, 1.5, color);
            };
            let fade = |c: egui::Color32| if *depth == 0 { c } else { c.gamma_multiply(0.6) };
            let (f, b) = (c.flops_forward, c.flops_backward);
            let w = |v: f64| (v / most_flops).min(1.0) as f32 * bar_room[0];
            bar(x[2], w(f), fade(p.kind(0)));
            bar(x[2] + w(f), w(b), fade(p.kind(1)));
            text(x[2] + w(f + b) + 6.0, if f + b > 0.0 { short(f + b) } else { "–".into() }, color);
            let w = (c.parameters as f64 / most_params).min(1.0) as f32 * bar_room[1];
            bar(x[3], w, fade(p.kind(2)));
            text(
                x[3] + w + 6.0,
                if c.parameters > 0 { short(c.parameters as f64) } else { "–".into() },
                color,
            );
            response.on_hover_text(format!(
                "{path}\noutput {}\n{} parameters\nforward {}, backward {}",
                if c.output.is_empty() { "–" } else { &c.output },
                group(c.parameters as u64),
                spaced(f),
                spaced(b)
            ));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_flattened_with_full_names() {
        let leaf = |n: &str| PartCard { name: n.into(), ..PartCard::default() };
        let layer = PartCard { children: vec![leaf("attention"), leaf("layers.0.mhc")], ..leaf("layers.0") };
        let list = [layer, leaf("head")];
        let rows: Vec<_> = flat(&list).into_iter().map(|(d, n, _)| (d, n)).collect();
        let rows: Vec<(usize, &str)> = rows.iter().map(|(d, n)| (*d, n.as_str())).collect();
        assert_eq!(rows, [(0, "layers.0"), (1, "layers.0.attention"), (1, "layers.0.mhc"), (0, "head")]);
    }
}
