//! What a rank says at its end. It leaves its error for the launcher instead of printing it, so that one reason is shown
//! once, however many ranks end with it.

use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Names the file, in a rank's environment.
pub const FILE: &str = "BIRKHOFF_ERROR_FILE";

/// An error that ended a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The error in one line.
    pub line: String,
    /// The rank whose failure is the reason; `None` where it is this rank's own.
    pub because_of: Option<usize>,
    /// It came before the ranks had met: no other rank hears of it.
    pub alone: bool,
}

impl Note {
    /// Leaves it; false where no launcher waits for it, or it cannot be written.
    pub fn leave(&self) -> bool {
        let Some(file) = std::env::var_os(FILE).filter(|f| !f.is_empty()) else { return false };
        serde_json::to_vec(self).is_ok_and(|text| std::fs::write(file, text).is_ok())
    }
}

/// Where one rank leaves its note. The launcher's end leaves no file behind, also where it is killed (Linux; elsewhere an
/// orderly end removes it).
#[derive(Debug)]
pub struct Slot {
    #[cfg(target_os = "linux")]
    file: std::fs::File,
    #[cfg(not(target_os = "linux"))]
    file: tempfile::NamedTempFile,
}

impl Slot {
    /// An empty one.
    pub fn new() -> io::Result<Self> {
        #[cfg(target_os = "linux")]
        let file = tempfile::tempfile()?;
        #[cfg(not(target_os = "linux"))]
        let file = tempfile::NamedTempFile::new()?;
        Ok(Slot { file })
    }

    /// For the rank's environment.
    pub fn path(&self) -> PathBuf {
        // the file has no name, but its descriptor has one, for all that this user runs
        #[cfg(target_os = "linux")]
        return format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&self.file))
            .into();
        #[cfg(not(target_os = "linux"))]
        return self.file.path().to_owned();
    }

    /// What the rank has left, once it has ended; `None` where it had nothing to say.
    pub fn read(&mut self) -> Option<Note> {
        let mut text = vec![];
        self.file.seek(SeekFrom::Start(0)).ok()?;
        self.file.read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    }
}
