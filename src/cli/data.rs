//! The rows of a run: files opened, split, counted and encoded as the arguments and the configuration say.

use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use indicatif::ProgressBar;

use super::args::{DataArgs, OnBadRow, ReadArgs};
use super::drift::{self, Drift};
use super::train::{report_skipped, row_policy};
use crate::data::cache::Cache;
use crate::data::error::{RowProblem, quoted};
use crate::data::feed::{Feed, Files};
use crate::data::format::Format;
use crate::data::input::{self, Place};
use crate::data::reader::{Labels, ReadOptions, Reader, Source, fit};
use crate::data::schema::Schema;
use crate::data::split::{Part, Split, SplitBy, cuts, parse_shares, time_of};
use crate::data::temporary::Temporary;
use crate::data::witness::Witness;
use crate::data::{DataError, FittedEncoder};
use crate::model::config::{self, Config, DataConfig};
use crate::text::group;
use crate::train::schema::{format, schema};

/// Data of a run, open.
pub struct Opened {
    /// Vocabularies and statistics of the training rows.
    pub encoder: Arc<FittedEncoder>,
    /// Rows to learn from.
    pub train: Feed,
    /// Rows to evaluate on.
    pub valid: Feed,
    /// Rows that nothing is chosen on.
    pub test: Option<Feed>,
    /// How they were split.
    pub split: Option<Split>,
    /// Whether files of text have a header, where the training files are text.
    pub header: Option<bool>,
    /// What the user should know.
    pub notes: Vec<String>,
    /// What validation rows are like beside the training rows.
    pub drift: Option<Drift>,
}

/// What is known of a run that goes on.
pub struct Known {
    encoder: Option<FittedEncoder>,
    split: Option<Split>,
}

impl Known {
    /// Reads a run's vocabularies, which must be of the configuration's schema; where the file is gone, they are counted
    /// anew, and a checkpoint tells whether they are the same.
    pub fn load(vocab: &Path, cfg: &Config, split: Option<Split>) -> anyhow::Result<Known> {
        if !vocab.exists() {
            return Ok(Known { encoder: None, split });
        }
        let encoder = FittedEncoder::load(vocab)?;
        encoder.check_schema(vocab, &schema(&cfg.data)?)?;
        Ok(Known { encoder: Some(encoder), split })
    }
}

/// Files that are read more than once: standard input and pipes go to temporary files first.
pub fn places(patterns: &[PathBuf]) -> anyhow::Result<(Vec<Place>, Vec<Temporary>)> {
    spool(input::places(patterns)?, true)
}

/// Files that are read once: standard input is left as it is, pipes go to temporary files, as they are opened more often.
pub fn places_once(patterns: &[PathBuf]) -> anyhow::Result<(Vec<Place>, Vec<Temporary>)> {
    spool(input::places(patterns)?, false)
}

fn spool(mut places: Vec<Place>, stdin: bool) -> anyhow::Result<(Vec<Place>, Vec<Temporary>)> {
    let mut spools = vec![];
    for place in &mut places {
        let name = place.name();
        let mut from: Box<dyn Read> = match place {
            Place::Stdin if stdin => {
                if std::io::stdin().is_terminal() {
                    eprintln!("{}: reads rows from the terminal; Ctrl-D ends them", name.display());
                }
                Box::new(std::io::stdin().lock())
            }
            Place::File(path) if input::is_pipe(path) => {
                let path = &*path;
                // before it is opened: that waits for whoever writes
                eprintln!("{}: a pipe; copied to a temporary file first", name.display());
                let open = File::open(path).map_err(|e| DataError::io(path, "read", e))?;
                Box::new(open)
            }
            _ => continue,
        };
        let to = || {
            format!(
                "{}: cannot be copied to a temporary file; set TMPDIR to a folder with room",
                name.display()
            )
        };
        let (copy, mut file) = Temporary::copy_of_input().with_context(to)?;
        std::io::copy(&mut from, &mut file).with_context(to)?;
        *place = Place::Spooled(copy.path().to_path_buf(), name);
        spools.push(copy);
    }
    Ok((places, spools))
}

/// A source of the configuration's format. Criteo's columns are assumed only where the files are Criteo's.
pub fn source(
    places: Vec<Place>,
    data: &DataConfig,
    schema: &Schema,
    policy: OnBadRow,
    labels: Labels,
) -> anyhow::Result<Source> {
    let source = Source::new(places, format(data), ReadOptions { policy: row_policy(policy), labels });
    if data.columns.is_empty() && data.format != config::Format::Criteo && schema.file.len() == 40 {
        for place in &source.places {
            // standard input is read once; its rows tell
            if matches!(place, Place::Stdin) {
                continue;
            }
            let (head, _) = place.open(&source.format)?;
            let found = crate::data::format::resolve(&head, &source.format);
            let criteo = matches!(&found, Ok(Format::Delimited(d)) if d.criteo);
            let file = place.name();
            // a header may have Criteo's names
            let named = |r: &crate::data::reader::Reader| matches!(r.formats().last(), Some(Format::Delimited(d)) if d.header == Some(true));
            let alone = Source { places: vec![place.clone()], ..source.clone() };
            if !criteo && !head.is_empty() && !alone.open(schema).is_ok_and(|r| named(&r)) {
                let is = found.map_or_else(|e| e, |f| format!("is {}, not Criteo's log", f.describe()));
                bail!(
                    "{}: {is}, and the configuration lists no columns; make a schema: birkhoff schema {} --out schema.toml, \
                     then give --schema schema.toml",
                    file.display(),
                    file.display()
                );
            }
        }
    }
    Ok(source)
}

/// An error of files that are not of the run's format, with what to do about it.
pub fn hint_format(e: anyhow::Error, read: &ReadArgs) -> anyhow::Error {
    let other = match e.downcast_ref() {
        Some(DataError::Columns { .. } | DataError::NotPlainText { .. }) => true,
        Some(DataError::Row { problem, .. }) => matches!(problem, RowProblem::FieldCount { .. }),
        _ => false,
    };
    match other && read.format.is_none() {
        true => {
            anyhow::anyhow!("{e}; where the file's format is not that of the run's training: --format auto")
        }
        false => e,
    }
}

/// Opens everything that a run needs; reads the training rows once, unless what they lead to is known.
pub fn open(
    args: &DataArgs,
    cfg: &Config,
    known: Option<Known>,
    spinner: &ProgressBar,
) -> anyhow::Result<Opened> {
    let schema = schema(&cfg.data)?;
    let (train_places, spool) = places(&args.train)?;
    let mut notes = vec![];
    let policy = args.on_bad_row.unwrap_or_default();
    let mut train = source(train_places, &cfg.data, &schema, policy, Labels::Required)?;
    // decided once: the validation rows, and whatever is scored, are read likewise
    let header = train.open(&schema)?.header();
    train.decided = header;
    if known.is_some() && header == Some(true) {
        // what the first file had, not what was said of each
        train.format.header = None;
    }
    train.witness = Some(Witness::default());
    let decided = known.as_ref().filter(|k| k.encoder.is_some() || k.split.is_some());
    let split = match (decided, args.split.as_deref()) {
        (Some(known), _) => known.split.clone(),
        (None, Some(shares)) => Some(split(shares, args.split_by.as_deref(), &train, &schema)?),
        (None, None) => None,
    };
    let part = |p: Part| split.as_ref().map(|s| train.part(s, p));
    let training = part(Part::Train).unwrap_or_else(|| train.clone());

    let encoder = match known.and_then(|known| known.encoder) {
        Some(encoder) => encoder,
        None => {
            let (encoder, skipped) = fit(&training, &schema)?;
            report_skipped(Path::new(&train.name()), &skipped);
            encoder
        }
    };
    if encoder.rows == 0 {
        bail!("{}: the training part of the split has no rows; change --split", train.name());
    }
    if encoder.positives == 0 || encoder.positives == encoder.rows {
        return Err(one_class(&training, &encoder));
    }
    if let (Some([all, _]), Some(weight)) = (encoder.weights, &schema.weight)
        && all <= 0.0
    {
        bail!(
            "{}: column {}: the weights of all {} rows are 0, so that no row counts; give it another kind than weight, or \
             correct the values",
            train.name(),
            weight,
            encoder.rows
        );
    }
    let encoder = Arc::new(encoder);
    let validating = match part(Part::Valid) {
        Some(source) => source,
        None => {
            let (places, valid_spool) = places(&args.valid)?;
            let mut valid = source(places, &cfg.data, &schema, policy, Labels::Required)?;
            valid.decided = header;
            if header == Some(true) {
                valid.format.header = None;
            }
            valid.witness = train.witness.clone();
            keep(valid_spool);
            valid
        }
    };
    keep(spool);
    spinner.set_message("looking at the validation rows");
    let mut reader = validating.open(&encoder.schema)?;
    let (seen, mut drift) = look_at(&mut reader, &encoder)?;
    // values of a group are in one part alone: others are new, as was asked for
    if let (Some(drift), Some(SplitBy::Group { column, .. })) = (&mut drift, split.as_ref().map(|s| &s.by)) {
        drift.columns.iter_mut().filter(|c| c.column == *column).for_each(|c| c.far = false);
    }
    if !seen {
        bail!("{}: no rows to validate on; change --split or --valid", validating.name());
    }
    for (file, reader) in [(&training, &training.open(&encoder.schema)?), (&validating, &reader)] {
        if let Some(format) = reader.formats().first()
            && cfg.data.format == config::Format::Auto
        {
            let note = format!("{}: read as {}", file.name(), format.describe());
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
    }
    let feed = |source: Source| -> anyhow::Result<Feed> {
        let mut files = Files::new(source, encoder.clone());
        files.shuffle = cfg.data.shuffle_rows;
        files.cache = match args.cache.as_deref() {
            None => None,
            Some(folder) if folder == Path::new("memory") => Some(Cache::memory()),
            Some(folder) => {
                spinner.set_message("looking for cached rows");
                Some(Cache::folder(folder, &files.source, &encoder)?)
            }
        };
        Ok(files.into())
    };
    let test = match part(Part::Test) {
        Some(source) if split.as_ref().is_some_and(|s| s.shares[2] > 0.0) => Some(feed(source)?),
        _ => None,
    };
    Ok(Opened {
        train: feed(training)?,
        valid: feed(validating)?,
        test,
        split,
        header,
        notes,
        drift,
        encoder,
    })
}

/// Reads validation rows, as many as drift is told from; whether there is one.
fn look_at(reader: &mut Reader, encoder: &FittedEncoder) -> anyhow::Result<(bool, Option<Drift>)> {
    reader.count_values(encoder);
    let (mut rows, mut count) = (encoder.empty_rows(), 0);
    loop {
        let more = reader.encode_more(encoder, &mut rows)?;
        count += rows.len() as u64;
        // an older run's encoder has nothing to compare with: one row is enough
        let enough = if reader.seen().is_some() { drift::LOOKED_AT } else { 1 };
        if !more || count >= enough {
            break;
        }
        rows.crop(0..0);
    }
    Ok((count > 0, Drift::new(encoder, reader.seen())))
}

/// The error of labels that are all the same.
fn one_class(source: &Source, encoder: &FittedEncoder) -> anyhow::Error {
    let why = drift::why_one_class(source, &encoder.schema, encoder.positives > 0);
    anyhow::anyhow!(
        "{}: all {} labels are {}{}",
        source.name(),
        group(encoder.rows),
        u8::from(encoder.positives > 0),
        why.unwrap_or_else(|| "; a model needs clicks and non-clicks to learn from".into())
    )
}

static KEPT: std::sync::Mutex<Vec<Temporary>> = std::sync::Mutex::new(vec![]);

/// Leaves temporary files to the end of the command.
fn keep(spool: Vec<Temporary>) {
    KEPT.lock().unwrap_or_else(|e| e.into_inner()).extend(spool);
}

/// Removes what was kept; statics are not dropped.
pub fn clean() {
    KEPT.lock().unwrap_or_else(|e| e.into_inner()).clear();
}

/// The split that the arguments ask for; by time, all rows are read for the cuts.
fn split(shares: &str, by: Option<&str>, source: &Source, schema: &Schema) -> anyhow::Result<Split> {
    let shares = parse_shares(shares).map_err(|e| anyhow::anyhow!("--split: {e}"))?;
    // not the run's seed: runs of several seeds are measured on the same rows
    let seed = 1;
    let by = match by.map(|b| b.split_once(':').unwrap_or((b, ""))) {
        None | Some(("random", "")) => SplitBy::Random { seed },
        Some(("random", text)) => match text.parse() {
            Ok(seed) => SplitBy::Random { seed },
            Err(_) => bail!("--split-by random:{text}: the seed is not a whole number"),
        },
        Some(("group", column)) if !column.is_empty() => SplitBy::Group { column: column.into(), seed },
        Some(("time", column)) if !column.is_empty() => {
            let times = times(source, schema, column)?;
            let Some(cuts) = cuts(times, shares) else {
                bail!(
                    "--split-by time:{column}: too few different times to give every part some rows; use another column, or random"
                );
            };
            SplitBy::Time { column: column.into(), cuts }
        }
        Some(_) => bail!("--split-by takes random, random:SEED, group:COLUMN or time:COLUMN"),
    };
    Ok(Split { shares, by })
}

/// The times of all rows.
fn times(source: &Source, schema: &Schema, column: &str) -> anyhow::Result<Vec<f64>> {
    let source = Source { passed: vec![column.to_string()], ..source.clone() };
    let mut reader = source.open(schema)?;
    let mut times = vec![];
    while let Some(chunks) = reader.next_chunks(|rows| {
        let time = |(&r, &line): (&(u32, u32), &u64)| {
            time_of(rows.slice(r)).ok_or_else(|| (line, quoted(rows.slice(r))))
        };
        rows.passed.iter().zip(&rows.lines).map(time).collect::<Vec<_>>()
    })? {
        for time in chunks.into_iter().flatten() {
            match time {
                Ok(time) => times.push(time),
                Err((line, value)) => {
                    let problem = RowProblem::BadTime { column: column.into(), value };
                    return Err(DataError::Row { path: reader.path(), line, problem }.into());
                }
            }
        }
    }
    Ok(times)
}
