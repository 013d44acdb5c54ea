//! `birkhoff eval`.

use super::args::EvalArgs;
use super::drift::Drift;
use super::output;
use super::train::{report_skipped, spinner};
use crate::data::FittedEncoder;
use crate::data::drift::{ColumnDrift, Seen};
use crate::data::feed::{Feed, Files};
use crate::data::loader::{Loader, LoaderOptions, Order};
use crate::data::metrics::Detail;
use crate::data::reader::{Labels, Source};
use crate::graph::exec::Device;
use crate::train::infer::LoadedRun;
use crate::train::run::RunFolder;
use serde::Serialize;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Says on stderr that a run has not come to its end.
pub fn note_unfinished(run: &Path) {
    if RunFolder::open(run).is_ok_and(|r| !r.is_finished()) {
        eprintln!("{}: the run is unfinished; these are its best weights so far", run.display());
    }
}

/// Runs the subcommand.
pub fn run(args: &EvalArgs) -> anyhow::Result<()> {
    evaluate(args).map_err(|e| super::data::hint_format(e, &args.read))
}

fn evaluate(args: &EvalArgs) -> anyhow::Result<()> {
    let device = super::device::open(&args.device.device)?;
    let mut run = LoadedRun::open(&args.run, &device)?;
    note_unfinished(&args.run);
    let (places, _spool) = super::data::places(&args.data)?;
    let encoder = run.inputs.encoder.clone();
    let source = super::data::source(
        places,
        &args.read.over(&run.config)?,
        &encoder.schema,
        args.on_bad_row,
        Labels::Required,
    )?;
    let name = source.name();
    let (files, seen) = counted(source, encoder.clone());
    let (detail, loader) = measure(&mut run, &files)?;
    report_skipped(Path::new(&name), loader.skipped());
    let drift = Drift::new(&encoder, seen.get());
    if let Some(drift) = &drift {
        drift.warn(&name);
    }
    if args.json {
        return output::json(&Report { detail, drift: drift.map(|d| d.columns) });
    }
    super::metrics::print(&detail.metrics, detail.grouped.as_ref(), &detail.deciles)
}

/// What `--json` prints: the metrics, and each column beside the training rows.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    detail: Detail,
    #[serde(skip_serializing_if = "Option::is_none")]
    drift: Option<Vec<ColumnDrift>>,
}

/// Files whose first pass tells what their rows are like.
pub fn counted(source: Source, encoder: Arc<FittedEncoder>) -> (Feed, Arc<OnceLock<Seen>>) {
    let mut files = Files::new(source, encoder);
    let seen = Arc::default();
    files.seen = Some(Arc::clone(&seen));
    (files.into(), seen)
}

/// Metrics of all rows.
fn measure(run: &mut LoadedRun, feed: &Feed) -> anyhow::Result<(Detail, Loader)> {
    let options = LoaderOptions::new(run.scorer.batch);
    let mut loader = feed.loader(run.inputs.groups.clone(), Order::Sequential, options)?;
    let bar = spinner(false, "scoring");
    let mut rows = 0u64;
    let progress = |n: usize| {
        rows += n as u64;
        bar.set_message(format!("scoring: {} rows", crate::text::group(rows)));
    };
    let detail = pollster::block_on(run.scorer.evaluate(&mut run.state, &mut loader, progress, &mut ()))?;
    bar.finish_and_clear();
    Ok((detail, loader))
}

/// Measures the best weights of a run on the test part of its split.
pub fn test_part(run: &Path, device: &Device, test: &Feed, json: bool) -> anyhow::Result<()> {
    let mut run = LoadedRun::open(run, device)?;
    let (detail, _) = measure(&mut run, test)?;
    if json {
        return output::json(&serde_json::json!({ "type": "test", "metrics": detail }));
    }
    output::line("these weights on the test rows:")?;
    super::metrics::print(&detail.metrics, detail.grouped.as_ref(), &detail.deciles)
}
