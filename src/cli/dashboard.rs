//! `birkhoff dashboard`, and the window of `birkhoff train --dashboard`.

use super::args::DashboardArgs;

/// Runs the subcommand.
#[cfg(not(feature = "dashboard"))]
pub fn run(_: &DashboardArgs) -> anyhow::Result<()> {
    anyhow::bail!(MISSING)
}

/// What to do about a program without its dashboard.
#[cfg(not(feature = "dashboard"))]
pub const MISSING: &str = "this birkhoff was built without the dashboard; \
     `cargo build --release --features dashboard` builds one with it, `make dashboard` builds and opens it";

/// Runs the subcommand.
#[cfg(feature = "dashboard")]
pub fn run(args: &DashboardArgs) -> anyhow::Result<()> {
    use super::args::ThemeWord;
    use crate::dashboard::{View, window};
    let options = window::Options {
        view: args.view.as_deref().and_then(View::from_word).unwrap_or_default(),
        dark: match args.theme {
            ThemeWord::System => None,
            ThemeWord::Dark => Some(true),
            ThemeWord::Light => Some(false),
        },
        screenshot: args.screenshot.clone(),
        size: args.size,
        export: args.export.clone(),
    };
    window::open(&args.runs, options, || true).map_err(anyhow::Error::msg)
}

/// Trains on a thread of its own while the window, which needs the first thread, shows the run. The window
/// closed, the training goes on; the training failed, the window closes.
#[cfg(feature = "dashboard")]
pub fn beside(
    run: &std::path::Path,
    train: impl FnOnce() -> anyhow::Result<()> + Send + 'static,
) -> anyhow::Result<()> {
    use crate::dashboard::window;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    let well = Arc::new(AtomicBool::new(true));
    let tell = well.clone();
    let training = std::thread::Builder::new().name("train".into()).spawn(move || {
        let result = train();
        if result.is_err() {
            tell.store(false, Ordering::Relaxed);
        }
        result
    })?;
    let options = window::Options { export: ".".into(), ..window::Options::default() };
    if let Err(e) = window::open(&[run.to_owned()], options, move || well.load(Ordering::Relaxed)) {
        eprintln!("{e}; training goes on without it");
    }
    training.join().map_err(|_| anyhow::anyhow!("the training thread ended in a panic"))?
}

#[cfg(all(test, not(feature = "dashboard")))]
mod tests {
    #[test]
    fn the_message_names_the_way_out_in_one_line() {
        let m = super::MISSING;
        assert!(m.contains("cargo build --release --features dashboard") && m.contains("make dashboard"));
        assert!(!m.contains('\n'));
    }
}
