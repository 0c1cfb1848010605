//! Paths in the configuration.

use std::path::PathBuf;

use serde::Deserialize;

/// Reads a path; "" means none.
pub(crate) fn path_or_none<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<PathBuf>, D::Error> {
    let path = PathBuf::deserialize(deserializer)?;
    Ok((!path.as_os_str().is_empty()).then_some(path))
}
