//! `cleat volume` on a real cluster, with results checked by `rbd`, and on files and in MinIO.

mod basic;
mod changes;
mod claims;
mod copies;
mod credentials;
mod files;
pub(crate) mod fixture;
mod interrupts;
mod labels;
mod refusals;
mod repairs;
mod trash;
