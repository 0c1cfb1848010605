//! Which versions of the worker protocol a build speaks, and what it is called.
//!
//! Supervisor and worker are of different builds from an upgrade of the one to that of the other, in
//! either direction. Each says the newest and the oldest version that it speaks; the newest common
//! one counts.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::protocol::{OLDEST_PROTOCOL, PROTOCOL_VERSION};
use cleat_core::error::{Error, ErrorKind, Result};

/// This build, for people.
pub const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("CLEAT_COMMIT"), ")");

/// The output of `--version`, after the name.
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
    "\nfeatures: ",
    env!("CLEAT_FEATURES"),
);

/// What one side speaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spoken {
    /// The newest version.
    pub newest: u32,
    /// The oldest version; 0: only the newest.
    pub oldest: u32,
    /// The build; empty where it does not say.
    pub build: String,
}

impl Spoken {
    /// By this build.
    pub fn here() -> Self {
        let (oldest, newest) = pretended().unwrap_or((OLDEST_PROTOCOL, PROTOCOL_VERSION));
        Self { newest, oldest, build: BUILD.to_owned() }
    }

    /// The newest version that both speak.
    ///
    /// # Errors
    /// `Unsupported`, naming both builds.
    pub fn common(&self, other: &Self) -> Result<u32> {
        let newest = self.newest.min(other.newest);
        if newest >= self.least().max(other.least()) {
            return Ok(newest);
        }
        let message = format!(
            "no common version of the worker protocol: {self} on this side, {other} on the other"
        );
        Err(Error::new(ErrorKind::Unsupported, message)
            .with_repair("go there by a build in between, or unmap the volume and map it again"))
    }

    fn least(&self) -> u32 {
        if self.oldest == 0 { self.newest } else { self.oldest }
    }
}

impl std::fmt::Display for Spoken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let build = if self.build.is_empty() { "an unnamed build" } else { &self.build };
        match (self.least(), self.newest) {
            (oldest, newest) if oldest == newest => write!(f, "{build} speaks {newest}"),
            (oldest, newest) => write!(f, "{build} speaks {oldest} to {newest}"),
        }
    }
}

/// The identity of an executable file: two processes with the same one run the same build, whatever
/// it calls itself. Empty when it cannot be told, which equals nothing.
pub fn binary_id(path: &Path) -> String {
    std::fs::metadata(path).map_or_else(
        |_| String::new(),
        |file| format!("{:x}:{:x}:{:x}:{}", file.dev(), file.ino(), file.size(), file.mtime()),
    )
}

/// Versions that a test has a worker pretend, as "oldest-newest".
fn pretended() -> Option<(u32, u32)> {
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

    fn spoken(oldest: u32, newest: u32, build: &str) -> Spoken {
        Spoken { newest, oldest, build: build.to_owned() }
    }

    #[test]
    fn the_newest_common_version_counts() {
        for (a, b, common) in [
            (spoken(1, 3, "a"), spoken(2, 5, "b"), Some(3)),
            (spoken(1, 1, "a"), spoken(0, 1, "b"), Some(1)),
            (spoken(0, 2, "a"), spoken(1, 3, "b"), Some(2)),
            (spoken(0, 3, "a"), spoken(1, 2, "b"), None),
            (spoken(1, 2, "a"), spoken(3, 4, "b"), None),
        ] {
            assert_eq!(a.common(&b).ok(), common, "{a}, {b}");
            assert_eq!(b.common(&a).ok(), common, "{b}, {a}");
        }
        let error = spoken(1, 2, "new").common(&spoken(3, 4, "")).unwrap_err();
        assert!(error.message().contains("new speaks 1 to 2"), "{error}");
        assert!(error.message().contains("an unnamed build speaks 3 to 4"), "{error}");
    }
}
