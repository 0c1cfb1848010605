//! Remediation with an API server of which the test decides what it answers, and what the watches have shown.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use serde_json::{Value, json};

use super::*;
use crate::fake::{self, DRIVER};
use crate::grant::VOLUME_ANNOTATION;
use crate::heartbeat;
use crate::source::MODE_ANNOTATION;

const TIMEOUT: Duration = Duration::from_secs(15);
const LIMIT: usize = 2;

/// What an API server is asked for, as method and path.
#[derive(Debug, Default, Clone)]
struct Asked(Arc<Mutex<Vec<(String, String)>>>);

impl Asked {
    /// Returns the names of the objects at which requests with this method were directed that have this kind.
    fn names(&self, method: &str, kind: &str) -> Vec<String> {
        let asked = self.0.lock().unwrap();
        let found = asked
            .iter()
            .filter(|(known, path)| known == method && path.split('/').rev().nth(1) == Some(kind));
        found.map(|(_, path)| path.rsplit('/').next().unwrap().to_owned()).collect()
    }
}

/// Some nodes, and what the API server knows of them.
struct World {
    cluster: Arc<Cluster>,
    asked: Asked,
    /// Whether the nodes renew their Leases. The watches do not show it.
    renews: Arc<AtomicBool>,
}

impl World {
    /// Makes nodes that have renewed their Leases until now.
    fn new(nodes: &[String]) -> Self {
        let (asked, renews) = (Asked::default(), Arc::new(AtomicBool::new(false)));
        let (log, is_renewed) = (asked.clone(), Arc::clone(&renews));
        let cluster = fake::cluster_of(move |method, path| {
            let path = path.split('?').next().unwrap();
            log.0.lock().unwrap().push((method.to_owned(), path.to_owned()));
            let name = path.rsplit('/').next().unwrap();
            match (method, path.split('/').rev().nth(1)) {
                ("GET", Some("leases")) if is_renewed.load(Ordering::SeqCst) => {
                    (200, json!(lease(name, 2)))
                }
                ("GET", Some("leases")) => (200, json!(lease(name, 1))),
                ("PATCH", Some("nodes")) => (200, node(name, &[nodes::LOST])),
                ("GET", Some("v1")) if name == "pods" => {
                    (200, json!({ "metadata": {}, "items": [] }))
                }
                _ => (500, Value::Null),
            }
        });
        for name in nodes {
            cluster.nodes.mirror.put(serde_json::from_value(node(name, &[])).unwrap());
            cluster.leases.mirror.put(lease(name, 1));
            cluster.heartbeats.mirror.put(lease(&heartbeat::name_of(name), 1));
        }
        Self { cluster: Arc::new(cluster), asked, renews }
    }

    /// Attaches a volume to a node. It needs a grant unless it is stored there.
    fn attach(&self, node: &str, handle: &str) {
        let annotations = json!({ VOLUME_ANNOTATION: handle, MODE_ANNOTATION: "ReadWrite" });
        let is_local = handle.starts_with("local/");
        let attachment: VolumeAttachment = serde_json::from_value(json!({
            "metadata": {
                "name": format!("{node}-{handle}"), "uid": node, "resourceVersion": "7",
                "finalizers": if is_local { vec![] } else { vec![&self.cluster.finalizer] },
                "annotations": if is_local { Value::Null } else { annotations },
            },
            "spec": { "attacher": DRIVER, "nodeName": node, "source": {} },
            "status": { "attached": true },
        }))
        .unwrap();
        self.cluster.attachments.mirror.put(attachment);
    }

    /// Returns the nodes that are marked as lost.
    fn marked(&self) -> Vec<String> {
        let all = self.cluster.nodes.mirror.all().into_iter();
        let mut marked: Vec<String> = all
            .filter(|node| node.annotations().contains_key(nodes::LOST))
            .map(|node| node.name_any())
            .collect();
        marked.sort();
        marked
    }

    fn watch(&self) -> Watch {
        let settings = Remediation { timeout: TIMEOUT, limit: LIMIT, dry_run: false };
        Watch::new(Arc::clone(&self.cluster), settings)
    }
}

fn node(name: &str, annotations: &[&str]) -> Value {
    let annotations: BTreeMap<&str, &str> = annotations.iter().map(|name| (*name, "x")).collect();
    let version = if annotations.is_empty() { "1" } else { "2" };
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {
            "name": name, "uid": name, "resourceVersion": version, "annotations": annotations,
        },
    })
}

/// Returns a Lease that was renewed in this second, which is its version, too.
fn lease(name: &str, second: u64) -> Lease {
    let time = format!("2030-01-01T00:00:{second:02}.000000Z");
    serde_json::from_value(json!({
        "metadata": { "name": name, "uid": name, "resourceVersion": second.to_string() },
        "spec": { "renewTime": time, "leaseDurationSeconds": TIMEOUT.as_secs() },
    }))
    .unwrap()
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("n{number:02}")).collect()
}

/// Looks at the nodes each second for as long as a node may be silent, and once more.
async fn turns(watch: &mut Watch) {
    for _ in 0..=TIMEOUT.as_secs() {
        watch.turn().await.unwrap();
        tokio::time::advance(PERIOD).await;
    }
    watch.turn().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_silent_node_with_volumes_that_are_stored_on_it_is_left_alone() {
    let world = World::new(&names(2));
    world.attach("n00", "local/n00/v");
    world.attach("n01", "rbd/c/p//v");
    turns(&mut world.watch()).await;
    assert_eq!(world.marked(), ["n01"]);
    // Nor does its agent need a Lease.
    let without = World::new(&[]);
    let known = serde_json::from_value(node("n00", &[])).unwrap();
    without.cluster.nodes.mirror.put(known);
    without.attach("n00", "local/n00/v");
    without.watch().turn().await.unwrap();
    assert!(without.asked.0.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn no_node_is_marked_because_the_watches_have_stopped() {
    let all = names(24);
    let world = World::new(&all);
    all.iter().for_each(|name| world.attach(name, "rbd/c/p//v"));
    let mut watch = world.watch();
    watch.turn().await.unwrap();
    // All renew their Leases, and no watch shows it.
    world.renews.store(true, Ordering::SeqCst);
    turns(&mut watch).await;
    assert!(world.marked().is_empty());
    assert!(watch.said.is_empty(), "nor is the limit reached: {:?}", watch.said);
}

#[tokio::test(start_paused = true)]
async fn the_leases_of_a_node_are_read_before_it_is_marked() {
    let world = World::new(&names(1));
    world.attach("n00", "rbd/c/p//v");
    let mut watch = world.watch();
    watch.turn().await.unwrap();
    tokio::time::advance(TIMEOUT).await;
    let known = world.cluster.nodes.mirror.get("n00").unwrap();
    assert_eq!(watch.pulse.silence("n00"), Silence::Lost);
    world.renews.store(true, Ordering::SeqCst);
    watch.step(&known, Step::Mark).await.unwrap();
    assert!(world.marked().is_empty());
    world.renews.store(false, Ordering::SeqCst);
    tokio::time::advance(TIMEOUT).await;
    watch.step(&known, Step::Mark).await.unwrap();
    assert_eq!(world.marked(), ["n00"]);
}
