//! The sweeper: what a leader looks at by itself, at its start and from time to time. The other tests of row 38 are in
//! `attach` and `detach`.

use std::time::{Duration, Instant};

use cleat_grants::object::Generation;
use cleat_kube::Config;

use crate::control_plane::NAMESPACE;
use crate::fixture::{HANDLE, World, eventually, run};

/// Makes a volume whose claim of `node` no grant names.
async fn claimed(world: &World, name: &str, node: &str) -> String {
    let handle = format!("shared/{name}");
    world.volume(name, &handle).await;
    world.storage.image(&handle).claim(node, Generation(5)).unwrap();
    handle
}

/// Waits until the storage was asked for the volume.
async fn asked(world: &World, handle: &str) {
    let image = world.storage.image(handle);
    eventually(&format!("{handle} is asked for"), async || (image.begun() > 0).then_some(())).await;
}

#[test]
fn row_38_what_a_storage_does_not_answer_at_the_start_is_swept_when_it_does() {
    run(async |world: World| {
        let node = world.node("a").await;
        let [first, second] =
            [claimed(&world, "v", &node).await, claimed(&world, "w", &node).await];
        let images = [&first, &second].map(|handle| world.storage.image(handle));
        images.iter().for_each(|image| image.set_down(true));
        let controller = world.controller();
        let begun = || images.iter().map(|image| image.begun()).sum::<usize>();
        eventually("a storage that is down was asked", async || (begun() > 0).then_some(())).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(begun(), 1, "its other volumes are not asked for");
        images.iter().for_each(|image| image.set_down(false));
        world.revoked(&first, &node).await;
        world.revoked(&second, &node).await;
        controller.stop().await;
    });
}

#[test]
fn row_38_a_sweep_that_waits_for_a_storage_delays_no_decision() {
    run(async |world: World| {
        const HANGS: Duration = Duration::from_secs(20);
        let node = world.node("a").await;
        let volume = world.volume("v", HANDLE).await;
        world.storage.image(HANDLE).hang_once(HANGS);
        let controller = world.controller();
        asked(&world, HANDLE).await;
        let begun = Instant::now();
        world.attached(&world.attach(&volume, &node).await).await;
        assert!(begun.elapsed() < HANGS / 2, "{:?}", begun.elapsed());
        controller.stop().await;
    });
}

#[test]
fn row_38_a_claim_that_appears_after_the_first_sweep_is_found_by_a_later_one() {
    run(async |world: World| {
        let node = world.node("a").await;
        world.volume("v", HANDLE).await;
        let config = Config { sweep_period: Duration::from_secs(2), ..world.config(NAMESPACE) };
        let controller = world.controller_of(config);
        asked(&world, HANDLE).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(world.grant(HANDLE).await.is_none());
        world.storage.image(HANDLE).claim(&node, Generation(5)).unwrap();
        world.revoked(HANDLE, &node).await;
        world.release(HANDLE, &node, Generation(5)).await;
        // The next sweep removes nothing: the PersistentVolume exists.
        eventually("the node holds nothing", async || {
            world.grant(HANDLE).await?.spec.holders.is_empty().then_some(())
        })
        .await;
        controller.stop().await;
    });
}

#[test]
fn row_38_claims_of_volumes_that_nothing_names_are_counted_and_stay() {
    run(async |world: World| {
        let node = world.node("a").await;
        let claims =
            [("lost", &*node, 5), ("elsewhere", "of-another-cluster", 5), ("by-hand", &*node, 0)];
        let claims = claims.map(|(name, node, generation)| {
            let image = world.storage.image(&format!("shared/{name}"));
            image.claim(node, Generation(generation)).unwrap();
            (image.read(), image)
        });
        // A claim that a PersistentVolume names gets a holder, and is not counted.
        let named = claimed(&world, "v", &node).await;
        let controller = world.controller();
        world.revoked(&named, &node).await;
        let count = |node: &str| {
            let metric = format!("cleat_controller_unknown_claims{{node=\"{node}\"}} 1\n");
            controller.metrics().contains(&metric)
        };
        let counted = async || (count("known") && count("unknown")).then_some(());
        eventually("one claim of each kind is counted", counted).await;
        for (record, image) in claims {
            assert_eq!(image.read(), record);
        }
        assert!(world.grant("shared/lost").await.is_none());
        controller.stop().await;
    });
}

#[test]
fn row_38_the_claims_of_a_storage_that_does_not_list_its_volumes_are_counted_when_it_does() {
    run(async |world: World| {
        let node = world.node("a").await;
        let image = world.storage.image("shared/lost");
        image.claim(&node, Generation(5)).unwrap();
        image.set_down(true);
        let controller = world.controller();
        asked(&world, "shared/lost").await;
        assert!(!controller.metrics().contains("unknown_claims{node=\"known\"} 1"));
        image.set_down(false);
        let counted = || controller.metrics().contains("unknown_claims{node=\"known\"} 1\n");
        eventually("the claim is counted", async || counted().then_some(())).await;
        controller.stop().await;
    });
}
