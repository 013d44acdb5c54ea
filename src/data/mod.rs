//! Schema, readers, vocabularies, batches, and the synthetic click log.

pub mod batch;
pub mod blocks;
pub mod criteo;
pub mod encoder;
pub mod error;
pub mod loader;
pub mod metrics;
pub mod planted;
pub mod rows;
pub mod schema;
pub mod synth;
pub mod vocab;

use std::fs::File;
use std::io;
use std::path::Path;

pub use encoder::FittedEncoder;
pub use error::DataError;

/// Writes a file under a temporary name in the same folder, then renames it: whoever sees the
/// final name sees the whole file.
fn replace_file<T>(path: &Path, write: impl FnOnce(File) -> io::Result<T>) -> Result<T, DataError> {
    let fail = |e| DataError::io(path, "write", e);
    if path.is_dir() {
        return Err(DataError::Directory { path: path.to_path_buf() });
    }
    if path.exists() && !path.is_file() {
        // A device or a pipe (/dev/stdout) is written to, never replaced.
        return File::options().write(true).open(path).and_then(write).map_err(fail);
    }
    let Some(name) = path.file_name() else {
        return Err(fail(io::Error::new(io::ErrorKind::InvalidInput, "the path has no file name")));
    };
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let result = File::create(&temporary).and_then(write).and_then(|value| {
        std::fs::rename(&temporary, path)?;
        Ok(value)
    });
    result.map_err(|e| {
        // The error that led here is the one to report.
        let _ = std::fs::remove_file(&temporary);
        fail(e)
    })
}
