//! Common operations: map, list, get, watch and unmap, and the requests that are refused.

use cleat_api::v1::{
    HealthRequest, MapOptions, MapRequest, MappingState, ResizeRequest, StatsRequest, UnmapRequest,
    WatchRequest,
};
use cleat_kernel::sim::{Call, Fault};
use cleat_kernel::{Holder, Identity, Kernel};
use tonic::Code;

use test_kit::node::{Machine, SIZE, assert_code, index_of, repair, request, wait_until};
use test_kit::stopwatch::Stopwatch;

#[test]
fn a_volume_is_mapped_listed_and_unmapped() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uri = machine.volume("a");
    let mapping = supervisor.map("a", &uri).unwrap();
    assert_eq!(mapping.state(), MappingState::Mapped);
    assert_eq!(mapping.size_bytes, SIZE);
    assert!(mapping.device.starts_with("/dev/nbd"));
    assert_eq!(mapping.symlink, "/dev/disk/by-id/cleat-a");
    let index = index_of(&mapping);
    machine.kernel.write(index, 4096, &[7; 4096]).unwrap();
    assert_eq!(machine.kernel.read(index, 4096, 4096).unwrap(), [7; 4096]);

    for target in ["a", &uri, &mapping.device, &mapping.symlink] {
        assert_eq!(supervisor.get(target).unwrap(), mapping, "{target}");
    }
    assert_eq!(supervisor.list(), std::slice::from_ref(&mapping));
    // The same request again returns the same mapping.
    assert_eq!(supervisor.map("a", &uri).unwrap(), mapping);

    assert!(supervisor.unmap(&mapping.device).unwrap());
    assert!(!supervisor.unmap("a").unwrap());
    assert_code(supervisor.get("a"), Code::NotFound, "no mapping has the name, URI or device a");
    machine.assert_clean();
    assert_eq!(std::fs::read(machine.path("a")).unwrap()[4096..8192], [7; 4096]);
}

#[test]
fn a_second_map_with_the_same_name_and_other_properties_is_refused() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let (a, b) = (machine.volume("a"), machine.volume("b"));
    supervisor.map("a", &a).unwrap();
    let other = format!("a is mapped already, with the volume {a}");
    assert_code(supervisor.map("a", &b), Code::AlreadyExists, &other);
    let read_only = MapOptions { read_only: true, ..Default::default() };
    let request = MapRequest { options: Some(read_only), ..request("a", &a) };
    assert_code(supervisor.map_with(request), Code::AlreadyExists, "with read_only=false");
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn invalid_requests_are_refused_and_leave_no_state() {
    let machine = Machine::new();
    let supervisor = machine.start();
    for (name, uri, code, part) in [
        ("../x", "mem:1M", Code::InvalidArgument, "\"../x\" is not a name for a mapping"),
        ("x-part1", "mem:1M", Code::InvalidArgument, "a partition of the mapping \"x\""),
        ("x", "", Code::InvalidArgument, "the volume's URI is empty"),
        ("x", "/dev/sda", Code::InvalidArgument, "\"/dev/sda\" is not the URI of a volume"),
        ("x", "nothing:1", Code::InvalidArgument, "scheme \"nothing\" is unknown"),
        ("x", "file:/no/such/file", Code::NotFound, "does not exist"),
        ("x", "mem:0", Code::InvalidArgument, "must be greater than zero"),
    ] {
        assert_code(supervisor.map(name, uri), code, part);
    }
    let options = MapOptions { block_size: 513, ..Default::default() };
    let request = MapRequest { options: Some(options), ..request("x", "mem:1M") };
    assert_code(supervisor.map_with(request), Code::InvalidArgument, "513 is not a block size");
    assert!(supervisor.list().is_empty());
    machine.assert_clean();
}

#[test]
fn a_missing_module_is_reported_with_a_repair() {
    let machine = Machine::new();
    let supervisor = machine.start();
    machine.kernel.set_module(false);
    let status = supervisor.map("m", "mem:1M").unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
    assert!(repair(&status).contains("modprobe nbd"), "{status:?}");
    machine.assert_clean();
}

#[test]
fn a_device_in_use_is_not_unmapped_and_its_holders_are_named() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    let mount =
        Holder::Mount { path: "/mnt/a".into(), filesystem: "ext4".into(), namespace_pid: None };
    let process = Holder::Process { pid: 4711, command: "fio".into() };
    machine.kernel.set_holders(index, vec![mount, process]);
    let status = supervisor.unmap("a").unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    for part in ["/mnt/a", "4711", "fio"] {
        assert!(status.message().contains(part), "{status}");
    }
    let way_out = "umount /mnt/a; or cleat unmap a --force";
    assert!(repair(&status).starts_with(way_out), "{}", repair(&status));
    let now = supervisor.get("a").unwrap();
    assert_eq!((now.state(), now.holders.len()), (MappingState::Mapped, 2));
    machine.kernel.write(index, 0, &[1; 512]).unwrap();

    let contained =
        Holder::Mount { path: "/data".into(), filesystem: "xfs".into(), namespace_pid: Some(190) };
    machine.kernel.set_holders(index, vec![contained]);
    let status = supervisor.unmap("a").unwrap_err();
    assert!(repair(&status).starts_with("nsenter --mount --target 190 umount /data; or "));

    let path = "/mnt/ü".into();
    let foreign = Holder::Mount { path, filesystem: "ext4".into(), namespace_pid: None };
    machine.kernel.set_holders(index, vec![foreign]);
    let status = supervisor.unmap("a").unwrap_err();
    assert!(repair(&status).starts_with("umount /mnt/ü; or "), "{}", repair(&status));

    machine.kernel.set_holders(index, Vec::new());
    assert!(supervisor.unmap("a").unwrap());
    machine.assert_clean();
}

/// The second member of a btrfs, an external log, an exported target: no list of mounts or open files has them.
#[test]
fn a_user_inside_the_kernel_blocks_an_unmap_and_is_named() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    machine.kernel.set_kernel_users(index, vec!["a member of the btrfs 1234".into()]);
    let refused = supervisor.unmap("a").unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    assert!(refused.message().contains("a is in use: a member of the btrfs 1234"), "{refused:?}");
    assert!(repair(&refused).contains("cleat unmap a --force"), "{refused:?}");
    assert_eq!(supervisor.get("a").unwrap().state(), MappingState::Mapped);
    machine.kernel.write(index, 0, &[1; 512]).unwrap();
    // A short-lived exclusive open of another program is waited for.
    let kernel = machine.kernel.clone();
    let closing = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        kernel.set_kernel_users(index, Vec::new());
    });
    assert!(supervisor.unmap("a").unwrap());
    closing.join().unwrap();
    machine.assert_clean();
}

#[test]
fn nothing_claims_a_device_between_the_flush_and_the_disconnect() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let (index, identity) = (index_of(&mapping), Identity::new(&mapping.mapping_id, "a"));
    let pause = std::time::Duration::from_millis(300);
    machine.kernel.inject(Call::Flush, Fault::Slow(2 * pause));
    let (kernel, id) = (machine.kernel.clone(), identity.clone());
    let claiming = std::thread::spawn(move || {
        std::thread::sleep(pause);
        kernel.open_exclusively(index, &id).unwrap().is_err()
    });
    assert!(supervisor.unmap("a").unwrap());
    assert!(claiming.join().unwrap(), "another program claimed the device during the flush");

    // An unmap that fails releases the device.
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let (index, identity) = (index_of(&mapping), Identity::new(&mapping.mapping_id, "a"));
    machine.kernel.inject(Call::Flush, Fault::Fail(cleat_core::error::ErrorKind::Internal));
    assert_code(supervisor.unmap("a"), Code::Internal, "Flush");
    drop(machine.kernel.open_exclusively(index, &identity).unwrap().unwrap());
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn an_unmap_waits_for_udev_probes() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    machine
        .kernel
        .set_holders(index, vec![Holder::Process { pid: 99, command: "(udev-worker)".into() }]);
    let kernel = machine.kernel.clone();
    let closing = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        kernel.set_holders(index, Vec::new());
    });
    assert!(supervisor.unmap("a").unwrap());
    closing.join().unwrap();
    machine.assert_clean();
}

/// A probe may open the device between the check for holders and the disconnect.
#[test]
fn an_unmap_waits_for_udev_probes_that_start_during_the_flush() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let index = index_of(&mapping);
    let pause = std::time::Duration::from_millis(300);
    machine.kernel.inject(Call::Flush, Fault::Slow(2 * pause));
    let kernel = machine.kernel.clone();
    let probing = std::thread::spawn(move || {
        std::thread::sleep(pause);
        let udev = Holder::Process { pid: 99, command: "(udev-worker)".into() };
        kernel.set_holders(index, vec![udev]);
        std::thread::sleep(2 * pause);
        kernel.set_holders(index, Vec::new());
    });
    assert!(supervisor.unmap("a").unwrap());
    probing.join().unwrap();
    machine.assert_clean();
}

#[test]
fn watch_reports_changes_and_stats_counts_requests() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mut events =
        supervisor.block_on(supervisor.client().watch(WatchRequest {})).unwrap().into_inner();
    let mapping = supervisor.map("a", "mem:1M").unwrap();
    let mut states = Vec::new();
    while states.last() != Some(&MappingState::Mapped) {
        let event = supervisor.block_on(events.message()).unwrap().unwrap();
        assert_eq!(event.mapping.as_ref().unwrap().name, "a");
        states.push(event.mapping.unwrap().state());
    }
    assert_eq!(states[0], MappingState::Mapping);

    machine.kernel.write(index_of(&mapping), 0, &[1; 8192]).unwrap();
    let request = StatsRequest { target: "a".into(), interval_ms: 0 };
    let mut stats = supervisor.block_on(supervisor.client().stats(request)).unwrap().into_inner();
    let stats = supervisor.block_on(stats.message()).unwrap().unwrap();
    let write = stats.volumes[0].ops.iter().find(|op| op.op == "write").unwrap();
    assert_eq!((write.count, write.bytes), (1, 8192));
    assert_eq!(stats.volumes[0].connections, 1);

    supervisor.unmap("a").unwrap();
    loop {
        let event = supervisor.block_on(events.message()).unwrap().unwrap();
        if event.removed {
            break;
        }
    }
    let health = supervisor.block_on(supervisor.client().health(HealthRequest {})).unwrap();
    assert!(health.into_inner().checks.iter().all(|check| check.verdict == 1));
    machine.assert_clean();
}

#[test]
fn several_connections_are_served() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let options = MapOptions { connections: 4, ..Default::default() };
    let request = MapRequest { options: Some(options), ..request("a", &machine.volume("a")) };
    let mapping = supervisor.map_with(request).unwrap();
    assert_eq!(machine.kernel.live_connections(index_of(&mapping)), 4);
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_volume_grows_and_does_not_shrink() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let mapping = supervisor.map("a", &machine.volume("a")).unwrap();
    let resize = |size_bytes| {
        let request = ResizeRequest { target: "a".into(), size_bytes, ..Default::default() };
        supervisor.block_on(supervisor.client().resize(request))
    };
    assert_eq!(resize(2 * SIZE).unwrap().into_inner().size_bytes, 2 * SIZE);
    let device = &machine.kernel.devices().unwrap()[index_of(&mapping) as usize];
    assert_eq!(device.size, 2 * SIZE);
    assert_code(resize(SIZE), Code::InvalidArgument, "shrink");
    // The backend has grown; a size of 0 takes its size over.
    let file = std::fs::File::options().write(true).open(machine.path("a")).unwrap();
    file.set_len(3 * SIZE).unwrap();
    assert_eq!(resize(0).unwrap().into_inner().size_bytes, 3 * SIZE);
    assert_code(resize(3 * SIZE + 1), Code::InvalidArgument, "is not a multiple of the block size");
    supervisor.unmap("a").unwrap();
    machine.assert_clean();
}

#[test]
fn a_hundred_volumes_are_mapped_and_unmapped_in_parallel() {
    let machine = Machine::new();
    let supervisor = machine.start();
    let uris: Vec<String> = (0..100).map(|n| machine.volume(&format!("v{n}"))).collect();
    let client = supervisor.client();
    for round in 0..2 {
        let mapped = supervisor.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            for (n, uri) in uris.iter().enumerate() {
                let (mut client, request) = (client.clone(), request(&format!("v{n}"), uri));
                tasks.spawn(async move { client.map(request).await });
            }
            tasks.join_all().await
        });
        let mut devices = std::collections::BTreeSet::new();
        for mapping in mapped {
            let mapping = mapping.unwrap().into_inner();
            assert!(devices.insert(mapping.device));
        }
        assert_eq!(supervisor.list().len(), 100, "round {round}");
        let unmapped = supervisor.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            for n in 0..100 {
                let mut client = client.clone();
                let request = UnmapRequest { target: format!("v{n}"), ..Default::default() };
                tasks.spawn(async move { client.unmap(request).await });
            }
            tasks.join_all().await
        });
        for result in unmapped {
            assert!(result.unwrap().into_inner().was_mapped);
        }
        machine.assert_clean();
    }
}

#[test]
fn a_call_for_a_mapping_with_an_operation_in_progress_is_refused_at_once() {
    let machine = Machine::new();
    let supervisor = machine.start();
    machine.kernel.inject(Call::WaitReady, Fault::Hang);
    let (uri, client) = (machine.volume("a"), supervisor.client());
    let slow = MapRequest { timeout_ms: 1500, ..request("a", &uri) };
    let results = supervisor.block_on(async {
        let mut first = client.clone();
        let first = tokio::spawn(async move { first.map(slow).await });
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        let (mut one, mut other) = (client.clone(), client.clone());
        let asked = Stopwatch::start();
        let again = one.map(request("a", &uri)).await;
        let unmap = UnmapRequest { target: "a".into(), ..Default::default() };
        let unmap = other.unmap(unmap).await;
        assert!(asked.elapsed() < std::time::Duration::from_millis(500));
        (first.await.unwrap(), again, unmap)
    });
    assert_code(results.0, Code::DeadlineExceeded, "");
    assert_code(results.1, Code::Aborted, "in progress");
    assert_code(results.2, Code::Aborted, "in progress");
    machine.assert_clean();
}

#[test]
fn a_map_call_times_out_before_its_rollback_has_ended() {
    let machine = Machine::new();
    let supervisor = machine.start();
    machine.kernel.inject(Call::WaitReady, Fault::Hang);
    // Longer than the call waits for an answer after its deadline.
    machine.kernel.inject(Call::Disconnect, Fault::Slow(std::time::Duration::from_secs(4)));
    // A worker starts within this time also on a slow machine.
    let slow = MapRequest { timeout_ms: 5000, ..request("a", &machine.volume("a")) };
    let mut client = supervisor.client();
    let result = supervisor.block_on(client.map(slow));
    assert_code(result, Code::DeadlineExceeded, "continues in the background");
    wait_until("the rollback has ended", || supervisor.list().is_empty());
    machine.assert_clean();
}

/// Returns the user of a process.
fn user_of(pid: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Only root can give users to processes.
#[test]
fn each_worker_has_a_user_of_its_own_also_after_a_crash_of_the_supervisor() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let machine = Machine::new();
    let supervisor = machine.start();
    let mut users: Vec<u32> = ["a", "b"]
        .map(|name| user_of(supervisor.map(name, &machine.volume(name)).unwrap().worker_pid))
        .to_vec();
    supervisor.crash();
    let supervisor = machine.start();
    users.push(user_of(supervisor.map("c", &machine.volume("c")).unwrap().worker_pid));
    let first = users[0];
    assert!(first > 1_000_000, "{users:?}");
    users.sort_unstable();
    users.dedup();
    assert_eq!(users.len(), 3);
    // The number of a worker that has ended is used again.
    assert!(supervisor.unmap("a").unwrap());
    wait_until("the number is used again", || {
        let next = supervisor.map("d", &machine.volume("d")).unwrap();
        // A process that another test is about to start has inherited the lock of the number for a moment.
        user_of(next.worker_pid) == first || !supervisor.unmap("d").unwrap()
    });
    for name in ["b", "c", "d"] {
        assert!(supervisor.unmap(name).unwrap());
    }
    machine.assert_clean();
}
