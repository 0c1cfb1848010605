//! Tests of the binary: its command line, its worker process, `cleat volume`, and the supervisor on the
//! simulated kernel.

#![allow(
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and prints figures"
)]

mod cli;
mod kernel;
mod lifecycle;
mod volumes;
mod worker;
