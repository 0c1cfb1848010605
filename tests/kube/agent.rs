//! The agent of a node, on a real API server and a real Ceph cluster: nothing is mapped without a grant, and what is
//! published is observed.

use std::time::{Duration, Instant};

use cleat_grants::object::{Condition, Generation, NodeEntry, Reason, Signal, Truth};
use cleat_grants::record::Record;
use cleat_kube::storage::{Backing, Storage};
use tonic::Code;

use crate::control_plane::ControlPlane;
use crate::fixture::{World, eventually, run};
use crate::node::TestNode;
use crate::rbd::{create, open, remove_claim, volumes};

/// Creates an image, and returns its handle.
pub(crate) async fn image(name: &'static str) -> String {
    tokio::task::spawn_blocking(move || create(name)).await.unwrap()
}

/// Reads the record of an image at the cluster.
async fn record(handle: &str) -> Record {
    let Backing::Granted(storage) = volumes().find(handle).unwrap() else { panic!() };
    let read = move || storage.record(Instant::now() + Duration::from_secs(60)).unwrap();
    tokio::task::spawn_blocking(read).await.unwrap()
}

/// Waits until the entry of a node is as `is_wanted` says.
async fn entry(
    world: &World,
    handle: &str,
    node: &TestNode,
    what: &str,
    is_wanted: impl Fn(&NodeEntry) -> bool,
) -> NodeEntry {
    let mut last = None;
    let found = tokio::time::timeout(crate::fixture::LIMIT, async {
        loop {
            let grant = world.grant(handle).await.map(|grant| grant.stored().grant);
            last = grant.and_then(|grant| grant.entry(&node.name).cloned());
            if let Some(entry) = last.clone().filter(&is_wanted) {
                return entry;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    });
    found.await.unwrap_or_else(|_| panic!("timed out: {} reports {what}: {last:?}", node.name))
}

fn is(entry: &NodeEntry, signal: Signal, truth: Truth, generation: Generation) -> bool {
    entry.is(signal, truth, generation)
}

fn reason(entry: &NodeEntry, signal: Signal) -> Option<Reason> {
    entry.condition(signal).map(|Condition { reason, .. }| *reason)
}

/// Waits until a node reports that a volume can be mounted.
pub(crate) async fn mounted(
    world: &World,
    handle: &str,
    node: &TestNode,
    at: Generation,
) -> NodeEntry {
    let is_mounted = |entry: &NodeEntry| is(entry, Signal::SafeToMount, Truth::True, at);
    entry(world, handle, node, "SafeToMount", is_mounted).await
}

/// Attaches and stages a volume on a node. Returns the attachment and the generation.
async fn staged(world: &World, handle: &str, node: &TestNode) -> (String, Generation) {
    let volume = world.volume("v", handle).await;
    let attachment = world.attach(&volume, &node.name).await;
    let generation = world.attached(&attachment).await;
    node.stage(handle).await.unwrap();
    mounted(world, handle, node, generation).await;
    (attachment, generation)
}

#[test]
fn row_21_a_volume_without_a_grant_is_not_mapped() {
    run(async |world: World| {
        let controller = world.controller();
        let (a, b) = (TestNode::start(&world, "a").await, TestNode::start(&world, "b").await);
        let handle = &image("without-grant").await;
        let refused = a.stage(handle).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        for part in [handle, &a.name, "has no grant", "VolumeAttachment"] {
            assert!(refused.message().contains(part), "{part}: {refused}");
        }
        let (_, generation) = staged(&world, handle, &a).await;
        let refused = b.stage(handle).await.unwrap_err();
        let held = format!("node {} has it (generation {generation}, since ", a.name);
        assert!(refused.message().contains(&held), "{refused}");
        assert!(b.view(handle).is_none() && !b.has_workers());
        let fixed = b.stage("static-volume").await.unwrap_err();
        assert!(fixed.message().contains("it is a static volume"), "{fixed}");
        controller.stop().await;
    });
}

#[test]
fn row_16_without_an_api_server_a_node_maps_and_the_claim_alone_refuses_a_second_one() {
    run(async |world: World| {
        const NAME: &str = "standalone";
        let nodes = [
            TestNode::start_without_grants(&world, "a").await,
            TestNode::start_without_grants(&world, "b").await,
        ];
        let [a, b] = &nodes;
        let handle = &image(NAME).await;
        a.stage(handle).await.unwrap();
        assert_eq!(record(handle).await.generation, Generation(0));
        let refused = b.stage(handle).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains(&a.name), "{refused}");
        assert!(b.view(handle).is_none_or(|view| view.device.is_none()));
        a.unstage(handle).await.unwrap();
        b.stage(handle).await.unwrap();
        b.unstage(handle).await.unwrap();
        // An image that was claimed with a grant once, until a person removes the record.
        let granted = open(handle, "node-of-a-cluster", Generation(3)).unwrap();
        drop(granted);
        let refused = a.stage(handle).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains("without a grant"), "{refused}");
        tokio::task::spawn_blocking(|| remove_claim(NAME)).await.unwrap();
        a.stage(handle).await.unwrap();
        assert!(world.grant(handle).await.is_none());
    });
}

#[test]
fn row_11_and_12_a_volume_moves_by_the_signals_of_its_nodes() {
    run(async |world: World| {
        let controller = world.controller();
        let (a, b) = (TestNode::start(&world, "a").await, TestNode::start(&world, "b").await);
        let handle = &image("moves").await;
        let (first, generation) = staged(&world, handle, &a).await;
        let entry_a = mounted(&world, handle, &a, generation).await;
        let claim = record(handle).await.claim_of(&a.name).cloned().unwrap();
        assert_eq!((claim.generation, Some(&claim.client)), (generation, entry_a.client.as_ref()));
        assert!(entry_a.device_path.unwrap().starts_with("/dev/nbd"));
        assert!(is(
            &mounted(&world, handle, &a, generation).await,
            Signal::SafeToDetach,
            Truth::False,
            generation
        ));
        a.write(handle, &[7; 4096]).await.unwrap();

        let second = world.attach(&format!("v.{}", world.driver), &b.name).await;
        a.unstage(handle).await.unwrap();
        assert!(a.view(handle).is_none() && record(handle).await.claims.is_empty());
        let is_released =
            |entry: &NodeEntry| is(entry, Signal::SafeToDetach, Truth::True, generation);
        let released = entry(&world, handle, &a, "SafeToDetach", is_released).await;
        assert_eq!((released.client, released.device_path), (None, None));
        world.detach(&first).await;
        world.gone(&first).await;
        let next = world.attached(&second).await;
        assert_eq!(next, generation.next());
        b.stage(handle).await.unwrap();
        mounted(&world, handle, &b, next).await;
        assert_eq!(b.read(handle, 4096).await.unwrap(), [7; 4096]);
        assert_eq!(record(handle).await.claim_of(&b.name).unwrap().generation, next);
        // A pod that is made anew on the same node needs no new grant.
        b.unstage(handle).await.unwrap();
        b.stage(handle).await.unwrap();
        let again = mounted(&world, handle, &b, next).await;
        assert_eq!(again.intents, 2);
        controller.stop().await;
    });
}

#[test]
fn row_12_a_revoked_volume_stays_until_its_users_have_ended() {
    run(async |world: World| {
        let controller = world.controller();
        let a = TestNode::start(&world, "a").await;
        let handle = &image("revoked").await;
        let (attachment, generation) = staged(&world, handle, &a).await;
        a.use_device(handle, true);
        world.detach(&attachment).await;
        world.revoked(handle, &a.name).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        a.write(handle, &[1; 4096]).await.unwrap();
        assert!(world.attachment(&attachment).await.is_some(), "silence or use frees nothing");
        let refused = a.stage(handle).await.unwrap_err();
        assert!(
            refused.message().contains(&format!("generation {generation} of its grant is revoked")),
            "{refused}"
        );
        // The last user ends, and kubelet does not know of the volume any more.
        a.use_device(handle, false);
        a.unmapped(handle).await;
        world.gone(&attachment).await;
        assert!(record(handle).await.claims.is_empty());
        controller.stop().await;
    });
}

#[test]
fn row_13_a_revoked_volume_in_use_ends_by_force_if_that_is_configured() {
    run(async |world: World| {
        let controller = world.controller();
        let after = Duration::from_secs(3);
        let a = TestNode::start_with_force(&world, "a", after).await;
        let handle = &image("forced").await;
        let (attachment, generation) = staged(&world, handle, &a).await;
        a.use_device(handle, true);
        let (kernel, device) = a.device(handle);
        // The agent may see the revocation before the test does.
        let before = Instant::now();
        world.detach(&attachment).await;
        eventually("the volume is revoked", async || {
            let grant = world.grant(handle).await?.stored().grant;
            grant.holder(&a.name).is_none_or(|holder| holder.revoked).then_some(())
        })
        .await;
        let written = tokio::task::spawn_blocking(move || kernel.write(device, 0, &[1; 4096]));
        // On a busy machine, the time may be over before the test writes.
        let is_written = written.await.unwrap().is_ok();
        assert!(is_written || before.elapsed() >= after, "{:?}", before.elapsed());
        a.unmapped(handle).await;
        assert!(before.elapsed() >= after, "{:?}", before.elapsed());
        // It was released, not fenced.
        world.gone(&attachment).await;
        let grant = world.grant(handle).await.unwrap().stored().grant;
        assert!(grant.status.fences.is_empty());
        let known = grant.entry(&a.name).unwrap();
        assert!(is(known, Signal::SafeToDetach, Truth::True, generation), "{known:?}");
        assert!(record(handle).await.claims.is_empty());
        controller.stop().await;
    });
}

#[test]
fn row_13_a_fenced_node_ends_its_mapping_and_cleans_up() {
    run(async |world: World| {
        let controller = world.controller();
        let (a, b) = (TestNode::start(&world, "a").await, TestNode::start(&world, "b").await);
        let handle = &image("fenced").await;
        let (first, generation) = staged(&world, handle, &a).await;
        a.use_device(handle, true);
        let second = world.attach(&format!("v.{}", world.driver), &b.name).await;
        // Under the taint, although the node is alive.
        world.out_of_service(&a.name, true).await;
        world.detach(&first).await;
        assert_eq!(world.attached(&second).await, generation.next());
        let is_cleaned = |entry: &NodeEntry| is(entry, Signal::Cleaned, Truth::True, generation);
        entry(&world, handle, &a, "Cleaned", is_cleaned).await;
        a.unmapped(handle).await;
        eventually("no worker is left", async || (!a.has_workers()).then_some(())).await;
        b.stage(handle).await.unwrap();
        mounted(&world, handle, &b, generation.next()).await;
        b.write(handle, &[2; 4096]).await.unwrap();
        eventually("the fence is removed", async || {
            let grant = world.grant(handle).await?.stored().grant;
            grant.status.fences.is_empty().then_some(())
        })
        .await;
        // The node is back, and the volume returns.
        world.out_of_service(&a.name, false).await;
        b.unstage(handle).await.unwrap();
        world.detach(&second).await;
        world.gone(&second).await;
        let third = world.attach(&format!("v.{}", world.driver), &a.name).await;
        assert_eq!(world.attached(&third).await, Generation(generation.0 + 2));
        a.stage(handle).await.unwrap();
        assert_eq!(a.read(handle, 4096).await.unwrap(), [2; 4096]);
        controller.stop().await;
    });
}

#[test]
fn row_38_a_rebooted_node_reports_what_it_has_lost() {
    run(async |world: World| {
        let controller = world.controller();
        let mut a = TestNode::start(&world, "a").await;
        let handle = &image("rebooted").await;
        let (attachment, generation) = staged(&world, handle, &a).await;
        a.reboot().await;
        let is_lost = |entry: &NodeEntry| {
            let lost = reason(entry, Signal::SafeToMount) == Some(Reason::Lost);
            lost || is(entry, Signal::SafeToDetach, Truth::True, generation)
        };
        let lost = entry(&world, handle, &a, "Lost", is_lost).await;
        assert_eq!(reason(&lost, Signal::SafeToMount), Some(Reason::Lost), "{lost:?}");
        // The claim is released when the cluster has dropped the watch of the client that has died, after 30 s.
        let is_released =
            |entry: &NodeEntry| is(entry, Signal::SafeToDetach, Truth::True, generation);
        entry(&world, handle, &a, "SafeToDetach", is_released).await;
        assert!(record(handle).await.claims.is_empty());
        world.detach(&attachment).await;
        world.gone(&attachment).await;
        controller.stop().await;
    });
}

#[test]
fn row_38_a_node_whose_volume_has_moved_while_it_was_off_cleans_up() {
    run(async |world: World| {
        let controller = world.controller();
        let mut a = TestNode::start(&world, "a").await;
        let b = TestNode::start(&world, "b").await;
        let handle = &image("moved-away").await;
        let (first, generation) = staged(&world, handle, &a).await;
        a.power_off().await;
        let second = world.attach(&format!("v.{}", world.driver), &b.name).await;
        world.out_of_service(&a.name, true).await;
        world.detach(&first).await;
        let next = world.attached(&second).await;
        b.stage(handle).await.unwrap();
        mounted(&world, handle, &b, next).await;
        let before = record(handle).await;
        a.boot().await;
        let is_cleaned = |entry: &NodeEntry| is(entry, Signal::Cleaned, Truth::True, generation);
        let cleaned = entry(&world, handle, &a, "Cleaned", is_cleaned).await;
        assert!(!cleaned.is(Signal::SafeToMount, Truth::True, generation), "{cleaned:?}");
        eventually("the fence is removed", async || {
            let grant = world.grant(handle).await?.stored().grant;
            grant.status.fences.is_empty().then_some(())
        })
        .await;
        // The new holder keeps its claim.
        assert_eq!(record(handle).await.claims, before.claims);
        b.write(handle, &[5; 4096]).await.unwrap();
        assert!(a.view(handle).is_none() && !a.has_workers());
        controller.stop().await;
    });
}

#[test]
fn an_api_server_that_is_away_stops_nothing_that_is_mapped() {
    run(async |world: World| {
        let controller = world.controller();
        // Only the node uses this server.
        let mut server =
            tokio::task::spawn_blocking(|| ControlPlane::get().second_server()).await.unwrap();
        let name = world.node("a").await;
        let kubeconfig = server.node_kubeconfig(&name).await;
        let mut a = TestNode::start_with(&world, name, kubeconfig).await;
        let (handle, other) = (&image("outage").await, &image("outage-other").await);
        let (attachment, generation) = staged(&world, handle, &a).await;
        let before = mounted(&world, handle, &a, generation).await.client.unwrap();
        let volume = world.volume("w", other).await;
        let waiting = world.attach(&volume, &a.name).await;
        world.attached(&waiting).await;

        server.stop();
        a.write(handle, &[3; 4096]).await.unwrap();
        a.kill_workers();
        // The next worker claims with the storage alone.
        assert_eq!(a.read(handle, 4096).await.unwrap(), [3; 4096]);
        let refused =
            eventually("nothing new is mapped", async || a.stage(other).await.err()).await;
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        assert!(refused.message().contains("the API server cannot be reached"), "{refused}");
        // A supervisor that starts meanwhile knows no grant.
        a.restart().await;
        a.write(handle, &[4; 4096]).await.unwrap();
        let refused = a.stage(other).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        // The same pod is restarted on its node.
        a.stage(handle).await.unwrap();
        assert_eq!(a.read(handle, 4096).await.unwrap(), [4; 4096]);

        server = tokio::task::spawn_blocking(move || server.restart()).await.unwrap();
        let is_new = |entry: &NodeEntry| {
            entry.client.as_ref().is_some_and(|client| *client != before)
                && is(entry, Signal::SafeToMount, Truth::True, generation)
        };
        let after = entry(&world, handle, &a, "the client of the next worker", is_new).await;
        let claim = record(handle).await.claim_of(&a.name).cloned().unwrap();
        assert_eq!((claim.generation, Some(claim.client)), (generation, after.client));
        eventually("the other volume is mapped", async || a.stage(other).await.ok()).await;
        a.unstage(handle).await.unwrap();
        world.detach(&attachment).await;
        world.gone(&attachment).await;
        drop(server);
        controller.stop().await;
    });
}
