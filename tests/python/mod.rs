//! Python with the packages of `tools/python-requirements.txt`, where `make setup` has made it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The interpreter; `None`, with a line, where there is none.
pub fn python(test: &str) -> Option<PathBuf> {
    let named = std::env::var_os("BIRKHOFF_PYTHON").map(PathBuf::from);
    let cached = std::env::var_os("HOME").map(|h| Path::new(&h).join(".cache/birkhoff/python/bin/python"));
    let found = named.or(cached).filter(|p| p.exists());
    if found.is_none() {
        eprintln!("SKIP {test}: no Python; make setup makes it in ~/.cache/birkhoff/python");
    }
    found
}

/// Runs a script of this folder; its stdout.
pub fn script(python: &Path, name: &str, args: &[&Path]) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python").join(name);
    let o = Command::new(python).arg(path).args(args).output().expect("python starts");
    assert!(o.status.success(), "{name}: {}", String::from_utf8_lossy(&o.stderr));
    String::from_utf8(o.stdout).expect("text")
}
