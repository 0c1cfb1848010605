//! Attach: VolumeAttachments become requests, and are answered from grants.

use std::sync::atomic::Ordering;
use std::time::Duration;

use cleat_grants::object::{Generation, Mode};
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use crate::control_plane::{NAMESPACE, SECOND_LEASE};
use crate::fixture::{HANDLE, World, eventually, finalizer, run};

/// FAILED_PRECONDITION.
const FAILED_PRECONDITION: i32 = 9;
/// INVALID_ARGUMENT.
const INVALID_ARGUMENT: i32 = 3;

#[test]
fn row_01_attach_is_decided_off_the_node() {
    run(async |world: World| {
        let controller = world.controller();
        let (node, handle) = (world.node("a").await, "shared/v");
        let volume = world.volume("v", handle).await;
        let name = world.attach(&volume, &node).await;
        let generation = world.attached(&name).await;
        let grant = world.grant(handle).await.unwrap().stored().grant;
        let holder = grant.holder(&node).unwrap();
        assert_eq!((holder.generation, holder.revoked), (generation, false));
        assert_eq!(generation, Generation(1));
        controller.stop().await;
    });
}

#[test]
fn row_08_one_operation_for_a_volume_and_no_more_than_the_workers_at_a_time() {
    run(async |world: World| {
        let config = world.config(NAMESPACE);
        let load = world.storage.load();
        load.call_ms.store(100, Ordering::SeqCst);
        let workers = config.workers;
        let nodes = [world.node("a").await, world.node("b").await];
        let mut names = Vec::new();
        for number in 0..3 * workers {
            let volume = world.volume(&format!("v{number}"), &format!("shared/v{number}")).await;
            for node in &nodes {
                names.push(world.attach(&volume, node).await);
            }
        }
        // It starts last: it then has all of them to do at once, on a slow host too.
        let controller = world.controller_of(config);
        for name in names {
            eventually(&format!("{name} is answered"), async || {
                let status = world.attachment(&name).await?.status?;
                (status.attached || status.attach_error.is_some()).then_some(())
            })
            .await;
        }
        assert_eq!(load.most_of_one.load(Ordering::SeqCst), 1);
        let most = load.most.load(Ordering::SeqCst);
        // The sweeper makes calls of its own, one at a time.
        assert!((2..=workers + 1).contains(&most), "{most} calls at a time");
        controller.stop().await;
    });
}

#[test]
fn row_09_a_second_node_is_refused_by_the_name_of_the_holder() {
    run(async |world: World| {
        let controller = world.controller();
        let (a, b) = (world.node("a").await, world.node("b").await);
        let volume = world.volume("v", "shared/v").await;
        world.attached(&world.attach(&volume, &a).await).await;
        let second = world.attach(&volume, &b).await;
        let (message, code) = world.attach_error(&second, "holds it").await;
        assert!(message.contains(&a) && message.contains("granted since"), "{message}");
        assert_eq!(code, Some(FAILED_PRECONDITION));
        controller.stop().await;
    });
}

#[test]
fn row_10_what_is_attached_already_is_not_written_again() {
    run(async |world: World| {
        let controller = world.controller();
        let (node, _, name, _) = world.in_use().await;
        controller.stop().await;
        let versions = async || {
            let attachment = world.attachment(&name).await.unwrap().resource_version();
            (attachment, world.grant(HANDLE).await.unwrap().resource_version())
        };
        let before = versions().await;
        // Another controller finds everything done. Nothing changes, so nothing is written.
        let controller = world.controller();
        let other = world.volume("other", "shared/other").await;
        world.attached(&world.attach(&other, &node).await).await;
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(versions().await, before);
        controller.stop().await;
    });
}

#[test]
fn row_15_an_inline_volume_is_attached() {
    run(async |world: World| {
        let controller = world.controller();
        let (node, handle) = (world.node("a").await, "shared/inline");
        let mut spec = world.spec(handle);
        // The API server permits no capacity here.
        spec.as_object_mut().unwrap().remove("capacity");
        let source = json!({ "inlineVolumeSpec": spec });
        let name = world.attach_source(&source, "inline", &node).await;
        let generation = world.attached(&name).await;
        assert!(world.grant(handle).await.unwrap().stored().grant.holder(&node).is_some());
        world.mount(handle, &node, generation).await;
        world.detach(&name).await;
        world.revoked(handle, &node).await;
        world.release(handle, &node, generation).await;
        world.gone(&name).await;
        controller.stop().await;
    });
}

#[test]
fn row_27_a_volume_of_one_node_is_attached_without_finalizers() {
    run(async |world: World| {
        let controller = world.controller();
        let (a, b) = (world.node("a").await, world.node("b").await);
        let handle = format!("local/{a}/v");
        let volume = world.volume("v", &handle).await;
        let name = world.attach(&volume, &a).await;
        let attached = eventually("it is attached", async || {
            let known = world.attachment(&name).await?;
            known.status.clone().is_some_and(|status| status.attached).then_some(known)
        })
        .await;
        assert_eq!(attached.finalizers(), [""; 0]);
        assert!(world.grant(&handle).await.is_none());
        let other = world.attach(&volume, &b).await;
        let (message, code) = world.attach_error(&other, "is stored on node").await;
        assert!(message.contains(&a), "{message}");
        assert_eq!(code, Some(INVALID_ARGUMENT));
        world.detach(&name).await;
        world.gone(&name).await;
        controller.stop().await;
    });
}

#[test]
fn row_29_finalizers_and_a_persistent_volume_that_is_being_deleted() {
    run(async |world: World| {
        let controller = world.controller();
        let node = world.node("a").await;
        let volume = world.volume("v", "shared/v").await;
        let name = world.attach(&volume, &node).await;
        world.attached(&name).await;
        let finalizer = finalizer(&world.driver);
        let attachment = world.attachment(&name).await.unwrap();
        assert_eq!(attachment.finalizers(), std::slice::from_ref(&finalizer));
        let annotations = attachment.annotations();
        assert_eq!(annotations.get("csi.alpha.kubernetes.io/node-id"), Some(&node));
        let volumes = world.all::<PersistentVolume>();
        assert!(volumes.get(&volume).await.unwrap().finalizers().contains(&finalizer));
        // A volume that is being deleted, and that another finalizer keeps.
        let other = world.volume("w", "shared/w").await;
        let patch = Patch::Merge(json!({ "metadata": { "finalizers": ["test.io/keep"] } }));
        volumes.patch(&other, &PatchParams::default(), &patch).await.unwrap();
        volumes.delete(&other, &DeleteParams::default()).await.unwrap();
        let refused = world.attach(&other, &node).await;
        world.attach_error(&refused, "is marked for deletion").await;
        let refused = world.attachment(&refused).await.unwrap();
        assert_eq!(refused.finalizers(), [""; 0], "it can be deleted");
        controller.stop().await;
    });
}

#[test]
fn row_29_an_attachment_of_external_attacher_is_taken_over() {
    run(async |world: World| {
        let node = world.node("a").await;
        let volume = world.volume("v", "shared/v").await;
        let name = world.attach(&volume, &node).await;
        let finalizers = json!({ "metadata": { "finalizers": [finalizer(&world.driver)] } });
        let (parameters, finalizers) = (PatchParams::default(), Patch::Merge(finalizers));
        let (volumes, attachments) =
            (world.all::<PersistentVolume>(), world.all::<VolumeAttachment>());
        volumes.patch(&volume, &parameters, &finalizers).await.unwrap();
        attachments.patch(&name, &parameters, &finalizers).await.unwrap();
        let status = Patch::Merge(json!({ "status": { "attached": true } }));
        attachments.patch_status(&name, &parameters, &status).await.unwrap();
        // The volume is in use and is being deleted.
        volumes.delete(&volume, &DeleteParams::default()).await.unwrap();
        let controller = world.controller();
        assert_eq!(world.attached(&name).await, Generation(1));
        controller.stop().await;
    });
}

#[test]
fn row_30_errors_have_a_code_and_are_tried_again_with_a_backoff() {
    run(async |world: World| {
        let controller = world.controller();
        let node = world.node("a").await;
        let volume = world.volume("v", "other/v").await;
        let name = world.attach(&volume, &node).await;
        let (message, code) = world.attach_error(&name, "cannot be fenced").await;
        assert!(message.contains("other/v"), "{message}");
        assert_eq!(code, Some(FAILED_PRECONDITION));
        // It is tried again, and the same error is not written again.
        let version = world.attachment(&name).await.unwrap().resource_version();
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(world.attachment(&name).await.unwrap().resource_version(), version);
        assert!(world.grant("other/v").await.is_none(), "it is not granted");
        // A volume that appears later ends the error without a wait for the backoff.
        let early = world.attach(&format!("late.{}", world.driver), &node).await;
        world.attach_error(&early, "does not exist").await;
        world.volume("late", "shared/late").await;
        world.attached(&early).await;
        let status = world.attachment(&early).await.unwrap().status.unwrap();
        assert_eq!(status.attach_error, None);
        controller.stop().await;
    });
}

#[test]
fn row_30_an_error_that_is_too_long_for_the_api_server_is_cut() {
    run(async |world: World| {
        let controller = world.controller();
        let handle = format!("unknown/{}", "é".repeat(1024));
        let node = world.node("a").await;
        let volume = world.volume("v", &handle).await;
        let name = world.attach(&volume, &node).await;
        let (message, _) = world.attach_error(&name, "cannot attach volume unknown/").await;
        assert!(message.len() > 1000 && message.ends_with(" …"), "{message}");
        controller.stop().await;
    });
}

#[test]
fn row_30_a_node_without_the_driver_is_waited_for() {
    run(async |world: World| {
        let controller = world.controller();
        let node = format!("late.{}", world.driver);
        let volume = world.volume("v", "shared/v").await;
        let name = world.attach(&volume, &node).await;
        world.attach_error(&name, "is not registered on node").await;
        world.node("late").await;
        world.attached(&name).await;
        controller.stop().await;
    });
}

#[test]
fn row_35_the_grant_is_named_after_the_volume_and_is_there_before_it_is_attached() {
    run(async |world: World| {
        let (node, handle) = (world.node("a").await, "shared/db-1");
        let volume = world.volume("v", handle).await;
        let name = world.attach(&volume, &node).await;
        let controller = world.controller();
        world.attached(&name).await;
        let grant = world.grant(handle).await.unwrap();
        assert!(grant.name_any().starts_with("db-1-"), "{}", grant.name_any());
        assert_eq!(grant.volume(), Some(handle));
        let created = grant.metadata.resource_version.unwrap().parse::<u64>().unwrap();
        let attached = world.attachment(&name).await.unwrap().resource_version().unwrap();
        assert!(created < attached.parse().unwrap());
        controller.stop().await;
    });
}

#[test]
fn row_36_two_controllers_grant_a_volume_once() {
    run(async |world: World| {
        // Their leases are in different namespaces, so both lead, as with a leader that does not see its end.
        let controllers =
            [NAMESPACE, SECOND_LEASE].map(|namespace| world.controller_with(namespace));
        let (a, b) = (world.node("a").await, world.node("b").await);
        let mut volumes = Vec::new();
        for number in 0..8 {
            let volume = world.volume(&format!("v{number}"), &format!("shared/v{number}")).await;
            let names = [world.attach(&volume, &a).await, world.attach(&volume, &b).await];
            volumes.push(names);
        }
        for (number, names) in volumes.iter().enumerate() {
            let handle = format!("shared/v{number}");
            let grant = eventually("it is granted", async || world.grant(&handle).await).await;
            let grant = grant.stored().grant;
            assert_eq!(grant.spec.holders.len(), 1, "{:?}", grant.spec);
            assert_eq!(grant.spec.generation, Generation(1));
            let holds_a = grant.spec.holders[0].node == a;
            let (winner, loser) = if holds_a { (0, 1) } else { (1, 0) };
            world.attached(&names[winner]).await;
            world.attach_error(&names[loser], "holds it").await;
        }
        for controller in controllers {
            controller.stop().await;
        }
        let attached = world.all::<VolumeAttachment>().list(&Default::default()).await.unwrap();
        let attached = attached.iter().filter(|known| {
            known.spec.attacher == world.driver
                && known.status.as_ref().is_some_and(|status| status.attached)
        });
        assert_eq!(attached.count(), 8);
    });
}

#[test]
fn row_37_the_holders_of_a_shared_volume_are_appended() {
    run(async |world: World| {
        let controller = world.controller();
        let (a, b, handle) = (world.node("a").await, world.node("b").await, "shared/v");
        let mut spec = world.spec(handle);
        spec["accessModes"] = json!(["ReadWriteMany"]);
        spec["volumeMode"] = json!("Block");
        let volume = world.volume_of("v", spec).await;
        let first = world.attach(&volume, &a).await;
        let generation = world.attached(&first).await;
        let second = world.attach(&volume, &b).await;
        assert_eq!(world.attached(&second).await, generation.next());
        let holders = async || {
            let holders = world.grant(handle).await.unwrap().stored().grant.spec.holders;
            assert!(holders.iter().all(|known| known.mode == Mode::SharedReadWrite));
            holders.into_iter().map(|known| (known.node, known.generation)).collect::<Vec<_>>()
        };
        assert_eq!(holders().await, [(a.clone(), generation), (b.clone(), generation.next())]);
        // One of them ends, and the other one stays.
        world.detach(&first).await;
        world.revoked(handle, &a).await;
        world.released(handle, &a, generation).await;
        world.gone(&first).await;
        assert_eq!(holders().await, [(b, generation.next())]);
        controller.stop().await;
    });
}

#[test]
fn row_38_a_leader_removes_grants_that_nobody_needs() {
    run(async |world: World| {
        let controller = world.controller();
        let node = world.node("a").await;
        // The volumes of pods that have ended: without a claim, with one, and one that is still used.
        let handles = ["shared/gone", "shared/claimed", "shared/used"];
        let mut attachments = Vec::new();
        for handle in handles {
            let mut spec = world.spec(handle);
            spec.as_object_mut().unwrap().remove("capacity");
            let source = json!({ "inlineVolumeSpec": spec });
            let name = world.attach_source(&source, &handle.replace('/', "-"), &node).await;
            let generation = world.attached(&name).await;
            world.mount(handle, &node, generation).await;
            attachments.push((name, generation));
        }
        for (handle, (name, generation)) in handles.iter().zip(&attachments).take(2) {
            world.detach(name).await;
            world.revoked(handle, &node).await;
            world.release(handle, &node, *generation).await;
            world.gone(name).await;
        }
        controller.stop().await;
        let claimed = world.grant("shared/claimed").await.unwrap().stored().grant.spec.generation;
        world.storage.image("shared/claimed").claim(&node, claimed.next()).unwrap();

        let controller = world.controller();
        eventually("the grant of the volume without a claim is removed", async || {
            world.grant("shared/gone").await.is_none().then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(world.grant("shared/claimed").await.is_some(), "the storage has a claim");
        assert!(world.grant("shared/used").await.is_some(), "it is attached");
        controller.stop().await;
    });
}
