//! What the pods of a node may do at the API server: the daemon reads grants and writes its own status, and the sidecars
//! beside it write what concerns volumes of their own node. `cluster::provision` shows that the sidecars need no more.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::path::Path;

use cleat_kube::rights::NODE_ACCOUNT;
use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};

use crate::chart::render;
use crate::cluster::installed::snapshot_definitions;
use crate::cluster::objects::apply;
use crate::control_plane::{ControlPlane, NAMESPACE, account_token, node_token, pod_token};
use crate::controller_rights::{Right, granted};
use crate::deploy::{DIRECTORIES, build, documents};
use crate::fixture::{World, eventually, run};
use crate::rights::check_forbidden;

const BASE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/base");

const DRIVER: &str = "cleat.csi.storage";

/// The finalizer of csi-provisioner.
const FINALIZER: &str = "external-provisioner.volume.kubernetes.io/finalizer";

/// The finalizer of Kubernetes, which the API server adds.
const PROTECTION: &str = "kubernetes.io/pv-protection";

const SELECTED: &str = "volume.kubernetes.io/selected-node";

/// Returns the rights that the bindings give to an account.
fn bound(objects: &[Value], account: &str) -> BTreeSet<Right> {
    let is_of_account = |object: &&Value| {
        let subjects = object["subjects"].as_array().into_iter().flatten();
        subjects.into_iter().any(|subject| subject["name"] == account)
    };
    let role = |binding: &Value| {
        let is_meant = |object: &&Value| {
            object["kind"] == binding["roleRef"]["kind"]
                && object["metadata"]["name"] == binding["roleRef"]["name"]
                && object["metadata"]["namespace"] == binding["metadata"]["namespace"]
        };
        objects.iter().find(is_meant).unwrap_or_else(|| panic!("no role for {binding}")).clone()
    };
    granted(&objects.iter().filter(is_of_account).map(role).collect::<Vec<_>>())
}

fn right(group: &str, resource: &str, verb: &str, namespace: &str) -> Right {
    [group, resource, verb, namespace].map(str::to_owned)
}

#[test]
fn the_account_of_the_daemon_has_the_rights_of_the_list_and_no_others() {
    let group = "cleat.csi.storage";
    let mut allowed: BTreeSet<Right> =
        ["get", "list", "watch"].map(|verb| right(group, "volumegrants", verb, "")).into();
    allowed.insert(right(group, "volumegrants/status", "update", ""));
    for verb in ["get", "update"] {
        allowed.insert(right("coordination.k8s.io", "leases", verb, NAMESPACE));
    }
    for directory in DIRECTORIES {
        assert_eq!(bound(&build(directory), NODE_ACCOUNT), allowed, "{directory}");
    }
    let everything = "snapshotter.enabled=true,images.enabled=true,images.csiAddons.enabled=true,\
                      remediation.enabled=true,monitoring.enabled=true";
    for values in ["grants=true", everything] {
        let objects = render(&["--set", values]).unwrap();
        assert_eq!(bound(&objects, NODE_ACCOUNT), allowed, "{values}");
    }
}

/// Without the component `secrets`: the sidecar of CSI-Addons reads the Secret of each NetworkFence.
#[test]
fn no_account_may_read_a_secret_but_that_of_a_network_fence() {
    for directory in DIRECTORIES {
        let objects = build(directory);
        let roles = objects.iter().filter_map(|object| object["rules"].as_array()).flatten();
        let of_secrets = roles.filter(|rule| rule["resources"].to_string().contains("secrets"));
        let found: Vec<&Value> = of_secrets.collect();
        let rule = json!({
            "apiGroups": [""], "resources": ["secrets"], "verbs": ["get"],
            "resourceNames": ["cleat-network-fence"],
        });
        let wanted = if directory == "overlays/all" { vec![&rule] } else { Vec::new() };
        assert_eq!(found, wanted, "{directory}");
    }
}

/// The objects of one kind for one account.
#[derive(Clone)]
struct Objects(Api<DynamicObject>);

impl Objects {
    fn of_cluster(client: &Client, version: &str, kind: &str, plural: &str) -> Self {
        Self(Api::all_with(client.clone(), &resource(version, kind, plural)))
    }

    fn within(client: &Client, namespace: &str, version: &str, kind: &str, plural: &str) -> Self {
        let resource = resource(version, kind, plural);
        Self(Api::namespaced_with(client.clone(), namespace, &resource))
    }

    fn volumes(client: &Client) -> Self {
        Self::of_cluster(client, "v1", "PersistentVolume", "persistentvolumes")
    }

    fn claims(client: &Client) -> Self {
        let plural = "persistentvolumeclaims";
        Self::within(client, "default", "v1", "PersistentVolumeClaim", plural)
    }

    fn capacities(client: &Client) -> Self {
        let (kind, plural) = ("CSIStorageCapacity", "csistoragecapacities");
        Self::within(client, NAMESPACE, "storage.k8s.io/v1", kind, plural)
    }

    fn contents(client: &Client) -> Self {
        let (kind, plural) = ("VolumeSnapshotContent", "volumesnapshotcontents");
        Self::of_cluster(client, "snapshot.storage.k8s.io/v1", kind, plural)
    }

    async fn create(&self, object: &Value) -> kube::Result<DynamicObject> {
        let object = serde_json::from_value(object.clone()).unwrap();
        self.0.create(&PostParams::default(), &object).await
    }

    async fn patch(&self, name: &str, body: Value) -> kube::Result<DynamicObject> {
        self.0.patch(name, &PatchParams::default(), &Patch::Merge(body)).await
    }

    async fn patch_status(&self, name: &str, body: Value) -> kube::Result<DynamicObject> {
        let body = json!({ "status": body });
        self.0.patch_status(name, &PatchParams::default(), &Patch::Merge(body)).await
    }

    /// Changes an object as csi-provisioner does: it reads it and writes it again.
    async fn update(
        &self,
        reader: &Self,
        name: &str,
        change: impl Fn(&mut Value),
    ) -> kube::Result<DynamicObject> {
        let mut object = serde_json::to_value(reader.0.get(name).await.unwrap()).unwrap();
        change(&mut object);
        let object = serde_json::from_value(object).unwrap();
        self.0.replace(name, &PostParams::default(), &object).await
    }

    async fn delete(&self, name: &str) -> kube::Result<()> {
        self.0.delete(name, &DeleteParams::default()).await.map(|_| ())
    }
}

fn resource(version: &str, kind: &str, plural: &str) -> ApiResource {
    let (group, version) = version.rsplit_once('/').unwrap_or(("", version));
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

/// The accounts with their tokens.
struct Tokens {
    admin: Client,
    /// The daemon of the first node.
    daemon: Client,
    /// The sidecars of both nodes.
    files: [Client; 2],
    /// `cleat-images`, on the first node.
    images: Client,
    nodes: [String; 2],
}

impl Tokens {
    /// Installs the accounts and the policies, and makes pods of them.
    async fn new(world: &World) -> Self {
        let client = &world.client;
        let files = ["provisioner.yaml", "policies.yaml"]
            .map(|file| documents(&Path::new(BASE).join(file)));
        let images = build("overlays/rbd").into_iter().filter(|object| {
            let kind = object["kind"].as_str().unwrap();
            (kind == "ServiceAccount" || kind.contains("Role"))
                && object["metadata"]["name"].as_str().unwrap().starts_with("cleat-images")
        });
        let contents = json!([{
            "apiGroups": ["snapshot.storage.k8s.io"], "verbs": ["*"],
            "resources": ["volumesnapshotcontents", "volumesnapshotcontents/status"],
        }]);
        let objects = files.concat().into_iter().chain(images).chain(snapshot_definitions());
        let objects = objects.chain(rights("files-of-a-test", "cleat-files", &contents));
        for object in objects {
            apply(client, &object).await.unwrap_or_else(|error| panic!("{object}: {error}"));
        }
        let nodes = [world.node("a").await, world.node("b").await];
        let [a, b] = &nodes;
        let daemon = node_token(client, NAMESPACE, a).await;
        let mut clients = Vec::new();
        for (account, node) in [("cleat-files", a), ("cleat-files", b), ("cleat-images", a)] {
            let name = format!("{account}-{node}");
            let token = pod_token(client, NAMESPACE, account, &name, node).await;
            clients.push(world.plane.client_with(&token).await);
        }
        let [first, second, images] = clients.try_into().unwrap_or_else(|_| unreachable!());
        let daemon = world.plane.client_with(&daemon).await;
        Self { admin: client.clone(), daemon, files: [first, second], images, nodes }
    }
}

/// Returns a role with its binding, for an account.
fn rights(name: &str, account: &str, rules: &Value) -> [Value; 2] {
    let api = "rbac.authorization.k8s.io/v1";
    let metadata = json!({ "name": name });
    let role =
        json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name });
    let subject = json!({ "kind": "ServiceAccount", "name": account, "namespace": NAMESPACE });
    [
        json!({ "apiVersion": api, "kind": "ClusterRole", "metadata": metadata, "rules": rules }),
        json!({ "apiVersion": api, "kind": "ClusterRoleBinding", "metadata": metadata,
                "roleRef": role, "subjects": [subject] }),
    ]
}

fn claim(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": name, "annotations": { "kept": "yes" } },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "none",
            "resources": { "requests": { "storage": "1Gi" } },
        },
    })
}

/// A PersistentVolume as csi-provisioner makes it for the claim with this UID.
fn volume(uid: &str, handle: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": { "name": format!("pvc-{uid}"), "finalizers": [FINALIZER] },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" },
            "persistentVolumeReclaimPolicy": "Delete", "storageClassName": "none",
            "claimRef": { "namespace": "default", "name": "claim", "uid": uid },
            "csi": { "driver": DRIVER, "volumeHandle": handle },
        },
    })
}

fn capacity(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "CSIStorageCapacity", "metadata": { "name": name },
        "storageClassName": "none", "capacity": "1Gi",
        "nodeTopology": { "matchLabels": { format!("topology.{DRIVER}/node"): node } },
    })
}

/// Waits until a policy refuses the attempt: it takes effect a moment after it was created, and so does a role. The attempt
/// may succeed before.
async fn in_effect<T: Debug>(text: &str, attempt: impl AsyncFn() -> kube::Result<T>) {
    eventually(&format!("the policy with: {text}"), async || {
        let refused = attempt().await.err()?;
        refused.to_string().contains(text).then_some(())
    })
    .await;
}

#[test]
fn a_stolen_token_of_a_node_changes_no_volume_of_another_one() {
    run(async |world: World| {
        let tokens = Tokens::new(&world).await;
        tokens.of_the_daemon().await;
        tokens.new_volumes().await;
        tokens.known_volumes().await;
        tokens.claims().await;
        tokens.capacities().await;
        tokens.snapshots().await;
        tokens.images().await;
    });
}

impl Tokens {
    /// The daemon has no right at all.
    async fn of_the_daemon(&self) {
        let client = &self.daemon;
        let cannot = "cannot";
        let volumes = Objects::volumes(client);
        let created = volumes.create(&volume("d-1", "rbd/ceph/pool//victim")).await;
        check_forbidden("a new volume", created, cannot);
        let changed = volumes.patch("any", json!({ "metadata": { "finalizers": null } })).await;
        check_forbidden("a change of a volume", changed, cannot);
        check_forbidden("the end of a volume", volumes.delete("any").await, cannot);
        let claims = Objects::claims(client);
        Objects::claims(&self.admin).create(&claim("of-daemon")).await.unwrap();
        let admin = Objects::claims(&self.admin);
        let changed = claims.update(&admin, "of-daemon", |_| ()).await;
        check_forbidden("a claim", changed, cannot);
        let created = Objects::capacities(client).create(&capacity("d", &self.nodes[0])).await;
        check_forbidden("a capacity", created, cannot);
        let event = json!({
            "apiVersion": "v1", "kind": "Event", "metadata": { "name": "e" },
            "involvedObject": { "namespace": "default" },
        });
        let events = Objects::within(client, "default", "v1", "Event", "events");
        check_forbidden("an event", events.create(&event).await, cannot);
        let secrets = Objects::within(client, NAMESPACE, "v1", "Secret", "secrets");
        let read = secrets.0.get("cleat-ceph-controller").await;
        check_forbidden("a Secret", read, cannot);
    }

    /// A new volume is one that was made for its claim.
    async fn new_volumes(&self) {
        let [a, b] = &self.nodes;
        let [volumes, others] = [0, 1].map(|node| Objects::volumes(&self.files[node]));
        let made = "a volume that was made for its claim";
        let of_a = format!("file/{a}/default/pvc-n-1");
        let foreign = volume("n-0", &format!("file/{a}/default/pvc-n-0"));
        in_effect(made, async || others.create(&foreign).await).await;
        for (what, handle) in [
            ("a file of another node", format!("file/{b}/default/pvc-n-1")),
            ("the image of another claim", "rbd/ceph/pool//pvc-victim".to_owned()),
            ("an object volume of another claim", "object/s3/pvc-victim".to_owned()),
            ("a static volume", "pvc-n-1".to_owned()),
            ("a file of another claim", format!("file/{a}/default/pvc-victim")),
        ] {
            check_forbidden(what, volumes.create(&volume("n-1", &handle)).await, made);
        }
        let mut other = volume("n-1", &of_a);
        other["metadata"]["name"] = json!("pvc-n-2");
        check_forbidden("another name", volumes.create(&other).await, made);
        let mut other = volume("n-1", &of_a);
        other["spec"].as_object_mut().unwrap().remove("claimRef");
        check_forbidden("no claim", volumes.create(&other).await, made);
        let mut other = volume("n-1", &of_a);
        other["spec"]["csi"]["driver"] = json!("another.driver");
        let driver = "only write PersistentVolumes of cleat.csi.storage";
        check_forbidden("another driver", volumes.create(&other).await, driver);
        let mut other = volume("n-1", &of_a);
        other["spec"].as_object_mut().unwrap().remove("csi");
        other["spec"]["hostPath"] = json!({ "path": "/" });
        check_forbidden("a hostPath", volumes.create(&other).await, driver);
        for (attribute, value) in [("uri", "file:/dev/sda"), ("staticVolume", "true")] {
            let mut other = volume("n-1", &of_a);
            other["spec"]["csi"]["volumeAttributes"] = json!({ attribute: value });
            let created = volumes.create(&other).await;
            check_forbidden(attribute, created, "may not create a static volume");
        }
        for (namespace, name) in
            [("kube-system", "token"), (NAMESPACE, "cleat-ceph-controller-0123456789")]
        {
            for field in ["nodeStageSecretRef", "nodePublishSecretRef", "controllerExpandSecretRef"]
            {
                let mut other = volume("n-1", &of_a);
                other["spec"]["csi"][field] = json!({ "namespace": namespace, "name": name });
                check_forbidden(field, volumes.create(&other).await, "may name Secrets");
            }
        }
        // What csi-provisioner makes.
        for (uid, namespace) in [("n-1", "default"), ("n-2", NAMESPACE)] {
            let mut own = volume(uid, &format!("file/{a}/default/prefix-pvc-{uid}"));
            own["spec"]["csi"]["volumeAttributes"] = json!({ "fsck": "preen" });
            own["spec"]["csi"]["nodeStageSecretRef"] =
                json!({ "namespace": namespace, "name": "passphrase" });
            volumes.create(&own).await.unwrap();
        }
        volumes.create(&volume("n-3", "rbd/ceph/pool//pvc-n-3")).await.unwrap();

        let accounts = Api::namespaced(self.admin.clone(), NAMESPACE);
        let spec = json!({ "audiences": [] });
        let token = account_token(&accounts, "cleat-files", &spec).await;
        let client = ControlPlane::get().client_with(&token).await;
        let created = Objects::volumes(&client).create(&volume("n-4", &of_a)).await;
        check_forbidden("a token without a node", created, "the token names no node");
    }

    /// A known volume stays as it is until Kubernetes has released it.
    async fn known_volumes(&self) {
        let a = &self.nodes[0];
        let admin = Objects::volumes(&self.admin);
        let [volumes, others] = [0, 1].map(|node| Objects::volumes(&self.files[node]));
        let name = "pvc-k-1";
        admin.create(&volume("k-1", &format!("file/{a}/default/pvc-k-1"))).await.unwrap();
        let released = "only delete a released PersistentVolume";
        admin.patch_status(name, json!({ "phase": "Bound" })).await.unwrap();
        check_forbidden("a bound volume", volumes.delete(name).await, released);
        let none = json!({ "metadata": { "finalizers": [PROTECTION] } });
        let removed = volumes.patch(name, none.clone()).await;
        check_forbidden("its finalizer", removed, "from a PersistentVolume that it may delete");
        for (what, body) in [
            ("the claim", json!({ "spec": { "claimRef": { "uid": "stolen" } } })),
            ("the policy", json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } })),
            ("a label", json!({ "metadata": { "labels": { "a": "b" } } })),
            ("an annotation", json!({ "metadata": { "annotations": { "a": "b" } } })),
        ] {
            let changed = volumes.patch(name, body).await;
            check_forbidden(what, changed, "only change its own finalizer");
        }
        let foreign =
            json!({ "metadata": { "finalizers": [PROTECTION, FINALIZER, "test/other"] } });
        let text = "only remove its own finalizer";
        check_forbidden("another finalizer", volumes.patch(name, foreign).await, text);
        let mut other = volume("k-2", "handle");
        other["spec"]["csi"]["driver"] = json!("another.driver");
        admin.create(&other).await.unwrap();
        let driver = "only write PersistentVolumes of cleat.csi.storage";
        check_forbidden("another driver", volumes.delete("pvc-k-2").await, driver);

        admin.patch_status(name, json!({ "phase": "Released" })).await.unwrap();
        check_forbidden("a file of another node", others.delete(name).await, released);
        let removed = others.patch(name, none.clone()).await;
        check_forbidden("its finalizer", removed, "from a PersistentVolume that it may delete");
        // csi-provisioner deletes the volume, and then its finalizer.
        volumes.delete(name).await.unwrap();
        let removed = others.patch(name, none.clone()).await;
        check_forbidden("its finalizer", removed, "from a PersistentVolume that it may delete");
        volumes.patch(name, none).await.unwrap();

        // It adds the finalizer to each volume that is bound.
        let own = json!({ "metadata": { "finalizers": [PROTECTION, FINALIZER] } });
        let mut without = volume("k-3", &format!("file/{a}/default/pvc-k-3"));
        without["metadata"].as_object_mut().unwrap().remove("finalizers");
        admin.create(&without).await.unwrap();
        others.patch("pvc-k-3", own).await.unwrap();
    }

    /// A claim gets the own node, and a finalizer.
    async fn claims(&self) {
        let [a, b] = &self.nodes;
        let admin = Objects::claims(&self.admin);
        let [claims, others] = [0, 1].map(|node| Objects::claims(&self.files[node]));
        let name = "of-files";
        admin.create(&claim(name)).await.unwrap();
        let select = |node: &str| {
            let node = node.to_owned();
            move |claim: &mut Value| claim["metadata"]["annotations"][SELECTED] = json!(node)
        };
        let own = "only select its own node";
        let number = Cell::new(0);
        in_effect("change the annotation", async || {
            number.set(number.get() + 1);
            let kept = |claim: &mut Value| {
                claim["metadata"]["annotations"]["kept"] = json!(number.get().to_string());
            };
            claims.update(&admin, "of-daemon", kept).await
        })
        .await;
        check_forbidden("another node", claims.update(&admin, name, select(b)).await, own);
        claims.update(&admin, name, select(a)).await.unwrap();
        check_forbidden("a taken claim", others.update(&admin, name, select(b)).await, own);
        let free = |claim: &mut Value| {
            claim["metadata"]["annotations"].as_object_mut().unwrap().remove(SELECTED);
        };
        check_forbidden("a freed claim", others.update(&admin, name, free).await, own);
        let annotation = "only change the annotation of the selected node";
        let kept = |claim: &mut Value| claim["metadata"]["annotations"]["kept"] = json!("no");
        check_forbidden("an annotation", claims.update(&admin, name, kept).await, annotation);
        let removed = |claim: &mut Value| {
            claim["metadata"]["annotations"].as_object_mut().unwrap().remove("kept");
        };
        check_forbidden("an annotation", claims.update(&admin, name, removed).await, annotation);
        let rest = "only change the finalizer of a copied claim";
        let labelled = |claim: &mut Value| claim["metadata"]["labels"] = json!({ "a": "b" });
        check_forbidden("a label", claims.update(&admin, name, labelled).await, rest);
        let bound = |claim: &mut Value| claim["spec"]["volumeName"] = json!("pvc-n-1");
        check_forbidden("the volume", claims.update(&admin, name, bound).await, rest);
        let unprotected = |claim: &mut Value| claim["metadata"]["finalizers"] = json!([]);
        check_forbidden("a finalizer", claims.update(&admin, name, unprotected).await, rest);
        let copied = |claim: &mut Value| {
            let finalizers = claim["metadata"]["finalizers"].as_array_mut().unwrap();
            finalizers.push(json!("provisioner.storage.kubernetes.io/cloning-protection"));
        };
        claims.update(&admin, name, copied).await.unwrap();
        claims.update(&admin, name, free).await.unwrap();
    }

    async fn capacities(&self) {
        let [a, b] = &self.nodes;
        let [capacities, others] = [0, 1].map(|node| Objects::capacities(&self.files[node]));
        let own = "only write the capacity of its own node";
        in_effect(own, async || capacities.create(&capacity("of-b", b)).await).await;
        capacities.create(&capacity("of-a", a)).await.unwrap();
        let more = json!({ "capacity": "2Gi" });
        check_forbidden("a change", others.patch("of-a", more.clone()).await, own);
        check_forbidden("a deletion", others.delete("of-a").await, own);
        capacities.patch("of-a", more).await.unwrap();
        capacities.delete("of-a").await.unwrap();
    }

    /// The content of a snapshot, for csi-snapshotter on a node.
    async fn snapshots(&self) {
        let [a, b] = &self.nodes;
        let admin = Objects::contents(&self.admin);
        let contents = Objects::contents(&self.files[0]);
        for node in [a, b] {
            let content = json!({
                "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
                "metadata": {
                    "name": format!("of-{node}"),
                    "labels": { "snapshot.storage.kubernetes.io/managed-by": node },
                },
                "spec": {
                    "driver": DRIVER, "deletionPolicy": "Delete",
                    "source": { "volumeHandle": format!("file/{node}/default/pvc-s") },
                    "volumeSnapshotRef": { "namespace": "default", "name": "snapshot" },
                },
            });
            eventually("the definition is served", async || admin.create(&content).await.ok())
                .await;
        }
        let (of_a, of_b) = (&*format!("of-{a}"), &*format!("of-{b}"));
        let own = "only write the contents of snapshots of its own node";
        let ready = |handle: &str| json!({ "snapshotHandle": handle, "readyToUse": true });
        let foreign = ready(&format!("file/{b}/default/pvc-s@s"));
        in_effect(own, async || contents.patch_status(of_b, foreign.clone()).await).await;
        for handle in [&format!("file/{b}/default/pvc-s@s"), "rbd/ceph/pool//pvc-victim@s"] {
            let changed = contents.patch_status(of_a, ready(handle)).await;
            check_forbidden("a handle", changed, own);
        }
        let taken = json!({
            "metadata": { "labels": { "snapshot.storage.kubernetes.io/managed-by": a } },
        });
        let text = "and not what they are";
        check_forbidden("a label", contents.patch(of_b, taken).await, text);
        let retained = json!({ "spec": { "deletionPolicy": "Retain" } });
        check_forbidden("the spec", contents.patch(of_a, retained).await, text);
        check_forbidden("a deletion", contents.delete(of_a).await, text);
        let handle = format!("file/{a}/default/pvc-s@s");
        contents.patch_status(of_a, ready(&handle)).await.unwrap();
    }

    /// The sidecars that work for the whole cluster.
    async fn images(&self) {
        let b = &self.nodes[1];
        let volumes = Objects::volumes(&self.images);
        let made = "a volume that was made for its claim";
        let image = volume("i-0", "rbd/ceph/pool//pvc-victim");
        in_effect(made, async || volumes.create(&image).await).await;
        let file = volume("i-1", &format!("file/{b}/default/pvc-i-1"));
        check_forbidden("a file of another node", volumes.create(&file).await, made);
        volumes.create(&volume("i-1", "rbd/ceph/pool//pvc-i-1")).await.unwrap();
        let name = "pvc-i-1";
        let only = "only change its own finalizer";
        let stolen = json!({ "spec": { "claimRef": { "uid": "stolen" } } });
        check_forbidden("the claim", volumes.patch(name, stolen).await, only);
        // As csi-resizer does.
        volumes.patch(name, json!({ "spec": { "capacity": { "storage": "2Gi" } } })).await.unwrap();
        let released = "only delete a released PersistentVolume";
        check_forbidden("a volume in use", volumes.delete(name).await, released);
        let admin = Objects::volumes(&self.admin);
        admin.patch_status(name, json!({ "phase": "Released" })).await.unwrap();
        volumes.delete(name).await.unwrap();

        let (admin, claims) = (Objects::claims(&self.admin), Objects::claims(&self.images));
        admin.create(&claim("of-images")).await.unwrap();
        let select = |node: &str| {
            let node = node.to_owned();
            move |claim: &mut Value| claim["metadata"]["annotations"][SELECTED] = json!(node)
        };
        let own = "only select its own node";
        check_forbidden("a node", claims.update(&admin, "of-images", select(b)).await, own);
        claims.update(&admin, "of-images", select("cleat-images")).await.unwrap();
    }
}
