//! `birkhoff export`: a run's weights, or its whole model, for other programs.

use super::args::{ExportArgs, ExportFormat};
use super::output;
use crate::export::{Input, OnnxModel, TrainedRun, save_state};
use crate::text::group;
use crate::train::run::write_atomic;
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Runs the subcommand.
pub fn run(args: &ExportArgs) -> anyhow::Result<()> {
    let format = format(args)?;
    output::not_an_input(&args.out, &[&args.run])?;
    if args.state {
        return state(args, format);
    }
    let run = TrainedRun::open(&args.run, args.step)?;
    super::eval::note_unfinished(&args.run);
    let (step, numbers) = (run.meta.step, run.weights.iter().map(|w| w.data.len()).sum::<usize>());
    let (vocab, tensors) = (run.vocab.clone(), run.weights.len());
    let mut files = vec![args.out.clone()];
    let mut inputs = Value::Null;
    let what = match format {
        ExportFormat::Safetensors => {
            run.save_weights(&args.out)?;
            format!("{tensors} tensors")
        }
        ExportFormat::Onnx => {
            let model = run.onnx()?;
            inputs = describe(&model);
            files.extend(model.save(&args.out)?);
            format!("{} nodes", model.nodes())
        }
    };
    if args.with_encoder {
        files.push(copy_encoder(&vocab, &args.out)?);
    }
    if args.json {
        let files: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
        let mut object = json!({"files": files, "step": step, "parameters": numbers});
        if !inputs.is_null() {
            object["inputs"] = inputs;
        }
        return output::json(&object);
    }
    for (i, file) in files.iter().enumerate() {
        let note = match i {
            0 => format!("{what}, {} parameters, step {step}", group(numbers as u64)),
            _ if args.with_encoder && i + 1 == files.len() => "vocabularies and statistics".into(),
            _ => "weights".into(),
        };
        output::line(&format!("{}: {note}", file.display()))?;
    }
    Ok(())
}

/// A checkpoint as one file.
fn state(args: &ExportArgs, format: ExportFormat) -> anyhow::Result<()> {
    if format != ExportFormat::Safetensors {
        bail!(
            "--state is written as safetensors; name the file FILE.safetensors, or add --format safetensors"
        );
    }
    let (step, tensors) = save_state(&args.run, args.step, &args.out)?;
    let numbers = tensors.iter().map(|t| t.shape.iter().product::<usize>()).sum::<usize>();
    if args.json {
        return output::json(&json!({"files": [args.out], "step": step, "numbers": numbers}));
    }
    output::line(&format!(
        "{}: {} tensors, {} numbers, step {step}",
        args.out.display(),
        tensors.len(),
        group(numbers as u64)
    ))
}

fn format(args: &ExportArgs) -> anyhow::Result<ExportFormat> {
    let ending = args.out.extension().map(|e| e.to_string_lossy().to_lowercase());
    match (args.format, ending.as_deref()) {
        (Some(format), _) => Ok(format),
        (None, Some("onnx")) => Ok(ExportFormat::Onnx),
        (None, Some("safetensors")) => Ok(ExportFormat::Safetensors),
        _ => bail!("{}: its ending names no format; add --format onnx or safetensors", args.out.display()),
    }
}

/// Names and shapes of the model's inputs.
fn describe(model: &OnnxModel) -> Value {
    let one = |input: &Input| match input {
        Input::Numeric(n) => json!({"name": "numeric", "type": "float32", "shape": ["batch", n]}),
        Input::Ids(n) => json!({"name": "ids", "type": "int64", "shape": ["batch", n]}),
        Input::Bag { name, .. } => json!({"name": format!("{name}.ids"), "type": "int64", "shape": ["items"],
            "offsets": format!("{name}.offsets")}),
    };
    model.inputs().iter().map(one).collect()
}

fn copy_encoder(vocab: &Path, out: &Path) -> anyhow::Result<PathBuf> {
    let Some(name) = out.file_name() else { bail!("{}: not a file name", out.display()) };
    let to = out.with_file_name(format!("{}.vocab.json", name.to_string_lossy()));
    let bytes = std::fs::read(vocab).with_context(|| format!("{}: cannot read", vocab.display()))?;
    write_atomic(&to, |w| w.write_all(&bytes))?;
    Ok(to)
}
