//! The name of this build, and the versions of the worker protocol that it supports.
//!
//! Between the upgrade of the supervisor and that of a worker, the two are of different builds, in either
//! order. Each side sends the newest and the oldest version that it supports, and both use the newest common
//! one.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

pub use super::protocol::ProtocolVersions;
use super::protocol::{OLDEST_PROTOCOL, PROTOCOL_VERSION};
use cleat_core::error::{Error, ErrorKind, Result};

/// The name of this build, for the reader.
pub const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("CLEAT_COMMIT"), ")");

/// The lines of `--version` that name the build, after the program's name.
pub const LONG: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("CLEAT_COMMIT"),
    ", ",
    env!("CLEAT_PROFILE"),
    ", ",
    env!("CLEAT_TARGET"),
    ")",
    "\nbuilt with ",
    env!("CLEAT_RUSTC"),
);

impl ProtocolVersions {
    /// Returns the versions of this build.
    pub fn of_this_build() -> Self {
        let (oldest, newest) = simulated().unwrap_or((OLDEST_PROTOCOL, PROTOCOL_VERSION));
        Self { newest, oldest, build: BUILD.to_owned() }
    }

    /// Returns the newest version that both sides support.
    ///
    /// # Errors
    /// Returns `Unsupported`, with the names of both builds, if there is none.
    pub fn common(&self, other: &Self) -> Result<u32> {
        let newest = self.newest.min(other.newest);
        if newest >= self.oldest.max(other.oldest) {
            return Ok(newest);
        }
        let message = format!(
            "no common version of the worker protocol: {self} on this side, {other} on the other side"
        );
        Err(Error::new(ErrorKind::Unsupported, message).with_repair(
            "upgrade by way of a build in between, or unmap the volume and map it again",
        ))
    }
}

impl std::fmt::Display for ProtocolVersions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.oldest, self.newest) {
            (oldest, newest) if oldest == newest => write!(f, "{} supports {newest}", self.build),
            (oldest, newest) => write!(f, "{} supports {oldest} to {newest}", self.build),
        }
    }
}

/// Returns the identity of an executable file. Two processes with the same identity run the same build. An
/// empty string means that the identity is unknown; it equals no other.
pub fn binary_id(path: &Path) -> String {
    std::fs::metadata(path).map_or_else(
        |_| String::new(),
        |file| format!("{:x}:{:x}:{:x}:{}", file.dev(), file.ino(), file.size(), file.mtime()),
    )
}

/// Returns the versions that a test sets with `CLEAT_TEST_PROTOCOL`, in the form "oldest-newest".
fn simulated() -> Option<(u32, u32)> {
    if !cfg!(feature = "fault") {
        return None;
    }
    let text = std::env::var("CLEAT_TEST_PROTOCOL").ok()?;
    let (oldest, newest) = text.split_once('-')?;
    Some((oldest.parse().ok()?, newest.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn versions(oldest: u32, newest: u32, build: &str) -> ProtocolVersions {
        ProtocolVersions { newest, oldest, build: build.to_owned() }
    }

    #[test]
    fn the_newest_common_version_is_used() {
        for (a, b, common) in [
            (versions(1, 3, "a"), versions(2, 5, "b"), Some(3)),
            (versions(1, 1, "a"), versions(1, 1, "b"), Some(1)),
            (versions(2, 2, "a"), versions(1, 3, "b"), Some(2)),
            (versions(3, 3, "a"), versions(1, 2, "b"), None),
            (versions(1, 2, "a"), versions(3, 4, "b"), None),
        ] {
            assert_eq!(a.common(&b).ok(), common, "{a}, {b}");
            assert_eq!(b.common(&a).ok(), common, "{b}, {a}");
        }
        let error = versions(1, 2, "new").common(&versions(3, 3, "old")).unwrap_err();
        assert!(error.message().contains("new supports 1 to 2"), "{error}");
        assert!(error.message().contains("old supports 3"), "{error}");
    }
}
