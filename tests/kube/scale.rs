//! Many volumes on many nodes: what the controller writes, how long it takes, what it needs while nothing changes, and
//! its memory. The controller is a process, and the volumes are objects in a directory. The nodes are objects of the API
//! server, and one task plays all their agents.

use std::path::Path;
use std::time::{Duration, Instant};

use cleat_grants::object::{Reason, Signal, Truth};
use cleat_kube::grant::{VOLUME_ANNOTATION, VolumeGrant};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::json;

use crate::fixture::{World, eventually, run};
use crate::leader::Process;
use crate::rbd::create_in;

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
    let created = tokio::task::spawn_blocking(move || create(volumes)).await;
    let (directory, handles) = created.unwrap();
    let handles = handles.iter().enumerate();
    let names: Vec<String> = stream::iter(handles)
        .map(|(number, handle)| async move { world.volume(&format!("v{number}"), handle).await })
        .buffered(CALLS)
        .collect()
        .await;
    let clusters = format!("--clusters={}", clusters(directory.path()));
    let controller = Process::start_with(&world.driver, &[clusters]);
    eventually("the controller leads", async || controller.is("leader").then_some(())).await;
    let before = Usage::of(&controller);

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
    let attached = Usage::of(&controller);
    let attach_time = started.elapsed();

    tokio::time::sleep(IDLE).await;
    let idle = Usage::of(&controller);
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
    let detached = Usage::of(&controller);

    report([volumes, nodes.len()], [attach_time, detach_time], [before, attached, idle, detached]);
}

/// Prints the figures, and checks those that do not depend on the host. `counts` are those of volumes and nodes.
fn report(counts: [usize; 2], times: [Duration; 2], usages: [Usage; 4]) {
    let [volumes, nodes] = counts;
    let [attach_s, detach_s] = times.map(|time| time.as_secs_f64());
    let [before, attached, idle, detached] = usages;
    #[expect(clippy::cast_precision_loss, reason = "counts are small")]
    let per_volume = |writes: u64| writes as f64 / volumes as f64;
    let (attaches, detaches) = (attached.writes - before.writes, detached.writes - idle.writes);
    println!(
        "figures: {volumes} volumes on {nodes} nodes: attached in {attach_s:.1} s with {:.2} requests each, {:.2} of \
         them writes; {} requests in {} s without a change; detached in {detach_s:.1} s with {:.2} requests, {:.2} of \
         them writes; memory of the controller {} -> {} KiB",
        per_volume(attached.requests - before.requests),
        per_volume(attaches),
        idle.requests - attached.requests,
        IDLE.as_secs(),
        per_volume(detached.requests - idle.requests),
        per_volume(detaches),
        before.own_kib,
        attached.own_kib
    );
    // Finalizer and annotations of the attachment, finalizer of the volume, the grant, and the answer. A conflict can
    // repeat one.
    assert!(per_volume(attaches) <= 5.0, "{attaches} writes");
    assert!(per_volume(detaches) <= 5.0, "{detaches} writes");
    // Each volume has three objects in the mirrors.
    let growth_kib = attached.own_kib.saturating_sub(before.own_kib);
    assert!(growth_kib < 8192 + 64 * volumes as u64, "{growth_kib} KiB");
}

/// Creates volumes in a directory, and returns it with their handles.
fn create(volumes: usize) -> (tempfile::TempDir, Vec<String>) {
    let directory = tempfile::tempdir().unwrap();
    let store = store(directory.path());
    let handles = (0..volumes).map(|number| create_in(&store, &format!("v{number}"))).collect();
    (directory, handles)
}

fn store(directory: &Path) -> String {
    format!("dir:{}", directory.display())
}

/// Writes the file of clusters, and returns its path.
fn clusters(directory: &Path) -> String {
    let path = directory.join("clusters.json");
    let list = json!([{ "clusterID": "objects", "store": store(directory) }]);
    std::fs::write(&path, list.to_string()).unwrap();
    path.display().to_string()
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
    /// All requests to the API server. The leader election sends one or two each 2 s.
    requests: u64,
    writes: u64,
    own_kib: u64,
}

impl Usage {
    fn of(controller: &Process) -> Self {
        Self {
            requests: controller.sum("cleat_controller_api_requests_total{"),
            writes: controller.sum("cleat_controller_writes_total{"),
            own_kib: controller.own_kib(),
        }
    }
}
