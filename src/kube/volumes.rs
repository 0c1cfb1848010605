//! Decides about one volume, step by step: `cleat_grants` decides, and this module reads, writes and fences.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::controller::{self, Change, RevocationReason, Step, View, Waiting};
use cleat_grants::object::{FenceEntry, GrantSpec, Time, Version};
use cleat_grants::policy::{FencingReason, NodeState, Policy};
use cleat_grants::record::{Record, Target};
use kube::ResourceExt;
use kube::api::{ListParams, PostParams};
use serde_json::json;

use crate::api::{self, call};
use crate::cluster::{Cluster, Key, grant_of};
use crate::events::describe;
use crate::grant::{
    self, FINALIZER, GRANT_LABEL, MAX_WAITING, VOLUME_ANNOTATION, VolumeGrant, grant_label,
};
use crate::lost;
use crate::objects::VolumeAttachment;
use crate::queue::Next;
use crate::source;
use crate::storage::{self, Backing, Fencing};

/// The maximum number of steps before other volumes get their turn.
const MAX_STEPS: usize = 16;

/// How long the controller waits before it writes down what a volume waits for. A normal move is faster, and
/// causes no such write.
const WAITING_SHOWN_AFTER_S: u64 = 2;

/// How long after the API server has shown something else than the mirrors a volume is looked at again.
const REQUEST_DELAY: Duration = Duration::from_millis(500);

/// Decides about the volume of the grant `name` until it has to wait.
pub(crate) async fn decide(cluster: &Cluster, name: &str) -> Result<Next> {
    let mut read: Option<ReadRecord> = None;
    for _ in 0..MAX_STEPS {
        let Some(volume) = ObservedVolume::observe(cluster, name)? else { return Ok(Next::Done) };
        let stored = volume.grant.as_deref().map(VolumeGrant::stored);
        let (requests, nodes) = (&volume.requests, &volume.nodes);
        read = read.filter(|known| known.is_of(&volume));
        let none = Record::default();
        let is_gone = read.as_ref().is_some_and(|known| known.record.is_none());
        let record = read.as_ref().map(|known| known.record.as_ref().unwrap_or(&none));
        let view = View { grant: stored.as_ref(), requests, nodes, record, is_gone };
        let now = api::now();
        // Only a node that wants the volume has to see it.
        if !volume.requests.is_empty()
            && volume.grant.as_deref().is_some_and(VolumeGrant::lacks_labels)
        {
            volume.replace(volume.grant(volume.version().map(Version))?, "labels").await?;
            continue;
        }
        match controller::decide(&view, &cluster.config.policy, now) {
            Step::Wait(waiting) => return volume.wait(&waiting, now).await,
            Step::ReadRecord => {
                let record = volume.read_record().await?;
                read = Some(ReadRecord { version: volume.version(), record });
            }
            Step::WriteSpec { change: Change::Revoked(node, _, reason), .. }
                if reason == RevocationReason::NotRequested
                    && volume.is_requested(&node).await? =>
            {
                return Ok(Next::After(REQUEST_DELAY));
            }
            Step::Fence(target, reason) if !volume.may_fence(&target.node, reason).await? => {
                return Ok(Next::After(REQUEST_DELAY));
            }
            step => {
                let name = step.name();
                volume.perform(step).await?;
                (cluster.config.after_step)(name);
                read = None;
            }
        }
    }
    Ok(Next::After(Duration::ZERO))
}

/// A record that was read.
struct ReadRecord {
    /// The version of the grant that was observed before; none if there was no grant.
    version: Option<String>,
    /// `None` if the volume does not exist, and nothing requested it.
    record: Option<Record>,
}

impl ReadRecord {
    /// Returns whether a decision about `volume` may depend on the record: a claim could have been made between the read
    /// and a newer version of the grant.
    fn is_of(&self, volume: &ObservedVolume<'_>) -> bool {
        let is_requested = !volume.requests.is_empty();
        self.version == volume.version() && !(self.record.is_none() && is_requested)
    }
}

/// One volume, as it was observed for one step.
pub(crate) struct ObservedVolume<'a> {
    pub(crate) cluster: &'a Cluster,
    name: &'a str,
    pub(crate) handle: String,
    storage: Arc<dyn Fencing>,
    pub(crate) grant: Option<Arc<VolumeGrant>>,
    requests: Vec<controller::Request>,
    nodes: BTreeMap<String, NodeState>,
}

impl<'a> ObservedVolume<'a> {
    /// Returns `None` if there is nothing to decide.
    fn observe(cluster: &'a Cluster, name: &'a str) -> Result<Option<Self>> {
        // A grant that cannot be read may have a holder.
        cluster.grants.check(name)?;
        let grant = cluster.grants.mirror.get(name);
        let requests = cluster.requests(name);
        if grant.is_none() && requests.is_empty() {
            return Ok(None);
        }
        let of_grant = grant.as_ref().and_then(|grant| grant.volume()).map(str::to_owned);
        let attachments = cluster.attachments_of(name);
        let of_request = || {
            let annotations = attachments.iter().map(|known| known.annotations());
            annotations.filter_map(|known| known.get(VOLUME_ANNOTATION)).next().cloned()
        };
        let Some(handle) = of_grant.or_else(of_request) else {
            let message = format!("grant {name} has no annotation {VOLUME_ANNOTATION}");
            let repair = "delete the grant: it is made anew when the volume is requested";
            return Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(repair));
        };
        let Backing::Granted(storage) = cluster.storage.find(&handle)? else { return Ok(None) };
        let holders = grant.iter().flat_map(|grant| &grant.spec.holders);
        let holders = holders.map(|holder| holder.node.clone());
        let asking = requests.iter().map(|request| request.node.clone());
        let fenced = grant.iter().flat_map(|grant| &grant.status.grant.fences);
        let fenced = fenced.map(|fence| fence.node.clone());
        let known = grant.iter().flat_map(|grant| &grant.status.grant.nodes);
        let known = known.map(|entry| entry.node.clone());
        let names: BTreeSet<String> = holders.chain(asking).chain(fenced).chain(known).collect();
        let nodes = cluster.node_states(names.iter().map(String::as_str));
        Ok(Some(Self { cluster, name, handle, storage, grant, requests, nodes }))
    }

    /// Returns a volume that nothing requests and that no node holds; `None` if its clients cannot be fenced.
    pub(crate) fn of_handle(cluster: &'a Cluster, name: &'a str, handle: &str) -> Option<Self> {
        let Ok(Backing::Granted(storage)) = cluster.storage.find(handle) else { return None };
        let grant = cluster.grants.mirror.get(name);
        let (requests, nodes) = (Vec::new(), BTreeMap::new());
        Some(Self { cluster, name, handle: handle.to_owned(), storage, grant, requests, nodes })
    }

    /// Returns the version of the grant.
    fn version(&self) -> Option<String> {
        self.grant.as_ref()?.resource_version()
    }

    /// Carries out a step that changes something.
    pub(crate) async fn perform(&self, step: Step) -> Result<()> {
        match step {
            Step::Wait(_) | Step::ReadRecord => Ok(()),
            Step::Create(spec) => self.create(spec).await,
            Step::WriteSpec { version, spec, change } => {
                self.write_spec(version, spec, &change).await
            }
            Step::WriteFences { version, fences } => self.write_fences(version, fences).await,
            Step::Forget { version, node } => self.forget(version, &node).await,
            Step::Fence(target, reason) => self.fence(target, reason).await,
            Step::Unfence(client) => {
                tracing::info!(grant = self.name, client, "the fence of the client ends");
                self.at_storage(move |storage, deadline| storage.unfence(&client, deadline)).await
            }
            Step::RemoveFinalizer(version) => self.remove_finalizer(version).await,
        }
    }

    async fn create(&self, spec: GrantSpec) -> Result<()> {
        for holder in &spec.holders {
            let (node, generation) = (&holder.node, holder.generation);
            tracing::info!(grant = self.name, node, %generation, "granted");
        }
        let object = VolumeGrant::new(&self.cluster.config.driver, &self.handle, spec);
        let grants = &self.cluster.grants;
        let parameters = PostParams::default();
        let request = grants.api.create(&parameters, &object);
        let answer = call(|| format!("cannot create grant {}", self.name), request).await;
        self.cluster.metrics.write("create");
        grants.written(self.name, answer).await?;
        self.look_at_attachments();
        Ok(())
    }

    async fn write_spec(
        &self,
        version: Option<Version>,
        spec: GrantSpec,
        change: &Change,
    ) -> Result<()> {
        let mut object = self.grant(version)?;
        object.spec = spec;
        let written = self.replace(object, "spec").await?;
        tracing::info!(grant = self.name, "{change:?}");
        if let Some((reason, note)) = describe(change) {
            self.cluster.events.publish(&written, reason, note).await;
        }
        self.look_at_attachments();
        Ok(())
    }

    /// Replaces the object without its status, with the labels of its nodes. `what` is counted.
    async fn replace(
        &self,
        mut object: VolumeGrant,
        what: &'static str,
    ) -> Result<Arc<VolumeGrant>> {
        object.show_nodes();
        let grants = &self.cluster.grants;
        let parameters = PostParams::default();
        let request = grants.api.replace(self.name, &parameters, &object);
        let answer = call(|| format!("cannot write grant {}", self.name), request).await;
        self.cluster.metrics.write(what);
        grants.written(self.name, answer).await
    }

    async fn write_fences(&self, version: Option<Version>, fences: Vec<FenceEntry>) -> Result<()> {
        let mut object = self.grant(version)?;
        let known = object.status.grant.fences.clone();
        object.status.grant.fences = fences;
        let written = self.write_status(&object).await?;
        for fence in &written.status.grant.fences {
            if !known.contains(fence) {
                self.cluster.metrics.fenced();
                let FenceEntry { node, generation, proof, .. } = fence;
                let note = format!("node {node} is fenced at generation {generation}: {proof}");
                self.cluster.events.publish(&written, "Fenced", note).await;
            }
        }
        self.look_at_attachments();
        Ok(())
    }

    async fn forget(&self, version: Option<Version>, node: &str) -> Result<()> {
        let mut object = self.grant(version)?;
        object.status.grant.forget(node);
        self.write_status(&object).await?;
        tracing::info!(grant = self.name, node, "removed a node from the status");
        Ok(())
    }

    async fn write_status(&self, object: &VolumeGrant) -> Result<Arc<VolumeGrant>> {
        let grants = &self.cluster.grants;
        let parameters = PostParams::default();
        let request = grants.api.replace_status(self.name, &parameters, object);
        let what = || format!("cannot write the status of grant {}", self.name);
        let answer = call(what, request).await;
        self.cluster.metrics.write("status");
        grants.written(self.name, answer).await
    }

    /// Fences at the storage. The record that is read afterwards is the proof.
    async fn fence(&self, target: Target, reason: FencingReason) -> Result<()> {
        let (node, generation) = (target.node.clone(), target.generation);
        tracing::warn!(grant = self.name, node, %generation, ?reason, "fencing");
        self.at_storage(move |storage, deadline| storage.fence(&target, deadline)).await
    }

    async fn remove_finalizer(&self, version: Option<Version>) -> Result<()> {
        let object = self.grant(version)?;
        let kept: Vec<&String> =
            object.finalizers().iter().filter(|known| *known != FINALIZER).collect();
        let body = json!({ "metadata": { "finalizers": kept } });
        let what = "cannot remove the finalizer of grant";
        self.cluster.grants.patch(&object, body, what).await?;
        self.cluster.grants.mirror.remove(self.name);
        tracing::info!(grant = self.name, "removed");
        self.look_at_attachments();
        Ok(())
    }

    /// Returns the object at `version`, which the write requires. `None`, which tests of the rules use, leaves the
    /// version out.
    fn grant(&self, version: Option<Version>) -> Result<VolumeGrant> {
        let missing = || Error::new(ErrorKind::Internal, format!("grant {} is missing", self.name));
        let mut object = self.grant.as_deref().ok_or_else(missing)?.clone();
        object.metadata.resource_version = version.map(|version| version.0);
        Ok(object)
    }

    /// Reads the record at the storage; `None` if the volume does not exist any more. If it is requested, that is an
    /// error.
    pub(crate) async fn read_record(&self) -> Result<Option<Record>> {
        match self.at_storage(|storage, deadline| storage.record(deadline)).await {
            Err(error) if error.kind() == ErrorKind::NotFound && self.requests.is_empty() => {
                tracing::warn!(grant = self.name, "no claims: {}", api::message(&error));
                Ok(None)
            }
            other => other.map(Some),
        }
    }

    async fn at_storage<T: Send + 'static>(
        &self,
        run: impl FnOnce(&dyn Fencing, std::time::Instant) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let calls = &self.cluster.calls;
        storage::on_thread(calls, &self.storage, &self.handle, run).await
    }

    /// Looks at the API server whether the volume is still requested for a node, in the mode that it is granted, if the watch
    /// of the attachments has not shown the end of a request. Two watches do not proceed at the same speed: a grant of the
    /// previous leader can arrive before its request, and must not be revoked.
    async fn is_requested(&self, node: &str) -> Result<bool> {
        let attachments = &self.cluster.attachments;
        let of_node = self.cluster.attachments_of(self.name).into_iter();
        let mut shown = of_node
            .filter(|known| known.spec.node_name == node)
            .filter_map(|known| attachments.mirror.shown(&known.name_any()));
        if shown.any(|known| known.metadata.deletion_timestamp.is_some()) {
            return Ok(false);
        }
        let holders = self.grant.iter().flat_map(|grant| &grant.spec.holders);
        let granted = holders.filter(|holder| holder.node == node).map(|holder| holder.mode).next();
        let asks = |known: &VolumeAttachment| {
            let asked = grant_of(known).filter(|grant| grant == self.name);
            let request = asked.and_then(|_| source::request(known, &self.cluster.finalizer));
            request.is_some_and(|request| {
                request.node == node && granted.is_none_or(|mode| mode == request.mode)
            })
        };
        // A request that an earlier version has made has no label, but mostly the name that Kubernetes gives it.
        let name = attachment_name(&self.handle, &self.cluster.config.driver, node);
        if attachments.refresh(&name).await?.is_some_and(|known| asks(&known)) {
            return Ok(true);
        }
        let label = format!("{GRANT_LABEL}={}", grant_label(self.name));
        let selected = attachments.refresh_all(&ListParams::default().labels(&label)).await?;
        Ok(selected.iter().any(|known| asks(known)))
    }

    /// Reads at the API server again what permits a fence.
    async fn may_fence(&self, node: &str, reason: FencingReason) -> Result<bool> {
        if reason == FencingReason::ForcedDetach && self.is_requested(node).await? {
            return Ok(false);
        }
        lost::is_confirmed(self.cluster, node, reason).await
    }

    /// Waits: has the attachments answered, writes down what the volume waits for if that takes long, and returns
    /// when a timeout passes.
    async fn wait(&self, waiting: &[Waiting], now: Time) -> Result<Next> {
        self.look_at_attachments();
        let Some(grant) = &self.grant else { return Ok(Next::Done) };
        let known = &grant.status.waiting;
        let entries: Vec<grant::Waiting> = waiting
            .iter()
            .take(MAX_WAITING)
            .map(|entry| grant::Waiting::new(&entry.node, entry.until, now))
            .map(|new| known.iter().find(|old| old.is_same(&new)).cloned().unwrap_or(new))
            .collect();
        let mut next = self.next_deadline(now);
        if entries != *known {
            let shown_at = self.waits_since(now).0 + WAITING_SHOWN_AFTER_S;
            if entries.is_empty() || now.0 >= shown_at {
                let mut object = VolumeGrant::clone(grant);
                object.status.waiting = entries;
                self.write_status(&object).await?;
            } else {
                next = next.into_iter().chain([shown_at]).min();
            }
        }
        let delay = next.map(|at| Duration::from_secs(at.saturating_sub(now.0).max(1)));
        Ok(delay.map_or(Next::Done, Next::After))
    }

    /// Returns since when the volume waits: since the last revocation, or the last request.
    fn waits_since(&self, now: Time) -> Time {
        let holders = self.grant.iter().flat_map(|grant| &grant.spec.holders);
        let revoked = holders.filter(|holder| holder.revoked).map(|holder| holder.since);
        let attachments = self.cluster.attachments_of(self.name);
        let asked = attachments.iter().filter_map(|known| {
            known.metadata.creation_timestamp.as_ref().map(|time| api::seconds(time.0))
        });
        revoked.chain(asked).filter(|time| *time <= now).max().unwrap_or(now)
    }

    /// Returns the time of the next timeout that may change the decision, in seconds.
    fn next_deadline(&self, now: Time) -> Option<u64> {
        let Policy { release_timeout_s, forced_detach_s, lease_timeout_s, .. } =
            self.cluster.config.policy;
        let mut times = Vec::new();
        let holders = self.grant.iter().flat_map(|grant| &grant.spec.holders);
        for holder in holders.filter(|holder| holder.revoked) {
            times.push(holder.since.0 + release_timeout_s);
            let node = self.nodes.get(&holder.node);
            let not_ready = node.and_then(|node| node.not_ready_since);
            times.extend(not_ready.map(|since| since.0 + forced_detach_s));
            let silent = node.and_then(|node| node.silent_s).zip(lease_timeout_s);
            times.extend(
                silent.map(|(silent_s, timeout_s)| now.0 + timeout_s.saturating_sub(silent_s)),
            );
        }
        times.into_iter().filter(|at| *at > now.0).min()
    }

    fn look_at_attachments(&self) {
        self.cluster.look_at_attachments(&self.cluster.attachments_of(self.name));
    }
}

/// Gives an error of a decision to what waits for it: writes it to the attachments, or has the calls return it.
pub(crate) async fn report(cluster: &Cluster, name: &str, error: &Error) {
    if let Some(object) = cluster.grants.mirror.unreadable(name).filter(|object| object.report()) {
        cluster.events.unreadable_grant(&object, error).await;
    }
    cluster.failures.put(name, error);
    if cluster.config.calls.is_some() {
        cluster.look_at_attachments(&[]);
        return;
    }
    for attachment in cluster.attachments_of(name) {
        let name = attachment.name_any();
        let written = crate::attachments::save_error(cluster, &name, error).await;
        if let Err(error) = written {
            tracing::debug!("{}", error.report());
            cluster.queue.add(Key::Attachment(name));
        }
    }
}

/// Returns for how many seconds the volume has waited that waits for the longest time.
pub(crate) fn oldest_wait_s(cluster: &Cluster, now: Time) -> i64 {
    let grants = cluster.grants.mirror.all();
    let since = grants.iter().flat_map(|grant| &grant.status.waiting).map(|entry| entry.since);
    let oldest = since.min().map_or(0, |since| now.0.saturating_sub(since.0));
    i64::try_from(oldest).unwrap_or(i64::MAX)
}

/// Returns the name that Kubernetes gives the VolumeAttachment of a volume and a node.
pub(crate) fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    let hash = hmac_sha256::Hash::hash(format!("{handle}{driver}{node}").as_bytes());
    let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("csi-{hash}")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use kube::runtime::watcher::Event;
    use serde_json::Value;

    use super::*;
    use crate::fake::{self, DRIVER};
    use crate::grant::grant_name;
    use crate::nodes::OUT_OF_SERVICE;

    const HANDLE: &str = "rbd/c/p//v";

    /// An attachment that no controller of Kubernetes has made, and that is a request for the node `a`.
    fn request(cluster: &Cluster, is_ending: bool) -> VolumeAttachment {
        let name = grant_name(DRIVER, HANDLE);
        let annotations =
            json!({ VOLUME_ANNOTATION: HANDLE, source::MODE_ANNOTATION: "ReadWrite" });
        let deleted = is_ending.then_some("2030-01-01T00:00:00Z");
        serde_json::from_value(json!({
            "metadata": {
                "name": "by-hand", "uid": "1", "resourceVersion": if is_ending { "8" } else { "7" },
                "finalizers": [cluster.finalizer], "annotations": annotations,
                "labels": { GRANT_LABEL: grant_label(&name) }, "deletionTimestamp": deleted,
            },
            "spec": { "attacher": DRIVER, "nodeName": "a", "source": {} },
        }))
        .unwrap()
    }

    fn volume<'a>(cluster: &'a Cluster, name: &'a str) -> ObservedVolume<'a> {
        ObservedVolume::of_handle(cluster, name, HANDLE).unwrap()
    }

    #[tokio::test]
    async fn a_request_that_the_watch_has_not_shown_is_found_whatever_its_name() {
        let name = grant_name(DRIVER, HANDLE);
        let known = request(&fake::cluster(Vec::new()).0, false);
        let (cluster, asked) = fake::cluster(vec![known]);
        assert!(cluster.requests(&name).is_empty());
        assert!(volume(&cluster, &name).is_requested("a").await.unwrap());
        assert!(!volume(&cluster, &name).is_requested("b").await.unwrap());
        assert_eq!(cluster.requests(&name).len(), 1, "it is in the mirror now");
        assert_eq!(asked.lock().unwrap().len(), 4);
        let (cluster, _) = fake::cluster(Vec::new());
        assert!(!volume(&cluster, &name).is_requested("a").await.unwrap());
    }

    #[tokio::test]
    async fn the_end_of_a_request_is_read_only_if_the_watch_has_not_shown_it() {
        let name = grant_name(DRIVER, HANDLE);
        let (cluster, asked) = fake::cluster(Vec::new());
        let ending = request(&cluster, true);
        // The answer of a call: the watch may not have shown other requests yet.
        cluster.attachments.mirror.put(ending.clone());
        assert!(!volume(&cluster, &name).is_requested("a").await.unwrap());
        assert_eq!(std::mem::take(&mut *asked.lock().unwrap()).len(), 2);
        cluster.attachments.mirror.apply(Event::Apply(ending));
        assert!(!volume(&cluster, &name).is_requested("a").await.unwrap());
        assert!(asked.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_record_is_read_again_when_the_grant_has_changed_since() {
        let storage = fake::OneRecord::default();
        let cluster = fake::cluster_with(|_, _| (500, json!({})), Arc::new(storage.clone()));
        let cluster = Arc::new(cluster);
        cluster.grants.mirror.put(fake::revoked(HANDLE, 1, true));
        // The watch shows the next version while the first record is read.
        let shown = Arc::downgrade(&cluster);
        let show = move || {
            drop(shown.upgrade().unwrap().grants.mirror.put(fake::revoked(HANDLE, 2, true)))
        };
        assert!(storage.on_read.set(Box::new(show)).is_ok());
        // Then it writes that the node is free, which fails here.
        let name = grant_name(DRIVER, HANDLE);
        assert!(decide(&cluster, &name).await.is_err());
        assert_eq!(storage.reads.load(Ordering::SeqCst), 2);
    }

    /// The node `a` at a version of the object, with the out-of-service taint or without it, and whether it is ready.
    fn node(version: u64, is_lost: bool, is_ready: bool) -> Value {
        let taint = json!({ "key": OUT_OF_SERVICE, "effect": "NoExecute" });
        let taints = if is_lost { json!([taint]) } else { json!([]) };
        let ready = json!({
            "type": "Ready", "status": if is_ready { "True" } else { "Unknown" },
            "lastTransitionTime": "2020-01-01T00:00:00Z",
        });
        json!({
            "metadata": { "name": "a", "uid": "1", "resourceVersion": version.to_string() },
            "spec": { "taints": taints }, "status": { "conditions": [ready] },
        })
    }

    /// Decides about a volume that the node `a` does not release. `known` is the node in the mirror, and `present` the one
    /// that the API server has. Returns how often the node was fenced.
    async fn fences(known: Option<Value>, present: Option<Value>) -> usize {
        let storage = fake::OneRecord::default();
        let answer = move |_: &str, path: &str| match &present {
            Some(node) if path.contains("/nodes/a") => (200, node.clone()),
            _ if path.contains("labelSelector") => (200, json!({ "metadata": {}, "items": [] })),
            _ => fake::not_found(),
        };
        let cluster = fake::cluster_with(answer, Arc::new(storage.clone()));
        cluster.grants.mirror.put(fake::revoked(HANDLE, 1, false));
        if let Some(node) = known {
            cluster.nodes.mirror.put(serde_json::from_value(node).unwrap());
        }
        decide(&cluster, &grant_name(DRIVER, HANDLE)).await.unwrap();
        // The record of the test does not change, so that a fence is tried several times.
        storage.fences.load(Ordering::SeqCst).min(1)
    }

    #[tokio::test]
    async fn a_node_that_only_the_mirror_shows_as_lost_is_not_fenced() {
        let lives = || node(2, false, true);
        for known in [None, Some(node(1, true, true)), Some(node(1, false, false))] {
            assert_eq!(fences(known, Some(lives())).await, 0);
        }
        assert_eq!(fences(None, None).await, 1, "the node was deleted");
        for lost in [node(1, true, true), node(1, false, false)] {
            assert_eq!(fences(Some(lost.clone()), Some(lost)).await, 1);
        }
    }

    #[tokio::test]
    async fn the_oldest_wait_is_that_of_the_volume_that_waits_for_the_longest_time() {
        let (cluster, _) = fake::cluster(Vec::new());
        assert_eq!(oldest_wait_s(&cluster, Time(1000)), 0);
        for (handle, since) in [("v", vec![900]), ("w", vec![700, 800]), ("x", vec![])] {
            let mut grant = VolumeGrant::new(DRIVER, handle, GrantSpec::default());
            grant.metadata.resource_version = Some("1".to_owned());
            let waiting = since
                .iter()
                .map(|since| grant::Waiting::new("a", controller::Until::Released, Time(*since)));
            grant.status.waiting = waiting.collect();
            cluster.grants.mirror.put(grant);
        }
        assert_eq!(oldest_wait_s(&cluster, Time(1000)), 300);
    }

    #[test]
    fn the_name_of_an_attachment_is_that_of_kubernetes() {
        let name = attachment_name("v", "cleat.csi.storage", "a");
        assert_eq!(name.len(), 68);
        assert!(name.starts_with("csi-"));
    }
}
