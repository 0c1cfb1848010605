//! Nodes that are marked as lost. Remediation removes a mark when the node works again. A controller without remediation
//! still respects it and cannot remove it: the volumes of the node may be fenced, and its pods may run on with mounts that
//! do not work. Only the Leases tell when that has ended, and this controller does not watch them.

use std::sync::Arc;

use kube::runtime::events::EventType;
use kube::{Resource, ResourceExt};

use crate::cluster::Cluster;
use crate::nodes::{LOST, OUT_OF_SERVICE};
use crate::objects::Node;

/// Returns the nodes that are marked as lost.
pub(crate) fn marked(cluster: &Cluster) -> Vec<Arc<Node>> {
    let mut nodes = cluster.nodes.mirror.all();
    nodes.retain(|node| node.annotations().contains_key(LOST));
    nodes
}

/// Works in the place of remediation until the future is dropped.
pub(crate) async fn run(cluster: Arc<Cluster>) {
    report_left(&cluster).await;
    std::future::pending().await
}

/// Says, in the log and in events, which nodes stay marked because remediation is off.
async fn report_left(cluster: &Cluster) {
    for node in marked(cluster) {
        let name = node.name_any();
        let text = format!(
            "it is marked as lost, and node remediation is off: it gets no volumes until the mark is removed. When it \
             works and its pods with volumes have ended, run: kubectl annotate node {name} {LOST}- && kubectl taint node \
             {name} {OUT_OF_SERVICE}-"
        );
        tracing::warn!(node = name, "{text}");
        let about = node.object_ref(&());
        cluster.events.publish_about(&about, EventType::Warning, "NodeStaysLost", text).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::{Value, json};

    use super::*;
    use crate::fake;

    #[tokio::test]
    async fn a_controller_without_remediation_says_which_nodes_stay_marked() {
        let paths = Arc::new(Mutex::new(Vec::new()));
        let asked = Arc::clone(&paths);
        let cluster = fake::cluster_of(move |method, path| {
            asked.lock().unwrap().push(format!("{method} {}", path.split('?').next().unwrap()));
            (500, Value::Null)
        });
        for (name, annotations) in
            [("a", json!({ LOST: "2030-01-01T00:00:00Z" })), ("b", json!({}))]
        {
            let metadata = json!({
                "name": name, "uid": name, "resourceVersion": "1", "annotations": annotations,
            });
            let node = serde_json::from_value(json!({ "metadata": metadata })).unwrap();
            cluster.nodes.mirror.put(node);
        }
        let names: Vec<String> = marked(&cluster).iter().map(|node| node.name_any()).collect();
        assert_eq!(names, ["a"]);
        report_left(&cluster).await;
        let events = std::mem::take(&mut *paths.lock().unwrap());
        assert_eq!(events, ["POST /apis/events.k8s.io/v1/namespaces/default/events"]);
    }
}
