//! Fencing of a node because its kubelet does not renew its Lease. The tests play the kubelet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleat_kube::Config;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::control_plane::NAMESPACE;
use crate::fixture::{World, run};

const TIMEOUT: Duration = Duration::from_secs(3);

/// A kubelet that renews its Lease, with a clock that is wrong by decades.
struct Kubelet(Arc<AtomicBool>);

impl Kubelet {
    async fn start(world: &World, node: &str, year: u32) -> Self {
        let leases: Api<Lease> = Api::namespaced(world.client.clone(), "kube-node-lease");
        let lease = json!({ "metadata": { "name": node }, "spec": {} });
        let lease = serde_json::from_value(lease).unwrap();
        leases.create(&PostParams::default(), &lease).await.unwrap();
        let renews = Arc::new(AtomicBool::new(true));
        let (is_on, name) = (Arc::clone(&renews), node.to_owned());
        tokio::spawn(async move {
            for beat in 0.. {
                let (minute, second) = (beat / 60 % 60, beat % 60);
                let time = format!("{year}-01-01T00:{minute:02}:{second:02}.000000Z");
                let patch = Patch::Merge(json!({ "spec": { "renewTime": time } }));
                if is_on.load(Ordering::Relaxed) {
                    leases.patch(&name, &PatchParams::default(), &patch).await.unwrap();
                }
                tokio::time::sleep(TIMEOUT / 10).await;
            }
        });
        Self(renews)
    }

    fn fall_silent(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[test]
fn row_13_a_node_that_does_not_renew_its_lease_is_fenced_by_the_clock_of_the_controller() {
    run(async |world: World| {
        let mut config = world.config(NAMESPACE);
        config.policy.lease_timeout_s = Some(TIMEOUT.as_secs());
        let controller = world.controller_of(Config { workers: 2, ..config });
        for year in [2001, 2099] {
            let (name, handle) = (format!("v{year}"), format!("shared/v{year}"));
            let node = world.node(&format!("n{year}")).await;
            let kubelet = Kubelet::start(&world, &node, year).await;
            let volume = world.volume(&name, &handle).await;
            let attachment = world.attach(&volume, &node).await;
            let generation = world.attached(&attachment).await;
            world.mount(&handle, &node, generation).await;
            // The node does not release the volume, and lives.
            world.detach(&attachment).await;
            world.revoked(&handle, &node).await;
            tokio::time::sleep(2 * TIMEOUT).await;
            let image = world.storage.image(&handle);
            assert!(!image.is_cut(&node), "a node that renews its Lease was fenced");
            let silent = Instant::now();
            kubelet.fall_silent();
            world.gone(&attachment).await;
            let took = silent.elapsed();
            assert!(took > TIMEOUT / 2, "{took:?}");
            println!("figures: a node is fenced {took:.1?} after its last renewal");
            assert!(image.is_cut(&node));
            let grant = world.grant(&handle).await.unwrap().stored().grant;
            assert!(grant.fence(&node, generation).is_some(), "{grant:?}");
        }
        controller.stop().await;
    });
}
