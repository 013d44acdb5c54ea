//! What ranks did: how long they communicated and waited, how much they sent.

use super::progress::Window;
use super::ranks::Ranks;
use crate::diagnose::record::number;
use serde::{Deserialize, Serialize};

/// What all ranks decided at a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// To end the run.
    pub stop: bool,
    /// To save and end.
    pub interrupt: bool,
    /// To save.
    pub checkpoint: bool,
}

/// What a run's ranks did, for its summary: from the start of the process, evaluations included.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// Ranks.
    pub world: usize,
    /// `tcp` and its like.
    pub transport: String,
    /// Of each rank.
    pub ranks: Vec<RankLine>,
}

/// One rank's part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankLine {
    /// Seconds in which sums and exchanges ran.
    #[serde(deserialize_with = "number")]
    pub communicating: f64,
    /// Seconds in which the rank waited for them, with nothing else to do.
    #[serde(deserialize_with = "number")]
    pub waiting: f64,
    /// The share of communication behind which something was computed, 0 to 1: 1 − `waiting` / `communicating`; 1 where
    /// nothing was communicated.
    #[serde(default, deserialize_with = "number")]
    pub overlap: f64,
    /// Bytes sent.
    pub sent: u64,
    /// Bytes received.
    #[serde(default)]
    pub received: u64,
    /// Values of embedding tables that it holds.
    pub table_values: u64,
}

impl RankLine {
    /// With the share that follows from the seconds.
    pub fn new(communicating: f64, waiting: f64, sent: u64, received: u64, table_values: u64) -> Self {
        RankLine {
            communicating,
            waiting,
            overlap: hidden(communicating, waiting),
            sent,
            received,
            table_values,
        }
    }

    /// What was done since an earlier look.
    fn since(&self, earlier: &RankLine) -> Self {
        Self::new(
            (self.communicating - earlier.communicating).max(0.0),
            (self.waiting - earlier.waiting).max(0.0),
            self.sent.saturating_sub(earlier.sent),
            self.received.saturating_sub(earlier.received),
            self.table_values,
        )
    }

    fn plus(&self, more: &RankLine) -> Self {
        Self::new(
            self.communicating + more.communicating,
            self.waiting + more.waiting,
            self.sent + more.sent,
            self.received + more.received,
            more.table_values,
        )
    }
}

fn hidden(communicating: f64, waiting: f64) -> f64 {
    (1.0 - waiting / communicating.max(1e-9)).clamp(0.0, 1.0)
}

/// What all ranks did in the training steps since the last such record; what they do beside steps is in no record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankRecord {
    /// Updates done.
    pub step: u64,
    /// Seconds since the start of training.
    #[serde(deserialize_with = "number")]
    pub seconds: f64,
    /// Steps that the figures are of: those since the last record, or since the process began.
    pub steps: u64,
    /// Seconds that these steps took on the first rank.
    #[serde(deserialize_with = "number")]
    pub steps_seconds: f64,
    /// Rank by rank.
    pub ranks: Vec<RankLine>,
}

impl RankRecord {
    /// The share of the steps' time in which ranks waited for each other, 0 to 1, their mean.
    pub fn waiting(&self) -> f64 {
        let waiting: f64 = self.ranks.iter().map(|r| r.waiting).sum();
        (waiting / (self.ranks.len() as f64 * self.steps_seconds).max(1e-9)).clamp(0.0, 1.0)
    }

    /// The share of communication behind which something was computed, of all ranks together.
    pub fn overlap(&self) -> f64 {
        let sum = |f: fn(&RankLine) -> f64| self.ranks.iter().map(f).sum::<f64>();
        hidden(sum(|r| r.communicating), sum(|r| r.waiting))
    }
}

/// Counts what this rank does in training steps, from record to record.
#[derive(Debug, Default)]
pub(super) struct Tally {
    before: RankLine,
    spent: RankLine,
    /// Steps and seconds of the window that an earlier process trained.
    earlier: (u64, f64),
}

impl Tally {
    /// At the start of a process that may go on in the middle of a window.
    pub fn new(window: &Window) -> Self {
        Tally { earlier: (window.steps, window.seconds), ..Tally::default() }
    }

    /// Before a step.
    pub fn begin(&mut self, ranks: &Ranks) {
        self.before = ranks.figures();
    }

    /// After it.
    pub fn end(&mut self, ranks: &Ranks) {
        self.spent = self.spent.plus(&ranks.figures().since(&self.before));
    }

    /// The record of the steps of a window; the next begins. All ranks call it at the same steps.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn take(
        &mut self,
        ranks: &Ranks,
        step: u64,
        seconds: f64,
        window: &Window,
    ) -> anyhow::Result<RankRecord> {
        let Tally { spent, earlier, .. } = std::mem::take(self);
        Ok(RankRecord {
            step,
            seconds,
            steps: window.steps - earlier.0,
            steps_seconds: window.seconds - earlier.1,
            ranks: ranks.gather(&spent)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_of_its_steps_only() {
        let (a, b) = (RankLine::new(2.0, 1.5, 10, 20, 7), RankLine::new(6.0, 2.5, 110, 70, 7));
        let d = b.since(&a);
        assert_eq!(
            d,
            RankLine {
                communicating: 4.0,
                waiting: 1.0,
                overlap: 0.75,
                sent: 100,
                received: 50,
                table_values: 7
            }
        );
        assert_eq!(a.plus(&d), b);
        let r = RankRecord {
            steps: 2,
            steps_seconds: 5.0,
            ranks: vec![d, RankLine::new(4.0, 3.0, 0, 0, 0)],
            ..RankRecord::default()
        };
        assert_eq!((r.waiting(), r.overlap()), (0.4, 0.5));
    }

    #[test]
    fn who_says_nothing_hides_all_of_it() {
        assert_eq!(RankLine::new(0.0, 0.0, 0, 0, 0).overlap, 1.0);
        assert_eq!(RankLine::new(1.0, 1.2, 0, 0, 0).overlap, 0.0, "waits for its turn count too");
        assert_eq!(RankRecord::default().waiting(), 0.0);
    }

    /// Summaries of runs before `received` and `overlap` were kept.
    #[test]
    fn older_summaries_are_read() {
        let old = r#"{"communicating": 1.0, "waiting": 0.5, "sent": 3, "table_values": 4}"#;
        let line: RankLine = serde_json::from_str(old).unwrap();
        assert_eq!((line.sent, line.received), (3, 0));
    }
}
