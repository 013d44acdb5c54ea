//! Where a run's data comes from.

use std::cell::RefCell;
use std::rc::Rc;

use super::run::RunData;
use crate::diagnose::{ModelCard, Snapshot, TimeReport};
use crate::train::trainer::Event;

/// Something that a run can be read from, again and again while it grows.
pub trait Source {
    /// The run's name.
    fn name(&self) -> String;
    /// Takes what is new; true if something changed. Quick: what does not fit in a few milliseconds waits
    /// for the next call.
    fn poll(&mut self, into: &mut RunData) -> bool;
    /// Whether the last call left something to be taken at once.
    fn behind(&self) -> bool {
        false
    }
}

/// What happened since the dashboard last looked.
enum News {
    Event(Event),
    Snapshot(Snapshot),
    Config(String),
    Card(ModelCard),
    Time(TimeReport),
    Summary(serde_json::Value),
    Device(String),
    Slots(Vec<String>),
    Problem(String),
    Clear,
}

/// A run in the same thread: the trainer (or what reports for it) tells it what happens, a [`LiveSource`]
/// hands it to the dashboard. Clones are the same run.
#[derive(Clone, Default)]
pub struct SharedRun(Rc<RefCell<Vec<News>>>);

impl SharedRun {
    /// A run of which nothing happened yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn tell(&self, n: News) {
        self.0.borrow_mut().push(n);
    }

    /// A step, an evaluation, a diagnosis.
    pub fn event(&self, e: &Event) {
        self.tell(News::Event(e.clone()));
    }

    /// The matrices of a diagnosis.
    pub fn snapshot(&self, s: &Snapshot) {
        self.tell(News::Snapshot(s.clone()));
    }

    /// The configuration, as TOML.
    pub fn config(&self, text: impl Into<String>) {
        self.tell(News::Config(text.into()));
    }

    /// The model.
    pub fn card(&self, c: ModelCard) {
        self.tell(News::Card(c));
    }

    /// Where the time goes.
    pub fn time(&self, t: TimeReport) {
        self.tell(News::Time(t));
    }

    /// Name of the device.
    pub fn device(&self, name: impl Into<String>) {
        self.tell(News::Device(name.into()));
    }

    /// Names of the first layer's slots.
    pub fn slots(&self, names: Vec<String>) {
        self.tell(News::Slots(names));
    }

    /// The summary: the run is finished.
    pub fn finish(&self, summary: serde_json::Value) {
        self.tell(News::Summary(summary));
    }

    /// Something went wrong.
    pub fn problem(&self, text: impl Into<String>) {
        self.tell(News::Problem(text.into()));
    }

    /// Everything so far is void: the run begins anew.
    pub fn clear(&self) {
        self.tell(News::Clear);
    }

    /// The source to give to [`super::Dashboard::add`]. What one source took, another does not see.
    pub fn source(&self, name: impl Into<String>) -> LiveSource {
        LiveSource { name: name.into(), run: self.clone() }
    }
}

/// The source of a [`SharedRun`].
pub struct LiveSource {
    name: String,
    run: SharedRun,
}

impl Source for LiveSource {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn poll(&mut self, into: &mut RunData) -> bool {
        let news = std::mem::take(&mut *self.run.0.borrow_mut());
        let some = !news.is_empty();
        for n in news {
            match n {
                News::Event(e) => into.push(&e),
                News::Snapshot(s) => into.push_snapshot(s),
                News::Config(t) => into.set_config(t),
                News::Card(c) => into.card = Some(c),
                News::Time(t) => into.time = Some(t),
                News::Summary(s) => into.summary = Some(s),
                News::Device(d) => into.device = Some(d),
                News::Slots(s) => into.slots = s,
                News::Problem(p) => into.problem(p),
                News::Clear => into.clear(),
            }
        }
        some
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_live_run_is_taken_once_in_order() {
        let run = SharedRun::new();
        let (mut source, mut data) = (run.source("now"), RunData::new("now"));
        assert!(!source.poll(&mut data));
        run.config("[model.residual]\nmode = \"hc\"");
        run.problem("old");
        run.clear();
        run.device("cpu");
        run.snapshot(&Snapshot { step: 3, mode: "mhc".into(), ..Snapshot::default() });
        assert!(source.poll(&mut data));
        assert!(!source.poll(&mut data));
        assert_eq!((data.device(), data.mode(), data.snapshots.len()), (Some("cpu"), "mhc", 1));
        assert!(data.problems.is_empty());
    }
}
