//! What the streams carry and what the modules add: pre and post weights, similarity of streams, the size of
//! each module's contribution, attention maps.

use egui::{ComboBox, Id, RichText, Slider, Ui, vec2};
use egui_plot::PlotPoint;

use super::app::{Cx, label, run_picker};
use super::card::{Card, Key, empty, grid};
use super::chart::{Chart, Curve, Seen, Unit};
use super::export::Table;
use super::heat::{Heat, Scale};
use super::run::RunData;
use super::text::{file_name, number};
use super::theme::Palette;
use crate::diagnose::LayerStats;

/// A scalar of a layer.
type Quantity = (&'static str, &'static str, fn(&LayerStats) -> f64);

/// What can be shown by layer: title, name of the column, value.
const QUANTITIES: [Quantity; 6] = [
    ("Cosine between streams", "stream_cosine", |l| l.stream_cosine),
    ("Gradient norm", "grad_norm", |l| l.grad_norm),
    ("Size of the residual state (RMS)", "state_rms", |l| l.state_rms),
    ("Second singular value", "second_singular", |l| l.second_singular),
    ("Entropy of rows (nats)", "row_entropy", |l| l.row_entropy),
    ("Greatest row sum of any token", "row_sum_max", |l| l.row_sum_max),
];

pub(crate) struct Streams {
    module: String,
    quantities: [usize; 2],
}

impl Default for Streams {
    fn default() -> Self {
        Streams { module: String::new(), quantities: [0, 1] }
    }
}

impl Streams {
    pub fn ui(&mut self, ui: &mut Ui, cx: &mut Cx<'_>) {
        let Some(r) = cx.selected() else { return };
        let none = r.diagnoses.is_empty() && r.snapshots.is_empty();
        ui.horizontal_wrapped(|ui| {
            run_picker(ui, cx);
            if !none {
                ui.separator();
                self.layer(ui, cx);
            }
        });
        if !none {
            ui.horizontal(|ui| super::steps::bar(ui, cx));
        }
        ui.add_space(4.0);
        let Some(r) = cx.selected() else { return };
        if r.diagnoses.is_empty() && r.snapshots.is_empty() {
            empty(ui, &format!("{} was not diagnosed yet", r.name), super::residual::HOW);
            return;
        }
        grid(ui, 6, 3, vec2(255.0, 230.0), |ui, i| match i {
            0 => weights(ui, cx, r, false),
            1 => weights(ui, cx, r, true),
            2 => self.attention(ui, cx, r),
            3 => contributions(ui, cx, r),
            k => self.by_layer(ui, cx, k - 4),
        });
    }

    fn layer(&mut self, ui: &mut Ui, cx: &mut Cx<'_>) {
        let Some(x) = cx.selected().and_then(|r| r.snapshot_at(cx.state.step)) else { return };
        if x.layers.is_empty() {
            return;
        }
        let last = x.layers.len() - 1;
        let mut layer = cx.state.layer.min(last);
        ui.spacing_mut().slider_width = 90.0;
        let l = ui.label("layer");
        let r =
            ui.add(Slider::new(&mut layer, 0..=last)).labelled_by(l.id).on_hover_text("Layer (up and down)");
        if r.changed() || cx.state.layer > last {
            cx.state.layer = layer;
        }
    }

    fn attention(&mut self, ui: &mut Ui, cx: &Cx<'_>, r: &RunData) {
        let x = r.snapshot_at(cx.state.step);
        let layer = cx.state.layer.min(x.map_or(0, |x| x.layers.len().saturating_sub(1)));
        let modules = x.and_then(|x| x.layers.get(layer)).map_or(&[][..], |l| &l.modules);
        let chosen = modules.iter().find(|m| m.name == self.module).or(modules.first());
        let values: Vec<f64> = chosen.map_or(vec![], |m| m.attention.iter().map(|&v| f64::from(v)).collect());
        let slots = chosen.map_or(0, |m| m.slots);
        // only the first layer's slots are the features themselves
        let names = (layer == 0 && r.slots.len() == slots).then_some(&r.slots[..]);
        let name = chosen.map_or("attention", |m| m.name.as_str());
        let hint = format!("layer {layer}, mean of heads and rows");
        let title = format!("Attention map: {name}");
        let file = format!("streams-{}-layer-{layer}-{name}", file_name(&r.name));
        let card = Card { title: &title, hint: &hint, file, keys: vec![], legend: vec![] };
        let table = || {
            let mut t = Table::new(["query_slot", "key_slot", "weight"]);
            let name = |i: usize| names.and_then(|n| n.get(i)).cloned().unwrap_or_else(|| i.to_string());
            for (k, &v) in values.iter().enumerate() {
                t.row([name(k / slots).into(), name(k % slots).into(), v.into()]);
            }
            t
        };
        let mut choose = None;
        card.show(ui, cx.exports, table, |ui| {
            if modules.len() > 1 {
                ui.horizontal(|ui| {
                    for m in modules {
                        if ui.selectable_label(m.name == name, &m.name).clicked() {
                            choose = Some(m.name.clone());
                        }
                    }
                });
            }
            if values.is_empty() {
                empty(ui, "No attention in this layer", "Attention and transformer modules have such a map.");
                return;
            }
            let most = values.iter().copied().fold(0.0, f64::max);
            let heat = Heat {
                rows: slots,
                cols: slots,
                values: &values,
                row_title: "query slot",
                col_title: "key slot",
                row_names: names,
                col_names: names,
                scale: Scale::Sequential(super::heat::ceil_nice(most)),
                sums: false,
                square: true,
            };
            heat.show(ui);
        });
        if let Some(m) = choose {
            self.module = m;
        }
    }

    /// A scalar of each layer, all visible runs over each other.
    fn by_layer(&mut self, ui: &mut Ui, cx: &Cx<'_>, which: usize) {
        let p = Palette::of(ui);
        let (title, column, get) = QUANTITIES[self.quantities[which]];
        let data: Vec<(usize, &RunData, u64, Vec<f64>)> = cx
            .visible()
            .filter_map(|(i, r)| {
                let d = r.diagnosis_at(cx.state.step)?;
                Some((i, r, d.step, d.layers.iter().map(get).collect()))
            })
            .collect();
        let card = Card {
            title,
            hint: "by layer",
            file: format!("streams-{}", column.replace('_', "-")),
            keys: vec![],
            legend: cx.legend(p),
        };
        let table = || {
            let mut t = Table::new(["run", "step", "layer", column]);
            for (_, r, step, y) in &data {
                for (l, &v) in y.iter().enumerate() {
                    t.row([r.name.as_str().into(), (*step as usize).into(), l.into(), v.into()]);
                }
            }
            t
        };
        card.show(ui, cx.exports, table, |ui| {
            let chosen = &mut self.quantities[which];
            let combo = ComboBox::from_id_salt(("quantity", which)).width(190.0);
            let r = combo.selected_text(QUANTITIES[*chosen].0).show_ui(ui, |ui| {
                for (k, q) in QUANTITIES.iter().enumerate() {
                    ui.selectable_value(chosen, k, q.0);
                }
            });
            r.response.widget_info(|| {
                egui::WidgetInfo::labeled(egui::Role::ComboBox, true, format!("quantity by layer: {title}"))
            });
            let list: Vec<Line<'_>> = data
                .iter()
                .map(|(i, r, _, y)| Line { name: &r.name, says: label(r), color: p.run(*i), y })
                .collect();
            lines(ui, Id::unique(("by layer", which, column)), &list);
        });
    }
}

/// Pre or post weights of every layer and stream.
fn weights(ui: &mut Ui, cx: &Cx<'_>, r: &RunData, post: bool) {
    let x = r.snapshot_at(cx.state.step);
    let n = x.map_or(0, |x| x.streams);
    let of = |l: &crate::diagnose::LayerSnapshot| -> Vec<f64> {
        let w = if post { &l.post } else { &l.pre };
        w.iter().map(|&v| f64::from(v)).collect()
    };
    let rows: Vec<Vec<f64>> = x.map_or(vec![], |x| x.layers.iter().map(of).collect());
    let (title, hint, word) = match post {
        false => ("Pre weights", "how much of each stream a layer reads", "pre"),
        true => ("Post weights", "how much of its output goes to each stream", "post"),
    };
    let card = Card {
        title,
        hint,
        file: format!("streams-{}-{word}", file_name(&r.name)),
        keys: vec![],
        legend: vec![],
    };
    let table = || {
        let mut t = Table::new(["layer", "stream", word]);
        for (l, row) in rows.iter().enumerate() {
            row.iter().enumerate().for_each(|(s, &v)| t.row([l.into(), s.into(), v.into()]));
        }
        t
    };
    card.show(ui, cx.exports, table, |ui| {
        let values: Vec<f64> = rows.iter().flatten().copied().collect();
        if n == 0 || values.len() != rows.len() * n {
            empty(ui, "No snapshot at this step", "Choose a later one, or the newest.");
            return;
        }
        let all = r.snapshots.iter().flat_map(|x| x.layers.iter().flat_map(of));
        let heat = Heat {
            rows: rows.len(),
            cols: n,
            values: &values,
            row_title: "layer",
            col_title: "stream",
            row_names: None,
            col_names: None,
            scale: Scale::of_mode(r.mode(), all),
            sums: false,
            square: false,
        };
        heat.show(ui);
    });
}

/// Size of each module's contribution by layer.
fn contributions(ui: &mut Ui, cx: &Cx<'_>, r: &RunData) {
    let p = Palette::of(ui);
    let d = r.diagnosis_at(cx.state.step);
    let layers = d.map_or(&[][..], |d| &d.layers);
    let mut names: Vec<&str> = vec![];
    for m in layers.iter().flat_map(|l| &l.modules) {
        if !names.contains(&m.name.as_str()) {
            names.push(&m.name);
        }
    }
    let find = |l: &LayerStats, n: &str| l.modules.iter().find(|m| m.name == n).map(|m| (m.rms, m.weight));
    let weighted = layers.iter().flat_map(|l| &l.modules).any(|m| m.weight != 1.0);
    let hint = if weighted { "RMS, ensemble weight included" } else { "RMS by layer" };
    let keys: Vec<Key> = names
        .iter()
        .enumerate()
        .map(|(k, n)| Key { text: n.to_string(), color: p.kind(k), dashed: false })
        .collect();
    let file = format!("streams-{}-contributions", file_name(&r.name));
    let card = Card { title: "Module contributions", hint, file, keys, legend: vec![] };
    let table = || {
        let mut t = Table::new(["layer", "module", "rms", "ensemble_weight"]);
        for (l, s) in layers.iter().enumerate() {
            for m in &s.modules {
                t.row([l.into(), m.name.as_str().into(), m.rms.into(), m.weight.into()]);
            }
        }
        t
    };
    card.show(ui, cx.exports, table, |ui| {
        if names.is_empty() {
            empty(ui, "No contributions measured", super::residual::HOW);
            return;
        }
        let values: Vec<Vec<f64>> = names
            .iter()
            .map(|n| layers.iter().map(|l| find(l, n).map_or(f64::NAN, |m| m.0)).collect())
            .collect();
        let list: Vec<Line<'_>> = names
            .iter()
            .zip(&values)
            .enumerate()
            .map(|(k, (name, y))| Line { name, says: name.to_string(), color: p.kind(k), y })
            .collect();
        lines(ui, Id::unique("contributions"), &list);
        if weighted {
            ui.label(RichText::new("weights are in the CSV").small().color(p.weak));
        }
    });
}

/// A value for each layer.
struct Line<'a> {
    name: &'a str,
    says: String,
    color: egui::Color32,
    y: &'a [f64],
}

fn lines(ui: &mut Ui, id: Id, list: &[Line<'_>]) {
    let points: Vec<Vec<PlotPoint>> = list
        .iter()
        .map(|l| {
            let some = l.y.iter().enumerate().filter(|(_, v)| v.is_finite());
            some.map(|(k, &v)| PlotPoint::new(k as f64, v)).collect()
        })
        .collect();
    let curves: Vec<Curve<'_>> = list
        .iter()
        .zip(&points)
        .map(|(l, points)| Curve {
            name: l.name,
            color: l.color,
            points,
            width: 1.8,
            dashed: false,
            dots: true,
        })
        .collect();
    let chart = Chart {
        id,
        x_label: "layer",
        x_unit: Unit::Index,
        y_unit: Unit::Plain,
        log_x: false,
        log_y: false,
        band: None,
        fit: None,
        link: None,
        mark: None,
    };
    chart.show(ui, &curves, |x| {
        let l = x.round().max(0.0) as usize;
        let seen = list.iter().filter_map(|line| {
            let v = *line.y.get(l)?;
            let at = v.is_finite().then(|| PlotPoint::new(l as f64, v));
            Some(Seen { color: line.color, name: line.says.clone(), value: number(v), at })
        });
        seen.collect()
    });
}
