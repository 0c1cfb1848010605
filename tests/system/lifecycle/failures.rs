//! Workers that die or hang, and faults of the kernel.

use std::time::Duration;

use cleat_api::v1::MappingState;
use cleat_core::error::ErrorKind;
use cleat_kernel::sim::{Call, Fault};
use cleat_kernel::{Holder, Kernel};
use nix::sys::signal::Signal;
use tonic::Code;

use test_kit::node::{Machine, assert_code, index_of, is_alive, kill, repair, wait_until};
use test_kit::stopwatch::Stopwatch;

#[test]
fn a_killed_worker_is_replaced_without_data_loss() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    let mut worker = mapping.worker_pid;
    for round in 1..4_u8 {
        machine.kernel.write(index, 0, &[round; 4096]).unwrap();
        kill(worker, Signal::SIGKILL);
        wait_until("a new worker serves", || {
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
fn a_memory_volume_fails_after_its_worker_died_and_is_not_replaced() {
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
fn a_hung_worker_gets_no_successor() {
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
    // The worker is adopted after SIGCONT, and replaced after SIGKILL.
    kill(mapping.worker_pid, Signal::SIGCONT);
    supervisor.wait_for("a", MappingState::Mapped);
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("a new worker serves", || {
        let now = supervisor.get("a").unwrap();
        now.state() == MappingState::Mapped && now.worker_pid != mapping.worker_pid
    });
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_recovery_reports_its_cause_and_continues_when_the_volume_is_back() {
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
    // The volume is available again, and the mapping recovers.
    std::fs::rename(&away, &here).unwrap();
    let now = supervisor.wait_for("a", MappingState::Mapped);
    assert_eq!(now.message, "");
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_device_that_another_process_disconnects_is_reported() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    machine.kernel.vanish(index_of(&mapping));
    let failed = supervisor.wait_for("a", MappingState::Failed);
    assert!(failed.message.contains("another program"), "{}", failed.message);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
    let again = supervisor.map("a", &machine.volume("a")).unwrap();
    assert_eq!(again.state(), MappingState::Mapped);
    supervisor.unmap("a").unwrap();
}

#[test]
fn sockets_that_the_kernel_drops_are_replaced() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    machine.kernel.inject(Call::Reconfigure, Fault::DropSockets);
    machine.kernel.inject(Call::Reconfigure, Fault::Fail(ErrorKind::Internal));
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("a new worker serves", || {
        let now = supervisor.get("a").unwrap();
        now.state() == MappingState::Mapped && now.worker_pid != mapping.worker_pid
    });
    machine.kernel.write(index_of(&mapping), 0, &[1; 512]).unwrap();
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_lost_kernel_event_is_noticed_by_polling() {
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
fn a_map_leaves_no_state_when_a_kernel_call_fails() {
    for call in [Call::Connect, Call::WaitReady, Call::Devices] {
        for (kind, code) in [
            (ErrorKind::Internal, Code::Internal),
            (ErrorKind::PermissionDenied, Code::PermissionDenied),
        ] {
            let machine = Machine::new();
            let supervisor = machine.start();
            // The search for a device without a record lists the devices first, and a map needs no such device.
            let calls = if call == Call::Devices { 2 } else { 1 };
            (0..calls).for_each(|_| machine.kernel.inject(call, Fault::Fail(kind)));
            let result = supervisor.map("a", &machine.volume("a"));
            // The periodic sweep may have taken a fault of the list.
            if call == Call::Devices && result.is_ok() {
                assert!(supervisor.unmap("a").unwrap());
            } else {
                assert_code(result, code, &format!("the simulated kernel failed {call:?}"));
            }
            assert_eq!(machine.kernel.faults_left(), 0, "{call:?} {kind:?}");
            assert!(supervisor.list().is_empty(), "{call:?} {kind:?}");
            machine.assert_clean();
        }
    }
    for (fault, refused) in [
        (Fault::LateEffect, true),
        (Fault::NoSymlink, true),
        // The device is connected again.
        (Fault::Vanish, false),
    ] {
        let machine = Machine::new();
        let supervisor = machine.start();
        machine.kernel.inject(Call::Connect, fault);
        let mut request = test_kit::node::request("a", &machine.volume("a"));
        if refused {
            request.timeout_ms = 3000;
        }
        let result = supervisor.map_with(request);
        match refused {
            true => assert_code(result, Code::DeadlineExceeded, "in time"),
            false => {
                let index = index_of(&result.unwrap());
                machine.kernel.write(index, 0, &[1; 512]).unwrap();
                assert!(supervisor.unmap("a").unwrap(), "{fault:?}");
            }
        }
        assert_eq!(machine.kernel.faults_left(), 0, "{fault:?}");
        assert!(supervisor.list().is_empty(), "{fault:?}");
        machine.assert_clean();
    }
}

#[test]
fn an_unmap_that_fails_is_completed_later() {
    let machine = Machine::new();
    let supervisor = machine.start();
    supervisor.map("a", &machine.volume("a")).unwrap();
    machine.kernel.inject(Call::Disconnect, Fault::Fail(ErrorKind::Internal));
    assert_code(supervisor.unmap("a"), Code::Internal, "the simulated kernel failed Disconnect");
    wait_until("the mapping is removed", || supervisor.list().is_empty());
    machine.assert_clean();
}

#[test]
fn an_unmap_is_refused_when_the_flush_fails() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    machine.kernel.inject(Call::Flush, Fault::Fail(ErrorKind::Internal));
    assert_code(supervisor.unmap("a"), Code::Internal, "the simulated kernel failed Flush");
    assert_eq!(supervisor.wait_for("a", MappingState::Mapped).device, mapping.device);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

/// The page cache of the device may have data that no worker has received.
#[test]
fn an_unmap_without_a_worker_does_not_skip_the_flush() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    machine.kernel.write(index, 0, &[2; 512]).unwrap();
    let (here, away) = (machine.path("a"), machine.path("away"));
    std::fs::rename(&here, &away).unwrap();
    kill(mapping.worker_pid, Signal::SIGKILL);
    supervisor.wait_for("a", MappingState::Recovering);
    let refused = supervisor.unmap("a").unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert!(refused.message().contains("a is not unmapped, because its data cannot be flushed"));
    assert!(refused.message().contains(&*here.to_string_lossy()), "{refused:?}");
    assert!(repair(&refused).contains("cleat unmap a --force"), "{refused:?}");
    assert!(machine.kernel.devices().unwrap()[index as usize].connected);
    // The refusal is not taken back by a crash of the supervisor.
    supervisor.crash();
    let supervisor = machine.start();
    supervisor.wait_for("a", MappingState::Recovering);
    std::fs::rename(&away, &here).unwrap();
    machine.kernel.inject(Call::Flush, Fault::Fail(ErrorKind::Internal));
    assert_code(supervisor.unmap("a"), Code::Internal, "Flush");
    wait_until("the volume can be unmapped", || supervisor.unmap("a").is_ok());
    machine.assert_clean();
}

/// The unmap has 30 s. A new worker must not wait until they have passed.
#[test]
fn a_worker_that_dies_while_an_unmap_waits_for_its_flush_is_replaced_at_once() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    machine.kernel.write(index_of(&mapping), 0, &[4; 4096]).unwrap();
    // The flush gets no answer until the worker is killed.
    kill(mapping.worker_pid, Signal::SIGSTOP);
    let killing = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        kill(mapping.worker_pid, Signal::SIGKILL);
    });
    let asked = Stopwatch::start();
    assert!(supervisor.unmap("a").unwrap());
    assert!(asked.elapsed() < Duration::from_secs(15), "{:?}", asked.elapsed());
    killing.join().unwrap();
    machine.assert_clean();
    assert_eq!(std::fs::read(machine.path("a")).unwrap()[..4096], [4; 4096]);
}

/// A flush that a timed-out unmap has left behind has the device open in the supervisor.
#[test]
fn the_supervisor_is_no_holder_of_its_devices() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let index = index_of(&supervisor.map("a", &machine.volume("a")).unwrap());
    let own = Holder::Process { pid: std::process::id(), command: "cleat".into() };
    machine.kernel.set_holders(index, vec![own]);
    assert_eq!(supervisor.get("a").unwrap().holders, []);
    let kernel = machine.kernel.clone();
    let closing = std::thread::spawn(move || {
        // The disconnect fails the flush, which then closes the device.
        wait_until("the device is disconnected", || kernel.is_disconnected(index));
        kernel.set_holders(index, Vec::new());
    });
    assert!(supervisor.unmap("a").unwrap());
    closing.join().unwrap();
    machine.assert_clean();
}

#[test]
fn an_unmap_is_refused_when_the_device_has_a_holder_after_the_flush() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    // Another process opens the device during the flush.
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
