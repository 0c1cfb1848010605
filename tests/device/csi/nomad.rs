//! The way in which Nomad calls a driver (its client/pluginmanager/csimanager): it differs from kubelet's.
//!
//! - A volume has a staging path for each way of use, so a writer and a reader on one node stage it twice.
//! - The directory of the staging path exists, with mode 0700. A staging path that is a mount is not staged again.
//! - The target path does not exist, but its parent does. After NodeUnpublishVolume it must be gone.
//! - The secrets of the volume are in the calls of both stages, and so is its context, without keys of Kubernetes.
//! - Only UNAVAILABLE and RESOURCE_EXHAUSTED are tried again, three times.

use std::path::Path;

use cleat_csi_api::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;

use super::{KUBELET, Scene, filesystem, mounts};
use crate::fixture::shell;

/// The directory of Nomad's plugin, which is a mount of the host's in the plugin's container.
const BASE: &str = "/var/lib/kubelet/nomad";

/// One allocation of a job with the volume.
struct Allocation<'a> {
    scene: &'a Scene,
    id: &'a str,
    staging: String,
    target: String,
    read_only: bool,
}

impl<'a> Allocation<'a> {
    fn start(scene: &'a Scene, id: &'a str, name: &str, read_only: bool) -> Self {
        let way = format!("{}-file-system-single-node-writer", if read_only { "ro" } else { "rw" });
        let staging = format!("{BASE}/staging/data/{way}");
        let target = format!("{BASE}/per-alloc/{name}/data/{way}");
        shell(&format!("mkdir -p {BASE}/per-alloc/{name}/data; mkdir -m 0700 -p {staging}"));
        let this = Self { scene, id, staging, target, read_only };
        if mounts(&this.staging) == 0 {
            this.stage();
        }
        this.publish();
        this
    }

    fn stage(&self) {
        let request = csi::NodeStageVolumeRequest {
            volume_id: self.id.to_owned(),
            staging_target_path: self.staging.clone(),
            volume_capability: Some(filesystem("ext4", Mode::SingleNodeWriter)),
            volume_context: [("fsck".to_owned(), "preen".to_owned())].into(),
            secrets: [("unused".to_owned(), "x".to_owned())].into(),
            ..Default::default()
        };
        self.scene.client.stage(request).expect("stage");
    }

    fn publish(&self) {
        let request = csi::NodePublishVolumeRequest {
            volume_id: self.id.to_owned(),
            staging_target_path: self.staging.clone(),
            target_path: self.target.clone(),
            readonly: self.read_only,
            volume_capability: Some(filesystem("ext4", Mode::SingleNodeWriter)),
            volume_context: [("fsck".to_owned(), "preen".to_owned())].into(),
            secrets: [("unused".to_owned(), "x".to_owned())].into(),
            ..Default::default()
        };
        self.scene.client.publish(request).expect("publish");
    }

    fn end(self) {
        self.scene.unpublish(self.id, &self.target);
        let request = csi::NodeUnstageVolumeRequest {
            volume_id: self.id.to_owned(),
            staging_target_path: self.staging.clone(),
        };
        self.scene.client.unstage(request).expect("unstage");
        assert_eq!(mounts(&self.staging), 0);
    }
}

pub(crate) fn calls_of_nomad() {
    let scene = Scene::new();
    assert!(Path::new(KUBELET).exists());
    let id = scene.volume("nomad", "64M");
    let writer = Allocation::start(&scene, &id, "a1", false);
    shell(&format!("echo data > {}/file", writer.target));
    let reader = Allocation::start(&scene, &id, "a2", true);
    assert_eq!(shell(&format!("cat {}/file", reader.target)), "data");
    assert_eq!(
        shell(&format!("touch {}/x 2>&1 || echo refused", reader.target)).lines().last(),
        Some("refused")
    );
    // The volume stays for the reader, and a new writer may come.
    writer.end();
    assert_eq!(shell(&format!("cat {}/file", reader.target)), "data");
    let second = Allocation::start(&scene, &id, "a3", false);
    shell(&format!("echo more > {}/file", second.target));
    reader.end();
    assert_eq!(shell(&format!("cat {}/file", second.target)), "more");
    second.end();
    scene.nothing_is_left();
}
