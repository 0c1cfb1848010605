//! The keys of a bucket, as the process that opens a volume finds them.

use std::sync::Arc;

use cleat_backend::{CredentialFile, SecretSource};

use super::bucket::Bucket;
use super::chain;
use super::keys::MAX_BYTES;

/// Stands for the path of the file if the URI names none. The messages to workers contain it.
const USUAL_SOURCES: &str = "from the usual sources";

/// Returns the file that the URI names, or the usual sources.
pub(crate) fn credential_file(bucket: &Bucket) -> CredentialFile {
    let file = bucket.credentials_file.clone();
    let usual = || -> Arc<dyn SecretSource> { chain::shared(bucket) };
    CredentialFile {
        source: file.is_none().then(usual),
        path: file.unwrap_or_else(|| USUAL_SOURCES.into()),
        what: "credentials",
        option: "credentials_file",
        max_bytes: MAX_BYTES,
        is_followed: true,
    }
}
