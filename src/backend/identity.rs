//! The identity of a volume: what proves that a worker has opened the same volume as the workers before it.
//!
//! A path, a device name or an image name says only where a volume is looked up. While no worker has the
//! volume open, another volume can take that place: a file is replaced by a rename, a disk gets the name of
//! a removed one, an image is renamed and another one is created. A mounted file system would then be served
//! the data of another volume, and would destroy that volume with its writes.
//!
//! The supervisor records the identity when the first worker of a mapping has opened the volume. Every later
//! worker gets it in [`OpenOptions::expected`](crate::OpenOptions::expected), and ends with
//! [`ErrorKind::Replaced`] before it serves if it finds another one.

use std::fmt;

use serde::{Deserialize, Serialize};

use cleat_core::error::{Error, ErrorKind, Result};

/// Identifies a volume, independently of the URI that leads to it. Equal values mean the same volume. Valid
/// during one boot of the node, because the numbers of devices change with a boot.
///
/// The text is defined by the backend and is shown to users. Nothing parses it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VolumeIdentity(String);

impl VolumeIdentity {
    /// Makes an identity from a backend's text, which is one line.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Checks that the volume `found`, which was opened under `name`, is the `expected` one. `None` expects
    /// nothing: no worker of the mapping has opened the volume before.
    ///
    /// # Errors
    /// Returns `Replaced` with both identities if they differ.
    pub fn check(found: &Self, expected: Option<&Self>, name: &str) -> Result<()> {
        match expected {
            Some(expected) if expected != found => {
                let message = format!(
                    "{name} is another volume than the one that was mapped ({found} instead of {expected})"
                );
                Err(Error::new(ErrorKind::Replaced, message).with_repair(
                    "remove the mapping with cleat unmap --force, then map the volume that is needed",
                ))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for VolumeIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_equal_identity_is_accepted_where_one_is_expected() {
        let [one, other] = ["inode 1", "inode 2"].map(VolumeIdentity::new);
        VolumeIdentity::check(&one, None, "file:/a").unwrap();
        VolumeIdentity::check(&one, Some(&one.clone()), "file:/a").unwrap();
        let error = VolumeIdentity::check(&other, Some(&one), "file:/a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Replaced);
        assert!(error.message().starts_with("file:/a is another volume"), "{error}");
        assert!(error.message().contains("inode 2 instead of inode 1"), "{error}");
        assert!(error.repair().unwrap().contains("cleat unmap --force"));
    }
}
