//! What the CSI driver reports about the health of volumes and of the storage.

use cleat_csi::{Driver, mapping_name};
use cleat_csi_api::csi::v1 as csi;
use cleat_node::csi_config::CsiConfig;
use csi::node_server::Node;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume};
use csi::{StorageHealthErrorType as Storage, VolumeHealthErrorType as Volume};
use serde_json::json;
use test_kit::ceph::{Cluster, ID, POOL};
use test_kit::node::{Supervisor, wait_until};
use tonic::Request;

use super::Scene;

#[test]
fn csi_health_is_degraded_in_an_outage_and_inaccessible_when_fenced() {
    let cluster = Cluster::start();
    let scene = Scene::on(&cluster);
    scene.image("a");
    let caller = Caller::of(&scene);
    caller.stage();
    let load = scene.load(&scene.supervisor.get(&mapping_name(&caller.id)).unwrap());
    load.wait_for_more();
    assert_eq!((caller.volume(), caller.storage()), (None, None));

    cluster.tell("pause osd");
    let outage = || "BackendOutage".to_owned();
    wait_until("the volume is degraded", || caller.volume() == Some((Volume::Degraded, outage())));
    assert_eq!(caller.storage(), Some((Storage::StorageUnreachable, outage())));
    cluster.tell("resume osd");
    load.wait_for_more();
    wait_until("the volume is healthy", || caller.volume().is_none());
    assert_eq!(caller.storage(), None);

    cluster.ceph(&["osd", "blocklist", "add", &scene.owner("a")]);
    let fenced = Some((Volume::Inaccessible, "Fenced".to_owned()));
    wait_until("the volume is inaccessible", || caller.volume() == fenced);
    assert!(load.stop().iter().all(Result::is_err), "a write succeeded");
    caller.unstage();
    scene.machine.assert_clean();
}

/// A caller of the driver of a scene's daemon, for one volume.
struct Caller<'a, N> {
    supervisor: &'a Supervisor,
    node: N,
    id: String,
    staging: String,
}

impl<'a> Caller<'a, ()> {
    /// Makes a caller for the image `a`.
    fn of(scene: &'a Scene<'_>) -> Caller<'a, impl Node + use<>> {
        let conf = std::fs::read_to_string(scene.cluster.conf()).unwrap();
        let monitors = conf.lines().find_map(|line| line.strip_prefix("mon host = ")).unwrap();
        let known = json!([{
            "clusterID": "test", "monitors": [monitors], "userID": ID,
            "keyring": scene.cluster.keyring(ID),
        }]);
        let clusters = scene.machine.path("clusters.json");
        std::fs::write(&clusters, known.to_string()).unwrap();
        let config = CsiConfig { clusters, ..CsiConfig::default() };
        let driver = Driver::new(config, "node".to_owned(), scene.supervisor.executor(), 64);
        let staging = scene.machine.path("staging").display().to_string();
        let (supervisor, id) = (&scene.supervisor, format!("rbd/test/{POOL}//a"));
        Caller { supervisor, node: driver.node_service(), id, staging }
    }
}

impl<N: Node> Caller<'_, N> {
    /// Stages the volume as a block device, which needs no kernel.
    fn stage(&self) {
        let capability = csi::VolumeCapability {
            access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
            access_type: Some(AccessType::Block(BlockVolume {})),
        };
        let request = csi::NodeStageVolumeRequest {
            volume_id: self.id.clone(),
            staging_target_path: self.staging.clone(),
            volume_capability: Some(capability),
            ..Default::default()
        };
        self.supervisor.block_on(self.node.node_stage_volume(Request::new(request))).unwrap();
    }

    fn unstage(&self) {
        let request = csi::NodeUnstageVolumeRequest {
            volume_id: self.id.clone(),
            staging_target_path: self.staging.clone(),
        };
        self.supervisor.block_on(self.node.node_unstage_volume(Request::new(request))).unwrap();
    }

    /// Returns the health of the volume; `None` if nothing is wrong.
    fn volume(&self) -> Option<(Volume, String)> {
        let request =
            csi::NodeGetVolumeHealthRequest { volume_id: self.id.clone(), ..Default::default() };
        let answer = self.node.node_get_volume_health(Request::new(request));
        let health = self.supervisor.block_on(answer).unwrap().into_inner().volume_health.unwrap();
        let first = health.health_statuses.first()?;
        Some((first.status(), first.reason.clone()))
    }

    /// Returns the health of the storage; `None` if nothing is wrong.
    fn storage(&self) -> Option<(Storage, String)> {
        let request = csi::NodeGetStorageHealthRequest::default();
        let answer = self.node.node_get_storage_health(Request::new(request));
        let health = self.supervisor.block_on(answer).unwrap().into_inner().backend_health;
        let first = health.first()?;
        Some((first.status(), first.reason.clone()))
    }
}
