//! Objects of a watch that cannot be read.
//!
//! A list of objects is one answer. Without a guard, one object that cannot be decoded hides all others, and a leader
//! that lists them would wait for ever. A node can cause that: it writes times into its Node, its Lease and its entries
//! in grants, and the API server accepts times that only Go can represent. A newer build can do so, too.
//!
//! What is known of such an object is its metadata. An object that cannot be read exists: what decides because an object
//! does not exist must ask [`Mirror::unreadable`](crate::mirror::Mirror::unreadable) first.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};

use cleat_core::error::{Error, ErrorKind};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ApiResource, ObjectMeta};
use kube::core::{DynamicResourceScope, Resource};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

/// The maximum length of the cause, which can quote the object.
const MAX_CAUSE: usize = 256;

/// The time in the place of one that cannot be read.
const EPOCH: &str = "1970-01-01T00:00:00Z";

/// An object, or what is known of it if it cannot be read.
#[derive(Debug, Clone)]
pub(crate) enum Guarded<K> {
    Readable(K),
    Unreadable(Box<Unreadable>),
}

/// An object that cannot be read.
#[derive(Debug)]
pub(crate) struct Unreadable {
    /// Names, versions and labels; nothing else.
    pub(crate) metadata: ObjectMeta,
    /// Why it cannot be read.
    pub(crate) cause: String,
    /// Whether an event was written about it.
    reported: AtomicBool,
}

impl Clone for Unreadable {
    fn clone(&self) -> Self {
        let (metadata, cause) = (self.metadata.clone(), self.cause.clone());
        Self { metadata, cause, reported: AtomicBool::new(self.is_reported()) }
    }
}

impl Unreadable {
    fn new(metadata: ObjectMeta, cause: &impl ToString) -> Self {
        let cause = cause.to_string().chars().take(MAX_CAUSE).collect();
        Self { metadata, cause, reported: AtomicBool::new(false) }
    }

    /// Returns whether an event was written about it, or about an earlier state of it.
    pub(crate) fn is_reported(&self) -> bool {
        self.reported.load(Ordering::Relaxed)
    }

    /// Notes that an event was written about it. Returns whether this is the first time.
    pub(crate) fn report(&self) -> bool {
        !self.reported.swap(true, Ordering::Relaxed)
    }

    /// Returns the error of a decision that needs the object, which is of this kind.
    pub(crate) fn error(&self, kind: &str) -> Error {
        let name = self.metadata.name.as_deref().unwrap_or_default();
        let message = format!("{kind} {name} cannot be read: {}", self.cause);
        Error::new(ErrorKind::Internal, message).with_repair(format!(
            "correct it (kubectl get {kind} {name} -o yaml), or upgrade cleat if a newer version has written it"
        ))
    }
}

impl<K: DeserializeOwned> From<Raw> for Guarded<K> {
    fn from(Raw { metadata, mut object }: Raw) -> Self {
        let cause = match K::deserialize(&object) {
            Ok(object) => return Self::Readable(object),
            Err(cause) => cause,
        };
        mend_times(&mut object);
        let mended = K::deserialize(&object).map(Self::Readable);
        mended.unwrap_or_else(|_| Self::Unreadable(Unreadable::new(metadata, &cause).into()))
    }
}

impl<K> Guarded<K> {
    /// Returns whether `keep` accepts the object. One that cannot be read is kept: only the watch of another driver can
    /// do without it, which its label `label` says.
    pub(crate) fn is_wanted(&self, keep: impl FnOnce(&K) -> bool, label: (&str, &str)) -> bool {
        match self {
            Self::Readable(object) => keep(object),
            Self::Unreadable(object) => {
                let labels = object.metadata.labels.as_ref();
                labels.and_then(|labels| labels.get(label.0)).is_none_or(|value| value == label.1)
            }
        }
    }
}

/// Replaces times that cannot be read. `metadata` has only times of the API server itself.
fn mend_times(value: &mut Value) {
    let mend = |fields: &mut Map<String, Value>| {
        for (name, value) in fields {
            if name == "metadata" {
                continue;
            }
            let is_time = name.ends_with("Time") || name == "timeAdded";
            let is_unreadable =
                |text: &str| is_time && !text.is_empty() && text.parse::<Timestamp>().is_err();
            if value.as_str().is_some_and(is_unreadable) {
                *value = EPOCH.into();
            } else {
                mend_times(value);
            }
        }
    };
    match value {
        Value::Object(fields) => mend(fields),
        Value::Array(items) => items.iter_mut().for_each(mend_times),
        _ => {}
    }
}

/// An object of any kind, as JSON, and what can be read of its metadata in any case. All kinds are watched as this one, so
/// that the code of a watch is in the program once.
#[derive(Debug, Clone)]
pub(crate) struct Raw {
    /// Names, versions and labels; nothing else.
    metadata: ObjectMeta,
    object: Value,
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut object = Value::deserialize(deserializer)?;
        let metadata = object.get_mut("metadata").and_then(Value::as_object_mut);
        let Some(metadata) = metadata else { return Err(D::Error::missing_field("metadata")) };
        // Nothing needs them, and each has a time.
        metadata.remove("managedFields");
        Ok(Self { metadata: known(metadata), object })
    }
}

/// Returns of the metadata of an object what has no time.
fn known(metadata: &Map<String, Value>) -> ObjectMeta {
    let text = |field: &str| metadata.get(field)?.as_str().map(str::to_owned);
    let labels = metadata.get("labels").and_then(Value::as_object).into_iter().flatten();
    let labels = labels.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.into())));
    ObjectMeta {
        name: text("name"),
        namespace: text("namespace"),
        uid: text("uid"),
        resource_version: text("resourceVersion"),
        labels: Some(labels.collect()),
        ..ObjectMeta::default()
    }
}

/// The scope is dynamic, so that objects with and without a namespace are watched in the same way.
impl Resource for Raw {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(resource: &ApiResource) -> Cow<'_, str> {
        (&*resource.kind).into()
    }

    fn group(resource: &ApiResource) -> Cow<'_, str> {
        (&*resource.group).into()
    }

    fn version(resource: &ApiResource) -> Cow<'_, str> {
        (&*resource.version).into()
    }

    fn plural(resource: &ApiResource) -> Cow<'_, str> {
        (&*resource.plural).into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use crate::objects::Node;
    use k8s_openapi::api::coordination::v1::Lease;
    use kube::core::ObjectList;
    use serde_json::json;

    use super::*;
    use crate::grant::{DRIVER_LABEL, VolumeGrant};

    fn read<K: DeserializeOwned>(object: Value) -> Guarded<K> {
        serde_json::from_value::<Raw>(object).unwrap().into()
    }

    #[test]
    fn an_object_that_cannot_be_read_hides_no_other_one() {
        let grant = |name: &str, mode: &str| {
            let holder = json!({
                "node": "a", "mode": mode, "generation": 1, "since": "2030-01-01T00:00:00Z",
            });
            json!({
                "metadata": {
                    "name": name, "uid": "1", "resourceVersion": "7", "labels": { DRIVER_LABEL: "d" },
                },
                "spec": { "holders": [holder], "generation": 1 },
            })
        };
        let items = [grant("a", "ReadWrite"), grant("b", "Invented"), grant("c", "ReadOnly")];
        let list = json!({ "metadata": {}, "items": items });
        let list: ObjectList<Raw> = serde_json::from_value(list).unwrap();
        let list: Vec<Guarded<VolumeGrant>> = list.items.into_iter().map(Guarded::from).collect();
        let [Guarded::Readable(_), Guarded::Unreadable(bad), Guarded::Readable(_)] = &*list else {
            panic!("{list:?}")
        };
        assert_eq!(bad.metadata.name.as_deref(), Some("b"));
        assert_eq!(bad.metadata.resource_version.as_deref(), Some("7"));
        assert!(bad.cause.contains("Invented"), "{}", bad.cause);
        let error = bad.error("VolumeGrant");
        assert!(error.message().starts_with("VolumeGrant b cannot be read"), "{error}");
        assert!(list[1].is_wanted(|_| false, (DRIVER_LABEL, "d")));
        assert!(!list[1].is_wanted(|_| true, (DRIVER_LABEL, "e")));
        assert!(bad.report() && !bad.report() && bad.is_reported());
    }

    #[test]
    fn the_cause_is_short() {
        let long = "x".repeat(100_000);
        let object = json!({ "metadata": { "name": "a" }, "spec": { "holders": long } });
        let Guarded::Unreadable(bad) = read::<VolumeGrant>(object) else { panic!() };
        assert_eq!(bad.cause.len(), MAX_CAUSE);
    }

    #[test]
    fn a_time_that_only_go_can_represent_hides_nothing_of_its_object() {
        let late = "10000-01-01T00:59:59Z";
        let node = json!({
            "metadata": { "name": "a", "managedFields": [{ "time": late }] },
            "spec": { "taints": [{ "key": "k", "effect": "NoExecute", "timeAdded": late }] },
            "status": { "conditions": [
                { "type": "Ready", "status": "True", "lastTransitionTime": late },
                { "type": "Other", "status": "True", "lastTransitionTime": "2030-01-01T00:00:00Z" },
            ] },
        });
        let Guarded::Readable(node) = read::<Node>(node) else { panic!() };
        assert_eq!(node.spec.unwrap().taints.unwrap()[0].key, "k");
        let conditions = node.status.unwrap().conditions.unwrap();
        let second =
            |number: usize| conditions[number].last_transition_time.as_ref().unwrap().0.as_second();
        assert_eq!((second(0), second(1)), (0, 1_893_456_000));
        let lease = json!({
            "metadata": { "name": "a" },
            "spec": { "renewTime": "10000-01-01T00:59:59.000000Z", "leaseDurationSeconds": 9 },
        });
        let Guarded::Readable(lease) = read::<Lease>(lease) else { panic!() };
        assert_eq!(lease.spec.unwrap().lease_duration_seconds, Some(9));
    }
}
