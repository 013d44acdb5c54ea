//! `birkhoff gains`: the gain curves of a run, in the terminal or as a figure.

use super::args::GainsArgs;
use super::output;
use crate::diagnose::{Record, Snapshot};
use crate::train::history::{self, History};
use crate::train::run::write_atomic;
use crate::train::trainer::Event;
use anyhow::{Context, bail};
use serde_json::json;
use std::path::Path;

/// What the command shows: one diagnosis, and how the greatest gains went over the run.
pub struct Gains {
    /// Name of the run, for titles.
    pub run: String,
    /// The diagnosis shown.
    pub record: Record,
    /// Its matrices, where the run kept them.
    pub snapshot: Option<Snapshot>,
    /// Step, greatest forward composite, greatest backward composite of every diagnosis.
    pub course: Vec<(u64, f64, f64)>,
}

/// Runs the subcommand.
pub fn run(args: &GainsArgs) -> anyhow::Result<()> {
    let gains = load(&args.run, args.step)?;
    if let Some(file) = &args.out {
        let bytes = figure(&gains, file)?;
        write_atomic(file, |w| std::io::Write::write_all(w, &bytes))?;
        eprintln!("{}: written", file.display());
    }
    if args.json {
        let course: Vec<_> =
            gains.course.iter().map(|c| json!({"step": c.0, "forward": c.1, "backward": c.2})).collect();
        return output::json(&json!({"diagnosis": gains.record, "course": course}));
    }
    if args.out.is_none() { print(&gains) } else { Ok(()) }
}

/// Reads a run's diagnosis at `step` (the last one by default).
fn load(run: &Path, step: Option<u64>) -> anyhow::Result<Gains> {
    let h = History::read(run)?;
    for p in &h.problems {
        eprintln!("warning: {p}; the line is left out");
    }
    let records: Vec<Record> = h
        .events
        .into_iter()
        .filter_map(|e| if let Event::Diagnose(r) = e { Some(r) } else { None })
        .collect();
    if records.is_empty() {
        bail!(
            "{}: {}",
            run.display(),
            match h.problems.len() {
                0 => "the run has no diagnosis; train with train.diagnose_every above 0 (the default is 20)"
                    .into(),
                n => format!("no diagnosis could be read ({n} unreadable lines, see the warnings above)"),
            }
        );
    }
    // a NaN is what there is to see, not something to pass over
    let greatest =
        |v: &[f64]| v.iter().copied().fold(0.0, |a: f64, b| if a.is_nan() || a > b { a } else { b });
    let course = records
        .iter()
        .map(|r| (r.step, greatest(&r.composite_forward), greatest(&r.composite_backward)))
        .collect();
    let record = match step {
        None => records.last().cloned(),
        Some(s) => records.iter().find(|r| r.step == s).cloned(),
    };
    let record = record.with_context(|| {
        let steps: Vec<u64> = records.iter().map(|r| r.step).collect();
        let near = steps.iter().min_by_key(|&&x| x.abs_diff(step.unwrap_or(0))).copied().unwrap_or(0);
        format!(
            "{}: no diagnosis at step {}; the run has {} of them, the nearest at step {near}",
            run.display(),
            step.unwrap_or(0),
            steps.len()
        )
    })?;
    let file = history::snapshots(run).into_iter().find(|s| s.0 == record.step);
    let snapshot = file.map(|(_, path)| history::snapshot(&path)).transpose()?;
    let run = run.file_name().map_or_else(|| run.display().to_string(), |n| n.to_string_lossy().into_owned());
    Ok(Gains { run, record, snapshot, course })
}

#[cfg(feature = "plots")]
fn figure(gains: &Gains, file: &Path) -> anyhow::Result<Vec<u8>> {
    super::figure::draw(gains, super::figure::Kind::of(file)?)
}

#[cfg(not(feature = "plots"))]
fn figure(_: &Gains, _: &Path) -> anyhow::Result<Vec<u8>> {
    bail!("this birkhoff was built without figures; build it with `cargo build --release --features plots`")
}

/// Width of a bar in characters.
const BAR: f64 = 24.0;

/// A bar on a logarithmic axis from 1/span to span, 1 in the middle.
fn bar(gain: f64, span: f64) -> String {
    let middle = (BAR / 2.0) as usize;
    if gain.is_nan() {
        return "?".repeat(BAR as usize + 1);
    }
    let at = if gain > 0.0 { gain.ln() / span.ln() } else { -1.0 };
    let cells = (at.clamp(-1.0, 1.0) * middle as f64).round() as i64;
    (0..BAR as i64 + 1)
        .map(|c| {
            let d = c - middle as i64;
            match d {
                0 => '│',
                d if (d > 0 && d <= cells) || (d < 0 && d >= cells) => '█',
                _ => '·',
            }
        })
        .collect()
}

fn print(g: &Gains) -> anyhow::Result<()> {
    let r = &g.record;
    let (mode, streams) = g.snapshot.as_ref().map_or(("", 0), |s| (s.mode.as_str(), s.streams));
    let what = if mode.is_empty() { String::new() } else { format!(", {mode}, {streams} streams") };
    output::line(&format!(
        "{}{what}: gains at step {} ({} rows)",
        g.run,
        r.step,
        crate::text::group(r.rows)
    ))?;
    output::line("")?;
    let all = r.composite_forward.iter().chain(&r.composite_backward);
    // round the axis to a power of two, at least the band that the paper calls stable
    let widest = all.fold(3.0f64, |s, &x| if x > 0.0 { s.max(x.max(1.0 / x)) } else { s });
    let span = 2f64.powf(widest.log2().ceil());
    let axis = format!("{:<12}1{:>12}", format!("1/{span:.0}"), format!("{span:.0}"));
    output::line(&format!(
        "{:>5}  {:>9} {:>9}   {:>9} {axis}   {:>9} {axis}",
        "layer", "single", "single", "composite", "composite"
    ))?;
    output::line(&format!(
        "{:>5}  {:>9} {:>9}   {:>9} {:25}   {:>9} {:25}",
        "", "forward", "backward", "forward", "(layers 0 to l)", "backward", "(layers l to last)"
    ))?;
    for (l, s) in r.layers.iter().enumerate() {
        let (f, b) = (r.composite_forward[l], r.composite_backward[l]);
        output::line(&format!(
            "{l:>5}  {:>9.4} {:>9.4}   {f:>9.4} {}   {b:>9.4} {}",
            s.forward_gain,
            s.backward_gain,
            bar(f, span),
            bar(b, span)
        ))?;
    }
    let broken =
        |l: &crate::diagnose::LayerStats| !(l.forward_gain.is_finite() && l.backward_gain.is_finite());
    if r.layers.iter().any(broken) {
        output::line("")?;
        output::line("the residual stream diverged: gains are not numbers any more")?;
    }
    if g.course.len() > 1 {
        output::line("")?;
        let greatest = g.course.iter().map(|c| c.1.max(c.2)).fold(0.0, f64::max);
        output::line(&format!(
            "greatest composite gain over the run: forward {}, backward {}; peak {greatest:.4}",
            spark(&g.course.iter().map(|c| c.1).collect::<Vec<_>>()),
            spark(&g.course.iter().map(|c| c.2).collect::<Vec<_>>())
        ))?;
    }
    Ok(())
}

/// A curve in at most 40 characters, from its least value to its greatest, both named.
fn spark(values: &[f64]) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let per = values.len().div_ceil(40).max(1);
    let v: Vec<f64> = values.chunks(per).map(|c| c.iter().copied().fold(f64::MIN, f64::max)).collect();
    let lost = values.iter().any(|x| x.is_nan());
    let (low, high) = v.iter().fold((f64::MAX, f64::MIN), |(a, b), &x| (a.min(x), b.max(x)));
    let line: String = v
        .iter()
        .map(|x| {
            let t = if high > low { (x - low) / (high - low) } else { 0.0 };
            LEVELS[((t * 7.0).round() as usize).min(7)]
        })
        .collect();
    format!("{low:.4} {line} {high:.4}{}", if lost { " and not a number" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_grow_from_one_to_both_sides() {
        assert_eq!(bar(1.0, 8.0), "············│············");
        assert_eq!(bar(8.0, 8.0), "············│████████████");
        assert_eq!(bar(0.125, 8.0), "████████████│············");
        assert_eq!(bar(0.0, 8.0), "████████████│············");
        assert_eq!(bar(1e9, 8.0).chars().count(), 25);
    }

    #[test]
    fn sparks_are_short_and_name_their_ends() {
        let v: Vec<f64> = (0..1000).map(|i| 1.0 + i as f64 / 999.0).collect();
        let s = spark(&v);
        assert!(s.starts_with("1.0240 ▁") && s.ends_with("█ 2.0000") && s.chars().count() <= 54, "{s}");
        assert_eq!(spark(&[1.0]), "1.0000 ▁ 1.0000");
    }
}
