//! Encrypted volumes: LUKS by cryptsetup between the device and the filesystem.

use std::collections::BTreeMap;

use cleat_csi_api::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;
use serde_json::json;
use test_kit::ceph::{ID, POOL};
use tonic::{Code, Status};

use super::sanity::with_cluster;
use super::{STAGING, Scene, TARGET, VOLUMES, block, filesystem, mounts, secret};
use crate::fixture::{shell, signal, status, wait_for_state};
use crate::rbd::{cluster, image, rbd, wait_until};

const PASSPHRASE: &str = "correct horse battery staple";

/// A volume of 64 MiB that its attributes declare to be encrypted.
struct Volume<'a> {
    scene: &'a Scene,
    id: String,
    capability: csi::VolumeCapability,
    attributes: BTreeMap<String, String>,
}

impl<'a> Volume<'a> {
    /// Makes a file volume.
    fn new(scene: &'a Scene, name: &str) -> Self {
        Self::existing(scene, scene.volume(name, "64M"))
    }

    fn existing(scene: &'a Scene, id: String) -> Self {
        let capability = filesystem("ext4", Mode::SingleNodeWriter);
        let attributes = [("encrypted".to_owned(), "true".to_owned())].into();
        Self { scene, id, capability, attributes }
    }

    fn stage(&self, passphrase: Option<&str>) -> Result<(), Status> {
        let secret = passphrase.map(|text| ("encryptionPassphrase".to_owned(), text.to_owned()));
        self.scene.client.stage(csi::NodeStageVolumeRequest {
            volume_id: self.id.clone(),
            staging_target_path: STAGING.to_owned(),
            volume_capability: Some(self.capability.clone()),
            volume_context: self.attributes.clone(),
            secrets: secret.into_iter().collect(),
            ..Default::default()
        })
    }

    /// Publishes the volume without a secret, as kubelet does.
    fn publish(&self) {
        let request = csi::NodePublishVolumeRequest {
            volume_id: self.id.clone(),
            staging_target_path: STAGING.to_owned(),
            target_path: TARGET.to_owned(),
            volume_capability: Some(self.capability.clone()),
            volume_context: self.attributes.clone(),
            ..Default::default()
        };
        self.scene.client.publish(request).expect("publish");
    }

    fn end(&self) {
        self.scene.unpublish(&self.id, TARGET);
        self.scene.unstage(&self.id);
        nothing_is_left(self.scene);
    }
}

/// Encrypts a file as an interrupted call leaves it, with a derivation of the key that takes little time.
fn format(name: &str) {
    shell(&format!(
        "printf %s '{PASSPHRASE}' | cryptsetup luksFormat -q --type luks2 --pbkdf pbkdf2 \
         --pbkdf-force-iterations 1000 --key-file - {VOLUMES}/{name}"
    ));
}

fn nothing_is_left(scene: &Scene) {
    scene.nothing_is_left();
    assert_eq!(shell("dmsetup ls --target crypt"), "No devices found");
}

fn refused(result: Result<(), Status>, code: Code) -> String {
    let status = result.expect_err("the call must fail");
    assert_eq!(status.code(), code, "{status:?}");
    status.message().to_owned()
}

pub(crate) fn from_stage_to_unstage() {
    let mut scene = Scene::new();
    shell("dmsetup version > /dev/null");
    {
        let volume = Volume::new(&scene, "safe");
        let message = refused(volume.stage(None), Code::InvalidArgument);
        assert!(message.contains("encryptionPassphrase"), "{message}");
        for _ in 0..2 {
            volume.stage(Some(PASSPHRASE)).expect("stage");
            volume.publish();
        }
        assert_eq!((mounts(STAGING), mounts(TARGET)), (1, 1));
        shell(&format!("echo plaintext-marker > {TARGET}/file; sync -f {TARGET}"));
        let usage = scene.client.stats(&volume.id, TARGET).expect("stats");
        assert!(usage[0].total > 30 << 20 && usage[0].total < 48 << 20, "{usage:?}");
    }
    // Neither the data nor the passphrase is anywhere in plain text.
    let found = shell(&format!(
        "grep -c plaintext-marker {VOLUMES}/safe || true; \
         grep -rl '[c]orrect horse' /proc/[0-9]*/cmdline /run/cleat /var/lib/cleat 2>/dev/null || true"
    ));
    assert_eq!(found, "0");
    scene.node.kill();
    scene.restart();
    let volume = Volume::existing(&scene, "file/n1/d/safe".to_owned());
    volume.publish();
    let size = scene.client.expand(&volume.id, TARGET, 128 << 20).expect("expand");
    assert_eq!(size, 128 << 20);
    let usage = scene.client.stats(&volume.id, TARGET).expect("stats");
    assert!(usage[0].total > 90 << 20, "{usage:?}");
    volume.end();

    let message = refused(volume.stage(Some("wrong")), Code::PermissionDenied);
    assert!(message.contains("encryptionPassphrase") && !message.contains("wrong"), "{message}");
    let plain = scene.stage(&volume.id, &volume.capability);
    let message = refused(plain, Code::FailedPrecondition);
    assert!(message.contains("crypto_LUKS") && message.contains("encrypted"), "{message}");
    scene.unstage(&volume.id);

    let device = Volume { capability: block(Mode::SingleNodeWriter), ..volume };
    device.stage(Some(PASSPHRASE)).expect("stage as a block volume");
    device.publish();
    let text = shell(&format!("debugfs -R 'cat file' {TARGET} 2>/dev/null"));
    assert_eq!(text, "plaintext-marker");
    device.end();
}

/// The same on an image of Ceph, whose worker is replaced under the mounted filesystem.
pub(crate) fn over_rbd() {
    const IMAGE: &str = "csi-encrypted";
    image(IMAGE, "64M");
    let client = json!({ "userID": ID, "keyring": cluster().keyring(ID) });
    let scene = with_cluster(client, "");
    let mut volume = Volume::existing(&scene, IMAGE.to_owned());
    volume.attributes.extend(secret::context());
    volume.stage(Some(PASSPHRASE)).expect("stage");
    volume.publish();
    shell(&format!("echo plaintext-marker > {TARGET}/file; sync -f {TARGET}"));
    let name = shell("./cleat ls -o json | grep -o 'csi-[^\"]*' | head -n 1");
    secret::replace_worker(&name);
    rbd(&["resize", &format!("{POOL}/{IMAGE}"), "--size", "128M", "--no-progress"]);
    // It is refused for some seconds, because the kernel may repeat requests of the old worker.
    wait_until("it has grown", || scene.client.expand(&volume.id, TARGET, 128 << 20).is_ok());
    let usage = scene.client.stats(&volume.id, TARGET).expect("stats");
    assert!(usage[0].total > 90 << 20, "{usage:?}");
    volume.end();

    let exported = "/tmp/csi-encrypted";
    rbd(&["export", &format!("{POOL}/{IMAGE}"), exported, "--no-progress"]);
    assert_eq!(shell(&format!("grep -c plaintext-marker {exported} || true")), "0");
    assert_eq!(shell(&format!("cryptsetup isLuks {exported} && rm {exported} && echo yes")), "yes");
    volume.stage(Some(PASSPHRASE)).expect("stage again");
    volume.publish();
    assert_eq!(shell(&format!("cat {TARGET}/file")), "plaintext-marker");
    volume.end();
}

/// A call that was interrupted between two steps is continued, and content of every other kind stays as it is.
pub(crate) fn only_empty_volumes_are_encrypted() {
    let scene = Scene::new();
    let made = Volume::new(&scene, "made");
    // The process was killed after the encryption, and there is no filesystem.
    format("made");
    made.stage(Some(PASSPHRASE)).expect("stage");
    made.publish();
    made.end();

    for (name, write) in [
        ("ext4", "mkfs.ext4 -q $F"),
        ("data", "dd if=/dev/urandom of=$F bs=1M seek=20 count=1 conv=notrunc status=none"),
        (
            "encrypted-data",
            "dd if=/dev/urandom of=$F bs=1M seek=40 count=1 conv=notrunc status=none",
        ),
    ] {
        let volume = Volume::new(&scene, name);
        if name == "encrypted-data" {
            format(name);
        }
        shell(&format!("F={VOLUMES}/{name}; {write}"));
        let before = shell(&format!("sha256sum < {VOLUMES}/{name}"));
        let message = refused(volume.stage(Some(PASSPHRASE)), Code::FailedPrecondition);
        assert!(message.contains("not formatted"), "{name}: {message}");
        scene.unstage(&volume.id);
        assert_eq!(shell(&format!("sha256sum < {VOLUMES}/{name}")), before, "{name} was changed");
    }
    nothing_is_left(&scene);
}

/// The volume fails under a mounted filesystem: nothing of it is left after the unstage by force.
pub(crate) fn unstage_by_force() {
    let scene = Scene::new();
    let volume = Volume::new(&scene, "lost");
    format("lost");
    volume.stage(Some(PASSPHRASE)).expect("stage");
    volume.publish();
    let name = shell("./cleat ls -o json | grep -o 'csi-lost-[0-9a-f]*' | head -n 1");
    shell(&format!("mv {VOLUMES}/lost {VOLUMES}/moved; truncate -s 64M {VOLUMES}/lost"));
    let pid = status(&name)["worker_pid"].as_u64().expect("a worker");
    signal("KILL", u32::try_from(pid).expect("a process number"));
    wait_for_state(&name, "failed");
    volume.end();
    // The name can be used again at once.
    shell(&format!("mv {VOLUMES}/moved {VOLUMES}/lost"));
    volume.stage(Some(PASSPHRASE)).expect("stage again");
    volume.publish();
    volume.end();
}
