//! Resize: a backend that grows by itself, shrinking on request, and a resize that waits while the
//! backend does not answer.

use cleat_api::v1::upgrade_event::Outcome;
use cleat_api::v1::{Mapping, MappingState, ResizeRequest, UpgradeRequest};
use cleat_kernel::{Holder, Kernel};
use tonic::{Code, Status};

use test_kit::node::{Machine, SIZE, Supervisor, assert_code, index_of, kill, wait_until};
use test_kit::stopwatch::Stopwatch;

fn resize(supervisor: &Supervisor, size_bytes: u64, allow_shrink: bool) -> Result<Mapping, Status> {
    let request = ResizeRequest { target: "a".into(), size_bytes, allow_shrink };
    supervisor.block_on(supervisor.client().resize(request)).map(tonic::Response::into_inner)
}

fn set_length(machine: &Machine, size: u64) {
    let file = std::fs::File::options().write(true).open(machine.path("a")).unwrap();
    file.set_len(size).unwrap();
}

fn device_size(machine: &Machine, mapping: &Mapping) -> u64 {
    machine.kernel.devices().unwrap()[index_of(mapping) as usize].size
}

#[test]
fn the_device_follows_a_backend_that_grows() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    set_length(&machine, 2 * SIZE + 100);
    wait_until("the device has the new size", || device_size(&machine, &mapping) == 2 * SIZE);
    wait_until("the mapping reports the new size", || {
        supervisor.get("a").unwrap().size_bytes == 2 * SIZE
    });
    machine.kernel.write(index_of(&mapping), 2 * SIZE - 4096, &[9; 4096]).unwrap();
    // The size is in the journal: a new supervisor and a new worker expect it.
    supervisor.crash();
    let supervisor = machine.start();
    kill(supervisor.get("a").unwrap().worker_pid, nix::sys::signal::Signal::SIGKILL);
    wait_until("another worker serves", || supervisor.get("a").unwrap().generation == 2);
    supervisor.wait_for("a", MappingState::Mapped);
    assert_eq!(machine.kernel.read(index_of(&mapping), 2 * SIZE - 4096, 4096).unwrap(), [9; 4096]);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

/// After a crash the kernel may repeat requests, and a resize would wait for them with its lock held.
/// After a handover there are no requests to repeat.
#[test]
fn a_resize_waits_for_repeated_requests_after_a_crash_and_not_after_a_handover() {
    let mut machine = Machine::new();
    machine.config.map.replay_delay = std::time::Duration::from_secs(30);
    let supervisor = machine.start();
    supervisor.map("a", &machine.volume("a")).unwrap();
    let request = UpgradeRequest { workers_only: true, force: true, ..UpgradeRequest::default() };
    let upgraded = supervisor.upgrade_with(request).unwrap();
    assert_eq!(upgraded[0].outcome(), Outcome::HandedOver, "{upgraded:?}");
    assert_eq!(resize(&supervisor, 2 * SIZE, false).unwrap().size_bytes, 2 * SIZE);
    let worker = supervisor.get("a").unwrap().worker_pid;
    kill(worker, nix::sys::signal::Signal::SIGKILL);
    wait_until("another worker serves", || supervisor.get("a").unwrap().generation == 3);
    supervisor.wait_for("a", MappingState::Mapped);
    assert_code(resize(&supervisor, 3 * SIZE, false), Code::Unavailable, "was replaced");
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_backend_that_grew_while_the_supervisor_was_down_is_noticed() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    supervisor.crash();
    kill(machine.workers()[0], nix::sys::signal::Signal::SIGKILL);
    set_length(&machine, 3 * SIZE);
    let supervisor = machine.start();
    wait_until("the device has the new size", || device_size(&machine, &mapping) == 3 * SIZE);
    supervisor.wait_for("a", MappingState::Mapped);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_mapping_of_a_shrunk_backend_has_failed_until_it_grows_or_a_shrink_is_allowed() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    set_length(&machine, SIZE / 2);
    let failed = supervisor.wait_for("a", MappingState::Failed);
    assert!(failed.message.contains("shrunk"), "{}", failed.message);
    assert_eq!(device_size(&machine, &mapping), SIZE);
    set_length(&machine, SIZE);
    supervisor.wait_for("a", MappingState::Mapped);
    set_length(&machine, SIZE / 2);
    supervisor.wait_for("a", MappingState::Failed);
    assert_code(resize(&supervisor, 0, false), Code::Internal, "shrunk");
    assert_eq!(resize(&supervisor, 0, true).unwrap().size_bytes, SIZE / 2);
    assert_eq!(device_size(&machine, &mapping), SIZE / 2);
    supervisor.wait_for("a", MappingState::Mapped);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_volume_without_holders_is_shrunk_on_request() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    assert_code(resize(&supervisor, SIZE / 2, false), Code::InvalidArgument, "shrink");
    let mount =
        Holder::Mount { path: "/mnt/a".into(), filesystem: "ext4".into(), namespace_pid: None };
    machine.kernel.set_holders(index, vec![mount]);
    assert_code(resize(&supervisor, SIZE / 2, true), Code::FailedPrecondition, "/mnt/a");
    let length = || std::fs::metadata(machine.path("a")).unwrap().len();
    assert_eq!((device_size(&machine, &mapping), length()), (SIZE, SIZE));
    machine.kernel.set_holders(index, Vec::new());
    assert_eq!(resize(&supervisor, SIZE / 2, true).unwrap().size_bytes, SIZE / 2);
    assert_eq!((device_size(&machine, &mapping), length()), (SIZE / 2, SIZE / 2));
    supervisor.unmap("a").unwrap();

    // A memory volume cannot shrink, and the device is unchanged.
    let mapping = supervisor.map("a", "mem:1M").unwrap();
    assert_code(resize(&supervisor, SIZE / 2, true), Code::Unimplemented, "smaller");
    assert_eq!(device_size(&machine, &mapping), SIZE);
    supervisor.wait_for("a", MappingState::Mapped);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_resize_waits_for_a_hung_backend_and_blocks_no_other_call() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = format!("fault:{}", machine.volume("a"));
    let mapping = supervisor.map("a", &uri).unwrap();
    let index = index_of(&mapping);
    supervisor.set_fault("hang=true&ops=write");
    std::thread::scope(|scope| {
        let write = scope.spawn(|| machine.kernel.write(index, 0, &[1; 512]));
        wait_until("the write hangs", || supervisor.stats().in_flight == 1);
        let asked = Stopwatch::start();
        assert_code(resize(&supervisor, 2 * SIZE, false), Code::Unavailable, "does not answer");
        assert!(asked.elapsed() < std::time::Duration::from_secs(20), "{:?}", asked.elapsed());
        // The volume has grown. Its device follows later, and the mapping reports the reason of the
        // delay.
        assert_eq!(device_size(&machine, &mapping), SIZE);
        wait_until("the mapping reports the reason", || {
            let waiting = supervisor.get("a").unwrap();
            assert_eq!(waiting.state(), MappingState::Mapped);
            waiting.message.contains("does not answer")
        });
        supervisor.map("b", "mem:1M").unwrap();
        supervisor.unmap("b").unwrap();
        supervisor.set_fault("");
        write.join().unwrap().unwrap();
    });
    wait_until("the device has the new size", || device_size(&machine, &mapping) == 2 * SIZE);
    wait_until("the message is empty", || supervisor.get("a").unwrap().message.is_empty());
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}
