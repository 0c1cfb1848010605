//! The messages between the supervisor and its workers, and the names of builds.
//!
//! The supervisor and the worker both depend on this crate, so that the supervisor links nothing of the data
//! path. The crate contains types and no I/O, except that [`version`] reads the metadata of an executable.

pub mod protocol;
pub mod version;
