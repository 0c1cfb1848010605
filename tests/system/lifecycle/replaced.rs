//! Volumes that are removed or replaced while no worker has them open. A later worker must serve only the
//! volume that the mapping's first worker has opened.

use std::fs;
use std::time::{Duration, Instant};

use cleat_api::v1::{MapOptions, MapRequest, Mapping, MappingState};
use nix::sys::signal::Signal;
use tonic::Code;

use super::metrics::scrape;
use test_kit::node::{
    Machine, SIZE, Supervisor, assert_code, index_of, is_alive, kill, repair, request, wait_until,
};

/// Maps `uri` as `a`. Requests of a device without a worker wait for a minute.
fn map(supervisor: &Supervisor, uri: &str) -> Mapping {
    let options = MapOptions { dead_connection_timeout_s: 60, ..MapOptions::default() };
    supervisor.map_with(MapRequest { options: Some(options), ..request("a", uri) }).unwrap()
}

fn kill_worker(mapping: &Mapping) {
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("the worker has exited", || !is_alive(mapping.worker_pid));
}

/// Puts another file with `content` under the name `a`, and keeps the volume's file as `a.old`.
fn replace(machine: &Machine, content: u8) {
    fs::rename(machine.path("a"), machine.path("a.old")).unwrap();
    fs::write(machine.path("new"), vec![content; usize::try_from(SIZE).unwrap()]).unwrap();
    fs::rename(machine.path("new"), machine.path("a")).unwrap();
}

/// Checks that the mapping `a` has failed because its volume was replaced, and that its device never
/// returns or takes data of the other volume.
fn assert_replaced(machine: &Machine, supervisor: &Supervisor, index: u32) {
    let failed = supervisor.wait_for("a", MappingState::Failed);
    assert!(failed.message.contains("the volume of a was replaced"), "{failed:?}");
    assert!(failed.message.contains("is another volume than"), "{failed:?}");
    assert!(failed.message.contains("cleat unmap --force a"), "{failed:?}");
    assert!(failed.fenced, "{failed:?}");
    let since = Instant::now();
    machine.kernel.read(index, 0, 512).unwrap_err();
    machine.kernel.write(index, 0, &[7; 512]).unwrap_err();
    assert!(since.elapsed() < Duration::from_secs(30), "the requests waited for another worker");
    let metrics = scrape(machine);
    for name in ["cleat_volume_replaced", "cleat_volume_fenced"] {
        assert_eq!(metrics.value(name, &[("volume", "a")]), Some(1.0), "{name}");
    }
}

fn content(machine: &Machine, name: &str) -> Vec<u8> {
    fs::read(machine.path(name)).unwrap()
}

#[test]
fn a_file_that_replaced_the_volume_is_neither_served_nor_written() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = map(&supervisor, &machine.volume("a"));
    let index = index_of(&mapping);
    machine.kernel.write(index, 0, &[1; 512]).unwrap();
    replace(&machine, 2);
    kill_worker(&mapping);
    assert_replaced(&machine, &supervisor, index);
    // The next supervisor knows it from the record, also after the first file has come back.
    supervisor.crash();
    fs::rename(machine.path("a"), machine.path("other")).unwrap();
    fs::rename(machine.path("a.old"), machine.path("a")).unwrap();
    let supervisor = machine.start();
    assert_replaced(&machine, &supervisor, index);
    let again = supervisor.map("a", &mapping.uri);
    assert_code(again.clone(), Code::DataLoss, "was replaced");
    assert!(repair(&again.unwrap_err()).contains("cleat unmap --force a"));

    supervisor.force("a").unwrap();
    let mapping = map(&supervisor, &mapping.uri);
    assert_eq!(machine.kernel.read(index_of(&mapping), 0, 512).unwrap(), [1; 512]);
    assert!(content(&machine, "other").iter().all(|byte| *byte == 2), "it was written");
    assert_eq!(scrape(&machine).value("cleat_volume_replaced", &[("volume", "a")]), Some(0.0));
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_file_that_is_missing_is_not_created_again_and_is_served_when_it_is_back() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = format!("file:{}?create=1M", machine.path("a").display());
    let mapping = supervisor.map("a", &uri).unwrap();
    let index = index_of(&mapping);
    machine.kernel.write(index, 0, &[1; 512]).unwrap();
    fs::rename(machine.path("a"), machine.path("a.old")).unwrap();
    kill_worker(&mapping);
    wait_until("the reason is shown", || {
        supervisor.get("a").unwrap().message.contains("does not exist any more")
    });
    assert!(!machine.path("a").exists(), "a new file was created for the device");
    fs::rename(machine.path("a.old"), machine.path("a")).unwrap();
    wait_until("the volume is served again", || {
        supervisor.get("a").unwrap().state() == MappingState::Mapped
    });
    assert_eq!(machine.kernel.read(index, 0, 512).unwrap(), [1; 512]);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

/// A forced unmap opens the volume to prove that no request of the ended worker is in flight.
#[test]
fn a_forced_unmap_does_not_create_a_missing_file() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = format!("file:{}?create=1M", machine.path("a").display());
    map(&supervisor, &uri);
    fs::rename(machine.path("a"), machine.path("a.old")).unwrap();
    supervisor.force("a").unwrap();
    assert!(!machine.path("a").exists(), "a new file was created");
    machine.assert_clean();
}

#[test]
fn a_volume_whose_path_has_changed_is_served_if_the_path_leads_to_the_same_file() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let (first, second) = (machine.path("first"), machine.path("second"));
    fs::create_dir(&first).unwrap();
    std::os::unix::fs::symlink("first", machine.path("link")).unwrap();
    let uri = machine.volume("link/a");
    let mapping = supervisor.map("a", &uri).unwrap();
    let index = index_of(&mapping);
    machine.kernel.write(index, 0, &[1; 512]).unwrap();
    fs::rename(&first, &second).unwrap();
    fs::rename(second.join("a"), second.join("b")).unwrap();
    fs::remove_file(machine.path("link")).unwrap();
    std::os::unix::fs::symlink("second", machine.path("link")).unwrap();
    std::os::unix::fs::symlink("b", second.join("a")).unwrap();
    kill_worker(&mapping);
    wait_until("another worker serves", || {
        let now = supervisor.get("a").unwrap();
        now.state() == MappingState::Mapped && now.worker_pid != mapping.worker_pid
    });
    assert_eq!(machine.kernel.read(index, 0, 512).unwrap(), [1; 512]);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

/// The successor gets the open file of its predecessor, so it serves the volume wherever the path leads.
#[test]
fn a_handover_keeps_the_volume_and_a_crash_after_it_is_still_noticed() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = map(&supervisor, &machine.volume("a"));
    let index = index_of(&mapping);
    machine.kernel.write(index, 0, &[1; 512]).unwrap();
    replace(&machine, 2);
    supervisor.hand_over();
    assert_eq!(machine.kernel.read(index, 0, 512).unwrap(), [1; 512]);
    machine.kernel.write(index, 512, &[3; 512]).unwrap();
    let now = supervisor.get("a").unwrap();
    assert_ne!(now.worker_pid, mapping.worker_pid);
    kill_worker(&now);
    assert_replaced(&machine, &supervisor, index);
    supervisor.force("a").unwrap();
    assert_eq!(content(&machine, "a.old")[..1024], [[1; 512], [3; 512]].concat());
    assert!(content(&machine, "a").iter().all(|byte| *byte == 2), "it was written");
    machine.assert_clean();
}

#[test]
fn a_new_mapping_may_create_the_file_again() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = format!("file:{}?create=1M", machine.path("a").display());
    let mapping = map(&supervisor, &uri);
    supervisor.unmap("a").unwrap();
    fs::remove_file(machine.path("a")).unwrap();
    let again = map(&supervisor, &uri);
    assert_eq!((again.size_bytes, mapping.size_bytes), (SIZE, SIZE));
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}
