//! The calls of a volume's life on a node, and the volumes that they are made for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cleat_csi::Driver;
use cleat_csi::host::Kind;
use cleat_csi_api::csi::v1 as csi;
use csi::node_server::Node as _;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use tonic::{Request, Status};

use super::machine::{self, FOREIGN, Mount, Shown, Stored, decrypted};

pub(crate) const STAGING: &str = "/kubelet/staging";
pub(crate) const TARGET: &str = "/kubelet/pods/1/volume";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Stage,
    Publish,
    Expand,
    Unpublish,
    Unstage,
}

/// What happens to the volume before a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Nothing,
    /// It gets twice its size.
    Grows,
    /// Another client fences this one.
    Fenced,
    /// Its storage answers no request.
    Hangs,
}

/// A volume, and how it is used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Volume {
    pub(crate) title: &'static str,
    pub(crate) content: Stored,
    pub(crate) read_only: bool,
    /// Whether it is used as a block device.
    pub(crate) block: bool,
    /// The group of the filesystem; 0 for none.
    pub(crate) group: u32,
    /// Whether the storage has it encrypted.
    pub(crate) encrypted: bool,
    /// Whether another filesystem is mounted at the staging path and at the target path.
    pub(crate) stale: bool,
    /// Whether only one pod may use it.
    pub(crate) one_pod: bool,
}

impl Volume {
    pub(crate) const ID: &str = "file/n1/d/v";
    pub(crate) const URI: &str = "file:/volumes/v";
    /// The size in bytes.
    pub(crate) const SIZE: u64 = 1 << 16;

    /// Makes a call.
    pub(crate) async fn call(&self, driver: &Driver, call: Call) -> Result<(), Status> {
        self.call_at(driver, call, TARGET).await
    }

    /// Makes a call with this target path.
    pub(crate) async fn call_at(
        &self,
        driver: &Driver,
        call: Call,
        target: &str,
    ) -> Result<(), Status> {
        let (node, volume_id) = (driver.node_service(), Self::ID.to_owned());
        let (staging_target_path, target_path) = (STAGING.to_owned(), target.to_owned());
        let volume_capability = Some(self.capability());
        let pairs = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            let chosen = pairs.iter().filter(|_| self.encrypted);
            chosen.map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let volume_context = pairs(&[("encrypted", "true")]);
        let secrets = pairs(&[("encryptionPassphrase", "secret")]);
        match call {
            Call::Stage => {
                let request = csi::NodeStageVolumeRequest {
                    volume_id,
                    staging_target_path,
                    volume_capability,
                    volume_context,
                    secrets,
                    ..Default::default()
                };
                node.node_stage_volume(Request::new(request)).await.map(drop)
            }
            Call::Publish => {
                let request = csi::NodePublishVolumeRequest {
                    volume_id,
                    staging_target_path,
                    target_path,
                    volume_capability,
                    readonly: self.read_only,
                    volume_context,
                    secrets,
                    ..Default::default()
                };
                node.node_publish_volume(Request::new(request)).await.map(drop)
            }
            Call::Expand => {
                let request = csi::NodeExpandVolumeRequest {
                    volume_id,
                    volume_path: target.to_owned(),
                    ..Default::default()
                };
                node.node_expand_volume(Request::new(request)).await.map(drop)
            }
            Call::Unpublish => {
                let request = csi::NodeUnpublishVolumeRequest { volume_id, target_path };
                node.node_unpublish_volume(Request::new(request)).await.map(drop)
            }
            Call::Unstage => {
                let request = csi::NodeUnstageVolumeRequest { volume_id, staging_target_path };
                node.node_unstage_volume(Request::new(request)).await.map(drop)
            }
        }
    }

    fn capability(&self) -> csi::VolumeCapability {
        let mode = match self {
            Self { read_only: true, .. } => Mode::MultiNodeReaderOnly,
            Self { one_pod: true, .. } => Mode::SingleNodeSingleWriter,
            _ => Mode::SingleNodeWriter,
        };
        let fs_type = match self.content {
            Stored::Filesystem { kind, .. } => kind.name().to_owned(),
            _ => String::new(),
        };
        let group = (self.group > 0).then(|| self.group.to_string());
        let mount = MountVolume {
            fs_type,
            volume_mount_group: group.unwrap_or_default(),
            ..Default::default()
        };
        let access =
            if self.block { AccessType::Block(BlockVolume {}) } else { AccessType::Mount(mount) };
        let access_mode = Some(AccessMode { mode: mode.into() });
        csi::VolumeCapability { access_mode, access_type: Some(access) }
    }

    /// Returns what the storage has at first.
    pub(crate) fn stored(&self) -> BTreeMap<String, Stored> {
        let name = cleat_csi::mapping_name(Self::ID);
        if !self.encrypted || self.content == Stored::Empty {
            return [(name, self.content)].into();
        }
        [(decrypted(&name), self.content), (name, Stored::Encrypted)].into()
    }

    /// Returns the mounts that an earlier use of the paths has left.
    pub(crate) fn stale_mounts(&self) -> Vec<Mount> {
        let mount = |path: &str| Mount {
            path: path.into(),
            index: FOREIGN,
            shown: Shown::Filesystem(Kind::Xfs),
            read_only: false,
        };
        if self.stale { vec![mount(STAGING), mount(TARGET)] } else { Vec::new() }
    }

    /// Returns the directories of these mounts.
    pub(crate) fn stale_paths(&self) -> Vec<(PathBuf, machine::Path)> {
        let mounts = self.stale_mounts().into_iter();
        mounts.map(|mount| (mount.path, machine::Path::Directory)).collect()
    }
}

/// Returns the entry of a directory in the state of a machine.
pub(crate) fn directory(path: &str) -> String {
    format!("{:?} {}", machine::Path::Directory, Path::new(path).display())
}
