//! The arguments of the commands that work on finished runs, and of those that make many.

use std::path::PathBuf;

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};

use crate::model::config::{Config, ConfigError, DataConfig, Format, Header};

impl ValueEnum for Header {
    fn value_variants<'a>() -> &'a [Self] {
        &[Header::Auto, Header::Yes, Header::No]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name()))
    }
}

/// How files are read that are not as those that a run was trained on.
#[derive(Debug, Clone, Default, Args)]
pub struct ReadArgs {
    /// Format of the files; auto: told from the content [default: data.format of the run]
    ///
    /// With it, delimiter, quotes and header are told from the content, too, whatever the run's configuration says.
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<Format>,
    /// What stands between fields: one character, or tab [default: data.delimiter of the run]
    #[arg(long, value_name = "CHARACTER")]
    pub delimiter: Option<String>,
    /// Whether the first line has the columns' names [default: data.header of the run]
    #[arg(long, value_name = "WORD")]
    pub header: Option<Header>,
    /// Character set, such as latin1 [default: data.encoding of the run]
    #[arg(long, value_name = "NAME")]
    pub encoding: Option<String>,
}

impl ReadArgs {
    /// What the run's configuration says about files, and these options over it.
    pub fn over(&self, run: &Config) -> Result<DataConfig, ConfigError> {
        let mut config = run.clone();
        let d = &mut config.data;
        if let Some(format) = self.format {
            d.format = format;
            (d.delimiter, d.quote, d.header) = (String::new(), "auto".into(), Header::Auto);
        }
        if let Some(text) = &self.delimiter {
            d.delimiter = if matches!(text.as_str(), "tab" | "\\t") { "\t".into() } else { text.clone() };
        }
        d.header = self.header.unwrap_or(d.header);
        d.encoding = self.encoding.clone().unwrap_or(std::mem::take(&mut d.encoding));
        config.validate()?;
        Ok(config.data)
    }
}

/// What `birkhoff export` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// The weights alone, by name.
    Safetensors,
    /// The whole model, for onnxruntime and others.
    Onnx,
}

/// `birkhoff export`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  birkhoff export runs/a --out model.onnx --with-encoder
  birkhoff export runs/a --format safetensors --out weights.safetensors

The ONNX file takes batches of any size: `numeric` [batch, F], transformed, and `ids` [batch, C], numbered within
each column as vocab.json does; it returns `logit` and `score` [batch]. Its metadata name the columns in order.")]
pub struct ExportArgs {
    /// Run folder of `birkhoff train --out`
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// What to write [default: by the ending of --out]
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub format: Option<ExportFormat>,
    /// File to write; an ONNX model of more than 1.9 GB has its weights beside it, in FILE.data
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// The weights after this many steps [default: the best]
    #[arg(long, value_name = "N")]
    pub step: Option<u64>,
    /// Copy vocab.json beside the file, as FILE.vocab.json: what a server encodes rows with
    #[arg(long)]
    pub with_encoder: bool,
    /// Print one JSON object to stdout: what was written, and what the model is to be fed
    #[arg(long)]
    pub json: bool,
}

/// `birkhoff compare`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  birkhoff compare runs/a runs/b
  birkhoff compare runs --sort ne --csv runs.csv

Shows the keys of the configuration that differ, and no others. ΔNE is the difference to the first run, relative, in
percent: below 0 is better. FLOPs are those of scoring one example. An unfinished run shows its best evaluation so far.")]
pub struct CompareArgs {
    /// Run folders, or folders of them
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// Order, the best or smallest first: run, ne, auc, logloss, calibration, parameters, flops, rows_per_s, steps,
    /// best_step, or a key of the configuration [default: as given]
    #[arg(long, value_name = "KEY")]
    pub sort: Option<String>,
    /// Write the table in full to a CSV file
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Print one JSON object to stdout: runs, differs, broken
    #[arg(long)]
    pub json: bool,
}

/// `birkhoff sweep`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Example:
  birkhoff sweep examples/ablation.toml --out runs/ablation -- --train train.tsv --valid valid.tsv --device cpu

  # sweep.toml                              every choice of the grid, each with three seeds
  train = \"train.tsv\"
  valid = \"valid.tsv\"
  config = \"base.toml\"
  seeds = 3
  [grid]
  \"model.layers\" = [1, 2, 4]
  \"model.residual.mode\" = [\"shortcut\", \"mhc\"]

Paths in the file are relative to it. Runs stand in FOLDER/NAME/seed-N. The same command goes on where it was stopped:
finished runs are not trained again, and one that was stopped goes on from its checkpoint.
If a run fails, the others are trained all the same, and the exit code is 2. See docs/sweeps.md.")]
pub struct SweepArgs {
    /// What to train: a base configuration, and a grid or a list of changes to it
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Folder of the runs [default: FILE without its ending]
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,
    /// Runs at a time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub jobs: u16,
    /// List the runs and train none
    #[arg(long)]
    pub list: bool,
    /// Write the table in full to a CSV file
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
    /// Further options of `birkhoff train`, for all runs
    #[arg(last = true, value_name = "TRAIN OPTIONS")]
    pub train: Vec<String>,
}
