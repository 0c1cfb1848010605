//! Tests of the binary: its command line, its worker process, `cleat volume`, and the supervisor on the
//! simulated kernel.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test fails by panicking, prints figures, and waits in real time"
)]

mod cli;
mod csi_groups;
mod csi_reclaim;
mod csi_sanity;
mod kernel;
mod lifecycle;
mod network_fence;
mod shared_volume;
mod volumes;
mod worker;
