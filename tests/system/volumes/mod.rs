//! `cleat volume` as a user meets it: on a real cluster, where `rbd` says what has become of it, and on
//! files.

mod basic;
mod claims;
mod files;
mod fixture;
mod interrupts;
mod refusals;
mod trash;
