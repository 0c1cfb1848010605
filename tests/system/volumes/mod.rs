//! `cleat volume` on a real cluster, with results checked by `rbd`, and on files.

mod basic;
mod claims;
mod copies;
mod files;
pub(crate) mod fixture;
mod interrupts;
mod labels;
mod refusals;
mod repairs;
mod trash;
