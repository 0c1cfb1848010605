//! Everything at once: kube-controller-manager asks, the controller grants and fences, the agents of nodes map images of a
//! real Ceph cluster. The tests do what kubelet does.

use super::objects::{Objects, POD};
use super::pods::{Kubelet, claim, run};
use crate::agent::image;
use crate::fixture::World;
use crate::node::TestNode;

#[test]
fn row_11_to_13_an_image_follows_its_pod_and_leaves_a_lost_node() {
    run(async |world: World, objects: Objects| {
        let controller = world.controller();
        let (a, b) = (TestNode::start(&world, "a").await, TestNode::start(&world, "b").await);
        let on_a = Kubelet::of(&world, &objects, a.name.clone()).await;
        let on_b = Kubelet::of(&world, &objects, b.name.clone()).await;
        let handle = &image("follows-its-pod").await;
        let volume = claim(&world, &objects, "v", handle).await;
        let first = on_a.pod("first", &volume).await;
        on_a.reported(handle, true).await;
        a.stage(handle).await.unwrap();
        on_a.uses(&[handle]).await;
        a.write(handle, &[7; 4096]).await.unwrap();

        // The pod moves, as in a rollout.
        let second = on_b.pod("second", &volume).await;
        objects.delete(POD, &first).await;
        a.unstage(handle).await.unwrap();
        on_a.uses(&[]).await;
        on_b.reported(handle, true).await;
        b.stage(handle).await.unwrap();
        on_b.uses(&[handle]).await;
        assert_eq!(b.read(handle, 4096).await.unwrap(), [7; 4096]);
        b.use_device(handle, true);

        // Node b is lost, although its agent is alive and a process writes.
        on_b.set_ready(false).await;
        on_a.pod("third", &volume).await;
        world.out_of_service(&b.name, true).await;
        objects.gone(POD, &second).await;
        on_a.reported(handle, true).await;
        let grant = world.grant(handle).await.unwrap().stored().grant;
        assert!(grant.holder(&b.name).is_none(), "{grant:?}");
        a.stage(handle).await.unwrap();
        b.unmapped(handle).await;
        assert!(b.stage(handle).await.is_err());
        a.write(handle, &[9; 4096]).await.unwrap();
        assert_eq!(a.read(handle, 4096).await.unwrap(), [9; 4096]);
        controller.stop().await;
    });
}
