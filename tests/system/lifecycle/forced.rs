//! Forced unmaps: with hung workers, kernels and backends, with holders, and during other operations.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::v1::{MapRequest, Mapping, MappingState, UnmapRequest, UnmapResponse, Unmount};
use cleat_core::error::ErrorKind;
use cleat_kernel::sim::{Call, Fault};
use cleat_kernel::{Holder, Kernel};
use nix::sys::signal::Signal;
use tonic::Code;

use test_kit::node::{
    DiskFailure, Machine, Supervisor, assert_code, claim, forced, index_of, is_alive, kill, repair,
    request, wait_halted, wait_until,
};
use test_kit::stopwatch::Stopwatch;

/// The documented time limit of a forced unmap without a deadline.
const LIMIT: Duration = Duration::from_secs(5);

fn process(command: &str) -> Holder {
    Holder::Process { pid: 4711, command: command.into() }
}

fn mount(path: &str, namespace_pid: Option<u32>) -> Holder {
    Holder::Mount { path: PathBuf::from(path), filesystem: "ext4".into(), namespace_pid }
}

fn steps(response: &UnmapResponse) -> Vec<&str> {
    response.steps.iter().map(|step| step.step.as_str()).collect()
}

fn note<'a>(response: &'a UnmapResponse, step: &str) -> &'a str {
    let found = response.steps.iter().find(|found| found.step == step);
    &found.unwrap_or_else(|| panic!("no step {step}: {response:?}")).note
}

/// Unmaps `target` by force and checks that the call returns within [`LIMIT`].
fn force(supervisor: &Supervisor, target: &str) -> UnmapResponse {
    let begun = Stopwatch::start();
    let response = supervisor.force(target).unwrap();
    assert!(begun.elapsed() < LIMIT, "took {:?}: {response:?}", begun.elapsed());
    assert!(response.was_mapped);
    response
}

/// Checks that the name and the volume are free: the same map call succeeds, and a write, too.
fn assert_mappable(machine: &Machine, supervisor: &Supervisor, uri: &str) {
    let mapping = supervisor.map("a", uri).unwrap();
    machine.kernel.write(index_of(&mapping), 0, &[9; 512]).unwrap();
    supervisor.unmap("a").unwrap();
}

#[test]
fn a_forced_unmap_of_an_idle_mapping_reports_all_steps() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = machine.volume("a");
    let mapping = supervisor.map("a", &uri).unwrap();
    let response = force(&supervisor, "a");
    let expected = [
        "record",
        "fail I/O",
        "unmount",
        "disconnect",
        "end the worker",
        "prove no writes",
        "remove the record",
    ];
    assert_eq!(steps(&response), expected);
    assert!(response.steps.iter().all(|step| step.note.is_empty()), "{response:?}");
    assert_eq!((response.device_left.as_str(), response.unproven.as_str()), ("", ""));
    assert!(machine.kernel.write(index_of(&mapping), 0, &[1; 512]).is_err());
    machine.assert_clean();
    assert_mappable(&machine, &supervisor, &uri);
    assert!(!supervisor.force("a").unwrap().was_mapped);
    machine.assert_clean();
}

/// Returns the path of the temporary file of the mapping's record, before it is renamed.
fn draft_of(machine: &Machine, mapping: &Mapping) -> PathBuf {
    let records = machine.config.state_dir.join("mappings");
    records.join(&mapping.mapping_id).with_extension("tmp")
}

#[test]
fn a_full_disk_of_the_journal_is_reported_and_does_not_block_a_forced_unmap() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = machine.volume("a");
    for (runtime, expected) in
        [(None, "only in the runtime directory"), (Some(DiskFailure::Full), "does not go on")]
    {
        supervisor.map("a", &uri).unwrap();
        machine.disk.fail(Some(DiskFailure::Full), runtime);
        let response = force(&supervisor, "a");
        let note = note(&response, "record");
        assert!(
            note.contains("cannot write the journal record")
                && note.contains("No space left on device")
                && note.contains(expected),
            "{response:?}"
        );
        machine.assert_clean();
        machine.disk.fail(None, None);
        assert_mappable(&machine, &supervisor, &uri);
    }
}

#[test]
fn a_hung_disk_of_the_journal_does_not_block_a_forced_unmap() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let draft = draft_of(&machine, &mapping);
    nix::unistd::mkfifo(&draft, nix::sys::stat::Mode::S_IRWXU).unwrap();
    force(&supervisor, "a");
    assert!(machine.kernel.write(index_of(&mapping), 0, &[1; 512]).is_err());
    assert!(machine.workers().is_empty());
    assert!(supervisor.get("a").is_err());
    // The write that hangs ends with an error, because a pipe cannot be synced. The record is removed then.
    std::fs::File::options().read(true).write(true).open(&draft).unwrap();
    wait_until("the record is removed", || !draft.with_extension("json").exists());
    let mark = machine.config.runtime_dir.join("records").join(&mapping.mapping_id);
    wait_until("its mark is removed", || !mark.with_extension("removed").exists());
    machine.assert_clean();
}

#[test]
fn a_hung_disk_of_both_directories_does_not_block_the_disconnect() {
    for killed in [false, true] {
        let machine = Machine::new();
        let supervisor =
            if killed { machine.start_killing_at("before StopWorker") } else { machine.start() };
        let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
        machine.disk.fail(Some(DiskFailure::Hang), Some(DiskFailure::Hang));
        // The end cannot be recorded, so the call fails, but all other steps are done.
        let failed = supervisor.force("a").unwrap_err();
        assert_eq!(failed.code(), Code::DeadlineExceeded, "{failed:?}");
        assert!(machine.kernel.write(index_of(&mapping), 0, &[1; 512]).is_err());
        // No other worker is started either: the claim of a file ends with the process.
        assert!(machine.workers().is_empty());
        machine.disk.fail(None, None);
        wait_until("the record is removed", || supervisor.get("a").is_err());
        machine.assert_clean();
    }
}

#[test]
fn a_held_device_stays_and_the_name_and_the_volume_are_free() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = machine.volume("a");
    let mapping = supervisor.map("a", &uri).unwrap();
    let index = index_of(&mapping);
    let holders = [mount("/mnt", None), mount("/pod", Some(7)), process("dd")];
    machine.kernel.set_holders(index, holders.to_vec());
    let refused = supervisor.unmap("a").unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(repair(&refused).contains("cleat unmap a --force"), "{}", repair(&refused));

    let response = force(&supervisor, "a");
    assert_eq!(response.unmounted.len(), 2, "{response:?}");
    assert_eq!(response.remaining_holders.len(), 1, "{response:?}");
    assert_eq!(response.device_left, mapping.device);
    wait_until("the worker has exited", || !is_alive(mapping.worker_pid));
    assert!(machine.kernel.write(index, 0, &[1; 512]).is_err());

    // The volume can be mapped again at once; the old device is listed with its holder.
    let again = supervisor.map("a", &uri).unwrap();
    assert_ne!(again.device, mapping.device);
    assert_eq!(supervisor.get("a").unwrap().device, again.device);
    let listed = supervisor.list();
    let left = listed.iter().find(|m| m.state() == MappingState::Orphan).unwrap();
    assert_eq!((&left.device, left.holders.len()), (&mapping.device, 1));
    assert!(left.message.contains("force"), "{}", left.message);
    // A second forced unmap of the old device changes neither it nor the new mapping.
    assert_eq!(force(&supervisor, &mapping.device).device_left, mapping.device);
    machine.kernel.write(index_of(&again), 0, &[2; 512]).unwrap();
    machine.kernel.set_holders(index, Vec::new());
    assert_eq!(supervisor.list().len(), 1);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_remaining_device_is_reported_when_the_kernel_cannot_list_devices() {
    let machine = Machine::new();
    let kernel = machine.kernel.clone();
    let supervisor = machine.start_with(Some(Arc::new(move |point: &str| {
        if point == "before RemoveRecord" {
            kernel.inject(Call::Devices, Fault::Fail(ErrorKind::Unavailable));
        }
        false
    })));
    let mapping = supervisor.map("a", "mem:1M").unwrap();
    machine.kernel.set_holders(index_of(&mapping), vec![process("dd")]);
    let response = force(&supervisor, "a");
    assert_eq!((response.device_left, response.remaining_holders.len()), (mapping.device, 1));
}

#[test]
fn mounts_are_removed_as_the_option_allows() {
    for (unmount, gone) in [(Unmount::Own, 1), (Unmount::None, 0), (Unmount::All, 2)] {
        let machine = Machine::new();
        let supervisor = machine.start();
        let mapping = supervisor.map("a", "mem:1M").unwrap();
        let holders = vec![mount("/mnt", None), mount("/pod", Some(7))];
        machine.kernel.set_holders(index_of(&mapping), holders);
        let asked = UnmapRequest { unmount: unmount.into(), ..forced("a") };
        let response = supervisor.block_on(supervisor.client().unmap(asked)).unwrap().into_inner();
        assert_eq!(response.unmounted.len(), gone, "{response:?}");
        assert_eq!(response.remaining_holders.len(), 2 - gone, "{response:?}");
        machine.kernel.set_holders(index_of(&mapping), Vec::new());
        machine.assert_clean();
    }
}

#[test]
fn requests_that_hang_fail_and_do_not_reach_the_backend() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = format!("fault:{}", machine.volume("a"));
    let mapping = supervisor.map("a", &uri).unwrap();
    let index = index_of(&mapping);
    machine.kernel.write(index, 0, &[1; 512]).unwrap();
    supervisor.set_fault("hang=true");
    let kernel = machine.kernel.clone();
    let hanging = std::thread::spawn(move || kernel.write(index, 0, &[2; 512]));
    wait_until("the write hangs", || supervisor.stats().in_flight == 1);
    let response = force(&supervisor, "a");
    assert!(note(&response, "fail I/O").contains("not answered 1 requests"), "{response:?}");
    assert!(hanging.join().unwrap().is_err());
    assert_eq!(response.unproven, "");
    machine.assert_clean();
    assert_eq!(std::fs::read(machine.path("a")).unwrap()[..512], [1; 512]);
    assert_mappable(&machine, &supervisor, &uri);
    machine.assert_clean();
}

#[test]
fn a_stopped_worker_is_killed() {
    let machine = Machine::new();
    let mut supervisor = machine.start();
    let uri = machine.volume("a");
    for known in [true, false] {
        let mapping = supervisor.map("a", &uri).unwrap();
        let index = index_of(&mapping);
        kill(mapping.worker_pid, Signal::SIGSTOP);
        // The write exceeds the socket buffer: a disconnect request behind it would block for ever.
        let kernel = machine.kernel.clone();
        let hanging = std::thread::spawn(move || kernel.write(index, 0, &vec![2; 1 << 19]));
        if !known {
            // A new supervisor has no channel to the stopped worker.
            supervisor.crash();
            supervisor = machine.start();
        }
        let response = force(&supervisor, "a");
        assert!(note(&response, "fail I/O").contains("was killed"), "{response:?}");
        assert!(hanging.join().unwrap().is_err());
        machine.assert_clean();
    }
    assert_mappable(&machine, &supervisor, &uri);
    machine.assert_clean();
}

#[test]
fn a_hung_kernel_call_is_reported_and_the_unmap_completes_later() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = machine.volume("a");
    supervisor.map("a", &uri).unwrap();
    for _ in 0..2 {
        machine.kernel.inject(Call::ForceDisconnect, Fault::Hang);
    }
    let begun = Stopwatch::start();
    let asked = UnmapRequest { timeout_ms: 1000, ..forced("a") };
    let status = supervisor.block_on(supervisor.client().unmap(asked)).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    let message = status.message();
    assert!(message.contains("done: record, fail I/O, unmount;"), "{message}");
    assert!(message.contains("not done: disconnect"), "{message}");
    wait_until("the mapping is removed", || supervisor.list().is_empty());
    machine.assert_clean();
    assert_mappable(&machine, &supervisor, &uri);
}

#[test]
fn a_deadline_within_a_step_is_reported_and_the_unmap_completes_later() {
    let asked_for = UnmapRequest { timeout_ms: 1000, ..forced("a") };
    for (call, done, missing) in [
        (Call::Unmount, "done: record, fail I/O;", "not done: unmount"),
        (Call::ForceDisconnect, "done: record, fail I/O, unmount;", "not done: disconnect"),
    ] {
        let machine = Machine::new();
        let supervisor = machine.start();
        let uri = machine.volume("a");
        let mapping = supervisor.map("a", &uri).unwrap();
        machine.kernel.set_holders(index_of(&mapping), vec![mount("/mnt", None)]);
        // The call takes longer than the deadline of the step.
        machine.kernel.inject(call, Fault::Slow(Duration::from_secs(3)));
        let asked = asked_for.clone();
        let status = supervisor.block_on(supervisor.client().unmap(asked)).unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
        let message = status.message();
        assert!(message.contains(done) && message.contains(missing), "{message}");
        wait_until("the mapping is removed", || supervisor.list().is_empty());
        machine.assert_clean();
        assert_mappable(&machine, &supervisor, &uri);
    }
}

#[test]
fn a_second_forced_unmap_completes_the_first_one() {
    let machine = Machine::new();
    let supervisor = machine.start();
    supervisor.map("a", &machine.volume("a")).unwrap();
    for _ in 0..2 {
        machine.kernel.inject(Call::ForceDisconnect, Fault::Hang);
    }
    let asked = UnmapRequest { timeout_ms: 500, ..forced("a") };
    let first = supervisor.block_on(supervisor.client().unmap(asked)).unwrap_err();
    assert_eq!(first.code(), Code::DeadlineExceeded, "{first}");
    // The supervisor may have completed it already.
    supervisor.force("a").unwrap();
    machine.assert_clean();
}

#[test]
fn two_concurrent_forced_unmaps_succeed() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    machine.kernel.set_holders(index_of(&mapping), vec![process("dd")]);
    machine.kernel.inject(Call::ForceDisconnect, Fault::Slow(Duration::from_millis(300)));
    let mut client = supervisor.client();
    let other = supervisor.spawn(async move { client.unmap(forced("a")).await });
    let response = force(&supervisor, "a");
    let other = supervisor.block_on(other).unwrap().unwrap().into_inner();
    assert!(other.was_mapped);
    assert_eq!((other.device_left, response.device_left), (mapping.device.clone(), mapping.device));
}

#[test]
fn a_forced_unmap_aborts_other_calls_for_the_mapping() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = format!("fault:{}", machine.volume("a"));
    // An unmap that flushes to a hung backend.
    supervisor.map("a", &uri).unwrap();
    supervisor.set_fault("hang=true");
    let mut client = supervisor.client();
    let asked = UnmapRequest { target: "a".into(), ..Default::default() };
    let unmap = supervisor.spawn(async move { client.unmap(asked).await });
    std::thread::sleep(Duration::from_millis(300));
    assert_code(supervisor.unmap("a"), Code::Aborted, "in progress");
    force(&supervisor, "a");
    assert_code(supervisor.block_on(unmap).unwrap(), Code::Aborted, "cancelled by a forced unmap");
    machine.assert_clean();
    // A map call in progress.
    machine.kernel.inject(Call::WaitReady, Fault::Hang);
    let mut client = supervisor.client();
    let asked = MapRequest { timeout_ms: 3000, ..request("a", &uri) };
    let map = supervisor.spawn(async move { client.map(asked).await });
    wait_until("the device is connected", || {
        machine.kernel.devices().unwrap().iter().any(|d| d.connected)
    });
    force(&supervisor, "a");
    assert_code(supervisor.block_on(map).unwrap(), Code::Aborted, "cancelled by a forced unmap");
    machine.assert_clean();
}

#[test]
fn no_device_is_connected_after_a_forced_unmap_during_a_connect() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = machine.volume("a");
    machine.kernel.inject(Call::Connect, Fault::Slow(Duration::from_millis(1500)));
    let (mut client, asked) = (supervisor.client(), request("a", &uri));
    let map = supervisor.spawn(async move { client.map(asked).await });
    wait_until("the worker runs", || machine.workers().len() == 1);
    std::thread::sleep(Duration::from_millis(500));
    let response = force(&supervisor, "a");
    assert_code(supervisor.block_on(map).unwrap(), Code::Aborted, "cancelled by a forced unmap");
    assert!(steps(&response).contains(&"wait for the kernel"), "{response:?}");
    machine.assert_clean();
    std::thread::sleep(Duration::from_secs(1));
    assert!(machine.kernel.devices().unwrap().iter().all(|device| !device.connected));
    assert_mappable(&machine, &supervisor, &uri);
}

#[test]
fn failed_and_recovering_mappings_are_unmapped_by_force() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let memory = supervisor.map("a", "mem:1M").unwrap();
    machine.kernel.set_holders(index_of(&memory), vec![mount("/mnt", None)]);
    kill(memory.worker_pid, Signal::SIGKILL);
    supervisor.wait_for("a", MappingState::Failed);
    let response = force(&supervisor, "a");
    assert!(!steps(&response).contains(&"fail I/O"), "{response:?}");
    machine.assert_clean();

    let uri = machine.volume("a");
    let mapping = supervisor.map("a", &uri).unwrap();
    let (here, away) = (machine.path("a"), machine.path("away"));
    std::fs::rename(&here, &away).unwrap();
    kill(mapping.worker_pid, Signal::SIGKILL);
    supervisor.wait_for("a", MappingState::Recovering);
    // No request can reach a volume that does not exist.
    assert_eq!(force(&supervisor, "a").unproven, "");
    machine.assert_clean();
    std::fs::rename(&away, &here).unwrap();
    assert_mappable(&machine, &supervisor, &uri);

    // A device that vanished before.
    let mapping = supervisor.map("a", &uri).unwrap();
    machine.kernel.vanish(index_of(&mapping));
    supervisor.wait_for("a", MappingState::Failed);
    force(&supervisor, "a");
    machine.assert_clean();
}

#[test]
fn a_forced_unmap_succeeds_only_when_the_claim_is_released() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    supervisor.crash();
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("the worker has exited", || !is_alive(mapping.worker_pid));
    // Hold the claim, as a request of the dead worker in the kernel would.
    let file = std::fs::File::options().write(true).open(machine.path("a")).unwrap();
    // The kernel releases the dead worker's claim a moment after its exit.
    wait_until("the test has the claim", || claim(&file).is_ok());
    let supervisor = machine.start();
    let asked = UnmapRequest { timeout_ms: 2500, ..forced("a") };
    let status = supervisor.block_on(supervisor.client().unmap(asked)).unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert!(status.message().contains("not done: prove no writes"), "{status}");
    assert!(machine.kernel.devices().unwrap().iter().all(|device| !device.connected));
    drop(file);
    force(&supervisor, "a");
    machine.assert_clean();
}

#[test]
fn a_forced_unmap_of_a_device_without_a_record_stops_its_worker() {
    for stopped in [false, true] {
        let machine = Machine::new();
        let supervisor = machine.start();
        let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
        supervisor.crash();
        for entry in std::fs::read_dir(machine.config.state_dir.join("mappings")).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        if stopped {
            kill(mapping.worker_pid, Signal::SIGSTOP);
        }
        let supervisor = machine.start();
        let response = force(&supervisor, &mapping.device);
        // Without a record the volume is unknown, so its claim cannot be checked.
        assert_eq!(response.unproven.is_empty(), !stopped, "{response:?}");
        assert!(!is_alive(mapping.worker_pid));
        machine.assert_clean();
    }
}

#[test]
fn a_forced_unmap_is_completed_by_the_next_supervisor_after_a_crash_at_any_point() {
    let mut points = 0;
    loop {
        let machine = Machine::new();
        let uri = machine.volume("a");
        let supervisor = machine.start();
        let mapping = supervisor.map("a", &uri).unwrap();
        supervisor.crash();
        machine.kernel.set_holders(index_of(&mapping), vec![mount("/mnt", None), process("dd")]);
        let (supervisor, halted) = machine.start_halting(points);
        let mut client = supervisor.client();
        let call = supervisor.spawn(async move { client.unmap(forced("a")).await });
        let point = wait_halted(&halted, &call);
        println!("crash at point {points}: {point:?}");
        supervisor.crash();
        let supervisor = machine.start();
        let begun = point.as_deref() != Some("before RecordUnmapping");
        if begun {
            // The unmap was recorded, so the next supervisor completes it without a call.
            wait_until("the mapping is removed", || supervisor.get("a").is_err());
        } else {
            assert_eq!(supervisor.get("a").unwrap().state(), MappingState::Mapped);
            force(&supervisor, "a");
        }
        // A held device remains until its holder has closed it.
        let listed = supervisor.list();
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert_eq!(listed[0].state(), MappingState::Orphan);
        machine.kernel.set_holders(index_of(&mapping), Vec::new());
        machine.assert_clean();
        assert_mappable(&machine, &supervisor, &uri);
        if point.is_none() {
            break;
        }
        points += 1;
    }
    assert!(points >= 6, "only {points} points were passed");
}
