//! The policy for nodes: a node changes nothing but its own entry in the status of a grant, whatever else its role
//! permits. The agents of the other tests have exactly the rights of `deploy/base/rights.yaml`.

use cleat_grants::object::{FenceEntry, Generation, GrantSpec, Holder, Mode, NodeEntry, Time};
use cleat_kube::grant::{VolumeGrant, Waiting};
use cleat_kube::rights::NODE_ACCOUNT;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

use crate::control_plane::{ControlPlane, create, node_token};
use crate::fixture::{World, eventually, run};

/// The namespace of this test. The service account there may do everything to grants that the policy permits.
const NAMESPACE: &str = "rights";

/// Returns a client of the agent on `node`.
async fn node_client(world: &World, node: &str) -> Client {
    let token = node_token(&world.client, NAMESPACE, node).await;
    ControlPlane::get().client_with(&token).await
}

/// Installs the policy for a service account that has every right on grants, so that only the policy restricts it.
async fn permit_everything(world: &World) {
    let renamed = |mut object: Value| {
        let name = format!("{}-of-a-test", object["metadata"]["name"].as_str().unwrap());
        object["metadata"]["name"] = json!(name);
        if object["spec"]["policyName"].is_string() {
            object["spec"]["policyName"] = json!(name);
        }
        object
    };
    let is_policy = |object: &Value| object["kind"].as_str().unwrap().starts_with("Validating");
    let policy = cleat_kube::rights::objects(NAMESPACE).into_iter().filter(is_policy).map(renamed);
    let rbac = "rbac.authorization.k8s.io/v1";
    let everything = json!({
        "apiGroups": ["cleat.csi.storage"],
        "resources": ["volumegrants", "volumegrants/status"],
        "verbs": ["*"],
    });
    let account = json!({ "name": NODE_ACCOUNT, "namespace": NAMESPACE });
    let mut subject = account.clone();
    subject["kind"] = json!("ServiceAccount");
    let role = json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": NAMESPACE });
    let name = json!({ "name": NAMESPACE });
    let objects = [
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": name }),
        json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": account }),
        json!({ "apiVersion": rbac, "kind": "ClusterRole", "metadata": name, "rules": [everything] }),
        json!({ "apiVersion": rbac, "kind": "ClusterRoleBinding", "metadata": name, "roleRef": role, "subjects": [subject] }),
    ];
    create(&world.client, objects.into_iter().chain(policy)).await;
}

fn entry(node: &str, intents: u64) -> NodeEntry {
    NodeEntry { node: node.to_owned(), intents, ..NodeEntry::default() }
}

/// A grant with entries of both nodes.
async fn grant_of(world: &World, a: &str, b: &str) -> VolumeGrant {
    let holder = Holder {
        node: a.to_owned(),
        mode: Mode::ReadWrite,
        generation: Generation(1),
        revoked: false,
        since: Time(1_893_456_000),
        pod_uids: Vec::new(),
    };
    let spec = GrantSpec { holders: vec![holder], generation: Generation(1) };
    let grant = VolumeGrant::new(&world.driver, "shared/v", spec);
    let grants = world.all::<VolumeGrant>();
    let mut grant = grants.create(&PostParams::default(), &grant).await.unwrap();
    grant.status.grant.nodes = vec![entry(a, 1), entry(b, 1)];
    grants.replace_status(&grant.name_any(), &PostParams::default(), &grant).await.unwrap()
}

/// Fails with a message that contains `text` and the code 403.
#[track_caller]
pub(crate) fn check_forbidden<T: std::fmt::Debug>(what: &str, result: kube::Result<T>, text: &str) {
    check_refused(what, result, 403, text);
}

#[track_caller]
fn check_refused<T: std::fmt::Debug>(what: &str, result: kube::Result<T>, code: u16, text: &str) {
    match result {
        Err(kube::Error::Api(status)) => {
            assert_eq!(status.code, code, "{what}: {status:?}");
            assert!(status.message.contains(text), "{what}: {}", status.message);
        }
        other => panic!("{what}: {other:?}"),
    }
}

/// Tries to write the grant in every way as the agent of `own`, for the node `other`.
async fn check_foreign_writes(
    grants: &Api<VolumeGrant>,
    known: &VolumeGrant,
    own: &str,
    other: &str,
) {
    let (name, post) = (&known.name_any(), PostParams::default());
    let (merge, apply) = (PatchParams::default(), PatchParams::apply("test").force());
    let entries = "only change its own entry";
    // Differs from the number that is there: a write that changes nothing is permitted.
    let more = known.status.grant.nodes[1].intents + 1;
    let changed = |change: &dyn Fn(&mut VolumeGrant)| {
        let mut grant = known.clone();
        change(&mut grant);
        grant
    };
    let foreign = changed(&|grant| grant.status.grant.nodes[1].intents = more);
    check_forbidden("another entry", grants.replace_status(name, &post, &foreign).await, entries);
    let removed = changed(&|grant| grant.status.grant.nodes.truncate(1));
    check_forbidden("no entry", grants.replace_status(name, &post, &removed).await, entries);
    let both = changed(&|grant| grant.status.grant.nodes.iter_mut().for_each(|e| e.intents += 1));
    check_forbidden("both entries", grants.replace_status(name, &post, &both).await, entries);
    let added = changed(&|grant| grant.status.grant.nodes.push(entry("third", 1)));
    check_forbidden("a new entry", grants.replace_status(name, &post, &added).await, entries);
    let renamed = changed(&|grant| grant.status.grant.nodes[0].node = other.to_owned() + "x");
    check_forbidden("its name", grants.replace_status(name, &post, &renamed).await, entries);
    let nodes = json!([entry(own, 1), entry(other, more)]);
    let body = Patch::Merge(json!({ "status": { "nodes": nodes } }));
    check_forbidden("a merge patch", grants.patch_status(name, &merge, &body).await, entries);
    let operations = json!([{ "op": "replace", "path": "/status/nodes/1/intents", "value": more }]);
    let body: Patch<Value> = Patch::Json(serde_json::from_value(operations).unwrap());
    check_forbidden("a JSON patch", grants.patch_status(name, &merge, &body).await, entries);
    let mut body = json!({ "status": { "nodes": [entry(other, more)] } });
    body["apiVersion"] = json!("cleat.csi.storage/v1alpha1");
    body["kind"] = json!("VolumeGrant");
    let applied = grants.patch_status(name, &apply, &Patch::Apply(body.clone())).await;
    check_forbidden("an apply", applied, entries);
    let fenced = changed(&|grant| {
        grant.status.grant.fences.push(FenceEntry {
            node: other.to_owned(),
            generation: Generation(1),
            client: None,
            proof: "none".to_owned(),
            time: Time(1_893_456_000),
        });
    });
    let fences = "may not change status.fences";
    check_forbidden("a fence", grants.replace_status(name, &post, &fenced).await, fences);
    let waiting = changed(&|grant| {
        let until = cleat_grants::controller::Until::Released;
        grant.status.waiting.push(Waiting::new(own, until, Time(1_893_456_000)));
    });
    let wait = "may not change status.waiting";
    check_forbidden("a wait", grants.replace_status(name, &post, &waiting).await, wait);

    let only = "may only update the status";
    let mine = changed(&|grant| grant.spec.holders[0].node = own.to_owned());
    check_forbidden("the spec", grants.replace(name, &post, &mine).await, only);
    let body = Patch::Merge(json!({ "spec": { "holders": [] } }));
    check_forbidden("a patch of the spec", grants.patch(name, &merge, &body).await, only);
    let body = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    check_forbidden("a patch of metadata", grants.patch(name, &merge, &body).await, only);
    let mut body = json!({ "spec": { "generation": 9 } });
    body["apiVersion"] = json!("cleat.csi.storage/v1alpha1");
    body["kind"] = json!("VolumeGrant");
    check_forbidden(
        "an apply of the spec",
        grants.patch(name, &apply, &Patch::Apply(body)).await,
        only,
    );
    let delete = DeleteParams::default();
    check_forbidden("a deletion", grants.delete(name, &delete).await.map(|_| ()), only);
    let created = VolumeGrant::new("d", "shared/new", GrantSpec::default());
    check_forbidden("a creation", grants.create(&post, &created).await, only);
}

/// Tries to write an entry of `own` that other nodes and the controller cannot use: in a form that the definition does not
/// have, and larger than it permits.
async fn check_malformed_writes(grants: &Api<VolumeGrant>, known: &VolumeGrant, own: &str) {
    let name = &known.name_any();
    let write = async |entry: Value| {
        let mut grant = serde_json::to_value(known).unwrap();
        let nodes = grant["status"]["nodes"].as_array_mut().unwrap();
        nodes.retain(|entry| entry["node"] != own);
        nodes.push(entry);
        let body = Patch::Merge(json!({ "status": { "nodes": nodes } }));
        grants.patch_status(name, &PatchParams::default(), &body).await
    };
    let condition = |field: &str, value: Value| {
        let mut condition = json!({
            "type": "SafeToMount", "status": "True", "reason": "Mapped", "message": "", "generation": 1,
            "lastTransitionTime": "2030-01-01T00:00:00Z",
        });
        condition[field] = value;
        json!({ "node": own, "generation": 1, "conditions": [condition] })
    };
    write(condition("message", json!("x".repeat(512)))).await.unwrap();
    for time in [
        "2030-01-01T00:00:00+01:00",
        "1969-12-31T23:59:59Z",
        "2030-01-01t00:00:00z",
        "2030-00-01T00:00:00Z",
        "yesterday",
    ] {
        let written = write(condition("lastTransitionTime", json!(time))).await;
        check_refused(time, written, 422, "lastTransitionTime");
    }
    for (field, value) in [
        ("message", json!("x".repeat(513))),
        ("message", json!("x".repeat(1_400_000))),
        ("message", json!("\u{1}")),
        ("message", json!("<")),
        ("reason", json!("x".repeat(65))),
        ("generation", json!(-1)),
        ("type", json!("Invented")),
        ("status", json!("Perhaps")),
    ] {
        check_refused(field, write(condition(field, value)).await, 422, field);
    }
    for field in ["client", "devicePath"] {
        let mut entry = condition("message", json!(""));
        entry[field] = json!("x".repeat(257));
        check_refused(field, write(entry).await, 422, field);
    }
    // Fields that the definition does not have are dropped.
    let mut entry = condition("message", json!(""));
    entry["invented"] = json!("x".repeat(100_000));
    let written = write(entry).await.unwrap();
    assert!(serde_json::to_string(&written).unwrap().len() < 10_000);
}

#[test]
fn row_01_a_node_writes_nothing_but_its_own_status() {
    run(async |world: World| {
        let (a, b) = (&world.node("a").await, &world.node("b").await);
        permit_everything(&world).await;
        let known = grant_of(&world, a, b).await;
        let name = &known.name_any();
        let grants: Api<VolumeGrant> = Api::all(node_client(&world, a).await);
        // The policy takes effect a moment after it was created.
        let post = PostParams::default();
        let all = world.all::<VolumeGrant>();
        eventually("the policy is in effect", async || {
            let mut foreign = all.get(name).await.unwrap();
            foreign.status.grant.nodes[1].intents += 1;
            let refused = grants.replace_status(name, &post, &foreign).await.err()?;
            // Before the role is in effect, the refusal is that of RBAC.
            refused.to_string().contains("only change its own entry").then_some(())
        })
        .await;
        let known = all.get(name).await.unwrap();
        check_foreign_writes(&grants, &known, a, b).await;
        let after = all.get(name).await.unwrap();
        assert_eq!((&after.spec, &after.status), (&known.spec, &known.status));

        // Its own entry, in each way.
        let mut own = after.clone();
        own.status.grant.nodes.rotate_left(1);
        own.status.grant.nodes[1].intents = 5;
        // A write of the status changes nothing else, whatever it says.
        own.spec.holders.clear();
        let written = grants.replace_status(name, &post, &own).await.unwrap();
        assert_eq!(written.spec, after.spec);
        assert_eq!(written.stored().grant.entry(a).unwrap().intents, 5);
        let body = Patch::Apply(json!({
            "apiVersion": "cleat.csi.storage/v1alpha1",
            "kind": "VolumeGrant",
            "status": { "nodes": [entry(a, 6)] },
        }));
        let apply = PatchParams::apply("test").force();
        let written = grants.patch_status(name, &apply, &body).await.unwrap().stored().grant;
        assert_eq!(written.entry(a).unwrap().intents, 6);
        assert_eq!(written.entry(b), after.stored().grant.entry(b));

        check_malformed_writes(&grants, &all.get(name).await.unwrap(), a).await;
        check_grant_of_others(&world, &all, &known.spec, b).await;

        // A token that names no node.
        let account: Api<k8s_openapi::api::core::v1::ServiceAccount> =
            Api::namespaced(world.client.clone(), NAMESPACE);
        let request =
            serde_json::from_value(json!({ "metadata": {}, "spec": { "audiences": [] } }));
        let answer = account.create_token_request(NODE_ACCOUNT, &post, &request.unwrap()).await;
        let token = answer.unwrap().status.unwrap().token.unwrap();
        let grants: Api<VolumeGrant> = Api::all(ControlPlane::get().client_with(&token).await);
        let known = all.get(name).await.unwrap();
        let written = grants.replace_status(name, &post, &known).await;
        check_forbidden("a token without a node", written, "the token names no node");
    });
}

/// Writes to a grant that concerns other nodes, until it names the node `b`.
async fn check_grant_of_others(world: &World, all: &Api<VolumeGrant>, spec: &GrantSpec, b: &str) {
    let post = PostParams::default();
    let spec = GrantSpec { generation: Generation(1), ..spec.clone() };
    let foreign = VolumeGrant::new(&world.driver, "shared/foreign", spec);
    let mut foreign = all.create(&post, &foreign).await.unwrap();
    let other: Api<VolumeGrant> = Api::all(node_client(world, b).await);
    foreign.status.grant.nodes.push(entry(b, 1));
    let foreign_name = &foreign.name_any();
    let written = other.replace_status(foreign_name, &post, &foreign).await;
    check_forbidden("a foreign grant", written, "in a grant that names it");
    let mut fenced = all.get(foreign_name).await.unwrap();
    fenced.status.grant.fences.push(FenceEntry {
        node: b.to_owned(),
        generation: Generation(1),
        client: None,
        proof: "none".to_owned(),
        time: Time(1_893_456_000),
    });
    let mut fenced = all.replace_status(foreign_name, &post, &fenced).await.unwrap();
    fenced.status.grant.nodes.push(entry(b, 1));
    let mut cleaned = other.replace_status(foreign_name, &post, &fenced).await.unwrap();
    // Its entry stays its own when the fence is gone.
    cleaned.status.grant.fences.clear();
    let mut cleaned = all.replace_status(foreign_name, &post, &cleaned).await.unwrap();
    cleaned.status.grant.nodes[0].intents = 2;
    let mut cleaned = other.replace_status(foreign_name, &post, &cleaned).await.unwrap();
    cleaned.status.grant.nodes.clear();
    other.replace_status(foreign_name, &post, &cleaned).await.unwrap();
}
