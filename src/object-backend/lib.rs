//! The backend for volumes that are logs of objects ([`cleat_object`]): in a local directory (`dir:`), and in a
//! bucket of an object store (`s3:`, `gs:`, `az:`).
//!
//! - Input: the URI of a volume, and its requests.
//! - Output: the results of requests; objects in the store, and claims that name their clients.
//!
//! FLUSH and FUA are acknowledged when their data is durable in the store. Another write, trim or write of zeroes is
//! acknowledged as soon as its records are in the tail file, a file in memory that the supervisor passes to the next
//! process (`image::tail_file`); without a tail file, when it is durable.
//!
//! The engine has no threads of its own: one thread for each open volume polls its futures (`executor`). Operations of
//! a directory block threads (`cleat_object::store::pool`), those of a bucket run on a tokio runtime (`remote`). All
//! threads start when the volume is opened, so a worker is confined before that.
//!
//! The claim of an epoch says which client has opened the volume (`claim`). It decides who may take a volume over;
//! the seals of the engine make that effective, so a wrong decision never damages a volume.
//!
//! The following never happens here: an acknowledgement of data that only this process has; a decision by time; a
//! write by a volume that is open read-only.

mod ask;
mod cache;
mod changes;
mod check;
mod claim;
mod clones;
mod collector;
mod connection;
mod defects;
mod errors;
mod executor;
mod fence;
mod flatten;
mod granted;
mod home;
mod image;
mod labels;
mod manage;
#[cfg(test)]
mod management_tests;
mod naming;
mod nonce;
mod parents;
mod pauses;
mod queue;
mod quiesce;
mod registration;
mod remote;
mod repair;
mod snapshots;
mod spec;
mod table;
mod timeouts;
mod watched;
mod writer;

pub use registration::{AMAZON, AZURE, DIRECTORY, GOOGLE};
