//! Crashes of the supervisor at every point of every operation, and recovery by the next supervisor.

use cleat_api::v1::{HealthRequest, MappingState, UnmapRequest};
use cleat_kernel::Kernel;
use cleat_sys::escape_attempts::take_descriptor;
use cleat_sys::process::PidFd;
use nix::sys::signal::Signal;
use nix::sys::socket::sockopt::AcceptConn;
use nix::sys::socket::{Backlog, getsockopt, listen};
use tonic::Code;

use test_kit::node::{
    Machine, SIZE, assert_code, index_of, is_alive, kill, request, wait_halted, wait_until,
};

#[test]
fn workers_outlive_the_supervisor_and_are_adopted() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let file = supervisor.map("file", &machine.volume("a")).unwrap();
    let memory = supervisor.map("memory", "mem:1M").unwrap();
    machine.kernel.write(index_of(&memory), 0, &[5; 512]).unwrap();
    supervisor.crash();
    // I/O continues without a supervisor.
    machine.kernel.write(index_of(&file), 0, &[6; 512]).unwrap();

    let supervisor = machine.start();
    let listed = supervisor.list();
    assert_eq!(listed, [file.clone(), memory.clone()]);
    assert_eq!(machine.kernel.read(index_of(&memory), 0, 512).unwrap(), [5; 512]);
    supervisor.shut_down();

    let supervisor = machine.start();
    assert_eq!(supervisor.list(), [file, memory]);
    assert!(supervisor.unmap("file").unwrap() && supervisor.unmap("memory").unwrap());
    machine.assert_clean();
}

/// In earlier versions the supervisor called listen(2), so the kernel names that process at the other end of the
/// worker's control socket. That worker must be adopted, too.
#[test]
fn a_worker_that_did_not_call_listen_itself_is_adopted() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    supervisor.crash();
    let worker = PidFd::open(mapping.worker_pid).unwrap();
    let numbers = std::fs::read_dir(format!("/proc/{}/fd", mapping.worker_pid)).unwrap();
    let numbers = numbers.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    // The worker may close the connection of the supervisor meanwhile.
    let listening: Vec<_> = numbers
        .filter_map(|number| take_descriptor(&worker, number.parse().unwrap()).ok())
        .filter(|file| getsockopt(file, AcceptConn) == Ok(true))
        .collect();
    assert_eq!(listening.len(), 1);
    listen(&listening[0], Backlog::new(8).unwrap()).unwrap();
    drop(listening);
    let supervisor = machine.start();
    assert_eq!(supervisor.list(), [mapping]);
    assert!(supervisor.unmap("a").unwrap());
    machine.assert_clean();
}

#[test]
fn a_worker_that_died_while_the_supervisor_was_down_is_replaced() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    machine.kernel.write(index_of(&mapping), 0, &[9; 512]).unwrap();
    supervisor.crash();
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("the worker has exited", || !is_alive(mapping.worker_pid));
    let supervisor = machine.start();
    let now = supervisor.wait_for("a", MappingState::Mapped);
    assert_eq!((now.device, now.generation), (mapping.device.clone(), mapping.generation + 1));
    assert_eq!(machine.kernel.read(index_of(&mapping), 0, 512).unwrap(), [9; 512]);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_crash_at_any_point_of_a_map_leaves_nothing_or_a_mapping() {
    let mut points = 0;
    loop {
        let machine = Machine::new();
        let uri = machine.volume("a");
        let (supervisor, halted) = machine.start_halting(points);
        let mut client = supervisor.client();
        let asked = request("a", &uri);
        let call = supervisor.spawn(async move { client.map(asked).await });
        let point = wait_halted(&halted, &call);
        println!("crash at point {points}: {point:?}");
        supervisor.crash();
        let supervisor = machine.start();
        let listed = supervisor.list();
        // An established mapping remains, and an incomplete one is rolled back.
        match listed.as_slice() {
            [] => machine.assert_clean(),
            [mapping] => {
                assert_eq!(mapping.state(), MappingState::Mapped, "{mapping:?}");
                machine.kernel.write(index_of(mapping), 0, &[1; 512]).unwrap();
            }
            several => panic!("{several:?}"),
        }
        // The same call succeeds again.
        let mapping = supervisor.map("a", &uri).unwrap();
        assert_eq!(mapping.size_bytes, SIZE);
        supervisor.unmap("a").unwrap();
        machine.assert_clean();
        if point.is_none() {
            break;
        }
        points += 1;
    }
    assert!(points >= 8, "only {points} points were passed");
}

#[test]
fn an_unmap_is_completed_or_rolled_back_after_a_crash_at_any_point() {
    let mut points = 0;
    loop {
        let machine = Machine::new();
        let uri = machine.volume("a");
        let supervisor = machine.start();
        supervisor.map("a", &uri).unwrap();
        supervisor.crash();
        let (supervisor, halted) = machine.start_halting(points);
        let mut client = supervisor.client();
        let asked = UnmapRequest { target: "a".into(), ..Default::default() };
        let call = supervisor.spawn(async move { client.unmap(asked).await });
        let point = wait_halted(&halted, &call);
        println!("crash at point {points}: {point:?}");
        supervisor.crash();
        let supervisor = machine.start();
        match supervisor.list().as_slice() {
            [] => machine.assert_clean(),
            [mapping] => {
                assert_eq!(mapping.state(), MappingState::Mapped, "{mapping:?}");
                machine.kernel.write(index_of(mapping), 0, &[1; 512]).unwrap();
            }
            several => panic!("{several:?}"),
        }
        supervisor.unmap("a").unwrap();
        machine.assert_clean();
        if point.is_none() {
            break;
        }
        points += 1;
    }
    assert!(points >= 3, "only {points} points were passed");
}

#[test]
fn a_recovery_is_completed_after_a_crash_at_any_point() {
    let mut points = 0;
    loop {
        let machine = Machine::new();
        let supervisor = machine.start();
        let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
        let index = index_of(&mapping);
        machine.kernel.write(index, 0, &[3; 4096]).unwrap();
        supervisor.crash();
        kill(mapping.worker_pid, Signal::SIGKILL);
        wait_until("the worker has exited", || !is_alive(mapping.worker_pid));
        let point = machine.crash_while_starting(points);
        println!("crash at point {points}: {point:?}");
        assert!(machine.workers().len() <= 1, "a second worker was started");
        let supervisor = machine.start();
        let now = supervisor.wait_for("a", MappingState::Mapped);
        assert_eq!(now.device, mapping.device);
        assert_eq!(machine.workers(), [now.worker_pid]);
        assert_eq!(machine.kernel.read(index, 0, 4096).unwrap(), [3; 4096]);
        supervisor.unmap("a").unwrap();
        machine.assert_clean();
        if point.is_none() {
            break;
        }
        points += 1;
    }
    assert!(points >= 6, "only {points} points were passed");
}

#[test]
fn mappings_of_an_earlier_boot_are_removed() {
    let mut machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    supervisor.crash();
    kill(mapping.worker_pid, Signal::SIGKILL);
    wait_until("the worker has exited", || !is_alive(mapping.worker_pid));
    machine.kernel.vanish(index_of(&mapping));
    machine.boot_id = "the next boot".to_owned();
    let supervisor = machine.start();
    assert!(supervisor.list().is_empty());
    let health = supervisor.block_on(supervisor.client().health(HealthRequest {})).unwrap();
    let checks = health.into_inner().checks;
    assert!(checks.iter().any(|check| check.finding.contains("before the last boot")));
    machine.assert_clean();
}

#[test]
fn a_device_without_a_record_is_removed_or_reported() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let dead = supervisor.map("dead", &machine.volume("a")).unwrap();
    let live = supervisor.map("live", &machine.volume("b")).unwrap();
    supervisor.crash();
    kill(dead.worker_pid, Signal::SIGKILL);
    wait_until("the worker has exited", || !is_alive(dead.worker_pid));
    for entry in std::fs::read_dir(machine.config.state_dir.join("mappings")).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    machine.kernel.add_foreign(77, SIZE, Some("another driver"));
    machine.kernel.add_foreign(78, SIZE, Some("cleat.0123456789abcdef.elsewhere"));
    let supervisor = machine.start();
    let names = || supervisor.list().into_iter().map(|mapping| mapping.name).collect::<Vec<_>>();
    // The device without a worker is removed in the background.
    wait_until("the others are left", || names() == ["live", "elsewhere"]);
    let listed = supervisor.list();
    assert!(listed.iter().all(|mapping| mapping.state() == MappingState::Orphan));
    // The device with a live worker can be unmapped; its worker exits by itself.
    assert!(supervisor.unmap(&live.device).unwrap());
    wait_until("its worker has exited", || !is_alive(live.worker_pid));
    assert!(supervisor.unmap("/dev/nbd78").unwrap());
}

#[test]
fn a_device_of_another_program_is_not_unmapped_and_not_reported_as_free() {
    let machine = Machine::new();
    let supervisor = machine.start();
    machine.kernel.add_foreign(77, SIZE, Some("another driver"));
    machine.kernel.add_foreign(78, SIZE, None);
    for device in ["/dev/nbd77", "/dev/nbd78"] {
        let foreign = "is not a device of cleat";
        assert_code(supervisor.unmap(device), Code::InvalidArgument, foreign);
        assert_code(supervisor.force(device), Code::InvalidArgument, foreign);
        assert_code(supervisor.get(device), Code::InvalidArgument, foreign);
    }
    let devices = machine.kernel.devices().unwrap();
    assert_eq!(devices.iter().filter(|device| device.connected).count(), 2);
    // A device that is not connected, and one that does not exist, are free.
    assert!(!supervisor.unmap("/dev/nbd79").unwrap());
    assert!(!supervisor.unmap("/dev/disk/by-id/cleat-none").unwrap());
}

#[test]
fn a_damaged_record_is_quarantined_and_the_others_are_used() {
    let machine = Machine::new();
    let supervisor = machine.start();
    supervisor.map("a", &machine.volume("a")).unwrap();
    supervisor.crash();
    let bad = machine.config.state_dir.join("mappings/00000000000000bb.json");
    std::fs::write(&bad, "{\"version\": 1,").unwrap();
    let supervisor = machine.start();
    assert_eq!(supervisor.list().len(), 1);
    assert!(!bad.exists());
    let health = supervisor.block_on(supervisor.client().health(HealthRequest {})).unwrap();
    assert!(health.into_inner().checks.iter().any(|check| check.finding.contains("was moved to")));
    supervisor.unmap("a").unwrap();
}

#[test]
fn a_second_supervisor_is_refused() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let error = machine.try_start(None).err().unwrap();
    assert_eq!(error.kind(), cleat_core::error::ErrorKind::InUse);
    // The second supervisor has not used the kernel.
    assert_eq!(machine.asked_for.load(std::sync::atomic::Ordering::Relaxed), 1);
    supervisor.crash();
    machine.start().shut_down();
}

#[test]
fn unmap_on_shutdown_unmaps_all_volumes_at_shutdown() {
    let mut machine = Machine::new();
    machine.config.unmap_on_shutdown = true;
    let supervisor = machine.start();
    for name in ["a", "b", "c"] {
        supervisor.map(name, &machine.volume(name)).unwrap();
    }
    supervisor.shut_down();
    machine.assert_clean();
}
