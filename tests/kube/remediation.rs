//! Node remediation on a real API server: a node whose kubelet and agent are silent loses its volumes and its pods, and
//! returns by itself. The tests play the kubelets; one of them has a real agent.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cleat_grants::object::{Reason, Signal, Truth};
use cleat_kube::{Config, Remediation, rights};
use futures::future::join_all;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::control_plane::{self, ControlPlane, controller_user, node_token};
use crate::controller_rights::{account, compare};
use crate::fixture::{World, eventually, run};
use crate::node::TestNode;

/// The namespace of the account of the controllers that remediate.
const NAMESPACE: &str = control_plane::REMEDIATION;

const LOST: &str = "cleat.csi.storage/lost";
const MAINTENANCE: &str = "cleat.csi.storage/maintenance";

/// How long nodes of these tests must be silent.
const TIMEOUT: Duration = Duration::from_secs(3);

/// A node whose kubelet and agent are played.
struct Played {
    name: String,
    /// Whether it renews its Leases.
    beats: Arc<AtomicBool>,
}

impl Played {
    async fn new(world: &World, name: &str) -> Self {
        let name = world.node(name).await;
        let kubelet = json!({ "metadata": { "name": name }, "spec": {} });
        let kubelets: Api<Lease> = Api::namespaced(world.client.clone(), "kube-node-lease");
        let lease = serde_json::from_value(kubelet).unwrap();
        kubelets.create(&PostParams::default(), &lease).await.unwrap();
        let agents: Api<Lease> = Api::namespaced(world.client.clone(), NAMESPACE);
        let beats = Arc::new(AtomicBool::new(true));
        let (beat, node) = (Arc::clone(&beats), name.clone());
        tokio::spawn(async move {
            loop {
                if beat.load(Ordering::Relaxed) {
                    renew(&kubelets, &node).await;
                    renew(&agents, &format!("node-{node}")).await;
                }
                tokio::time::sleep(TIMEOUT / 10).await;
            }
        });
        Self { name, beats }
    }

    fn beat(&self, beats: bool) {
        self.beats.store(beats, Ordering::Relaxed);
    }

    /// Stops its heartbeats after the agent has renewed the Lease that the controller makes.
    async fn fall_silent(&self, world: &World) {
        let agents: Api<Lease> = Api::namespaced(world.client.clone(), NAMESPACE);
        eventually(&format!("the agent of {} has renewed its Lease", self.name), async || {
            let lease = agents.get_opt(&format!("node-{}", self.name)).await.unwrap()?;
            lease.spec?.renew_time.map(|_| ())
        })
        .await;
        self.beat(false);
    }
}

/// Renews a Lease if it exists.
async fn renew(leases: &Api<Lease>, name: &str) {
    let time = format!("{:.6}", Timestamp::now());
    let patch = Patch::Merge(json!({ "spec": { "renewTime": time } }));
    let _ = leases.patch(name, &PatchParams::default(), &patch).await;
}

/// Returns the settings of a controller that remediates, with exactly the rights for it.
async fn config(world: &World, dry_run: bool) -> Config {
    static KUBECONFIG: OnceCell<PathBuf> = OnceCell::const_new();
    let make = async || {
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE },
        });
        let objects = account(NAMESPACE).into_iter().chain(rights::remediation(NAMESPACE));
        control_plane::create(&world.client, std::iter::once(namespace).chain(objects)).await;
        ControlPlane::get().make_controller_kubeconfig(NAMESPACE, NAMESPACE).await
    };
    let kubeconfig = Some(KUBECONFIG.get_or_init(make).await.clone());
    let remediation = Some(Remediation { timeout: TIMEOUT, limit: 1, dry_run });
    Config { kubeconfig, remediation, ..world.config(NAMESPACE) }
}

async fn node(world: &World, name: &str) -> Node {
    world.all::<Node>().get(name).await.unwrap()
}

/// Waits for an event about a node, and returns its reason and its type.
async fn event(world: &World, node: &str, text: &str) -> (String, String) {
    let events: Api<Event> = Api::namespaced(world.client.clone(), "default");
    let about = ListParams::default().fields(&format!("involvedObject.name={node}"));
    eventually(&format!("{node} has an event with {text}"), async || {
        let found = events.list(&about).await.unwrap().items;
        let says = |event: &Event| event.message.as_ref().is_some_and(|note| note.contains(text));
        let found = found.iter().find(|event| says(event))?;
        Some((found.reason.clone()?, found.type_.clone()?))
    })
    .await
}

/// Makes a pod on `node` that uses the claim `claim`.
async fn pod(world: &World, name: &str, node: &str, claim: Option<&str>) {
    let volumes = claim
        .map(|claim| json!([{ "name": "data", "persistentVolumeClaim": { "claimName": claim } }]));
    let pod = json!({
        "metadata": { "name": format!("{name}.{}", world.driver) },
        "spec": {
            "nodeName": node, "containers": [{ "name": "c", "image": "i" }], "volumes": volumes,
        },
    });
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), "default");
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
}

async fn pods_on(world: &World, node: &str) -> Vec<String> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), "default");
    let selected = ListParams::default().fields(&format!("spec.nodeName={node}"));
    pods.list(&selected).await.unwrap().iter().map(ResourceExt::name_any).collect()
}

fn taint(node: &Node) -> Option<String> {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    let mut ours = taints.filter(|taint| taint.key == "node.kubernetes.io/out-of-service");
    ours.next().and_then(|taint| taint.value.clone())
}

async fn annotate(world: &World, node: &str, name: &str, value: Value) {
    let patch = Patch::Merge(json!({ "metadata": { "annotations": { name: value } } }));
    world.all::<Node>().patch(node, &PatchParams::default(), &patch).await.unwrap();
}

/// Checks for longer than the timeout that a node is not marked.
async fn stays_unmarked(world: &World, name: &str) {
    for _ in 0..20 {
        assert!(!node(world, name).await.annotations().contains_key(LOST));
        tokio::time::sleep(TIMEOUT / 10).await;
    }
}

/// Creates a volume that is bound to the claim of the same name, and returns the name.
async fn claimed_volume(world: &World, name: &str, handle: &str) -> String {
    let volume = world.volume(name, handle).await;
    let claim = json!({ "namespace": "default", "name": volume });
    let patch = Patch::Merge(json!({ "spec": { "claimRef": claim } }));
    let volumes = world.all::<PersistentVolume>();
    volumes.patch(&volume, &PatchParams::default(), &patch).await.unwrap();
    volume
}

#[test]
fn a_silent_node_loses_volumes_and_pods_and_returns_by_itself() {
    run(async |world: World| {
        let settings = config(&world, false).await;
        let leader = world.controller_of(settings.clone());
        let leads = "cleat_controller_leader 1\n";
        let has = |metrics: String, text: &str| metrics.contains(text).then_some(());
        eventually("the first one leads", async || has(leader.metrics(), leads)).await;
        let identity = format!("{}-next", settings.identity);
        let controller = world.controller_of(Config { identity, ..settings });
        // A candidate observes the Leases.
        let watches = r#"cleat_controller_api_requests_total{verb="watch"} 2"#;
        eventually("the next one watches", async || has(controller.metrics(), watches)).await;
        let (a, b) = (Played::new(&world, "a").await, Played::new(&world, "b").await);
        let (handle, volume) = ("shared/v", claimed_volume(&world, "v", "shared/v").await);
        let first = world.attach(&volume, &a.name).await;
        let generation = world.attached(&first).await;
        world.mount(handle, &a.name, generation).await;
        pod(&world, "with", &a.name, Some(&volume)).await;
        pod(&world, "without", &a.name, None).await;
        a.fall_silent(&world).await;
        leader.stop().await;
        let began = std::time::Instant::now();
        let without = format!("without.{}", world.driver);
        eventually("the pod with the volume is deleted", async || {
            (pods_on(&world, &a.name).await == [without.clone()]).then_some(())
        })
        .await;
        println!(
            "figures: the volume and the pods of a silent node are taken in {:.1?}",
            began.elapsed()
        );
        assert!(world.storage.image(handle).is_cut(&a.name));
        let lost = node(&world, &a.name).await;
        assert!(lost.annotations().contains_key(LOST));
        assert_eq!(taint(&lost).as_deref(), Some(world.driver.as_str()));
        for (text, reason) in [
            ("neither kubelet nor cleat", "NodeLost"),
            ("out-of-service", "OutOfService"),
            ("its pods with volumes are deleted", "PodsDeleted"),
        ] {
            let expected = (reason.to_owned(), "Warning".to_owned());
            assert_eq!(event(&world, &a.name, text).await, expected);
        }
        // Kubernetes detaches then, and attaches elsewhere.
        let second = world.attach(&volume, &b.name).await;
        world.detach(&first).await;
        world.gone(&first).await;
        let next = world.attached(&second).await;
        world.mount(handle, &b.name, next).await;

        // The node works again. It is in service when its agent has cleaned up, and not before.
        a.beat(true);
        tokio::time::sleep(TIMEOUT / 2).await;
        assert!(taint(&node(&world, &a.name).await).is_some());
        let clean = (Signal::Cleaned, Truth::True, Reason::Cleaned, generation);
        world.report(handle, &a.name, &[clean]).await;
        eventually("the node is in service", async || {
            let node = node(&world, &a.name).await;
            let is_marked = node.annotations().contains_key(LOST) || taint(&node).is_some();
            (!is_marked).then_some(())
        })
        .await;
        let returned = event(&world, &a.name, "in service").await;
        assert_eq!(returned, ("NodeReturned".to_owned(), "Normal".to_owned()));
        nothing_happens_to_many_nodes_or_in_maintenance(&world, &a, &b).await;
        a_write_of_a_node_conflicts(&world).await;
        controller.stop().await;
        compare(NAMESPACE, &rights::remediation(NAMESPACE));
        a_dry_run_only_says_what_it_would_do(&world, &a, &b).await;
    });
}

async fn a_dry_run_only_says_what_it_would_do(world: &World, a: &Played, b: &Played) {
    let controller = world.controller_of(config(world, true).await);
    eventually("the dry run leads", async || (controller.syncs() > 0).then_some(())).await;
    b.beat(true);
    a.beat(true);
    tokio::time::sleep(TIMEOUT / 3).await;
    a.beat(false);
    event(world, &a.name, "dry run").await;
    stays_unmarked(world, &a.name).await;
    controller.stop().await;
}

/// Has remediation read a node again after a conflict: it takes a mark from a node that works, and is disturbed.
async fn a_write_of_a_node_conflicts(world: &World) {
    let node = Played::new(world, "c").await;
    let user = controller_user(NAMESPACE);
    let has_read = || {
        let requests = ControlPlane::get().audited(&user);
        let is_read = |request: &Value| {
            request["verb"] == "get" && request["objectRef"]["resource"] == "nodes"
        };
        requests.iter().any(is_read)
    };
    let is_marked = async || self::node(world, &node.name).await.annotations().contains_key(LOST);
    let mut writes = 0;
    eventually("a node is read after a conflict", async || {
        annotate(world, &node.name, LOST, json!("2030-01-01T00:00:00Z")).await;
        while is_marked().await && !has_read() {
            for _ in 0..10 {
                let changes = (0..8).map(|number| json!((writes + number).to_string()));
                let write = |value| annotate(world, &node.name, "test.io/write", value);
                join_all(changes.map(write)).await;
                writes += 8;
            }
        }
        has_read().then_some(())
    })
    .await;
    eventually("the mark is gone", async || (!is_marked().await).then_some(())).await;
}

/// Both nodes have a volume.
async fn nothing_happens_to_many_nodes_or_in_maintenance(world: &World, a: &Played, b: &Played) {
    let other = claimed_volume(world, "w", "shared/w").await;
    let attachment = world.attach(&other, &a.name).await;
    let generation = world.attached(&attachment).await;
    world.mount("shared/w", &a.name, generation).await;
    a.fall_silent(world).await;
    b.fall_silent(world).await;
    event(world, &b.name, "--remediation-limit").await;
    stays_unmarked(world, &a.name).await;
    annotate(world, &a.name, MAINTENANCE, json!("true")).await;
    b.beat(true);
    event(world, &a.name, MAINTENANCE).await;
    stays_unmarked(world, &a.name).await;
    annotate(world, &a.name, MAINTENANCE, Value::Null).await;
    a.beat(true);
    assert!(!world.storage.image("shared/w").is_cut(&a.name));
}

#[test]
fn an_agent_renews_its_lease_and_no_other() {
    run(async |world: World| {
        const NAMESPACE: &str = control_plane::NAMESPACE;
        let leases: Api<Lease> = Api::namespaced(world.client.clone(), NAMESPACE);
        let create = async |name: &str| {
            let spec = json!({ "leaseDurationSeconds": 3 });
            let lease = json!({ "metadata": { "name": name }, "spec": spec });
            let lease = serde_json::from_value(lease).unwrap();
            leases.create(&PostParams::default(), &lease).await.unwrap()
        };
        let own = format!("node-a.{}", world.driver);
        create(&own).await;
        let agent = TestNode::start(&world, "a").await;
        let renewed = async |after: Option<Timestamp>| {
            eventually("the agent renews its Lease", async || {
                let renewed = leases.get(&own).await.unwrap().spec?.renew_time?.0;
                (Some(renewed) > after).then_some(renewed)
            })
            .await
        };
        let first = renewed(None).await;
        renewed(Some(first)).await;

        let (mut foreign, leader) = (create("node-other").await, "the-leader");
        create(leader).await;
        let token = node_token(&world.client, NAMESPACE, &format!("b.{}", world.driver)).await;
        let client: Client = ControlPlane::get().client_with(&token).await;
        let node: Api<Lease> = Api::namespaced(client, NAMESPACE);
        let (post, delete) = (PostParams::default(), DeleteParams::default());
        let code = |result: kube::Result<Lease>| match result {
            Err(kube::Error::Api(status)) => status.code,
            other => panic!("{other:?}"),
        };
        assert_eq!(code(node.replace("node-other", &post, &foreign).await), 403);
        foreign.metadata = leases.get(leader).await.unwrap().metadata;
        assert_eq!(code(node.replace(leader, &post, &foreign).await), 403);
        let made = json!({ "metadata": { "name": "node-new" }, "spec": {} });
        assert_eq!(code(node.create(&post, &serde_json::from_value(made).unwrap()).await), 403);
        assert!(node.delete("node-other", &delete).await.is_err());
        drop(agent);
    });
}
