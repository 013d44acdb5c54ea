//! What is known of one run: columns of numbers, diagnoses, snapshots, and what could not be read.

use crate::diagnose::{ModelCard, Record, Snapshot, TimeReport};
use crate::train::tally::RankRecord;
use crate::train::trainer::Event;

/// Most messages kept of what is wrong with a run.
const PROBLEMS: usize = 20;

/// The logged steps, one column a quantity; all of one length, steps ascending.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Steps {
    /// Updates done.
    pub step: Vec<f64>,
    /// Rows trained on.
    pub rows: Vec<f64>,
    /// Seconds since the start of training.
    pub seconds: Vec<f64>,
    /// Training loss in nats.
    pub loss: Vec<f64>,
    /// Learning rate.
    pub lr: Vec<f64>,
    /// Global norm of the gradient.
    pub grad_norm: Vec<f64>,
    /// Rows a second.
    pub rows_per_s: Vec<f64>,
    /// Steps of the whole run, as last reported.
    pub total: u64,
    /// Epoch of the last step, from 1.
    pub epoch: usize,
}

impl Steps {
    /// Logged steps.
    pub fn len(&self) -> usize {
        self.step.len()
    }

    /// Whether nothing was logged.
    pub fn is_empty(&self) -> bool {
        self.step.is_empty()
    }

    fn truncate(&mut self, n: usize) {
        let columns = [&mut self.step, &mut self.rows, &mut self.seconds, &mut self.loss];
        let more = [&mut self.lr, &mut self.grad_norm, &mut self.rows_per_s];
        for c in columns.into_iter().chain(more) {
            c.truncate(n);
        }
    }

    /// Rows trained on at a step, between logged steps by a straight line.
    fn rows_at(&self, step: f64) -> f64 {
        let i = self.step.partition_point(|&s| s < step);
        let (x0, y0) = if i == 0 { (0.0, 0.0) } else { (self.step[i - 1], self.rows[i - 1]) };
        match (self.step.get(i), self.rows.get(i)) {
            (Some(&x1), Some(&y1)) if x1 > x0 => y0 + (y1 - y0) * (step - x0) / (x1 - x0),
            _ if x0 > 0.0 => y0 * step / x0,
            _ => 0.0,
        }
    }
}

/// The evaluations, one column a quantity. What is undefined (one class only) is NaN.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evals {
    /// Updates done.
    pub step: Vec<f64>,
    /// Rows trained on.
    pub rows: Vec<f64>,
    /// Seconds since the start of training.
    pub seconds: Vec<f64>,
    /// Normalized entropy.
    pub ne: Vec<f64>,
    /// Log loss.
    pub logloss: Vec<f64>,
    /// Area under the ROC curve.
    pub auc: Vec<f64>,
    /// Predicted clicks for each click.
    pub calibration: Vec<f64>,
}

impl Evals {
    fn truncate(&mut self, n: usize) {
        let columns = [&mut self.step, &mut self.rows, &mut self.seconds, &mut self.ne];
        let more = [&mut self.logloss, &mut self.auc, &mut self.calibration];
        for c in columns.into_iter().chain(more) {
            c.truncate(n);
        }
    }

    /// Least normalized entropy so far.
    pub fn best_ne(&self) -> Option<f64> {
        self.ne.iter().copied().filter(|v| v.is_finite()).min_by(f64::total_cmp)
    }
}

/// What the ranks of a run did, one column a quantity; empty of a run of one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankSteps {
    /// Updates done.
    pub step: Vec<f64>,
    /// Rows trained on.
    pub rows: Vec<f64>,
    /// Seconds since the start of training.
    pub seconds: Vec<f64>,
    /// Share of the steps' time in which ranks waited for each other, their mean.
    pub waiting: Vec<f64>,
    /// The newest record.
    pub last: Option<RankRecord>,
}

impl RankSteps {
    fn truncate(&mut self, n: usize) {
        for c in [&mut self.step, &mut self.rows, &mut self.seconds, &mut self.waiting] {
            c.truncate(n);
        }
    }
}

/// Everything that the dashboard knows of a run. A [`super::Source`] fills it.
#[derive(Clone, Debug, Default)]
pub struct RunData {
    /// Shown to people.
    pub name: String,
    /// The configuration, `config.toml` as text; set by [`RunData::set_config`].
    pub config: String,
    /// Logged steps.
    pub steps: Steps,
    /// Evaluations.
    pub evals: Evals,
    /// What its ranks did.
    pub ranks: RankSteps,
    /// Diagnoses by step.
    pub diagnoses: Vec<Record>,
    /// Snapshots by step.
    pub snapshots: Vec<Snapshot>,
    /// `model.json`.
    pub card: Option<ModelCard>,
    /// `profile.json`.
    pub time: Option<TimeReport>,
    /// `summary.json`: the run is finished.
    pub summary: Option<serde_json::Value>,
    /// Device, where it is known.
    pub device: Option<String>,
    /// Names of the first layer's slots, where they are known.
    pub slots: Vec<String>,
    /// What could not be read, in plain words.
    pub problems: Vec<String>,
    /// Grows when numbers already seen were replaced, as by a restart.
    pub generation: u64,
    mode: String,
}

impl RunData {
    /// An empty run.
    pub fn new(name: impl Into<String>) -> Self {
        RunData { name: name.into(), ..RunData::default() }
    }

    /// Takes in a line of `metrics.jsonl`. A step that was there already begins anew from that step.
    pub fn push(&mut self, e: &Event) {
        match e {
            Event::Step {
                step, total_steps, epoch, rows, loss, lr, grad_norm, rows_per_s, seconds, ..
            } => {
                let s = &mut self.steps;
                let at = s.step.partition_point(|&x| x < *step as f64);
                if at < s.len() {
                    s.truncate(at);
                    self.generation += 1;
                }
                s.step.push(*step as f64);
                s.rows.push(*rows as f64);
                s.seconds.push(*seconds);
                s.loss.push(*loss);
                s.lr.push(*lr);
                s.grad_norm.push(*grad_norm);
                s.rows_per_s.push(*rows_per_s);
                (s.total, s.epoch) = (*total_steps, *epoch);
            }
            Event::Eval { step, metrics, seconds, .. } => {
                let rows = self.steps.rows_at(*step as f64);
                let v = &mut self.evals;
                let at = v.step.partition_point(|&x| x < *step as f64);
                if at < v.step.len() {
                    v.truncate(at);
                    self.generation += 1;
                }
                v.step.push(*step as f64);
                v.rows.push(rows);
                v.seconds.push(*seconds);
                v.ne.push(metrics.ne.unwrap_or(f64::NAN));
                v.logloss.push(metrics.logloss);
                v.auc.push(metrics.auc.unwrap_or(f64::NAN));
                v.calibration.push(metrics.calibration.unwrap_or(f64::NAN));
            }
            Event::Ranks(r) => {
                let rows = self.steps.rows_at(r.step as f64);
                let v = &mut self.ranks;
                let at = v.step.partition_point(|&x| x < r.step as f64);
                if at < v.step.len() {
                    v.truncate(at);
                    self.generation += 1;
                }
                v.step.push(r.step as f64);
                v.rows.push(rows);
                v.seconds.push(r.seconds);
                v.waiting.push(r.waiting());
                v.last = Some(r.clone());
            }
            Event::Diagnose(r) => {
                let at = self.diagnoses.partition_point(|d| d.step < r.step);
                self.diagnoses.truncate(at);
                self.diagnoses.push(r.clone());
            }
        }
    }

    /// Takes in a snapshot; one of the same step is replaced.
    pub fn push_snapshot(&mut self, s: Snapshot) {
        match self.snapshots.binary_search_by_key(&s.step, |x| x.step) {
            Ok(i) => self.snapshots[i] = s,
            Err(i) => self.snapshots.insert(i, s),
        }
    }

    /// Keeps a message about what is wrong, once.
    pub fn problem(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !self.problems.contains(&text) && self.problems.len() < PROBLEMS {
            self.problems.push(text);
        }
    }

    /// Takes in the configuration.
    pub fn set_config(&mut self, text: String) {
        let table: Option<toml::Table> = text.parse().ok();
        let mode = || table.as_ref()?.get("model")?.get("residual")?.get("mode")?.as_str();
        self.mode = mode().unwrap_or_default().to_string();
        self.config = text;
    }

    /// Forgets everything but the name: the run began anew.
    pub fn clear(&mut self) {
        *self = RunData {
            name: std::mem::take(&mut self.name),
            generation: self.generation + 1,
            ..RunData::default()
        };
    }

    /// `shortcut`, `hc`, `mhc`, or nothing if unknown.
    pub fn mode(&self) -> &str {
        match (&self.card, self.snapshots.last()) {
            (Some(c), _) if !c.mode.is_empty() => &c.mode,
            (_, Some(s)) if self.mode.is_empty() => &s.mode,
            _ => &self.mode,
        }
    }

    /// The mode as the papers write it.
    pub fn mode_label(&self) -> &str {
        match self.mode() {
            "hc" => "HC",
            "mhc" => "mHC",
            other => other,
        }
    }

    /// The device, from wherever it is said.
    pub fn device(&self) -> Option<&str> {
        let finished = || self.summary.as_ref()?.get("device")?.as_str();
        let card = || self.card.as_ref().map(|c| c.device.as_str()).filter(|d| !d.is_empty());
        let device = self.device.as_deref().or_else(finished).or_else(card);
        device.or_else(|| self.time.as_ref().map(|t| t.device.as_str())).filter(|d| !d.is_empty())
    }

    /// Whether it came to its end.
    pub fn finished(&self) -> bool {
        self.summary.is_some()
    }

    /// The part of the run that is done, 0 to 1, where it is known.
    pub fn progress(&self) -> Option<f64> {
        if self.finished() {
            return Some(1.0);
        }
        let done = *self.steps.step.last()?;
        (self.steps.total > 0).then(|| (done / self.steps.total as f64).clamp(0.0, 1.0))
    }

    /// Seconds to the end at the run's average pace.
    pub fn seconds_left(&self) -> Option<f64> {
        let (done, seconds) = (*self.steps.step.last()?, *self.steps.seconds.last()?);
        let left = self.steps.total as f64 - done;
        (!self.finished() && done > 0.0).then(|| (left * seconds / done).max(0.0))
    }

    /// The newest diagnosis at or before a step; without a step, the newest.
    pub fn diagnosis_at(&self, step: Option<u64>) -> Option<&Record> {
        let n = step.map_or(self.diagnoses.len(), |s| self.diagnoses.partition_point(|d| d.step <= s));
        self.diagnoses.get(n.checked_sub(1)?)
    }

    /// The newest snapshot at or before a step; without a step, the newest.
    pub fn snapshot_at(&self, step: Option<u64>) -> Option<&Snapshot> {
        let n = step.map_or(self.snapshots.len(), |s| self.snapshots.partition_point(|d| d.step <= s));
        self.snapshots.get(n.checked_sub(1)?)
    }

    /// Whether nothing at all was read.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
            && self.evals.step.is_empty()
            && self.diagnoses.is_empty()
            && self.snapshots.is_empty()
            && self.card.is_none()
            && self.time.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::metrics::Metrics;

    fn step(step: u64, loss: f64) -> Event {
        Event::Step {
            step,
            total_steps: 100,
            epoch: 1,
            rows: step * 10,
            loss,
            lr: 0.1,
            grad_norm: 1.0,
            rows_per_s: 5.0,
            data_wait: 0.0,
            seconds: step as f64 * 2.0,
        }
    }

    #[test]
    fn a_step_seen_before_begins_anew() {
        let mut r = RunData::new("a");
        for s in [10, 20, 30] {
            r.push(&step(s, 1.0));
        }
        r.push(&step(20, 0.5));
        assert_eq!((r.steps.step.clone(), r.steps.loss.clone()), (vec![10.0, 20.0], vec![1.0, 0.5]));
        assert_eq!(r.generation, 1);
        assert_eq!((r.progress(), r.seconds_left()), (Some(0.2), Some(160.0)));
    }

    #[test]
    fn an_evaluation_knows_the_rows_trained_on() {
        let mut r = RunData::new("a");
        r.push(&step(10, 1.0));
        r.push(&step(20, 1.0));
        let metrics =
            Metrics { rows: 9, positives: 1, ne: Some(0.9), logloss: 0.3, auc: None, calibration: None };
        r.push(&Event::Eval { step: 15, epoch: 1, metrics, best: true, seconds: 1.0 });
        assert_eq!((r.evals.rows[0], r.evals.best_ne()), (150.0, Some(0.9)));
        assert!(r.evals.auc[0].is_nan());
    }

    #[test]
    fn ranks_are_of_the_newest_record() {
        use crate::train::tally::RankLine;
        let record = |step, world| {
            let ranks = vec![RankLine::new(2.0, 1.0, 5, 5, 1); world];
            Event::Ranks(RankRecord { step, seconds: step as f64, steps: 10, steps_seconds: 4.0, ranks })
        };
        let mut r = RunData::new("a");
        for s in [10, 20, 30] {
            r.push(&step(s, 1.0));
            r.push(&record(s, 2));
        }
        assert_eq!((r.ranks.rows.clone(), r.ranks.waiting[2]), (vec![100.0, 200.0, 300.0], 0.25));
        // gone on with on three ranks from a checkpoint
        r.push(&step(20, 0.5));
        r.push(&record(20, 3));
        assert_eq!(r.ranks.step, [10.0, 20.0]);
        assert_eq!((r.ranks.last.map(|l| l.ranks.len()), r.generation), (Some(3), 2));
    }

    #[test]
    fn what_stands_at_a_step_is_the_newest_before_it() {
        let mut r = RunData::new("a");
        for s in [40, 10, 20] {
            r.push_snapshot(Snapshot { step: s, ..Snapshot::default() });
        }
        let at = |s| r.snapshot_at(s).map(|s| s.step);
        assert_eq!((at(None), at(Some(39)), at(Some(9))), (Some(40), Some(20), None));
    }
}
