//! Clients that are cut off, and clients that crash.

use ceph_test_cluster::shared;
use cleat::proto::v1::MappingState;
use nix::sys::signal::Signal;

use super::Scene;
use super::load::{Load, assert_within, held};
use crate::bench::{index_of, kill, wait_until};

#[test]
fn a_blocklisted_client_is_fenced_until_it_is_mapped_anew() {
    let scene = Scene::on(shared());
    scene.image("banned");
    let mapping = scene.map("banned");
    let load = scene.load(&mapping);
    load.wait_for_more();
    let owner = scene.owner("banned");
    shared().ceph(&["osd", "blocklist", "add", &owner]);
    let fenced = |what: &str| {
        let fenced = scene.supervisor.wait_for("banned", MappingState::Failed);
        assert!(fenced.message.contains("somebody else owns the volume"), "{what}: {fenced:?}");
        let read = scene.machine.kernel.read(index_of(&mapping), 0, 512);
        assert!(read.is_err(), "{what}: it reads");
    };
    fenced("blocklisted");
    let (done, begun) = (load.done(), load.begun());
    assert!(load.stop().iter().all(Result::is_err), "a writer goes on");
    let content = scene.content("banned");
    assert_within(held(&content), done, begun);
    // Neither being let in again nor another process is a reason to go on.
    shared().ceph(&["osd", "blocklist", "rm", &owner]);
    fenced("let in again");
    kill(scene.supervisor.get("banned").unwrap().worker_pid, Signal::SIGKILL);
    wait_until("the worker has ended", || scene.supervisor.get("banned").unwrap().worker_pid == 0);
    fenced("its worker has died");
    assert!(scene.content("banned") == content, "somebody writes");

    scene.supervisor.unmap("banned").unwrap();
    let mapping = scene.map("banned");
    let load = Load::after(&scene.machine.kernel, index_of(&mapping), held(&content));
    load.wait_for_more();
    let written = load.finish();
    scene.supervisor.unmap("banned").unwrap();
    assert_eq!(held(&scene.content("banned")), written);
    scene.machine.assert_clean();
}

#[test]
fn a_crash_in_a_librarys_thread_costs_one_volume_a_pause() {
    let scene = Scene::on(shared());
    let [(victim, first), (other, second)] = ["victim", "other"].map(|name| {
        scene.image(name);
        let mapping = scene.map(name);
        let load = scene.load(&mapping);
        (mapping, load)
    });
    first.wait_for_more();
    kill(victim.worker_pid, Signal::SIGABRT);
    second.wait_for_more();
    first.wait_for_more();
    second.wait_for_more();
    let now = scene.supervisor.get("victim").unwrap();
    assert!(now.last_worker_end.contains("SIGABRT"), "{}", now.last_worker_end);
    assert_eq!(scene.supervisor.get("other").unwrap().worker_pid, other.worker_pid);
    for (name, load) in [("victim", first), ("other", second)] {
        let written = load.finish();
        scene.supervisor.unmap(name).unwrap();
        assert_eq!(held(&scene.content(name)), written, "{name}");
    }
    scene.machine.assert_clean();
}
