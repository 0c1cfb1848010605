//! Values of the configuration that several sections have.

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use cleat_backend::uri::parse_size_or_zero;

/// Reads a path; "" means none.
pub(crate) fn path_or_none<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<PathBuf>, D::Error> {
    let path = PathBuf::deserialize(deserializer)?;
    Ok((!path.as_os_str().is_empty()).then_some(path))
}

/// Reads a size such as "100M"; "0" means none.
pub(crate) fn size_or_zero<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_size_or_zero(&text).map_err(|error| serde::de::Error::custom(error.message()))
}

/// Reads a duration such as "30s", "5m" or "1h 30m".
pub(crate) fn duration<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map_err(|error| {
        serde::de::Error::custom(format!("{text:?} is not a duration such as \"30s\": {error}"))
    })
}
