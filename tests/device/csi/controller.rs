//! The Controller service on a real kernel: volumes and snapshots that are in use.

use std::future::Future;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cleat_csi_api::csi::v1 as csi;
use csi::controller_client::ControllerClient;
use csi::volume_capability::access_mode::Mode;
use csi::volume_content_source::{SnapshotSource, Type as SourceType};
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::client::{channel, runtime, timed};
use super::{KUBELET, STAGING, Scene, TARGET, VOLUMES, XFS, block, filesystem};
use crate::fixture::{shell, status};

/// The size of the volumes, in bytes.
const SIZE: i64 = 64 << 20;

/// The blocks that the writer of a test writes in turn, and their size.
const BLOCKS: u64 = 64;
const BLOCK: usize = 4096;

/// A connection to the Controller service. Its calls block.
struct Controller {
    runtime: Runtime,
    client: ControllerClient<Channel>,
}

impl Controller {
    fn connect() -> Self {
        let runtime = runtime();
        let socket = format!("{KUBELET}/plugins/csi.test/csi.sock");
        let client = ControllerClient::new(runtime.block_on(channel(&socket)));
        Self { runtime, client }
    }

    fn call<T, F>(&self, call: impl FnOnce(ControllerClient<Channel>) -> F) -> Result<T, Status>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.runtime.block_on(call(self.client.clone())).map(Response::into_inner)
    }

    /// Creates a volume in a directory, from a snapshot if one is given, and returns its id.
    fn create(&self, name: &str, directory: &str, snapshot: Option<&str>) -> String {
        let source = snapshot.map(|id| csi::VolumeContentSource {
            r#type: Some(SourceType::Snapshot(SnapshotSource { snapshot_id: id.to_owned() })),
        });
        let request = csi::CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(csi::CapacityRange { required_bytes: SIZE, limit_bytes: 0 }),
            volume_capabilities: vec![filesystem("", Mode::SingleNodeWriter)],
            parameters: [("directory".to_owned(), directory.to_owned())].into(),
            volume_content_source: source,
            ..Default::default()
        };
        let create = |mut client: ControllerClient<Channel>| async move {
            client.create_volume(timed(request)).await
        };
        self.call(create).expect("CreateVolume").volume.expect("a volume").volume_id
    }

    fn delete(&self, id: &str) -> Result<(), Status> {
        let request = csi::DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
        let delete = |mut client: ControllerClient<Channel>| async move {
            client.delete_volume(timed(request)).await
        };
        self.call(delete).map(drop)
    }

    /// Takes a snapshot and returns its id.
    fn snapshot(&self, volume: &str, name: &str) -> Result<String, Status> {
        let request = csi::CreateSnapshotRequest {
            source_volume_id: volume.to_owned(),
            name: name.to_owned(),
            ..Default::default()
        };
        let create = |mut client: ControllerClient<Channel>| async move {
            client.create_snapshot(timed(request)).await
        };
        Ok(self.call(create)?.snapshot.expect("a snapshot").snapshot_id)
    }

    fn delete_snapshot(&self, id: &str) {
        let request =
            csi::DeleteSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
        let delete = |mut client: ControllerClient<Channel>| async move {
            client.delete_snapshot(timed(request)).await
        };
        self.call(delete).expect("DeleteSnapshot");
    }
}

/// Mounts an XFS, which can share extents, on the directory `x`.
fn mount_xfs() {
    let image = format!("{XFS}.img");
    shell(&format!(
        "umount -l {XFS} 2>/dev/null || true; rm -f {image}; mkdir -p {XFS}
         truncate -s 1G {image}; mkfs.xfs -q -m reflink=1 {image}; mount -o loop {image} {XFS}"
    ));
}

fn unmount_xfs() {
    shell(&format!("umount {XFS}; rm -f {XFS}.img"));
}

/// A volume is created, used, changed, grown and deleted, and a volume that is made from its snapshot has its
/// content, while both are mounted.
pub(crate) fn from_create_to_delete() {
    let scene = Scene::new();
    mount_xfs();
    let controller = Controller::connect();
    let id = controller.create("pvc-1", "x", None);
    assert_eq!(controller.create("pvc-1", "x", None), id);
    let capability = filesystem("ext4", Mode::SingleNodeWriter);
    scene.stage(&id, &capability).expect("stage");
    scene.publish(&id, &capability, TARGET).expect("publish");
    let refused = controller.delete(&id).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");

    shell(&format!("echo first > {TARGET}/file; sync -f {TARGET}"));
    let snapshot = controller.snapshot(&id, "s").expect("CreateSnapshot");
    shell(&format!("echo later > {TARGET}/file; sync -f {TARGET}"));
    assert_eq!(controller.snapshot(&id, "s").expect("repeated"), snapshot);
    let copy = controller.create("pvc-2", "x", Some(&snapshot));
    let (staging, target) = (format!("{STAGING}-2"), format!("{TARGET}-2"));
    let request = csi::NodeStageVolumeRequest {
        volume_id: copy.clone(),
        staging_target_path: staging.clone(),
        volume_capability: Some(capability.clone()),
        ..Default::default()
    };
    scene.client.stage(request).expect("stage the copy");
    assert_eq!(shell(&format!("cat {staging}/file")), "first");
    assert_eq!(shell(&format!("cat {TARGET}/file")), "later");
    assert!(!Path::new(&target).exists());
    let request =
        csi::NodeUnstageVolumeRequest { volume_id: copy.clone(), staging_target_path: staging };
    scene.client.unstage(request).expect("unstage the copy");

    modify_and_grow(&scene, &controller, &id);
    scene.unpublish(&id, TARGET);
    scene.unstage(&id);
    let refused = controller.delete(&id).unwrap_err();
    assert!(refused.message().contains("csi-s"), "it has a snapshot: {refused:?}");
    controller.delete_snapshot(&snapshot);
    for volume in [&id, &copy, &id] {
        controller.delete(volume).expect("DeleteVolume");
    }
    assert_eq!(shell(&format!("ls {XFS}")), "");
    scene.nothing_is_left();
    unmount_xfs();
}

fn modify_and_grow(scene: &Scene, controller: &Controller, id: &str) {
    let request = csi::ControllerModifyVolumeRequest {
        volume_id: id.to_owned(),
        mutable_parameters: [("iops".to_owned(), "5000".to_owned())].into(),
        ..Default::default()
    };
    let modify = |mut client: ControllerClient<Channel>| async move {
        client.controller_modify_volume(timed(request)).await
    };
    controller.call(modify).expect("ControllerModifyVolume");
    let name = shell("./cleat ls -o json | grep -o 'csi-pvc-1-[0-9a-f]*' | head -n 1");
    assert_eq!(status(&name)["iops"], 5000);
    // The attributes of the request are older than that.
    let capability = filesystem("ext4", Mode::SingleNodeWriter);
    scene.publish(id, &capability, TARGET).expect("publish again");
    assert_eq!(status(&name)["iops"], 5000);

    let request = csi::ControllerExpandVolumeRequest {
        volume_id: id.to_owned(),
        capacity_range: Some(csi::CapacityRange { required_bytes: 2 * SIZE, limit_bytes: 0 }),
        ..Default::default()
    };
    let expand = |mut client: ControllerClient<Channel>| async move {
        client.controller_expand_volume(timed(request)).await
    };
    let grown = controller.call(expand).expect("ControllerExpandVolume");
    assert!(grown.node_expansion_required && grown.capacity_bytes == 2 * SIZE, "{grown:?}");
    let before = scene.client.stats(id, TARGET).expect("stats")[0].total;
    assert_eq!(scene.client.expand(id, TARGET, 2 * SIZE).expect("NodeExpandVolume"), 2 * SIZE);
    assert!(scene.client.stats(id, TARGET).expect("stats")[0].total > before);
}

/// A snapshot of a volume that is being written has each write that was acknowledged before, and of the later ones
/// a prefix.
pub(crate) fn snapshots_of_a_volume_in_use() {
    let scene = Scene::new();
    mount_xfs();
    let controller = Controller::connect();
    let id = controller.create("busy", "x", None);
    let capability = block(Mode::SingleNodeWriter);
    scene.stage(&id, &capability).expect("stage");
    scene.publish(&id, &capability, TARGET).expect("publish");
    let (acknowledged, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let writer = {
        let (acknowledged, stop) = (Arc::clone(&acknowledged), Arc::clone(&stop));
        std::thread::spawn(move || write_stamps(&acknowledged, &stop))
    };
    while acknowledged.load(Ordering::Acquire) < 2 * BLOCKS {
        std::thread::yield_now();
    }
    for round in 0..10 {
        let before = acknowledged.load(Ordering::Acquire);
        let snapshot = controller.snapshot(&id, &format!("s{round}")).expect("CreateSnapshot");
        check_stamps(&format!("{XFS}/.cleat/snapshots/busy/csi-s{round}"), before);
        controller.delete_snapshot(&snapshot);
    }
    stop.store(1, Ordering::Release);
    writer.join().expect("the writer ends");
    scene.unpublish(&id, TARGET);
    scene.unstage(&id);
    controller.delete(&id).expect("DeleteVolume");
    unmount_xfs();

    // A filesystem that cannot share extents.
    let file_system = shell(&format!("stat -f -c %T {VOLUMES}"));
    if ["xfs", "btrfs"].contains(&&*file_system) {
        return;
    }
    let id = controller.create("copied", "d", None);
    scene.stage(&id, &capability).expect("stage");
    let refused = controller.snapshot(&id, "s").unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    scene.unstage(&id);
    let snapshot = controller.snapshot(&id, "s").expect("a copy");
    controller.delete_snapshot(&snapshot);
    controller.delete(&id).expect("DeleteVolume");
}

/// Writes the numbers 1, 2, … to the blocks in turn, one write at a time, each durable before the next.
fn write_stamps(acknowledged: &AtomicU64, stop: &AtomicU64) {
    let device = std::fs::File::options()
        .write(true)
        .custom_flags(libc::O_DSYNC)
        .open(TARGET)
        .expect("the published device");
    let mut stamp: u64 = 0;
    while stop.load(Ordering::Acquire) == 0 {
        stamp += 1;
        let block: Vec<u8> = stamp.to_le_bytes().repeat(BLOCK / 8);
        let offset = stamp % BLOCKS * BLOCK as u64;
        device.write_all_at(&block, offset).expect("a write");
        acknowledged.store(stamp, Ordering::Release);
    }
}

/// Checks that the blocks of a snapshot are those after one write, and that this write is not before `least`.
fn check_stamps(path: &str, least: u64) {
    let snapshot = std::fs::File::open(path).expect("the snapshot");
    let mut stamps = Vec::new();
    for index in 0..BLOCKS {
        let mut block = vec![0; BLOCK];
        snapshot.read_exact_at(&mut block, index * BLOCK as u64).expect("a block");
        let first: [u8; 8] = block[..8].try_into().expect("eight bytes");
        assert!(block.chunks(8).all(|chunk| chunk == first), "block {index} is torn");
        stamps.push(u64::from_le_bytes(first));
    }
    let last = *stamps.iter().max().expect("there are blocks");
    assert!(last >= least, "the snapshot ends at {last}, but {least} was acknowledged before");
    for (index, stamp) in (0..BLOCKS).zip(&stamps) {
        let behind = (last - index) % BLOCKS;
        assert_eq!(*stamp, last - behind, "block {index} of a snapshot that ends at {last}");
    }
}
