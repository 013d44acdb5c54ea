//! One file per subcommand.

use std::process::ExitCode;

/// Parses the arguments, runs the subcommand, prints one clear line on error.
pub fn main() -> ExitCode {
    ExitCode::SUCCESS
}
