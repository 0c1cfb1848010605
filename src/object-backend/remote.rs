//! Volumes in a bucket of an object store: Amazon S3 and stores with its API (`s3:`), Google Cloud Storage (`gs:`), and
//! Azure Blob Storage (`az:`), by the crate `object_store`.
//!
//! Each client has a tokio runtime of its own, whose threads start when the volume is opened. The engine repeats what
//! fails, so `object_store` repeats nothing.

mod bucket;
mod certificates;
mod chain;
mod client;
mod credentials;
mod hedge;
mod http;
mod keys;
mod origin;
mod rejection;
mod store;

pub(crate) use bucket::{Bucket, Provider};
pub(crate) use credentials::credential_file;
pub(crate) use store::RemoteHome;
