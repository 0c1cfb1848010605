//! Clients that are fenced, and clients that crash.

use std::process::Command;

use cleat_api::v1::{MappingState, WatchRequest};
use nix::sys::signal::Signal;
use test_kit::ceph::shared;

use super::Scene;
use super::load::{Load, assert_within, held};
use crate::lifecycle::metrics::scrape;
use test_kit::node::{LIMIT, Supervisor, index_of, kill, wait_until};

#[test]
fn a_blocklisted_client_stays_fenced_until_it_is_mapped_again() {
    let scene = Scene::on(shared());
    scene.image("banned");
    let mapping = scene.map("banned");
    let load = scene.load(&mapping);
    load.wait_for_more();
    let owner = scene.owner("banned");
    shared().ceph(&["osd", "blocklist", "add", &owner]);
    assert_fenced(&scene.supervisor, "blocklisted");
    let (done, begun) = (load.done(), load.begun());
    assert!(load.stop().iter().all(Result::is_err), "a write succeeded");
    assert!(scene.machine.kernel.read(index_of(&mapping), 0, 512).is_err(), "a read succeeded");
    let content = scene.content("banned");
    assert_within(held(&content), done, begun);
    // The mapping stays fenced without the blocklist entry, without its worker, and with a new
    // supervisor.
    shared().ceph(&["osd", "blocklist", "rm", &owner]);
    assert_fenced(&scene.supervisor, "removed from the blocklist");
    assert!(
        scene.machine.kernel.read(index_of(&mapping), 0, 512).is_err(),
        "a read succeeded after the removal from the blocklist"
    );
    kill(scene.supervisor.get("banned").unwrap().worker_pid, Signal::SIGKILL);
    wait_until("the worker has exited", || scene.supervisor.get("banned").unwrap().worker_pid == 0);
    assert_fenced(&scene.supervisor, "its worker has died");
    let Scene { supervisor, machine, .. } = scene;
    supervisor.crash();
    let supervisor = machine.start();
    assert_fenced(&supervisor, "its supervisor has died");
    assert_eq!(supervisor.get("banned").unwrap().worker_pid, 0);

    // Another machine has mapped the image; the forced unmap here does not access the volume.
    let other = Scene::on(shared());
    let mapping = other.map("banned");
    let load = Load::after(&other.machine.kernel, index_of(&mapping), held(&content));
    load.wait_for_more();
    let left = supervisor.force("banned").unwrap();
    assert_eq!((left.unproven.as_str(), left.device_left.as_str()), ("", ""));
    machine.assert_clean();
    load.wait_for_more();
    let written = load.finish();
    other.supervisor.unmap("banned").unwrap();
    other.machine.assert_clean();
    // A new mapping of the image works.
    supervisor.map("banned", &other.uri("banned")).unwrap();
    supervisor.unmap("banned").unwrap();
    assert_eq!(held(&other.content("banned")), written);
    machine.assert_clean();
}

fn assert_fenced(supervisor: &Supervisor, when: &str) {
    let fenced = supervisor.wait_for("banned", MappingState::Failed);
    assert!(fenced.message.contains("another client owns the volume"), "{when}: {fenced:?}");
}

/// Watch, metrics, the command line and health report the fence until the volume is mapped again.
#[test]
fn a_fenced_mapping_is_reported_everywhere_until_it_is_mapped_again() {
    let scene = Scene::on(shared());
    let supervisor = &scene.supervisor;
    let metric = || scrape(&scene.machine).value("cleat_volume_fenced", &[("volume", "noticed")]);
    scene.image("noticed");
    let mapping = scene.map("noticed");
    assert_eq!((mapping.fenced, metric()), (false, Some(0.0)));
    let mut events =
        supervisor.block_on(supervisor.client().watch(WatchRequest {})).unwrap().into_inner();
    shared().ceph(&["osd", "blocklist", "add", &scene.owner("noticed")]);
    // librbd does not report a fence to an idle client; the worker checks for it periodically.
    let fenced = loop {
        let event = supervisor
            .block_on(async { tokio::time::timeout(LIMIT, events.message()).await })
            .expect("an event in time");
        let mapping = event.unwrap().unwrap().mapping.unwrap();
        if mapping.fenced {
            break mapping;
        }
    };
    assert_eq!(fenced.state(), MappingState::Failed);
    assert_eq!(metric(), Some(1.0));
    let (code, json) = scene.cleat(&["status", "noticed", "-o", "json"]);
    assert_eq!((code, &json["fenced"], &json["state"]), (0, &true.into(), &"failed".into()));
    let (code, error) =
        scene.cleat(&["map", &scene.uri("noticed"), "--name", "noticed", "-o", "json"]);
    assert_eq!((code, &error["error"]["kind"]), (12, &"fenced".into()), "{error}");
    let (_, health) = scene.cleat(&["status", "-o", "json"]);
    assert!(health["checks"].to_string().contains("1 of 1 have failed: noticed"), "{health}");

    assert!(supervisor.unmap("noticed").unwrap());
    assert_eq!(metric(), None);
    let remapped = scene.map("noticed");
    assert_eq!(
        (remapped.fenced, remapped.state(), metric()),
        (false, MappingState::Mapped, Some(0.0))
    );
    let load = scene.load(&remapped);
    load.wait_for_more();
    load.finish();
    supervisor.unmap("noticed").unwrap();
    scene.machine.assert_clean();
}

impl Scene<'_> {
    /// Runs `cleat` and returns its exit code and its JSON output.
    fn cleat(&self, arguments: &[&str]) -> (i32, serde_json::Value) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
        let output = command.arg("--socket").arg(self.machine.config.socket()).args(arguments);
        let output = output.output().unwrap();
        let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
        (output.status.code().unwrap(), serde_json::from_slice(&text).unwrap())
    }
}

#[test]
fn a_crash_of_a_worker_interrupts_only_its_own_volume() {
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
