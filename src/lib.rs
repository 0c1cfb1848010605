//! cleat makes volumes fast to a Linux node as block devices. `ARCHITECTURE.md`, beside this file,
//! describes how the parts work together and in which order to read them.
//!
//! This crate is the binary: the command line, the checks of `cleat doctor`, and the composition. All
//! the rest lies in the crates below `src/`, one folder each.

pub mod backends;
pub mod cli;
pub mod doctor;
