//! The command line: parses, calls `birkhoff::cli`.

fn main() -> std::process::ExitCode {
    birkhoff::cli::main()
}
