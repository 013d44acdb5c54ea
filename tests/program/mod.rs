//! The built program as a user calls it. A test takes what it needs of this.
#![allow(dead_code, reason = "each test file has a copy of its own and uses a part")]

/// Training on several ranks.
#[cfg(unix)]
pub mod job;

use std::path::Path;
use std::process::{Command, Output};

/// Runs the program in the project's folder.
pub fn birkhoff(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_birkhoff"))
        .args(args)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("the binary runs")
}

/// Its standard output, where it succeeds.
pub fn ok(args: &[&str]) -> String {
    let o = birkhoff(args);
    assert!(o.status.success(), "{args:?}: {}", String::from_utf8_lossy(&o.stderr));
    String::from_utf8(o.stdout).unwrap()
}

/// Exit code 2 and one line that holds every given part.
pub fn fails(args: &[&str], parts: &[&str]) {
    let o = birkhoff(args);
    let err = String::from_utf8_lossy(&o.stderr);
    let errors: Vec<&str> = err.lines().filter(|l| l.starts_with("error")).collect();
    assert_eq!(o.status.code(), Some(2), "{args:?}: {err}");
    assert_eq!(errors.len(), 1, "{args:?}: {err}");
    assert!(!err.contains("panicked"), "{err}");
    for p in parts {
        assert!(errors[0].contains(p), "{args:?}: {:?} does not say {p:?}", errors[0]);
    }
}

/// A path as an argument.
pub fn s(p: &Path) -> &str {
    p.to_str().unwrap()
}
