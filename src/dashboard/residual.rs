//! The matrices that mix the streams: of one layer, and of many layers in a row.

use egui::{RichText, Slider, Ui, vec2};

use super::app::{Cx, label};
use super::card::{Card, empty, grid};
use super::export::Table;
use super::heat::{Heat, Scale};
use super::run::RunData;
use super::text::{file_name, number};
use super::theme::Palette;
use crate::diagnose::Matrix;

/// How a run comes to have diagnoses.
pub(crate) const HOW: &str =
    "Diagnoses come every train.diagnose_every steps: `birkhoff train … --set train.diagnose_every=100`";

#[derive(Default)]
pub(crate) struct Residual {
    selected_only: bool,
}

impl Residual {
    pub fn ui(&mut self, ui: &mut Ui, cx: &mut Cx<'_>) {
        let deepest =
            |cx: &Cx<'_>| cx.visible().filter_map(|(_, r)| Some(r.snapshots.last()?.layers.len())).max();
        let Some(layers) = deepest(cx).filter(|&l| l > 0) else {
            empty(ui, "No residual matrices yet", HOW);
            return;
        };
        self.controls(ui, cx, layers);
        ui.add_space(4.0);
        let only = self.selected_only.then_some(cx.state.selected);
        let runs: Vec<(usize, &RunData)> =
            cx.visible().filter(|(i, r)| !r.snapshots.is_empty() && only.is_none_or(|s| s == *i)).collect();
        if runs.is_empty() {
            empty(ui, "The selected run has no residual matrices", HOW);
            return;
        }
        let n = runs.len();
        let side_by_side = n > 1 && super::card::fit(ui, 250.0) >= n;
        grid(ui, 2 * n, if side_by_side { n } else { 2 }, vec2(230.0, 250.0), |ui, i| {
            // run beside run with the composite below, or run below run with the composite beside
            let (run, composite) = if side_by_side { (i % n, i >= n) } else { (i / 2, i % 2 == 1) };
            matrix(ui, cx, runs[run], composite);
        });
    }

    fn controls(&mut self, ui: &mut Ui, cx: &mut Cx<'_>, layers: usize) {
        ui.horizontal_wrapped(|ui| {
            let s = &mut *cx.state;
            let last = layers - 1;
            s.layer = s.layer.min(last);
            ui.spacing_mut().slider_width = 90.0;
            let l = ui.label("layer");
            ui.add(Slider::new(&mut s.layer, 0..=last))
                .labelled_by(l.id)
                .on_hover_text("Layer (up and down)");
            ui.separator();
            let l = ui.label("composite from");
            s.from = s.from.min(last);
            ui.add(Slider::new(&mut s.from, 0..=last)).labelled_by(l.id);
            let mut to = s.to.unwrap_or(last).clamp(s.from, last);
            let l = ui.label("to");
            if ui.add(Slider::new(&mut to, 0..=last)).labelled_by(l.id).changed() {
                to = to.max(s.from);
                s.to = (to != last).then_some(to);
            }
            if cx.runs.len() > 1 {
                ui.separator();
                ui.checkbox(&mut self.selected_only, "selected run only");
            }
        });
        ui.horizontal(|ui| super::steps::bar(ui, cx));
    }
}

/// Draws the matrix of one layer, or a composite.
fn matrix(ui: &mut Ui, cx: &Cx<'_>, (i, r): (usize, &RunData), composite: bool) {
    let s = &cx.state;
    let step = s.step;
    let snapshot = r.snapshot_at(step);
    let depth = snapshot.map_or(0, |x| x.layers.len());
    let last = depth.saturating_sub(1);
    let layer = s.layer.min(last);
    let from = s.from.min(last);
    let to = s.to.unwrap_or(last).clamp(from, last);
    let get = |x: &crate::diagnose::Snapshot| if composite { x.composite(from, to) } else { x.res(layer) };
    let m: Option<Matrix> = snapshot.and_then(get);
    let what = if composite { format!("layers {from} to {to}") } else { format!("layer {layer}") };
    let title = format!("{}, {what}", label(r));
    let hint = m.as_ref().map_or(String::new(), |m| {
        let at = snapshot.map_or(0, |s| s.step);
        let gains = (number(m.forward_gain()), number(m.backward_gain()));
        format!("gain {} forward, {} backward; step {at}", gains.0, gains.1)
    });
    let kind = if composite { format!("composite-{from}-{to}") } else { format!("layer-{layer}") };
    let file = format!("residual-{}-{kind}", file_name(&r.name));
    let card = Card { title: &title, hint: "", file, keys: vec![], legend: vec![] };
    let table = || {
        let mut t = Table::new(["run", "step", "what", "output_stream", "input_stream", "value"]);
        if let (Some(m), Some(x)) = (&m, snapshot) {
            for (k, &v) in m.data().iter().enumerate() {
                let (o, c) = (k / m.n(), k % m.n());
                let step = (x.step as usize).into();
                t.row([r.name.as_str().into(), step, what.as_str().into(), o.into(), c.into(), v.into()]);
            }
        }
        t
    };
    card.show(ui, cx.exports, table, |ui| {
        let p = Palette::of(ui);
        let Some(m) = &m else {
            match snapshot {
                Some(_) if composite => empty(
                    ui,
                    "No composite",
                    "The number of slots changes between these layers, so their matrices have no product.",
                ),
                Some(_) => empty(ui, "No matrix", "This layer has none."),
                None => empty(ui, "Not measured yet", "This run has nothing at or before this step."),
            }
            return;
        };
        // one scale for the whole run: colours do not jump while it plays
        let all = r.snapshots.iter().filter_map(get);
        let scale = Scale::of_mode(r.mode(), all.flat_map(|m| m.data().to_vec()));
        let hidden = ui.available_height() < 60.0;
        if hidden {
            return;
        }
        let color = p.run(i);
        let (rect, _) = ui.allocate_exact_size(vec2(ui.available_width(), 3.0), egui::Sense::hover());
        ui.painter().rect_filled(rect, 1.5, color);
        let one = if m.n() == 1 { "; one stream, passed on as it is" } else { "" };
        ui.add(egui::Label::new(RichText::new(hint + one).small().color(p.weak)).truncate());
        let n = m.n();
        let heat = Heat {
            rows: n,
            cols: n,
            values: m.data(),
            row_title: "output stream",
            col_title: "input stream",
            row_names: None,
            col_names: None,
            scale,
            sums: true,
            square: true,
        };
        heat.show(ui);
    });
}
