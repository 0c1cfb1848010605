//! What the controller has of the cluster: a mirror of each kind of object with the API to change it, the
//! storage, and the queue of what has to be looked at.

use std::collections::BTreeMap;
use std::sync::Arc;

use cleat_core::error::Result;
use cleat_core::random::Random;
use cleat_grants::controller::Request;
use cleat_grants::policy::NodeState;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::storage::v1::CSINode;
use kube::api::Api;
use kube::{Client, Resource, ResourceExt};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::api::call;
use crate::attach_detach::state::Wanted;
use crate::config::Config;
use crate::events::Events;
use crate::failures::Failures;
use crate::grant::{VOLUME_ANNOTATION, VolumeGrant, grant_name};
use crate::kind::Kind;
use crate::metrics::Metrics;
use crate::mirror::Index;
use crate::nodes;
use crate::objects::{Node, PersistentVolume, VolumeAttachment};
use crate::queue::Queue;
use crate::remediation::beats::Beats;
use crate::renewals::Renewals;
use crate::source;
use crate::storage::{Storage, StorageCalls};

/// The number of the index of attachments by the name of their grant.
pub(crate) const BY_GRANT: usize = 0;
/// The number of the index of attachments by their PersistentVolume.
pub(crate) const BY_VOLUME: usize = 1;
/// The number of the index of attachments by their node.
pub(crate) const BY_NODE: usize = 2;

const ATTACHMENT_INDEXES: &[Index<VolumeAttachment>] = &[
    |attachment| grant_of(attachment).into_iter().collect(),
    |attachment| attachment.spec.source.persistent_volume_name.clone().into_iter().collect(),
    |attachment| vec![attachment.spec.node_name.clone()],
];

/// The index of PersistentVolumes by the name of their grant.
const VOLUME_INDEXES: &[Index<PersistentVolume>] = &[|volume| {
    let csi = volume.spec.iter().filter_map(|spec| spec.csi.as_ref());
    csi.map(|csi| grant_name(&csi.driver, &csi.volume_handle)).collect()
}];

/// Returns the name of the grant that an attachment asks for; `None` if it is not a request yet.
pub(crate) fn grant_of(attachment: &VolumeAttachment) -> Option<String> {
    let handle = attachment.annotations().get(VOLUME_ANNOTATION)?;
    Some(grant_name(&attachment.spec.attacher, handle))
}

/// What has to be looked at.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Key {
    /// A VolumeAttachment, by its name.
    Attachment(String),
    /// A volume, by the name of its grant.
    Grant(String),
    /// A PersistentVolume, by its name.
    Volume(String),
    /// The attachments of a PersistentVolume, by its name.
    Wanted(String),
}

/// The cluster as the leader knows it. A new leader begins with an empty one.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) config: Config,
    pub(crate) finalizer: String,
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) calls: StorageCalls,
    pub(crate) attachments: Kind<VolumeAttachment>,
    pub(crate) grants: Kind<VolumeGrant>,
    pub(crate) volumes: Kind<PersistentVolume>,
    pub(crate) nodes: Kind<Node>,
    pub(crate) csi_nodes: Kind<CSINode>,
    pub(crate) leases: Kind<Lease>,
    pub(crate) renewals: Renewals,
    /// When nodes have renewed their Leases, for remediation.
    pub(crate) beats: Arc<Beats>,
    /// The Leases that agents renew, in the namespace of the controller.
    pub(crate) heartbeats: Kind<Lease>,
    pub(crate) queue: Queue<Key>,
    pub(crate) events: Events,
    pub(crate) metrics: Arc<Metrics>,
    /// Sends when a mirror has changed or a decision has failed.
    pub(crate) changes: watch::Sender<()>,
    pub(crate) failures: Failures,
    /// What the attach/detach loop knows, if this controller has it.
    pub(crate) wanted: Option<Wanted>,
}

impl Cluster {
    pub(crate) fn new(
        client: &Client,
        config: &Config,
        storage: Arc<dyn Storage>,
        metrics: Arc<Metrics>,
        random: Random,
    ) -> Self {
        Self {
            finalizer: source::finalizer(&config.driver),
            storage,
            calls: StorageCalls::default(),
            attachments: Kind::new(Api::all(client.clone()), ATTACHMENT_INDEXES),
            grants: Kind::new(Api::all(client.clone()), &[]),
            volumes: Kind::new(Api::all(client.clone()), VOLUME_INDEXES),
            nodes: Kind::new(Api::all(client.clone()), &[]),
            csi_nodes: Kind::new(Api::all(client.clone()), &[]),
            leases: Kind::new(Api::namespaced(client.clone(), nodes::LEASES), &[]),
            renewals: Renewals::default(),
            beats: Arc::default(),
            heartbeats: Kind::new(Api::namespaced(client.clone(), config.namespace(client)), &[]),
            queue: Queue::new(random),
            events: Events::new(client.clone(), &config.identity),
            wanted: config.attach_detach.then(|| Wanted::new(client)),
            config: config.clone(),
            metrics,
            changes: watch::Sender::new(()),
            failures: Failures::default(),
        }
    }

    /// Returns the attachments of a volume, oldest first.
    pub(crate) fn attachments_of(&self, grant: &str) -> Vec<Arc<VolumeAttachment>> {
        let mut attachments = self.attachments.mirror.find(BY_GRANT, grant);
        attachments.sort_by_key(|attachment| {
            let created = attachment.metadata.creation_timestamp.as_ref().map(|time| time.0);
            (created, attachment.name_any())
        });
        attachments
    }

    /// Returns the requests for a volume, oldest first.
    pub(crate) fn requests(&self, grant: &str) -> Vec<Request> {
        let attachments = self.attachments_of(grant);
        let request = |known: &Arc<VolumeAttachment>| {
            let request = source::request(known, &self.finalizer)?;
            let pod_uids = self.pods_of(known);
            Some(Request { pod_uids, ..request })
        };
        attachments.iter().filter_map(request).collect()
    }

    /// Returns the UIDs of the pods that need an attachment, if this controller knows pods.
    fn pods_of(&self, known: &VolumeAttachment) -> Vec<String> {
        let volume = known.spec.source.persistent_volume_name.as_ref();
        let volume = volume.and_then(|name| self.volumes.mirror.get(name));
        let pods = self.wanted.as_ref().zip(volume);
        pods.map(|(wanted, volume)| wanted.uids_of(&volume, &known.spec.node_name))
            .unwrap_or_default()
    }

    /// Returns the states of those of `names` that exist.
    pub(crate) fn node_states<'a>(
        &self,
        names: impl Iterator<Item = &'a str>,
    ) -> BTreeMap<String, NodeState> {
        let now = Instant::now();
        let state = |name: &str| {
            let Some(node) = self.nodes.mirror.get(name) else {
                // It exists. A Node that is missing counts as deleted, and is fenced.
                let exists = self.nodes.mirror.unreadable(name).is_some();
                return exists.then(|| (name.to_owned(), NodeState::default()));
            };
            let silent_s = self.renewals.silent_s(name, now);
            Some((name.to_owned(), nodes::state(&node, silent_s)))
        };
        names.filter_map(state).collect()
    }

    /// Returns the number of objects that cannot be read, by the name of their kind in URLs.
    pub(crate) fn unreadable(&self) -> Vec<(String, usize)> {
        fn of<K>(kind: &Kind<K>) -> (String, usize)
        where
            K: Resource<DynamicType = ()> + 'static,
        {
            (K::plural(&()).into_owned(), kind.mirror.unreadable_len())
        }
        let (kubelets, agents) = (of(&self.leases), of(&self.heartbeats));
        let mut all = vec![
            of(&self.attachments),
            of(&self.grants),
            of(&self.volumes),
            of(&self.nodes),
            of(&self.csi_nodes),
            (kubelets.0, kubelets.1 + agents.1),
        ];
        let wanted = self.wanted.iter();
        all.extend(wanted.flat_map(|wanted| [of(&wanted.pods), of(&wanted.claims)]));
        all
    }

    /// Has the volumes and the attachments of a node looked at.
    pub(crate) fn look_at_node(&self, name: &str) {
        for grant in self.grants.mirror.all() {
            if grant.spec.holders.iter().any(|holder| holder.node == name) {
                self.queue.add(Key::Grant(grant.name_any()));
            }
        }
        for attachment in self.attachments.mirror.find(BY_NODE, name) {
            self.queue.add(Key::Attachment(attachment.name_any()));
            self.look_at_wanted(&attachment);
            if let Some(grant) = grant_of(&attachment) {
                self.queue.add(Key::Grant(grant));
            }
        }
    }

    /// Has the attach/detach loop look at the volume of an attachment.
    pub(crate) fn look_at_wanted(&self, known: &VolumeAttachment) {
        if let (Some(_), Some(volume)) = (&self.wanted, &known.spec.source.persistent_volume_name) {
            self.queue.add(Key::Wanted(volume.clone()));
        }
    }

    /// Has the attachments of a volume looked at, and calls that wait for it.
    pub(crate) fn look_at_attachments(&self, attachments: &[Arc<VolumeAttachment>]) {
        self.changes.send_replace(());
        for attachment in attachments {
            self.queue.add(Key::Attachment(attachment.name_any()));
        }
    }

    /// Reads a PersistentVolume: from the mirror, or from the API server if the mirror does not have it yet.
    pub(crate) async fn persistent_volume(
        &self,
        name: &str,
    ) -> Result<Option<Arc<PersistentVolume>>> {
        if let Some(known) = self.volumes.mirror.get(name) {
            return Ok(Some(known));
        }
        let what = || format!("cannot read PersistentVolume {name}");
        Ok(call(what, self.volumes.api.get_opt(name)).await?.map(Arc::new))
    }
}
