//! `birkhoff predict`: one line a row, in the order of the input.

use super::args::{OutFormat, PredictArgs};
use super::drift::Drift;
use super::train::{report_skipped, spinner};
use crate::data::drift::ColumnDrift;
use crate::data::loader::{LoaderOptions, Order};
use crate::data::metrics::sigmoid;
use crate::data::reader::Labels;
use crate::text::group;
use crate::train::infer::{LoadedRun, check_scores};
use crate::train::run::write_atomic;
use serde::Serialize;
use std::io::{self, Write};
use std::path::Path;

/// Runs the subcommand.
pub fn run(args: &PredictArgs) -> anyhow::Result<()> {
    predict(args).map_err(|e| super::data::hint_format(e, &args.read))
}

/// Refuses two columns of one name in the output.
fn check_columns(columns: &[String]) -> anyhow::Result<()> {
    for (i, name) in columns.iter().enumerate() {
        anyhow::ensure!(
            !columns[..i].contains(name),
            "--columns {name}: given twice; each column is written once"
        );
        anyhow::ensure!(
            !["score", "logit"].contains(&name.as_str()),
            "--columns {name}: the output has a column of that name already, the model's; rename the file's column, or \
             leave it out"
        );
    }
    Ok(())
}

fn predict(args: &PredictArgs) -> anyhow::Result<()> {
    let mut inputs: Vec<&Path> = args.data.iter().map(|d| d.as_path()).collect();
    inputs.push(&args.run);
    super::output::not_an_input(&args.out, &inputs)?;
    if let Some(report) = &args.report {
        super::output::not_an_input(report, &inputs)?;
        anyhow::ensure!(*report != args.out, "{}: --out and --report name one file", report.display());
    }
    check_columns(&args.columns)?;
    let stdout = args.out.as_os_str() == "-";
    let parquet = args.out.extension().is_some_and(|e| e == "parquet");
    let format = args.out_format.unwrap_or(if parquet { OutFormat::Parquet } else { OutFormat::Csv });
    let device = super::device::open(&args.device.device)?;
    let mut run = LoadedRun::open(&args.run, &device)?;
    super::eval::note_unfinished(&args.run);
    let encoder = run.inputs.encoder.clone();
    // the rows are read once: standard input needs no copy
    let (places, _spool) = super::data::places_once(&args.data)?;
    let mut source = super::data::source(
        places,
        &args.read.over(&run.config)?,
        &encoder.schema,
        args.on_bad_row,
        Labels::Optional,
    )?;
    source.passed = args.columns.clone();
    let name = source.name();
    let (feed, seen) = super::eval::counted(source, encoder.clone());
    let options = LoaderOptions::new(run.scorer.batch);
    let mut loader = feed.loader(run.inputs.groups.clone(), Order::Sequential, options)?;
    let bar = spinner(false, "scoring");
    let mut rows = 0u64;
    // a bad row is the reader's error, not the output file's
    let mut failed = None;
    let mut write = |w: &mut (dyn Write + Send)| {
        let mut table = Table::new(w, format, &args.columns)?;
        while let Some(batch) = loader.next() {
            let scored = batch.map_err(anyhow::Error::from).and_then(|b| {
                let s = pollster::block_on(run.scorer.logits(&mut run.state, &b))?;
                check_scores(&s, rows)?;
                Ok((b, s))
            });
            let (batch, logits) = match scored {
                Ok(v) => v,
                Err(e) => {
                    failed = Some(e);
                    return Err(io::Error::other("stopped"));
                }
            };
            table.write(&batch.passed, &logits)?;
            rows += batch.rows as u64;
            bar.set_message(format!("scoring: {} rows", group(rows)));
            loader.recycle(batch);
        }
        table.finish()
    };
    let written = if stdout {
        let mut out = io::BufWriter::new(io::stdout());
        let result = write(&mut out).and_then(|()| out.flush());
        result.map_err(|e| match e.kind() {
            io::ErrorKind::BrokenPipe => super::output::StdoutClosed.into(),
            // the CSV writer wraps it
            _ if e.to_string().contains("Broken pipe") => super::output::StdoutClosed.into(),
            _ => anyhow::anyhow!("cannot write to standard output: {e}"),
        })
    } else {
        write_atomic(&args.out, |w| write(w)).map_err(anyhow::Error::from)
    };
    bar.finish_and_clear();
    if let Some(e) = failed {
        return Err(e);
    }
    written?;
    report_skipped(Path::new(&name), loader.skipped());
    let drift = Drift::new(&encoder, seen.get());
    if let Some(drift) = &drift {
        drift.warn(&name);
    }
    if let Some(path) = &args.report {
        let text =
            serde_json::to_vec_pretty(&Report { rows, drift: drift.as_ref().map(|d| &d.columns[..]) })?;
        write_atomic(path, |w| w.write_all(&text))?;
    }
    eprintln!(
        "{} scores written to {}",
        group(rows),
        if stdout { "standard output".into() } else { args.out.display().to_string() }
    );
    Ok(())
}

/// What `--report` writes.
#[derive(Serialize)]
struct Report<'a> {
    /// Rows scored.
    rows: u64,
    /// Each column beside the training rows; `null` of a run of an older version.
    drift: Option<&'a [ColumnDrift]>,
}

/// The output: passed columns, score, logit.
enum Table<'a> {
    Csv(Box<csv::Writer<&'a mut (dyn Write + Send)>>, usize),
    #[cfg(feature = "formats")]
    Parquet(
        Box<parquet::arrow::ArrowWriter<&'a mut (dyn Write + Send)>>,
        std::sync::Arc<arrow_schema::Schema>,
    ),
}

impl<'a> Table<'a> {
    fn new(w: &'a mut (dyn Write + Send), format: OutFormat, columns: &[String]) -> io::Result<Self> {
        if format == OutFormat::Csv {
            let mut csv = csv::Writer::from_writer(w);
            csv.write_record(columns.iter().map(String::as_str).chain(["score", "logit"]))?;
            return Ok(Table::Csv(csv.into(), columns.len()));
        }
        #[cfg(not(feature = "formats"))]
        return Err(io::Error::other("this build writes no Parquet; take --out-format csv"));
        #[cfg(feature = "formats")]
        {
            use arrow_schema::{DataType, Field, Schema};
            let mut fields: Vec<Field> =
                columns.iter().map(|c| Field::new(c, DataType::Utf8, true)).collect();
            fields.push(Field::new("score", DataType::Float64, false));
            fields.push(Field::new("logit", DataType::Float32, false));
            let schema = std::sync::Arc::new(Schema::new(fields));
            let options = parquet::file::properties::WriterProperties::builder()
                .set_compression(parquet::basic::Compression::SNAPPY)
                .build();
            let writer = parquet::arrow::ArrowWriter::try_new(w, schema.clone(), Some(options))?;
            Ok(Table::Parquet(writer.into(), schema))
        }
    }

    /// Rows in order; `passed` is `[rows, passed columns]`.
    fn write(&mut self, passed: &[String], logits: &[f32]) -> io::Result<()> {
        match self {
            Table::Csv(csv, columns) => {
                for (r, s) in logits.iter().enumerate() {
                    for text in &passed[r * *columns..(r + 1) * *columns] {
                        csv.write_field(text)?;
                    }
                    csv.write_record([sigmoid(f64::from(*s)).to_string(), s.to_string()])?;
                }
                Ok(())
            }
            #[cfg(feature = "formats")]
            Table::Parquet(writer, schema) => {
                use arrow_array::{ArrayRef, Float32Array, Float64Array, RecordBatch, StringArray};
                use std::sync::Arc;
                let columns = schema.fields().len() - 2;
                // a missing value is null
                let text = |c: usize| {
                    let values = passed.iter().skip(c).step_by(columns);
                    StringArray::from_iter(values.map(|v| Some(v.as_str()).filter(|v| !v.is_empty())))
                };
                let mut arrays: Vec<ArrayRef> = (0..columns).map(|c| Arc::new(text(c)) as ArrayRef).collect();
                arrays.push(Arc::new(Float64Array::from_iter_values(
                    logits.iter().map(|s| sigmoid(f64::from(*s))),
                )));
                arrays.push(Arc::new(Float32Array::from_iter_values(logits.iter().copied())));
                let batch = RecordBatch::try_new(schema.clone(), arrays).map_err(io::Error::other)?;
                writer.write(&batch)?;
                Ok(())
            }
        }
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Table::Csv(mut csv, _) => csv.flush(),
            #[cfg(feature = "formats")]
            Table::Parquet(writer, _) => {
                writer.close()?;
                Ok(())
            }
        }
    }
}
