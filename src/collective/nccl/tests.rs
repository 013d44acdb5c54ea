//! As far as it goes without a device: the real library is loaded, and what is missing is named. `tests/gpu_nccl.rs` has the
//! rest.

use super::*;

/// The library of PyPI's wheel, which `make setup` puts there, or the one that is named.
fn library() -> Option<String> {
    let named = std::env::var(PATH).ok().filter(|p| !p.is_empty());
    let home = std::env::var("HOME").unwrap_or_default();
    named
        .or(Some(format!("{home}/.cache/birkhoff/nccl/nvidia/nccl/lib/libnccl.so.2")))
        .filter(|p| std::path::Path::new(p).exists())
}

#[test]
fn the_real_library_tells_its_version() {
    let Some(path) = library() else {
        eprintln!("SKIP: no libnccl.so.2 (make setup, or {PATH}=FILE)");
        return;
    };
    let api = Api::load(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let (major, minor, _) = api.version().expect("it tells");
    eprintln!("{path}: NCCL {major}.{minor}");
    assert_eq!(major, 2);
    assert!((4..100).contains(&minor), "{minor}");
    // its own words for its own errors
    assert!(api.checked(2).unwrap_err().contains("unhandled system error"));
}

#[test]
fn a_library_that_is_another_one() {
    let e = Api::load("libc.so.6").err().expect("libc has no ncclGetVersion");
    assert!(e.contains("ncclGetVersion"), "{e}");
    let e = Api::load("/nonexistent/libnccl.so.2").err().expect("no such file");
    assert!(e.contains("/nonexistent/libnccl.so.2"), "{e}");
}

#[test]
fn what_is_missing_is_named() {
    match devices(1) {
        Ok(n) => assert!(n > 0),
        Err(e) => {
            let e = e.to_string();
            assert!(
                e.starts_with("--collective nccl is not available: ")
                    && e.ends_with("or use --collective tcp"),
                "{e}"
            );
            assert!(e.contains("libnccl") || e.contains("driver"), "{e}");
            assert!(!e.contains('\n'), "{e}");
        }
    }
}
