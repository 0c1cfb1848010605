//! Events for `kubectl describe`. They are for people: an event that cannot be written is only logged.

use cleat_core::error::Error;
use cleat_grants::controller::{Change, RevocationReason};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::ObjectMeta;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource};

use crate::api::{CALL_TIMEOUT, message};
use crate::grant::{GROUP, KIND, VERSION, VolumeGrant};
use crate::guard::Unreadable;

/// The namespace of events about objects without a namespace.
pub(crate) const EVENTS: &str = "default";

/// The writer of events.
pub(crate) struct Events(Recorder);

impl Events {
    pub(crate) fn new(client: Client, identity: &str) -> Self {
        let reporter =
            Reporter { controller: "cleat-controller".into(), instance: Some(identity.into()) };
        Self(Recorder::new(client, reporter))
    }

    /// Writes an event about a grant that is not in a normal move.
    pub(crate) async fn publish(&self, grant: &VolumeGrant, reason: &str, note: String) {
        self.publish_about(&grant.object_ref(&()), EventType::Warning, reason, note).await;
    }

    /// Writes an event about a grant that cannot be read.
    pub(crate) async fn unreadable_grant(&self, grant: &Unreadable, error: &Error) {
        let ObjectMeta { name, uid, resource_version, .. } = grant.metadata.clone();
        let about = ObjectReference {
            api_version: Some(format!("{GROUP}/{VERSION}")),
            kind: Some(KIND.to_owned()),
            name,
            uid,
            resource_version,
            ..ObjectReference::default()
        };
        let note = format!("nothing is decided about the volume: {}", message(error));
        self.publish_about(&about, EventType::Warning, "Unreadable", note).await;
    }

    /// Writes an event about an object.
    pub(crate) async fn publish_about(
        &self,
        about: &ObjectReference,
        type_: EventType,
        reason: &str,
        note: String,
    ) {
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: reason.to_owned(),
            secondary: None,
        };
        let written = tokio::time::timeout(CALL_TIMEOUT, self.0.publish(&event, about)).await;
        match written {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!("cannot write an event: {error}"),
            Err(_) => tracing::debug!("cannot write an event: the API server did not answer"),
        }
    }
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Events")
    }
}

/// Returns reason and note of the event for a change; `None` for the changes of a normal move, which the object
/// itself shows: an event for each would double the writes.
pub(crate) fn describe(change: &Change) -> Option<(&'static str, String)> {
    match change {
        Change::Granted(..) | Change::Freed(..) => None,
        Change::Revoked(_, _, RevocationReason::NotRequested | RevocationReason::Deleting) => None,
        Change::Revoked(node, generation, RevocationReason::NodeLost) => {
            let note = format!("generation {generation} is revoked: node {node} is lost");
            Some(("NodeLost", note))
        }
        Change::Revoked(node, generation, RevocationReason::Superseded) => {
            let note = format!(
                "generation {generation} of node {node} is revoked: the storage is at a later one"
            );
            Some(("Superseded", note))
        }
        Change::Adopted(node, generation) => {
            let note = format!(
                "node {node} has claimed the volume with generation {generation}, which no grant names; it \
                 gets a grant"
            );
            Some(("ClaimAdopted", note))
        }
    }
}
