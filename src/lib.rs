//! cleat attaches volumes to a Linux node as block devices. `ARCHITECTURE.md`, in this directory, describes
//! how the parts work together and in which order to read them.
//!
//! This crate is the binary: the command line, the checks of `cleat doctor`, and the composition of the
//! other crates, each of which has a directory below `src/`.

pub mod backends;
pub mod cli;
pub mod doctor;
pub mod features;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
