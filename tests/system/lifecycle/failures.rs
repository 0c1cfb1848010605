//! Workers that die or hang, and a kernel that misbehaves.

use std::time::Duration;

use cleat_api::v1::MappingState;
use cleat_core::error::ErrorKind;
use cleat_kernel::sim::{Call, Fault};
use cleat_kernel::{Holder, Kernel};
use nix::sys::signal::Signal;
use tonic::Code;

use test_kit::node::{Machine, assert_code, index_of, is_alive, kill, wait_until};
use test_kit::stopwatch::Stopwatch;

#[test]
fn a_killed_worker_is_replaced_and_nothing_is_lost() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    let mut worker = mapping.worker_pid;
    for round in 1..4_u8 {
        machine.kernel.write(index, 0, &[round; 4096]).unwrap();
        kill(worker, Signal::SIGKILL);
        wait_until("a new worker works", || {
            let now = supervisor.get("a").unwrap();
            now.state() == MappingState::Mapped && now.worker_pid != worker
        });
        let now = supervisor.get("a").unwrap();
        assert_eq!(now.device, mapping.device);
        assert_eq!(now.generation, mapping.generation + u64::from(round));
        assert_eq!(machine.kernel.live_connections(index), 1);
        assert_eq!(machine.kernel.read(index, 0, 4096).unwrap(), [round; 4096]);
        worker = now.worker_pid;
    }
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn memory_that_died_is_failed_and_not_replaced_by_zeroes() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("m", "mem:1M").unwrap();
    kill(mapping.worker_pid, Signal::SIGKILL);
    let failed = supervisor.wait_for("m", MappingState::Failed);
    assert!(failed.message.contains("content"), "{}", failed.message);
    assert_eq!((failed.worker_pid, failed.generation), (0, mapping.generation));
    assert_code(supervisor.map("m", "mem:1M"), Code::Internal, "content");
    supervisor.unmap("m").unwrap();
    machine.assert_clean();
}

#[test]
fn a_worker_that_hangs_is_never_doubled() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    kill(mapping.worker_pid, Signal::SIGSTOP);
    supervisor.crash();
    let supervisor = machine.start();
    let failed = supervisor.wait_for("a", MappingState::Failed);
    let pid = mapping.worker_pid.to_string();
    assert!(failed.message.contains(&pid) && failed.message.contains("kill -9"), "{failed:?}");
    assert_eq!(failed.generation, mapping.generation);
    // Continued, it is adopted; killed, it is replaced.
    kill(mapping.worker_pid, Signal::SIGCONT);
    supervisor.wait_for("a", MappingState::Mapped);
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("a new worker works", || {
        let now = supervisor.get("a").unwrap();
        now.state() == MappingState::Mapped && now.worker_pid != mapping.worker_pid
    });
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_volume_that_does_not_come_back_fails_in_the_end() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let (here, away) = (machine.path("a"), machine.path("away"));
    std::fs::rename(&here, &away).unwrap();
    kill(mapping.worker_pid, Signal::SIGKILL);
    let recovering = supervisor.wait_for("a", MappingState::Recovering);
    assert_eq!(recovering.device, mapping.device);
    wait_until("the cause is shown", || {
        supervisor.get("a").unwrap().message.contains(&*here.to_string_lossy())
    });
    // It comes back, and so does the mapping.
    std::fs::rename(&away, &here).unwrap();
    let now = supervisor.wait_for("a", MappingState::Mapped);
    assert_eq!(now.message, "");
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_device_that_somebody_disconnects_is_reported() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    machine.kernel.vanish(index_of(&mapping));
    let failed = supervisor.wait_for("a", MappingState::Failed);
    assert!(failed.message.contains("somebody else"), "{}", failed.message);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
    let again = supervisor.map("a", &machine.volume("a")).unwrap();
    assert_eq!(again.state(), MappingState::Mapped);
    supervisor.unmap("a").unwrap();
}

#[test]
fn sockets_that_the_kernel_drops_are_noticed() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    machine.kernel.inject(Call::Reconfigure, Fault::DropSockets);
    machine.kernel.inject(Call::Reconfigure, Fault::Fail(ErrorKind::Internal));
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("a new worker works", || {
        let now = supervisor.get("a").unwrap();
        now.state() == MappingState::Mapped && now.worker_pid != mapping.worker_pid
    });
    machine.kernel.write(index_of(&mapping), 0, &[1; 512]).unwrap();
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_lost_event_only_costs_time() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    machine.kernel.lose_events(true);
    machine.kernel.vanish(index_of(&mapping));
    supervisor.wait_for("a", MappingState::Failed);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn every_kernel_call_of_a_map_may_fail_and_nothing_is_left() {
    for call in [Call::Connect, Call::WaitReady, Call::Devices] {
        for fault in [Fault::Fail(ErrorKind::Internal), Fault::Fail(ErrorKind::PermissionDenied)] {
            let machine = Machine::new();
            let supervisor = machine.start();
            machine.kernel.inject(call, fault);
            let result = supervisor.map("a", &machine.volume("a"));
            if call == Call::Devices {
                // The sweep may have met the fault instead.
                let _ = result.map(|_| supervisor.unmap("a").unwrap());
            } else {
                assert!(result.is_err(), "{call:?} {fault:?}");
            }
            assert!(supervisor.list().is_empty(), "{call:?} {fault:?}");
            machine.assert_clean();
        }
    }
    for fault in [Fault::LateEffect, Fault::NoSymlink, Fault::Vanish] {
        let machine = Machine::new();
        let supervisor = machine.start();
        machine.kernel.inject(Call::Connect, fault);
        let mut request = test_kit::node::request("a", &machine.volume("a"));
        request.timeout_ms = 1000;
        match supervisor.map_with(request) {
            // A device that vanished is made again.
            Ok(_) => assert!(supervisor.unmap("a").unwrap(), "{fault:?}"),
            Err(status) => assert!(!status.message().is_empty(), "{fault:?}"),
        }
        assert!(supervisor.list().is_empty(), "{fault:?}");
        machine.assert_clean();
    }
}

#[test]
fn an_unmap_that_fails_half_way_is_finished_later() {
    let machine = Machine::new();
    let supervisor = machine.start();
    supervisor.map("a", &machine.volume("a")).unwrap();
    machine.kernel.inject(Call::Disconnect, Fault::Fail(ErrorKind::Internal));
    assert_code(supervisor.unmap("a"), Code::Internal, "");
    wait_until("it is gone", || supervisor.list().is_empty());
    machine.assert_clean();
}

#[test]
fn a_flush_that_fails_keeps_the_mapping() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    machine.kernel.inject(Call::Flush, Fault::Fail(ErrorKind::Internal));
    assert_code(supervisor.unmap("a"), Code::Internal, "");
    assert_eq!(supervisor.wait_for("a", MappingState::Mapped).device, mapping.device);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_holder_that_comes_after_the_flush_is_respected() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    // The flush hangs until its end; meanwhile somebody opens the device.
    let holder = vec![Holder::Process { pid: 1, command: "dd".into() }];
    machine.kernel.set_holders(index, holder);
    let asked = Stopwatch::start();
    assert_code(supervisor.unmap("a"), Code::FailedPrecondition, "dd");
    assert!(asked.elapsed() < Duration::from_secs(2));
    assert!(is_alive(mapping.worker_pid));
    assert!(machine.kernel.devices().unwrap()[index as usize].connected);
    machine.kernel.set_holders(index, Vec::new());
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

/// A disk that hangs costs the call its time limit, not more, and what it was about goes on.
#[test]
fn a_journal_whose_disk_hangs_is_not_waited_for_for_ever() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    // Opening it to write waits until somebody reads.
    let record = machine.config.state_dir.join("mappings").join(&mapping.mapping_id);
    let pipe = record.with_extension("tmp");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_code(supervisor.unmap("a"), Code::DeadlineExceeded, "journal");
    machine.kernel.write(index_of(&mapping), 0, &[1; 512]).unwrap();
    assert_eq!(supervisor.get("a").unwrap().state(), MappingState::Mapped);
    // As where the write that was left behind comes true: another supervisor would take it down.
    let record = record.with_extension("json");
    let kept = std::fs::read_to_string(&record).unwrap();
    std::fs::write(&record, kept.replace("\"mapped\"", "\"unmapped\"")).unwrap();
    assert_ne!(std::fs::read_to_string(&record).unwrap(), kept);
    // It ends, and fails: a pipe cannot be synced.
    std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
    wait_until("the journal is right", || std::fs::read_to_string(&record).unwrap() == kept);
    wait_until("it can be unmapped", || supervisor.unmap("a").is_ok());
    machine.assert_clean();
}
