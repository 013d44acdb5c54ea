//! Temporary files: one register of all that this process has, so that no ending leaves one behind.
//!
//! A file is removed when its [`Temporary`] is dropped, by [`remove_all`] where the process ends at once (Ctrl-C, no
//! memory), and after a kill by the next process that writes the same target, or copies an input ([`clear_copies`]).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::sync::lock;

/// Files that exist, or are about to.
static FILES: Mutex<Vec<PathBuf>> = Mutex::new(vec![]);

/// How the name of a copied input begins and ends.
const COPY: (&str, &str) = ("birkhoff-", ".input");

/// A temporary file.
#[derive(Debug)]
pub struct Temporary {
    path: PathBuf,
}

impl Temporary {
    fn new(path: PathBuf) -> Temporary {
        lock(&FILES).push(path.clone());
        Temporary { path }
    }

    /// A name beside `target`, for a file that is to replace it. Clears what writers of the same target have left that
    /// are gone.
    pub fn beside(target: &Path) -> Temporary {
        let mut start = OsString::from(".");
        start.push(target.file_name().unwrap_or_default());
        start.push(".tmp-");
        let folder = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        clear(folder, &start, "");
        start.push(super::unique());
        Temporary::new(target.with_file_name(start))
    }

    /// An empty file in the system's folder for such, for a copy of an input that can be read once only.
    pub fn copy_of_input() -> io::Result<(Temporary, File)> {
        let name = format!("{}{}{}", COPY.0, super::unique(), COPY.1);
        let file = Temporary::new(std::env::temp_dir().join(name));
        let mut options = File::options();
        options.read(true).write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let open = options.open(&file.path)?;
        Ok((file, open))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the file its final name.
    pub fn rename(self, target: &Path) -> io::Result<()> {
        std::fs::rename(&self.path, target)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // renamed, it is not there
        let _ = std::fs::remove_file(&self.path);
        lock(&FILES).retain(|p| *p != self.path);
    }
}

/// Removes all of this process' temporary files, where it ends at once. Takes no memory, and waits for no lock: there may
/// be none of the one, and the other may be held by whoever asked for it.
pub fn remove_all() {
    if let Ok(files) = FILES.try_lock() {
        files.iter().for_each(|path| _ = std::fs::remove_file(path));
    }
}

/// Removes copies of inputs whose process is gone: it was killed.
pub fn clear_copies() {
    clear(&std::env::temp_dir(), OsStr::new(COPY.0), COPY.1);
}

/// Removes the files of a folder that are named `start`, the number of a process that is gone, `-…`, `end`.
fn clear(folder: &Path, start: &OsStr, end: &str) {
    let gone = |name: &OsStr| {
        let name = name.as_encoded_bytes().strip_prefix(start.as_encoded_bytes())?;
        let (process, _) = std::str::from_utf8(name).ok()?.strip_suffix(end)?.split_once('-')?;
        process.parse().ok().filter(|id| !is_alive(*id))
    };
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if gone(&entry.file_name()).is_some() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Whether a process of this host exists; where that cannot be told, it does.
#[cfg(all(unix, feature = "cli"))]
fn is_alive(id: i32) -> bool {
    use nix::errno::Errno;
    id <= 0 || nix::sys::signal::kill(nix::unistd::Pid::from_raw(id), None) != Err(Errno::ESRCH)
}

#[cfg(not(all(unix, feature = "cli")))]
fn is_alive(_: i32) -> bool {
    true
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn files_go_with_their_owner_and_left_ones_with_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out.csv");
        // as it is, a process of this number is not: Linux numbers them up to 4194304
        let left = |name: &str| dir.path().join(name);
        let names = [".out.csv.tmp-4194305-0", ".out.csv.tmp-x-0", ".other.tmp-4194305-0"].map(left);
        names.iter().for_each(|n| std::fs::write(n, "").unwrap());
        let own = left(&format!(".out.csv.tmp-{}-77", std::process::id()));
        std::fs::write(&own, "").unwrap();
        let file = Temporary::beside(&target);
        std::fs::write(file.path(), "new").unwrap();
        assert!(!names[0].exists() && names[1].exists() && names[2].exists() && own.exists());
        let path = file.path().to_owned();
        file.rename(&target).unwrap();
        assert!(!path.exists() && std::fs::read(&target).unwrap() == b"new");
        let file = Temporary::beside(&target);
        std::fs::write(file.path(), "half").unwrap();
        let path = file.path().to_owned();
        assert!(lock(&FILES).contains(&path));
        drop(file);
        assert!(!path.exists() && !lock(&FILES).contains(&path));
    }
}
