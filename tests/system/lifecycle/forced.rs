//! Unmapped by force: whatever hangs, whoever holds it, and whatever else is under way.

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
    Machine, Supervisor, assert_code, claim, forced, index_of, is_alive, kill, repair, request,
    wait_halted, wait_until,
};
use test_kit::stopwatch::Stopwatch;

/// The promise, with no deadline given.
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

/// By force, within the limit.
fn force(supervisor: &Supervisor, target: &str) -> UnmapResponse {
    let begun = Stopwatch::start();
    let response = supervisor.force(target).unwrap();
    assert!(begun.elapsed() < LIMIT, "took {:?}: {response:?}", begun.elapsed());
    assert!(response.was_mapped);
    response
}

/// The name and the volume are free: the same map works, and I/O with it.
fn works_again(machine: &Machine, supervisor: &Supervisor, uri: &str) {
    let mapping = supervisor.map("a", uri).unwrap();
    machine.kernel.write(index_of(&mapping), 0, &[9; 512]).unwrap();
    supervisor.unmap("a").unwrap();
}

#[test]
fn an_idle_mapping_goes_step_by_step() {
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
        "prove silence",
        "forget",
    ];
    assert_eq!(steps(&response), expected);
    assert!(response.steps.iter().all(|step| step.note.is_empty()), "{response:?}");
    assert_eq!((response.device_left.as_str(), response.unproven.as_str()), ("", ""));
    assert!(machine.kernel.write(index_of(&mapping), 0, &[1; 512]).is_err());
    machine.assert_clean();
    works_again(&machine, &supervisor, &uri);
    assert!(!supervisor.force("a").unwrap().was_mapped);
    machine.assert_clean();
}

/// Where its record is written before it takes the old one's place.
fn draft_of(machine: &Machine, mapping: &Mapping) -> PathBuf {
    let records = machine.config.state_dir.join("mappings");
    records.join(&mapping.mapping_id).with_extension("tmp")
}

#[test]
fn a_full_disk_under_the_journal_is_told_and_keeps_nobody() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = machine.volume("a");
    let mapping = supervisor.map("a", &uri).unwrap();
    std::os::unix::fs::symlink("/dev/full", draft_of(&machine, &mapping)).unwrap();
    let response = force(&supervisor, "a");
    let note = note(&response, "record");
    assert!(note.contains("cannot record") && note.contains("does not go on"), "{response:?}");
    machine.assert_clean();
    works_again(&machine, &supervisor, &uri);
}

#[test]
fn a_journal_whose_disk_hangs_keeps_no_device() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let draft = draft_of(&machine, &mapping);
    nix::unistd::mkfifo(&draft, nix::sys::stat::Mode::S_IRWXU).unwrap();
    // That it is over cannot be recorded: so the call fails, with all else done.
    let failed = supervisor.force("a").unwrap_err();
    assert_eq!(failed.code(), Code::DeadlineExceeded, "{failed:?}");
    assert!(machine.kernel.write(index_of(&mapping), 0, &[1; 512]).is_err());
    assert!(machine.workers().is_empty());
    std::fs::File::options().read(true).write(true).open(&draft).unwrap();
    wait_until("the rest follows", || supervisor.get("a").is_err());
    machine.assert_clean();
}

#[test]
fn who_holds_the_device_keeps_its_number_and_nothing_else() {
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
    wait_until("the worker ends", || !is_alive(mapping.worker_pid));
    assert!(machine.kernel.write(index, 0, &[1; 512]).is_err());

    // Mapped again at once; the other one is listed with its holder.
    let again = supervisor.map("a", &uri).unwrap();
    assert_ne!(again.device, mapping.device);
    assert_eq!(supervisor.get("a").unwrap().device, again.device);
    let listed = supervisor.list();
    let left = listed.iter().find(|m| m.state() == MappingState::Orphan).unwrap();
    assert_eq!((&left.device, left.holders.len()), (&mapping.device, 1));
    assert!(left.message.contains("force"), "{}", left.message);
    // By force once more: that takes nothing from its holder, and nothing from the new one.
    assert_eq!(force(&supervisor, &mapping.device).device_left, mapping.device);
    machine.kernel.write(index_of(&again), 0, &[2; 512]).unwrap();
    machine.kernel.set_holders(index, Vec::new());
    assert_eq!(supervisor.list().len(), 1);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_device_that_stays_is_told_even_where_the_kernel_cannot_be_asked_again() {
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
fn mounts_are_taken_away_as_far_as_allowed() {
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
fn what_hangs_at_the_backend_fails_and_never_reaches_it() {
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
    assert!(note(&response, "fail I/O").contains("1 requests hang"), "{response:?}");
    assert!(hanging.join().unwrap().is_err());
    assert_eq!(response.unproven, "");
    machine.assert_clean();
    assert_eq!(std::fs::read(machine.path("a")).unwrap()[..512], [1; 512]);
    works_again(&machine, &supervisor, &uri);
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
        // More than the socket takes: a goodbye behind it would wait for ever.
        let kernel = machine.kernel.clone();
        let hanging = std::thread::spawn(move || kernel.write(index, 0, &vec![2; 1 << 19]));
        if !known {
            // For one who has never spoken with it.
            supervisor.crash();
            supervisor = machine.start();
        }
        let response = force(&supervisor, "a");
        assert!(note(&response, "fail I/O").contains("was killed"), "{response:?}");
        assert!(hanging.join().unwrap().is_err());
        machine.assert_clean();
    }
    works_again(&machine, &supervisor, &uri);
    machine.assert_clean();
}

#[test]
fn a_stuck_kernel_is_told_and_the_rest_follows_by_itself() {
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
    wait_until("it is gone", || supervisor.list().is_empty());
    machine.assert_clean();
    works_again(&machine, &supervisor, &uri);
}

#[test]
fn what_is_cut_off_in_the_middle_of_a_step_is_told_and_never_taken_back() {
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
        // Beyond every deadline of the step: what it is in is not left in order.
        machine.kernel.inject(call, Fault::Slow(Duration::from_secs(3)));
        let asked = asked_for.clone();
        let status = supervisor.block_on(supervisor.client().unmap(asked)).unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
        let message = status.message();
        assert!(message.contains(done) && message.contains(missing), "{message}");
        wait_until("it is gone", || supervisor.list().is_empty());
        machine.assert_clean();
        works_again(&machine, &supervisor, &uri);
    }
}

#[test]
fn a_second_call_finishes_what_the_first_one_could_not() {
    let machine = Machine::new();
    let supervisor = machine.start();
    supervisor.map("a", &machine.volume("a")).unwrap();
    for _ in 0..2 {
        machine.kernel.inject(Call::ForceDisconnect, Fault::Hang);
    }
    let asked = UnmapRequest { timeout_ms: 500, ..forced("a") };
    let first = supervisor.block_on(supervisor.client().unmap(asked)).unwrap_err();
    assert_eq!(first.code(), Code::DeadlineExceeded, "{first}");
    // Or finds it done: the supervisor goes on by itself.
    supervisor.force("a").unwrap();
    machine.assert_clean();
}

#[test]
fn two_at_once_both_succeed() {
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
fn another_call_for_the_mapping_gives_way() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = format!("fault:{}", machine.volume("a"));
    // One that flushes to a backend that hangs.
    supervisor.map("a", &uri).unwrap();
    supervisor.set_fault("hang=true");
    let mut client = supervisor.client();
    let asked = UnmapRequest { target: "a".into(), ..Default::default() };
    let unmap = supervisor.spawn(async move { client.unmap(asked).await });
    std::thread::sleep(Duration::from_millis(300));
    assert_code(supervisor.unmap("a"), Code::Aborted, "under way");
    force(&supervisor, "a");
    assert_code(supervisor.block_on(unmap).unwrap(), Code::Aborted, "gave way");
    machine.assert_clean();
    // One that is still being mapped.
    machine.kernel.inject(Call::WaitReady, Fault::Hang);
    let mut client = supervisor.client();
    let asked = MapRequest { timeout_ms: 3000, ..request("a", &uri) };
    let map = supervisor.spawn(async move { client.map(asked).await });
    wait_until("it is connected", || machine.kernel.devices().unwrap().iter().any(|d| d.connected));
    force(&supervisor, "a");
    assert_code(supervisor.block_on(map).unwrap(), Code::Aborted, "gave way");
    machine.assert_clean();
}

#[test]
fn a_device_that_the_kernel_is_still_connecting_does_not_come_after_success() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = machine.volume("a");
    machine.kernel.inject(Call::Connect, Fault::Slow(Duration::from_millis(1500)));
    let (mut client, asked) = (supervisor.client(), request("a", &uri));
    let map = supervisor.spawn(async move { client.map(asked).await });
    wait_until("its worker runs", || machine.workers().len() == 1);
    std::thread::sleep(Duration::from_millis(500));
    let response = force(&supervisor, "a");
    assert_code(supervisor.block_on(map).unwrap(), Code::Aborted, "gave way");
    assert!(steps(&response).contains(&"await the kernel"), "{response:?}");
    machine.assert_clean();
    std::thread::sleep(Duration::from_secs(1));
    assert!(machine.kernel.devices().unwrap().iter().all(|device| !device.connected));
    works_again(&machine, &supervisor, &uri);
}

#[test]
fn what_has_failed_or_is_being_repaired_goes_too() {
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
    // A volume that is gone is out of anybody's reach.
    assert_eq!(force(&supervisor, "a").unproven, "");
    machine.assert_clean();
    std::fs::rename(&away, &here).unwrap();
    works_again(&machine, &supervisor, &uri);

    // A device that is gone already.
    let mapping = supervisor.map("a", &uri).unwrap();
    machine.kernel.vanish(index_of(&mapping));
    supervisor.wait_for("a", MappingState::Failed);
    force(&supervisor, "a");
    machine.assert_clean();
}

#[test]
fn success_is_not_told_before_the_claim_is_free() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    supervisor.crash();
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("the worker ends", || !is_alive(mapping.worker_pid));
    // As a request would that the kernel still has of it.
    let file = std::fs::File::options().write(true).open(machine.path("a")).unwrap();
    // The dead worker's own claim ends a moment after it.
    wait_until("the claim is ours", || claim(&file).is_ok());
    let supervisor = machine.start();
    let asked = UnmapRequest { timeout_ms: 2500, ..forced("a") };
    let status = supervisor.block_on(supervisor.client().unmap(asked)).unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert!(status.message().contains("not done: prove silence"), "{status}");
    assert!(machine.kernel.devices().unwrap().iter().all(|device| !device.connected));
    drop(file);
    force(&supervisor, "a");
    machine.assert_clean();
}

#[test]
fn a_device_without_a_record_goes_with_its_worker() {
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
        // Without its record, nobody knows which volume to look at.
        assert_eq!(response.unproven.is_empty(), !stopped, "{response:?}");
        assert!(!is_alive(mapping.worker_pid));
        machine.assert_clean();
    }
}

#[test]
fn a_crash_at_any_point_is_finished_by_the_next_supervisor() {
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
            // It was recorded, so it is finished, without being asked again.
            wait_until("it is gone", || supervisor.get("a").is_err());
        } else {
            assert_eq!(supervisor.get("a").unwrap().state(), MappingState::Mapped);
            force(&supervisor, "a");
        }
        // Held, it stays as long as it is held.
        let listed = supervisor.list();
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert_eq!(listed[0].state(), MappingState::Orphan);
        machine.kernel.set_holders(index_of(&mapping), Vec::new());
        machine.assert_clean();
        works_again(&machine, &supervisor, &uri);
        if point.is_none() {
            break;
        }
        points += 1;
    }
    assert!(points >= 6, "only {points} points were passed");
}
