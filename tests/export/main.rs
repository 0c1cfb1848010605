//! Tests of the data path: sockets, protocol and a backend, in this process and as `cleat serve`.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test fails by panicking, prints figures, and waits in real time"
)]

mod block_status;
mod costs;
mod data_path;
mod fixture;
mod flaky;
mod foreign_threads;
mod handover;
mod instructions;
mod interop;
mod limits;
mod outage;
mod pages;
mod silent_clients;
mod toy_backend;
mod twins;
