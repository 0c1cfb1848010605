//! Tests of each call with file volumes in a temporary directory. This node is `n1`.

mod killed;
mod published;
mod snapshots;
mod stepped;
mod volumes;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use cleat_backend::Registry;
use cleat_core::error::Result;
use cleat_core::policy;
use cleat_csi_api::csi::v1 as csi;
use cleat_node::csi_config::CsiConfig;
use csi::controller_server::Controller as _;
use csi::controller_service_capability::rpc::Type as RpcType;
use csi::controller_service_capability::{Rpc, Type as Kind};
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, MountVolume};
use csi::volume_health::VolumeHealthEntry;
use tempfile::TempDir;
use tokio::time::Instant;
use tonic::{Code, Request, Status};

use super::Controller;
use super::local::Local;
use super::service::ControllerService;

static REGISTRY: Registry = Registry::new(&[cleat_backend::file::BACKEND]);

/// The size of the volumes of these tests, in bytes.
const SIZE: i64 = 4 << 20;

/// What this process has mapped, as tests say.
#[derive(Default)]
struct FakeNode {
    mapped: Mutex<BTreeMap<String, Vec<VolumeHealthEntry>>>,
    changes: Mutex<Vec<(String, policy::Change)>>,
}

/// The number of volumes that the node of these tests can have.
const LIMIT: usize = 4;

#[tonic::async_trait]
impl Local for FakeNode {
    fn health(&self, id: &str) -> Option<Vec<VolumeHealthEntry>> {
        self.mapped.lock().unwrap().get(id).cloned()
    }

    fn attach_limit(&self) -> usize {
        LIMIT
    }

    async fn set_policy(&self, id: &str, change: policy::Change, _: Instant) -> Result<bool> {
        self.changes.lock().unwrap().push((id.to_owned(), change));
        Ok(self.health(id).is_some())
    }
}

/// Returns a map of texts.
pub(crate) fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// Returns the capability of a filesystem with an access mode.
pub(crate) fn capability(mode: Mode) -> csi::VolumeCapability {
    csi::VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

/// Returns a controller with the directories `default` and `fast` and the cluster `c1`.
pub(crate) fn controller(directory: &TempDir) -> Controller {
    controller_of(directory, Arc::new(FakeNode::default()))
}

fn controller_of(directory: &TempDir, node: Arc<FakeNode>) -> Controller {
    let clusters = directory.path().join("clusters.json");
    let list = r#"[{"clusterID": "c1", "monitors": ["10.0.0.1:6789"],
        "rbd": {"radosNamespace": "tenant"}}]"#;
    std::fs::write(&clusters, list).unwrap();
    let mut directories = BTreeMap::new();
    for name in ["default", "fast"] {
        let path = directory.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        directories.insert(name.to_owned(), path);
    }
    let config = CsiConfig { clusters, directories, ..CsiConfig::default() };
    Controller::new(Arc::new(config), "n1".to_owned(), REGISTRY, node)
}

/// A service with its directory.
struct Fixture {
    directory: TempDir,
    node: Arc<FakeNode>,
    service: ControllerService,
}

impl Fixture {
    fn new() -> Self {
        let (directory, node) = (tempfile::tempdir().unwrap(), Arc::new(FakeNode::default()));
        let service = ControllerService(controller_of(&directory, Arc::clone(&node)));
        Self { directory, node, service }
    }

    /// Returns the path of the file of a volume in the directory `default`.
    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join("default").join(name)
    }

    /// Makes a volume mapped on this node.
    fn set_mapped(&self, id: &str, health: Vec<VolumeHealthEntry>) {
        self.node.mapped.lock().unwrap().insert(id.to_owned(), health);
    }

    async fn create(&self, request: csi::CreateVolumeRequest) -> Result<csi::Volume, Status> {
        let answer = self.service.create_volume(Request::new(request)).await?;
        Ok(answer.into_inner().volume.unwrap())
    }

    /// Creates a volume and returns its id.
    async fn volume(&self, name: &str) -> String {
        self.create(new_volume(name)).await.unwrap().volume_id
    }

    async fn delete(&self, id: &str) -> Result<(), Status> {
        let request = csi::DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
        self.service.delete_volume(Request::new(request)).await.map(drop)
    }

    async fn snapshot(&self, volume: &str, name: &str) -> Result<csi::Snapshot, Status> {
        let request = csi::CreateSnapshotRequest {
            source_volume_id: volume.to_owned(),
            name: name.to_owned(),
            ..Default::default()
        };
        let answer = self.service.create_snapshot(Request::new(request)).await?;
        Ok(answer.into_inner().snapshot.unwrap())
    }

    async fn delete_snapshot(&self, id: &str) -> Result<(), Status> {
        let request =
            csi::DeleteSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
        self.service.delete_snapshot(Request::new(request)).await.map(drop)
    }

    async fn list_snapshots(
        &self,
        request: csi::ListSnapshotsRequest,
    ) -> Result<(Vec<String>, String), Status> {
        let answer = self.service.list_snapshots(Request::new(request)).await?.into_inner();
        let ids = answer.entries.into_iter().map(|entry| entry.snapshot.unwrap().snapshot_id);
        Ok((ids.collect(), answer.next_token))
    }

    async fn list(&self, max_entries: i32, token: &str) -> Result<(Vec<String>, String), Status> {
        let starting_token = token.to_owned();
        let request = csi::ListVolumesRequest { max_entries, starting_token };
        let answer = self.service.list_volumes(Request::new(request)).await?.into_inner();
        let ids = answer.entries.into_iter().map(|entry| entry.volume.unwrap().volume_id);
        Ok((ids.collect(), answer.next_token))
    }
}

#[tokio::test]
async fn a_node_with_grants_does_not_attach() {
    let mut service = Fixture::new().service;
    let config = CsiConfig { grants: true, ..(*service.0.config).clone() };
    service.0.config = Arc::new(config);
    let request = Request::new(csi::ControllerGetCapabilitiesRequest::default());
    let known = service.controller_get_capabilities(request).await.unwrap();
    let kind = Kind::Rpc(Rpc { r#type: RpcType::PublishUnpublishVolume.into() });
    let capabilities = known.into_inner().capabilities;
    assert!(capabilities.iter().any(|known| known.r#type == Some(kind)), "for csi-provisioner");
    let published = service
        .controller_publish_volume(Request::new(csi::ControllerPublishVolumeRequest::default()))
        .await;
    assert!(refused(published, Code::FailedPrecondition).contains("--csi-socket"));
    let unpublished = service
        .controller_unpublish_volume(Request::new(csi::ControllerUnpublishVolumeRequest::default()))
        .await;
    assert!(refused(unpublished, Code::FailedPrecondition).contains("--csi-socket"));
}

/// Returns the request for a volume of [`SIZE`] bytes.
fn new_volume(name: &str) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: range(SIZE, 0),
        volume_capabilities: vec![capability(Mode::SingleNodeWriter)],
        ..Default::default()
    }
}

fn range(required_bytes: i64, limit_bytes: i64) -> Option<csi::CapacityRange> {
    Some(csi::CapacityRange { required_bytes, limit_bytes })
}

/// Checks the code of an error, and returns its message.
fn refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code) -> String {
    let status = result.unwrap_err();
    assert_eq!(status.code(), code, "{}", status.message());
    status.message().to_owned()
}
