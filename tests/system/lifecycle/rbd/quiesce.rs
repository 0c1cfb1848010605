//! Snapshots of images that are mapped with `quiesce`: mounted file systems are frozen during a snapshot,
//! and thawed after it, also after failures.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cleat_api::v1::upgrade_event::Outcome;
use cleat_api::v1::{MapOptions, MapRequest, Mapping, UpgradeRequest};
use cleat_kernel::{DeviceIndex, Holder};
use cleat_node::config::Config;
use cleat_node::executor::Halt;
use nix::sys::signal::Signal;
use test_kit::ceph::{Cluster, shared};
use tonic::Code;

use super::{Scene, spec};
use test_kit::node::{Machine, assert_code, index_of, kill, request, wait_until};

/// The time limit of `rbd snap create`; librbd delays it for up to 50 s.
const RBD_LIMIT: Duration = Duration::from_secs(120);

type Made = Receiver<Result<Vec<u8>, String>>;

impl Scene<'_> {
    /// Maps an image with `quiesce`, and mounts two file systems on its device.
    fn quiesced(&self, image: &str) -> Mapping {
        let mapping = self.supervisor.map_with(self.quiescing(image)).unwrap();
        self.mount(&mapping);
        mapping
    }

    fn quiescing(&self, image: &str) -> MapRequest {
        let options = MapOptions { quiesce: true, ..MapOptions::default() };
        MapRequest { options: Some(options), ..request(image, &self.uri(image)) }
    }

    fn mount(&self, mapping: &Mapping) {
        let holders = ["/mnt/one", "/mnt/two"].map(|path| Holder::Mount {
            path: path.into(),
            filesystem: "ext4".into(),
            namespace_pid: None,
        });
        self.machine.kernel.set_holders(index_of(mapping), holders.to_vec());
    }

    fn frozen(&self) -> usize {
        self.machine.kernel.frozen().len()
    }

    fn wait_until_thawed(&self) {
        wait_until("all file systems are thawed", || self.frozen() == 0);
        wait_until("the thaw is recorded", || {
            self.supervisor.list().iter().all(|mapping| mapping.quiet.is_none())
        });
    }

    /// Runs `rbd snap create` on a thread of its own.
    fn snap(cluster: &'static Cluster, at: &str, how: &[&str]) -> Made {
        let (sender, receiver) = channel();
        let command = ["snap", "create", "--no-progress", &spec(at)].map(str::to_owned);
        let command: Vec<String> =
            command.into_iter().chain(how.iter().map(|how| (*how).to_owned())).collect();
        std::thread::spawn(move || {
            sender.send(cluster.rbd(&command.iter().map(String::as_str).collect::<Vec<_>>()))
        });
        receiver
    }

    fn snapshots(&self, image: &str) -> usize {
        let listed = self.cluster.rbd(&["snap", "ls", "--format", "json", &spec(image)]).unwrap();
        let listed: serde_json::Value = serde_json::from_slice(&listed).unwrap();
        listed.as_array().unwrap().len()
    }

    fn release(&self, device: DeviceIndex) {
        self.machine.kernel.set_holders(device, Vec::new());
    }
}

/// Creates a scene with a changed configuration. The executor calls `at` at every point that it passes.
fn scene(
    cluster: &'static Cluster,
    change: impl FnOnce(&Machine, &mut Config),
    at: impl Fn(&str) -> bool + Send + Sync + 'static,
) -> Scene<'static> {
    let mut machine = Machine::new();
    let mut config = machine.config.clone();
    change(&machine, &mut config);
    machine.config = config;
    let halt: Halt = Arc::new(at);
    let supervisor = machine.start_with(Some(halt));
    Scene { supervisor, machine, cluster }
}

/// Starts a separate cluster that runs until the process exits.
fn own_cluster() -> &'static Cluster {
    Box::leak(Box::new(Cluster::start()))
}

#[test]
fn mounted_file_systems_are_frozen_during_a_snapshot() {
    let (sender, frozen_at) = channel();
    let sender = Mutex::new(sender);
    let kernel: Arc<Mutex<Option<cleat_kernel::sim::SimKernel>>> = Arc::default();
    let seen = Arc::clone(&kernel);
    let record = move |point: &str| {
        if let Some(kernel) = &*seen.lock().unwrap() {
            let _ = sender.lock().unwrap().send((point.to_owned(), kernel.frozen().len()));
        }
        false
    };
    let scene = scene(shared(), |_, _| (), record);
    scene.image("frozen");
    let mapping = scene.quiesced("frozen");
    assert!(mapping.options.as_ref().unwrap().quiesce);
    *kernel.lock().unwrap() = Some(scene.machine.kernel.clone());
    let index = index_of(&mapping);
    scene.machine.kernel.write(index, 0, &[7; 4096]).unwrap();
    // A file system that another process has frozen is not thawed.
    scene.machine.kernel.freeze_by_other(index, "/mnt/two");
    for (nth, at) in ["frozen@one", "frozen@two"].iter().enumerate() {
        Scene::snap(shared(), at, &[]).recv_timeout(RBD_LIMIT).unwrap().unwrap();
        assert_eq!(scene.snapshots("frozen"), nth + 1);
        scene.wait_until_thawed();
    }
    assert_eq!(scene.machine.kernel.frozen_by_others(index).len(), 1);
    let points: Vec<_> = frozen_at.try_iter().collect();
    let at = |wanted: &str| -> Vec<usize> {
        points.iter().filter(|(point, _)| point == wanted).map(|(_, frozen)| *frozen).collect()
    };
    assert_eq!(at("quiesce recorded"), [0, 0]);
    assert_eq!(at("quiesced, not answered"), [1, 1]);
    assert_eq!(at("thawed"), [0, 0]);
    let mapping = scene.supervisor.get("frozen").unwrap();
    assert_eq!(mapping.message, "", "{mapping:?}");
    // With `--skip-quiesce` the snapshot does not wait.
    let skipped = Scene::snap(shared(), "frozen@three", &["--skip-quiesce"]);
    skipped.recv_timeout(RBD_LIMIT).unwrap().unwrap();
    assert_eq!(frozen_at.try_iter().filter(|(point, _)| point.starts_with("quiesce")).count(), 0);
    scene.release(index);
    scene.supervisor.unmap("frozen").unwrap();
    scene.machine.assert_clean();
}

#[test]
fn the_next_supervisor_thaws_after_a_crash_at_any_point() {
    for point in ["quiesce recorded", "frozen", "quiesced, not answered"] {
        let (sender, halted) = channel();
        let sender = Mutex::new(sender);
        let halt = move |at: &str| at == point && sender.lock().unwrap().send(()).is_ok();
        let scene = scene(shared(), |_, _| (), halt);
        let image = format!("died-{}", point.replace([' ', ','], "-"));
        scene.image(&image);
        let mapping = scene.quiesced(&image);
        let made = Scene::snap(shared(), &format!("{image}@s"), &[]);
        halted.recv_timeout(RBD_LIMIT).unwrap();
        let frozen = if point == "quiesce recorded" { 0 } else { 2 };
        assert_eq!(scene.frozen(), frozen, "{point}");
        let Scene { supervisor, machine, cluster } = scene;
        supervisor.crash();
        // No supervisor runs that could quiesce the volume or report it, so the snapshot fails.
        made.recv_timeout(RBD_LIMIT).unwrap().unwrap_err();
        assert_eq!(machine.kernel.frozen().len(), frozen, "{point}");
        let supervisor = machine.start();
        let scene = Scene { supervisor, machine, cluster };
        scene.wait_until_thawed();
        let mapping_now = scene.supervisor.get(&image).unwrap();
        assert!(mapping_now.message.contains("may not be consistent"), "{mapping_now:?}");
        assert_eq!(mapping_now.worker_pid, mapping.worker_pid);
        // The next snapshot succeeds and clears the message.
        let again = Scene::snap(shared(), &format!("{image}@again"), &[]);
        again.recv_timeout(RBD_LIMIT).unwrap().unwrap();
        scene.wait_until_thawed();
        wait_until("the message is empty", || {
            scene.supervisor.get(&image).unwrap().message.is_empty()
        });
        scene.release(index_of(&mapping));
        scene.supervisor.unmap(&image).unwrap();
        scene.machine.assert_clean();
    }
}

#[test]
fn a_worker_that_dies_while_its_device_is_frozen_is_replaced_and_the_device_thawed() {
    let victim = Arc::new(Mutex::new(0));
    let struck = Arc::clone(&victim);
    let kill_worker = move |point: &str| {
        let pid = *struck.lock().unwrap();
        if point == "quiesced, not answered" && pid != 0 {
            kill(pid, Signal::SIGKILL);
        }
        false
    };
    let scene = scene(shared(), |_, _| (), kill_worker);
    scene.image("widowed");
    let mapping = scene.quiesced("widowed");
    *victim.lock().unwrap() = mapping.worker_pid;
    let made = Scene::snap(shared(), "widowed@s", &[]);
    wait_until("another worker serves", || {
        let now = scene.supervisor.get("widowed").unwrap().worker_pid;
        now != 0 && now != mapping.worker_pid
    });
    scene.wait_until_thawed();
    // The snapshot may be created by the next lock owner, or fail.
    let made = made.recv_timeout(RBD_LIMIT).unwrap();
    assert!(made.is_err() || scene.snapshots("widowed") == 1, "the snapshot is missing");
    scene.machine.kernel.write(index_of(&mapping), 0, &[7; 4096]).unwrap();
    scene.wait_until_thawed();
    scene.release(index_of(&mapping));
    scene.supervisor.unmap("widowed").unwrap();
    scene.machine.assert_clean();
}

/// Starts a snapshot that blocks after the volume was quiesced, because the OSD is paused then.
fn stuck(change: impl FnOnce(&Machine, &mut Config)) -> (Scene<'static>, Mapping, Made) {
    let cluster = own_cluster();
    let armed = AtomicBool::new(true);
    let pause = move |point: &str| {
        if point == "quiesced, not answered" && armed.swap(false, Ordering::SeqCst) {
            cluster.tell("pause osd");
        }
        false
    };
    let scene = scene(cluster, change, pause);
    scene.image("stuck");
    let mapping = scene.quiesced("stuck");
    let made = Scene::snap(cluster, "stuck@s", &[]);
    wait_until("the volume is quiesced", || scene.supervisor.get("stuck").unwrap().quiet.is_some());
    wait_until("the file systems are frozen", || scene.frozen() == 2);
    (scene, mapping, made)
}

#[test]
fn a_snapshot_that_exceeds_the_deadline_is_thawed_and_reported() {
    let limit = Duration::from_secs(3);
    let (scene, mapping, made) = stuck(|_, config| config.map.quiesce_deadline = limit);
    scene.wait_until_thawed();
    let mapping_now = scene.supervisor.get("stuck").unwrap();
    assert!(mapping_now.message.contains("may not be consistent"), "{mapping_now:?}");
    assert!(made.try_recv().is_err(), "the snapshot is still blocked");
    scene.cluster.tell("resume osd");
    let made = made.recv_timeout(RBD_LIMIT).unwrap();
    assert!(made.is_err() || scene.snapshots("stuck") == 1, "the snapshot is missing");
    scene.machine.kernel.write(index_of(&mapping), 0, &[7; 4096]).unwrap();
    scene.wait_until_thawed();
    scene.release(index_of(&mapping));
    scene.supervisor.unmap("stuck").unwrap();
    scene.machine.assert_clean();
}

#[test]
fn a_quiesced_volume_is_not_upgraded_or_unmapped_and_thawed_before_a_forced_unmap() {
    let (scene, mapping, _made) = stuck(|_, config| {
        config.map.quiesce_deadline = Duration::from_secs(300);
    });
    let quiet = scene.supervisor.get("stuck").unwrap().quiet.unwrap();
    assert_eq!(quiet.hook, "");
    let upgrade = UpgradeRequest { force: true, workers_only: true, targets: Vec::new() };
    let event = scene.supervisor.upgrade_with(upgrade).unwrap().pop().unwrap();
    assert_eq!(event.outcome(), Outcome::Failed, "{event:?}");
    assert!(event.message.contains("a snapshot of stuck is being made"), "{event:?}");
    assert_code(scene.supervisor.unmap("stuck"), Code::FailedPrecondition, "/mnt/one");
    assert_eq!(scene.frozen(), 2, "the file systems stay frozen for the snapshot");
    // The simulated kernel refuses to unmount a frozen file system. The OSD does not answer, so the
    // end of all requests is confirmed only later.
    if let Err(status) = scene.supervisor.force("stuck") {
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    }
    assert_eq!(scene.frozen(), 0);
    assert!(!scene.machine.kernel.is_disconnected(index_of(&mapping)));
    scene.cluster.tell("resume osd");
    wait_until("the unmap completes by itself", || scene.supervisor.list().is_empty());
    scene.machine.assert_clean();
}

#[test]
fn a_supervisor_thaws_before_it_shuts_down() {
    let (scene, mapping, _made) = stuck(|_, config| {
        config.map.quiesce_deadline = Duration::from_secs(300);
    });
    let Scene { supervisor, machine, cluster } = scene;
    supervisor.shut_down();
    assert_eq!(machine.kernel.frozen().len(), 0);
    cluster.tell("resume osd");
    let supervisor = machine.start();
    let scene = Scene { supervisor, machine, cluster };
    scene.wait_until_thawed();
    scene.release(index_of(&mapping));
    scene.supervisor.unmap("stuck").unwrap();
    scene.machine.assert_clean();
}

/// Writes a hook that logs its arguments and runs `more`.
fn hook(machine: &Machine, more: &str) -> PathBuf {
    let path = machine.path("hook");
    let log = machine.path("calls");
    let text = format!("#!/bin/sh\necho \"$@\" >>{}\n{more}\n", log.display());
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn hook_calls(scene: &Scene<'_>) -> Vec<String> {
    let log = std::fs::read_to_string(scene.machine.path("calls")).unwrap_or_default();
    log.lines().map(str::to_owned).collect()
}

#[test]
fn a_hook_runs_instead_of_freezing_and_its_failure_fails_the_snapshot() {
    let change = |machine: &Machine, config: &mut Config| {
        let script = "test ! -e \"${0%/*}/fail\" || { echo no; exit 3; }
            test ! -e \"${0%/*}/hang\" || test \"$2\" = unquiesce || sleep 600";
        config.map.quiesce_hook = Some(hook(machine, script));
        config.map.quiesce_deadline = Duration::from_secs(5);
    };
    let scene = scene(shared(), change, |_| false);
    scene.image("hooked");
    let mapping = scene.quiesced("hooked");
    let device = mapping.device.clone();
    let expect = |verbs: &[&str]| {
        let all: Vec<String> = verbs.iter().map(|verb| format!("{device} {verb}")).collect();
        wait_until("the hook is called", || hook_calls(&scene).len() >= all.len());
        scene.wait_until_thawed();
        assert_eq!(hook_calls(&scene), all);
    };
    let snap = |at: &str, how: &[&str]| {
        Scene::snap(shared(), &format!("hooked@{at}"), how).recv_timeout(RBD_LIMIT).unwrap()
    };
    snap("one", &[]).unwrap();
    expect(&["quiesce", "unquiesce"]);
    assert_eq!(scene.frozen(), 0);

    std::fs::write(scene.machine.path("hang"), "").unwrap();
    snap("two", &[]).unwrap_err();
    let mapping = scene.supervisor.get("hooked").unwrap();
    assert!(mapping.message.contains("was killed"), "{mapping:?}");
    expect(&["quiesce", "unquiesce", "quiesce", "unquiesce"]);
    std::fs::remove_file(scene.machine.path("hang")).unwrap();

    std::fs::write(scene.machine.path("fail"), "").unwrap();
    let complaint = snap("three", &[]).unwrap_err();
    assert!(!complaint.is_empty() && scene.snapshots("hooked") == 1, "{complaint}");
    let mapping = scene.supervisor.get("hooked").unwrap();
    assert!(mapping.message.contains("exit status: 3"), "{mapping:?}");
    wait_until("the hook is called for the thaw", || hook_calls(&scene).len() == 6);
    snap("four", &["--ignore-quiesce-error"]).unwrap();
    assert_eq!(scene.snapshots("hooked"), 2);
    std::fs::remove_file(scene.machine.path("fail")).unwrap();
    scene.wait_until_thawed();
    scene.release(index_of(&mapping));
    scene.supervisor.unmap("hooked").unwrap();
    scene.machine.assert_clean();
}

#[test]
fn an_unmap_waits_for_a_slow_unquiesce_hook() {
    let change = |machine: &Machine, config: &mut Config| {
        config.map.quiesce_hook = Some(hook(machine, "test \"$2\" = quiesce || sleep 3"));
        config.map.quiesce_deadline = Duration::from_secs(60);
    };
    let scene = scene(shared(), change, |_| false);
    scene.image("slow-hook");
    let mapping = scene.quiesced("slow-hook");
    scene.release(index_of(&mapping));
    let made = Scene::snap(shared(), "slow-hook@one", &[]);
    wait_until("the unquiesce hook runs", || hook_calls(&scene).len() == 2);
    scene.supervisor.unmap("slow-hook").unwrap();
    made.recv_timeout(RBD_LIMIT).unwrap().unwrap();
    scene.machine.assert_clean();
}

#[test]
fn quiesce_is_refused_for_volumes_that_cannot_be_quiesced() {
    let scene = Scene::on(shared());
    scene.image("refused");
    let with = |uri: &str, read_only| {
        let options = MapOptions { quiesce: true, read_only, ..MapOptions::default() };
        scene.supervisor.map_with(MapRequest { options: Some(options), ..request("x", uri) })
    };
    let rbd = scene.uri("refused");
    assert_code(with(&rbd, true), Code::InvalidArgument, "read-only");
    assert_code(with(&scene.machine.volume("v"), false), Code::Unimplemented, "snapshots");
    shared().rbd(&["snap", "create", "--no-progress", &spec("refused@s")]).unwrap();
    assert_code(with(&scene.uri("refused@s"), false), Code::InvalidArgument, "read-only");
    scene.machine.assert_clean();
    // `quiesce` is a property of the mapping.
    with(&rbd, false).unwrap();
    assert_code(scene.supervisor.map("x", &rbd), Code::AlreadyExists, "quiesce=true");
    scene.supervisor.unmap("x").unwrap();
}
