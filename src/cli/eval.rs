//! `birkhoff eval`.

use super::args::EvalArgs;
use super::output;
use super::train::{report_skipped, row_policy, spinner};
use crate::data::criteo::{Labels, ReadOptions};
use crate::data::loader::{Loader, LoaderOptions};
use crate::train::infer::LoadedRun;
use crate::train::run::RunFolder;
use std::path::Path;

/// Says on stderr that a run has not come to its end.
pub fn note_unfinished(run: &Path) {
    if RunFolder::open(run).is_ok_and(|r| !r.is_finished()) {
        eprintln!("{}: the run is unfinished; these are its best weights so far", run.display());
    }
}

/// Runs the subcommand.
pub fn run(args: &EvalArgs) -> anyhow::Result<()> {
    let device = super::device::open(&args.device.device)?;
    let mut run = LoadedRun::open(&args.run, &device)?;
    note_unfinished(&args.run);
    let read = ReadOptions { policy: row_policy(args.on_bad_row), labels: Labels::Required };
    let options = LoaderOptions::new(run.scorer.batch);
    let (encoder, groups) = (run.inputs.encoder.clone(), run.inputs.groups.clone());
    let mut loader = Loader::criteo_file(&args.data, encoder, groups, read, options)?;
    let bar = spinner(false, "scoring");
    let mut rows = 0u64;
    let progress = |n: usize| {
        rows += n as u64;
        bar.set_message(format!("scoring: {} rows", crate::text::group(rows)));
    };
    let detail = pollster::block_on(run.scorer.evaluate(&mut run.state, &mut loader, progress, &mut ()))?;
    bar.finish_and_clear();
    report_skipped(&args.data, loader.skipped());
    if args.json {
        return output::json(&detail);
    }
    super::metrics::print(&detail.metrics, detail.grouped.as_ref(), &detail.deciles)
}
