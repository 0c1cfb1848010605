//! The file systems that this crate makes.

use std::fmt;
use std::str::FromStr;

use cleat_core::error::{Error, ErrorKind};

use crate::tools::{MKFS_BTRFS, MKFS_EXT4, MKFS_XFS, Tool};

/// A file system that can be formatted, checked and grown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// ext4.
    Ext4,
    /// XFS.
    Xfs,
    /// btrfs on a single device.
    Btrfs,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Ext4, Self::Xfs, Self::Btrfs];

    /// Returns the name that mount(8) and blkid(8) use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// Returns the program that makes the file system.
    pub(crate) fn mkfs(self) -> Tool {
        match self {
            Self::Ext4 => MKFS_EXT4,
            Self::Xfs => MKFS_XFS,
            Self::Btrfs => MKFS_BTRFS,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = Error;

    /// Parses the name of a file system.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for any other name than those of [`Kind::ALL`].
    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let message = format!("the file system {name:?} is not supported");
            Error::new(ErrorKind::InvalidArgument, message).with_repair("use ext4, xfs or btrfs")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_parsed_from_its_name() {
        for kind in Kind::ALL {
            assert_eq!(kind.to_string().parse::<Kind>().unwrap(), kind);
        }
        let error = "ext3".parse::<Kind>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.repair(), Some("use ext4, xfs or btrfs"));
    }
}
