//! The only crate, besides those in `ffi/`, where `unsafe` is allowed: the ring, its buffers, shared memory,
//! and the ioctls and prctls that no crate wraps.
//!
//! Comes in: safe Rust values, owned. Goes out: safe Rust values, owned. What may never happen
//! here: policy. Nothing in `sys` knows of NBD, volumes or backends.
#![allow(unsafe_code)]

pub mod block;
pub mod buffer;
pub mod descriptor;
#[cfg(any(test, feature = "escape-attempts"))]
pub mod escape_attempts;
pub mod host;
pub mod memory_lock;
pub mod process;
pub mod ring;
pub mod send_list;
pub mod seqpacket;
pub mod shared;
