//! The end of a program that gets no more memory: one line and exit code 2, never an abort.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use super::interrupt;
use crate::data::temporary;

/// Whether some thread has come here.
static ENDING: AtomicBool = AtomicBool::new(false);

/// From here on a thread that cannot be started, for want of memory or of processes, is one line as well: std and rayon
/// panic.
pub fn watch() {
    let others = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let payload = panic.payload();
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("");
        if text.starts_with("failed to spawn thread") || text.contains("thread pool has not been initialized")
        {
            eprintln!(
                "error: no thread can be started: too little memory (ulimit -v) or too few processes (ulimit -u) are left; \
                 raise the limit, or set RAYON_NUM_THREADS=1"
            );
            temporary::remove_all();
            interrupt::exit(super::FAILED);
        }
        others(panic);
    }));
}

/// Says that so many bytes were refused, removes the temporary files and ends the process. Takes no memory.
pub fn end(bytes: usize) -> ! {
    while ENDING.swap(true, Ordering::SeqCst) {
        // another thread is at it; this one has nothing to go on with
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
    let mut line = [0u8; 320];
    let mut rest = &mut line[..];
    let _ = writeln!(
        rest,
        "error: out of memory: {bytes} bytes were asked for and refused; lower train.batch, train.eval_batch, model.width, \
         data.buckets or data.max_size, a list column's max_length, or how much other programs of this machine hold"
    );
    let left = rest.len();
    let end = line.len() - left;
    // not by way of std's handle, which this thread may hold
    #[cfg(unix)]
    // SAFETY: the bytes are this function's own; a short or failed write loses words, nothing else.
    let _ = unsafe { nix::libc::write(2, line.as_ptr().cast(), end) };
    #[cfg(not(unix))]
    let _ = std::io::stderr().write_all(&line[..end]);
    temporary::remove_all();
    interrupt::exit(super::FAILED)
}
