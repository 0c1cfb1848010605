//! The only crate, besides those in `ffi/`, where `unsafe` is allowed: the ring, its buffers, shared memory,
//! and the ioctls and prctls that no crate wraps.
//!
//! The interface takes and returns safe Rust values that own their resources. The crate makes no policy
//! decisions, and it is independent of NBD, volumes and backends.
#![allow(unsafe_code)]

pub mod block;
pub mod buffer;
pub mod descriptor;
#[cfg(any(test, feature = "escape-attempts"))]
pub mod escape_attempts;
pub mod file_window;
pub mod host;
pub mod memory_limit;
pub mod memory_lock;
pub mod page_pipe;
pub mod process;
pub mod ring;
pub mod send_list;
pub mod seqpacket;
pub mod shared;
pub mod swap;
pub mod volume_id;
pub mod words;
