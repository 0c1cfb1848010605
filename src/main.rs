//! The `cleat` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    cleat::cli::main()
}
