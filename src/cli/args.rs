//! The arguments of every subcommand and their help.

use std::path::{Path, PathBuf};

use clap::builder::PossibleValue;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::data::synth::DEFAULT_WORLD;
use crate::model::config::{Config, ConfigError, Format};

pub use super::run_args::{CompareArgs, ExportArgs, ExportFormat, LaunchArgs, PlanArgs, ReadArgs, SweepArgs};

/// birkhoff: trains and runs deep ranking models (DHEN with mHC residuals) on WebGPU or the CPU.
#[derive(Debug, Parser)]
#[command(name = "birkhoff", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "Examples:
  birkhoff synth --rows 200000 --seed 1 --out train.tsv
  birkhoff train --train train.tsv --valid valid.tsv --out runs/first
  birkhoff eval runs/first --data valid.tsv

Messages and progress go to stderr, results to stdout. Any error is one line and exit code 2.")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model from a click log and write a run folder.
    Train(TrainArgs),
    /// Measure a trained run on a labelled file: normalized entropy, log loss, AUC, calibration.
    Eval(EvalArgs),
    /// Write the click probability of every row of a file.
    Predict(PredictArgs),
    /// Look at a file and write a schema for it that a person can edit.
    Schema(SchemaArgs),
    /// Read all rows of files and report every kind of trouble.
    Check(CheckArgs),
    /// Show runs side by side: what differs in their configurations, and what they came to.
    Compare(CompareArgs),
    /// Train as several ranks, on one host or several.
    Launch(LaunchArgs),
    /// Train many models from one file, each with several seeds, and show one table of them.
    Sweep(SweepArgs),
    /// Write a trained model for other programs: ONNX, or weights as safetensors.
    Export(ExportArgs),
    /// Write a synthetic click log whose best reachable normalized entropy is known.
    Synth(SynthArgs),
    /// Show how the residual stream amplifies signals and gradients along depth.
    Gains(GainsArgs),
    /// Show what a configuration costs: parameters, FLOPs, bytes, memory, dispatches.
    Inspect(InspectArgs),
    /// Show where embedding tables go on several ranks, and what that costs.
    Plan(PlanArgs),
    /// List the adapters that a model can run on.
    Devices(DevicesArgs),
    /// Open a window on runs, finished or in progress.
    Dashboard(DashboardArgs),
}

/// What to do with a row that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnBadRow {
    /// Stop, naming file, line and field.
    #[default]
    Error,
    /// Leave it out, and report how many were.
    Skip,
}

impl ValueEnum for Format {
    fn value_variants<'a>() -> &'a [Self] {
        use Format::*;
        &[Auto, Criteo, Csv, Tsv, Libsvm, Libffm, Parquet, Arrow]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name()))
    }
}

/// `--device`, the same everywhere.
#[derive(Debug, Clone, Args)]
pub struct DeviceArg {
    /// Where to compute: auto, cpu, gpu, software, or a part of an adapter's name
    ///
    /// `auto` takes a hardware GPU if there is one, else the CPU. `software` takes a software Vulkan
    /// driver, which `auto` never does. `birkhoff devices` lists the names.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: String,
}

/// `--config` and `--set`.
#[derive(Debug, Clone, Default, Args)]
pub struct ConfigArgs {
    /// Configuration in TOML; without it, a good default model
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Change one key of the configuration; may be repeated, the last one counts
    ///
    /// The value is TOML or a bare word: model.layers=8, model.residual.mode=hc,
    /// model.modules[0].heads=4, model.modules=[{kind="cross",rank=8},{kind="linear"}].
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

/// Where the rows of a run come from.
#[derive(Debug, Clone, Default, PartialEq, Args, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct DataArgs {
    /// Rows to learn from: files, patterns such as 'day_*.gz', or - for standard input
    ///
    /// Text (Criteo, CSV, TSV, libsvm, libffm), Parquet or Arrow IPC, plain, gzip or zstd: told from the content
    /// unless data.format says so. Several files are read one after the other.
    #[arg(long, value_name = "FILE", num_args = 1.., required_unless_present = "resume")]
    pub train: Vec<PathBuf>,
    /// Rows to evaluate on; they choose the best weights
    #[arg(long, value_name = "FILE", num_args = 1.., required_unless_present_any = ["split", "resume"])]
    pub valid: Vec<PathBuf>,
    /// Shares of --train for training, validation and test, in place of --valid, such as 0.8,0.1,0.1
    #[arg(long, value_name = "SHARES", conflicts_with = "valid")]
    pub split: Option<String>,
    /// What decides a row's part: random, random:SEED, group:COLUMN (equal values stay together), time:COLUMN (the
    /// latest test)
    #[arg(long, value_name = "RULE", requires = "split", conflicts_with = "valid")]
    pub split_by: Option<String>,
    /// Format of the files [default: data.format of the configuration, told from the content]
    #[arg(long, value_name = "FORMAT")]
    #[serde(skip)]
    pub format: Option<Format>,
    /// Columns of the data: a file of `birkhoff schema`, whose [data] replaces that of --config
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub schema: Option<PathBuf>,
    /// Keep encoded rows, so that only the first pass parses: in memory, or in a folder that later runs use too
    #[arg(long, value_name = "FOLDER", num_args = 0..=1, default_missing_value = "memory")]
    pub cache: Option<PathBuf>,
    /// What to do with a row that cannot be read
    #[arg(long, value_name = "ACTION", value_enum)]
    pub on_bad_row: Option<OnBadRow>,
}

/// `birkhoff train`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  birkhoff train --train train.tsv --valid valid.tsv --out runs/a
  birkhoff train --train 'day_*.gz' --valid day_23.gz --out runs/b --set model.layers=8 --set train.lr=5e-4
  birkhoff schema clicks.csv --out schema.toml
  birkhoff train --train clicks.csv --split 0.8,0.1,0.1 --split-by time:date --schema schema.toml --out runs/c
  birkhoff train --train train.tsv --valid valid.tsv --out runs/d --config dhen.toml --device cpu --json
  birkhoff train --resume runs/d                 goes on with a run that was stopped
  birkhoff train --resume runs/d --epochs 3      makes it longer
  birkhoff launch --nproc 4 -- train --train train.tsv --valid valid.tsv --out runs/e      four ranks

Ctrl-C saves a checkpoint; so do evaluations, and every ten minutes (train.checkpoint_minutes).")]
pub struct TrainArgs {
    /// The rows.
    #[command(flatten)]
    pub data: DataArgs,
    /// Run folder to write: configuration, vocabularies, weights, metrics
    #[arg(long, value_name = "RUN", required_unless_present = "resume")]
    pub out: Option<PathBuf>,
    /// Go on with this run from its newest checkpoint: data, configuration and device are those of its start
    ///
    /// The result is that of a run that was never stopped, on the CPU bit for bit. --train and --valid say where the
    /// files are now; --epochs and --set change the rest of the run.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["out", "force", "config", "seed", "format", "schema", "split"])]
    pub resume: Option<PathBuf>,
    /// The configuration.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Passes over the training file, in place of train.epochs
    #[arg(long, value_name = "N")]
    pub epochs: Option<usize>,
    /// Seed of initialisation and row order, in place of train.seed
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArg,
    /// Print JSON lines to stdout, one a logged step or evaluation, then the summary (and the test rows' metrics)
    #[arg(long)]
    pub json: bool,
    /// Replace a run in --out
    #[arg(long)]
    pub force: bool,
    /// Print the time of each kernel at the end
    #[arg(long)]
    pub profile: bool,
    /// Look at the result of every operation of every step, and stop at the first that is not finite; slow
    ///
    /// Without it a loss or gradient that is not finite stops the run as well, and is traced to the tensor that came
    /// first; this finds what never reaches the loss. On a GPU it looks at the loss after every step.
    #[arg(long)]
    pub debug_nan: bool,
    /// Open the dashboard on the run while it trains
    #[arg(long)]
    pub dashboard: bool,
    /// No progress bar and no notices
    #[arg(long, short)]
    pub quiet: bool,
    /// Other ranks.
    #[command(flatten)]
    pub ranks: super::ranks::RankArgs,
}

/// Those of some `--set` that are for `[data]`: they count more than a schema's file.
pub fn data_sets(sets: &[String]) -> Vec<String> {
    let of_data = |s: &&String| {
        s.trim_start().strip_prefix("data").is_some_and(|r| r.trim_start().starts_with(['.', '=', '[']))
    };
    sets.iter().filter(of_data).cloned().collect()
}

impl TrainArgs {
    /// The run's folder.
    pub fn folder(&self) -> &Path {
        self.resume.as_deref().or(self.out.as_deref()).unwrap_or(Path::new(""))
    }

    /// The configuration of the run: `--config` (or that of `--resume`), then each `--set`, then the options of their
    /// own.
    pub fn resolve_config(&self) -> Result<Config, ConfigError> {
        let resumed = self.resume.as_ref().map(|r| r.join(crate::train::run::CONFIG));
        let file = resumed.as_deref().or(self.config.config.as_deref());
        let mut config = Config::load(file, &self.config.sets)?;
        if let Some(schema) = &self.data.schema {
            config.data = Config::load(Some(schema), &data_sets(&self.config.sets))?.data;
        }
        config.data.format = self.data.format.unwrap_or(config.data.format);
        config.train.epochs = self.epochs.unwrap_or(config.train.epochs);
        config.train.seed = self.seed.unwrap_or(config.train.seed);
        config.validate()?;
        Ok(config)
    }
}

/// `birkhoff eval`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Example:
  birkhoff eval runs/a --data test.tsv --json
  {\"rows\":…,\"positives\":…,\"ne\":…,\"logloss\":…,\"auc\":…,\"calibration\":…}")]
pub struct EvalArgs {
    /// Run folder of `birkhoff train --out`
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Labelled rows with the columns that the run was trained on: files, patterns, or - for standard input
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub data: Vec<PathBuf>,
    /// How they are read.
    #[command(flatten)]
    pub read: ReadArgs,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArg,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
    /// What to do with a row that cannot be read
    #[arg(long, value_name = "ACTION", value_enum, default_value_t)]
    pub on_bad_row: OnBadRow,
}

/// `birkhoff predict`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  birkhoff predict runs/a --data today.tsv --out scores.csv
  birkhoff predict runs/a --data 'today_*.parquet' --columns user,item --out scores.parquet
  birkhoff predict runs/a --data today.csv --format csv --out scores.csv      (trained on another format)
  zcat today.tsv.gz | birkhoff predict runs/a --data - --out - | head")]
pub struct PredictArgs {
    /// Run folder of `birkhoff train --out`
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Rows to score, with or without labels: files, patterns, or - for standard input
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub data: Vec<PathBuf>,
    /// How they are read.
    #[command(flatten)]
    pub read: ReadArgs,
    /// File to write, one line a row, in the order of the input; - is standard output, .parquet another format
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Columns of the input to copy in front of the scores
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub columns: Vec<String>,
    /// Write what the rows are like beside the training rows, column by column, as JSON
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Format of the file to write [default: by its name, csv]
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub out_format: Option<OutFormat>,
    /// What to do with a row that cannot be read: stop, or leave it out
    #[arg(long, value_name = "ACTION", value_enum, default_value_t)]
    pub on_bad_row: OnBadRow,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArg,
}

/// `--out-format` of `birkhoff predict`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutFormat {
    /// Comma-separated, with a header.
    Csv,
    /// Apache Parquet.
    Parquet,
}

/// `birkhoff schema`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  birkhoff schema clicks.csv --out schema.toml
  birkhoff schema 'part-*.parquet' --label clicked --rows 0
  birkhoff train --train clicks.csv --split 0.8,0.1,0.1 --schema schema.toml --out runs/a")]
pub struct SchemaArgs {
    /// Files to look at
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// File to write [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Rows to look at; 0 = all
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    pub rows: u64,
    /// The column to predict [default: a guess by name and values]
    #[arg(long, value_name = "NAME")]
    pub label: Option<String>,
    /// What the files are, where the content does not tell: a TOML file with [data]
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Print what was found as one JSON object to stdout, and no schema
    #[arg(long)]
    pub json: bool,
}

/// `birkhoff check`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  birkhoff check clicks.csv --schema schema.toml
  birkhoff check day_0.gz --json
  birkhoff check today.csv --against runs/a      are these rows like those that the run was trained on?")]
pub struct CheckArgs {
    /// Files to read
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Columns of the data: a file of `birkhoff schema`, or any configuration [default: Criteo's]
    #[arg(long, value_name = "FILE")]
    pub schema: Option<PathBuf>,
    /// Take columns, format and vocabularies of a run, and compare each column with its training rows
    #[arg(long, value_name = "RUN", conflicts_with = "schema")]
    pub against: Option<PathBuf>,
    /// Change one key of it; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// The files have no labels
    #[arg(long)]
    pub unlabelled: bool,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// `birkhoff gains`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  birkhoff gains runs/a
  birkhoff gains runs/a --out gains.svg
  birkhoff gains runs/a --step 200 --json

A gain is the largest absolute row sum (forward) or column sum (backward) of the token-averaged residual
matrix; the composite is the product of the matrices of several layers. Near 1 is stable.")]
pub struct GainsArgs {
    /// Run folder of `birkhoff train --out`
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// The diagnosis after this many steps [default: the last]
    #[arg(long, value_name = "N")]
    pub step: Option<u64>,
    /// Draw curves and matrices into this .svg or .png
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// `birkhoff synth`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Example: two files of one world, their rows drawn independently
  birkhoff synth --rows 200000 --seed 1 --out train.tsv
  birkhoff synth --rows 20000 --seed 2 --out valid.tsv --json")]
pub struct SynthArgs {
    /// Rows to write
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub rows: u64,
    /// Seed of the rows
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// File to write, in Criteo's format
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Print the planted truth's normalized entropy and AUC on these rows as one JSON object
    #[arg(long)]
    pub json: bool,
    /// Seed of the planted effects; files of the same world can train and test one model
    #[arg(long, value_name = "N", default_value_t = DEFAULT_WORLD)]
    pub world: u64,
}

/// `birkhoff inspect`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  birkhoff inspect examples/mhc_deep.toml
  birkhoff inspect examples/mhc_deep.toml --set model.layers=8 --batch 4096 --json
  birkhoff inspect examples/mhc_deep.toml --dot model.dot && dot -Tsvg model.dot -o model.svg")]
pub struct InspectArgs {
    /// Configuration in TOML; without it, the default model
    #[arg(value_name = "CONFIG")]
    pub config: Option<PathBuf>,
    /// Change one key of the configuration; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Rows a step, in place of train.batch
    #[arg(long, value_name = "N")]
    pub batch: Option<usize>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
    /// Write the graph for graphviz
    #[arg(long, value_name = "FILE")]
    pub dot: Option<PathBuf>,
}

impl InspectArgs {
    /// The configuration to inspect.
    pub fn resolve_config(&self) -> Result<Config, ConfigError> {
        let mut config = Config::load(self.config.as_deref(), &self.sets)?;
        config.train.batch = self.batch.unwrap_or(config.train.batch);
        config.validate()?;
        Ok(config)
    }
}

/// `birkhoff devices`.
#[derive(Debug, Clone, Args)]
pub struct DevicesArgs {
    /// Print one JSON object to stdout: auto, cpu, adapters
    #[arg(long)]
    pub json: bool,
}

/// `--theme`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum ThemeWord {
    /// The system's.
    #[default]
    System,
    /// Dark.
    Dark,
    /// Light.
    Light,
}

/// `birkhoff dashboard`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  birkhoff dashboard runs/a runs/b       two runs over each other
  birkhoff dashboard runs                every run in a folder; new ones appear by themselves
  birkhoff dashboard runs --view gains --theme light --screenshot gains.png

Keys: 1 to 6 views, arrows step and layer, space plays, d dark or light, ? help.")]
pub struct DashboardArgs {
    /// Run folders, or folders of run folders
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// The view to begin with: overview, residual, gains, streams, time, model
    #[arg(long, value_name = "VIEW", value_parser = ["overview", "residual", "gains", "streams", "time", "model"])]
    pub view: Option<String>,
    /// Colours
    #[arg(long, value_name = "THEME", value_enum, default_value_t)]
    pub theme: ThemeWord,
    /// Folder that exported plots are written to
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    pub export: PathBuf,
    /// Write a picture of the window to this PNG file, and close it
    #[arg(long, value_name = "FILE")]
    pub screenshot: Option<PathBuf>,
    /// Size of the window in points, such as 1360x860
    #[arg(long, value_name = "WxH", value_parser = size)]
    pub size: Option<[f32; 2]>,
}

fn size(text: &str) -> Result<[f32; 2], String> {
    let parts = text.split_once('x').and_then(|(w, h)| Some([w.parse().ok()?, h.parse().ok()?]));
    let fits = |s: &[f32; 2]| s.iter().all(|v| (200.0..=8000.0).contains(v));
    parts
        .filter(fits)
        .ok_or_else(|| "expected width x height, such as 1360x860, each from 200 to 8000".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(line.split_whitespace()).map(|c| c.command)
    }

    const TRAIN: &str = "birkhoff train --train a --valid b --format criteo --out r";

    #[test]
    fn definitions_are_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn train_takes_all_its_options() {
        let line = format!(
            "{TRAIN} --set model.layers=2 --set model.residual.mode=hc --epochs 3 --seed 7 --device software \
             --json --force --on-bad-row skip --profile --quiet"
        );
        let Command::Train(args) = parse(&line).expect("valid") else { panic!("not train") };
        let config = args.resolve_config().expect("config");
        assert_eq!((config.model.layers, config.train.epochs, config.train.seed), (2, 3, 7));
        assert_eq!((args.data.on_bad_row, args.device.device.as_str()), (Some(OnBadRow::Skip), "software"));
        assert!(args.json && args.force && args.profile && args.quiet);
        let Command::Train(args) = parse(TRAIN).expect("valid") else { panic!("not train") };
        let config = args.resolve_config().expect("defaults");
        assert_eq!((config.data.format, config.model), (Format::Criteo, Config::default().model));
        assert_eq!((args.data.on_bad_row, args.device.device.as_str()), (None, "auto"));
    }

    #[test]
    fn options_are_validated_like_keys() {
        let Command::Train(args) = parse(&format!("{TRAIN} --epochs 0")).expect("valid") else {
            panic!("not train")
        };
        let e = args.resolve_config().expect_err("no epochs").to_string();
        assert_eq!(e, "train.epochs = 0 is out of range; it goes from 1 to 1000000");
        let Command::Inspect(args) = parse("birkhoff inspect --batch 0").expect("valid") else { panic!() };
        assert_eq!(args.resolve_config().expect_err("no rows").key(), Some("train.batch"));
    }

    #[test]
    fn the_other_commands_parse_as_the_issue_writes_them() {
        for line in [
            "birkhoff eval RUN --data f --device cpu --json --on-bad-row error",
            "birkhoff train --resume RUN --epochs 3 --set train.lr=1e-4 --device cpu",
            "birkhoff predict RUN --data f --out scores.csv --device auto",
            "birkhoff synth --rows 10 --seed 3 --out f --json --world 2",
            "birkhoff inspect c.toml --set model.width=8 --batch 64 --json --dot g.dot",
            "birkhoff plan c.toml --world 8 --memory 16GiB --cluster c.toml --out plan.toml",
            "birkhoff devices --json",
            "birkhoff train --train a b --split 0.8,0.1,0.1 --split-by time:t --cache --out r",
            "birkhoff schema a.csv --out s.toml --label click",
            "birkhoff check a.csv b.csv --schema s.toml --json",
            "birkhoff dashboard runs/a runs/b --view gains --theme dark --screenshot s.png --size 900x600",
        ] {
            parse(line).expect(line);
        }
        for line in [
            "birkhoff dashboard",
            "birkhoff dashboard r --size 9x9",
            "birkhoff eval RUN",
            "birkhoff train --train a --out r",
            "birkhoff train --train a --valid b --split 0.9,0.1 --out r",
            "birkhoff train --train a --valid b --split-by random --out r",
            "birkhoff plan c.toml --world 0",
            "birkhoff plan c.toml --world 2 --memory 16G",
            "birkhoff synth --rows 0 --out f",
            "birkhoff train",
            "birkhoff train --resume RUN --out RUN",
            "birkhoff train --resume RUN --seed 3",
            "birkhoff fly",
        ] {
            let e = parse(line).expect_err(line);
            assert_eq!(e.exit_code(), 2, "{line}");
        }
    }
}
