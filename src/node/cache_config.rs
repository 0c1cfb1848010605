//! The `cache` section of the configuration: the local cache of volumes.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use serde::Deserialize;

use crate::config_values::{path_or_none, size_or_zero};
use cleat_backend::{MAX_CACHE_FILE_BYTES, MAX_CACHE_FILES};

/// The lengths that a cache may have, in bytes.
const LENGTHS: RangeInclusive<u64> = 32 << 20..=MAX_CACHE_FILES as u64 * MAX_CACHE_FILE_BYTES;

/// The local cache of volumes on an object store.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheConfig {
    /// The directory of the caches; `None`: there is no cache.
    #[serde(deserialize_with = "path_or_none")]
    pub directory: Option<PathBuf>,
    /// The maximum length of the cache of one mapping, in bytes.
    #[serde(deserialize_with = "size_or_zero")]
    pub volume_bytes: u64,
    /// The maximum length of the cache that the volumes of a bucket share, in bytes.
    #[serde(deserialize_with = "size_or_zero")]
    pub bucket_bytes: u64,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self { directory: None, volume_bytes: 1 << 30, bucket_bytes: 2 << 30 }
    }
}

impl CacheConfig {
    /// Checks the lengths. Returns the key of a wrong one, and what is wrong with it.
    pub(crate) fn check(&self) -> Result<(), (&'static str, String)> {
        let lengths =
            [("cache.volume_bytes", self.volume_bytes), ("cache.bucket_bytes", self.bucket_bytes)];
        match lengths.into_iter().find(|(_, bytes)| !LENGTHS.contains(bytes)) {
            Some((key, _)) => Err((key, "must be 32M to 64G".to_owned())),
            None => Ok(()),
        }
    }
}
