//! Files that must stay as they are while a run reads them, pass after pass.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use xxhash_rust::xxh3::Xxh3Default;

use super::error::DataError;
use crate::text::group;

/// Bytes of each end that are looked at.
const END: u64 = 1 << 16;

/// What a file is like, without reading all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Bytes.
    pub bytes: u64,
    /// When it was last written to, where the system knows.
    pub modified: Option<SystemTime>,
    /// A hash of its first and last 64 KiB.
    pub ends: u64,
}

impl Stamp {
    /// Of a file; `None` of a pipe or a device.
    pub fn of(path: &Path) -> io::Result<Option<Stamp>> {
        let mut file = File::open(path)?;
        let about = file.metadata()?;
        if !about.is_file() {
            return Ok(None);
        }
        let mut hash = Xxh3Default::new();
        let mut part = vec![];
        for at in [0, about.len().saturating_sub(END)] {
            part.clear();
            file.seek(SeekFrom::Start(at))?;
            (&mut file).take(END).read_to_end(&mut part)?;
            hash.update(&part);
        }
        Ok(Some(Stamp { bytes: about.len(), modified: about.modified().ok(), ends: hash.digest() }))
    }

    /// What is different in `now`, in words.
    fn difference(&self, now: &Stamp) -> Option<String> {
        if self.bytes != now.bytes {
            return Some(format!("it had {} bytes, now {}", group(self.bytes), group(now.bytes)));
        }
        if self.ends != now.ends {
            return Some("it has the same size and other content".into());
        }
        (self.modified != now.modified).then(|| "it was written to, its size is the same".into())
    }
}

/// Remembers files as they were when they were first read.
#[derive(Clone, Debug, Default)]
pub struct Witness(Arc<Mutex<HashMap<PathBuf, Stamp>>>);

impl Witness {
    /// An error if the file is not what it was when it was first asked for. What cannot be looked at (any more) is no
    /// change: reading it tells.
    pub fn check(&self, path: &Path) -> Result<(), DataError> {
        // a pipe must not be opened beside its reader
        if !path.is_file() {
            return Ok(());
        }
        let Ok(Some(now)) = Stamp::of(path) else { return Ok(()) };
        let mut known = self.0.lock().unwrap_or_else(|e| e.into_inner());
        match known.get(path).map(|then| then.difference(&now)) {
            Some(Some(what)) => Err(DataError::Changed { path: path.to_path_buf(), what }),
            Some(None) => Ok(()),
            None => {
                known.insert(path.to_path_buf(), now);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.csv");
        let good = vec![b'x'; 200_000];
        std::fs::write(&path, &good).unwrap();
        let fresh = || {
            let witness = Witness::default();
            witness.check(&path).unwrap();
            witness.check(&path).unwrap();
            witness
        };
        let changed = |witness: &Witness, what: &str| {
            let text = witness.check(&path).unwrap_err().to_string();
            assert!(text.starts_with(&format!("{}: ", path.display())) && text.contains(what), "{text}");
            std::fs::write(&path, &good).unwrap();
        };
        let witness = fresh();
        std::fs::write(&path, &good[1..]).unwrap();
        changed(&witness, "it had 200,000 bytes, now 199,999");

        // in the middle: only the time tells
        let witness = fresh();
        let time = std::fs::metadata(&path).unwrap().modified().unwrap();
        let set = |time| File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        set(time + std::time::Duration::from_secs(7));
        changed(&witness, "written to");

        // at an end, with the same time: only the content tells
        let witness = fresh();
        let time = std::fs::metadata(&path).unwrap().modified().unwrap();
        let mut other = good.clone();
        other[199_999] = b'y';
        std::fs::write(&path, other).unwrap();
        set(time);
        changed(&witness, "other content");

        let witness = fresh();
        std::fs::remove_file(&path).unwrap();
        assert!(witness.check(&path).is_ok(), "whoever opens it says so");
    }
}
