//! external-attacher itself, in the place of cleat's attacher: it calls the controller on its socket.

use std::time::Duration;

use cleat_grants::object::Generation;
use serde_json::Value;

use super::objects::{ATTACHMENT, CLAIM, Objects, POD, VOLUME, text};
use super::pods::{HANDLE, Kubelet, claim, run};
use super::sidecar::Sidecar;
use crate::calls::Attacher;
use crate::fixture::{World, eventually, finalizer};

/// Starts external-attacher. `timeout` is that of its calls.
fn external_attacher(attacher: &Attacher<'_>, timeout: Duration) -> Sidecar {
    let more = [
        format!("--csi-address={}", attacher.socket().display()),
        format!("--timeout={}s", timeout.as_secs()),
        "--reconcile-sync=1s".to_owned(),
        "--feature-gates=MutableCSINodeAllocatableCount=true".to_owned(),
    ];
    let directory = attacher.socket().parent().unwrap().to_owned();
    Sidecar::start("csi-attacher", &directory, &attacher.world.plane.kubeconfig(), &more, &[])
}

fn finalizers(object: &Value) -> Vec<Value> {
    object["metadata"]["finalizers"].as_array().cloned().unwrap_or_default()
}

#[test]
fn row_28_to_32_external_attacher_attaches_and_detaches_through_grants() {
    run(async |world: World, objects: Objects| {
        let attacher = Attacher::new(&world);
        // It waits for the socket.
        let _sidecar = external_attacher(&attacher, Duration::from_secs(15));
        let controller = attacher.controller();
        let a = Kubelet::start(&world, &objects, "a").await;
        let b = Kubelet::start(&world, &objects, "b").await;
        let ours = Value::from(finalizer(&world.driver));
        let volume = claim(&world, &objects, "v", HANDLE).await;
        let (first, attachment, generation) = a.start_pod("first", &volume).await;
        let known = objects.get(ATTACHMENT, &attachment).await.unwrap();
        assert!(finalizers(&known).contains(&ours), "{known:#}");
        assert!(finalizers(&objects.get(VOLUME, &volume).await.unwrap()).contains(&ours));

        // The volume moves.
        let second = b.pod("second", &volume).await;
        objects.delete(POD, &first).await;
        a.uses(&[]).await;
        world.revoked(HANDLE, &a.node).await;
        assert!(world.attachment(&attachment).await.is_some(), "the node has not released it");
        world.release(HANDLE, &a.node, generation).await;
        world.gone(&attachment).await;
        let attachment = b.attachment().await;
        let generation = world.attached(&attachment).await;
        assert_eq!(generation, Generation(2));
        world.mount(HANDLE, &b.node, generation).await;

        // It is deleted: the finalizers go in the order of external-attacher.
        objects.delete(POD, &second).await;
        objects.delete(CLAIM, &volume).await;
        objects.delete(VOLUME, &volume).await;
        world.revoked(HANDLE, &b.node).await;
        assert!(objects.get(VOLUME, &volume).await.is_some(), "it is attached");
        world.release(HANDLE, &b.node, generation).await;
        world.gone(&attachment).await;
        objects.gone(VOLUME, &volume).await;
        eventually("the grant is gone", async || world.grant(HANDLE).await.is_none().then_some(()))
            .await;
        controller.stop().await;
    });
}

#[test]
fn row_13_external_attacher_detaches_a_silent_node_only_when_it_is_fenced() {
    run(async |world: World, objects: Objects| {
        let attacher = Attacher::new(&world);
        let controller = attacher.controller();
        let _sidecar = external_attacher(&attacher, Duration::from_secs(3));
        let a = Kubelet::start(&world, &objects, "a").await;
        let volume = claim(&world, &objects, "v", HANDLE).await;
        let (pod, attachment, generation) = a.start_pod("first", &volume).await;
        objects.delete(POD, &pod).await;
        a.uses(&[]).await;
        let error = objects
            .until(ATTACHMENT, &attachment, "has failed", |known| {
                text(known, "/status/detachError/message")
            })
            .await;
        assert!(error.contains(&a.node) && error.contains("has not released"), "{error}");
        assert!(!world.storage.image(HANDLE).is_cut(&a.node));
        world.out_of_service(&a.node, true).await;
        world.gone(&attachment).await;
        assert!(world.storage.image(HANDLE).is_cut(&a.node));
        let grant = world.grant(HANDLE).await.unwrap().stored().grant;
        assert!(grant.fence(&a.node, generation).unwrap().proof.contains("is sealed"));
        // The node is back, and has not cleaned up.
        world.out_of_service(&a.node, false).await;
        a.pod("second", &volume).await;
        let attachment = a.attachment().await;
        let (message, code) = world.attach_error(&attachment, "has not cleaned up").await;
        assert!(message.contains(&a.node), "{message}");
        assert_eq!(code, Some(tonic::Code::FailedPrecondition as i32));
        controller.stop().await;
    });
}

#[test]
fn row_33_external_attacher_continues_with_the_next_leader() {
    run(async |world: World, objects: Objects| {
        let attacher = Attacher::new(&world);
        let controller = attacher.controller();
        let mut sidecar = external_attacher(&attacher, Duration::from_secs(15));
        let a = Kubelet::start(&world, &objects, "a").await;
        let volume = claim(&world, &objects, "v", HANDLE).await;
        let (pod, attachment, generation) = a.start_pod("first", &volume).await;
        // It ends at its next call, as its container does, and is started again.
        controller.stop().await;
        objects.delete(POD, &pod).await;
        a.uses(&[]).await;
        eventually("csi-attacher ends", async || sidecar.has_ended().then_some(())).await;
        world.release(HANDLE, &a.node, generation).await;
        let controller = attacher.controller();
        let _sidecar = external_attacher(&attacher, Duration::from_secs(15));
        world.gone(&attachment).await;
        controller.stop().await;
    });
}

#[test]
fn row_14_external_attacher_finds_a_volume_that_is_not_published_any_more() {
    run(async |world: World, objects: Objects| {
        let attacher = Attacher::new(&world);
        let controller = attacher.controller();
        let _sidecar = external_attacher(&attacher, Duration::from_secs(15));
        let a = Kubelet::start(&world, &objects, "a").await;
        let volume = claim(&world, &objects, "v", HANDLE).await;
        let (_, attachment, generation) = a.start_pod("pod", &volume).await;
        assert_eq!(attacher.published(HANDLE).await, [&*a.node]);
        let handle = format!("local/{}/v", a.node);
        let local = claim(&world, &objects, "local", &handle).await;
        a.pod("local", &local).await;
        a.reported(&handle, true).await;
        assert_eq!(attacher.published(&handle).await, [&*a.node]);

        // Another caller takes the volume from all nodes, and csi-attacher does not know about it.
        let released = async {
            world.revoked(HANDLE, &a.node).await;
            world.release(HANDLE, &a.node, generation).await;
        };
        let timeout = Duration::from_secs(30);
        let (ended, ()) = tokio::join!(attacher.unpublish(HANDLE, "", timeout), released);
        ended.unwrap();
        eventually("it is published again", async || {
            (world.attached(&attachment).await == generation.next()).then_some(())
        })
        .await;
        assert_eq!(attacher.published(HANDLE).await, [&*a.node]);
        controller.stop().await;
    });
}
