//! One file per subcommand.

use std::process::ExitCode;

use clap::Parser;

pub mod args;
pub mod check;
pub mod compare;
pub mod dashboard;
pub mod data;
pub mod device;
pub mod devices;
pub mod eval;
pub mod export;
#[cfg(feature = "plots")]
pub mod figure;
pub mod gains;
pub mod inspect;
pub mod launch;
pub mod metrics;
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

use crate::text::error_line;
use args::{Cli, Command};

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
    start_logging();
    let done = dispatch(cli.command);
    data::clean();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            let code = exit_code(&e);
            let line = error_line(&e);
            if !line.is_empty() && !matches!(code, CLOSED | INTERRUPTED) {
                eprintln!("error: {line}");
            }
            ExitCode::from(code)
        }
    }
}

/// The exit code of an error.
fn exit_code(error: &anyhow::Error) -> u8 {
    use crate::collective::CollectiveError::{Damaged, Join, Lost};
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
        matches!(e.downcast_ref(), Some(Lost { .. } | Damaged { .. } | Join(_)))
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
    // Fails only where a subscriber is set already; then that one is used.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init();
}
