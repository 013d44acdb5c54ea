//! Where the time of a training step goes: by operation, by stage, by layer.

use std::collections::BTreeMap;

use egui::{Rect, RichText, Sense, Ui, pos2, vec2};

use super::app::{Cx, label, run_picker};
use super::bars::{Bar, bars};
use super::card::{Card, Key, empty, grid};
use super::export::Table;
use super::text::{micros, number};
use super::theme::Palette;
use crate::diagnose::TimeReport;

/// The stages in the order in which they run.
const STAGES: [&str; 3] = ["forward", "backward", "update"];

/// Where a stage stands; others come after the known ones.
fn stage_index(s: &str) -> usize {
    STAGES.iter().position(|x| *x == s).unwrap_or(STAGES.len())
}

/// Time by stage of everything that has one key.
struct Sum {
    key: String,
    stages: [f64; STAGES.len() + 1],
    calls: usize,
}

impl Sum {
    fn total(&self) -> f64 {
        self.stages.iter().sum()
    }
}

/// Sums rows by a key, in order of first appearance.
fn sums(t: &TimeReport, key: impl Fn(&crate::diagnose::TimeRow) -> String) -> Vec<Sum> {
    let mut out: Vec<Sum> = vec![];
    let mut at: BTreeMap<String, usize> = BTreeMap::new();
    for r in &t.rows {
        let key = key(r);
        let i = *at.entry(key.clone()).or_insert_with(|| {
            out.push(Sum { key, stages: [0.0; STAGES.len() + 1], calls: 0 });
            out.len() - 1
        });
        out[i].stages[stage_index(&r.stage)] += r.micros;
        out[i].calls += r.calls;
    }
    out
}

/// The part of the model that a scope belongs to: `layers.0.attention` → `layers.0`.
fn part(scope: &str) -> String {
    let mut words = scope.split('.');
    match (words.next(), words.next()) {
        (Some("layers"), Some(i)) => format!("layers.{i}"),
        (Some(w), _) if !w.is_empty() => w.to_string(),
        _ => "other".to_string(),
    }
}

pub(crate) fn ui(ui: &mut Ui, cx: &mut Cx<'_>) {
    let p = Palette::of(ui);
    ui.horizontal_wrapped(|ui| run_picker(ui, cx));
    ui.add_space(4.0);
    let Some(r) = cx.selected() else { return };
    let Some(t) = r.time.as_ref().filter(|t| !t.rows.is_empty()) else {
        empty(
            ui,
            &format!("{} has no time report", r.name),
            "The eighth step writes one, on the CPU and on GPUs with timestamps.",
        );
        return;
    };
    let total: f64 = t.rows.iter().map(|r| r.micros).sum();
    let share = |us: f64| format!("{} %", number((1000.0 * us / total.max(1e-9)).round() / 10.0));
    let keys: Vec<Key> = STAGES
        .iter()
        .enumerate()
        .map(|(i, s)| Key { text: s.to_string(), color: p.kind(i), dashed: false })
        .collect();
    let clock = if t.clock == "device" { "the device's own timestamps" } else { "the host's clock" };
    let wall = if t.wall_micros > 0.0 {
        format!("; {} from begin to end", micros(t.wall_micros))
    } else {
        String::new()
    };
    let about = format!("step {} on {}, {} in operations by {clock}{wall}", t.step, t.device, micros(total));
    ui.label(RichText::new(about).color(p.weak));
    ui.add_space(2.0);
    let bar = |s: &Sum| Bar {
        label: s.key.clone(),
        text: format!("{}, {}", micros(s.total()), share(s.total())),
        parts: s.stages.iter().enumerate().map(|(i, &v)| (v, p.kind(i))).collect(),
        tip: format!(
            "{}: {} calls\nforward {}, backward {}, update {}",
            s.key,
            s.calls,
            micros(s.stages[0]),
            micros(s.stages[1]),
            micros(s.stages[2])
        ),
    };
    let csv = |name: &str, list: &[Sum]| {
        let mut t = Table::new([
            name,
            "forward_us",
            "backward_us",
            "update_us",
            "other_us",
            "total_us",
            "share",
            "calls",
        ]);
        for s in list {
            let [f, b, u, o] = s.stages;
            let (sum, calls) = (s.total(), s.calls);
            t.row([
                s.key.as_str().into(),
                f.into(),
                b.into(),
                u.into(),
                o.into(),
                sum.into(),
                (sum / total).into(),
                calls.into(),
            ]);
        }
        t
    };
    let (title, file) = (label(r), super::text::file_name(&r.name));
    let stages = sums(t, |r| r.stage.clone());
    share_card(ui, cx, &title, &file, &stages, total, csv("stage", &stages));
    ui.add_space(8.0);
    let mut ops = sums(t, |r| r.op.clone());
    ops.sort_by(|a, b| b.total().total_cmp(&a.total()));
    let parts = sums(t, |r| part(&r.scope));
    grid(ui, 2, 2, vec2(330.0, 260.0), |ui, i| {
        let (name, hint, kind, list) = match i {
            0 => ("Time by operation", "the longest first", "operation", &ops),
            _ => ("Time by part of the model", "in order of execution", "part", &parts),
        };
        let card = Card {
            title: name,
            hint,
            file: format!("time-{kind}-{file}"),
            keys: keys.clone(),
            legend: vec![],
        };
        card.show(
            ui,
            cx.exports,
            || csv(kind, list),
            |ui| {
                bars(ui, &list.iter().map(bar).collect::<Vec<_>>());
            },
        );
    });
}

/// One bar that is the whole step, divided into stages.
fn share_card(ui: &mut Ui, cx: &Cx<'_>, title: &str, file: &str, stages: &[Sum], total: f64, table: Table) {
    let p = Palette::of(ui);
    let size = vec2(ui.available_width(), 100.0);
    let percent = |s: &Sum| 100.0 * s.total() / total.max(1e-9);
    let keys = stages.iter().map(|s| Key {
        text: format!("{} {:.1} %, {}", s.key, percent(s), micros(s.total())),
        color: p.kind(stage_index(&s.key)),
        dashed: false,
    });
    let keys = keys.collect();
    ui.allocate_ui(size, |ui| {
        ui.set_max_height(size.y);
        let card = Card {
            title: "Share of each stage",
            hint: title,
            file: format!("time-stages-{file}"),
            keys,
            legend: vec![],
        };
        card.show(
            ui,
            cx.exports,
            || table,
            |ui| {
                let (rect, _) = ui.allocate_exact_size(vec2(ui.available_width(), 26.0), Sense::hover());
                let mut x = rect.left();
                for s in stages {
                    let color = p.kind(stage_index(&s.key));
                    let w = rect.width() * (s.total() / total.max(1e-9)) as f32;
                    let part = Rect::from_min_max(pos2(x, rect.top()), pos2(x + w, rect.bottom()));
                    ui.painter().rect_filled(part.shrink2(vec2(0.5, 0.0)), 2.0, color);
                    x += w;
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::TimeRow;

    #[test]
    fn time_is_summed_by_part_and_stage() {
        let row = |op: &str, stage: &str, scope: &str, micros| TimeRow {
            op: op.into(),
            stage: stage.into(),
            scope: scope.into(),
            calls: 1,
            micros,
        };
        let rows = vec![
            row("matmul", "forward", "layers.0.attention", 3.0),
            row("matmul", "backward", "layers.0.mhc", 4.0),
            row("map", "update", "", 5.0),
        ];
        let t = TimeReport { rows, ..TimeReport::default() };
        let s = sums(&t, |r| part(&r.scope));
        let flat: Vec<_> = s.iter().map(|s| (s.key.as_str(), s.stages, s.calls)).collect();
        assert_eq!(flat, [("layers.0", [3.0, 4.0, 0.0, 0.0], 2), ("other", [0.0, 0.0, 5.0, 0.0], 1)]);
    }
}
