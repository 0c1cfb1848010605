//! Remediation with an API server of which the test decides what it answers, and what the watches have shown.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Toleration;
use serde_json::{Value, json};

use super::*;
use crate::fake::{self, DRIVER};
use crate::grant::VOLUME_ANNOTATION;
use crate::heartbeat;
use crate::objects::{Pod, VolumeAttachment};
use crate::source::MODE_ANNOTATION;

const TIMEOUT: Duration = Duration::from_secs(15);
const LIMIT: usize = 2;

/// What an API server is asked for, as method and path.
#[derive(Debug, Default, Clone)]
struct Asked(Arc<Mutex<Vec<(String, String)>>>);

impl Asked {
    /// Returns the names of the objects of this kind in the requests with this method.
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
    /// Whether only the agents of the first two nodes have Leases.
    no_agents: Arc<AtomicBool>,
    pods: Pods,
}

/// The pods of the API server. That of the name `refused` cannot be deleted.
type Pods = Arc<Mutex<Vec<Pod>>>;

impl World {
    /// Makes nodes that have renewed their Leases until now.
    fn new(nodes: &[String]) -> Self {
        let (asked, renews) = (Asked::default(), Arc::new(AtomicBool::new(false)));
        let (log, is_renewed) = (asked.clone(), Arc::clone(&renews));
        let (pods, no_agents) = (Pods::default(), Arc::new(AtomicBool::new(false)));
        let (known, without) = (Arc::clone(&pods), Arc::clone(&no_agents));
        let cluster = fake::cluster_of(move |method, path| {
            let path = path.split('?').next().unwrap();
            log.0.lock().unwrap().push((method.to_owned(), path.to_owned()));
            let name = path.rsplit('/').next().unwrap();
            match (method, path.split('/').rev().nth(1)) {
                ("GET", Some("leases"))
                    if without.load(Ordering::SeqCst)
                        && !["node-n00", "node-n01"].contains(&name)
                        && name.starts_with("node-") =>
                {
                    (404, json!({ "status": "Failure", "reason": "NotFound", "code": 404 }))
                }
                ("GET", Some("leases")) if is_renewed.load(Ordering::SeqCst) => {
                    (200, json!(lease(name, 2)))
                }
                ("GET", Some("leases")) => (200, json!(lease(name, 1))),
                ("PATCH", Some("nodes")) => (200, node(name, &[nodes::LOST])),
                ("GET", Some("v1")) if name == "pods" => {
                    (200, json!({ "metadata": {}, "items": *known.lock().unwrap() }))
                }
                ("PATCH", Some(pod)) if name == "status" => (200, pod_of(pod, "Failed", &[])),
                ("DELETE", Some("pods")) if name == "refused" => {
                    (403, json!({ "status": "Failure", "reason": "Forbidden", "code": 403 }))
                }
                ("DELETE", Some("pods")) => {
                    known.lock().unwrap().retain(|pod| pod.name_any() != name);
                    (200, pod_of(name, "Failed", &[]))
                }
                _ => (500, Value::Null),
            }
        });
        for name in nodes {
            cluster.nodes.mirror.put(serde_json::from_value(node(name, &[])).unwrap());
            cluster.leases.mirror.put(lease(name, 1));
            cluster.heartbeats.mirror.put(lease(&heartbeat::name_of(name), 1));
        }
        Self { cluster: Arc::new(cluster), asked, renews, no_agents, pods }
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

    /// Makes a PersistentVolume that is bound to the claim `claim`.
    fn volume(&self, claim: &str, handle: &str) {
        let volume = json!({
            "metadata": { "name": claim, "uid": claim, "resourceVersion": "1" },
            "spec": {
                "claimRef": { "namespace": "default", "name": claim },
                "csi": { "driver": DRIVER, "volumeHandle": handle },
            },
        });
        self.cluster.volumes.mirror.put(serde_json::from_value(volume).unwrap());
    }

    /// Makes a pod with these claims on the node.
    fn pod(&self, name: &str, phase: &str, claims: &[&str]) {
        let pod = serde_json::from_value(pod_of(name, phase, claims)).unwrap();
        self.pods.lock().unwrap().push(pod);
    }

    /// Returns the names of the pods that exist.
    fn left(&self) -> Vec<String> {
        self.pods.lock().unwrap().iter().map(ResourceExt::name_any).collect()
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

fn pod_of(name: &str, phase: &str, claims: &[&str]) -> Value {
    let volume =
        |claim: &&str| json!({ "name": claim, "persistentVolumeClaim": { "claimName": claim } });
    let volumes: Vec<Value> = claims.iter().map(volume).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": "default", "uid": name },
        "spec": { "nodeName": "n00", "containers": [], "volumes": volumes },
        "status": { "phase": phase },
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
    let all = names(40);
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

#[tokio::test]
async fn a_node_that_has_cleaned_up_before_its_pods_were_deleted_loses_those_that_run_first() {
    let world = World::new(&names(1));
    world.volume("granted", "rbd/c/p//v");
    world.volume("stored", "local/n00/v");
    world.pod("runs", "Running", &["granted"]);
    world.pod("runs-without-grants", "Running", &["stored"]);
    world.pod("waits", "Pending", &["granted"]);
    let marked = serde_json::from_value(node("n00", &[nodes::LOST])).unwrap();
    let marked = world.cluster.nodes.mirror.put(marked);
    let mut watch = world.watch();
    watch.step(&marked, Step::Return).await.unwrap();
    assert_eq!(world.left(), ["runs-without-grants", "waits"]);
    assert!(world.asked.names("PATCH", "nodes").is_empty(), "it is not in service yet");
    watch.step(&marked, Step::Return).await.unwrap();
    assert_eq!(world.left().len(), 2);
    assert_eq!(world.asked.names("PATCH", "nodes"), ["n00"]);
}

#[tokio::test]
async fn the_pods_of_a_fenced_node_are_deleted_as_soon_as_it_has_the_taint() {
    let world = World::new(&names(1));
    world.volume("c", "rbd/c/p//v");
    world.pod("waits-for-the-volume", "Running", &["c"]);
    let marked = serde_json::from_value(node("n00", &[nodes::LOST])).unwrap();
    let marked = world.cluster.nodes.mirror.put(marked);
    world.watch().step(&marked, Step::Taint).await.unwrap();
    assert_eq!(world.asked.names("PATCH", "nodes"), ["n00"]);
    assert!(world.left().is_empty());
}

#[tokio::test]
async fn a_pod_whose_deletion_is_refused_keeps_no_other() {
    let world = World::new(&names(1));
    world.volume("c", "rbd/c/p//v");
    ["refused", "other"].iter().for_each(|name| world.pod(name, "Running", &["c"]));
    let mut watch = world.watch();
    let error = watch.delete_pods("n00").await.unwrap_err();
    assert!(error.message().contains("cannot delete pod refused"), "{error}");
    assert_eq!(world.left(), ["refused"]);
}

#[tokio::test]
async fn a_pod_that_is_made_again_on_the_node_is_deleted_once() {
    let world = World::new(&names(1));
    world.volume("c", "rbd/c/p//v");
    let make = |name: &str, key: Option<&str>| {
        world.pod(name, "Pending", &["c"]);
        let toleration = Toleration {
            key: key.map(str::to_owned),
            operator: Some("Exists".to_owned()),
            ..Toleration::default()
        };
        let mut pods = world.pods.lock().unwrap();
        let spec = pods.last_mut().unwrap().spec.as_mut().unwrap();
        spec.tolerations = Some(vec![toleration]);
    };
    make("first", None);
    let mut watch = world.watch();
    assert_eq!(watch.delete_pods("n00").await.unwrap(), 1);
    assert!(world.left().is_empty());
    make("again", None);
    make("of-the-taint", Some(nodes::OUT_OF_SERVICE));
    make("of-another-taint", Some("node.kubernetes.io/not-ready"));
    assert_eq!(watch.delete_pods("n00").await.unwrap(), 1);
    assert_eq!(world.left(), ["again", "of-the-taint"]);
    assert_eq!(watch.delete_pods("n00").await.unwrap(), 0);
}

/// Makes 30 nodes of which the first two have volumes, and the others have renewed their Leases at `time`.
fn mostly_without_volumes(time: &str) -> (World, Vec<String>) {
    let all = names(30);
    let world = World::new(&all);
    all[..2].iter().for_each(|name| world.attach(name, "rbd/c/p//v"));
    for name in &all[2..] {
        world.cluster.heartbeats.mirror.remove(&heartbeat::name_of(name));
        let mut lease = lease(name, 9);
        lease.spec.as_mut().unwrap().renew_time = serde_json::from_value(json!(time)).unwrap();
        world.cluster.leases.mirror.put(lease);
    }
    world.no_agents.store(true, Ordering::SeqCst);
    (world, all)
}

#[tokio::test(start_paused = true)]
async fn nodes_without_volumes_count_when_they_fall_silent_together() {
    let (world, _) = mostly_without_volumes("2030-01-01T00:00:09.000000Z");
    let mut watch = world.watch();
    turns(&mut watch).await;
    assert!(world.marked().is_empty());
    assert_eq!(watch.said.values().copied().collect::<Vec<_>>(), [Step::Refuse; 2]);
    let counted = |state: &str, count: u64| {
        let sample = format!("cleat_controller_nodes{{state=\"{state}\"}} {count}\n");
        let text = world.cluster.metrics.text().unwrap();
        assert!(text.contains(&sample), "{sample}{text}");
    };
    counted("silent", 2);
    counted("refused", 2);
    drop(watch);
    counted("silent", 0);
    counted("refused", 0);
}

#[tokio::test(start_paused = true)]
async fn nodes_that_have_been_off_for_long_do_not_count() {
    let (world, all) = mostly_without_volumes("2029-12-31T00:00:00.000000Z");
    turns(&mut world.watch()).await;
    assert_eq!(world.marked(), all[..2]);
}
