//! One file per subcommand.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;

pub mod args;
pub mod check;
pub mod compare;
pub mod dashboard;
pub mod data;
pub mod device;
pub mod devices;
pub mod drift;
pub mod eval;
pub mod export;
#[cfg(feature = "plots")]
pub mod figure;
pub mod files;
pub mod gains;
pub mod inspect;
pub mod interrupt;
pub mod launch;
pub mod metrics;
pub mod no_memory;
pub mod output;
pub mod plan;
pub mod predict;
pub mod ranks;
pub mod run_args;
pub mod schema;
pub mod sweep;
pub mod synth;
pub mod table;
pub mod train;

use crate::collective::env::Place;
use crate::text::error_line;
use args::{Cli, Command};
use launch::note::Note;

/// The exit code of every error, in the arguments or later.
const FAILED: u8 = 2;

/// The exit code of a rank that lost another one, or never met it (sysexits' EX_TEMPFAIL): its own input is not the
/// reason, and a restart may help.
const LOST: u8 = 75;

/// The exit code where the reader of stdout went away: 128 + SIGPIPE, as a shell reports it.
const CLOSED: u8 = 141;

/// The exit code of a run that Ctrl-C ended: 128 + SIGINT.
const INTERRUPTED: u8 = 130;

/// Parses the arguments, runs the subcommand, prints one clear line on error.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return report_usage(&e),
    };
    no_memory::watch();
    start_logging();
    crate::data::temporary::clear_copies();
    // these two hear signals for their children
    if !matches!(cli.command, Command::Launch(_) | Command::Sweep(_)) {
        interrupt::watch();
    }
    let done = dispatch(cli.command);
    data::clean();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            let code = exit_code(&e);
            let line = error_line(&e);
            if !line.is_empty() && !matches!(code, CLOSED | INTERRUPTED) {
                report(&e, &line);
            }
            ExitCode::from(code)
        }
    }
}

/// Says what went wrong: to the launcher where there is one, which shows each reason once, else on stderr.
fn report(error: &anyhow::Error, line: &str) {
    use crate::collective::CollectiveError::{self, Join, Setup, Stopped, Unavailable};
    let place = Place::of_this_process().ok().flatten();
    let collective = error.chain().find_map(|e| e.downcast_ref::<CollectiveError>());
    let other = collective
        .and_then(CollectiveError::because_of)
        .filter(|rank| place.as_ref().is_some_and(|p| p.rank != *rank));
    let alone = matches!(collective, Some(Join(_) | Setup(_) | Unavailable { .. }));
    if (Note { line: line.to_owned(), because_of: other, alone }).leave() {
        return;
    }
    match (other, collective, place) {
        // it has said so itself, to be read at the same place
        (Some(rank), Some(Stopped { .. }), Some(p)) if p.local_rank > 0 || p.source == "mpirun" => {
            eprintln!("error: ended because of rank {rank}");
        }
        _ => eprintln!("error: {line}"),
    }
}

/// The exit code of an error.
fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<output::StdoutClosed>() {
        return CLOSED;
    }
    if error.is::<crate::train::events::Interrupted>() {
        return INTERRUPTED;
    }
    if let Some(failed) = error.downcast_ref::<launch::Failed>() {
        return failed.code;
    }
    let lost = |e: &(dyn std::error::Error + 'static)| {
        e.downcast_ref().is_some_and(crate::collective::CollectiveError::may_pass)
    };
    if error.chain().any(lost) { LOST } else { FAILED }
}

/// Prints help and version as they are, and a usage error as one line.
fn report_usage(error: &clap::Error) -> ExitCode {
    use clap::error::ErrorKind;
    let help = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if help || !error.use_stderr() {
        let _ = error.print();
        return if help { ExitCode::from(FAILED) } else { ExitCode::SUCCESS };
    }
    eprintln!("{}; see --help", usage_line(&error.to_string()));
    ExitCode::from(FAILED)
}

/// The message of clap's report, which goes on with the usage in further lines.
fn usage_line(report: &str) -> String {
    let message = report.lines().map(str::trim);
    let message = message.take_while(|l| !l.starts_with("Usage:") && !l.starts_with("For more information"));
    message.filter(|l| !l.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Runs a subcommand.
pub fn dispatch(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Train(args) => train::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Predict(args) => predict::run(&args),
        Command::Schema(args) => schema::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Launch(args) => launch::run(&args),
        Command::Sweep(args) => sweep::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Gains(args) => gains::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Dashboard(args) => dashboard::run(&args),
    }
}

/// Warnings to stderr; `BIRKHOFF_LOG=debug` (or any filter of tracing-subscriber) shows more.
fn start_logging() {
    use tracing_subscriber::EnvFilter;
    let quiet = || EnvFilter::new("error,birkhoff=warn");
    let filter = match std::env::var("BIRKHOFF_LOG") {
        Ok(text) => EnvFilter::try_new(text).unwrap_or_else(|_| quiet()),
        Err(_) => quiet(),
    };
    let colours = colours(std::io::stderr().is_terminal(), std::env::var_os("NO_COLOR"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours);
    // Fails only where a subscriber is set already; then that one is used.
    let _ = log.with_writer(std::io::stderr).try_init();
}

/// Whether lines of the log are coloured: not in a file or pipe, and not where NO_COLOR (<https://no-color.org>) is set.
fn colours(terminal: bool, no_color: Option<std::ffi::OsString>) -> bool {
    terminal && no_color.is_none_or(|v| v.is_empty())
}

#[cfg(test)]
mod tests {
    use super::colours;

    #[test]
    fn the_log_is_coloured_on_a_terminal_only() {
        assert!(colours(true, None) && colours(true, Some("".into())));
        assert!(!colours(false, None) && !colours(true, Some("1".into())));
    }
}
