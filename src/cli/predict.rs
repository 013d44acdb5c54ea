//! `birkhoff predict`: one line a row, in the order of the input.

use super::args::PredictArgs;
use super::train::spinner;
use crate::data::criteo::{Labels, ReadOptions, RowPolicy};
use crate::data::loader::{Loader, LoaderOptions};
use crate::data::metrics::sigmoid;
use crate::text::group;
use crate::train::infer::LoadedRun;
use crate::train::run::write_atomic;
use std::io::{self, Write};

/// Runs the subcommand.
pub fn run(args: &PredictArgs) -> anyhow::Result<()> {
    super::output::not_an_input(&args.out, &[&args.data, &args.run])?;
    let device = super::device::open(&args.device.device)?;
    let mut run = LoadedRun::open(&args.run, &device)?;
    super::eval::note_unfinished(&args.run);
    let read = ReadOptions { policy: RowPolicy::Error, labels: Labels::Optional };
    let options = LoaderOptions::new(run.scorer.batch);
    let (encoder, groups) = (run.inputs.encoder.clone(), run.inputs.groups.clone());
    let mut loader = Loader::criteo_file(&args.data, encoder, groups, read, options)?;
    let bar = spinner(false, "scoring");
    let mut rows = 0u64;
    // a bad row is the reader's error, not the output file's
    let mut failed = None;
    let written = write_atomic(&args.out, |w| {
        writeln!(w, "score,logit")?;
        while let Some(batch) = loader.next() {
            let scored = batch.map_err(anyhow::Error::from).and_then(|b| {
                let s = pollster::block_on(run.scorer.logits(&mut run.state, &b))?;
                Ok((b, s))
            });
            let (batch, logits) = match scored {
                Ok(v) => v,
                Err(e) => {
                    failed = Some(e);
                    return Err(io::Error::other("stopped"));
                }
            };
            for s in &logits {
                writeln!(w, "{},{s}", sigmoid(f64::from(*s)))?;
            }
            rows += batch.rows as u64;
            bar.set_message(format!("scoring: {} rows", group(rows)));
            loader.recycle(batch);
        }
        Ok(())
    });
    bar.finish_and_clear();
    if let Some(e) = failed {
        return Err(e);
    }
    written?;
    eprintln!("{} scores written to {}", group(rows), args.out.display());
    Ok(())
}
