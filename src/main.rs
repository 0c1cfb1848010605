//! The `cleat` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Before anything else that a client needs: a worker is a process per volume, and stays small.
    if std::env::args_os().nth(1).is_some_and(|command| command == "worker") {
        return cleat::worker::process::main();
    }
    cleat::cli::main()
}
