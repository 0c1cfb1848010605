//! The `cleat` binary.

use mimalloc::MiMalloc;

/// The allocator, for C and C++ code, too: the crate's feature `override` defines `malloc` and the related
/// functions in the program, where libraries that are loaded later find them first. librbd allocates dozens
/// of times per request, and frees on other threads.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() {
    // Checked before the command line is parsed: a worker is a process for each volume and stays small.
    let is_worker = std::env::args_os().nth(1).is_some_and(|command| command == "worker");
    let code = if is_worker {
        cleat_worker::process::main(cleat::backends::REGISTRY)
    } else {
        cleat::cli::main()
    };
    cleat_sys::process::exit_now(code);
}
