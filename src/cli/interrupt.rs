//! Ctrl-C and SIGTERM: a command ends at once and leaves no temporary file; a training run after the step in progress.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::data::temporary;

/// Whether the first signal only asks.
static ASKS: AtomicBool = AtomicBool::new(false);
/// Whether it does so in silence.
static QUIET: AtomicBool = AtomicBool::new(false);
/// Set by that signal.
static STOP: AtomicBool = AtomicBool::new(false);

/// From here on a signal ends the program, with its temporary files removed.
pub fn watch() {
    let set = ctrlc::set_handler(|| {
        if !ASKS.load(Ordering::SeqCst) || STOP.swap(true, Ordering::SeqCst) {
            temporary::remove_all();
            exit(super::INTERRUPTED);
        }
        if !QUIET.load(Ordering::SeqCst) {
            eprintln!("\ninterrupted: saving a checkpoint; once more to quit at once");
        }
    });
    if let Err(e) = set {
        tracing::debug!("no handler for Ctrl-C: {e}");
    }
}

/// From here on the first signal ends the run after the step in progress, with a checkpoint to go on from; the second
/// ends the program at once.
pub fn ask(quiet: bool) {
    QUIET.store(quiet, Ordering::SeqCst);
    ASKS.store(true, Ordering::SeqCst);
}

/// Whether a signal asked for the end.
pub fn asked() -> bool {
    STOP.load(Ordering::SeqCst)
}

/// Ends the process without what stands at its end: other threads still compute, and the libraries' own endings would
/// take their memory away under them.
pub fn exit(code: u8) -> ! {
    #[cfg(unix)]
    // SAFETY: takes a number and does not return; nothing of this process is used afterwards.
    unsafe {
        nix::libc::_exit(code.into())
    }
    #[cfg(not(unix))]
    std::process::exit(code.into())
}
