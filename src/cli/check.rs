//! `birkhoff check`: reads all rows and reports every kind of trouble.

use super::args::{CheckArgs, OnBadRow};
use super::drift::{Drift, why_one_class};
use super::output;
use crate::data::FittedEncoder;
use crate::data::drift::{ColumnDrift, Seen};
use crate::data::lengths::Lengths;
use crate::data::reader::{Labels, Source};
use crate::data::schema::Schema;
use crate::model::config::Config;
use crate::text::group;
use crate::train::run::RunFolder;
use crate::train::schema::schema;
use serde::Serialize;

#[derive(Serialize)]
struct Trouble<'a> {
    kind: &'a str,
    rows: u64,
    first: &'a str,
}

#[derive(Serialize)]
struct Report<'a> {
    files: usize,
    formats: Vec<String>,
    rows: u64,
    positives: u64,
    bad: u64,
    trouble: Vec<Trouble<'a>>,
    missing: Vec<(String, u64)>,
    warnings: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    drift: Option<&'a [ColumnDrift]>,
}

/// Runs the subcommand. Trouble found is an error's exit code, so that scripts see it.
pub fn run(args: &CheckArgs) -> anyhow::Result<()> {
    let run = args.against.as_deref().map(RunFolder::open).transpose()?;
    let config = run.as_ref().map(RunFolder::config_path).or(args.schema.clone());
    let cfg = Config::load(config.as_deref(), &args.sets)?;
    let encoder = run.map(|r| FittedEncoder::load(&r.vocab_path())).transpose()?;
    let schema = match &encoder {
        Some(encoder) => encoder.schema.clone(),
        None => schema(&cfg.data)?,
    };
    let mut seen = encoder.as_ref().and_then(Seen::new);
    let empty = seen.clone();
    let labels = if args.unlabelled { Labels::Optional } else { Labels::Required };
    let (places, _spool) = super::data::places(&args.files)?;
    let source = super::data::source(places, &cfg.data, &schema, OnBadRow::Skip, labels)?;
    let mut reader = source.open(&schema)?;
    let bar = super::train::spinner(false, "reading");
    let (n, c) = (schema.numeric.len(), schema.categorical.len());
    let (mut rows, mut positives) = (0u64, 0u64);
    let mut missing = vec![0u64; n + c];
    let mut lengths = vec![Lengths::default(); c];
    let result = loop {
        let counted = reader.next_chunks(|raw| {
            let mut missing = vec![0u64; n + c];
            for (k, m) in missing.iter_mut().enumerate() {
                *m = if k < n {
                    raw.numeric.iter().skip(k).step_by(n).filter(|v| v.is_nan()).count() as u64
                } else {
                    raw.fields.iter().skip(k - n).step_by(c).filter(|f| f.0 == f.1).count() as u64
                };
            }
            let positives = raw.labels.iter().filter(|&&l| l == 1).count() as u64;
            let mut lengths = vec![Lengths::default(); c];
            for (j, lengths) in
                lengths.iter_mut().enumerate().filter(|(j, _)| schema.categorical[*j].list.is_some())
            {
                (0..raw.len()).for_each(|row| lengths.push(raw.list(row * c + j).len() as u32));
            }
            let mut like = empty.clone();
            if let (Some(like), Some(encoder)) = (&mut like, &encoder) {
                like.push(encoder, &raw);
            }
            (raw.len() as u64, positives, missing, like, lengths)
        });
        match counted {
            Ok(Some(chunks)) => {
                for (r, p, m, like, l) in chunks {
                    lengths.iter_mut().zip(&l).for_each(|(a, b)| a.merge(b));
                    if let (Some(seen), Some(like)) = (&mut seen, &like) {
                        seen.merge(like);
                    }
                    (rows, positives) = (rows + r, positives + p);
                    missing.iter_mut().zip(m).for_each(|(a, b)| *a += b);
                }
                bar.set_message(format!("reading: {} rows", group(rows)));
            }
            Ok(None) => break Ok(()),
            Err(crate::data::DataError::AllSkipped { .. }) => break Ok(()),
            Err(e) => break Err(e),
        }
    };
    bar.finish_and_clear();
    result?;
    let skipped = reader.skipped();
    let drift = encoder.as_ref().and_then(|e| Drift::new(e, seen.as_ref()));
    if encoder.is_some() && drift.is_none() {
        eprintln!(
            "note: the run is of an older version, which did not keep what its training rows were like"
        );
    }
    let names = schema.numeric.iter().map(|c| &c.name).chain(schema.categorical.iter().map(|c| &c.name));
    let long = schema.categorical.iter().zip(&lengths);
    let long = long.filter_map(|(c, l)| Some(format!("column {}: {}", c.name, l.outliers()?)));
    let report = Report {
        files: source.places.len(),
        formats: reader.formats().iter().map(|f| f.describe()).collect(),
        rows,
        positives,
        bad: skipped.skipped,
        trouble: skipped
            .kinds
            .iter()
            .map(|(kind, rows, first)| Trouble { kind, rows: *rows, first })
            .collect(),
        missing: names.cloned().zip(missing).collect(),
        warnings: one_class(&source, &schema, rows, positives)
            .into_iter()
            .chain(long)
            .chain(drift.iter().flat_map(|d| &d.columns).filter_map(ColumnDrift::warning))
            .collect(),
        drift: drift.as_ref().map(|d| &d.columns[..]),
    };
    if args.json {
        output::json(&report)?;
    } else {
        print(&report, labels == Labels::Required)?;
        drift.as_ref().map_or(Ok(()), Drift::print)?;
    }
    if report.bad > 0 {
        anyhow::bail!(
            "{} of {} rows cannot be used; correct them, or leave them out with --on-bad-row skip (train, eval, predict)",
            group(report.bad),
            group(report.bad + report.rows)
        );
    }
    Ok(())
}

/// What is to be said of labels that are all the same.
fn one_class(source: &Source, schema: &Schema, rows: u64, positives: u64) -> Option<String> {
    let required = source.read.labels == Labels::Required;
    let all = required && rows > 0 && (positives == 0 || positives == rows);
    all.then(|| {
        let why = why_one_class(source, schema, positives > 0);
        format!(
            "all {} labels are {}{}",
            group(rows),
            u8::from(positives > 0),
            why.unwrap_or_else(|| ": a model needs clicks and non-clicks to learn from".into())
        )
    })
}

fn print(r: &Report<'_>, labels: bool) -> anyhow::Result<()> {
    let mut formats = r.formats.clone();
    formats.dedup();
    output::line(&format!("{} files, {}", r.files, formats.join(", ")))?;
    let rate = 100.0 * r.positives as f64 / r.rows.max(1) as f64;
    let rate = if labels { format!(", {rate:.2} % positive") } else { String::new() };
    output::line(&format!("{} good rows{rate}, {} bad rows", group(r.rows), group(r.bad)))?;
    for w in &r.warnings {
        output::line(&format!("warning: {w}"))?;
    }
    for t in &r.trouble {
        output::line(&format!("  {:>10}  {}; first: {}", group(t.rows), t.kind, t.first))?;
    }
    let mut missing: Vec<&(String, u64)> = r.missing.iter().filter(|m| m.1 > 0).collect();
    missing.sort_by_key(|m| std::cmp::Reverse(m.1));
    if !missing.is_empty() {
        output::line("missing values by column:")?;
        for (name, n) in missing {
            let percent = 100.0 * *n as f64 / r.rows.max(1) as f64;
            output::line(&format!("  {:>6.1} %  {name}", percent))?;
        }
    }
    Ok(())
}
