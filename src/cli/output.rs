//! Standard output: results and JSON lines. Messages and progress go to stderr.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

/// The reader of stdout is gone (`birkhoff devices | head -1`): the program ends without a word.
#[derive(Debug, thiserror::Error)]
#[error("standard output was closed")]
pub struct StdoutClosed;

/// Refuses an output that would replace one of the command's own inputs.
pub fn not_an_input(out: &Path, inputs: &[&Path]) -> anyhow::Result<()> {
    let Ok(target) = out.canonicalize() else { return Ok(()) };
    for input in inputs {
        // a run folder stands for the files in it
        let inside = |i: PathBuf| target == i || (i.is_dir() && target.parent() == Some(&i));
        if target.is_file() && input.canonicalize().is_ok_and(inside) {
            anyhow::bail!(
                "{}: writing it would replace an input of this command; name another output",
                out.display()
            );
        }
    }
    Ok(())
}

/// Prints a line to stdout. Unlike `println!` it does not panic when the reader is gone.
pub fn line(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(StdoutClosed.into()),
        Err(e) => Err(anyhow::anyhow!("cannot write to standard output: {e}")),
    }
}

/// Prints a value to stdout as one line of JSON.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    line(&serde_json::to_string(value)?)
}
