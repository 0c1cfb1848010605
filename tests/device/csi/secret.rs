//! A secret of NodeStageVolume names the Ceph client of an image.

use std::collections::BTreeMap;

use cleat_csi_api::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;
use serde_json::json;
use test_kit::ceph::{ID, POOL};
use tonic::{Code, Status};

use super::sanity::with_cluster;
use super::{STAGING, Scene, TARGET, filesystem};
use crate::fixture::{cleat_ok, shell, signal};
use crate::rbd::{cluster, image, wait_until};

const VOLUME: &str = "with-a-secret";

/// The key reaches each worker, also one that a later daemon starts, and is nowhere on a disk.
pub(super) fn names_the_client() {
    image(VOLUME, "64M");
    let mut scene = with_cluster(json!({}), "");
    let keyring = cluster().keyring(ID);
    let key = shell(&format!("sed -n 's/^[[:space:]]*key *= *//p' {}", keyring.display()));
    assert!(key.len() > 30, "the keyring of {ID} has no key");

    // A valid key of another client, which the cluster refuses.
    let wrong = stage(&scene, "AQAAAAAAAAAAABAAAAAAAAAAAAAAAAAAAAAAAA==").unwrap_err();
    assert!([Code::PermissionDenied, Code::Unauthenticated].contains(&wrong.code()), "{wrong:?}");
    assert!(!format!("{wrong:?}").contains("AQAAAA"), "{wrong:?}");
    let mut elsewhere = request(ID, &key);
    elsewhere.volume_context.insert("clusterID".to_owned(), "none".to_owned());
    assert_eq!(scene.client.stage(elsewhere).unwrap_err().code(), Code::NotFound);
    assert_eq!(keys(), 0);

    stage(&scene, &key).expect("stage");
    stage(&scene, &key).expect("stage again");
    shell(&format!("echo data > {STAGING}/file; sync {STAGING}/file"));
    let name = serde_json::from_str::<serde_json::Value>(&cleat_ok(&["ls", "-o", "json"]))
        .expect("ls prints JSON")["mappings"][0]["name"]
        .as_str()
        .expect("the mapping's name")
        .to_owned();
    replace_worker(&name);
    scene.node.kill();
    scene.restart();
    replace_worker(&name);
    shell(&format!("echo more >> {STAGING}/file; sync {STAGING}/file"));
    // kubelet passes this secret to NodeStageVolume only.
    let capability = filesystem("ext4", Mode::SingleNodeWriter);
    let publish = csi::NodePublishVolumeRequest {
        volume_id: VOLUME.to_owned(),
        staging_target_path: STAGING.to_owned(),
        target_path: TARGET.to_owned(),
        volume_capability: Some(capability),
        volume_context: context(),
        ..Default::default()
    };
    scene.client.publish(publish).expect("publish");
    assert_eq!(shell(&format!("cat {TARGET}/file")), "data\nmore");
    // The pattern comes from a file, as the arguments of these programs are searched too.
    std::fs::write("/tmp/pattern", &key).expect("writing the pattern");
    let places = "/run/cleat /var/lib/cleat /proc/[0-9]*/cmdline /proc/[0-9]*/environ";
    let found = shell(&format!("grep -rlF -f /tmp/pattern {places} 2>/dev/null || true"));
    assert_eq!(found, "");
    assert_eq!(shell("ls /var/lib/cleat | wc -l | grep -vx 0 > /dev/null && echo some"), "some");
    let other = stage_as(&scene, "admin", &key).unwrap_err();
    assert_eq!(other.code(), Code::AlreadyExists, "{other:?}");

    scene.unpublish(VOLUME, TARGET);
    assert_eq!(keys(), 1);
    scene.unstage(VOLUME);
    assert_eq!(keys(), 0);
    scene.nothing_is_left();
}

fn stage(scene: &Scene, key: &str) -> Result<(), Status> {
    stage_as(scene, ID, key)
}

fn stage_as(scene: &Scene, user: &str, key: &str) -> Result<(), Status> {
    scene.client.stage(request(user, key))
}

fn request(user: &str, key: &str) -> csi::NodeStageVolumeRequest {
    let secrets = [("userID", user), ("userKey", key), ("encryptionPassphrase", "unused")];
    csi::NodeStageVolumeRequest {
        volume_id: VOLUME.to_owned(),
        staging_target_path: STAGING.to_owned(),
        volume_capability: Some(filesystem("ext4", Mode::SingleNodeWriter)),
        volume_context: context(),
        secrets: secrets.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        ..Default::default()
    }
}

/// The attributes of a static volume.
pub(super) fn context() -> BTreeMap<String, String> {
    let attributes = [("staticVolume", "true"), ("clusterID", "test"), ("pool", POOL)];
    attributes.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

/// The number of keys that the driver has in the kernel.
fn keys() -> usize {
    shell("grep -c cleat:csi- /proc/keys || true").parse().expect("a number")
}

/// Kills the worker of a mapping, and waits until another one serves.
pub(super) fn replace_worker(name: &str) {
    let worker = || crate::fixture::status(name)["worker_pid"].as_u64().filter(|pid| *pid != 0);
    let killed = worker().expect("a worker");
    signal("KILL", u32::try_from(killed).expect("a pid"));
    wait_until("another worker serves", || {
        crate::fixture::status(name)["state"] == "mapped"
            && worker().is_some_and(|pid| pid != killed)
    });
}
