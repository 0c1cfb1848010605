//! The types that all other crates share: requests on a volume and their results, the properties of
//! a volume, errors of the control side, the policy of a mapping, and its use of space.
//!
//! It also has the two things that tests replace: the clock and the source of randomness. Apart from
//! reading those from the system, this crate does no I/O. It depends on no other crate of the
//! project, and it knows nothing of NBD, of sockets or of any backend.

pub mod clock;
pub mod error;
pub mod policy;
pub mod random;
pub mod request;
pub mod space;
pub mod volume;
