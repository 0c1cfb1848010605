//! Outages of the OSD or the monitor: I/O waits and continues, and calls end in time.

use std::time::{Duration, Instant};

use cleat_kernel::sim::{Call, Fault};
use nix::sys::signal::Signal;
use test_kit::ceph::{Cluster, shared};
use tonic::Code;

use super::load::{Load, assert_within, held};
use super::{Scene, spec};
use test_kit::node::{assert_code, index_of, kill, wait_until};

/// A little more than `osd_client_watch_timeout`, after which the OSDs remove a dead client's watch.
const WATCH_TIMEOUT: Duration = Duration::from_secs(35);

/// Waits until no write completes any more.
fn wait_for_standstill(load: &Load) {
    wait_until("no write completes", || {
        let before = load.done();
        std::thread::sleep(Duration::from_millis(500));
        load.done() == before
    });
}

#[test]
fn outages_of_the_osd_and_the_monitor_lose_no_write() {
    let cluster = Cluster::start_on_disk();
    let scene = Scene::on(&cluster);
    scene.image("a");
    let mapping = scene.map("a");
    let load = scene.load(&mapping);
    load.wait_for_more();
    for away in [Duration::from_secs(1), WATCH_TIMEOUT] {
        cluster.tell("kill osd");
        wait_for_standstill(&load);
        std::thread::sleep(away);
        cluster.tell("start osd");
        load.wait_for_more();
        // The claim survived the outage.
        assert_eq!(scene.supervisor.get("a").unwrap().generation, mapping.generation);
    }
    // Without the monitor, the cluster serves connected clients.
    cluster.tell("kill mon");
    load.wait_for_more();
    cluster.tell("start mon");
    load.wait_for_more();
    // A worker dies while the OSD cannot serve its successor.
    cluster.tell("kill osd");
    wait_for_standstill(&load);
    let begun = Instant::now();
    kill(mapping.worker_pid, Signal::SIGKILL);
    std::thread::sleep(Duration::from_secs(3));
    cluster.tell("start osd");
    load.wait_for_more();
    println!("figures: a worker killed with the OSD away: I/O again after {:?}", begun.elapsed());
    let written = load.finish();
    scene.supervisor.unmap("a").unwrap();
    assert_eq!(held(&scene.content("a")), written);
    println!("figures: {written:?} writes verified over five outages");
    scene.machine.assert_clean();
}

/// An unmap of a volume whose storage is slow must not kill the worker while it releases the claim: another node
/// could not map the volume.
#[test]
fn an_unmap_releases_the_claim_although_the_storage_is_slow() {
    let cluster = Cluster::start();
    let scene = Scene::on(&cluster);
    for (image, forced) in [("slow", false), ("forced", true)] {
        scene.image(image);
        let mapping = scene.map(image);
        scene.machine.kernel.write(index_of(&mapping), 0, &[1; 4096]).unwrap();
        // The OSD stops between the flush and the release, for longer than the former limits of 2 s and 0.3 s.
        let call = if forced { Call::ForceDisconnect } else { Call::Disconnect };
        scene.machine.kernel.inject(call, Fault::Slow(Duration::from_secs(1)));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(500));
                cluster.tell("pause osd");
                std::thread::sleep(Duration::from_millis(if forced { 1500 } else { 5000 }));
                cluster.tell("resume osd");
            });
            if forced {
                scene.supervisor.force(image).unwrap();
            } else {
                assert!(scene.supervisor.unmap(image).unwrap());
            }
        });
        let claim = cluster.rbd(&["image-meta", "get", &spec(image), "cleat.claim"]).unwrap();
        let claim: serde_json::Value = serde_json::from_slice(&claim).unwrap();
        assert_eq!(claim["released"], true, "{image}: {claim}");
        scene.machine.assert_clean();
    }
}

/// A worker that is killed releases nothing, so the supervisor does it.
#[test]
fn the_claim_of_a_worker_that_was_killed_is_released_by_an_unmap() {
    let scene = Scene::on(shared());
    scene.image("unreleased");
    let mapping = scene.map("unreleased");
    let (machine, supervisor) = (scene.machine, scene.supervisor);
    supervisor.crash();
    kill(mapping.worker_pid, Signal::SIGKILL);
    machine.kernel.vanish(index_of(&mapping));
    let supervisor = machine.start();
    assert!(supervisor.unmap("unreleased").unwrap());
    let claim = shared().rbd(&["image-meta", "get", &spec("unreleased"), "cleat.claim"]).unwrap();
    let claim: serde_json::Value = serde_json::from_slice(&claim).unwrap();
    assert_eq!(claim["released"], true, "{claim}");
    machine.assert_clean();
}

#[test]
fn a_forced_unmap_in_an_outage_ends_in_time_and_no_late_write_is_executed() {
    let cluster = Cluster::start();
    let scene = Scene::on(&cluster);
    scene.image("a");
    let mapping = scene.map("a");
    let load = scene.load(&mapping);
    load.wait_for_more();
    // The sockets of the paused OSD are open and accept data.
    cluster.tell("pause osd");
    wait_for_standstill(&load);
    let begun = Instant::now();
    // While the OSD does not answer, cleat cannot check that no request is in flight.
    assert_code(scene.supervisor.force("a"), Code::DeadlineExceeded, "not done: prove no writes");
    println!("figures: by force, with the OSD stopped: {:?}", begun.elapsed());
    let (done, last) = (load.done(), load.begun());
    assert!(load.stop().iter().all(Result::is_err), "a waiting write succeeded");
    assert!(scene.machine.kernel.read(index_of(&mapping), 0, 512).is_err());

    cluster.tell("resume osd");
    wait_until("the mapping is removed", || scene.supervisor.list().is_empty());
    scene.machine.assert_clean();
    let content = scene.content("a");
    assert_within(held(&content), done, last);
    // No write of the old mapping is executed later, among writes of the new one.
    let mapping = scene.map("a");
    let load = Load::after(&scene.machine.kernel, index_of(&mapping), held(&content));
    load.wait_for_more();
    let written = load.finish();
    scene.supervisor.unmap("a").unwrap();
    assert_eq!(held(&scene.content("a")), written);
    scene.machine.assert_clean();
}
