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
    /// Change how the files are read in another way: data.na, data.quote, data.comment, data.trim; may be repeated
    #[arg(long = "set", value_name = "data.KEY=VALUE")]
    pub sets: Vec<String>,
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
        if self.sets.is_empty() {
            return Ok(config.data);
        }
        const KEYS: [&str; 8] =
            ["format", "delimiter", "quote", "header", "comment", "na", "encoding", "trim"];
        for set in &self.sets {
            let key = set.split_once('=').map_or(set.as_str(), |s| s.0).trim();
            if !key.strip_prefix("data.").is_some_and(|k| KEYS.contains(&k)) {
                let message = format!(
                    "--set {set}: what the run was trained with stays; here --set takes data.{}",
                    KEYS.join(", data.")
                );
                return Err(ConfigError::at(key, message));
            }
        }
        Ok(Config::from_text("", &config.to_toml()?, &self.sets)?.data)
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
  birkhoff export runs/a --state --out state.safetensors

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
    /// The whole training state of a checkpoint, with that of the optimiser, as one safetensors file [default: the newest]
    #[arg(long, conflicts_with_all = ["with_encoder"])]
    pub state: bool,
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

Shows the keys of the configuration that differ, and no others; the ranks where their number differs. ΔNE is the difference to the first run, relative, in
percent: below 0 is better. FLOPs are those of scoring one example. An unfinished run shows its best evaluation so far.")]
pub struct CompareArgs {
    /// Run folders, or folders of them
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// Order, the best or smallest first: run, ne, auc, logloss, calibration, parameters, flops, rows_per_s, steps,
    /// best_step, ranks, or a key of the configuration [default: as given]
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

/// `--split` of `birkhoff plan`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum SplitWord {
    /// Columns of a vocabulary under Adam, otherwise rows.
    #[default]
    Auto,
    /// Rows only.
    Rows,
    /// Columns first, also under Adagrad, whose accumulator then is one a part.
    Columns,
}

/// `birkhoff plan`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  birkhoff plan examples/criteo.toml --world 8 --train train.tsv
  birkhoff plan runs/a --world 8 --memory 16GiB --out plan.toml
  birkhoff plan runs/a --plan plan.toml               what an edited plan costs
  birkhoff plan c.toml --cluster cluster.toml --rows user_id=200000000 --rows item_id=50000000 --json

Table sizes are those of a run's vocabularies, of --train, of hash buckets and max_size, or of --rows. Seconds are
predictions, of lookup and update of embedding rows and of their communication; dense layers cost the same on all ranks.
  # cluster.toml                          all keys are optional
  ranks = 8
  ranks_per_host = 4
  memory = \"16GiB\"                        # a rank's, for embedding tables and optimiser state
  memory_bandwidth = \"10GB/s\"
  host_bandwidth = \"2GB/s\"                # a rank's, to others of its host
  network_bandwidth = \"1.25GB/s\"          # a rank's, to other hosts
  latency = 50e-6                         # seconds a message
  shard_overhead = 20e-6                  # seconds a shard and step
See docs/parallel.md.")]
pub struct PlanArgs {
    /// Configuration in TOML, or a run folder; without it, the default model
    #[arg(value_name = "CONFIG|RUN")]
    pub model: Option<PathBuf>,
    /// Number of ranks [default: that of --plan or --cluster]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub world: Option<u32>,
    /// What a rank has for embedding tables and their optimiser state, such as 16GiB [default: no bound]
    #[arg(long, value_name = "SIZE", value_parser = crate::parallel::cost::memory)]
    pub memory: Option<u64>,
    /// Bandwidths, memory and hosts, in TOML
    #[arg(long, value_name = "FILE")]
    pub cluster: Option<PathBuf>,
    /// Examples a step on each rank, in place of train.batch
    #[arg(long, value_name = "N")]
    pub batch: Option<usize>,
    /// Rows of a table, by the column that owns it; may be repeated
    #[arg(long = "rows", value_name = "COLUMN=N")]
    pub rows: Vec<String>,
    /// Training rows, to count values and to measure how often they repeat
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub train: Vec<PathBuf>,
    /// What to do with a row of them that cannot be read
    #[arg(long, value_name = "ACTION", value_enum, default_value_t)]
    pub on_bad_row: super::args::OnBadRow,
    /// Columns of the data: a file of `birkhoff schema`, whose [data] replaces that of CONFIG
    #[arg(long, value_name = "FILE")]
    pub schema: Option<PathBuf>,
    /// Change one key of the configuration; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// How tables are cut that are too large or cost too much for one rank
    #[arg(long, value_name = "HOW", value_enum, default_value_t)]
    pub split: SplitWord,
    /// Show what this plan costs instead of making one
    #[arg(long, value_name = "FILE", conflicts_with = "split")]
    pub plan: Option<PathBuf>,
    /// Write the plan to a file, to be edited
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Print one JSON object to stdout: tables, ranks with their shards, max_s, mean_s, imbalance
    #[arg(long)]
    pub json: bool,
}

/// `birkhoff launch`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  birkhoff launch --nproc 4 -- train --train 'day_*.gz' --valid day_23.gz --out runs/a
  birkhoff launch --nproc 4 -- train --resume runs/a

  export BIRKHOFF_SECRET=…                         two hosts, the same on both: openssl rand -hex 32
  birkhoff launch --nproc 4 --nnodes 2 --node-rank 0 --master 10.0.0.1:29500 -- train … --out /shared/runs/a
  birkhoff launch --nproc 4 --nnodes 2 --node-rank 1 --master 10.0.0.1:29500 -- train … --out /shared/runs/a

Each rank finds its place in RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 prints
as if it were alone; lines of the others begin with [rank N]. When a rank dies, all are started again from the newest
checkpoint. Ctrl-C is passed on once; a second one kills. The exit code is that of rank 0, else of the rank that
failed; 130 after Ctrl-C. See docs/launching.md.")]
pub struct LaunchArgs {
    /// Ranks on this host
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub nproc: u16,
    /// Hosts
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub nnodes: u16,
    /// Which host this is, from 0
    #[arg(long, value_name = "N")]
    pub node_rank: Option<u16>,
    /// Where rank 0 is met: an address of host 0 and a free port there [default: this host, a free port]
    ///
    /// Restart N takes the N-th port after it.
    #[arg(long, value_name = "HOST:PORT")]
    pub master: Option<String>,
    /// How often the group is started again when a rank dies
    ///
    /// Not after bad input (exit code 2), and not once two attempts in a row came to no newer checkpoint.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub max_restarts: u32,
    /// The number of the restart to join, for a host that comes back while the others have gone on
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub restart: u32,
    /// How long the other ranks may take to end once one has failed; after that they are asked to, then killed
    #[arg(long, value_name = "SECONDS", default_value_t = 15.0, value_parser = |s: &str| seconds(s, 0.0))]
    pub grace: f64,
    /// Write what each rank prints to DIR/rank-N.log; only rank 0 is shown as well
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Of the ranks other than 0 show errors only
    #[arg(long, short)]
    pub quiet_ranks: bool,
    /// Print a JSON line to stdout when the group starts (with process ids), starts again, and ends
    #[arg(long)]
    pub json: bool,
    /// The program of the ranks, for tests
    #[arg(long, value_name = "FILE", hide = true)]
    pub program: Option<PathBuf>,
    /// What every rank runs: train with its options
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Seconds, `least` to a day.
pub fn seconds(text: &str, least: f64) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if (least..=86_400.0).contains(&s) => Ok(s),
        _ => Err(format!("expected seconds, {least} to 86400")),
    }
}
