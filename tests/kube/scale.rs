//! Many volumes on many nodes: what the controller writes, how long it takes, and what it needs while nothing changes.
//! The nodes are objects, and one task plays all their agents.

use std::time::{Duration, Instant};

use cleat_grants::object::{Reason, Signal, Truth};
use cleat_kube::grant::{VOLUME_ANNOTATION, VolumeGrant};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use kube::runtime::watcher::{self, Event, watcher};

use crate::fixture::{Controller, World, eventually, run};

/// The number of calls of the test itself at the same time.
const CALLS: usize = 32;

/// How long the controller is watched while nothing changes.
const IDLE: Duration = Duration::from_secs(3);

/// The numbers of volumes: those of `CLEAT_TEST_VOLUMES`, or 40. A tenth of the number is that of the nodes.
fn sizes() -> Vec<usize> {
    let text = std::env::var("CLEAT_TEST_VOLUMES").unwrap_or_else(|_| "40".to_owned());
    text.split(',').map(|size| size.parse().expect("CLEAT_TEST_VOLUMES has numbers")).collect()
}

#[test]
fn the_controller_writes_a_fixed_number_of_times_for_each_volume() {
    for volumes in sizes() {
        run(async |world: World| attach_and_detach(&world, volumes, volumes / 10).await);
    }
}

async fn attach_and_detach(world: &World, volumes: usize, nodes: usize) {
    let nodes: Vec<String> = stream::iter(0..nodes)
        .map(|node| async move { world.node(&format!("n{node}")).await })
        .buffered(CALLS)
        .collect()
        .await;
    let names: Vec<String> = stream::iter(0..volumes)
        .map(|number| async move { world.volume(&format!("v{number}"), &handle(number)).await })
        .buffered(CALLS)
        .collect()
        .await;
    let controller = world.controller();
    let before = Usage::of(&controller).await;

    let started = Instant::now();
    let requests = names.iter().enumerate();
    let attachments: Vec<String> = stream::iter(requests)
        .map(|(number, volume)| world.attach(volume, &nodes[number % nodes.len()]))
        .buffered(CALLS)
        .collect()
        .await;
    eventually("all volumes are attached", async || {
        let all = own(world).await;
        let attached =
            all.iter().filter(|known| known.status.as_ref().is_some_and(|status| status.attached));
        (attached.count() == volumes).then_some(())
    })
    .await;
    let attached = Usage::of(&controller).await;
    let attach_time = started.elapsed();

    tokio::time::sleep(IDLE).await;
    let idle = Usage::of(&controller).await;
    assert_eq!(idle.writes, attached.writes, "it writes while nothing changes");

    let started = Instant::now();
    let detach = async {
        stream::iter(&attachments).for_each_concurrent(CALLS, |name| world.detach(name)).await;
        eventually("all are detached", async || own(world).await.is_empty().then_some(())).await;
    };
    tokio::select! {
        () = play_agents(world) => panic!("the watch has ended"),
        () = detach => {}
    }
    let detach_time = started.elapsed();
    let detached = Usage::of(&controller).await;

    #[expect(clippy::cast_precision_loss, reason = "counts are small")]
    let per_volume = |writes: u64| writes as f64 / volumes as f64;
    let (attaches, detaches) = (attached.writes - before.writes, detached.writes - idle.writes);
    let requests = [&before, &attached, &idle, &detached].map(|usage| usage.requests);
    println!(
        "figures: {volumes} volumes on {} nodes: attached in {:.1} s with {:.2} requests each, {:.2} of them writes; \
         {} requests in {} s without a change; detached in {:.1} s with {:.2} requests, {:.2} of them writes; \
         memory of the process {} -> {} MiB",
        nodes.len(),
        attach_time.as_secs_f64(),
        per_volume(requests[1] - requests[0]),
        per_volume(attaches),
        requests[2] - requests[1],
        IDLE.as_secs(),
        detach_time.as_secs_f64(),
        per_volume(requests[3] - requests[2]),
        per_volume(detaches),
        before.resident_mib,
        attached.resident_mib
    );
    // Finalizer and annotations of the attachment, finalizer of the volume, the grant, and the answer. A conflict can
    // repeat one.
    assert!(per_volume(attaches) <= 5.0, "{attaches} writes");
    assert!(per_volume(detaches) <= 5.0, "{detaches} writes");
    controller.stop().await;
}

fn handle(number: usize) -> String {
    format!("shared/v{number}")
}

/// Returns the attachments of this test.
async fn own(world: &World) -> Vec<VolumeAttachment> {
    let all = world.all::<VolumeAttachment>().list(&ListParams::default()).await.unwrap();
    all.items.into_iter().filter(|known| known.spec.attacher == world.driver).collect()
}

/// Plays the agents of all nodes: a volume that is revoked is released.
async fn play_agents(world: &World) {
    let grants: Api<VolumeGrant> = world.all();
    let events = watcher(grants, watcher::Config::default());
    events
        .try_for_each_concurrent(CALLS, |event| async {
            let (Event::Apply(grant) | Event::InitApply(grant)) = event else { return Ok(()) };
            let Some(handle) = grant.annotations().get(VOLUME_ANNOTATION).cloned() else {
                return Ok(());
            };
            let known = grant.stored().grant;
            for holder in known.spec.holders.iter().filter(|holder| holder.revoked) {
                let (node, generation) = (&holder.node, holder.generation);
                let is_ours = node.ends_with(&world.driver);
                if is_ours && !known.is_true(node, Signal::SafeToDetach, generation) {
                    let mount = (Signal::SafeToMount, Truth::False, Reason::Released, generation);
                    let detach = (Signal::SafeToDetach, Truth::True, Reason::Released, generation);
                    world.report(&handle, node, &[mount, detach]).await;
                }
            }
            Ok(())
        })
        .await
        .unwrap();
}

/// What the controller has used.
struct Usage {
    requests: u64,
    writes: u64,
    resident_mib: u64,
}

impl Usage {
    async fn of(controller: &Controller) -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let kib: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
        Self {
            requests: controller.requests(),
            writes: controller.writes(),
            resident_mib: kib / 1024,
        }
    }
}
