//! Volumes on an object store: the format, its codec, and (later) the state machines of the log. The crate
//! does no I/O, and has no threads and no clock.
//!
//! - Input: the bytes of objects and the names that a listing has returned.
//! - Output: checked values; bytes to store under a name that is free.
//!
//! The text below defines the objects and the protocol between writers. `model` enumerates the protocol's
//! states at small scope in a test. Nothing uses this crate yet; it becomes a backend beside `cleat-rbd`.
//!
//! The following never happens here: a decision by time; memory allocated for a count or length that was not
//! compared with the bytes that follow it; a field of an object, other than its kind and length, used before the
//! checksum of the header was verified.
#![doc = include_str!("FORMAT.md")]

pub mod codec;
pub mod map;
#[cfg(test)]
mod model;
pub mod name;
