//! `birkhoff synth`: writes a click log whose best reachable normalized entropy is known.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::args::SynthArgs;
use super::output;
use crate::data::is_stream;
use crate::data::synth::{Synth, SynthSummary};

/// Rows between two moves of the progress bar.
const TICK: u64 = 1024;

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    file: &'a str,
    seed: u64,
    world: u64,
    #[serde(flatten)]
    summary: &'a SynthSummary,
}

/// Runs `birkhoff synth`.
pub fn run(args: &SynthArgs) -> anyhow::Result<()> {
    let bar = progress_bar(args.rows);
    let written = Synth::new(args.world, args.seed).write_file_watched(&args.out, args.rows, |done| {
        if done.is_multiple_of(TICK) {
            bar.set_position(done);
        }
    });
    bar.finish_and_clear();
    let summary = written?;
    let file = args.out.display().to_string();
    if args.json {
        return output::json(&Report { file: &file, seed: args.seed, world: args.world, summary: &summary });
    }
    let text = describe(&file, args, &summary);
    if is_stream(&args.out) {
        // The rows may have gone to stdout itself (--out /dev/stdout).
        eprintln!("{text}");
        return Ok(());
    }
    output::line(&text)
}

/// A bar on stderr; hidden where stderr is no terminal.
fn progress_bar(rows: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(rows), ProgressDrawTarget::stderr_with_hz(10));
    // The template is fixed, so it parses; the default style serves as well.
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {human_pos}/{human_len} rows  {per_sec}  {eta}")
    {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// The summary for people.
fn describe(file: &str, args: &SynthArgs, s: &SynthSummary) -> String {
    let (world, seed) = (args.world, args.seed);
    let truth = match (s.truth_ne, s.truth_auc) {
        (Some(ne), Some(auc)) => format!("NE {ne:.4}, AUC {auc:.4}; the best that a model can expect"),
        _ => "NE and AUC are undefined, all labels are the same".into(),
    };
    format!(
        "{file}: {} rows, {} positives, base rate {:.4} (world {world}, seed {seed})\nplanted truth: {truth}",
        s.rows, s.positives, s.base_rate,
    )
}
