//! The `cleat` binary.

use mimalloc::MiMalloc;

/// For C and C++, too: the crate's `override` puts `malloc` and its like into the program, where
/// libraries that are loaded later find them first. librbd allocates dozens of times a request, and
/// frees on other threads.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() {
    // Heaps of some MiB would be rounded up to huge pages, where the system gives those unasked
    // (`transparent_hugepage/enabled` is `always`): up to 25 MiB for an idle worker. What this process
    // starts inherits it: workers, which so have none from their first page on, but hooks as well.
    // Where it cannot be had, it costs just that.
    let _ = nix::sys::prctl::set_thp_disable(true);
    // Before anything else that a client needs: a worker is a process per volume, and stays small.
    let is_worker = std::env::args_os().nth(1).is_some_and(|command| command == "worker");
    let code = if is_worker {
        cleat_worker::process::main(cleat::backends::REGISTRY)
    } else {
        cleat::cli::main()
    };
    cleat_sys::process::exit_now(code);
}
