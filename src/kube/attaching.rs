//! What attaching and detaching a volume needs, for the attacher (`attachments`) and for calls of ControllerPublish
//! and ControllerUnpublish (`calls`): the VolumeAttachment becomes a request, and the grant answers it.

use std::collections::BTreeMap;
use std::sync::Arc;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::answers;
use cleat_grants::controller::Request;
use cleat_grants::object::Generation;
use kube::ResourceExt;
use serde_json::json;

use crate::cluster::{Cluster, Key};
use crate::grant::{GRANT_LABEL, VOLUME_ANNOTATION, VolumeGrant, grant_label, grant_name};
use crate::objects::VolumeAttachment;
use crate::source::{self, MODE_ANNOTATION, NODE_ID_ANNOTATION, Source};
use crate::storage::Backing;

/// The field of the publish context with the generation of the grant.
pub(crate) const GENERATION: &str = "generation";

/// How a volume is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// It is on the node: nothing has to be done.
    Local,
    /// The node needs a grant.
    Granted,
}

/// Returns how a volume is attached to `node`.
///
/// # Errors
/// Returns an error if the volume can never be attached there as it is asked for, and that of `node_id`.
pub(crate) fn way(
    cluster: &Cluster,
    source: &Source,
    node: &str,
    node_id: impl FnOnce() -> Result<String>,
) -> Result<Way> {
    match cluster.storage.find(&source.handle)? {
        Backing::Local { node_id: owner } if node_id()? == owner => Ok(Way::Local),
        Backing::Local { node_id: owner } => {
            let message = format!(
                "cannot attach volume {} to node {node}: the volume is stored on node {owner}",
                source.handle
            );
            let repair = "give the PersistentVolume the node affinity of its node";
            Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(repair))
        }
        Backing::Granted(storage) => {
            storage.check_mode(source.mode)?;
            Ok(Way::Granted)
        }
    }
}

/// Makes an attachment a request: writes its finalizers, the node id, the volume and the mode, and has the volume
/// decided about. The label finds the requests of a volume at the API server.
pub(crate) async fn make_request(
    cluster: &Cluster,
    known: &VolumeAttachment,
    source: &Source,
    node_id: String,
    finalizers: &[String],
) -> Result<Arc<VolumeAttachment>> {
    let mut annotations = known.annotations().clone();
    annotations.insert(NODE_ID_ANNOTATION.to_owned(), node_id);
    annotations.insert(VOLUME_ANNOTATION.to_owned(), source.handle.clone());
    annotations.insert(MODE_ANNOTATION.to_owned(), format!("{:?}", source.mode));
    let grant = grant_name(&cluster.config.driver, &source.handle);
    let labels = json!({ GRANT_LABEL: grant_label(&grant) });
    let body = json!({
        "metadata": { "finalizers": finalizers, "annotations": annotations, "labels": labels },
    });
    let what = "cannot make a request of VolumeAttachment";
    let prepared = cluster.attachments.patch(known, body, what).await?;
    cluster.metrics.write("attachment");
    cluster.queue.add(Key::Grant(grant));
    Ok(prepared)
}

/// Answers a request from the grant.
///
/// # Errors
/// As [`answers::publish`], and `Internal` if the grant cannot be read: `Aborted` if the decision is not made yet.
pub(crate) fn published(cluster: &Cluster, grant: &str, request: &Request) -> Result<Generation> {
    cluster.grants.check(grant)?;
    let stored = cluster.grants.mirror.get(grant).map(|grant| grant.stored());
    answers::publish(stored.as_ref().map(|stored| &stored.grant), request)
}

/// Returns the publish context for a grant of this generation.
pub(crate) fn context(generation: Option<Generation>) -> BTreeMap<String, String> {
    let entry = |generation: Generation| (GENERATION.to_owned(), generation.to_string());
    generation.map(entry).into_iter().collect()
}

/// Returns whether another attachment than `except` asks for a volume on `node`.
pub(crate) fn is_requested(cluster: &Cluster, grant: &str, node: &str, except: &str) -> bool {
    let asks = |known: &Arc<VolumeAttachment>| {
        known.spec.node_name == node
            && known.name_any() != except
            && source::request(known, &cluster.finalizer).is_some()
    };
    cluster.attachments_of(grant).iter().any(asks)
}

/// Succeeds if `node` has no grant any more.
///
/// # Errors
/// As [`answers::unpublish`]: `Aborted` as long as the node has one.
pub(crate) async fn unpublished(cluster: &Cluster, grant: &str, node: &str) -> Result<()> {
    let answer = |object: Option<Arc<VolumeGrant>>| {
        let stored = object.as_deref().map(VolumeGrant::stored);
        answers::unpublish(stored.as_ref().map(|stored| &stored.grant), node)
    };
    cluster.grants.check(grant)?;
    answer(cluster.grants.mirror.get(grant))?;
    // The mirror may be old, and the answer says that the node cannot use the volume.
    answer(cluster.grants.refresh(grant).await?)
}
