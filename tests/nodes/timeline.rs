//! When objects of a cluster changed, as watches report it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cluster::{Cluster, USER, is_true, kubectl_with};
use crate::watch::Watch;

/// What is watched.
const PATHS: [&str; 4] = [
    "/api/v1/nodes",
    "/api/v1/pods",
    "/apis/storage.k8s.io/v1/volumeattachments",
    "/apis/cleat.csi.storage/v1alpha1/volumegrants",
];

/// The annotation and the taint of node remediation.
const LOST: &str = "cleat.csi.storage/lost";
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// How many changes the message of a timeout has.
const LAST: usize = 10;

/// One change of an object.
struct Change {
    at: Instant,
    /// `ADDED`, `MODIFIED` or `DELETED`.
    event: String,
    object: Value,
}

impl Change {
    /// Returns what matters of the object in a line, if it is not what was returned of it the last time, which is in `known`.
    fn line(&self, began: Instant, known: &mut BTreeMap<String, String>) -> Option<String> {
        let name = self.object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let text = match self.event.as_str() {
            "DELETED" => "deleted".to_owned(),
            _ => describe(&self.object)?,
        };
        if known.get(&name) == Some(&text) {
            return None;
        }
        let kind = self.object["kind"].as_str().unwrap_or_default();
        let seconds = self.at.duration_since(began).as_secs_f64();
        let line = format!("{seconds:7.1} s  {kind} {}: {text}", name.get(..20).unwrap_or(&name));
        known.insert(name, text);
        Some(line)
    }
}

/// Describes an object in a line. Returns `None` for those that the fail-over is not about.
fn describe(object: &Value) -> Option<String> {
    let name = object["metadata"]["name"].as_str()?;
    match object["kind"].as_str()? {
        "Node" => {
            let mut words = vec![if is_true(object, "Ready") { "Ready" } else { "not Ready" }];
            words.extend(is_lost(object, name).then_some("lost"));
            words.extend(is_out_of_service(object, name).then_some("out of service"));
            Some(words.join(", "))
        }
        "Pod" if object["metadata"]["namespace"] == USER => {
            let phase = object["status"]["phase"].as_str()?;
            let node = object["spec"]["nodeName"].as_str()?;
            let ready = if is_true(object, "Ready") { ", ready" } else { "" };
            Some(format!("{phase} on node {node}{ready}"))
        }
        "VolumeAttachment" => {
            let node = object["spec"]["nodeName"].as_str()?;
            let attached = object["status"]["attached"] == true;
            Some(format!("node {node}, {}", if attached { "attached" } else { "not attached" }))
        }
        "VolumeGrant" => Some(describe_grant(object)),
        _ => None,
    }
}

fn describe_grant(grant: &Value) -> String {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut words = Vec::new();
    for holder in list(&grant["spec"]["holders"]) {
        let revoked = if holder["revoked"] == true { ", revoked" } else { "" };
        words.push(format!(
            "holder {} (generation {}{revoked})",
            holder["node"], holder["generation"]
        ));
    }
    for node in list(&grant["status"]["nodes"]) {
        let conditions = list(&node["conditions"]);
        let of_true = conditions.iter().filter(|condition| condition["status"] == "True");
        let names: Vec<String> = of_true.map(|condition| condition["type"].to_string()).collect();
        words.push(format!("node {}: {}", node["node"], names.join(", ")));
    }
    for fence in list(&grant["status"]["fences"]) {
        words.push(format!("fenced: {} (generation {})", fence["node"], fence["generation"]));
    }
    words.join("; ").replace('"', "")
}

/// The changes of nodes, pods, VolumeAttachments and grants.
pub(crate) struct Timeline {
    changes: Arc<Mutex<Vec<Change>>>,
    watches: Vec<Arc<Watch>>,
}

impl Timeline {
    /// Starts to watch, and prints what changes if that is wanted.
    pub(crate) fn start(cluster: &Cluster, is_printed: bool) -> Self {
        let began = Instant::now();
        let changes = Arc::<Mutex<Vec<Change>>>::default();
        let watches = PATHS.map(|path| {
            let (watch, kubeconfig) = (Arc::<Watch>::default(), cluster.kubeconfig());
            let (followed, changes) = (Arc::clone(&watch), Arc::clone(&changes));
            std::thread::spawn(move || {
                let request = |query: &str| {
                    let mut command = kubectl_with(&kubeconfig);
                    command.args(["get", "--raw", &format!("{path}?{query}")]);
                    command
                };
                let mut known = BTreeMap::new();
                followed.follow(request, |event, object| {
                    let change = Change { at: Instant::now(), event, object };
                    if let Some(line) = change.line(began, &mut known).filter(|_| is_printed) {
                        println!("{line}");
                    }
                    changes.lock().unwrap().push(change);
                });
            });
            watch
        });
        Self { changes, watches: watches.into() }
    }

    /// Waits until an object changes so that `condition` is true for the event and the object, since `begin`. Returns
    /// when it did.
    pub(crate) fn when(
        &self,
        what: &str,
        begin: Instant,
        limit: Duration,
        condition: impl Fn(&str, &Value) -> bool,
    ) -> Instant {
        loop {
            let is_meant =
                |change: &&Change| change.at >= begin && condition(&change.event, &change.object);
            if let Some(change) = self.changes.lock().unwrap().iter().find(is_meant) {
                return change.at;
            }
            if begin.elapsed() >= limit {
                panic!("timed out after {limit:?}: {what}; before:\n{}", self.last(begin));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the last changes since `begin` in a line each.
    fn last(&self, begin: Instant) -> String {
        let changes = self.changes.lock().unwrap();
        let mut known = BTreeMap::new();
        let since = changes.iter().filter(|change| change.at >= begin);
        let lines: Vec<String> =
            since.filter_map(|change| change.line(begin, &mut known)).collect();
        lines[lines.len().saturating_sub(LAST)..].join("\n")
    }

    /// Returns whether a node was marked as lost since `begin`.
    pub(crate) fn was_lost(&self, node: &str, begin: Instant) -> bool {
        let changes = self.changes.lock().unwrap();
        changes.iter().any(|change| change.at >= begin && is_lost(&change.object, node))
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        for watch in &self.watches {
            watch.end();
        }
    }
}

/// Returns whether the object is this node, and remediation has marked it.
pub(crate) fn is_lost(object: &Value, node: &str) -> bool {
    is(object, "Node", node) && object["metadata"]["annotations"][LOST].is_string()
}

/// Returns whether the object is this node, and Kubernetes takes it for not ready.
pub(crate) fn is_not_ready(object: &Value, node: &str) -> bool {
    is(object, "Node", node) && !is_true(object, "Ready")
}

/// Returns whether the object is this node with the taint that detaches its volumes.
pub(crate) fn is_out_of_service(object: &Value, node: &str) -> bool {
    let taints = object["spec"]["taints"].as_array();
    let is_tainted = taints.is_some_and(|all| all.iter().any(|one| one["key"] == OUT_OF_SERVICE));
    is(object, "Node", node) && is_tainted
}

/// Returns whether an object was deleted, or is to be deleted.
pub(crate) fn is_being_deleted(event: &str, object: &Value) -> bool {
    event == "DELETED" || object["metadata"]["deletionTimestamp"].is_string()
}

/// Returns whether the object is a grant that the node must give back.
pub(crate) fn is_revoked(object: &Value, node: &str) -> bool {
    let mut holders = object["spec"]["holders"].as_array().into_iter().flatten();
    object["kind"] == "VolumeGrant"
        && holders.any(|holder| holder["node"] == node && holder["revoked"] == true)
}

/// Returns whether the object is a grant whose volume the node was fenced from.
pub(crate) fn is_fenced(object: &Value, node: &str) -> bool {
    let fences = object["status"]["fences"].as_array();
    object["kind"] == "VolumeGrant"
        && fences.is_some_and(|all| all.iter().any(|fence| fence["node"] == node))
}

/// Returns whether the object is a grant whose volume the node has mapped.
pub(crate) fn is_mapped(object: &Value, node: &str) -> bool {
    let entries = object["status"]["nodes"].as_array().into_iter().flatten();
    let mut conditions = entries
        .filter(|entry| entry["node"] == node)
        .flat_map(|entry| entry["conditions"].as_array().into_iter().flatten());
    object["kind"] == "VolumeGrant"
        && conditions
            .any(|condition| condition["type"] == "SafeToMount" && condition["status"] == "True")
}

/// Returns whether the object is the attachment of a volume to the node.
pub(crate) fn is_attachment(object: &Value, node: &str) -> bool {
    object["kind"] == "VolumeAttachment" && object["spec"]["nodeName"] == node
}

fn is(object: &Value, kind: &str, name: &str) -> bool {
    object["kind"] == kind && object["metadata"]["name"] == name
}
