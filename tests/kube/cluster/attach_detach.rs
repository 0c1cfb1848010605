//! The attach/detach controller of kube-controller-manager asks for volumes, and cleat's attacher answers.

use std::time::Duration;

use serde_json::{Value, json};

use super::objects::{ATTACHMENT, CLAIM, EVENT, Objects, POD, VOLUME, apply};
use super::pods::{HANDLE, Kubelet, claim, pod, run};
use crate::fixture::{World, eventually, finalizer};

/// Long enough for the attach/detach controller, whose loop runs every 100 ms, to do what it would do.
const QUIET: Duration = Duration::from_secs(3);

async fn is_deleting(objects: &Objects, attachment: &str) -> bool {
    let known = objects.get(ATTACHMENT, attachment).await;
    known.is_some_and(|known| known["metadata"]["deletionTimestamp"].is_string())
}

#[test]
fn row_12_kubernetes_detaches_when_the_node_does_not_use_the_volume_and_cleat_when_it_is_released()
{
    run(async |world: World, objects: Objects| {
        let controller = world.controller();
        let a = Kubelet::start(&world, &objects, "a").await;
        let volume = claim(&world, &objects, "v", HANDLE).await;
        let (pod, attachment, generation) = a.start_pod("pod", &volume).await;
        objects.delete(POD, &pod).await;
        tokio::time::sleep(QUIET).await;
        assert!(!is_deleting(&objects, &attachment).await, "kubelet reports that it is in use");
        assert!(a.is_reported(HANDLE).await);
        a.uses(&[]).await;
        world.revoked(HANDLE, &a.node).await;
        assert!(is_deleting(&objects, &attachment).await, "the agent has not released it");
        world.release(HANDLE, &a.node, generation).await;
        world.gone(&attachment).await;
        a.reported(HANDLE, false).await;
        // Nothing stays when the claim is deleted.
        objects.delete(CLAIM, &volume).await;
        objects.delete(VOLUME, &volume).await;
        objects.gone(VOLUME, &volume).await;
        eventually("the grant is gone", async || world.grant(HANDLE).await.is_none().then_some(()))
            .await;
        controller.stop().await;
    });
}

#[test]
fn row_05_and_06_a_second_pod_is_a_reference_and_a_pod_that_has_ended_is_none() {
    run(async |world: World, objects: Objects| {
        let controller = world.controller();
        let a = Kubelet::start(&world, &objects, "a").await;
        let volume = claim(&world, &objects, "v", HANDLE).await;
        let (first, attachment, generation) = a.start_pod("first", &volume).await;
        let before =
            (objects.get(ATTACHMENT, &attachment).await, world.grant(HANDLE).await.unwrap());
        let second = a.pod("second", &volume).await;
        objects.delete(POD, &first).await;
        tokio::time::sleep(QUIET).await;
        let after =
            (objects.get(ATTACHMENT, &attachment).await, world.grant(HANDLE).await.unwrap());
        assert_eq!(before.0, after.0, "the attachment was written");
        assert_eq!(before.1.metadata.resource_version, after.1.metadata.resource_version);
        // The object of a pod that has ended stays.
        objects.patch_status(POD, &second, json!({ "phase": "Succeeded" })).await;
        a.uses(&[]).await;
        world.revoked(HANDLE, &a.node).await;
        world.release(HANDLE, &a.node, generation).await;
        world.gone(&attachment).await;
        assert!(objects.get(POD, &second).await.is_some());
        controller.stop().await;
    });
}

#[test]
fn row_09_a_pod_on_a_second_node_waits_until_the_first_node_is_detached() {
    run(async |world: World, objects: Objects| {
        let controller = world.controller();
        let a = Kubelet::start(&world, &objects, "a").await;
        let b = Kubelet::start(&world, &objects, "b").await;
        let volume = claim(&world, &objects, "v", HANDLE).await;
        let (first, attachment, generation) = a.start_pod("first", &volume).await;
        let second = b.pod("second", &volume).await;
        eventually("an event of the second pod names the reason", async || {
            let events = objects.list(EVENT).await;
            let is_meant = |event: &&Value| {
                event["involvedObject"]["name"] == *second
                    && event["message"].as_str().is_some_and(|text| text.contains("Multi-Attach"))
            };
            events.iter().find(is_meant).map(|_| ())
        })
        .await;
        assert_eq!(b.find_attachment().await, None);
        objects.delete(POD, &first).await;
        a.uses(&[]).await;
        world.release(HANDLE, &a.node, generation).await;
        world.gone(&attachment).await;
        let attachment = b.attachment().await;
        assert_eq!(world.attached(&attachment).await, generation.next());
        b.reported(HANDLE, true).await;
        controller.stop().await;
    });
}

#[test]
fn row_13_the_volume_of_a_node_out_of_service_moves_when_the_node_is_fenced() {
    run(async |world: World, objects: Objects| {
        let controller = world.controller();
        let a = Kubelet::start(&world, &objects, "a").await;
        let b = Kubelet::start(&world, &objects, "b").await;
        let volume = claim(&world, &objects, "v", HANDLE).await;
        let (first, attachment, generation) = a.start_pod("first", &volume).await;
        // The node is lost: it reports nothing any more, not even that the pod has ended.
        a.set_ready(false).await;
        b.pod("second", &volume).await;
        tokio::time::sleep(QUIET).await;
        assert_eq!(b.find_attachment().await, None);
        assert!(!world.storage.image(HANDLE).is_cut(&a.node), "nothing says that it is lost");
        world.out_of_service(&a.node, true).await;
        // The taint ends the pod, its object is removed, and the volume is detached although it is in use.
        objects.gone(POD, &first).await;
        world.gone(&attachment).await;
        let image = world.storage.image(HANDLE);
        assert!(image.is_cut(&a.node) && image.read().seal_of(generation).is_some());
        let attachment = b.attachment().await;
        assert_eq!(world.attached(&attachment).await, generation.next());
        let grant = world.grant(HANDLE).await.unwrap().stored().grant;
        assert!(grant.fence(&a.node, generation).unwrap().proof.contains("is sealed"));
        b.reported(HANDLE, true).await;
        a.reported(HANDLE, false).await;
        controller.stop().await;
    });
}

#[test]
fn row_22_a_pod_that_is_created_anew_on_its_node_during_the_backoff_gets_the_volume() {
    run(async |world: World, objects: Objects| {
        let controller = world.controller();
        let a = Kubelet::start(&world, &objects, "a").await;
        let volume = claim(&world, &objects, "v", HANDLE).await;
        let (pod, attachment, generation) = a.start_pod("pod", &volume).await;
        objects.delete(POD, &pod).await;
        a.uses(&[]).await;
        objects
            .until(ATTACHMENT, &attachment, "has failed", |known| {
                known["status"]["detachError"].is_object().then_some(())
            })
            .await;
        let again = a.pod("again", &volume).await;
        a.waits_for_detach(&again).await;
        // The grant is revoked, and a request that is being deleted cannot be taken back: the node releases the
        // volume, and gets a new grant.
        world.release(HANDLE, &a.node, generation).await;
        let again = a.attachment().await;
        assert_eq!(again, attachment, "the name follows from volume and node");
        assert_eq!(world.attached(&again).await, generation.next());
        a.reported(HANDLE, true).await;
        controller.stop().await;
    });
}

#[test]
fn row_23_only_nodes_with_the_annotation_of_kubelet_are_attached_to() {
    run(async |world: World, objects: Objects| {
        let controller = world.controller();
        let node = world.node("other").await;
        let other = Kubelet { world: &world, objects: &objects, node: node.clone() };
        let volume = claim(&world, &objects, "v", HANDLE).await;
        let pod = other.pod("pod", &volume).await;
        tokio::time::sleep(QUIET).await;
        assert_eq!(other.find_attachment().await, None);
        objects.delete(POD, &pod).await;
        let other = Kubelet::of(&world, &objects, node).await;
        other.pod("again", &volume).await;
        world.attached(&other.attachment().await).await;
        controller.stop().await;
    });
}

#[test]
fn row_27_and_29_finalizers_under_the_controllers_of_kubernetes() {
    run(async |world: World, objects: Objects| {
        let controller = world.controller();
        let a = Kubelet::start(&world, &objects, "a").await;
        let ours = Value::from(finalizer(&world.driver));
        let finalizers = |object: Option<Value>| {
            object.unwrap()["metadata"]["finalizers"].as_array().cloned().unwrap_or_default()
        };
        let shared = claim(&world, &objects, "v", HANDLE).await;
        let (_, attachment, _) = a.start_pod("pod", &shared).await;
        assert!(finalizers(objects.get(ATTACHMENT, &attachment).await).contains(&ours));
        assert!(finalizers(objects.get(VOLUME, &shared).await).contains(&ours));
        // A volume that is stored on the node.
        let b = Kubelet::start(&world, &objects, "b").await;
        let handle = format!("local/{}/v", b.node);
        let local = claim(&world, &objects, "local", &handle).await;
        b.pod("local", &local).await;
        let attachment = b.attachment().await;
        b.reported(&handle, true).await;
        assert!(finalizers(objects.get(ATTACHMENT, &attachment).await).is_empty());
        assert!(!finalizers(objects.get(VOLUME, &local).await).contains(&ours));
        controller.stop().await;
    });
}

#[test]
fn row_16_without_attach_required_nothing_is_attached() {
    run(async |world: World, objects: Objects| {
        let spec = json!({ "attachRequired": false });
        let driver = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver",
            "metadata": { "name": world.driver }, "spec": spec,
        });
        apply(&world.client, &driver).await.unwrap();
        let controller = world.controller();
        let a = Kubelet::start(&world, &objects, "a").await;
        let volume = claim(&world, &objects, "v", HANDLE).await;
        objects.apply(POD, pod(&volume, &volume, Some(&a.node))).await;
        tokio::time::sleep(QUIET).await;
        assert_eq!(a.find_attachment().await, None);
        assert!(!a.is_reported(HANDLE).await && world.grant(HANDLE).await.is_none());
        controller.stop().await;
    });
}
