//! `cargo bench --bench peer`: compares `cleat serve` with nbdkit's memory plugin, in alternating rounds.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a benchmark measures real time, prints figures, and fails by panicking"
)]

mod common;

use std::process::{Command, Stdio};

use common::{Server, compare};

fn main() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (dir.path().join("cleat"), dir.path().join("nbdkit"));
    let cleat = Command::new(env!("CARGO_BIN_EXE_cleat"))
        .args(["serve", "mem:256M", "--socket"])
        .arg(&ours)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let cleat = Server(cleat);
    let nbdkit = Command::new("nbdkit")
        .args(["--foreground", "--unix"])
        .arg(&theirs)
        .args(["memory", "256M"])
        .spawn()
        .expect("nbdkit is needed: apt install nbdkit");
    let nbdkit = Server(nbdkit);
    let servers = [("cleat", &cleat, &*ours), ("nbdkit memory", &nbdkit, &*theirs)];
    compare(&servers, &[1, 32, 128]);
}
