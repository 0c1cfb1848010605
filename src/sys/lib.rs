//! The only crate, besides those in `ffi/`, where `unsafe` is allowed: the ring, its buffers, shared memory,
//! and the ioctls and prctls that no crate wraps.
//!
//! Comes in: safe Rust values, owned. Goes out: safe Rust values, owned. What may never happen
//! here: policy. Nothing in `sys` knows of NBD, volumes or backends.
#![allow(unsafe_code)]

#[cfg(any(test, feature = "attempts"))]
pub mod attempts;
pub mod block;
pub mod buffer;
pub mod descriptor;
pub mod gather;
pub mod machine;
pub mod packet;
pub mod prctl;
pub mod process;
pub mod ring;
pub mod shared;
