//! The rights of the controller: all that it does works with them, and each of them is used. The controllers of the
//! other tests have exactly these rights, too. The tests of the attach/detach loop and of remediation compare those that
//! they need in addition.

use std::collections::BTreeSet;

use cleat_kube::rights::{self, CONTROLLER_ACCOUNT};
use cleat_kube::{Config, Policy};
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use serde_json::{Value, json};

use crate::control_plane::{AUDITED, ControlPlane, controller_user, create};
use crate::fixture::{World, eventually, finalizer, run};

/// A right: API group, resource, verb, and the namespace of its Role.
pub(crate) type Right = [String; 4];

/// Returns the objects of the controller's account in a namespace. The ClusterRole is that of all tests.
pub(crate) fn account(namespace: &str) -> Vec<Value> {
    let is_meant = |object: &Value| {
        let kind = object["kind"].as_str().unwrap();
        object["metadata"]["name"] == CONTROLLER_ACCOUNT && kind != "ClusterRole"
    };
    let renamed = |mut object: Value| {
        if object["kind"] != "ServiceAccount" {
            object["metadata"]["name"] = json!(namespace);
        }
        if object["kind"] == "RoleBinding" {
            object["roleRef"]["name"] = json!(namespace);
        }
        object
    };
    rights::objects(namespace).into_iter().filter(is_meant).map(renamed).collect()
}

/// Returns the rights of the roles among these objects.
pub(crate) fn granted(objects: &[Value]) -> BTreeSet<Right> {
    let mut all = BTreeSet::new();
    for role in objects.iter().filter(|object| object["rules"].is_array()) {
        let namespace = role["metadata"]["namespace"].as_str().unwrap_or_default();
        for rule in role["rules"].as_array().unwrap() {
            let texts = |field: &str| {
                let list = rule[field].as_array().unwrap().clone();
                list.into_iter().map(|text| text.as_str().unwrap().to_owned())
            };
            let group = texts("apiGroups").next().unwrap();
            for resource in texts("resources") {
                let right = |verb| [group.clone(), resource.clone(), verb, namespace.to_owned()];
                all.extend(texts("verbs").map(right));
            }
        }
    }
    all
}

/// Returns the rights that requests of the account in `namespace` have needed.
fn used(namespace: &str) -> BTreeSet<Right> {
    let right = |request: &Value| {
        let text =
            |field: &str| request["objectRef"][field].as_str().unwrap_or_default().to_owned();
        let resource = match request["objectRef"]["subresource"].as_str() {
            Some(subresource) => format!("{}/{subresource}", text("resource")),
            None => text("resource"),
        };
        assert_ne!(request["responseStatus"]["code"], 403, "{request}");
        let namespace = text("namespace");
        [text("apiGroup"), resource, request["verb"].as_str().unwrap().to_owned(), namespace]
    };
    ControlPlane::get().audited(&controller_user(namespace)).iter().map(right).collect()
}

/// Checks that the controllers whose account is in `namespace` have used all rights in `extra`, which come to the usual
/// ones, and no others. Without `extra`: all of the usual ones.
pub(crate) fn compare(namespace: &str, extra: &[Value]) {
    let of_controller = |object: &Value| object["metadata"]["name"] == CONTROLLER_ACCOUNT;
    let usual: Vec<Value> = rights::objects(namespace).into_iter().filter(of_controller).collect();
    let mut wanted = granted(if extra.is_empty() { &usual } else { extra });
    let all: BTreeSet<Right> = granted(&usual).union(&granted(extra)).cloned().collect();
    // An event that repeats within minutes is counted in the first one.
    wanted.retain(|[_, resource, verb, _]| (&**resource, &**verb) != ("events", "patch"));
    let within_roles = |right: &Right| {
        let [group, resource, verb, _] = right.clone();
        let of_cluster = [group, resource, verb, String::new()];
        if all.contains(right) { right.clone() } else { of_cluster }
    };
    let used: BTreeSet<Right> = used(namespace).iter().map(within_roles).collect();
    let (unused, missing): (Vec<_>, Vec<_>) =
        (wanted.difference(&used).collect(), used.difference(&all).collect());
    assert!(unused.is_empty() && missing.is_empty(), "unused {unused:?}, missing {missing:?}");
}

/// Attach, fence, move, detach, and the end of the volume.
async fn live_through_everything(world: &World) {
    let (a, b) = (world.node("a").await, world.node("b").await);
    let (handle, volume) = ("shared/v", format!("v.{}", world.driver));
    // The volume appears later than the request.
    let first = world.attach(&volume, &a).await;
    world.attach_error(&first, "does not exist").await;
    world.volume("v", handle).await;
    let generation = world.attached(&first).await;
    world.mount(handle, &a, generation).await;
    let second = world.attach(&volume, &b).await;
    world.out_of_service(&a, true).await;
    world.detach(&first).await;
    let next = world.attached(&second).await;
    assert!(world.storage.image(handle).is_cut(&a));
    world.mount(handle, &b, next).await;
    // The watch shows no end of the request: it is looked for at the API server.
    world.remove_by_force(&second).await;
    world.revoked(handle, &b).await;
    world.release(handle, &b, next).await;
    world.gone(&second).await;
    world.all::<PersistentVolume>().delete(&volume, &DeleteParams::default()).await.unwrap();
    eventually("the finalizer of the volume and its grant are gone", async || {
        let known = world.all::<PersistentVolume>().get_opt(&volume).await.unwrap();
        let ours = finalizer(&world.driver);
        let is_kept = known.is_some_and(|known| known.finalizers().contains(&ours));
        (!is_kept && world.grant(handle).await.is_none()).then_some(())
    })
    .await;
    let events: Api<Event> = Api::namespaced(world.client.clone(), "default");
    eventually("the fence has an event", async || {
        let events = events.list(&ListParams::default()).await.unwrap();
        let note = format!("node {a} is fenced");
        let is_ours = |event: &Event| event.note.as_ref().is_some_and(|text| text.contains(&note));
        events.iter().any(is_ours).then_some(())
    })
    .await;
}

#[test]
fn row_01_the_controller_has_all_rights_that_it_uses_and_no_other() {
    run(async |world: World| {
        let namespace =
            json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": AUDITED } });
        create(&world.client, std::iter::once(namespace).chain(account(AUDITED))).await;
        let plane = ControlPlane::get();
        let policy =
            Policy { release_timeout_s: 1, lease_timeout_s: Some(3600), ..Policy::default() };
        let config = Config {
            kubeconfig: Some(plane.make_controller_kubeconfig(AUDITED, AUDITED).await),
            policy,
            ..world.config(AUDITED)
        };
        let controller = world.controller_of(config);
        live_through_everything(&world).await;
        controller.stop().await;
        compare(AUDITED, &[]);
    });
}
