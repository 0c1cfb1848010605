//! Volumes on an object store: the format and its codec, the log of an open volume, and a store in a local
//! directory. The crate has no runtime and no clock; only [`store::directory`] does I/O, on the threads of
//! [`store::pool`].
//!
//! - Input: reads, writes and flushes of one volume; the objects and names that a [`store::Store`] returns.
//! - Output: objects under names that are free.
//!
//! The text below defines the objects and the protocol between writers. `model` enumerates the protocol's states
//! at small scope in a test; `simulation` runs the code with several writers on a faulty store. The crate
//! `cleat-object-backend` makes a backend of it.
//!
//! The following never happens here: a decision by time; memory allocated for a count or length that was not
//! compared with the bytes that follow it; a field of an object, other than its kind and length, used before the
//! checksum of the header was verified; an acknowledgement of a slot before all earlier ones.
#![doc = include_str!("FORMAT.md")]

pub mod cache;
#[cfg(test)]
mod clone_tests;
pub mod codec;
#[cfg(test)]
mod difference_tests;
pub mod encryption;
#[cfg(test)]
mod flatten_tests;
pub mod map;
#[cfg(test)]
mod model;
pub mod name;
#[cfg(test)]
mod open_tests;
#[cfg(test)]
mod outage_tests;
mod packing;
#[cfg(test)]
mod packing_tests;
#[cfg(test)]
mod page_tests;
#[cfg(test)]
mod read_tests;
#[cfg(test)]
mod repair_tests;
mod rules;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod snapshot_tests;
#[cfg(test)]
mod space_tests;
pub mod store;
pub mod tail_memory;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trim_tests;
pub mod volume;
