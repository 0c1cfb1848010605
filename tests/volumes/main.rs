//! `cleat volume` as a user meets it: on a real cluster, where `rbd` says what has become of it, and on
//! files.
#![allow(clippy::print_stdout, reason = "figures are for whoever reads the output")]

mod claims;
mod everyday;
mod files;
mod fixture;
mod interrupts;
mod refusals;
mod trash;
