//! ControllerPublish and ControllerUnpublish, for external-attacher in the place of the own attacher. The calls
//! decide nothing: they make the VolumeAttachment a request or withdraw it, and wait for the answer of the grant.
//!
//! A request is stored in the VolumeAttachment, as with the own attacher. A call may therefore be interrupted
//! anywhere and repeated, also after another process has become the leader.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::controller::Request;
use cleat_grants::object::Mode;
use kube::ResourceExt;
use serde_json::json;
use tokio::time::{Instant, timeout_at};

use crate::attaching::{self, Way};
use crate::call_server::{CallAnswer, Calls, Publish};
use crate::cluster::{BY_NODE, Cluster, Key, grant_of};
use crate::grant::{GRANT_LABEL, VOLUME_ANNOTATION, grant_name};
use crate::objects::VolumeAttachment;
use crate::queue::CONFLICT;
use crate::source::{self, MODE_ANNOTATION, NODE_ID_ANNOTATION, Source};
use crate::storage::Backing;

/// How long a call waits for its VolumeAttachment: the watch may be later than the call.
const ATTACHMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// The calls, as the leader answers them. A process that does not lead any more has no cluster.
#[derive(Debug)]
pub(crate) struct OfLeader(Weak<Cluster>);

impl OfLeader {
    pub(crate) fn new(cluster: &Arc<Cluster>) -> Self {
        Self(Arc::downgrade(cluster))
    }

    fn cluster(&self) -> Result<Arc<Cluster>> {
        self.0.upgrade().ok_or_else(|| {
            let message = "this controller is not the leader any more";
            Error::new(ErrorKind::Unavailable, message).with_repair("repeat the call")
        })
    }
}

impl Calls for OfLeader {
    fn publish<'a>(
        &'a self,
        call: &'a Publish,
        deadline: Instant,
    ) -> CallAnswer<'a, BTreeMap<String, String>> {
        Box::pin(async move { publish(&*self.cluster()?, call, deadline).await })
    }

    fn unpublish<'a>(
        &'a self,
        volume: &'a str,
        node_id: Option<&'a str>,
        deadline: Instant,
    ) -> CallAnswer<'a, ()> {
        Box::pin(async move { unpublish(&*self.cluster()?, volume, node_id, deadline).await })
    }

    fn published(&self) -> Result<BTreeMap<String, BTreeSet<String>>> {
        self.cluster().map(|cluster| published(&cluster))
    }
}

async fn publish(
    cluster: &Cluster,
    call: &Publish,
    deadline: Instant,
) -> Result<BTreeMap<String, String>> {
    let node = known_node(cluster, &call.node_id).ok_or_else(|| {
        let message = format!("no node has the node id {} of the driver", call.node_id);
        Error::new(ErrorKind::NotFound, message)
            .with_repair(format!("start the agent on node {}: cleat node", call.node_id))
    })?;
    let source = Source { handle: call.volume.clone(), mode: call.mode };
    if attaching::way(cluster, &source, &node, || Ok(call.node_id.clone()))? == Way::Local {
        return Ok(attaching::context(None));
    }
    let grant = grant_name(&cluster.config.driver, &call.volume);
    // An earlier failure is not an answer to this call.
    cluster.failures.remove(&grant);
    request(cluster, &source, call, &node, deadline).await?;
    cluster.queue.add(Key::Grant(grant.clone()));
    let request = Request { node, mode: call.mode, pod_uids: Vec::new() };
    let mut changes = cluster.changes.subscribe();
    loop {
        let pending = match attaching::published(cluster, &grant, &request) {
            Err(error) if error.kind() == ErrorKind::Aborted => error,
            answer => return answer.map(|generation| attaching::context(Some(generation))),
        };
        if let Some(failure) = cluster.failures.get(&grant) {
            return Err(failure);
        }
        if timeout_at(deadline, changes.changed()).await.is_err() {
            return Err(pending);
        }
    }
}

async fn unpublish(
    cluster: &Cluster,
    volume: &str,
    node_id: Option<&str>,
    deadline: Instant,
) -> Result<()> {
    let grant = grant_name(&cluster.config.driver, volume);
    let nodes = match node_id {
        Some(id) => vec![detached_node(cluster, &grant, id).await?],
        None => {
            let known = cluster.grants.refresh(&grant).await?;
            let holders = known.iter().flat_map(|grant| &grant.spec.holders);
            holders.map(|holder| holder.node.clone()).collect()
        }
    };
    cluster.failures.remove(&grant);
    for node in nodes {
        unpublish_node(cluster, &grant, &node, deadline).await?;
    }
    Ok(())
}

/// Returns the nodes that have grants, and those with attached volumes that are stored on them.
fn published(cluster: &Cluster) -> BTreeMap<String, BTreeSet<String>> {
    let mut published: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for grant in cluster.grants.mirror.all() {
        let Some(volume) = grant.volume() else { continue };
        for holder in &grant.spec.holders {
            let id = node_id(cluster, &holder.node);
            published.entry(volume.to_owned()).or_default().insert(id);
        }
    }
    for known in cluster.attachments.mirror.all() {
        let is_attached = known.status.as_ref().is_some_and(|status| status.attached);
        if !is_attached || grant_of(&known).is_some() {
            continue;
        }
        let volume = known.spec.source.persistent_volume_name.as_ref();
        let volume = volume.and_then(|name| cluster.volumes.mirror.get(name));
        let Ok(source) = source::of_attachment(&known, volume.as_deref()) else { continue };
        let id = node_id(cluster, &known.spec.node_name);
        let backing = cluster.storage.find(&source.handle);
        if matches!(backing, Ok(Backing::Local { node_id }) if node_id == id) {
            published.entry(source.handle).or_default().insert(id);
        }
    }
    published
}

/// Returns the id of a node; its name, if the driver is not registered there any more.
fn node_id(cluster: &Cluster, node: &str) -> String {
    let known = cluster.csi_nodes.mirror.get(node);
    let mut drivers = known.iter().flat_map(|known| &known.spec.drivers);
    let driver = drivers.find(|known| known.name == cluster.config.driver);
    driver.map_or_else(|| node.to_owned(), |driver| driver.node_id.clone())
}

/// Makes the VolumeAttachment of a call a request.
async fn request(
    cluster: &Cluster,
    source: &Source,
    call: &Publish,
    node: &str,
    deadline: Instant,
) -> Result<()> {
    let give_up_at = deadline.min(Instant::now() + ATTACHMENT_TIMEOUT);
    let mut changes = cluster.changes.subscribe();
    loop {
        let known = attachment(cluster, &source.handle, node).await?;
        if let Some(known) = known.filter(|known| known.finalizers().contains(&cluster.finalizer)) {
            match source::request(&known, &cluster.finalizer) {
                Some(request) if request.mode == source.mode => return Ok(()),
                Some(request) => return Err(other_mode(source, node, request.mode)),
                None => {}
            }
            let (id, finalizers) = (call.node_id.clone(), known.finalizers());
            let made = attaching::make_request(cluster, &known, source, id, finalizers).await;
            match made {
                // external-attacher has written meanwhile. The present state was read.
                Err(error) if error.kind() == ErrorKind::Aborted && Instant::now() < deadline => {
                    tokio::time::sleep(CONFLICT).await;
                    continue;
                }
                other => return other.map(|_| ()),
            }
        }
        if timeout_at(give_up_at, changes.changed()).await.is_err() {
            let (volume, finalizer) = (&source.handle, &cluster.finalizer);
            let message = format!(
                "cannot attach volume {volume} to node {node}: no VolumeAttachment with the finalizer \
                 {finalizer} asks for it"
            );
            return Err(Error::new(ErrorKind::Unsupported, message)
                .with_repair("call it through external-attacher"));
        }
    }
}

/// Withdraws the requests of a node, and waits until it has no grant.
async fn unpublish_node(
    cluster: &Cluster,
    grant: &str,
    node: &str,
    deadline: Instant,
) -> Result<()> {
    let mut changes = cluster.changes.subscribe();
    loop {
        match withdraw(cluster, grant, node).await {
            // The attachment was deleted meanwhile, for example. The present state was read.
            Err(error) if error.kind() == ErrorKind::Aborted && Instant::now() < deadline => {
                tokio::time::sleep(CONFLICT).await;
            }
            Ok(true) => return Ok(()),
            Ok(false) => break,
            Err(error) => return Err(error),
        }
    }
    cluster.queue.add(Key::Grant(grant.to_owned()));
    loop {
        let pending = match attaching::unpublished(cluster, grant, node).await {
            Err(error) if error.kind() == ErrorKind::Aborted => error,
            answer => return answer,
        };
        if let Some(failure) = cluster.failures.get(grant) {
            return Err(failure);
        }
        if timeout_at(deadline, changes.changed()).await.is_err() {
            return Err(pending);
        }
    }
}

/// Withdraws the requests of a node. Returns whether one of them stays.
async fn withdraw(cluster: &Cluster, grant: &str, node: &str) -> Result<bool> {
    let attachments = cluster.attachments_of(grant);
    let ending = attachments
        .iter()
        .find(|known| known.spec.node_name == node && known.metadata.deletion_timestamp.is_some());
    // Of two attachments of one volume on one node, the end of one leaves the other.
    let ending = ending.map(|known| known.name_any());
    if let Some(ending) = &ending
        && attaching::is_requested(cluster, grant, node, ending)
    {
        return Ok(true);
    }
    for known in attachments.iter().filter(|known| known.spec.node_name == node) {
        if source::request(known, &cluster.finalizer).is_some() {
            let annotations = json!({ VOLUME_ANNOTATION: null, MODE_ANNOTATION: null });
            let labels = json!({ GRANT_LABEL: null });
            let body = json!({ "metadata": { "annotations": annotations, "labels": labels } });
            let what = "cannot withdraw the request of VolumeAttachment";
            cluster.attachments.patch(known, body, what).await?;
            cluster.metrics.write("attachment");
        }
    }
    Ok(false)
}

/// Returns the VolumeAttachment that asks for a volume on a node and is not being deleted.
async fn attachment(
    cluster: &Cluster,
    handle: &str,
    node: &str,
) -> Result<Option<Arc<VolumeAttachment>>> {
    for known in cluster.attachments.mirror.find(BY_NODE, node) {
        if known.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let volume = match &known.spec.source.persistent_volume_name {
            Some(name) => cluster.persistent_volume(name).await?,
            None => None,
        };
        let source = source::of_attachment(&known, volume.as_deref());
        if source.is_ok_and(|source| source.handle == handle) {
            return Ok(Some(known));
        }
    }
    Ok(None)
}

/// Returns the node on which the driver has registered with this id.
fn known_node(cluster: &Cluster, id: &str) -> Option<String> {
    let is_meant = |node: &Arc<k8s_openapi::api::storage::v1::CSINode>| {
        let driver = &cluster.config.driver;
        node.spec.drivers.iter().any(|known| known.name == *driver && known.node_id == id)
    };
    let named = cluster.csi_nodes.mirror.get(id).filter(is_meant);
    named
        .or_else(|| cluster.csi_nodes.mirror.all().into_iter().find(is_meant))
        .map(|n| n.name_any())
}

/// Returns the node with this id, also if it is gone. Nodes of cleat have their names as ids, so a node with the volume
/// and this name comes first, and then the node whose attachment has recorded the id. CSINodes do not count: the kubelet of
/// a node writes its own, and could name itself as another node that still has the volume.
async fn detached_node(cluster: &Cluster, grant: &str, id: &str) -> Result<String> {
    let requests = cluster.attachments_of(grant);
    let Some(recorded) = recorded_node(cluster, &requests, id).filter(|node| node != id) else {
        return Ok(id.to_owned());
    };
    if requests.iter().any(|known| known.spec.node_name == id) {
        return Ok(id.to_owned());
    }
    // The mirror may be old, and the wrong node would be told from a holder too late.
    let known = cluster.grants.refresh(grant).await?;
    let mut holders = known.iter().flat_map(|grant| &grant.spec.holders);
    let is_holder = holders.any(|holder| holder.node == id);
    Ok(if is_holder { id.to_owned() } else { recorded })
}

/// Returns the node whose attachment has recorded this id: one of the volume, or another one, because a withdrawn request
/// does not name its volume any more.
fn recorded_node(
    cluster: &Cluster,
    requests: &[Arc<VolumeAttachment>],
    id: &str,
) -> Option<String> {
    let has_id = |known: &&Arc<VolumeAttachment>| {
        let is_ours = known.spec.attacher == cluster.config.driver;
        let recorded = known.annotations().get(NODE_ID_ANNOTATION);
        is_ours && recorded.is_some_and(|recorded| recorded == id)
    };
    let node = |known: &Arc<VolumeAttachment>| known.spec.node_name.clone();
    let of_volume = requests.iter().find(has_id).map(node);
    of_volume.or_else(|| cluster.attachments.mirror.all().iter().find(has_id).map(node))
}

fn other_mode(source: &Source, node: &str, mode: Mode) -> Error {
    let message = format!(
        "cannot attach volume {} to node {node} in the mode {:?}: it is requested there in the mode {mode:?}",
        source.handle, source.mode
    );
    Error::new(ErrorKind::AlreadyExists, message).with_repair("detach it first")
}

#[cfg(test)]
mod tests {
    use cleat_grants::object::{Generation, GrantSpec, Holder, Time};

    use super::*;
    use crate::fake::{self, DRIVER};
    use crate::grant::VolumeGrant;

    const HANDLE: &str = "rbd/c/p//v";

    /// Returns a cluster with a grant of the nodes `holders`, and with an attachment on the node `other` that has recorded
    /// the id `victim`, as the CSINode of `other` says. The attachment asks for the volume, or has withdrawn its request.
    fn cluster(holders: &[&str], asks: bool) -> Cluster {
        let holder = |node: &&str| Holder {
            node: (*node).to_owned(),
            generation: Generation(1),
            mode: Mode::ReadWrite,
            revoked: false,
            since: Time(0),
            pod_uids: Vec::new(),
        };
        let holders = holders.iter().map(holder).collect();
        let spec = GrantSpec { generation: Generation(1), holders };
        let mut grant = VolumeGrant::new(DRIVER, HANDLE, spec);
        grant.metadata.resource_version = Some("1".to_owned());
        let stored = json!(grant);
        let cluster = fake::cluster_of(move |_, _| (200, stored.clone()));
        let registered = json!({
            "metadata": { "name": "other", "resourceVersion": "1" },
            "spec": { "drivers": [{ "name": DRIVER, "nodeID": "victim" }] },
        });
        cluster.csi_nodes.mirror.put(serde_json::from_value(registered).unwrap());
        let mut annotations = json!({ NODE_ID_ANNOTATION: "victim" });
        if asks {
            annotations[VOLUME_ANNOTATION] = json!(HANDLE);
        }
        let attachment = json!({
            "metadata": { "name": "by-other", "resourceVersion": "1", "annotations": annotations },
            "spec": { "attacher": DRIVER, "nodeName": "other", "source": {} },
        });
        cluster.attachments.mirror.put(serde_json::from_value(attachment).unwrap());
        cluster
    }

    async fn detached(cluster: &Cluster, id: &str) -> String {
        detached_node(cluster, &grant_name(DRIVER, HANDLE), id).await.unwrap()
    }

    #[tokio::test]
    async fn a_detach_is_about_the_holder_with_that_name_whatever_another_node_calls_itself() {
        for asks in [true, false] {
            assert_eq!(detached(&cluster(&["victim"], asks), "victim").await, "victim");
            assert_eq!(detached(&cluster(&["other", "victim"], asks), "victim").await, "victim");
            // The driver gives its nodes other ids than their names.
            assert_eq!(detached(&cluster(&["other"], asks), "victim").await, "other");
        }
    }

    #[tokio::test]
    async fn a_node_that_is_only_known_by_its_csi_node_is_not_another_one() {
        let cluster = cluster(&[], true);
        cluster.attachments.mirror.remove("by-other");
        assert_eq!(detached(&cluster, "victim").await, "victim");
    }
}
