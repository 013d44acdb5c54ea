//! The command line: parses, calls `birkhoff::cli`.

use std::alloc::{GlobalAlloc, Layout, System};

fn main() -> std::process::ExitCode {
    keep_wayland_quiet();
    birkhoff::cli::main()
}

/// The system's memory; where it refuses, the program ends with one line ([`birkhoff::cli::no_memory`]) instead of an abort.
struct Memory;

// SAFETY: every call goes to the system's allocator as it came, and its answer comes back unless it is null.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the system's allocator's.
        given(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        given(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        given(unsafe { System.realloc(memory, layout, size) }, size)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[inline]
fn given(memory: *mut u8, size: usize) -> *mut u8 {
    if memory.is_null() {
        birkhoff::cli::no_memory::end(size);
    }
    memory
}

#[global_allocator]
static MEMORY: Memory = Memory;

/// A layer of Mesa asks Wayland for a display whenever a Vulkan adapter is listed. Where
/// `XDG_RUNTIME_DIR` is not set, as in a bare container, libwayland then prints an error to stderr,
/// about nothing that matters here. A folder that does not exist has the same effect in silence.
fn keep_wayland_quiet() {
    let unset = std::env::var_os("XDG_RUNTIME_DIR").is_none_or(|dir| dir.is_empty());
    if cfg!(target_os = "linux") && unset {
        // SAFETY: first statement of `main`: no other thread exists that could read the environment.
        unsafe { std::env::set_var("XDG_RUNTIME_DIR", "/nonexistent/birkhoff") };
    }
}
