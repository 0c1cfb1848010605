//! Detach: a node releases the volume, or is fenced.

use std::time::Duration;

use cleat_grants::object::{Generation, NodeEntry, Reason, Signal, Truth};
use cleat_kube::grant::{VolumeGrant, grant_name};
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};

use crate::fixture::{HANDLE, World, eventually, finalizer, run};

#[test]
fn row_03_a_new_controller_continues_from_the_api_server_alone() {
    run(async |world: World| {
        let controller = world.controller();
        let (node, _, name, generation) = world.in_use().await;
        world.detach(&name).await;
        world.revoked(HANDLE, &node).await;
        // The next one waits until the lease has expired.
        controller.kill();
        world.release(HANDLE, &node, generation).await;
        let controller = world.controller();
        world.gone(&name).await;
        let grant = world.grant(HANDLE).await.unwrap().stored().grant;
        assert_eq!((grant.spec.holders.len(), grant.spec.generation), (0, generation));
        controller.stop().await;
    });
}

#[test]
fn row_07_a_volume_moves_when_its_first_node_has_released_it() {
    run(async |world: World| {
        let controller = world.controller();
        let (a, b) = (world.node("a").await, world.node("b").await);
        let handle = "shared/v";
        let volume = world.volume("v", handle).await;
        let first = world.attach(&volume, &a).await;
        let generation = world.attached(&first).await;
        world.mount(handle, &a, generation).await;
        let second = world.attach(&volume, &b).await;
        world.detach(&first).await;
        world.revoked(handle, &a).await;
        world.attach_error(&second, "revoked since").await;
        world.release(handle, &a, generation).await;
        world.gone(&first).await;
        assert_eq!(world.attached(&second).await, generation.next());
        let status = world.attachment(&second).await.unwrap().status.unwrap();
        assert_eq!(status.attach_error, None);
        controller.stop().await;
    });
}

#[test]
fn row_12_only_the_signal_of_the_node_frees_a_volume() {
    run(async |world: World| {
        let controller = world.controller();
        let (node, _, name, generation) = world.in_use().await;
        world.detach(&name).await;
        world.revoked(HANDLE, &node).await;
        // The node is silent, and nothing says that it is lost. The release timeout has passed: nothing is fenced.
        let grant = eventually("the grant says what it waits for", async || {
            let grant = world.grant(HANDLE).await?;
            (!grant.status.waiting.is_empty()).then_some(grant)
        })
        .await;
        let waiting = &grant.status.waiting[0];
        assert_eq!((waiting.node.as_str(), waiting.until.as_str()), (&*node, "ReleasedOrLost"));
        assert!(waiting.action.contains("kubectl taint node"), "{waiting:?}");
        let error = eventually("the attachment says what it waits for", async || {
            world.attachment(&name).await?.status?.detach_error
        })
        .await;
        assert!(error.message.unwrap().contains("has not released it"));
        assert!(world.storage.image(HANDLE).read().claim_of(&node).is_some());
        // A wait costs nothing, once its own writes have come back.
        eventually("no object is looked at for 2 s", async || {
            let before = controller.syncs();
            tokio::time::sleep(Duration::from_secs(2)).await;
            (controller.syncs() == before).then_some(())
        })
        .await;
        // A signal of an earlier use, and one that the record contradicts, free nothing.
        for generation in [Generation(0), generation] {
            let signal = (Signal::SafeToDetach, Truth::True, Reason::Released, generation);
            world.report(HANDLE, &node, &[signal]).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert!(world.grant(HANDLE).await.unwrap().stored().grant.holder(&node).is_some());
        }
        world.storage.image(HANDLE).release_claim(&node);
        let signal = |status| (Signal::SafeToDetach, status, Reason::Released, generation);
        world.report(HANDLE, &node, &[signal(Truth::False)]).await;
        world.report(HANDLE, &node, &[signal(Truth::True)]).await;
        world.gone(&name).await;
        controller.stop().await;
    });
}

#[test]
fn row_13_a_lost_node_is_fenced_before_the_volume_moves() {
    run(async |world: World| {
        let controller = world.controller();
        let (a, b) = (world.node("a").await, world.node("b").await);
        let handle = "shared/v";
        let volume = world.volume("v", handle).await;
        let first = world.attach(&volume, &a).await;
        let generation = world.attached(&first).await;
        world.mount(handle, &a, generation).await;
        let second = world.attach(&volume, &b).await;
        world.out_of_service(&a, true).await;
        // As the attach/detach controller does under the taint, without a look at the node.
        world.detach(&first).await;
        assert_eq!(world.attached(&second).await, generation.next());
        world.gone(&first).await;
        let image = world.storage.image(handle);
        assert!(image.is_cut(&a), "the recorded client is cut off");
        assert!(image.read().seal_of(generation).is_some(), "the generation is sealed");
        let grant = world.grant(handle).await.unwrap().stored().grant;
        let fence = grant.fence(&a, generation).unwrap();
        assert!(fence.proof.contains("is sealed"), "{fence:?}");
        assert_eq!(fence.client.as_deref(), Some(&*format!("client-of-{a}")));
        // The node returns. It gets no grant until it has cleaned up.
        world.out_of_service(&a, false).await;
        world.detach(&second).await;
        let unused = (Signal::SafeToDetach, Truth::True, Reason::Released, generation.next());
        world.report(handle, &b, &[unused]).await;
        world.gone(&second).await;
        let again = world.attach(&volume, &a).await;
        let (message, _) = world.attach_error(&again, "has not cleaned up").await;
        assert!(message.contains(&a), "{message}");
        let cleaned = (Signal::Cleaned, Truth::True, Reason::Cleaned, generation);
        world.report(handle, &a, &[cleaned]).await;
        assert_eq!(world.attached(&again).await, Generation(generation.0 + 2));
        assert!(!image.is_cut(&a), "the client may connect again");
        controller.stop().await;
    });
}

#[test]
fn row_13_a_deleted_node_is_fenced() {
    run(async |world: World| {
        let controller = world.controller();
        let (node, _, name, _) = world.in_use().await;
        let nodes = world.all::<k8s_openapi::api::core::v1::Node>();
        nodes.delete(&node, &DeleteParams::default()).await.unwrap();
        let csi_nodes = world.all::<k8s_openapi::api::storage::v1::CSINode>();
        csi_nodes.delete(&node, &DeleteParams::default()).await.unwrap();
        world.detach(&name).await;
        world.gone(&name).await;
        assert!(world.storage.image(HANDLE).is_cut(&node));
        controller.stop().await;
    });
}

/// Detaches the volume from a lost node while its storage does not answer. Returns the node, the attachment and the
/// generation when the attachment says so.
async fn failing_detach(world: &World) -> (String, String, Generation) {
    let (node, _, name, generation) = world.in_use().await;
    world.storage.image(HANDLE).set_down(true);
    world.out_of_service(&node, true).await;
    world.detach(&name).await;
    eventually("the attachment says why it is not detached", async || {
        let error = world.attachment(&name).await?.status?.detach_error?;
        error.message?.contains("the storage does not answer").then_some(())
    })
    .await;
    (node, name, generation)
}

#[test]
fn row_18_a_volume_is_revoked_before_its_detach_and_a_detach_that_fails_is_not_forgotten() {
    run(async |world: World| {
        let controller = world.controller();
        let (node, name, generation) = failing_detach(&world).await;
        let image = world.storage.image(HANDLE);
        let check = async || {
            let grant = world.grant(HANDLE).await.unwrap().stored().grant;
            let holder = grant.holder(&node).unwrap();
            assert_eq!((holder.generation, holder.revoked), (generation, true));
            assert!(!image.is_cut(&node));
            let finalizers = world.attachment(&name).await.unwrap().finalizers().to_vec();
            assert_eq!(finalizers, [finalizer(&world.driver)]);
        };
        check().await;
        let asked = image.begun();
        eventually("it is tried again", async || (image.begun() > asked).then_some(())).await;
        check().await;
        image.set_down(false);
        world.gone(&name).await;
        assert!(image.is_cut(&node));
        controller.stop().await;
    });
}

#[test]
fn row_19_a_detach_that_waits_for_its_backoff_writes_nothing() {
    run(async |world: World| {
        let controller = world.controller();
        let (_, name, _) = failing_detach(&world).await;
        let image = world.storage.image(HANDLE);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let versions = async || {
            let attachment = world.attachment(&name).await.unwrap().resource_version();
            (attachment, world.grant(HANDLE).await.unwrap().resource_version())
        };
        let (before, written, asked) = (versions().await, controller.writes(), image.begun());
        eventually("it is tried twice more", async || (image.begun() > asked + 1).then_some(()))
            .await;
        assert_eq!((versions().await, controller.writes()), (before, written));
        image.set_down(false);
        world.gone(&name).await;
        controller.stop().await;
    });
}

#[test]
fn row_31_the_finalizer_stays_until_the_node_has_released_the_volume() {
    run(async |world: World| {
        let controller = world.controller();
        let (node, _, name, generation) = world.in_use().await;
        world.detach(&name).await;
        world.revoked(HANDLE, &node).await;
        let finalizers = world.attachment(&name).await.unwrap().finalizers().to_vec();
        assert_eq!(finalizers, [finalizer(&world.driver)]);
        world.release(HANDLE, &node, generation).await;
        world.gone(&name).await;
        controller.stop().await;
    });
}

#[test]
fn row_31_an_attachment_whose_finalizer_is_removed_by_hand_ends_the_grant() {
    run(async |world: World| {
        let controller = world.controller();
        let (a, volume, name, generation) = world.in_use().await;
        let b = world.node("b").await;
        let second = world.attach(&volume, &b).await;
        world.attach_error(&second, "holds it").await;
        world.remove_by_force(&name).await;
        assert!(world.attachment(&name).await.is_none());
        world.revoked(HANDLE, &a).await;
        assert!(world.storage.image(HANDLE).read().claim_of(&a).is_some(), "it is not fenced");
        world.release(HANDLE, &a, generation).await;
        assert_eq!(world.attached(&second).await, generation.next());
        controller.stop().await;
    });
}

#[test]
fn row_31_a_stale_attachment_does_not_end_a_newer_grant() {
    run(async |world: World| {
        let controller = world.controller();
        let (a, b) = (world.node("a").await, world.node("b").await);
        let handle = "shared/v";
        let volume = world.volume("v", handle).await;
        world.out_of_service(&a, true).await;
        // The request of a node that is out of service is not granted, and gets its finalizer.
        let stale = world.attach(&volume, &a).await;
        eventually("it is a request", async || {
            let known = world.attachment(&stale).await?;
            (!known.finalizers().is_empty()).then_some(())
        })
        .await;
        let name = world.attach(&volume, &b).await;
        let generation = world.attached(&name).await;
        world.mount(handle, &b, generation).await;
        world.detach(&stale).await;
        world.gone(&stale).await;
        let grant = world.grant(handle).await.unwrap().stored().grant;
        let holder = grant.holder(&b).unwrap();
        assert_eq!((holder.generation, holder.revoked), (generation, false));
        assert!(!world.storage.image(handle).is_cut(&b));
        controller.stop().await;
    });
}

#[test]
fn row_32_the_finalizer_of_a_volume_goes_when_no_attachment_is_left() {
    run(async |world: World| {
        let controller = world.controller();
        let (node, volume, name, generation) = world.in_use().await;
        let volumes = world.all::<PersistentVolume>();
        volumes.delete(&volume, &DeleteParams::default()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let finalizers = volumes.get(&volume).await.unwrap().finalizers().to_vec();
        assert!(finalizers.contains(&finalizer(&world.driver)), "{finalizers:?}");
        world.detach(&name).await;
        world.revoked(HANDLE, &node).await;
        world.release(HANDLE, &node, generation).await;
        world.gone(&name).await;
        eventually("the volume has no finalizer of the driver", async || {
            let known = volumes.get_opt(&volume).await.unwrap();
            let ours = finalizer(&world.driver);
            known.is_none_or(|known| !known.finalizers().contains(&ours)).then_some(())
        })
        .await;
        eventually("the grant is gone", async || world.grant(HANDLE).await.is_none().then_some(()))
            .await;
        controller.stop().await;
    });
}

#[test]
fn the_status_of_a_grant_does_not_keep_all_deleted_nodes() {
    run(async |world: World| {
        let controller = world.controller();
        let (node, ..) = world.in_use().await;
        let grants = world.all::<VolumeGrant>();
        let deleted = |n| NodeEntry { node: format!("deleted-{n:02}"), ..NodeEntry::default() };
        eventually("100 nodes have used the volume", async || {
            let mut grant = world.grant(HANDLE).await?;
            grant.status.grant.nodes.extend((0..100).map(deleted));
            let name = grant_name(&world.driver, HANDLE);
            grants.replace_status(&name, &PostParams::default(), &grant).await.ok()
        })
        .await;
        eventually("64 entries are left", async || {
            let grant = world.grant(HANDLE).await?.stored().grant;
            let is_left = |name: &str| grant.entry(name).is_some();
            let is_cut = grant.status.nodes.len() == 64 && !is_left("deleted-00");
            (is_cut && is_left(&node) && is_left("deleted-99")).then_some(())
        })
        .await;
        controller.stop().await;
    });
}

#[test]
fn a_claim_that_no_grant_names_is_released_by_its_node() {
    run(async |world: World| {
        // The API server has lost the grants: of these claims only the storage knows.
        let node = world.node("a").await;
        let (claimed, foreign) = ("shared/claimed", "shared/foreign");
        for (name, handle, holder) in
            [("v", claimed, node.as_str()), ("w", foreign, "node-of-another-cluster")]
        {
            world.volume(name, handle).await;
            world.storage.image(handle).claim(holder, Generation(5)).unwrap();
        }
        let controller = world.controller();
        world.revoked(claimed, &node).await;
        world.release(claimed, &node, Generation(5)).await;
        eventually("the node holds nothing", async || {
            world.grant(claimed).await?.spec.holders.is_empty().then_some(())
        })
        .await;
        assert_eq!(world.storage.image(foreign).read().claims.len(), 1);
        assert!(world.grant(foreign).await.is_none());
        controller.stop().await;
    });
}
