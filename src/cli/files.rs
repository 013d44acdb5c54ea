//! The files of a run as they were when it began: what `--resume` compares them with.

use crate::data::input::{Place, places};
use crate::data::witness::Stamp;
use crate::text::group;
use anyhow::{bail, ensure};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A file of rows when the run began.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FileRecord {
    path: PathBuf,
    bytes: u64,
    /// A hash of its first and last 64 KiB, in hexadecimal digits.
    ends: String,
}

impl FileRecord {
    /// Files as they are now; what cannot be read is left to the reader's errors.
    pub fn of(patterns: &[PathBuf]) -> Vec<FileRecord> {
        let places = places(patterns).unwrap_or_default();
        let one = |place: Place| {
            let path = place.name();
            let stamp = path.is_file().then(|| Stamp::of(&path))?.ok()??;
            Some(FileRecord { path, bytes: stamp.bytes, ends: format!("{:016x}", stamp.ends) })
        };
        places.into_iter().filter_map(one).collect()
    }

    /// An error if files are not those that they were, whatever their paths.
    pub fn same(before: &[FileRecord], now: &[FileRecord], option: &str) -> anyhow::Result<()> {
        if before.is_empty() || now.is_empty() {
            return Ok(());
        }
        ensure!(
            before.len() == now.len(),
            "{}: the run began with {} files, now there are {}; give the same ones with {option}",
            now[0].path.display(),
            before.len(),
            now.len()
        );
        for (then, now) in before.iter().zip(now) {
            let what = match (then.bytes == now.bytes, then.ends == now.ends) {
                (true, true) => continue,
                (false, _) => {
                    format!("it had {} bytes, now {}", group(then.bytes), group(now.bytes))
                }
                (true, false) => "it has the same size and other content".into(),
            };
            bail!(
                "{}: changed since the run began: {what}; give the file that it began with ({option}), or train again",
                now.path.display()
            );
        }
        Ok(())
    }
}
