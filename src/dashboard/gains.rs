//! How much the residual stream can grow: gains of single layers and of composites, forward and backward,
//! along depth and over training. A model whose composite gains stay near 1 neither explodes nor vanishes.

use egui::{Color32, Id, RichText, Ui, vec2};
use egui_plot::PlotPoint;

use super::app::{Cx, label};
use super::card::{Card, Key, empty, grid};
use super::chart::{Chart, Curve, Seen, Unit};
use super::export::Table;
use super::run::RunData;
use super::text::number;
use super::theme::Palette;
use crate::diagnose::Record;

/// Gains between these are called harmless: a third to three times.
const BAND: (f64, f64) = (1.0 / 3.0, 3.0);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Way {
    Forward,
    Backward,
}

/// A pair of curves of one record, by layer.
struct Depth<'a> {
    composite: &'a [f64],
    single: Vec<f64>,
}

/// Colour and name of a way, its composite gains, those of single layers.
type Both = (Color32, &'static str, Vec<(f64, f64)>, Vec<(f64, f64)>);

pub(crate) struct Gains {
    apart: bool,
    tokens: bool,
    log: bool,
}

impl Default for Gains {
    fn default() -> Self {
        Gains { apart: false, tokens: false, log: true }
    }
}

impl Gains {
    pub fn ui(&mut self, ui: &mut Ui, cx: &mut Cx<'_>) {
        ui.horizontal_wrapped(|ui| {
            ui.selectable_value(&mut self.apart, false, "over each other");
            ui.selectable_value(&mut self.apart, true, "side by side");
            ui.separator();
            ui.checkbox(&mut self.log, "log y");
            ui.checkbox(&mut self.tokens, "token by token")
                .on_hover_text("The mean of each token's own gain, in place of the gain of the mean matrix");
            band_label(ui);
        });
        ui.horizontal(|ui| super::steps::bar(ui, cx));
        ui.add_space(4.0);
        let runs: Vec<(usize, &RunData)> = cx.visible().filter(|(_, r)| !r.diagnoses.is_empty()).collect();
        if runs.is_empty() {
            empty(ui, "No diagnosis yet", super::residual::HOW);
            return;
        }
        // the same scale for all, so that runs can be compared by eye
        let mut fit = (BAND.0 * 0.9, BAND.1 * 1.1);
        for (_, r) in &runs {
            for d in &r.diagnoses {
                for w in [Way::Forward, Way::Backward] {
                    let all = self.composite(d, w).iter().filter(|v| v.is_finite() && **v > 0.0);
                    fit = all.fold(fit, |(a, b), &v| (a.min(v), b.max(v)));
                }
            }
        }
        if self.apart {
            let n = runs.len();
            let most = n.min(super::card::fit(ui, 240.0)).clamp(1, 4);
            grid(ui, 2 * n, most, vec2(200.0, 210.0), |ui, i| {
                // the columns of a grid are filled row by row: pair each run's two plots in a column
                let (block, rest) = (i / (2 * most), i % (2 * most));
                let here = most.min(n - block * most);
                let (k, training) = (block * most + rest % here, rest >= here);
                if k < n {
                    self.one(ui, cx, runs[k], training, fit);
                }
            });
        } else {
            grid(ui, 4, 2, vec2(320.0, 210.0), |ui, i| {
                let way = if i % 2 == 0 { Way::Forward } else { Way::Backward };
                if i < 2 { self.depth(ui, cx, &runs, way) } else { self.training(ui, cx, &runs, way) }
            });
        }
    }

    fn composite<'a>(&self, d: &'a Record, w: Way) -> &'a [f64] {
        match (w, self.tokens) {
            (Way::Forward, false) => &d.composite_forward,
            (Way::Backward, false) => &d.composite_backward,
            (Way::Forward, true) => &d.token_composite_forward,
            (Way::Backward, true) => &d.token_composite_backward,
        }
    }

    fn at<'a>(&self, d: &'a Record, w: Way) -> Depth<'a> {
        let single = d.layers.iter().map(|l| match (w, self.tokens) {
            (Way::Forward, false) => l.forward_gain,
            (Way::Backward, false) => l.backward_gain,
            (Way::Forward, true) => l.token_forward_gain,
            (Way::Backward, true) => l.token_backward_gain,
        });
        Depth { composite: self.composite(d, w), single: single.collect() }
    }

    /// Points in drawn coordinates; what has no logarithm is left out.
    fn points(&self, xy: impl Iterator<Item = (f64, f64)>) -> Vec<PlotPoint> {
        let xy = xy.filter(|(_, y)| y.is_finite() && (!self.log || *y > 0.0));
        xy.map(|(x, y)| PlotPoint::new(x, if self.log { y.log10() } else { y })).collect()
    }

    fn by_layer(&self, y: &[f64]) -> Vec<PlotPoint> {
        self.points(y.iter().enumerate().map(|(i, &y)| (i as f64, y)))
    }

    fn chart<'a>(&self, id: Id, x_label: &'a str, x_unit: Unit, fit: (f64, f64)) -> Chart<'a> {
        let id = id.with((self.log, self.tokens));
        Chart {
            id,
            x_label,
            x_unit,
            y_unit: Unit::Plain,
            log_x: false,
            log_y: self.log,
            band: Some(BAND),
            fit: Some(fit),
            link: Some(Id::unique(("gains", x_label))),
            mark: None,
        }
    }

    fn depth(&self, ui: &mut Ui, cx: &Cx<'_>, runs: &[(usize, &RunData)], way: Way) {
        let p = Palette::of(ui);
        let (title, hint, file) = match way {
            Way::Forward => {
                ("Forward gain along depth", "composite of the first layers up to this", "forward-depth")
            }
            Way::Backward => {
                ("Backward gain along depth", "composite of this layer up to the last", "backward-depth")
            }
        };
        let step = cx.state.step;
        let at: Vec<_> = runs.iter().filter_map(|&(i, r)| Some((i, r, r.diagnosis_at(step)?))).collect();
        let keys = vec![
            Key { text: "composite".into(), color: p.weak, dashed: false },
            Key { text: "single layer".into(), color: p.weak, dashed: true },
        ];
        let card = Card { title, hint, file: format!("gains-{file}"), keys, legend: cx.legend(p) };
        let table = || {
            let mut t = Table::new(["run", "mode", "step", "layer", "composite", "single"]);
            for (_, r, d) in &at {
                let g = self.at(d, way);
                for (l, (&c, &s)) in g.composite.iter().zip(&g.single).enumerate() {
                    let step = (d.step as usize).into();
                    t.row([r.name.as_str().into(), r.mode().into(), step, l.into(), c.into(), s.into()]);
                }
            }
            t
        };
        card.show(ui, cx.exports, table, |ui| {
            let data: Vec<_> = at.iter().map(|&(i, r, d)| (i, r, self.at(d, way))).collect();
            let points: Vec<_> =
                data.iter().map(|(_, _, g)| (self.by_layer(g.composite), self.by_layer(&g.single))).collect();
            let mut curves = vec![];
            for ((i, r, _), (composite, single)) in data.iter().zip(&points) {
                let c = Curve {
                    name: &r.name,
                    color: p.run(*i),
                    points: composite,
                    width: 2.0,
                    dashed: false,
                    dots: true,
                };
                let s = Curve { points: single, width: 1.2, dashed: true, dots: false, ..c };
                curves.extend([s, c]);
            }
            let chart = self.chart(Id::unique(("gains", way)), "layer", Unit::Index, BAND);
            chart.show(ui, &curves, |x| {
                let l = x.round().max(0.0) as usize;
                let seen = data.iter().filter_map(|(i, r, g)| {
                    let (c, s) = (g.composite.get(l)?, g.single.get(l)?);
                    let value = format!("{}  (single {})", number(*c), number(*s));
                    let at = self.points([(l as f64, *c)].into_iter()).first().copied();
                    Some(Seen { color: p.run(*i), name: label(r), value, at })
                });
                seen.collect()
            });
        });
    }

    /// Greatest composite gain of each record.
    fn over_training(&self, r: &RunData, way: Way) -> Vec<(f64, f64)> {
        let most = |d: &Record| self.composite(d, way).iter().copied().fold(f64::NAN, f64::max);
        r.diagnoses.iter().map(|d| (d.step as f64, most(d))).collect()
    }

    fn training(&self, ui: &mut Ui, cx: &Cx<'_>, runs: &[(usize, &RunData)], way: Way) {
        let p = Palette::of(ui);
        let (title, file) = match way {
            Way::Forward => ("Greatest forward gain over training", "forward-training"),
            Way::Backward => ("Greatest backward gain over training", "backward-training"),
        };
        let data: Vec<_> = runs.iter().map(|&(i, r)| (i, r, self.over_training(r, way))).collect();
        let card = Card {
            title,
            hint: "of all composites",
            file: format!("gains-{file}"),
            keys: vec![],
            legend: cx.legend(p),
        };
        let table = || {
            let mut t = Table::new(["run", "mode", "step", "greatest_composite_gain"]);
            for (_, r, g) in &data {
                g.iter()
                    .for_each(|&(x, y)| t.row([r.name.as_str().into(), r.mode().into(), x.into(), y.into()]));
            }
            t
        };
        card.show(ui, cx.exports, table, |ui| {
            let points: Vec<_> = data.iter().map(|(_, _, g)| self.points(g.iter().copied())).collect();
            let curves = data.iter().zip(&points).map(|((i, r, _), points)| Curve {
                name: &r.name,
                color: p.run(*i),
                points,
                width: 1.8,
                dashed: false,
                dots: points.len() <= 30,
            });
            let curves: Vec<_> = curves.collect();
            let mut chart = self.chart(Id::unique(("gains over training", way)), "step", Unit::Count, BAND);
            chart.mark = cx.state.step.map(|s| s as f64);
            chart.show(ui, &curves, |x| {
                let seen = data.iter().filter_map(|(i, r, g)| {
                    let steps: Vec<f64> = g.iter().map(|v| v.0).collect();
                    let (x, y) = g[super::series::nearest(&steps, x)?];
                    let at = self.points([(x, y)].into_iter()).first().copied();
                    Some(Seen { color: p.run(*i), name: label(r), value: number(y), at })
                });
                seen.collect()
            });
        });
    }

    /// One run's plot, both ways in it.
    fn one(&self, ui: &mut Ui, cx: &Cx<'_>, (i, r): (usize, &RunData), training: bool, fit: (f64, f64)) {
        let p = Palette::of(ui);
        let ways = [(Way::Forward, p.kind(0), "forward"), (Way::Backward, p.kind(2), "backward")];
        let mut keys: Vec<Key> =
            ways.iter().map(|w| Key { text: w.2.into(), color: w.1, dashed: false }).collect();
        if !training {
            keys.push(Key { text: "single layer".into(), color: p.weak, dashed: true });
        }
        let title = label(r);
        let kind = if training { "training" } else { "depth" };
        let card = Card {
            title: &title,
            hint: if training {
                "greatest composite gain over training"
            } else {
                "composite gains along depth"
            },
            file: format!("gains-{kind}-{}", super::text::file_name(&r.name)),
            keys,
            legend: vec![],
        };
        let d = r.diagnosis_at(cx.state.step);
        let lines = ways.iter().map(|&(w, color, word)| {
            let (main, single) = match (training, d) {
                (true, _) => (self.over_training(r, w), vec![]),
                (false, Some(d)) => {
                    let g = self.at(d, w);
                    let by_layer = |y: &[f64]| y.iter().enumerate().map(|(i, &y)| (i as f64, y)).collect();
                    (by_layer(g.composite), by_layer(&g.single))
                }
                (false, None) => (vec![], vec![]),
            };
            (color, word, main, single)
        });
        let lines: Vec<Both> = lines.collect();
        let table = || {
            let mut t = Table::new(["way", if training { "step" } else { "layer" }, "composite", "single"]);
            for (_, word, main, single) in &lines {
                for (k, &(x, y)) in main.iter().enumerate() {
                    let s = single.get(k).map_or(f64::NAN, |s| s.1);
                    t.row([(*word).into(), x.into(), y.into(), s.into()]);
                }
            }
            t
        };
        card.show(ui, cx.exports, table, |ui| {
            let points: Vec<_> = lines
                .iter()
                .map(|l| (self.points(l.2.iter().copied()), self.points(l.3.iter().copied())))
                .collect();
            let mut curves = vec![];
            for (l, (main, single)) in lines.iter().zip(&points) {
                let dots = main.len() <= 30;
                // both ways can be equal: the first is drawn wider, to show beside the second
                let width = if curves.is_empty() { 4.0 } else { 1.6 };
                let c = Curve { name: l.1, color: l.0, points: main, width, dashed: false, dots };
                curves.push(Curve { points: single, width: 1.2, dashed: true, dots: false, ..c });
                curves.push(c);
            }
            let (x_label, unit) = if training { ("step", Unit::Count) } else { ("layer", Unit::Index) };
            let mut chart = self.chart(Id::unique(("gains of", i, training)), x_label, unit, fit);
            chart.mark = cx.state.step.filter(|_| training).map(|s| s as f64);
            chart.show(ui, &curves, |x| {
                let seen = lines.iter().filter_map(|(color, word, main, single)| {
                    let xs: Vec<f64> = main.iter().map(|v| v.0).collect();
                    let k = super::series::nearest(&xs, x)?;
                    let s = single.get(k).map_or(String::new(), |s| format!("  (single {})", number(s.1)));
                    let at = self.points([main[k]].into_iter()).first().copied();
                    let value = number(main[k].1) + &s;
                    Some(Seen { color: *color, name: (*word).into(), value, at })
                });
                seen.collect()
            });
        });
    }
}

/// What the zone of a gain plot means.
fn band_label(ui: &mut Ui) {
    let p = Palette::of(ui);
    let (rect, _) = ui.allocate_exact_size(vec2(16.0, 10.0), egui::Sense::hover());
    ui.painter().rect_filled(rect, 2.0, p.band);
    ui.label(RichText::new("1/3 to 3").small().color(p.weak));
}
