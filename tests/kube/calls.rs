//! ControllerPublish and ControllerUnpublish as external-attacher calls them. The tests do what it does with
//! VolumeAttachments: the controller leaves their finalizers and status alone.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cleat::kubernetes::attach_calls::AttachSocket;
use cleat_csi_api::csi::v1 as csi;
use cleat_grants::object::Generation;
use cleat_kube::{CallServer, Config};
use csi::controller_client::ControllerClient;
use csi::controller_service_capability::{self as capability, rpc::Type as Rpc};
use csi::identity_client::IdentityClient;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use crate::control_plane::NAMESPACE;
use crate::fixture::{Controller, World, eventually, finalizer, run};

/// The timeout of a call that ends at once.
const LONG: Duration = Duration::from_secs(30);

/// The timeout of a call that has to wait.
const SHORT: Duration = Duration::from_secs(2);

/// A controller with a CSI socket, and its caller.
pub(crate) struct Attacher<'a> {
    pub(crate) world: &'a World,
    directory: tempfile::TempDir,
}

impl<'a> Attacher<'a> {
    pub(crate) fn new(world: &'a World) -> Self {
        Self { world, directory: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("csi.sock")
    }

    pub(crate) fn controller(&self) -> Controller {
        let socket = AttachSocket { path: self.socket(), driver: self.world.driver.clone() };
        let calls = Some(Arc::new(socket) as Arc<dyn CallServer>);
        self.world.controller_of(Config { calls, ..self.world.config(NAMESPACE) })
    }

    async fn channel(&self) -> Channel {
        eventually("the socket is served", async || {
            let socket = self.socket();
            let connector = tower::service_fn(move |_| {
                let socket = socket.clone();
                async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
            });
            let endpoint = Endpoint::from_static("http://cleat.invalid");
            endpoint.connect_with_connector(connector).await.ok()
        })
        .await
    }

    /// Asks for a volume on a node, as Kubernetes and then external-attacher do.
    async fn ask(&self, volume: &str, node: &str) -> String {
        let name = self.world.attach(volume, node).await;
        let finalizers = [finalizer(&self.world.driver)];
        let annotations = json!({ "csi.alpha.kubernetes.io/node-id": node });
        let metadata = json!({ "finalizers": finalizers, "annotations": annotations });
        self.patch(&name, json!({ "metadata": metadata })).await;
        name
    }

    /// Ends an attachment, as external-attacher does after ControllerUnpublish.
    async fn finish(&self, attachment: &str) {
        self.patch(attachment, json!({ "metadata": { "finalizers": [] } })).await;
        self.world.gone(attachment).await;
    }

    async fn patch(&self, name: &str, body: serde_json::Value) {
        let attachments = self.world.all::<VolumeAttachment>();
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(body));
        attachments.patch(name, &parameters, &patch).await.unwrap();
    }

    async fn publish(&self, volume: &str, node: &str) -> Result<Generation, Status> {
        let answer = self.publish_as(volume, node, Mode::SingleNodeWriter, LONG).await?;
        Ok(Generation(answer["generation"].parse().unwrap()))
    }

    async fn publish_as(
        &self,
        volume: &str,
        node: &str,
        mode: Mode,
        timeout: Duration,
    ) -> Result<std::collections::BTreeMap<String, String>, Status> {
        let capability = csi::VolumeCapability {
            access_mode: Some(AccessMode { mode: mode.into() }),
            access_type: Some(AccessType::Block(BlockVolume {})),
        };
        let mut request = Request::new(csi::ControllerPublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id: node.to_owned(),
            volume_capability: Some(capability),
            ..Default::default()
        });
        request.set_timeout(timeout);
        let mut client = ControllerClient::new(self.channel().await);
        Ok(client.controller_publish_volume(request).await?.into_inner().publish_context)
    }

    /// Returns the nodes that may use a volume, as ListVolumes has them.
    pub(crate) async fn published(&self, volume: &str) -> Vec<String> {
        let mut client = ControllerClient::new(self.channel().await);
        let request = csi::ListVolumesRequest::default();
        let entries = client.list_volumes(request).await.unwrap().into_inner().entries;
        let is_meant = |entry: &csi::list_volumes_response::Entry| {
            entry.volume.as_ref().unwrap().volume_id == volume
        };
        let entry = entries.into_iter().find(is_meant);
        entry.map(|entry| entry.status.unwrap().published_node_ids).unwrap_or_default()
    }

    pub(crate) async fn unpublish(
        &self,
        volume: &str,
        node: &str,
        timeout: Duration,
    ) -> Result<(), Status> {
        let mut request = Request::new(csi::ControllerUnpublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id: node.to_owned(),
            ..Default::default()
        });
        request.set_timeout(timeout);
        let mut client = ControllerClient::new(self.channel().await);
        client.controller_unpublish_volume(request).await.map(|_| ())
    }
}

/// Fails with this code, and a message that contains `text`.
#[track_caller]
fn check<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code, text: &str) {
    let status = answer.unwrap_err();
    assert_eq!(status.code(), code, "{status:?}");
    assert!(status.message().contains(text), "{status:?}");
}

#[test]
fn row_28_external_attacher_finds_what_it_needs() {
    run(async |world: World| {
        let attacher = Attacher::new(&world);
        let controller = attacher.controller();
        let channel = attacher.channel().await;
        let info = IdentityClient::new(channel.clone())
            .get_plugin_info(csi::GetPluginInfoRequest {})
            .await;
        assert_eq!(info.unwrap().into_inner().name, world.driver);
        let mut client = ControllerClient::new(channel.clone());
        let capabilities = csi::ControllerGetCapabilitiesRequest {};
        let known = client.controller_get_capabilities(capabilities).await.unwrap();
        let has = |wanted: Rpc| {
            let kind = capability::Type::Rpc(capability::Rpc { r#type: wanted.into() });
            known.get_ref().capabilities.iter().any(|known| known.r#type == Some(kind))
        };
        assert!(has(Rpc::PublishUnpublishVolume) && has(Rpc::PublishReadonly));
        assert!(has(Rpc::ListVolumes) && has(Rpc::ListVolumesPublishedNodes));
        assert!(!has(Rpc::CreateDeleteVolume));
        let other = client.create_volume(csi::CreateVolumeRequest::default()).await;
        assert_eq!(other.unwrap_err().code(), Code::Unimplemented);
        // The connection of a process that does not lead any more ends.
        controller.stop().await;
        let gone = client.controller_get_capabilities(capabilities).await;
        assert_eq!(gone.unwrap_err().code(), Code::Unavailable);
    });
}

#[test]
fn row_30_calls_of_external_attacher_are_answered_from_grants() {
    run(async |world: World| {
        let attacher = Attacher::new(&world);
        let controller = attacher.controller();
        let (a, b, handle) = (&world.node("a").await, &world.node("b").await, "shared/v");
        let volume = world.volume("v", handle).await;
        check(attacher.publish(handle, "missing").await, Code::NotFound, "no node has");
        check(attacher.publish(handle, "").await, Code::InvalidArgument, "no node id");
        let unasked = attacher.publish_as(handle, a, Mode::SingleNodeWriter, SHORT).await;
        check(unasked, Code::FailedPrecondition, "no VolumeAttachment");
        let first = attacher.ask(&volume, a).await;
        assert_eq!(attacher.publish(handle, a).await.unwrap(), Generation(1));
        assert_eq!(attacher.publish(handle, a).await.unwrap(), Generation(1), "repeated");
        let other = attacher.publish_as(handle, a, Mode::MultiNodeReaderOnly, LONG).await;
        check(other, Code::AlreadyExists, "ReadWrite");
        let known = world.attachment(&first).await.unwrap();
        assert!(known.status.is_none_or(|status| !status.attached), "it is external-attacher's");
        let second = attacher.ask(&volume, b).await;
        check(attacher.publish(handle, b).await, Code::FailedPrecondition, a);

        // The node uses the volume: the call waits, a second one is refused, and nothing is torn down.
        world.mount(handle, a, Generation(1)).await;
        world.detach(&first).await;
        let waiting = attacher.unpublish(handle, a, 3 * SHORT);
        let repeated = async {
            world.revoked(handle, a).await;
            attacher.unpublish(handle, a, SHORT).await
        };
        let (waited, refused) = tokio::join!(waiting, repeated);
        check(waited, Code::Aborted, "has not released it");
        check(refused, Code::Aborted, "in progress");
        world.release(handle, a, Generation(1)).await;
        attacher.unpublish(handle, a, LONG).await.unwrap();
        let finalizers = world.attachment(&first).await.unwrap().finalizers().to_vec();
        assert_eq!(finalizers, [finalizer(&world.driver)], "it is external-attacher's");
        attacher.finish(&first).await;
        assert_eq!(attacher.publish(handle, b).await.unwrap(), Generation(2));
        // A late repetition changes nothing for the new holder.
        attacher.unpublish(handle, a, LONG).await.unwrap();
        let grant = world.grant(handle).await.unwrap().stored().grant;
        assert!(!grant.holder(b).unwrap().revoked);

        // Without a node id: from all nodes. The attachment is still there, so its request is withdrawn.
        world.mount(handle, b, Generation(2)).await;
        let released = async {
            world.revoked(handle, b).await;
            world.release(handle, b, Generation(2)).await;
        };
        let (ended, ()) = tokio::join!(attacher.unpublish(handle, "", LONG), released);
        ended.unwrap();
        let grant = world.grant(handle).await.unwrap().stored().grant;
        assert!(grant.spec.holders.is_empty());
        assert_eq!(attacher.publish(handle, b).await.unwrap(), Generation(3), "it asks again");
        world.released(handle, b, Generation(3)).await;
        world.detach(&second).await;
        attacher.unpublish(handle, b, LONG).await.unwrap();
        controller.stop().await;
    });
}

#[test]
fn row_30_calls_for_volumes_that_need_or_can_have_no_grant() {
    run(async |world: World| {
        let attacher = Attacher::new(&world);
        let controller = attacher.controller();
        let (a, b) = (&world.node("a").await, &world.node("b").await);
        let local = &format!("local/{a}/v");
        let writer = Mode::SingleNodeWriter;
        assert!(attacher.publish_as(local, a, writer, LONG).await.unwrap().is_empty());
        let wrong = attacher.publish_as(local, b, writer, LONG).await;
        check(wrong, Code::InvalidArgument, "is stored on node");
        attacher.unpublish(local, a, LONG).await.unwrap();
        check(attacher.publish("other/v", a).await, Code::FailedPrecondition, "cannot be fenced");
        controller.stop().await;
    });
}

#[test]
fn row_13_a_call_for_a_silent_node_succeeds_when_it_is_fenced() {
    run(async |world: World| {
        let attacher = Attacher::new(&world);
        let controller = attacher.controller();
        let (a, handle) = (&world.node("a").await, "shared/v");
        let volume = world.volume("v", handle).await;
        let first = attacher.ask(&volume, a).await;
        let generation = attacher.publish(handle, a).await.unwrap();
        world.mount(handle, a, generation).await;
        world.detach(&first).await;
        check(attacher.unpublish(handle, a, SHORT).await, Code::Aborted, "taint it");
        // Another process continues, from what is stored.
        controller.stop().await;
        let controller = attacher.controller();
        assert!(!world.storage.image(handle).is_cut(a), "nothing says that the node is lost");
        world.out_of_service(a, true).await;
        attacher.unpublish(handle, a, LONG).await.unwrap();
        assert!(world.storage.image(handle).is_cut(a));
        let grant = world.grant(handle).await.unwrap().stored().grant;
        assert!(!grant.fences_of(a).next().unwrap().proof.is_empty());
        attacher.finish(&first).await;
        // The node asks again, and has not cleaned up.
        attacher.ask(&volume, a).await;
        check(attacher.publish(handle, a).await, Code::FailedPrecondition, "has not cleaned up");

        // A node that does not exist any more.
        let (gone, other) = (&world.node("gone").await, "shared/other");
        let volume = world.volume("other", other).await;
        let attachment = attacher.ask(&volume, gone).await;
        let generation = attacher.publish(other, gone).await.unwrap();
        world.mount(other, gone, generation).await;
        world.all::<CSINode>().delete(gone, &DeleteParams::default()).await.unwrap();
        world.all::<Node>().delete(gone, &DeleteParams::default()).await.unwrap();
        world.detach(&attachment).await;
        attacher.unpublish(other, gone, LONG).await.unwrap();
        assert!(world.storage.image(other).is_cut(gone));
        controller.stop().await;
    });
}
