//! CSI-Addons on a real kernel: unused space goes back to the storage.

use cleat_csi_api::addons::identity::identity_client::IdentityClient;
use cleat_csi_api::addons::identity::{GetCapabilitiesRequest, GetIdentityRequest};
use cleat_csi_api::addons::reclaimspace::reclaim_space_controller_client::ReclaimSpaceControllerClient;
use cleat_csi_api::addons::reclaimspace::reclaim_space_node_client::ReclaimSpaceNodeClient;
use cleat_csi_api::addons::reclaimspace::{ControllerReclaimSpaceRequest, NodeReclaimSpaceRequest};
use cleat_csi_api::csi::v1::volume_capability::access_mode::Mode;
use tonic::Code;

use super::client::{channel, runtime, timed};
use super::{SOCKET, STAGING, Scene, VOLUMES, filesystem};
use crate::fixture::shell;

pub(crate) fn unused_space_is_reclaimed() {
    let scene = Scene::new();
    let id = scene.volume("full", "128M");
    scene.stage(&id, &filesystem("ext4", Mode::SingleNodeWriter)).expect("stage");
    shell(&format!(
        "head -c 50M /dev/urandom > {STAGING}/file; sync -f {STAGING}; rm {STAGING}/file; sync -f {STAGING}"
    ));
    let used =
        || -> u64 { shell(&format!("du -k {VOLUMES}/full | cut -f 1")).parse().expect("a number") };
    let before = used();
    let runtime = runtime();
    runtime.block_on(async {
        let channel = channel(SOCKET).await;
        let mut identity = IdentityClient::new(channel.clone());
        let name = identity.get_identity(GetIdentityRequest {}).await.expect("GetIdentity");
        assert_eq!(name.into_inner().name, "csi.test");
        let found = identity.get_capabilities(GetCapabilitiesRequest {}).await;
        assert_eq!(found.expect("GetCapabilities").into_inner().capabilities.len(), 6);

        let mut controller = ReclaimSpaceControllerClient::new(channel.clone());
        let request = ControllerReclaimSpaceRequest { volume_id: id.clone(), ..Default::default() };
        let refused = controller.controller_reclaim_space(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unimplemented, "{refused:?}");

        let mut node = ReclaimSpaceNodeClient::new(channel);
        let request = |volume: &str, path: &str| {
            timed(NodeReclaimSpaceRequest {
                volume_id: volume.to_owned(),
                staging_target_path: path.to_owned(),
                ..Default::default()
            })
        };
        for (volume, path, code) in [
            ("", STAGING, Code::InvalidArgument),
            ("none", STAGING, Code::NotFound),
            (&*id, "", Code::InvalidArgument),
            (&*id, "/tmp", Code::NotFound),
        ] {
            let refused = node.node_reclaim_space(request(volume, path)).await.unwrap_err();
            assert_eq!(refused.code(), code, "{volume:?} {path:?}: {refused:?}");
        }
        node.node_reclaim_space(request(&id, STAGING)).await.expect("NodeReclaimSpace");
    });
    let after = used();
    assert!(before > 50_000 && after + 40_000 < before, "{before} KiB, then {after} KiB");
    scene.unstage(&id);
    scene.nothing_is_left();
}
