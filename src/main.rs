//! The command line: parses, calls `birkhoff::cli`.

fn main() -> std::process::ExitCode {
    keep_wayland_quiet();
    birkhoff::cli::main()
}

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
