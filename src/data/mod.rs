//! Schema, readers, vocabularies, batches, and the synthetic click log.

pub mod batch;
pub mod blocks;
#[cfg(not(target_arch = "wasm32"))]
pub mod cache;
#[cfg(all(feature = "formats", not(target_arch = "wasm32")))]
mod columnar;
mod columns;
pub mod criteo;
mod delimited;
pub mod drift;
pub mod encoder;
pub mod error;
pub mod feed;
pub mod fit;
pub mod fitter;
pub mod format;
mod guess;
mod header;
pub mod input;
pub mod label;
pub mod lengths;
#[cfg(not(target_arch = "wasm32"))]
pub mod loader;
#[cfg(target_arch = "wasm32")]
#[path = "loader_web.rs"]
pub mod loader;
mod marks;
pub mod metrics;
#[cfg(test)]
mod mutation;
mod number;
pub mod order;
pub mod packed;
mod plan;
pub mod planted;
pub mod profile;
pub mod reader;
pub mod rows;
pub mod schema;
mod schema_text;
#[cfg(not(target_arch = "wasm32"))]
pub mod sparse;
pub mod split;
pub mod survey;
pub mod synth;
pub mod temporary;
pub mod value;
pub mod vocab;
pub mod witness;

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

pub use encoder::FittedEncoder;
pub use error::DataError;

/// Whether a path is written to as it stands, never replaced: a device or a pipe, and the links that
/// the system keeps in `/dev` and `/proc`. `/dev/stdout` is a link to a regular file where a shell
/// redirects stdout; a rename over it would put a file where every program expects the link.
pub(crate) fn is_stream(path: &Path) -> bool {
    let systems = path.starts_with("/dev") || path.starts_with("/proc");
    path.exists() && (!path.is_file() || (systems && path.is_symlink()))
}

/// A word for a temporary file's name: no other process of this host has it, nor another thread.
pub(crate) fn unique() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Writes a file under a temporary name in the same folder, then renames it: whoever sees the
/// final name sees the whole file. A link stays a link, and the file that it names is replaced.
fn replace_file<T>(path: &Path, write: impl FnOnce(File) -> io::Result<T>) -> Result<T, DataError> {
    let fail = |e| DataError::io(path, "write", e);
    if path.is_dir() {
        return Err(DataError::Directory { path: path.to_path_buf() });
    }
    if is_stream(path) {
        return File::options().append(true).open(path).and_then(write).map_err(fail);
    }
    let target = if path.is_symlink() { path.canonicalize().map_err(fail)? } else { path.to_path_buf() };
    if target.file_name().is_none() {
        return Err(fail(io::Error::new(io::ErrorKind::InvalidInput, "the path has no file name")));
    }
    let temporary = temporary::Temporary::beside(&target);
    let value = File::create(temporary.path()).and_then(write).map_err(fail)?;
    temporary.rename(&target).map_err(fail)?;
    Ok(value)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn links_stay_links_and_streams_stay_streams() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        std::fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        replace_file(&link, |mut f| f.write_all(b"new")).unwrap();
        assert!(link.is_symlink() && std::fs::read_to_string(&real).unwrap() == "new");
        assert!(!is_stream(&link) && !is_stream(&dir.path().join("absent")));
        assert!(is_stream(Path::new("/dev/null")));
        // Whatever this test's own stdout is, a regular file included.
        assert!(!Path::new("/dev/stdout").exists() || is_stream(Path::new("/dev/stdout")));
        // A link to nothing is an error rather than a file in its place.
        std::fs::remove_file(&real).unwrap();
        assert!(replace_file(&link, |_| Ok(())).is_err() && link.is_symlink());
    }
}

#[cfg(all(test, feature = "formats"))]
mod containers_tests;
