//! The messages between the supervisor and its workers, and the names and protocol versions of builds.
//!
//! - Input: nothing; both sides depend on this crate.
//! - Output: the types of the messages, and the comparison of protocol versions.
//!
//! The supervisor depends on this crate and not on `worker`, so that it links nothing of the data path. The
//! following never happens here: I/O, except that [`version`] reads the metadata of an executable; a decision
//! about a mapping or a request.

pub mod isolation;
pub mod protocol;
pub mod version;
