//! The binary from outside: its command line, its worker process, its volumes, and the supervisor with
//! everything below it.

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
