//! What the caller wants of a volume: a filesystem or a block device, and who may write.

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::csi::v1 as csi;
use csi::volume_capability::AccessType;
use csi::volume_capability::access_mode::Mode;

use crate::host::Kind;

/// The maximum number of mount options.
const MAX_OPTIONS: usize = 64;

/// A checked capability of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Capability {
    pub(crate) access: Access,
    /// Whether no node writes.
    pub(crate) read_only: bool,
    /// Whether several nodes may write.
    pub(crate) shared: bool,
    /// Whether only one target path of this node may have the volume.
    pub(crate) single_target: bool,
}

/// How the volume is presented.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Access {
    /// As a block device.
    Block,
    /// As a filesystem.
    Filesystem {
        /// The type; `None`: that on the volume, or the default on an empty one.
        kind: Option<Kind>,
        options: Vec<String>,
        /// The group that owns the filesystem's root directory.
        group: Option<u32>,
    },
}

impl Capability {
    /// Checks the capability of a request.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if it is missing or incomplete, or names an unknown filesystem.
    pub(crate) fn parse(capability: Option<csi::VolumeCapability>) -> Result<Self> {
        let capability =
            capability.ok_or_else(|| invalid("the request has no volume capability"))?;
        let mode =
            capability.access_mode.ok_or_else(|| invalid("the capability has no access mode"))?;
        let access = match capability.access_type {
            None => return Err(invalid("the capability has neither mount nor block")),
            Some(AccessType::Block(_)) => Access::Block,
            Some(AccessType::Mount(mount)) => filesystem(mount)?,
        };
        let mode = Mode::try_from(mode.mode).unwrap_or(Mode::Unknown);
        let shared = matches!(mode, Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter);
        let read_only = match mode {
            Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly => true,
            Mode::SingleNodeWriter | Mode::SingleNodeSingleWriter | Mode::SingleNodeMultiWriter => {
                false
            }
            Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter => {
                if access != Access::Block {
                    let message = "a filesystem cannot be written by several nodes";
                    return Err(invalid(message)
                        .with_repair("use the access mode ReadWriteOnce, or volumeMode: Block"));
                }
                false
            }
            Mode::Unknown => return Err(invalid("the capability has an unknown access mode")),
        };
        let single_target = mode == Mode::SingleNodeSingleWriter;
        Ok(Self { access, read_only, shared, single_target })
    }
}

fn filesystem(mount: csi::volume_capability::MountVolume) -> Result<Access> {
    let kind = match mount.fs_type.as_str() {
        "" => None,
        name => Some(name.parse()?),
    };
    if mount.mount_flags.len() > MAX_OPTIONS {
        return Err(invalid(format!("the capability has more than {MAX_OPTIONS} mount options")));
    }
    let group = match mount.volume_mount_group.as_str() {
        "" => None,
        text => Some(
            text.parse()
                .map_err(|_| invalid("the volume mount group is not the number of a group"))?,
        ),
    };
    Ok(Access::Filesystem { kind, options: mount.mount_flags, group })
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use csi::volume_capability::{AccessMode, BlockVolume, MountVolume};

    fn capability(mode: Mode, access: Option<AccessType>) -> Option<csi::VolumeCapability> {
        Some(csi::VolumeCapability {
            access_mode: Some(AccessMode { mode: mode.into() }),
            access_type: access,
        })
    }

    fn mount(fs_type: &str) -> Option<AccessType> {
        Some(AccessType::Mount(MountVolume {
            fs_type: fs_type.to_owned(),
            ..MountVolume::default()
        }))
    }

    #[test]
    fn access_modes_of_filesystems_and_block_volumes() {
        let parse = |mode, access| Capability::parse(capability(mode, access));
        let single = parse(Mode::SingleNodeSingleWriter, mount("ext4")).unwrap();
        assert!(single.single_target && !single.read_only);
        assert!(parse(Mode::MultiNodeReaderOnly, mount("")).unwrap().read_only);
        let block = Some(AccessType::Block(BlockVolume {}));
        let shared = parse(Mode::MultiNodeMultiWriter, block.clone()).unwrap();
        assert!(shared.access == Access::Block && shared.shared && !shared.read_only);
        assert!(!parse(Mode::SingleNodeMultiWriter, block.clone()).unwrap().shared);
        for (mode, access) in [
            (Mode::MultiNodeMultiWriter, mount("ext4")),
            (Mode::Unknown, block),
            (Mode::SingleNodeWriter, None),
            (Mode::SingleNodeWriter, mount("ntfs")),
        ] {
            let error = parse(mode, access).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }
        assert_eq!(Capability::parse(None).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
