//! The grant object of a volume, `VolumeGrant`, in the JSON that the API server stores: everything but the
//! metadata, which the layer above adds.

use std::fmt;

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};

#[cfg(feature = "schema")]
use crate::limits::{
    MAX_CLIENT, MAX_DEVICE_PATH, MAX_MESSAGE, MAX_NODE, MAX_PODS, MAX_REASON, MAX_UID, NAME, TEXT,
    WORD,
};
pub use crate::time::Time;

/// The number of a grant. Each new grant of a volume gets a higher one, and a claim at the storage carries
/// it. 0 is a claim without a grant: that of a node that uses no grants and needs no API server.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Generation(pub u64);

impl Generation {
    /// Returns the generation after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The resourceVersion of an object. It can only be compared for equality.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Version(pub String);

/// A grant object as a client has read it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoredGrant {
    /// The version of the object that was read.
    pub version: Version,
    /// Whether the object has a deletion timestamp and waits for its finalizer.
    pub deleting: bool,
    /// The content.
    pub grant: VolumeGrant,
}

/// The grant object of one volume, without its metadata. It is named after the volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeGrant {
    /// The decision: only the controller writes it.
    pub spec: GrantSpec,
    /// What is true on the nodes and at the storage.
    #[serde(default)]
    pub status: GrantStatus,
}

/// The decision which nodes may claim a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GrantSpec {
    /// The nodes that may claim the volume: one, or several in a mode that permits it.
    #[serde(default)]
    pub holders: Vec<Holder>,
    /// The highest generation that was given out.
    #[serde(default)]
    pub generation: Generation,
}

/// A node that may claim the volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Holder {
    /// The name of the node.
    #[cfg_attr(feature = "schema", schemars(length(max = MAX_NODE), regex(pattern = NAME)))]
    pub node: String,
    /// How the node may use the volume.
    pub mode: Mode,
    /// The generation of this grant.
    pub generation: Generation,
    /// Whether the node must end its use of the volume. A revocation is never withdrawn.
    #[serde(default)]
    pub revoked: bool,
    /// The time of the grant or, if it is revoked, of the revocation.
    pub since: Time,
    /// The pods for which the grant was made.
    #[cfg_attr(feature = "schema", schemars(length(max = MAX_PODS)))]
    #[cfg_attr(feature = "schema", schemars(inner(length(max = MAX_UID), regex(pattern = WORD))))]
    #[serde(default, rename = "podUIDs", skip_serializing_if = "Vec::is_empty")]
    pub pod_uids: Vec<String>,
}

/// How a holder may use a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Mode {
    /// The holder reads and writes, and no other node has the volume.
    ReadWrite,
    /// The holder reads and writes, and other nodes may do so at the same time.
    SharedReadWrite,
    /// The holder reads, and other nodes may do so at the same time.
    ReadOnly,
}

impl Mode {
    /// Returns whether one node with this mode and another one with `other` may hold a volume at the same
    /// time.
    pub fn is_compatible(self, other: Self) -> bool {
        self == other && self != Self::ReadWrite
    }
}

/// What is true on the nodes and at the storage.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GrantStatus {
    /// One entry for each node. A node writes its own entry only.
    #[serde(default, deserialize_with = "readable", skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeEntry>,
    /// The fenced nodes that have not cleaned up yet. Only the controller writes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fences: Vec<FenceEntry>,
}

/// What a node reports about a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NodeEntry {
    /// The name of the node.
    #[cfg_attr(feature = "schema", schemars(length(max = MAX_NODE), regex(pattern = NAME)))]
    pub node: String,
    /// The generation of the last claim or attempt to claim.
    pub generation: Generation,
    /// The number of intents that the node has written. It makes each intent a change of the object, because
    /// the API server does not change the resourceVersion for a write that changes nothing.
    #[serde(default)]
    pub intents: u64,
    /// The client of the storage that has claimed the volume, as recorded with the claim.
    #[cfg_attr(feature = "schema", schemars(length(max = MAX_CLIENT), regex(pattern = TEXT)))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// The path of the device.
    #[cfg_attr(feature = "schema", schemars(length(max = MAX_DEVICE_PATH), regex(pattern = TEXT)))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_path: Option<String>,
    /// The hash of the machine id of the node that has written the entry; none if it is not known. Another machine may
    /// get the name of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(length(max = MAX_REASON), regex(pattern = WORD)))]
    pub machine: Option<String>,
    /// The signals.
    #[serde(default, deserialize_with = "readable", skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// A signal of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Condition {
    /// The signal.
    #[serde(rename = "type")]
    pub kind: Signal,
    /// Whether it is true.
    pub status: Truth,
    /// The reason, for programs.
    #[cfg_attr(feature = "schema", schemars(with = "String", length(max = MAX_REASON)))]
    #[cfg_attr(feature = "schema", schemars(regex(pattern = WORD)))]
    pub reason: Reason,
    /// The reason, for readers.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(length(max = MAX_MESSAGE), regex(pattern = TEXT)))]
    pub message: String,
    /// The generation for which the signal is valid. It says nothing about other generations.
    pub generation: Generation,
    /// The time of the last change of `status`.
    pub last_transition_time: Time,
}

/// The signals of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Signal {
    /// The volume is claimed and mapped, the link exists, and a read was answered.
    SafeToMount,
    /// Nothing on the node can write to the volume with this generation, and the claim is released.
    SafeToDetach,
    /// Nothing is left on the node of a generation that was fenced. This never becomes false again.
    Cleaned,
}

/// The status of a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Truth {
    /// The signal is true.
    True,
    /// The signal is false.
    False,
    /// The node cannot tell.
    Unknown,
}

/// The reason of a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// The node is about to claim the volume, or does so now.
    Claiming,
    /// The volume is mapped and works.
    Mapped,
    /// The node does not use the volume, and its claim is released.
    Released,
    /// The volume was mapped, and it is not any more, for example after a reboot.
    Lost,
    /// The record at the storage is at a higher generation.
    Superseded,
    /// The generation was fenced at the storage.
    Fenced,
    /// A client of another node has claimed the volume.
    ClaimedElsewhere,
    /// The node has the volume mapped with another generation than the granted one, for example after a
    /// restored backup.
    OtherGeneration,
    /// A fenced node has removed what was left.
    Cleaned,
    /// A reason of a newer build.
    #[serde(other)]
    Other,
}

/// A node that was fenced: the condition Fenced, with its proof.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FenceEntry {
    /// The name of the node.
    #[cfg_attr(feature = "schema", schemars(length(max = MAX_NODE), regex(pattern = NAME)))]
    pub node: String,
    /// The generation that was fenced.
    pub generation: Generation,
    /// The client that was cut off, as recorded with its claim; none if the node had not claimed.
    #[cfg_attr(feature = "schema", schemars(length(max = MAX_CLIENT), regex(pattern = TEXT)))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// What the storage answered when the record was read back.
    #[cfg_attr(feature = "schema", schemars(length(max = MAX_MESSAGE), regex(pattern = TEXT)))]
    pub proof: String,
    /// The time when it was read back.
    pub time: Time,
}

/// Reads the elements of a list that can be read. What a node has written, or a newer build, must not hide the rest of
/// the object. An entry or a condition that is missing means *unknown*, so that nothing becomes free by this.
///
/// # Errors
/// Returns an error if it is no list.
pub fn readable<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Element<T> {
        Readable(T),
        Other(IgnoredAny),
    }
    let elements = Vec::<Element<T>>::deserialize(deserializer)?;
    let readable = elements.into_iter().filter_map(|element| match element {
        Element::Readable(element) => Some(element),
        Element::Other(_) => None,
    });
    Ok(readable.collect())
}

impl VolumeGrant {
    /// Returns the holder entry of `node`.
    pub fn holder(&self, node: &str) -> Option<&Holder> {
        self.spec.holders.iter().find(|holder| holder.node == node)
    }

    /// Returns what `node` reports.
    pub fn entry(&self, node: &str) -> Option<&NodeEntry> {
        self.status.nodes.iter().find(|entry| entry.node == node)
    }

    /// Returns whether `node` reports that `signal` is true for `generation`.
    pub fn is_true(&self, node: &str, signal: Signal, generation: Generation) -> bool {
        self.entry(node).is_some_and(|entry| entry.is(signal, Truth::True, generation))
    }

    /// Returns the fence of `node` at `generation`.
    pub fn fence(&self, node: &str, generation: Generation) -> Option<&FenceEntry> {
        let fences = &self.status.fences;
        fences.iter().find(|fence| fence.node == node && fence.generation == generation)
    }

    /// Returns the fences of `node`.
    pub fn fences_of<'a>(&'a self, node: &'a str) -> impl Iterator<Item = &'a FenceEntry> {
        self.status.fences.iter().filter(move |fence| fence.node == node)
    }
}

impl GrantStatus {
    /// Removes the entry and the fences of `node`.
    pub fn forget(&mut self, node: &str) {
        self.nodes.retain(|entry| entry.node != node);
        self.fences.retain(|fence| fence.node != node);
    }
}

impl NodeEntry {
    /// Returns the condition for `signal`.
    pub fn condition(&self, signal: Signal) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.kind == signal)
    }

    /// Returns whether `signal` has the status `truth` for `generation`.
    pub fn is(&self, signal: Signal, truth: Truth, generation: Generation) -> bool {
        self.condition(signal)
            .is_some_and(|known| known.status == truth && known.generation == generation)
    }

    /// Sets a condition. The time of the last transition stays if the status stays.
    pub fn set(&mut self, mut condition: Condition) {
        let known = self.conditions.iter_mut().find(|known| known.kind == condition.kind);
        match known {
            Some(known) => {
                if known.status == condition.status {
                    condition.last_transition_time = known.last_transition_time;
                }
                *known = condition;
            }
            None => self.conditions.push(condition),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = r#"{
        "spec": {
            "holders": [{
                "node": "node-a", "mode": "ReadWrite", "generation": 7, "revoked": false,
                "since": "2030-01-01T00:00:00Z", "podUIDs": ["5d1c"]
            }],
            "generation": 7
        },
        "status": {
            "nodes": [{
                "node": "node-a", "generation": 7, "intents": 1, "client": "10.0.0.1:0/71",
                "devicePath": "/dev/nbd0",
                "conditions": [{
                    "type": "SafeToMount", "status": "True", "reason": "Mapped", "message": "",
                    "generation": 7, "lastTransitionTime": "2030-01-01T00:00:01Z"
                }]
            }],
            "fences": [{
                "node": "node-b", "generation": 6, "client": "10.0.0.2:0/9",
                "proof": "generation 6 is sealed", "time": "2030-01-01T00:00:00Z"
            }]
        }
    }"#;

    #[test]
    fn the_json_has_the_fields_of_the_custom_resource() {
        let grant: VolumeGrant = serde_json::from_str(JSON).unwrap();
        assert_eq!(grant.holder("node-a").unwrap().pod_uids, ["5d1c"]);
        assert!(grant.is_true("node-a", Signal::SafeToMount, Generation(7)));
        assert!(!grant.is_true("node-a", Signal::SafeToMount, Generation(8)));
        assert!(grant.fence("node-b", Generation(6)).is_some());
        let expected: serde_json::Value = serde_json::from_str(JSON).unwrap();
        assert_eq!(serde_json::to_value(&grant).unwrap(), expected);
    }

    #[test]
    fn absent_fields_and_reasons_of_newer_builds_are_read() {
        let grant: VolumeGrant = serde_json::from_str(r#"{"spec": {}}"#).unwrap();
        assert_eq!(grant, VolumeGrant::default());
        let reason: Reason = serde_json::from_str(r#""InventedLater""#).unwrap();
        assert_eq!(reason, Reason::Other);
    }

    #[test]
    fn what_a_node_has_written_hides_no_other_entry() {
        use serde_json::Value;

        let condition = |status: &str, time: &str| {
            serde_json::json!({
                "type": "SafeToDetach", "status": status, "reason": "Released", "generation": 7,
                "lastTransitionTime": time,
            })
        };
        let mut json: Value = serde_json::from_str(JSON).unwrap();
        let entry = |node: &str, generation: Value, conditions: Value| -> Value {
            serde_json::json!({ "node": node, "generation": generation, "conditions": conditions })
        };
        let invented = serde_json::json!({ "type": "Invented", "status": "True" });
        json["status"]["nodes"].as_array_mut().unwrap().extend([
            entry("b", 7.into(), serde_json::json!([condition("Perhaps", "2030-01-01T00:00:00Z")])),
            entry("c", 1e19.into(), serde_json::json!([])),
            entry("d", 7.into(), serde_json::json!([invented, condition("True", "1969-02-31")])),
        ]);
        let grant: VolumeGrant = serde_json::from_value(json.clone()).unwrap();
        assert!(grant.is_true("node-a", Signal::SafeToMount, Generation(7)));
        assert!(grant.entry("b").unwrap().conditions.is_empty());
        assert!(grant.entry("c").is_none());
        assert_eq!(grant.entry("d").unwrap().conditions.len(), 1);
        assert!(grant.is_true("d", Signal::SafeToDetach, Generation(7)));
        // A holder or a fence that is missing would free the volume.
        for (list, field) in [("spec", "holders"), ("status", "fences")] {
            let mut json = json.clone();
            json[list][field][0]["generation"] = 1e19.into();
            assert!(serde_json::from_value::<VolumeGrant>(json).is_err(), "{field}");
        }
    }

    #[test]
    fn the_transition_time_changes_with_the_status_only() {
        let condition = |status, time| Condition {
            kind: Signal::SafeToDetach,
            status,
            reason: Reason::Released,
            message: String::new(),
            generation: Generation(1),
            last_transition_time: Time(time),
        };
        let mut entry = NodeEntry::default();
        for (status, time, expected) in
            [(Truth::True, 1, 1), (Truth::True, 2, 1), (Truth::False, 3, 3)]
        {
            entry.set(condition(status, time));
            let known = entry.condition(Signal::SafeToDetach).unwrap();
            assert_eq!(known.last_transition_time, Time(expected));
        }
        assert_eq!(entry.conditions.len(), 1);
    }
}
