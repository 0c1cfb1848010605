//! The CSI driver under the systemd unit, whose confinement permits all that it does.

use cleat_csi_api::csi::v1 as csi;
use csi::volume_capability::AccessType;
use csi::volume_capability::access_mode::Mode;

use super::client::Client;
use super::{KUBELET, STAGING, TARGET, VOLUMES, filesystem, mounts};
use crate::fixture::shell;
use crate::systemd;

/// Starts the unit with a driver and the volume `v`, and connects to the driver.
fn start() -> Client {
    systemd::install();
    shell(&format!(
        "rm -rf {VOLUMES} {KUBELET}; mkdir -p {VOLUMES} {KUBELET}/plugins_registry
         truncate -s 64M {VOLUMES}/v
         cat > /etc/cleat/cleat.toml <<'END'\nnode_name = \"n1\"\n[csi]\nenabled = true\n\
         driver = \"csi.test\"\ndirectories = {{ d = \"{VOLUMES}\" }}\nEND
         systemctl restart cleat || {{ journalctl -u cleat; exit 1; }}"
    ));
    Client::connect(&format!("{KUBELET}/plugins/csi.test/csi.sock"))
}

/// Stops the unit, which must have succeeded.
fn stop() {
    shell("systemctl stop cleat; test \"$(systemctl show cleat -p Result --value)\" = success");
}

/// cryptsetup runs in the unit: it needs the control device of device-mapper, and makes the nodes of its devices.
pub(crate) fn encrypted_volume() {
    let client = start();
    let volume_id = "file/n1/d/v".to_owned();
    let stage = csi::NodeStageVolumeRequest {
        volume_id: volume_id.clone(),
        staging_target_path: STAGING.to_owned(),
        volume_capability: Some(filesystem("ext4", Mode::SingleNodeWriter)),
        volume_context: [("encrypted".to_owned(), "true".to_owned())].into(),
        secrets: [("encryptionPassphrase".to_owned(), "passphrase".to_owned())].into(),
        ..Default::default()
    };
    client.stage(stage).expect("stage");
    shell(&format!("echo data > {STAGING}/file; dmsetup ls --target crypt | grep -q ."));
    assert_eq!(mounts(STAGING), 1);
    let staging_target_path = STAGING.to_owned();
    client
        .unstage(csi::NodeUnstageVolumeRequest { volume_id, staging_target_path })
        .expect("unstage");
    assert_eq!(shell("dmsetup ls --target crypt"), "No devices found");
    stop();
}

/// The files of a volume belong to the group of the pod, and the mounts are visible outside the unit.
pub(crate) fn mounts_and_groups() {
    let client = start();
    let mut capability = filesystem("ext4", Mode::SingleNodeWriter);
    let Some(AccessType::Mount(mount)) = &mut capability.access_type else { unreachable!() };
    mount.volume_mount_group = "4242".to_owned();
    let volume_id = "file/n1/d/v".to_owned();
    let stage = csi::NodeStageVolumeRequest {
        volume_id: volume_id.clone(),
        staging_target_path: STAGING.to_owned(),
        volume_capability: Some(capability.clone()),
        ..Default::default()
    };
    client.stage(stage).expect("stage");
    shell(&format!("echo data > {STAGING}/file"));
    let publish = csi::NodePublishVolumeRequest {
        volume_id: volume_id.clone(),
        staging_target_path: STAGING.to_owned(),
        target_path: TARGET.to_owned(),
        volume_capability: Some(capability),
        ..Default::default()
    };
    client.publish(publish).expect("publish");
    assert_eq!((mounts(STAGING), mounts(TARGET)), (1, 1));
    assert_eq!(shell(&format!("stat -c %g {TARGET}/file")), "4242");
    assert_eq!(shell(&format!("stat -c %g:%a {TARGET}")), "4242:2775");
    assert!(client.expand(&volume_id, TARGET, 128 << 20).expect("expand") >= 128 << 20);
    let target_path = TARGET.to_owned();
    client
        .unpublish(csi::NodeUnpublishVolumeRequest { volume_id: volume_id.clone(), target_path })
        .expect("unpublish");
    let staging_target_path = STAGING.to_owned();
    client
        .unstage(csi::NodeUnstageVolumeRequest { volume_id, staging_target_path })
        .expect("unstage");
    assert_eq!((mounts(STAGING), mounts(TARGET)), (0, 0));
    stop();
}
