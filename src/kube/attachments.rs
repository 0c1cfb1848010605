//! The attacher: makes VolumeAttachments of the driver requests for grants, and answers them from the grants, with
//! the finalizers, annotations and fields of external-attacher 4.13.
//!
//! An attachment is a request from the moment at which it has the finalizer, so that its end is seen, and until it
//! is being deleted. `attached` becomes true when its node has a grant, and the finalizer goes when the node has
//! released the volume or was fenced.

use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::object::{Generation, Time};
use kube::ResourceExt;
use serde_json::json;

use crate::api::{self, grpc_code, message, seconds, timestamp};
use crate::attaching::{self, GENERATION, Way};
use crate::cluster::{Cluster, Key, grant_of};
use crate::grant::{VOLUME_ANNOTATION, grant_name};
use crate::objects::{PersistentVolume, VolumeAttachment};
use crate::queue::Next;
use crate::source::{self, Source};

/// How long a detach takes before its status says what it waits for. A normal one is faster.
const DETACH_SHOWN_AFTER_S: u64 = 2;

/// The maximum size of the message of an error in the status, in bytes. The API server refuses a longer one.
const MAX_MESSAGE: usize = 1024;

/// Attaches or detaches what the attachment `name` asks for. An error is written to its status, too.
pub(crate) async fn sync(cluster: &Cluster, name: &str) -> Result<Next> {
    let Some(attachment) = cluster.attachments.mirror.get(name) else { return Ok(Next::Done) };
    let deleting = attachment.metadata.deletion_timestamp.is_some();
    let result = if deleting {
        detach(cluster, &attachment).await
    } else {
        attach(cluster, &attachment).await
    };
    if let Err(error) = &result
        && !is_conflict(error)
    {
        save_error(cluster, name, error).await?;
    }
    result
}

/// Returns whether an error only says that an object has changed meanwhile.
pub(crate) fn is_conflict(error: &Error) -> bool {
    error.kind() == ErrorKind::Aborted
}

async fn attach(cluster: &Cluster, known: &Arc<VolumeAttachment>) -> Result<Next> {
    if source::request(known, &cluster.finalizer).is_some() {
        return answer(cluster, known).await;
    }
    let volume = match &known.spec.source.persistent_volume_name {
        Some(name) => cluster.persistent_volume(name).await?,
        None => None,
    };
    let source = source::of_attachment(known, volume.as_deref())?;
    let node = &known.spec.node_name;
    let node_id = || {
        let csi_node = cluster.csi_nodes.mirror.get(node);
        source::node_id(known, csi_node.as_deref())
    };
    match attaching::way(cluster, &source, node, node_id)? {
        Way::Local => mark_attached(cluster, known, None).await,
        Way::Granted => {
            let known = prepare(cluster, known, volume.as_ref(), &source, node_id).await?;
            answer(cluster, &known).await
        }
    }
}

/// Makes the attachment a request: a finalizer on the PersistentVolume, and on the attachment the finalizer, the
/// node id, the volume and the mode.
async fn prepare(
    cluster: &Cluster,
    known: &Arc<VolumeAttachment>,
    volume: Option<&Arc<PersistentVolume>>,
    source: &Source,
    node_id: impl Fn() -> Result<String>,
) -> Result<Arc<VolumeAttachment>> {
    if let Some(volume) = volume {
        let deleting = volume.metadata.deletion_timestamp.is_some();
        // An attachment of external-attacher, which this controller replaces, may be in use.
        if deleting && !known.finalizers().contains(&cluster.finalizer) {
            let message = format!("PersistentVolume {} is marked for deletion", volume.name_any());
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let finalizers = with(volume.finalizers(), &cluster.finalizer);
        if !deleting && finalizers.len() > volume.finalizers().len() {
            let body = json!({ "metadata": { "finalizers": finalizers } });
            let what = "cannot add the finalizer to PersistentVolume";
            cluster.volumes.patch(volume, body, what).await?;
            cluster.metrics.write("volume");
        }
    }
    let finalizers = with(known.finalizers(), &cluster.finalizer);
    attaching::make_request(cluster, known, source, node_id()?, &finalizers).await
}

/// Answers a request from the grant.
async fn answer(cluster: &Cluster, known: &VolumeAttachment) -> Result<Next> {
    let Some(request) = source::request(known, &cluster.finalizer) else { return Ok(Next::Done) };
    let Some(grant) = grant_of(known) else { return Ok(Next::Done) };
    match attaching::published(cluster, &grant, &request) {
        Ok(generation) => mark_attached(cluster, known, Some(generation)).await,
        // The decision is not made yet. Its change of the grant has this attachment looked at again.
        Err(error) if error.kind() == ErrorKind::Aborted => Ok(Next::Done),
        Err(error) => {
            save_error(cluster, &known.name_any(), &error).await?;
            Ok(Next::Done)
        }
    }
}

/// Writes that the volume is attached, with the generation of the grant as publish context.
async fn mark_attached(
    cluster: &Cluster,
    known: &VolumeAttachment,
    generation: Option<Generation>,
) -> Result<Next> {
    let metadata = attaching::context(generation);
    let status = known.status.as_ref();
    let has = status.and_then(|status| status.attachment_metadata.as_ref());
    let has = has.and_then(|metadata| metadata.get(GENERATION));
    let is_said = status.is_some_and(|status| status.attached && status.attach_error.is_none());
    if is_said && has == metadata.get(GENERATION) {
        return Ok(Next::Done);
    }
    let status = json!({
        "attached": true, "attachError": null, "attachmentMetadata": metadata,
    });
    let what = "cannot write the status of VolumeAttachment";
    cluster.attachments.patch_status(known, json!({ "status": status }), what).await?;
    cluster.metrics.write("attachment");
    tracing::info!(attachment = known.name_any(), node = known.spec.node_name, "attached");
    Ok(Next::Done)
}

async fn detach(cluster: &Cluster, known: &Arc<VolumeAttachment>) -> Result<Next> {
    if !known.finalizers().contains(&cluster.finalizer) {
        // It was never a request, or was detached.
        return Ok(Next::Done);
    }
    let node = &known.spec.node_name;
    let Some(handle) = handle(cluster, known).await? else {
        // external-attacher has added the finalizer, and nothing says which volume it was.
        return finish_detach(cluster, known).await;
    };
    let grant = grant_name(&cluster.config.driver, &handle);
    if attaching::is_requested(cluster, &grant, node, &known.name_any()) {
        return finish_detach(cluster, known).await;
    }
    match attaching::unpublished(cluster, &grant, node).await {
        Ok(()) => finish_detach(cluster, known).await,
        Err(error) => {
            // The deletion has had the grant looked at. This must not do it again: a decision that waits has its
            // attachments looked at, and the two would never end.
            let since = known.metadata.deletion_timestamp.as_ref();
            let since = since.map_or(Time(0), |time| seconds(time.0));
            if since.is_older_than(DETACH_SHOWN_AFTER_S, api::now()) {
                // A decision that fails has written its error already. Two errors in turn would be written again and
                // again.
                let error = cluster.failures.get(&grant).unwrap_or(error);
                save_error(cluster, &known.name_any(), &error).await?;
                return Ok(Next::Done);
            }
            Ok(Next::After(Duration::from_secs(DETACH_SHOWN_AFTER_S)))
        }
    }
}

/// Returns the volume of an attachment that is being deleted: from its annotation, so that a PersistentVolume that
/// is gone does not matter, or from the source.
async fn handle(cluster: &Cluster, known: &VolumeAttachment) -> Result<Option<String>> {
    if let Some(handle) = known.annotations().get(VOLUME_ANNOTATION) {
        return Ok(Some(handle.clone()));
    }
    let volume = match &known.spec.source.persistent_volume_name {
        Some(name) => cluster.persistent_volume(name).await?,
        None => None,
    };
    let source = source::of_attachment(known, volume.as_deref());
    Ok(source.ok().map(|source| source.handle))
}

/// Removes the finalizer, and then writes that the volume is detached, in case another finalizer keeps the
/// attachment.
async fn finish_detach(cluster: &Cluster, known: &VolumeAttachment) -> Result<Next> {
    let kept: Vec<&String> =
        known.finalizers().iter().filter(|known| **known != cluster.finalizer).collect();
    let body = json!({ "metadata": { "finalizers": kept } });
    let what = "cannot remove the finalizer of VolumeAttachment";
    let written = cluster.attachments.patch(known, body, what).await?;
    cluster.metrics.write("attachment");
    tracing::info!(attachment = known.name_any(), node = known.spec.node_name, "detached");
    if kept.is_empty() {
        // The API server has removed it with its last finalizer.
        cluster.attachments.mirror.remove(&known.name_any());
    } else {
        let status = json!({
            "attached": false, "attachError": null, "detachError": null, "attachmentMetadata": null,
        });
        let what = "cannot write the status of VolumeAttachment";
        cluster.attachments.patch_status(&written, json!({ "status": status }), what).await?;
    }
    if let Some(volume) = &known.spec.source.persistent_volume_name {
        cluster.queue.add(Key::Volume(volume.clone()));
    }
    Ok(Next::Done)
}

/// Writes an error to the status of an attachment: as attachError, or as detachError if it is being deleted. The
/// same error is not written again.
pub(crate) async fn save_error(cluster: &Cluster, name: &str, error: &Error) -> Result<()> {
    let Some(known) = cluster.attachments.mirror.get(name) else { return Ok(()) };
    let deleting = known.metadata.deletion_timestamp.is_some();
    let status = known.status.as_ref();
    if !deleting && status.is_some_and(|status| status.attached) {
        return Ok(());
    }
    let said = status.and_then(|status| {
        if deleting { status.detach_error.as_ref() } else { status.attach_error.as_ref() }
    });
    let (text, code) = (shortened(message(error)), grpc_code(error.kind()));
    let is_same = said.is_some_and(|said| said.message.as_ref() == Some(&text));
    if is_same {
        return Ok(());
    }
    let field = if deleting { "detachError" } else { "attachError" };
    let time = timestamp().to_string();
    let attached = status.is_some_and(|status| status.attached);
    let entry = json!({ "time": time, "message": text, "errorCode": code });
    let body = json!({ "status": { "attached": attached, field: entry } });
    let what = "cannot write the status of VolumeAttachment";
    cluster.attachments.patch_status(&known, body, what).await?;
    cluster.metrics.write("attachment");
    Ok(())
}

/// Shortens a message to [`MAX_MESSAGE`].
fn shortened(mut text: String) -> String {
    const END: &str = " …";
    if text.len() > MAX_MESSAGE {
        let mut ends = (0..=MAX_MESSAGE - END.len()).rev();
        let end = ends.find(|end| text.is_char_boundary(*end)).unwrap_or_default();
        text.truncate(end);
        text.push_str(END);
    }
    text
}

fn with(finalizers: &[String], finalizer: &str) -> Vec<String> {
    let mut finalizers = finalizers.to_vec();
    if !finalizers.iter().any(|known| known == finalizer) {
        finalizers.push(finalizer.to_owned());
    }
    finalizers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_cut_between_two_characters() {
        let longest = "a".repeat(MAX_MESSAGE);
        assert_eq!(shortened(longest.clone()), longest);
        for begin in ["", "a", "aa"] {
            let cut = shortened(begin.to_owned() + &"€".repeat(MAX_MESSAGE));
            assert!((MAX_MESSAGE - 3..=MAX_MESSAGE).contains(&cut.len()), "{}", cut.len());
            assert!(cut.starts_with(begin) && cut.ends_with("€ …"), "{cut}");
        }
    }
}
