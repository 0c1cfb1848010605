//! kube-controller-manager detaches by force from a node that is not ready, and restarts meanwhile.

use std::time::{Duration, Instant};

use cleat_kube::{Config, Policy};

use super::objects::{ATTACHMENT, Objects, POD, text};
use super::pods::{HANDLE, Kubelet, claim, run_alone};
use crate::control_plane::{FORCED_DETACH, NAMESPACE};
use crate::fixture::World;

/// Long enough for the attach/detach controller to do what it would do.
const QUIET: Duration = Duration::from_secs(2);

#[test]
fn row_13_a_node_is_fenced_before_a_forced_detach_ends_also_if_kubernetes_restarts() {
    run_alone(async |world: World, objects: Objects| {
        let policy = Policy { release_timeout_s: 1, forced_detach_s: 2, ..Policy::default() };
        let controller = world.controller_of(Config { policy, ..world.config(NAMESPACE) });
        let a = Kubelet::start(&world, &objects, "a").await;
        let b = Kubelet::start(&world, &objects, "b").await;
        let volume = claim(&world, &objects, "v", HANDLE).await;
        let (first, attachment, generation) = a.start_pod("first", &volume).await;
        let image = world.storage.image(HANDLE);
        // The node is silent: it still reports the volume as in use.
        a.set_ready(false).await;
        objects.delete(POD, &first).await;
        b.pod("second", &volume).await;
        tokio::time::sleep(QUIET).await;
        // A new kube-controller-manager knows only the objects, and waits anew.
        world.plane.restart_manager();
        let restarted = Instant::now();
        // The storage does not answer: the node cannot be fenced.
        image.set_down(true);
        let error = objects
            .until(ATTACHMENT, &attachment, "has failed", |known| {
                text(known, "/status/detachError/message")
            })
            .await;
        assert!(restarted.elapsed() >= FORCED_DETACH, "{:?}", restarted.elapsed());
        assert!(error.contains("does not answer"), "{error}");
        // The next kube-controller-manager does not know that the detach has not ended: it asks for the volume on the
        // other node, if this one has not done so. The grant alone keeps it from there.
        world.plane.restart_manager();
        let next = b.attachment().await;
        let refused = objects
            .until(ATTACHMENT, &next, "is refused", |known| {
                text(known, "/status/attachError/message")
            })
            .await;
        // The attempt to fence that fails next replaces the first message.
        let holder = format!("node {} holds it", a.node);
        assert!(
            [&*holder, "does not answer"].iter().any(|part| refused.contains(part)),
            "{refused}"
        );
        tokio::time::sleep(QUIET).await;
        let attached = world.attachment(&next).await.and_then(|known| known.status);
        assert!(attached.is_some_and(|status| !status.attached));
        assert!(world.attachment(&attachment).await.is_some(), "the node is not fenced");
        assert!(!b.is_reported(HANDLE).await && !image.is_cut(&a.node));

        image.set_down(false);
        assert_eq!(world.attached(&next).await, generation.next());
        assert!(image.is_cut(&a.node) && image.read().seal_of(generation).is_some());
        b.reported(HANDLE, true).await;
        world.gone(&attachment).await;
        let grant = world.grant(HANDLE).await.unwrap().stored().grant;
        assert!(grant.fence(&a.node, generation).is_some(), "{grant:?}");
        controller.stop().await;
    });
}
