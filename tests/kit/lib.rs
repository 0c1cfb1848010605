//! The test kit: what the test suites of the project share.
//!
//! Without features it holds parts that do not depend on the project's crates: an NBD peer, waiting, a
//! stopwatch, memory figures, a Ceph cluster, and programs in Go. With the feature `daemon` it also holds the
//! harnesses that start a worker process or a supervisor on the simulated kernel.
//!
//! A helper of the kit fails by panicking, as a test does.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::missing_panics_doc,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "the kit is test code: it fails by panicking, prints what a test prints, and waits in real time"
)]

#[cfg(feature = "daemon")]
pub mod backends;
pub mod binary;
pub mod ceph;
#[cfg(feature = "daemon")]
pub mod control_plane;
#[cfg(feature = "daemon")]
pub mod csi_sanity;
pub mod go;
#[cfg(feature = "daemon")]
pub mod isolation;
#[cfg(feature = "daemon")]
pub mod kernel;
pub mod memory;
pub mod minio;
pub mod nbd;
#[cfg(feature = "daemon")]
pub mod node;
pub mod process;
pub mod stopwatch;
pub mod temp;
pub mod wait;
#[cfg(feature = "daemon")]
pub mod worker;
