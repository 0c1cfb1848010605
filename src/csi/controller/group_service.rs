//! The gRPC service of group snapshots: checks each request and runs the call.

use std::mem::take;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::csi::v1 as csi;
use csi::group_controller_server::GroupController;
use csi::group_controller_service_capability::rpc::Type as Rpc;
use csi::group_controller_service_capability::{self as capability};
use tonic::{Request, Response, Status};

use super::group_id::GroupId;
use super::groups::MAX_VOLUMES;
use super::names;
use super::service::{ControllerService, checked, existing};
use super::snapshots::check_parameters;
use crate::deadline;
use crate::secrets::Secrets;
use crate::volume_id::{self, VolumeId};

/// Parses the ids of the volumes of a new group.
fn volumes(ids: &[String]) -> Result<Vec<VolumeId>, Status> {
    let invalid = |message: String| Err(Status::invalid_argument(message));
    if ids.is_empty() {
        return invalid("the request has no source volume id".to_owned());
    }
    if ids.len() > MAX_VOLUMES {
        return invalid(format!("a group has at most {MAX_VOLUMES} volumes, not {}", ids.len()));
    }
    if let Some(id) = ids.iter().enumerate().find(|(at, id)| ids[..*at].contains(id)) {
        return invalid(format!("the volume {} is named twice", id.1));
    }
    ids.iter()
        .map(|id| {
            checked(volume_id::checked(id))?;
            existing(id)
        })
        .collect()
}

/// Checks the id of a group, and parses it. Returns `None` for an id that this driver did not make.
fn group(id: &str) -> Result<Option<GroupId>, Status> {
    if id.is_empty() {
        return Err(Status::invalid_argument("the request has no group snapshot id"));
    }
    Ok(GroupId::parse(id))
}

#[tonic::async_trait]
impl GroupController for ControllerService {
    async fn group_controller_get_capabilities(
        &self,
        _: Request<csi::GroupControllerGetCapabilitiesRequest>,
    ) -> Result<Response<csi::GroupControllerGetCapabilitiesResponse>, Status> {
        let rpc = capability::Rpc { r#type: Rpc::CreateDeleteGetVolumeGroupSnapshot.into() };
        let r#type = Some(capability::Type::Rpc(rpc));
        let capabilities = vec![csi::GroupControllerServiceCapability { r#type }];
        Ok(Response::new(csi::GroupControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<csi::CreateVolumeGroupSnapshotRequest>,
    ) -> Result<Response<csi::CreateVolumeGroupSnapshotResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let mut request = request.into_inner();
        let secrets = checked(Secrets::take(take(&mut request.secrets)))?;
        checked(names::checked("name", &request.name))?;
        checked(check_parameters(&request.parameters))?;
        let volumes = volumes(&request.source_volume_ids)?;
        let name = request.name;
        let mut keys = vec![format!("group snapshot {name}")];
        keys.extend(request.source_volume_ids);
        self.0
            .blocking("CreateVolumeGroupSnapshot", &keys, deadline, move |this| {
                let group = this.create_group(&name, &volumes, &secrets, deadline)?;
                Ok(csi::CreateVolumeGroupSnapshotResponse { group_snapshot: Some(group) })
            })
            .await
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<csi::DeleteVolumeGroupSnapshotRequest>,
    ) -> Result<Response<csi::DeleteVolumeGroupSnapshotResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let mut request = request.into_inner();
        let secrets = checked(Secrets::take(take(&mut request.secrets)))?;
        let Some(group) = group(&request.group_snapshot_id)? else {
            return Ok(Response::new(csi::DeleteVolumeGroupSnapshotResponse {}));
        };
        let key = [request.group_snapshot_id];
        self.0
            .blocking("DeleteVolumeGroupSnapshot", &key, deadline, move |this| {
                this.delete_group(&group, &request.snapshot_ids, &secrets)?;
                Ok(csi::DeleteVolumeGroupSnapshotResponse {})
            })
            .await
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<csi::GetVolumeGroupSnapshotRequest>,
    ) -> Result<Response<csi::GetVolumeGroupSnapshotResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let mut request = request.into_inner();
        let secrets = checked(Secrets::take(take(&mut request.secrets)))?;
        let Some(group) = group(&request.group_snapshot_id)? else {
            let id = request.group_snapshot_id;
            return Err(crate::status::of(&Error::new(
                ErrorKind::NotFound,
                format!("the group snapshot {id} does not exist"),
            )));
        };
        self.0
            .blocking("GetVolumeGroupSnapshot", &[], deadline, move |this| {
                let found = this.get_group(&group, &request.snapshot_ids, &secrets)?;
                Ok(csi::GetVolumeGroupSnapshotResponse { group_snapshot: Some(found) })
            })
            .await
    }
}
