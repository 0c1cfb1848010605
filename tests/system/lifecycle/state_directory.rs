//! A state directory that is full, read-only or hung, records that cannot be read, and records of newer
//! builds.

use std::path::PathBuf;
use std::time::Duration;

use cleat_api::v1::{Check, HealthRequest, Mapping, MappingState, SetOptionsRequest};
use cleat_kernel::Kernel;
use nix::sys::signal::Signal;
use tonic::Code;

use test_kit::node::{
    DiskFailure, Machine, Supervisor, assert_code, index_of, is_alive, kill, repair, wait_until,
};
use test_kit::stopwatch::Stopwatch;

const FAILURES: [DiskFailure; 3] = [DiskFailure::Full, DiskFailure::ReadOnly, DiskFailure::Hang];

/// Returns the text of the error that the status shows for a failure.
fn cause(failure: DiskFailure) -> &'static str {
    match failure {
        DiskFailure::Full => "No space left on device",
        DiskFailure::ReadOnly => "Read-only file system",
        DiskFailure::Hang => "did not write a journal record in time",
    }
}

fn record_of(machine: &Machine, mapping: &Mapping) -> PathBuf {
    machine.config.state_dir.join(format!("mappings/{}.json", mapping.mapping_id))
}

fn copy_of(machine: &Machine, mapping: &Mapping) -> PathBuf {
    machine.config.runtime_dir.join(format!("records/{}.json", mapping.mapping_id))
}

fn checks(supervisor: &Supervisor) -> Vec<Check> {
    let health = supervisor.block_on(supervisor.client().health(HealthRequest {})).unwrap();
    health.into_inner().checks
}

/// Kills the worker of `a` and waits until another one serves the device.
fn replace_worker(machine: &Machine, supervisor: &Supervisor, before: &Mapping) -> Mapping {
    kill(before.worker_pid, Signal::SIGKILL);
    let mut now = before.clone();
    wait_until("a new worker serves", || {
        now = supervisor.get("a").unwrap();
        assert_ne!(now.state(), MappingState::Failed, "{now:?}");
        now.state() == MappingState::Mapped && now.worker_pid != before.worker_pid
    });
    assert_eq!(now.device, before.device);
    machine.kernel.write(index_of(&now), 0, &[7; 512]).unwrap();
    now
}

#[test]
fn a_worker_that_dies_is_replaced_whatever_is_wrong_with_the_state_directory() {
    for failure in FAILURES {
        println!("{failure:?}");
        let machine = Machine::new();
        let supervisor = machine.start();
        let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
        machine.disk.fail(Some(failure), None);
        let now = replace_worker(&machine, &supervisor, &mapping);
        wait_until("the status names the cause", || {
            supervisor.get("a").unwrap().message.contains(cause(failure))
        });
        let checks = checks(&supervisor);
        let check = checks.iter().find(|check| check.name == "state directory").expect("a check");
        assert!(check.finding.contains(cause(failure)), "{check:?}");
        let state_dir = machine.config.state_dir.to_str().unwrap();
        assert!(check.repair.contains(state_dir), "{check:?}");

        // A supervisor that starts after a crash has the newest record and adopts the worker.
        assert!(copy_of(&machine, &mapping).exists());
        machine.disk.fail(Some(failure).filter(|failure| *failure != DiskFailure::Hang), None);
        supervisor.crash();
        let supervisor = machine.start();
        let after = supervisor.wait_for("a", MappingState::Mapped);
        assert_eq!((after.worker_pid, after.generation), (now.worker_pid, now.generation));

        // The record gets to the state directory without any call.
        machine.disk.fail(None, None);
        wait_until("the copy is removed", || !copy_of(&machine, &mapping).exists());
        wait_until("the message is gone", || supervisor.get("a").unwrap().message.is_empty());
        let record = std::fs::read_to_string(record_of(&machine, &mapping)).unwrap();
        let record: serde_json::Value = serde_json::from_str(&record).unwrap();
        assert_eq!(record["generation"], now.generation);
        assert_eq!(record["worker"]["pid"], now.worker_pid);
        assert!(self::checks(&supervisor).iter().all(|check| check.name != "state directory"));
        supervisor.unmap("a").unwrap();
        machine.assert_clean();
    }
}

#[test]
fn a_volume_is_mapped_and_unmapped_whatever_is_wrong_with_the_state_directory() {
    for failure in FAILURES {
        println!("{failure:?}");
        let machine = Machine::new();
        let supervisor = machine.start();
        let a = supervisor.map("a", &machine.volume("a")).unwrap();
        machine.disk.fail(Some(failure), None);
        let b = supervisor.map("b", &machine.volume("b")).unwrap();
        for name in ["a", "b"] {
            let begun = Stopwatch::start();
            assert!(supervisor.unmap(name).unwrap());
            assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
        }
        assert!(machine.kernel.devices().unwrap().iter().all(|device| !device.connected));
        assert!(!is_alive(a.worker_pid) && !is_alive(b.worker_pid));
        assert!(supervisor.list().is_empty());

        // The next supervisor does not find the volume mapped, although its record may still be there.
        machine.disk.fail(Some(failure).filter(|failure| *failure != DiskFailure::Hang), None);
        supervisor.crash();
        let supervisor = machine.start();
        assert!(supervisor.list().is_empty(), "{:?}", supervisor.list());
        let again = supervisor.map("a", &machine.volume("a")).unwrap();
        machine.disk.fail(None, None);
        wait_until("the old record is removed", || !record_of(&machine, &a).exists());
        wait_until("the new record is written", || record_of(&machine, &again).exists());
        supervisor.unmap("a").unwrap();
        wait_until("nothing is left of the copies", || {
            std::fs::read_dir(machine.config.runtime_dir.join("records")).unwrap().count() == 0
        });
        machine.assert_clean();
    }
}

/// The writes of more attempts than a mapping has if each of them counts as a failed repair. An attempt tries
/// to write the record before and after it has started a process, to both directories.
const WRITES: u64 = 4 * 12;

#[test]
fn a_mapping_waits_for_the_journal_and_goes_on_by_itself() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    machine.disk.fail(Some(DiskFailure::Full), Some(DiskFailure::Full));
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("the repair was tried often", || {
        let now = supervisor.get("a").unwrap();
        assert_ne!(now.state(), MappingState::Failed, "{now:?}");
        machine.disk.refused_writes() >= WRITES
    });
    let waiting = supervisor.get("a").unwrap();
    assert_eq!(waiting.state(), MappingState::Recovering);
    let state_dir = machine.config.state_dir.to_str().unwrap();
    for part in
        ["waiting for the state directory", "No space left on device", "free disk space", state_dir]
    {
        assert!(waiting.message.contains(part), "{part}: {}", waiting.message);
    }
    machine.disk.fail(None, None);
    let now = supervisor.wait_for("a", MappingState::Mapped);
    assert_eq!((now.device, now.message.as_str()), (mapping.device.clone(), ""));
    machine.kernel.write(index_of(&mapping), 0, &[1; 512]).unwrap();
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_map_that_cannot_be_recorded_leaves_nothing_behind() {
    let machine = Machine::new();
    let supervisor = machine.start();
    machine.disk.fail(Some(DiskFailure::Full), Some(DiskFailure::Full));
    let status = supervisor.map("a", &machine.volume("a")).unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert!(status.message().contains("No space left on device"), "{status}");
    assert!(repair(&status).contains("free disk space"), "{status:?}");
    machine.assert_clean();
    // The check shows the state directory until it takes records again, also without any mapping.
    let is_shown = || checks(&supervisor).iter().any(|check| check.name == "state directory");
    assert!(is_shown());
    machine.disk.fail(None, None);
    wait_until("the check is gone", || !is_shown());
    // A mapping that works can be unmapped nevertheless.
    machine.disk.fail(None, None);
    supervisor.map("a", &machine.volume("a")).unwrap();
    machine.disk.fail(Some(DiskFailure::Full), Some(DiskFailure::Full));
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn the_claim_of_a_file_needs_no_record_to_be_released_after_the_worker_was_killed() {
    let machine = Machine::new();
    let supervisor = machine.start_killing_at("before StopWorker");
    let uri = machine.volume("a");
    for _ in 0..2 {
        let mapping = supervisor.map("a", &uri).unwrap();
        machine.disk.fail(Some(DiskFailure::Full), Some(DiskFailure::Full));
        assert!(supervisor.unmap("a").unwrap());
        assert!(!is_alive(mapping.worker_pid));
        machine.assert_clean();
        machine.disk.fail(None, None);
    }
}

/// The number of mappings whose records are written at the same time.
const MANY: usize = 100;

#[test]
fn a_hung_state_directory_with_a_hundred_mappings_leaves_force_working() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let name = |n: usize| format!("m{n}");
    let mappings: Vec<Mapping> =
        (0..MANY).map(|n| supervisor.map(&name(n), "mem:64K").unwrap()).collect();
    machine.disk.fail(Some(DiskFailure::Hang), None);
    let calls: Vec<_> = (0..MANY)
        .map(|n| {
            let mut client = supervisor.client();
            let request = SetOptionsRequest {
                target: name(n),
                iops: Some(1000),
                ..SetOptionsRequest::default()
            };
            supervisor.spawn(async move { client.set_options(request).await })
        })
        .collect();
    for n in [0, MANY / 2] {
        let begun = Stopwatch::start();
        supervisor.force(&name(n)).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert!(machine.kernel.write(index_of(&mappings[n]), 0, &[1; 512]).is_err());
    }
    let mut changed = 0;
    for call in calls {
        // The calls on the mappings that were unmapped by force may fail.
        changed += usize::from(supervisor.block_on(call).unwrap().is_ok());
    }
    assert!(changed >= MANY - 2, "{changed}");
    machine.kernel.write(index_of(&mappings[1]), 0, &[1; 512]).unwrap();
    machine.disk.fail(None, None);
    for n in (0..MANY).filter(|n| ![0, MANY / 2].contains(n)) {
        supervisor.unmap(&name(n)).unwrap();
    }
    wait_until("nothing is left of the copies", || {
        std::fs::read_dir(machine.config.runtime_dir.join("records")).unwrap().count() == 0
    });
    machine.assert_clean();
}

#[test]
fn a_record_that_cannot_be_read_for_a_while_is_neither_moved_nor_forgotten() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    supervisor.crash();
    // Without a worker and holders, a device without a record would be removed.
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("the worker has exited", || !is_alive(mapping.worker_pid));
    machine.disk.fail_reads(Some(libc::EIO));
    let supervisor = machine.start();
    let device = machine.kernel.devices().unwrap().into_iter().find(|device| device.connected);
    assert_eq!(device.map(|device| device.index), Some(index_of(&mapping)));
    let findings = checks(&supervisor);
    let left = |check: &Check| {
        check.finding.contains("was left in place") && check.finding.contains("Input/output error")
    };
    assert!(findings.iter().any(left), "{findings:?}");
    assert_code(supervisor.unmap("a"), Code::Unavailable, "cannot be read");
    // Two mappings of one name would share a link, and one of the records would be ignored later.
    let other = machine.volume("other");
    assert_code(supervisor.map("a", &other), Code::Unavailable, "cannot be read");
    machine.disk.fail_reads(None);
    wait_until("the mapping is restored", || {
        supervisor.get("a").is_ok_and(|now| now.state() == MappingState::Mapped)
    });
    let now = supervisor.get("a").unwrap();
    assert_eq!((now.device, now.mapping_id), (mapping.device, mapping.mapping_id));
    let quarantine = machine.config.state_dir.join("quarantine");
    assert_eq!(std::fs::read_dir(quarantine).unwrap().count(), 0);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_mapping_whose_record_cannot_be_read_does_not_come_back_after_a_forced_unmap() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    supervisor.crash();
    machine.disk.fail_reads(Some(libc::EIO));
    let supervisor = machine.start();
    assert_code(supervisor.unmap("a"), Code::Unavailable, "cannot be read");
    supervisor.force("a").unwrap();
    assert!(!is_alive(mapping.worker_pid));
    assert!(!record_of(&machine, &mapping).exists());
    machine.disk.fail_reads(None);
    supervisor.map("a", &machine.volume("a")).unwrap();
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_record_of_a_newer_build_and_its_device_are_left_alone() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = machine.volume("a");
    let mapping = supervisor.map("a", &uri).unwrap();
    supervisor.crash();
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("the worker has exited", || !is_alive(mapping.worker_pid));
    let path = record_of(&machine, &mapping);
    let record = std::fs::read_to_string(&path).unwrap();
    let newer = record.replace("\"version\": 1", "\"version\": 2");
    assert_ne!(newer, record);
    std::fs::write(&path, &newer).unwrap();
    let supervisor = machine.start();
    let findings = checks(&supervisor);
    let told = |check: &Check| {
        check.finding.contains("version 2") && check.finding.contains("install the newer build")
    };
    assert!(findings.iter().any(told), "{findings:?}");
    assert_code(supervisor.unmap("a"), Code::Unimplemented, "newer build");
    assert_code(supervisor.unmap(&mapping.device), Code::Unimplemented, "newer build");
    assert_code(supervisor.map("a", &uri), Code::AlreadyExists, "newer build");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), newer);
    assert!(machine.kernel.devices().unwrap()[index_of(&mapping) as usize].connected);
    // The newer build is installed again.
    supervisor.crash();
    std::fs::write(&path, &record).unwrap();
    let supervisor = machine.start();
    let now = supervisor.wait_for("a", MappingState::Mapped);
    assert_eq!(now.device, mapping.device);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}
