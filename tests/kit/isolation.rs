//! The isolation of the worker processes of tests.

use std::sync::atomic::{AtomicU32, Ordering};

use cleat_worker::isolation::{Isolation, layer};

/// Returns the isolation for tests of something else. Every layer that this machine has is in force. A
/// missing one is no error, because a container may lack it.
pub fn of_this_machine() -> Isolation {
    let is_root = nix::unistd::geteuid().is_root();
    Isolation { user: is_root.then(unused_user), allow_missing: all_layers() }
}

/// Returns the names of all layers.
pub fn all_layers() -> Vec<String> {
    layer::ALL.map(str::to_owned).to_vec()
}

/// Returns the number of a user that no other process has.
pub fn unused_user() -> u32 {
    static USED: AtomicU32 = AtomicU32::new(0);
    let own = std::process::id() % 30_000;
    2_101_000_000 + own * 1000 + USED.fetch_add(1, Ordering::Relaxed) % 1000
}
