//! A volume whose storage has lost acknowledged writes: no later flush may succeed.

use std::time::{Duration, Instant};

use cleat_api::v1::{MappingState, ResizeRequest};
use cleat_kernel::Kernel;
use nix::sys::signal::Signal;

use test_kit::node::{Machine, index_of, kill, repair, wait_until};

#[test]
fn a_failed_sync_is_reported_and_survives_workers_and_supervisors() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = format!("fault:{}", machine.volume("a"));
    let mapping = supervisor.map("a", &uri).unwrap();
    let index = index_of(&mapping);
    let flush = || machine.kernel.flush(index, Instant::now() + Duration::from_secs(30));
    machine.kernel.write(index, 0, &[1; 4096]).unwrap();
    flush().unwrap();
    assert!(!supervisor.get("a").unwrap().sync_failed);

    supervisor.set_fault("fail_sync=true");
    for _ in 0..2 {
        // The storage reports the second one as a success.
        flush().unwrap_err();
    }
    wait_until("the failure is reported", || supervisor.get("a").unwrap().sync_failed);
    let reported = supervisor.get("a").unwrap();
    assert_eq!(reported.state(), MappingState::Mapped);
    assert!(reported.message.contains("cleat unmap --force a"), "{}", reported.message);
    machine.kernel.write(index, 0, &[2; 4096]).unwrap();

    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("a new worker serves", || {
        let now = supervisor.get("a").unwrap();
        now.state() == MappingState::Mapped && now.worker_pid != mapping.worker_pid
    });
    flush().unwrap_err();
    supervisor.hand_over();
    flush().unwrap_err();

    let worker = supervisor.get("a").unwrap().worker_pid;
    supervisor.crash();
    kill(worker, Signal::SIGKILL);
    let supervisor = machine.start();
    wait_until("a new worker serves", || {
        let now = supervisor.get("a").unwrap();
        now.state() == MappingState::Mapped && now.worker_pid != worker
    });
    assert!(supervisor.get("a").unwrap().sync_failed);
    flush().unwrap_err();

    let refused = supervisor.unmap("a").unwrap_err();
    assert!(repair(&refused).contains("--force"), "{}", repair(&refused));
    supervisor.force("a").unwrap();
    let mapping = supervisor.map("a", &uri).unwrap();
    assert!(!mapping.sync_failed, "the volume was mapped again");
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_failed_sync_of_a_killed_worker_is_known_to_its_replacement() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &format!("fault:{}", machine.volume("a"))).unwrap();
    let index = index_of(&mapping);
    let flush = || machine.kernel.flush(index, Instant::now() + Duration::from_secs(30));
    machine.kernel.write(index, 0, &[1; 4096]).unwrap();
    supervisor.set_fault("fail_sync=true");
    supervisor.crash();
    // No supervisor sees the failure before the next one adopts the worker.
    flush().unwrap_err();
    let supervisor = machine.start();
    wait_until("the failure is reported", || supervisor.get("a").unwrap().sync_failed);
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("a new worker serves", || {
        let now = supervisor.get("a").unwrap();
        now.state() == MappingState::Mapped && now.worker_pid != mapping.worker_pid
    });
    flush().unwrap_err();
    supervisor.force("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_resize_reports_a_failed_sync() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &format!("fault:{}", machine.volume("a"))).unwrap();
    let index = index_of(&mapping);
    machine.kernel.write(index, 0, &[1; 4096]).unwrap();
    supervisor.set_fault("fail_sync=true");
    let size_bytes = mapping.size_bytes * 2;
    let request = ResizeRequest { target: "a".into(), size_bytes, allow_shrink: false };
    let refused = supervisor.block_on(supervisor.client().resize(request)).unwrap_err();
    assert!(refused.message().contains("a sync failed"), "{}", refused.message());
    let flush = machine.kernel.flush(index, Instant::now() + Duration::from_secs(30));
    flush.unwrap_err();
    wait_until("the failure is reported", || supervisor.get("a").unwrap().sync_failed);
    supervisor.force("a").unwrap();
    machine.assert_clean();
}
