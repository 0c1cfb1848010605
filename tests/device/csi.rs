//! The CSI driver on a real kernel: every call on file volumes, with real mounts.

mod addons;
mod client;
mod content;
mod controller;
mod durations;
mod encryption;
mod interrupted;
mod nomad;
mod propagation;
pub(crate) mod sanity;
mod secret;
mod unit;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use cleat_csi_api::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use libtest_mimic::Trial;
use tonic::Code;

use crate::fixture::{Node, cleat_ok, repeat, shell, signal, status, wait_for_state};
use crate::trial;
use client::Client;

const CONFIG: &str = "/tmp/csi.toml";
const VOLUMES: &str = "/var/tmp/csi-volumes";
/// A directory on which tests mount an XFS.
const XFS: &str = "/var/tmp/csi-xfs";
const KUBELET: &str = "/var/lib/kubelet";
const SOCKET: &str = "/var/lib/kubelet/plugins/csi.test/csi.sock";
const STAGING: &str = "/var/lib/kubelet/staging/v";
const TARGET: &str = "/var/lib/kubelet/pods/1/v";

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("csi_filesystem_from_stage_to_unstage", filesystem_from_stage_to_unstage),
        trial("csi_block_from_stage_to_unstage", block_from_stage_to_unstage),
        trial("csi_publish_stages_again_and_replaces_stale_mounts", stale_mounts),
        trial("csi_calls_continue_after_a_crash_of_the_daemon", crashes),
        trial("csi_unstage_of_a_lost_volume_ends_by_force", lost_volume),
        trial("csi_expand_grows_device_and_filesystem", expand),
        trial("csi_never_formats_content", content::never_formats_content),
        trial("csi_encrypted_volume_from_stage_to_unstage", encryption::from_stage_to_unstage),
        trial("csi_only_empty_volumes_are_encrypted", encryption::only_empty_volumes_are_encrypted),
        trial("csi_unstage_of_an_encrypted_volume_by_force", encryption::unstage_by_force),
        trial("csi_calls_of_nomad", nomad::calls_of_nomad),
        trial("csi_registers_with_kubelet", registration),
        trial("csi_mounts_reach_other_namespaces", propagation::reaches_other_namespaces),
        trial("csi_controller_from_create_to_delete", controller::from_create_to_delete),
        trial("csi_snapshots_of_a_volume_in_use", controller::snapshots_of_a_volume_in_use),
        trial("csi_calls_killed_at_any_moment_are_repeated", interrupted::killed_at_any_moment),
        trial("csi_many_volumes_at_once", interrupted::many_at_once),
        trial("csi_durations_of_stage_and_unstage", durations::of_stage_and_unstage),
        trial("csi_unused_space_is_reclaimed", addons::unused_space_is_reclaimed),
        trial("csi_rbd_secret_names_the_client_until_unstage", secret::names_the_client),
        trial("csi_sanity_file_mount", sanity::file_mount),
        trial("csi_sanity_rbd_mount", sanity::rbd_mount),
        // `make soak` runs them: the keys of dm-crypt take long under emulation, and the rest of them is in other tests.
        trial("csi_rbd_encrypted_volume_grows", encryption::over_rbd)
            .with_ignored_flag(repeat().is_none()),
        trial("csi_sanity_file_block", sanity::file_block).with_ignored_flag(repeat().is_none()),
        trial("csi_sanity_rbd_block", sanity::rbd_block).with_ignored_flag(repeat().is_none()),
    ]
}

/// The tests on a machine with systemd.
pub(crate) fn trials_with_systemd() -> Vec<Trial> {
    vec![
        trial("systemd_unit_csi_mounts_and_groups", unit::mounts_and_groups),
        trial("systemd_unit_csi_encrypted_volume", unit::encrypted_volume),
    ]
}

/// A daemon that serves CSI, with one directory for file volumes.
pub(crate) struct Scene {
    pub(crate) node: Node,
    pub(crate) client: Client,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self::with(&format!("directories = {{ d = \"{VOLUMES}\", x = \"{XFS}\" }}"))
    }

    /// Starts a daemon with these lines in the section `csi`.
    fn with(lines: &str) -> Self {
        shell(&format!("umount -l {STAGING} {TARGET} 2>/dev/null || true; rm -rf {KUBELET}"));
        Self::with_daemon(lines, daemon())
    }

    /// Starts this daemon with these lines in the section `csi`.
    fn with_daemon(lines: &str, daemon: Command) -> Self {
        shell(&format!(
            "rm -rf {VOLUMES}; mkdir -p {VOLUMES} {KUBELET}/plugins_registry
             cat > {CONFIG} <<'END'\nnode_name = \"n1\"\n[csi]\nenabled = true\n\
             controller = true\ndriver = \"csi.test\"\n{lines}\nEND"
        ));
        let node = Node::start_as(daemon);
        Self { node, client: Client::connect(SOCKET) }
    }

    /// Starts the daemon again and connects to it.
    fn restart(&mut self) {
        self.node.restart_as(daemon());
        self.client = Client::connect(SOCKET);
    }

    /// Makes a file volume and returns its id.
    pub(crate) fn volume(&self, name: &str, size: &str) -> String {
        shell(&format!("truncate -s {size} {VOLUMES}/{name}"));
        format!("file/n1/d/{name}")
    }

    pub(crate) fn stage(
        &self,
        id: &str,
        capability: &csi::VolumeCapability,
    ) -> Result<(), tonic::Status> {
        self.client.stage(csi::NodeStageVolumeRequest {
            volume_id: id.to_owned(),
            staging_target_path: STAGING.to_owned(),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        })
    }

    fn publish(
        &self,
        id: &str,
        capability: &csi::VolumeCapability,
        target: &str,
    ) -> Result<(), tonic::Status> {
        self.client.publish(csi::NodePublishVolumeRequest {
            volume_id: id.to_owned(),
            staging_target_path: STAGING.to_owned(),
            target_path: target.to_owned(),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        })
    }

    fn unpublish(&self, id: &str, target: &str) {
        let request = csi::NodeUnpublishVolumeRequest {
            volume_id: id.to_owned(),
            target_path: target.to_owned(),
        };
        self.client.unpublish(request).expect("unpublish");
        assert!(!Path::new(target).exists(), "{target} is left");
    }

    pub(crate) fn unstage(&self, id: &str) {
        self.client
            .unstage(csi::NodeUnstageVolumeRequest {
                volume_id: id.to_owned(),
                staging_target_path: STAGING.to_owned(),
            })
            .expect("unstage");
        assert_eq!(mounts(STAGING), 0);
    }

    /// Checks that no mapping, no device and no mount is left.
    fn nothing_is_left(&self) {
        let listed: serde_json::Value =
            serde_json::from_str(&cleat_ok(&["ls", "-o", "json"])).expect("ls prints JSON");
        assert_eq!(listed["mappings"], serde_json::json!([]));
        assert_eq!(shell(&format!("grep -c {KUBELET} /proc/self/mountinfo || true")), "0");
        assert_eq!(shell("(cat /sys/block/nbd*/pid 2>/dev/null || true) | wc -l"), "0");
    }
}

/// The command of the daemon, with the limits of open files that a shell has.
fn daemon() -> Command {
    let mut command = Command::new("prlimit");
    command.args(["--nofile=1024:524288", "./cleat", "node", "--config", CONFIG]);
    command
}

pub(crate) fn filesystem(fs_type: &str, mode: Mode) -> csi::VolumeCapability {
    let mount = MountVolume { fs_type: fs_type.to_owned(), ..Default::default() };
    csi::VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(mount)),
    }
}

fn block(mode: Mode) -> csi::VolumeCapability {
    csi::VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Block(BlockVolume {})),
    }
}

fn mounts(path: &str) -> usize {
    count(&std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo"), path)
}

/// Returns the number of mounts at a path in a mount table.
fn count(table: &str, path: &str) -> usize {
    table.lines().filter(|line| line.split(' ').nth(4) == Some(path)).count()
}

fn filesystem_from_stage_to_unstage() {
    let scene = Scene::new();
    for (kind, size) in [("ext4", "128M"), ("xfs", "320M"), ("btrfs", "128M")] {
        let id = scene.volume(&format!("{kind}-1"), size);
        let capability = filesystem(kind, Mode::SingleNodeSingleWriter);
        // Each call is repeated, as kubelet does.
        for _ in 0..3 {
            scene.stage(&id, &capability).expect("stage");
        }
        for _ in 0..3 {
            scene.publish(&id, &capability, TARGET).expect("publish");
        }
        assert_eq!((mounts(STAGING), mounts(TARGET)), (1, 1));
        assert_eq!(shell(&format!("findmnt -no FSTYPE {TARGET}")), kind);
        shell(&format!("echo data > {TARGET}/file"));
        let other = scene.publish(&id, &capability, &format!("{TARGET}-2")).unwrap_err();
        assert_eq!(other.code(), Code::FailedPrecondition, "{other:?}");
        let usage = scene.client.stats(&id, TARGET).expect("stats");
        // btrfs has no limit of inodes.
        assert_eq!(usage.len(), if kind == "btrfs" { 1 } else { 2 });
        assert!(usage.iter().all(|entry| entry.total > 0 && entry.available > 0), "{usage:?}");
        assert_eq!(scene.client.stats(&id, "/none").unwrap_err().code(), Code::NotFound);
        assert!(scene.client.health(&id).expect("health").health_statuses.is_empty());
        for _ in 0..3 {
            scene.unpublish(&id, TARGET);
        }
        for _ in 0..3 {
            scene.unstage(&id);
        }
        scene.nothing_is_left();
        // Another type is refused, and the content is there the next time.
        let wrong = if kind == "ext4" { "xfs" } else { "ext4" };
        let refused = scene.stage(&id, &filesystem(wrong, Mode::SingleNodeWriter)).unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
        let read_only = filesystem("", Mode::SingleNodeReaderOnly);
        scene.unstage(&id);
        scene.stage(&id, &read_only).expect("stage read-only");
        scene.publish(&id, &read_only, TARGET).expect("publish read-only");
        assert_eq!(shell(&format!("cat {TARGET}/file")), "data");
        assert_eq!(
            shell(&format!("touch {TARGET}/x 2>&1 || echo refused")).lines().last(),
            Some("refused")
        );
        scene.unpublish(&id, TARGET);
        scene.unstage(&id);
    }
    scene.nothing_is_left();
}

fn block_from_stage_to_unstage() {
    let scene = Scene::new();
    let id = scene.volume("raw", "64M");
    let capability = block(Mode::SingleNodeMultiWriter);
    for _ in 0..2 {
        scene.stage(&id, &capability).expect("stage");
        scene.publish(&id, &capability, TARGET).expect("publish");
        scene.publish(&id, &capability, &format!("{TARGET}-2")).expect("second target");
    }
    shell(&format!("test -b {TARGET}; echo data | dd of={TARGET} conv=fsync status=none"));
    assert_eq!(shell(&format!("head -c 4 {TARGET}-2")), "data");
    let usage = scene.client.stats(&id, TARGET).expect("stats");
    assert_eq!(usage.iter().map(|entry| entry.total).collect::<Vec<_>>(), [64 << 20]);
    scene.unpublish(&id, TARGET);
    scene.unpublish(&id, &format!("{TARGET}-2"));
    let read_only = |capability: &csi::VolumeCapability| csi::NodePublishVolumeRequest {
        volume_id: id.clone(),
        staging_target_path: STAGING.to_owned(),
        target_path: TARGET.to_owned(),
        volume_capability: Some(capability.clone()),
        readonly: true,
        ..Default::default()
    };
    let refused = scene.client.publish(read_only(&capability)).unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    scene.unstage(&id);
    assert_eq!(shell(&format!("head -c 4 {VOLUMES}/raw")), "data");
    // A reader, and a writer for which the controller has published the volume for reading only.
    let only = [("readOnly".to_owned(), "true".to_owned())].into();
    for (capability, publish_context) in
        [(block(Mode::SingleNodeReaderOnly), BTreeMap::new()), (capability, only)]
    {
        let stage = csi::NodeStageVolumeRequest {
            volume_id: id.clone(),
            staging_target_path: STAGING.to_owned(),
            volume_capability: Some(capability.clone()),
            publish_context: publish_context.clone(),
            ..Default::default()
        };
        scene.client.stage(stage).expect("stage read-only");
        let publish = csi::NodePublishVolumeRequest { publish_context, ..read_only(&capability) };
        scene.client.publish(publish).expect("publish read-only");
        assert_eq!(shell(&format!("blockdev --getro {TARGET}; head -c 4 {TARGET}")), "1\ndata");
        scene.unpublish(&id, TARGET);
        scene.unstage(&id);
    }
    scene.nothing_is_left();
}

fn stale_mounts() {
    let scene = Scene::new();
    let (id, other) = (scene.volume("a", "64M"), scene.volume("b", "64M"));
    let capability = filesystem("ext4", Mode::SingleNodeWriter);
    // The staging path has the mount of another volume, and kubelet skips NodeStageVolume.
    scene.stage(&other, &capability).expect("stage the other volume");
    shell(&format!("echo other > {STAGING}/file"));
    scene.publish(&id, &capability, TARGET).expect("publish without stage");
    assert_eq!(
        shell(&format!("ls {TARGET} | grep -c file || true")),
        "0",
        "the other volume's files"
    );
    assert_eq!((mounts(STAGING), mounts(TARGET)), (1, 1));
    scene.unpublish(&id, TARGET);
    scene.unstage(&id);
    scene.unstage(&other);
    scene.nothing_is_left();
}

fn crashes() {
    let mut scene = Scene::new();
    let id = scene.volume("c", "64M");
    let capability = filesystem("ext4", Mode::SingleNodeWriter);
    scene.stage(&id, &capability).expect("stage");
    scene.node.kill();
    scene.restart();
    scene.publish(&id, &capability, TARGET).expect("publish after a crash");
    shell(&format!("echo data > {TARGET}/file; sync -f {TARGET}"));
    scene.node.kill();
    scene.restart();
    assert_eq!(shell(&format!("cat {TARGET}/file")), "data");
    scene.unpublish(&id, TARGET);
    scene.node.kill();
    scene.restart();
    scene.unstage(&id);
    scene.nothing_is_left();
}

fn lost_volume() {
    let scene = Scene::new();
    let id = scene.volume("lost", "64M");
    let capability = filesystem("ext4", Mode::SingleNodeWriter);
    scene.stage(&id, &capability).expect("stage");
    scene.publish(&id, &capability, TARGET).expect("publish");
    let name = shell("./cleat ls -o json | grep -o 'csi-lost-[0-9a-f]*' | head -n 1");
    // The file is replaced by another one, and the next worker must not serve that.
    shell(&format!("mv {VOLUMES}/lost {VOLUMES}/moved; truncate -s 64M {VOLUMES}/lost"));
    let pid = status(&name)["worker_pid"].as_u64().expect("a worker");
    signal("KILL", u32::try_from(pid).expect("a process number"));
    wait_for_state(&name, "failed");
    let health = scene.client.health(&id).expect("health").health_statuses;
    assert!(health.iter().any(|entry| entry.reason == "Replaced"), "{health:?}");
    scene.unpublish(&id, TARGET);
    scene.unstage(&id);
    scene.nothing_is_left();
}

fn expand() {
    let scene = Scene::new();
    for (kind, before, after) in [("ext4", "64M", 128 << 20), ("xfs", "320M", 400 << 20)] {
        let id = scene.volume(&format!("grow-{kind}"), before);
        let capability = filesystem(kind, Mode::SingleNodeWriter);
        scene.stage(&id, &capability).expect("stage");
        scene.publish(&id, &capability, TARGET).expect("publish");
        let old = scene.client.stats(&id, TARGET).expect("stats")[0].total;
        let size = scene.client.expand(&id, TARGET, after).expect("expand");
        assert_eq!(size, after);
        let new = scene.client.stats(&id, TARGET).expect("stats")[0].total;
        assert!(new > old, "{kind}: {old} {new}");
        assert_eq!(scene.client.expand("none", TARGET, after).unwrap_err().code(), Code::NotFound);
        scene.unpublish(&id, TARGET);
        scene.unstage(&id);
    }
}

/// The socket in kubelet's directory announces the driver, survives the end of the daemon, and is replaced by
/// the next one.
fn registration() {
    let mut scene = Scene::new();
    let socket = format!("{KUBELET}/plugins_registry/csi@csi.test-reg.sock");
    let inode = || shell(&format!("stat -c %i {socket}"));
    let info = client::plugin_info(&socket);
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", "csi.test"));
    assert_eq!(info.endpoint, format!("{KUBELET}/plugins/csi.test/csi.sock"));
    assert_eq!(info.supported_versions, ["1.0.0"]);
    let first = inode();
    scene.node.terminate();
    assert_eq!(inode(), first, "the driver was deregistered");
    scene.restart();
    client::plugin_info(&socket);
    assert_ne!(inode(), first, "kubelet sees no new socket");
    assert_eq!(scene.client.node_id(), "n1");
}
