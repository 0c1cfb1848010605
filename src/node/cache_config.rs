//! The `cache` section of the configuration: the local cache of volumes.

use std::path::PathBuf;

use serde::Deserialize;

use crate::config_values::{path_or_none, size_or_zero};
use cleat_backend::{CACHE_FILE_BYTES, MAX_CACHE_FILES};

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
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self { directory: None, volume_bytes: 1 << 30 }
    }
}

impl CacheConfig {
    /// The number of files of one cache.
    pub(crate) fn files(&self) -> usize {
        usize::try_from(self.volume_bytes / CACHE_FILE_BYTES).unwrap_or(usize::MAX)
    }

    /// Checks the length. Returns what is wrong with it.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self.files() {
            1..=MAX_CACHE_FILES => Ok(()),
            _ => Err("must be 32M to 2G".to_owned()),
        }
    }
}
