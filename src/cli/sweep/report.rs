//! What a sweep came to: one line a model, means and deviations over the seeds.

use super::file::Variant;
use super::{Job, Outcome};
use crate::cli::compare::{self, RunResult};
use crate::cli::table::{Table, short};
use crate::text::group;
use serde_json::{Value, json};

/// Mean and sample standard deviation (n − 1) of what is there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Standard deviation; `None` of a single value.
    pub std: Option<f64>,
}

impl Spread {
    /// `None` of nothing.
    pub fn of(values: &[f64]) -> Option<Spread> {
        if values.is_empty() {
            return None;
        }
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
        Some(Spread { mean, std: (values.len() > 1).then(|| (squares / (n - 1.0)).sqrt()) })
    }

    fn show(&self, digits: usize) -> String {
        let std = self.std.map_or(String::new(), |s| format!(" ± {s:.digits$}"));
        format!("{:.digits$}{std}", self.mean)
    }
}

/// A model's runs.
struct Line {
    name: String,
    /// Those that are finished: seed, and what the run came to.
    runs: Vec<(u64, RunResult)>,
    /// Seed and error of the others.
    missing: Vec<(u64, String)>,
}

impl Line {
    fn spread(&self, f: impl Fn(&RunResult) -> Option<f64>) -> Option<Spread> {
        Spread::of(&self.runs.iter().filter_map(|r| f(&r.1)).collect::<Vec<_>>())
    }
}

/// What is shown of each line: title, digits, figure.
type Figure = (&'static str, &'static str, usize, fn(&RunResult) -> Option<f64>);
const FIGURES: [Figure; 4] = [
    ("ne", "NE", 5, |r| r.ne),
    ("auc", "AUC", 5, |r| r.auc),
    ("logloss", "log loss", 5, |r| r.logloss),
    ("calibration", "calibration", 4, |r| r.calibration),
];

/// The table of a sweep.
pub struct Report {
    lines: Vec<Line>,
}

impl Report {
    /// Reads what the jobs came to.
    pub fn new(variants: &[Variant], jobs: &[Job], outcomes: &[Outcome]) -> Self {
        let mut lines: Vec<Line> =
            variants.iter().map(|v| Line { name: v.name.clone(), runs: vec![], missing: vec![] }).collect();
        for (job, outcome) in jobs.iter().zip(outcomes) {
            let line = &mut lines[job.variant];
            let seed = job.config.train.seed;
            let result = match outcome {
                Outcome::Done | Outcome::Kept => {
                    compare::read(&job.folder).map_err(|e| crate::text::error_line(&e))
                }
                Outcome::Failed(line) => Err(line.clone()),
                Outcome::Interrupted => Err("interrupted".into()),
            };
            match result {
                Ok(r) => line.runs.push((seed, r)),
                Err(e) => line.missing.push((seed, e)),
            }
        }
        Report { lines }
    }

    /// Relative difference of the mean NE to the first model's, in percent.
    fn difference(&self, line: &Line) -> Option<f64> {
        let base = self.lines.first()?.spread(|r| r.ne)?.mean;
        Some(100.0 * (line.spread(|r| r.ne)?.mean - base) / base)
    }

    /// For the terminal.
    pub fn table(&self) -> Table {
        let head = ["run", "seeds"].into_iter().chain(FIGURES.iter().map(|f| f.1));
        let mut t = Table::new(head.chain(["ΔNE %", "params", "FLOPs/ex.", "rows/s"]));
        for l in &self.lines {
            let all = l.runs.len() + l.missing.len();
            let seeds =
                if l.missing.is_empty() { all.to_string() } else { format!("{} of {all}", l.runs.len()) };
            let mut row = vec![l.name.clone(), seeds];
            row.extend(FIGURES.iter().map(|f| l.spread(f.3).map_or("–".into(), |s| s.show(f.2))));
            let mean = |f: fn(&RunResult) -> Option<f64>| l.spread(f).map(|s| s.mean);
            row.extend([
                self.difference(l).map_or("–".into(), |d| format!("{d:+.3}")),
                mean(|r| r.parameters.map(|p| p as f64)).map_or("–".into(), short),
                mean(|r| r.flops_per_example).map_or("–".into(), short),
                mean(|r| r.rows_per_s).map_or("–".into(), |v| group(v as u64)),
            ]);
            t.rows.push(row);
        }
        t
    }

    /// Everything, in full.
    pub fn json(&self) -> Value {
        let spread = |s: Option<Spread>| s.map(|s| json!({"mean": s.mean, "std": s.std}));
        let line = |l: &Line| {
            let mut v = json!({"run": l.name, "seeds": l.runs.iter().map(|r| r.0).collect::<Vec<_>>()});
            for f in FIGURES {
                v[f.0] = json!(spread(l.spread(f.3)));
            }
            v["ne_difference"] = json!(self.difference(l));
            v["parameters"] = json!(l.runs.first().and_then(|r| r.1.parameters));
            v["flops_per_example"] = json!(l.runs.first().and_then(|r| r.1.flops_per_example));
            v["rows_per_s"] = json!(spread(l.spread(|r| r.rows_per_s)));
            let missing = l.missing.iter().map(|(seed, e)| json!({"seed": seed, "error": e}));
            v["failed"] = missing.collect();
            v
        };
        json!({"runs": self.lines.iter().map(line).collect::<Vec<_>>()})
    }

    /// One line a model; empty where there is nothing.
    pub fn csv(&self) -> Table {
        let mut head: Vec<String> = vec!["run".into(), "seeds".into(), "failed".into()];
        head.extend(FIGURES.iter().flat_map(|f| [format!("{}_mean", f.0), format!("{}_std", f.0)]));
        head.extend(
            ["ne_difference_percent", "parameters", "flops_per_example", "rows_per_s"].map(String::from),
        );
        let mut t = Table::new(head);
        let show = |v: Option<f64>| v.map_or(String::new(), |v| v.to_string());
        for l in &self.lines {
            let mut row = vec![l.name.clone(), l.runs.len().to_string(), l.missing.len().to_string()];
            for f in FIGURES {
                let s = l.spread(f.3);
                row.extend([show(s.map(|s| s.mean)), show(s.and_then(|s| s.std))]);
            }
            let mean = |f: fn(&RunResult) -> Option<f64>| show(l.spread(f).map(|s| s.mean));
            row.extend([
                show(self.difference(l)),
                mean(|r| r.parameters.map(|p| p as f64)),
                mean(|r| r.flops_per_example),
                mean(|r| r.rows_per_s),
            ]);
            t.rows.push(row);
        }
        t
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviations_are_those_of_a_sample() {
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(Spread::of(&[2.0]), Some(Spread { mean: 2.0, std: None }));
        let s = Spread::of(&[1.0, 2.0, 6.0]).unwrap();
        assert_eq!((s.mean, s.std), (3.0, Some(7f64.sqrt())));
        assert_eq!(s.show(2), "3.00 ± 2.65");
    }
}
