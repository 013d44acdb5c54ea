//! The arguments of the commands that work on finished runs, and of those that make many.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

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
