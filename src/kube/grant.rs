//! The custom resource `VolumeGrant`: the object of `cleat_grants` with its metadata.

use std::borrow::Cow;
use std::sync::Arc;

use cleat_grants::controller::Until;
use cleat_grants::limits::{MAX_MESSAGE, MAX_NODE, MAX_REASON, NAME, TEXT, WORD, text};
use cleat_grants::object::{GrantSpec, GrantStatus, StoredGrant, Time, Version, readable};
use kube::api::ObjectMeta;
use kube::core::{ClusterResourceScope, Resource};
use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::preserve;

/// The API group of cleat's custom resources.
pub const GROUP: &str = "cleat.csi.storage";

/// The version of the group.
pub const VERSION: &str = "v1alpha1";

/// The kind of the grant.
pub const KIND: &str = "VolumeGrant";

/// The name of the resource in URLs.
pub const PLURAL: &str = "volumegrants";

/// The maximum number of entries that say what a volume waits for.
pub(crate) const MAX_WAITING: usize = 16;

/// The maximum length of what an administrator can do. It can name a node several times.
const MAX_ACTION: usize = 1024;

/// The finalizer of a grant. The controller removes it when no holder is left.
pub const FINALIZER: &str = "cleat.csi.storage/grant";

/// The annotation that names the volume: its CSI volume handle. A grant and a VolumeAttachment have it.
pub const VOLUME_ANNOTATION: &str = "cleat.csi.storage/volume";

/// The annotation with the holders after the first one, for the columns of `kubectl get`: they can show one value only.
pub(crate) const OTHERS_ANNOTATION: &str = "cleat.csi.storage/other-holders";

/// The label with the name of the CSI driver whose volume it is.
pub const DRIVER_LABEL: &str = "cleat.csi.storage/driver";

/// The label of a VolumeAttachment that asks for a grant: [`grant_label`] of its name.
pub(crate) const GRANT_LABEL: &str = "cleat.csi.storage/grant";

/// The prefix of the labels with the names of nodes. The agent of a node selects by its label.
const NODE_LABELS: &str = "node.cleat.csi.storage/";

/// The maximum length of the readable part of a grant's name.
const READABLE: usize = 56;

/// The maximum length of the last part of a label's key.
const MAX_LABEL: usize = 63;

/// A grant: which nodes may use a volume, and what is true on them. Cluster-scoped, one for each volume.
///
/// It is written with everything that this build does not know, as the API server has it: [`preserve`].
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeGrant {
    /// The metadata. The name follows from the volume: [`grant_name`].
    pub metadata: ObjectMeta,
    /// The decision: only the controller writes it.
    pub spec: GrantSpec,
    /// What is true on the nodes and at the storage.
    pub status: Status,
    /// What was read, if it has more than this build knows.
    stored: Option<Arc<Content>>,
}

/// A grant as it was read, without its metadata.
#[derive(Debug, Clone, PartialEq)]
struct Content {
    spec: Value,
    status: Value,
}

/// The JSON of a grant, with the types of this build or without.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Object<M, S, T> {
    #[serde(default = "api_version")]
    api_version: String,
    #[serde(default = "kind")]
    kind: String,
    metadata: M,
    spec: S,
    #[serde(default)]
    status: T,
}

impl<'de> Deserialize<'de> for VolumeGrant {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let object = Object::<ObjectMeta, Value, Option<Value>>::deserialize(deserializer)?;
        let status = object.status.unwrap_or_else(|| Value::Object(serde_json::Map::new()));
        let content = Content { spec: object.spec, status };
        let (spec, status) = content.read().map_err(D::Error::custom)?;
        let known = Content::of(&spec, &status).map_err(D::Error::custom)?;
        let stored = (known != content).then(|| Arc::new(content));
        Ok(Self { metadata: object.metadata, spec, status, stored })
    }
}

impl Serialize for VolumeGrant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut content = Content::of(&self.spec, &self.status).map_err(S::Error::custom)?;
        if let Some(stored) = &self.stored {
            content = stored.with(&content).map_err(S::Error::custom)?;
        }
        let Content { spec, status } = content;
        let (api_version, kind, metadata) = (api_version(), kind(), &self.metadata);
        Object { api_version, kind, metadata, spec, status }.serialize(serializer)
    }
}

impl Content {
    fn of(spec: &GrantSpec, status: &Status) -> serde_json::Result<Self> {
        Ok(Self { spec: serde_json::to_value(spec)?, status: serde_json::to_value(status)? })
    }

    fn read(&self) -> serde_json::Result<(GrantSpec, Status)> {
        Ok((GrantSpec::deserialize(&self.spec)?, Status::deserialize(&self.status)?))
    }

    /// Returns this content with the changes of `after`.
    fn with(&self, after: &Self) -> serde_json::Result<Self> {
        let (spec, status) = self.read()?;
        let before = Self::of(&spec, &status)?;
        let mut content = self.clone();
        preserve::apply(&mut content.spec, &before.spec, &after.spec);
        preserve::apply(&mut content.status, &before.status, &after.status);
        Ok(content)
    }
}

/// The status of a grant.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The part that decisions depend on.
    #[serde(flatten)]
    pub grant: GrantStatus,
    /// What the volume waits for, for users: no decision depends on it.
    #[serde(default, deserialize_with = "readable", skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<Waiting>,
}

/// What a holder or a request waits for. Only the controller writes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Waiting {
    /// The node of the holder that has to release the volume, or of the request that cannot be granted.
    #[schemars(length(max = MAX_NODE), regex(pattern = NAME))]
    pub node: String,
    /// What has to happen, for programs: `Released`, `ReleasedOrLost`, `OtherHolders`, `Cleaned` or `InService`.
    #[schemars(length(max = MAX_REASON), regex(pattern = WORD))]
    pub until: String,
    /// Since when the controller waits.
    pub since: Time,
    /// What has to happen, for readers.
    #[schemars(length(max = MAX_MESSAGE), regex(pattern = TEXT))]
    pub message: String,
    /// What an administrator can do.
    #[schemars(length(max = MAX_ACTION), regex(pattern = TEXT))]
    pub action: String,
}

impl Waiting {
    /// Describes an entry of `cleat_grants::controller::Step::Wait`.
    pub fn new(node: &str, until: Until, since: Time) -> Self {
        let (message, action) = match until {
            Until::Released => (
                format!("node {node} must release the volume; it is fenced if it does not"),
                "wait".to_owned(),
            ),
            Until::ReleasedOrLost => (
                format!("node {node} must release the volume; it is not known to be lost"),
                format!(
                    "look at the agent on node {node}; if the node is lost: kubectl taint node {node} \
                     node.kubernetes.io/out-of-service=lost:NoExecute"
                ),
            ),
            Until::OtherHolders => {
                (format!("node {node} waits until another holder is gone"), "wait".to_owned())
            }
            Until::Cleaned => (
                format!("node {node} was fenced and has not cleaned up"),
                format!("start the agent on node {node}, or reboot the node"),
            ),
            Until::InService => (
                format!("node {node} does not exist or is out of service"),
                format!(
                    "kubectl taint node {node} node.kubernetes.io/out-of-service- (when it is back)"
                ),
            ),
        };
        let (message, action) = (text(&message, MAX_MESSAGE), text(&action, MAX_ACTION));
        Self { node: node.to_owned(), until: format!("{until:?}"), since, message, action }
    }

    /// Returns whether two entries differ at most in the time.
    pub fn is_same(&self, other: &Self) -> bool {
        self.node == other.node && self.until == other.until
    }
}

impl VolumeGrant {
    /// Creates the object for the volume `handle` of `driver`.
    pub fn new(driver: &str, handle: &str, spec: GrantSpec) -> Self {
        let annotations = [(VOLUME_ANNOTATION.to_owned(), handle.to_owned())].into();
        let metadata = ObjectMeta {
            name: Some(grant_name(driver, handle)),
            labels: Some([(DRIVER_LABEL.to_owned(), driver.to_owned())].into()),
            annotations: Some(annotations),
            finalizers: Some(vec![FINALIZER.to_owned()]),
            ..ObjectMeta::default()
        };
        let mut grant = Self { metadata, spec, status: Status::default(), stored: None };
        grant.show_nodes();
        grant
    }

    /// Labels the object with the nodes that it concerns: holders, and nodes that were fenced. Names the holders after
    /// the first one in an annotation, for the columns of `kubectl get`.
    pub(crate) fn show_nodes(&mut self) {
        let others = self.spec.holders.iter().skip(1).map(|holder| match holder.revoked {
            true => format!("{} (revoked)", holder.node),
            false => holder.node.clone(),
        });
        let others = others.collect::<Vec<_>>().join(", ");
        let annotations = self.metadata.annotations.get_or_insert_default();
        match others.is_empty() {
            true => annotations.remove(OTHERS_ANNOTATION),
            false => annotations.insert(OTHERS_ANNOTATION.to_owned(), others),
        };
        let holders = self.spec.holders.iter().map(|holder| &holder.node);
        let fenced = self.status.grant.fences.iter().map(|fence| &fence.node);
        let nodes: Vec<String> = holders.chain(fenced).map(|node| node_label(node)).collect();
        let labels = self.metadata.labels.get_or_insert_default();
        labels.retain(|key, _| !key.starts_with(NODE_LABELS));
        labels.extend(nodes.into_iter().map(|key| (key, String::new())));
    }

    /// Whether a node that the grant concerns has no label: its agent does not see the grant then. A write of the status,
    /// which restores a fence, cannot write labels.
    pub(crate) fn lacks_labels(&self) -> bool {
        let mut shown = self.clone();
        shown.show_nodes();
        let is_there = |label: &String| {
            self.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(label))
        };
        !shown.metadata.labels.iter().flat_map(|labels| labels.keys()).all(is_there)
    }

    /// Returns the object as the decisions need it.
    pub fn stored(&self) -> StoredGrant {
        StoredGrant {
            version: Version(self.metadata.resource_version.clone().unwrap_or_default()),
            deleting: self.metadata.deletion_timestamp.is_some(),
            grant: cleat_grants::object::VolumeGrant {
                spec: self.spec.clone(),
                status: self.status.grant.clone(),
            },
        }
    }

    /// Returns the volume that the object is about, from its annotation.
    pub fn volume(&self) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(VOLUME_ANNOTATION).map(String::as_str)
    }
}

impl Resource for VolumeGrant {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        KIND.into()
    }

    fn group((): &()) -> Cow<'_, str> {
        GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        PLURAL.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// Returns the name of the grant of a volume: readable, and different for different volumes. All
/// PersistentVolumes of one volume therefore share one grant.
pub fn grant_name(driver: &str, handle: &str) -> String {
    let last = handle.rsplit('/').find(|part| !part.is_empty()).unwrap_or_default();
    let plain = |c: char| {
        let c = c.to_ascii_lowercase();
        if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' }
    };
    let readable: String = last.chars().map(plain).take(READABLE).collect();
    let readable = match readable.trim_matches('-') {
        "" => "volume",
        readable => readable,
    };
    let hash = hmac_sha256::Hash::hash(format!("{driver}\n{handle}").as_bytes());
    let hash: String = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{readable}-{hash}")
}

/// Returns the end of a grant's name, which differs for different volumes. The whole name is too long for a label.
pub(crate) fn grant_label(name: &str) -> &str {
    name.rsplit_once('-').map_or(name, |(_, hash)| hash)
}

/// Returns the key of the label of a node. A name that is too long for it ends with its hash.
pub fn node_label(node: &str) -> String {
    const HASH: usize = 16;
    if node.len() <= MAX_LABEL {
        return format!("{NODE_LABELS}{node}");
    }
    let hash = hmac_sha256::Hash::hash(node.as_bytes());
    let hash: String = hash[..HASH / 2].iter().map(|byte| format!("{byte:02x}")).collect();
    let readable: String = node.chars().take(MAX_LABEL - HASH - 1).collect();
    format!("{NODE_LABELS}{readable}-{hash}")
}

fn api_version() -> String {
    format!("{GROUP}/{VERSION}")
}

fn kind() -> String {
    KIND.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_grants::object::{Generation, NodeEntry};
    use serde_json::json;

    #[test]
    fn names_are_valid_and_differ() {
        for handle in ["", "/", "rbd/ceph/volumes//csi-vol-1", "Ä_x", &"x".repeat(1000)] {
            let name = grant_name("d", handle);
            assert!(name.len() <= READABLE + 17, "{name}");
            let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(name.chars().all(is_plain) && !name.starts_with('-'), "{name}");
        }
        assert!(grant_name("d", "rbd/ceph/volumes//csi-vol-1").starts_with("csi-vol-1-"));
        let (a, b) = (grant_name("d", "rbd/a/p//v"), grant_name("d", "rbd/b/p//v"));
        assert_ne!(a, b);
        assert_ne!(grant_label(&a), grant_label(&b));
        assert_eq!(grant_label(&a).len(), 16);
        assert_ne!(grant_name("d", "v"), grant_name("e", "v"));
    }

    #[test]
    fn a_grant_has_the_labels_of_the_nodes_that_it_concerns() {
        let long = "n".repeat(200);
        assert_eq!(node_label("node-a.example"), "node.cleat.csi.storage/node-a.example");
        assert_eq!(node_label(&long).len(), NODE_LABELS.len() + MAX_LABEL);
        assert_ne!(node_label(&long), node_label(&"n".repeat(201)));
        let holder = |node: &str| cleat_grants::object::Holder {
            node: node.to_owned(),
            mode: cleat_grants::object::Mode::ReadWrite,
            generation: Generation(3),
            revoked: false,
            since: Time(0),
            pod_uids: Vec::new(),
        };
        let spec = GrantSpec { holders: vec![holder("a")], generation: Generation(3) };
        let mut grant = VolumeGrant::new("d", "v", spec);
        let labels = |grant: &VolumeGrant| grant.metadata.labels.clone().unwrap().into_keys();
        assert!(labels(&grant).eq([DRIVER_LABEL.to_owned(), node_label("a")]));
        grant.status.grant.fences.push(cleat_grants::object::FenceEntry {
            node: "a".to_owned(),
            generation: Generation(3),
            client: None,
            proof: String::new(),
            time: Time(0),
        });
        grant.spec.holders = vec![holder("b")];
        assert!(grant.lacks_labels());
        grant.show_nodes();
        assert!(!grant.lacks_labels());
        assert!(labels(&grant).eq([DRIVER_LABEL.to_owned(), node_label("a"), node_label("b")]));
        let others = |grant: &VolumeGrant| {
            grant.metadata.annotations.as_ref()?.get(OTHERS_ANNOTATION).cloned()
        };
        assert_eq!(others(&grant), None);
        let revoked = cleat_grants::object::Holder { revoked: true, ..holder("d") };
        grant.spec.holders = vec![holder("b"), holder("c"), revoked];
        grant.show_nodes();
        assert_eq!(others(&grant).as_deref(), Some("c, d (revoked)"));
        grant.spec.holders.truncate(1);
        grant.show_nodes();
        assert_eq!(others(&grant), None);
    }

    #[test]
    fn a_write_keeps_what_this_build_does_not_know() {
        let condition = json!({
            "type": "SafeToMount", "status": "True", "reason": "Invented", "invented": "x",
            "generation": 3, "lastTransitionTime": "2030-01-01T00:00:00.5Z",
        });
        let foreign = json!({
            "node": "b", "generation": 3, "intents": 1, "invented": [1],
            "conditions": [condition, { "type": "Invented", "status": "True" }],
        });
        let object = json!({
            "apiVersion": api_version(), "kind": KIND,
            "metadata": { "name": "v", "resourceVersion": "7" },
            "spec": { "holders": [], "generation": 3, "invented": true },
            "status": { "nodes": [foreign, { "node": 1 }], "invented": {} },
        });
        let mut grant: VolumeGrant = serde_json::from_value(object.clone()).unwrap();
        assert_eq!(serde_json::to_value(&grant).unwrap(), object);
        let entry = grant.status.grant.nodes[0].clone();
        let own = NodeEntry { node: "a".to_owned(), generation: Generation(3), ..entry };
        grant.status.grant.nodes.push(own.clone());
        grant.spec.generation = Generation(4);
        let mut expected = object;
        expected["spec"]["generation"] = json!(4);
        expected["status"]["nodes"].as_array_mut().unwrap().push(json!(own));
        assert_eq!(serde_json::to_value(&grant).unwrap(), expected);
        // One that has nothing unknown is kept once only.
        let plain = serde_json::to_value(VolumeGrant::new("d", "v", GrantSpec::default())).unwrap();
        assert!(serde_json::from_value::<VolumeGrant>(plain).unwrap().stored.is_none());
    }

    #[test]
    fn the_json_is_that_of_the_grants_with_metadata() {
        let spec = GrantSpec { holders: Vec::new(), generation: Generation(3) };
        let mut grant = VolumeGrant::new("d", "rbd/ceph/volumes//db", spec);
        grant.status.waiting.push(Waiting::new("a", Until::ReleasedOrLost, Time(0)));
        let json = serde_json::to_value(&grant).unwrap();
        assert_eq!(json["apiVersion"], "cleat.csi.storage/v1alpha1");
        assert_eq!(json["kind"], "VolumeGrant");
        assert_eq!(json["spec"]["generation"], 3);
        assert_eq!(json["status"]["waiting"][0]["until"], "ReleasedOrLost");
        let same: cleat_grants::object::VolumeGrant = serde_json::from_value(json.clone()).unwrap();
        assert_eq!(same, grant.stored().grant);
        assert_eq!(serde_json::from_value::<VolumeGrant>(json).unwrap(), grant);
    }
}
