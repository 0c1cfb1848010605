//! The `cleat` binary.

use std::process::ExitCode;

use mimalloc::MiMalloc;

/// For C and C++, too: the crate's `override` puts `malloc` and its like into the program, where
/// libraries that are loaded later find them first. librbd allocates dozens of times per request.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    // Before anything else that a client needs: a worker is a process per volume, and stays small.
    if std::env::args_os().nth(1).is_some_and(|command| command == "worker") {
        return cleat::worker::process::main();
    }
    cleat::cli::main()
}
