//! Rows made in the page or read from a file, in slices of a frame.

use std::sync::Arc;

use anyhow::{Context, bail};
use birkhoff::data::criteo::check_columns;
use birkhoff::data::fitter::Fitter;
use birkhoff::data::input::Place;
use birkhoff::data::reader::{Labels, ReadOptions, RowPolicy, Source};
use birkhoff::data::rows::Dataset;
use birkhoff::data::schema::Schema;
use birkhoff::data::synth::{DEFAULT_WORLD, Synth};
use birkhoff::data::{DataError, FittedEncoder};

use crate::pace::{Pace, now};
use crate::setup::{DataChoice, split_at};

/// Bytes parsed at a time: some 10 ms.
const BLOCK: usize = 1 << 18;
/// Rows made at a time.
const MADE: u64 = 200;

/// Training and validation rows with the encoder fitted to the former.
pub struct Loaded {
    /// Vocabularies and statistics.
    pub encoder: Arc<FittedEncoder>,
    /// Training rows.
    pub train: Arc<Dataset>,
    /// Validation rows.
    pub valid: Arc<Dataset>,
    /// NE of the planted truth on the validation rows.
    pub truth_ne: Option<f64>,
}

/// Makes or reads the rows; `say` hears what is going on.
pub async fn load(
    choice: &DataChoice,
    schema: &Schema,
    pace: &mut Pace,
    say: &mut dyn FnMut(String),
) -> anyhow::Result<Loaded> {
    check_columns(schema)?;
    let (name, train, valid, truth_ne);
    match choice {
        DataChoice::Planted { seed, train: n, valid: v } => {
            name = ("generated training rows".to_string(), "generated validation rows".to_string());
            train = made(*seed, *n, "training", pace, say).await?.0;
            let made = made(seed.wrapping_add(1), *v, "validation", pace, say).await?;
            (valid, truth_ne) = (made.0, made.1);
        }
        DataChoice::File { name: file, bytes } => {
            let cut = split_at(bytes);
            if cut == bytes.len() {
                bail!("{file}: too few rows; the last tenth is for validation");
            }
            name = (file.clone(), format!("{file}, last tenth"));
            (train, valid, truth_ne) = (bytes[..cut].to_vec(), bytes[cut..].to_vec(), None);
        }
    }
    let options = ReadOptions { policy: RowPolicy::Skip, labels: Labels::Required };
    let encoder = fit(&name.0, &train, schema, options, pace, say).await?;
    if encoder.positives == 0 || encoder.positives == encoder.rows {
        let all = u8::from(encoder.positives > 0);
        bail!("{}: all {} labels are {all}; a model needs both", name.0, encoder.rows);
    }
    let encoder = Arc::new(encoder);
    let train = encode(&name.0, &train, &encoder, options, pace, say).await?;
    let valid = encode(&name.1, &valid, &encoder, options, pace, say).await?;
    Ok(Loaded { encoder, train: Arc::new(train), valid: Arc::new(valid), truth_ne })
}

async fn turn(pace: &mut Pace) {
    if let Some(wait) = pace.pause() {
        wait.await;
    }
}

async fn made(
    seed: u64,
    rows: u64,
    what: &str,
    pace: &mut Pace,
    say: &mut dyn FnMut(String),
) -> anyhow::Result<(Vec<u8>, Option<f64>)> {
    let mut synth = Synth::new(DEFAULT_WORLD, seed);
    let mut bytes = Vec::new();
    let mut ne = 0.0;
    let (mut positives, mut at) = (0u64, 0);
    let mut said = 0.0;
    while at < rows {
        let n = MADE.min(rows - at);
        for _ in 0..n {
            let row = synth.next_row();
            let p = if row.label { row.probability } else { 1.0 - row.probability };
            ne -= p.max(1e-12).ln();
            positives += u64::from(row.label);
            row.write_to(&mut bytes).context("out of memory")?;
        }
        at += n;
        if now() - said > 100.0 {
            said = now();
            say(format!("making {what} rows: {at} of {rows}"));
        }
        turn(pace).await;
    }
    let rate = positives as f64 / rows.max(1) as f64;
    let entropy = -(rate * rate.ln() + (1.0 - rate) * (1.0 - rate).ln());
    let truth = (entropy > 0.0).then(|| ne / rows as f64 / entropy);
    Ok((bytes, truth))
}

/// Rows of Criteo's format, in blocks that are short enough for a frame.
fn source(name: &str, bytes: &[u8], options: ReadOptions) -> Source {
    Source { block: BLOCK, ..Source::criteo(Place::Bytes(name.into(), bytes.into()), options) }
}

async fn fit(
    name: &str,
    bytes: &[u8],
    schema: &Schema,
    options: ReadOptions,
    pace: &mut Pace,
    say: &mut dyn FnMut(String),
) -> Result<FittedEncoder, DataError> {
    let mut fitter = Fitter::new(schema)?;
    let mut reader = source(name, bytes, options).open(schema)?;
    let mut rows = 0;
    while let Some(chunks) = reader.next_chunks(|rows| rows)? {
        for chunk in &chunks {
            rows += chunk.len();
            fitter.push(chunk)?;
        }
        say(format!("counting categories: {rows} rows"));
        turn(pace).await;
    }
    fitter.finish()
}

/// Encodes a file's rows.
pub async fn encode(
    name: &str,
    bytes: &[u8],
    encoder: &FittedEncoder,
    options: ReadOptions,
    pace: &mut Pace,
    say: &mut dyn FnMut(String),
) -> Result<Dataset, DataError> {
    let mut reader = source(name, bytes, options).open(&encoder.schema)?;
    let mut rows = encoder.empty_rows();
    while reader.encode_more(encoder, &mut rows)? {
        say(format!("encoding {name}: {} rows", rows.len()));
        turn(pace).await;
    }
    Ok(Dataset { rows, labelled: reader.labelled(), skipped: reader.skipped().clone() })
}
