//! What a node has written, and what a build does not know, stops neither the controller nor an agent. The custom
//! resource definition is that of another build: it permits what the one of this build refuses.

use cleat_grants::object::{Generation, Reason, Signal, Truth};
use cleat_kube::grant::{VolumeGrant, grant_name};
use cleat_kube::{Config, Policy};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::events::v1::Event;
use kube::Client;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use tonic::codegen::http::Request;

use crate::agent::{image, mounted};
use crate::control_plane::{ControlPlane, NAMESPACE, node_token};
use crate::fixture::{HANDLE, World, eventually, run_on};
use crate::node::TestNode;

/// Returns the path of a grant.
fn path(world: &World, handle: &str) -> String {
    let name = grant_name(&world.driver, handle);
    format!("/apis/cleat.csi.storage/v1alpha1/volumegrants/{name}")
}

/// Reads a grant as it is stored.
async fn stored(world: &World, handle: &str) -> Value {
    let request = Request::get(path(world, handle)).body(Vec::new()).unwrap();
    world.client.request(request).await.unwrap()
}

/// Writes the status of a grant as `client` may.
async fn put_status(
    client: &Client,
    world: &World,
    handle: &str,
    grant: &Value,
) -> kube::Result<Value> {
    let request = Request::put(format!("{}/status", path(world, handle)));
    let request = request.header("content-type", "application/json");
    client.request(request.body(serde_json::to_vec(grant).unwrap()).unwrap()).await
}

/// Changes a grant as an administrator.
async fn patch(world: &World, handle: &str, body: &Value) {
    let grants: Api<kube::api::DynamicObject> = {
        let kind =
            kube::core::GroupVersionKind::gvk("cleat.csi.storage", "v1alpha1", "VolumeGrant");
        Api::all_with(world.client.clone(), &kube::api::ApiResource::from_gvk(&kind))
    };
    let name = grant_name(&world.driver, handle);
    grants.patch(&name, &PatchParams::default(), &Patch::Merge(body)).await.unwrap();
}

/// Attaches a new volume on a new node.
async fn attach_another(world: &World, name: &str) {
    let handle = format!("shared/{name}");
    let volume = world.volume(name, &handle).await;
    let node = world.node(name).await;
    let attachment = world.attach(&volume, &node).await;
    world.attached(&attachment).await;
}

/// Returns the entry of a node with one condition of this time.
fn entry_with(node: &str, time: &str) -> Value {
    let condition = json!({
        "type": "SafeToDetach", "status": "False", "reason": "Mapped", "message": "", "generation": 1,
        "lastTransitionTime": time,
    });
    json!({ "node": node, "generation": 1, "intents": 1, "conditions": [condition] })
}

#[test]
fn times_that_a_node_has_written_stop_no_leader() {
    run_on(ControlPlane::of_another_build(), async |world: World| {
        let controller = world.controller();
        let (node, _, name, generation) = world.in_use().await;
        controller.stop().await;
        let token = node_token(&world.client, NAMESPACE, &node).await;
        let agent = world.plane.client_with(&token).await;
        for time in [
            "2030-01-01T00:00:00+01:00",
            "1969-12-31T23:59:59Z",
            "2030-01-01t00:00:00z",
            "0000-01-01T00:00:00Z",
        ] {
            let mut grant = stored(&world, HANDLE).await;
            grant["status"]["nodes"] = json!([entry_with(&node, time)]);
            // The API server permits each of them.
            put_status(&agent, &world, HANDLE, &grant).await.unwrap();
            let found = stored(&world, HANDLE).await;
            let condition = &found["status"]["nodes"][0]["conditions"][0];
            assert_eq!(condition["lastTransitionTime"], time);
            let read = world.grant(HANDLE).await.unwrap().stored().grant;
            let entry = read.entry(&node).unwrap();
            assert!(entry.is(Signal::SafeToDetach, Truth::False, Generation(1)), "{time}");
        }
        // A kubelet writes the status of its Node.
        let late = json!({
            "type": "Ready", "status": "True", "reason": "r", "message": "m",
            "lastHeartbeatTime": "9999-12-31T23:59:59-01:00",
        });
        let body = Patch::Strategic(json!({ "status": { "conditions": [late] } }));
        let nodes = world.all::<Node>();
        let written = nodes.patch_status(&node, &PatchParams::default(), &body).await;
        let is_late = matches!(written, Err(kube::Error::SerdeError(_)));
        assert!(is_late, "it was written, and the answer cannot be decoded: {written:?}");
        // And its Lease.
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": { "name": node },
            "spec": { "renewTime": "9999-12-31T23:59:59.000000-01:00" },
        });
        let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
        let request = Request::post(leases).header("content-type", "application/json");
        let request = request.body(serde_json::to_vec(&lease).unwrap()).unwrap();
        let lease: Value = world.client.request(request).await.unwrap();
        assert_eq!(lease["spec"]["renewTime"], "10000-01-01T00:59:59.000000Z");

        // A leader that begins with nothing.
        let config = world.config(NAMESPACE);
        let policy = Policy { lease_timeout_s: Some(3600), ..config.policy };
        let controller = world.controller_of(Config { policy, ..config });
        attach_another(&world, "other").await;
        world.release(HANDLE, &node, generation).await;
        world.detach(&name).await;
        world.gone(&name).await;
        controller.stop().await;
    });
}

#[test]
fn a_grant_that_cannot_be_read_is_never_free_and_hides_no_other_one() {
    run_on(ControlPlane::of_another_build(), async |world: World| {
        let controller = world.controller();
        let (node, _, name, generation) = world.in_use().await;
        let mode = |mode: &str| {
            let holder = json!({
                "node": node, "mode": mode, "generation": generation, "since": "2030-01-01T00:00:00Z",
            });
            json!({ "spec": { "holders": [holder] } })
        };
        patch(&world, HANDLE, &mode("Invented")).await;
        // The watch of the first leader, and the list of the next one.
        attach_another(&world, "first").await;
        controller.stop().await;
        let controller = world.controller();
        attach_another(&world, "second").await;
        let unreadable = "cleat_controller_unreadable{kind=\"volumegrants\"} 1";
        eventually("the metric has it", async || {
            controller.metrics().contains(unreadable).then_some(())
        })
        .await;

        // Nothing says that the node has released the volume, although its claim is gone.
        world.storage.image(HANDLE).release_claim(&node);
        world.detach(&name).await;
        eventually("the attachment says why it stays", async || {
            let error = world.attachment(&name).await?.status?.detach_error?.message?;
            (error.contains("cannot be read") && error.contains("Invented")).then_some(())
        })
        .await;
        let events: Api<Event> = Api::namespaced(world.client.clone(), "default");
        let grant = grant_name(&world.driver, HANDLE);
        eventually("an event is about it", async || {
            let found = events.list(&ListParams::default()).await.unwrap();
            let is_meant = |event: &&Event| {
                let about = event.regarding.as_ref().and_then(|about| about.name.as_deref());
                about == Some(&*grant) && event.reason.as_deref() == Some("Unreadable")
            };
            let event = found.iter().find(is_meant)?;
            event.note.as_ref()?.contains("nothing is decided").then_some(())
        })
        .await;
        let found = stored(&world, HANDLE).await;
        assert_eq!(found["spec"]["holders"][0]["mode"], "Invented");

        // It continues when the grant was corrected.
        patch(&world, HANDLE, &mode("ReadWrite")).await;
        let released = (Signal::SafeToDetach, Truth::True, Reason::Released, generation);
        world.report(HANDLE, &node, &[released]).await;
        world.gone(&name).await;
        let all = world.all::<VolumeGrant>();
        let grant = all.get(&grant).await.unwrap();
        assert!(grant.spec.holders.is_empty());
        controller.stop().await;
    });
}

#[test]
fn an_agent_and_a_controller_keep_what_another_build_has_written() {
    run_on(ControlPlane::of_another_build(), async |world: World| {
        let controller = world.controller();
        let a = TestNode::start(&world, "a").await;
        let handle = &image("other-build").await;
        let attachment = world.attach(&world.volume("v", handle).await, &a.name).await;
        let generation = world.attached(&attachment).await;
        let condition = |kind: &str| {
            json!({
                "type": kind, "status": "Unknown", "reason": "Invented", "invented": "x",
                "generation": 1, "lastTransitionTime": "2030-01-01T00:00:00.123456Z",
            })
        };
        let foreign = json!({
            "node": "foreign", "generation": 0, "invented": "y",
            "conditions": [condition("Invented"), condition("SafeToMount")],
        });
        let mut grant = stored(&world, handle).await;
        grant["status"] = json!({ "nodes": [foreign], "invented": "z" });
        put_status(&world.client, &world, handle, &grant).await.unwrap();
        let check = async |when: &str| {
            let status = &stored(&world, handle).await["status"];
            assert_eq!(
                (&status["nodes"][0], &status["invented"]),
                (&foreign, &json!("z")),
                "{when}"
            );
        };

        // The policy compares the entries of other nodes exactly.
        a.stage(handle).await.unwrap();
        mounted(&world, handle, &a, generation).await;
        check("after the writes of the agent").await;
        a.use_device(handle, true);
        world.detach(&attachment).await;
        world.revoked(handle, &a.name).await;
        eventually("the controller writes what it waits for", async || {
            (!world.grant(handle).await?.status.waiting.is_empty()).then_some(())
        })
        .await;
        check("after the writes of the controller").await;
        a.use_device(handle, false);
        a.unmapped(handle).await;
        world.gone(&attachment).await;
        let is_free = world.grant(handle).await.unwrap().spec.holders.is_empty();
        assert!(is_free);
        check("at the end").await;
        controller.stop().await;
    });
}
