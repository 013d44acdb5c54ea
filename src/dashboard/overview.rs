//! The curves of training, all runs over each other, and where each run stands.

use std::collections::HashMap;

use egui::{Align, Id, Layout, ProgressBar, RichText, ScrollArea, Slider, Ui, vec2};
use egui_plot::PlotPoint;

use super::app::{Cx, label};
use super::card::{Card, empty, grid};
use super::chart::{Chart, Curve, Seen, Unit, value};
use super::export::Table;
use super::ranks;
use super::run::RunData;
use super::series::{Series, Want, nearest};
use super::text;
use super::theme::Palette;

/// What x counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum X {
    #[default]
    Step,
    Time,
    Rows,
}

/// What y shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Metric {
    Loss,
    Ne,
    Auc,
    Lr,
    GradNorm,
    RowsPerSecond,
    /// Of runs on several ranks.
    Waiting,
}

impl Metric {
    /// Those that every run has.
    const ALL: [Metric; 6] =
        [Metric::Loss, Metric::Ne, Metric::Auc, Metric::Lr, Metric::GradNorm, Metric::RowsPerSecond];

    /// Title, hint, file name, name of the column.
    fn words(self) -> [&'static str; 4] {
        match self {
            Metric::Loss => ["Training loss", "nats", "loss", "loss"],
            Metric::Ne => ["Validation NE", "", "ne", "ne"],
            Metric::Auc => ["Validation AUC", "", "auc", "auc"],
            Metric::Lr => ["Learning rate", "", "learning-rate", "lr"],
            Metric::GradNorm => ["Gradient norm", "unclipped", "gradient-norm", "grad_norm"],
            Metric::RowsPerSecond => ["Speed", "rows a second", "speed", "rows_per_s"],
            Metric::Waiting => ["Ranks wait", "share of a step", "ranks-waiting", "waiting"],
        }
    }

    /// Whether it is measured at evaluations.
    fn evaluated(self) -> bool {
        matches!(self, Metric::Ne | Metric::Auc)
    }

    /// Whether smoothing says something.
    fn noisy(self) -> bool {
        matches!(self, Metric::Loss | Metric::GradNorm | Metric::RowsPerSecond | Metric::Waiting)
    }

    fn unit(self) -> Unit {
        if self == Metric::RowsPerSecond { Unit::Count } else { Unit::Plain }
    }

    fn y(self, r: &RunData) -> &[f64] {
        match self {
            Metric::Loss => &r.steps.loss,
            Metric::Ne => &r.evals.ne,
            Metric::Auc => &r.evals.auc,
            Metric::Lr => &r.steps.lr,
            Metric::GradNorm => &r.steps.grad_norm,
            Metric::RowsPerSecond => &r.steps.rows_per_s,
            Metric::Waiting => &r.ranks.waiting,
        }
    }

    fn x(self, r: &RunData, x: X) -> &[f64] {
        let (step, seconds, rows) = match self {
            Metric::Ne | Metric::Auc => (&r.evals.step, &r.evals.seconds, &r.evals.rows),
            Metric::Waiting => (&r.ranks.step, &r.ranks.seconds, &r.ranks.rows),
            _ => (&r.steps.step, &r.steps.seconds, &r.steps.rows),
        };
        match x {
            X::Step => step,
            X::Time => seconds,
            X::Rows => rows,
        }
    }
}

#[derive(Default)]
pub(crate) struct Overview {
    x: X,
    smooth: f64,
    log_x: bool,
    log_y: bool,
    series: HashMap<(usize, Metric, bool), Series>,
}

impl Overview {
    pub fn ui(&mut self, ui: &mut Ui, cx: &mut Cx<'_>) {
        self.controls(ui);
        ui.add_space(2.0);
        status(ui, cx);
        ui.add_space(4.0);
        if cx.visible().next().is_none() {
            empty(ui, "All runs are hidden", "Click a coloured square in the list on the left.");
            return;
        }
        let common = Metric::ALL.len();
        let n = common + if ranks::any(cx) { 2 } else { 0 };
        grid(ui, n, 3, vec2(255.0, 190.0), |ui, i| match Metric::ALL.get(i) {
            Some(m) => self.plot(ui, cx, *m),
            None if i == common => self.plot(ui, cx, Metric::Waiting),
            None => ranks::table(ui, cx),
        });
    }

    fn controls(&mut self, ui: &mut Ui) {
        let p = Palette::of(ui);
        ui.horizontal_wrapped(|ui| {
            ui.label(RichText::new("x").color(p.weak));
            for (x, word) in [(X::Step, "step"), (X::Time, "time"), (X::Rows, "rows")] {
                ui.selectable_value(&mut self.x, x, word);
            }
            ui.separator();
            let l = ui.label(RichText::new("smoothing").color(p.weak));
            ui.spacing_mut().slider_width = 110.0;
            ui.add(Slider::new(&mut self.smooth, 0.0..=0.99).fixed_decimals(2)).labelled_by(l.id);
            ui.separator();
            ui.checkbox(&mut self.log_x, "log x");
            ui.checkbox(&mut self.log_y, "log y");
            ui.separator();
            let help = "right drag zooms, double click shows all";
            ui.label(RichText::new(help).small().color(p.weak));
        });
    }

    fn plot(&mut self, ui: &mut Ui, cx: &Cx<'_>, m: Metric) {
        let p = Palette::of(ui);
        let [title, hint, file, column] = m.words();
        let hint = match (m, self.smooth > 0.0 && m.noisy()) {
            (_, false) => hint.to_string(),
            (_, true) => {
                format!("{hint}{}smoothed {:.2}", if hint.is_empty() { "" } else { ", " }, self.smooth)
            }
        };
        let card =
            Card { title, hint: &hint, file: format!("overview-{file}"), keys: vec![], legend: cx.legend(p) };
        let runs: Vec<(usize, &RunData)> = cx.visible().collect();
        let table = || {
            let mut t = Table::new(["run", "step", "seconds", "rows", column]);
            for (_, r) in &runs {
                let [step, seconds, rows] = [X::Step, X::Time, X::Rows].map(|x| m.x(r, x));
                for (i, &y) in m.y(r).iter().enumerate() {
                    t.row([
                        r.name.as_str().into(),
                        step[i].into(),
                        seconds[i].into(),
                        rows[i].into(),
                        y.into(),
                    ]);
                }
            }
            t
        };
        card.show(ui, cx.exports, table, |ui| {
            if runs.iter().all(|(_, r)| !m.y(r).iter().any(|v| v.is_finite())) {
                let how = match m.evaluated() {
                    true => "The first comes after train.eval_every steps, or after an epoch.",
                    false => "The first comes after train.log_every steps.",
                };
                empty(ui, if m.evaluated() { "No evaluation yet" } else { "No step logged yet" }, how);
                return;
            }
            self.curves(ui, &runs, m);
        });
    }

    fn curves(&mut self, ui: &mut Ui, runs: &[(usize, &RunData)], m: Metric) {
        let p = Palette::of(ui);
        let (x_label, x_unit) = match self.x {
            X::Step => ("step", Unit::Count),
            X::Time => ("time", Unit::Seconds),
            X::Rows => ("rows", Unit::Count),
        };
        let chart = Chart {
            id: Id::unique(("overview", m, self.x, self.log_x, self.log_y)),
            x_label,
            x_unit,
            y_unit: m.unit(),
            log_x: self.log_x,
            log_y: self.log_y,
            band: None,
            fit: None,
            link: Some(Id::unique(("overview", self.x, self.log_x))),
            mark: None,
        };
        let (range, width) = chart.window(ui);
        let smooth = if m.noisy() { self.smooth } else { 0.0 };
        for &(i, r) in runs {
            let want = Want {
                generation: r.generation,
                columns: self.x as u8,
                smooth,
                log_x: self.log_x,
                log_y: self.log_y,
                range,
                width,
            };
            let (x, y) = (m.x(r, self.x), m.y(r));
            self.series.entry((i, m, true)).or_default().points(x, y, want);
            if smooth > 0.0 {
                // what is smoothed stays visible, faintly
                let raw = Want { smooth: 0.0, width: width / 2, ..want };
                self.series.entry((i, m, false)).or_default().points(x, y, raw);
            }
        }
        let drawn = |i: usize, main: bool| self.series.get(&(i, m, main)).map_or(&[][..], Series::drawn);
        let mut curves = vec![];
        for &(i, r) in runs.iter().filter(|_| smooth > 0.0) {
            let color = p.run(i).gamma_multiply(0.28);
            let (name, points) = (r.name.as_str(), drawn(i, false));
            curves.push(Curve { name, color, points, width: 1.0, dashed: false, dots: false });
        }
        for &(i, r) in runs {
            let points = drawn(i, true);
            let dots = m.evaluated() && points.len() <= 40 || points.len() == 1;
            curves.push(Curve { name: &r.name, color: p.run(i), points, width: 1.6, dashed: i >= 10, dots });
        }
        let (log_x, log_y) = (self.log_x, self.log_y);
        chart.show(ui, &curves, |at| {
            let seen = runs.iter().filter_map(|&(i, r)| {
                let (x, y) = (m.x(r, self.x), m.y(r));
                let k = nearest(x, at)?;
                let place = PlotPoint::new(
                    if log_x { x[k].log10() } else { x[k] },
                    if log_y { y[k].log10() } else { y[k] },
                );
                let at = (place.x.is_finite() && place.y.is_finite() && smooth == 0.0).then_some(place);
                Some(Seen { color: p.run(i), name: label(r), value: value(y[k], m.unit()), at })
            });
            seen.collect()
        });
    }
}

/// A line a run: device, progress, time left, newest values.
fn status(ui: &mut Ui, cx: &mut Cx<'_>) {
    let p = Palette::of(ui);
    let head = |ui: &mut Ui, s: &str| ui.label(RichText::new(s).small().color(p.weak));
    ScrollArea::both().max_height(112.0).auto_shrink([false, true]).id_salt("status").show(ui, |ui| {
        let g = egui::Grid::new("status").num_columns(10).striped(true).spacing(vec2(18.0, 4.0));
        g.show(ui, |ui| {
            for s in ["run", "mode", "device", "progress", "time", "left", "rows/s", "loss", "NE", "AUC"] {
                head(ui, s);
            }
            ui.end_row();
            for (i, r) in cx.visible() {
                ui.horizontal(|ui| {
                    let (rect, _) = ui.allocate_exact_size(vec2(10.0, 10.0), egui::Sense::hover());
                    ui.painter().rect_filled(rect, 2.0, p.run(i));
                    ui.label(text::shorten(&r.name, 28)).on_hover_text(&r.name);
                });
                let or_dash = |s: Option<String>| s.filter(|s| !s.is_empty()).unwrap_or_else(|| "–".into());
                ui.label(or_dash(Some(r.mode_label().to_string())));
                let device = r.device().unwrap_or_default();
                ui.label(or_dash(Some(text::shorten(device, 22)))).on_hover_text(device);
                match r.progress() {
                    Some(x) => {
                        let done = r.steps.step.last().copied().unwrap_or(0.0) as u64;
                        let words = match (r.finished(), r.steps.total) {
                            (true, _) => format!("finished, {}", text::group(done)),
                            (false, total) => format!("{} of {}", text::group(done), text::group(total)),
                        };
                        let bar = ProgressBar::new(x as f32).desired_width(150.0).desired_height(14.0);
                        let fill = p.run(i).gamma_multiply(0.55);
                        ui.add(bar.fill(fill).text(RichText::new(words).small().color(p.text)));
                    }
                    None => {
                        ui.label("–");
                    }
                }
                let last = |c: &[f64]| c.last().copied().filter(|v| v.is_finite());
                let cells = [
                    last(&r.steps.seconds).map(text::duration),
                    r.seconds_left().map(text::duration),
                    last(&r.steps.rows_per_s).map(|v| text::group(v as u64)),
                    last(&r.steps.loss).map(text::number),
                    last(&r.evals.ne).map(text::number),
                    last(&r.evals.auc).map(text::number),
                ];
                for c in cells {
                    ui.with_layout(Layout::left_to_right(Align::Center), |ui| {
                        ui.label(RichText::new(or_dash(c)).monospace());
                    });
                }
                ui.end_row();
            }
        });
    });
}
