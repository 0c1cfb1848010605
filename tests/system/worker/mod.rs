//! The real worker process; the test takes the roles of the supervisor and of the kernel.

mod caches;
mod claims;
mod credentials;
mod fences;
mod fight;
mod lagging;
mod limits;
mod objects;
mod outages;
mod quiesce;
mod rbd;
#[cfg(feature = "fault")]
mod surroundings;

use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

use cleat_core::error::ErrorKind;
use cleat_core::policy::{OnOutage, Policy, RateLimits};
use cleat_core::request::{IoError, Op};
use cleat_worker::isolation::Isolation;
use cleat_worker::protocol::{FromWorker, Refuse, ToWorker};
use test_kit::worker::{Worker, adopt, failure, receive, seqpacket_pair, start_message, versions};
use test_kit::{memory, nbd::kernel as nbd, process::threads};

fn file(name: &str, size: u64) -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join(name);
    std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    let uri = format!("file:{}", path.display());
    (directory, uri)
}

#[test]
fn a_volume_is_served_on_two_connections_until_the_device_is_disconnected() {
    let (_directory, uri) = file("a.img", 8 << 20);
    let (mut worker, ready) = Worker::ready(&uri);
    assert_eq!((ready.size, ready.generation, ready.pid), (8 << 20, 7, worker.child.id()));
    assert!(ready.outlives_worker);
    assert_eq!(ready.connections, 0);
    let sockets = worker.serve(2);
    let data = vec![0x5a; 64 << 10];
    assert_eq!(nbd::write(&sockets[0], 4096, &data), 0);
    assert_eq!(nbd::simple(&sockets[1], nbd::FLUSH, 0, 0), 0);
    assert!(nbd::read(&sockets[1], 4096, 64 << 10) == data);
    assert_eq!(nbd::simple(&sockets[1], nbd::TRIM, 4096, 4096), 0);
    assert!(nbd::read(&sockets[0], 4096, 4096).iter().all(|byte| *byte == 0));
    assert_eq!(nbd::simple(&sockets[0], nbd::READ, 8 << 20, 512), 22, "EINVAL beyond the end");
    let counts = worker.page.snapshot();
    let writes = Op::ALL.iter().position(|op| *op == Op::Write).unwrap();
    assert_eq!((counts.ops[writes].count, counts.ops[writes].bytes), (1, 64 << 10));
    for socket in &sockets {
        nbd::disconnect(socket);
    }
    assert_eq!(worker.receive(), FromWorker::Disconnected);
    assert_eq!(worker.receive(), FromWorker::Closed);
    assert!(worker.exit().success(), "{}", worker.log());
    let content = std::fs::read(uri.strip_prefix("file:").unwrap()).unwrap();
    assert!(content[8192..8192 + (60 << 10)] == data[..60 << 10]);
}

#[test]
fn each_command_has_one_answer() {
    let (_directory, uri) = file("a.img", 1 << 20);
    let (mut worker, _) = Worker::ready(&uri);
    assert_eq!(worker.call(&ToWorker::Ping), FromWorker::Done);
    assert_eq!(worker.call(&ToWorker::RefreshSize), FromWorker::Size { size: 1 << 20 });
    let grown = worker.call(&ToWorker::Resize { size: 2 << 20, shrink: false });
    assert_eq!(grown, FromWorker::Size { size: 2 << 20 });
    let (kind, message) = failure(worker.call(&ToWorker::Resize { size: 4096, shrink: false }));
    assert_eq!(kind, ErrorKind::InvalidArgument, "{message}");
    std::fs::File::options()
        .write(true)
        .open(uri.strip_prefix("file:").unwrap())
        .unwrap()
        .set_len(3 << 20)
        .unwrap();
    assert_eq!(worker.call(&ToWorker::RefreshSize), FromWorker::Size { size: 3 << 20 });
    let plan = ToWorker::SetFault { plan: "latency=1ms".to_owned() };
    assert_eq!(failure(worker.call(&plan)).0, ErrorKind::Unsupported);
    assert_eq!(failure(worker.call(&ToWorker::Serve)).0, ErrorKind::InvalidArgument);
    // Invalid messages are refused, and the worker works on.
    worker.send_text(b"{\"command\":\"fly\"}", &[]);
    let (kind, message) = failure(worker.receive());
    assert_eq!(kind, ErrorKind::Unsupported);
    assert!(message.contains("\"fly\""), "{message}");
    worker.send_text(b"{\"command\":\"resize\"}", &[]);
    assert_eq!(failure(worker.receive()).0, ErrorKind::InvalidArgument);
    let sockets = worker.serve(1);
    assert!(nbd::read(&sockets[0], (3 << 20) - 512, 512).iter().all(|byte| *byte == 0));
}

#[test]
fn stop_completes_requests_in_flight_and_exits() {
    let (mut worker, sockets) = Worker::serving("mem:1M", 1);
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
    worker.send(&ToWorker::Stop, &[]);
    assert!(worker.exit().success());
    assert!(nbd::is_closed(&sockets[0]));
    assert_eq!(worker.receive(), FromWorker::Closed);
    assert_eq!(receive(worker.channel.as_ref().unwrap()).map(|_| ()), None);
}

#[test]
fn a_killed_worker_closes_its_sockets_and_its_file_can_be_served_again() {
    let (_directory, uri) = file("a.img", 1 << 20);
    let (mut worker, sockets) = Worker::serving(&uri, 1);
    assert_eq!(nbd::write(&sockets[0], 0, &[7; 4096]), 0);
    worker.child.kill().unwrap();
    assert!(!worker.exit().success());
    assert!(nbd::is_closed(&sockets[0]));
    let (_second, sockets) = Worker::serving(&uri, 1);
    assert!(nbd::read(&sockets[0], 0, 4096) == [7; 4096]);
}

#[test]
fn a_second_worker_for_the_same_file_is_refused_with_the_pid_of_the_first() {
    let (_directory, uri) = file("a.img", 1 << 20);
    let (first, _) = Worker::ready(&uri);
    let mut second = Worker::launch();
    second.send_start(&start_message(&uri));
    let (kind, message) = failure(second.receive());
    assert_eq!(kind, ErrorKind::InUse);
    let first = format!("is being written by process {}", first.child.id());
    assert!(message.contains(&first), "{message}");
    assert_eq!(second.exit().code(), Some(1));
}

#[test]
fn without_a_supervisor_a_serving_worker_continues_and_an_idle_one_exits() {
    let mut silent = Worker::launch();
    silent.channel = None;
    assert_eq!(silent.exit().code(), Some(1));

    let (mut idle, _) = Worker::ready("mem:1M");
    idle.channel = None;
    assert!(idle.exit().success());

    let (mut worker, sockets) = Worker::serving("mem:1M", 1);
    worker.channel = None;
    assert_eq!(nbd::write(&sockets[0], 0, &[9; 512]), 0);
    let ready = worker.adopt();
    assert_eq!((ready.connections, ready.pid), (1, worker.child.id()));
    assert_eq!(worker.page.snapshot().connections, 1);
    assert!(nbd::read(&sockets[0], 0, 512) == [9; 512]);
    assert_eq!(worker.call(&ToWorker::Ping), FromWorker::Done);
    // Without a supervisor, too, the worker exits when the device is disconnected.
    worker.channel = None;
    nbd::disconnect(&sockets[0]);
    assert!(worker.exit().success());
}

#[test]
fn a_worker_obeys_the_supervisor_that_adopted_it_last() {
    let (mut worker, sockets) = Worker::serving("mem:1M", 1);
    let first = worker.channel.take().unwrap();
    let stranger = worker.connect();
    let wrong = adopt(&worker.connect(), "ffff").0;
    assert_eq!(failure(wrong).0, ErrorKind::InvalidArgument);
    worker.adopt();
    assert!(receive(&first).is_none(), "the old channel was closed");
    assert_eq!(worker.call(&ToWorker::Ping), FromWorker::Done);
    // Idle connections do not prevent an adoption.
    let _silent: Vec<_> = (0..10).map(|_| worker.connect()).collect();
    worker.adopt();
    assert_eq!(worker.call(&ToWorker::Ping), FromWorker::Done);
    drop(stranger);
    assert_eq!(nbd::write(&sockets[0], 0, &[9; 512]), 0);
}

#[test]
fn a_dead_connection_is_replaced_and_does_not_end_the_worker() {
    let (mut worker, sockets) = Worker::serving("mem:1M", 1);
    assert_eq!(nbd::write(&sockets[0], 0, &[9; 512]), 0);
    drop(sockets);
    let sockets = worker.serve(2);
    assert!(nbd::read(&sockets[1], 0, 512) == [9; 512]);
    assert!(worker.child.try_wait().unwrap().is_none());
}

#[test]
fn invalid_start_messages_are_refused_with_a_reason() {
    let good = serde_json::to_value(ToWorker::Start(Box::new(start_message("mem:1M")))).unwrap();
    let changed = |key: &str, value: serde_json::Value| {
        let mut message = good.clone();
        message[key] = value;
        message.to_string()
    };
    let long = format!("mem:1M{}", " ".repeat(5000));
    for (text, kind, reason) in [
        ("garbage".to_owned(), ErrorKind::InvalidArgument, "not a message of the worker protocol"),
        (String::from("{\"command\":\"ping\"}"), ErrorKind::InvalidArgument, "must be start"),
        (changed("oldest", 99.into()), ErrorKind::Unsupported, "supports 99"),
        (changed("uri", "mem:1X".into()), ErrorKind::InvalidArgument, "\"1X\" is not a size"),
        (changed("uri", long.into()), ErrorKind::InvalidArgument, "longer"),
        (changed("uri", "file:/missing".into()), ErrorKind::NotFound, "/missing does not exist"),
        (changed("name", "a b".into()), ErrorKind::InvalidArgument, "name"),
    ] {
        let mut worker = Worker::launch();
        let (listener, page) = (worker.listener(), worker.page.file().unwrap());
        worker.send_text(text.as_bytes(), &[listener.as_fd(), page.as_fd()]);
        let (got, message) = failure(worker.receive());
        assert_eq!(got, kind, "{text}: {message}");
        assert!(message.contains(reason), "{text}: {message}");
        assert_eq!(worker.exit().code(), Some(1), "{text}");
    }
}

#[test]
fn missing_and_wrong_descriptors_are_refused() {
    let message = serde_json::to_vec(&ToWorker::Start(Box::new(start_message("mem:1M")))).unwrap();
    let (one, two) = seqpacket_pair();
    let worker = Worker::launch();
    let listener = worker.listener();
    let page = worker.page.file().unwrap();
    let sets: [&[_]; 5] = [
        &[],
        &[listener.as_fd()],
        &[listener.as_fd(), page.as_fd(), one.as_fd()],
        &[page.as_fd(), listener.as_fd()],
        &[listener.as_fd(), two.as_fd()],
    ];
    for descriptors in sets {
        let mut worker = Worker::launch();
        worker.send_text(&message, descriptors);
        assert_eq!(failure(worker.receive()).0, ErrorKind::InvalidArgument);
        assert_eq!(worker.exit().code(), Some(1));
    }
}

#[test]
fn a_worker_is_confined_and_ignores_signals_of_the_service_manager() {
    let (_directory, uri) = file("a.img", 1 << 20);
    let (worker, sockets) = Worker::serving(&uri, 1);
    for set in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
        assert_eq!(worker.status(set), "0000000000000000", "{set}");
    }
    if nix::unistd::geteuid().is_root() {
        assert_eq!(worker.status("CapBnd"), "0000000000000000");
        let ours = std::fs::read_link("/proc/self/ns/net").unwrap();
        assert_ne!(std::fs::read_link(worker.proc("ns/net")).unwrap(), ours);
        let ids: Vec<u32> = ["Uid", "Gid"]
            .iter()
            .flat_map(|key| worker.status(key).split('\t').map(str::to_owned).collect::<Vec<_>>())
            .map(|id| id.parse().unwrap())
            .collect();
        assert!(ids.iter().all(|id| *id == ids[0]) && ids[0] > 2_101_000_000, "{ids:?}");
        assert_eq!(worker.status("Groups"), "");
        // Its root is empty, and it has left the mounts of the host.
        assert_eq!(std::fs::read_dir(worker.proc("root")).unwrap().count(), 0);
        let mounts = std::fs::read_to_string(worker.proc("mountinfo")).unwrap();
        assert_eq!(mounts.lines().count(), 1, "{mounts}");
    }
    // Root in a container may not have this capability.
    let resource = caps::Capability::CAP_SYS_RESOURCE;
    if caps::has_cap(None, caps::CapSet::Effective, resource).unwrap() {
        let oom = std::fs::read_to_string(worker.proc("oom_score_adj")).unwrap();
        assert_eq!(oom.trim(), "-999");
        // PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE of linux/sched.h, in the flags of each thread.
        for stat in threads(worker.child.id(), "stat") {
            let (_, fields) = stat.rsplit_once(')').unwrap();
            let flags: u32 = fields.split_whitespace().nth(6).unwrap().parse().unwrap();
            assert_eq!(flags & 0x0018_0000, 0x0018_0000, "{stat}");
        }
    }
    assert_eq!(worker.status("NoNewPrivs"), "1");
    assert_eq!(worker.status("Seccomp"), "2");
    assert_eq!(worker.status("Name"), "cleat:test-volu");
    let pid = nix::unistd::Pid::from_raw(i32::try_from(worker.child.id()).unwrap());
    for status in threads(worker.child.id(), "status") {
        assert!(status.contains("Seccomp:\t2") && status.contains("CapEff:\t0000000000000000"));
    }
    use nix::sys::signal::Signal;
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        nix::sys::signal::kill(pid, signal).unwrap();
    }
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
    assert_eq!(worker.call(&ToWorker::Ping), FromWorker::Done);
}

#[cfg(feature = "fault")]
#[test]
fn code_inside_a_worker_finds_every_road_closed() {
    let (_directory, uri) = file("a.img", 1 << 20);
    let around = surroundings::Surroundings::new();
    let (worker, sockets) = Worker::serving(&uri, 1);
    assert_eq!(
        worker.call(&ToWorker::SetFault { plan: around.plan(around.port()) }),
        FromWorker::Done
    );
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
}

#[test]
fn a_worker_that_lacks_a_layer_does_not_start_unless_it_is_allowed() {
    let mut refused = Worker::launch_isolated(&[], &Isolation::default());
    refused.send_start(&start_message("mem:1M"));
    let (kind, message) = failure(refused.receive());
    assert_eq!(kind, ErrorKind::Unsupported);
    assert!(message.contains("own-user (the worker got no user of its own)"), "{message}");
    assert_eq!(refused.exit().code(), Some(1));
    let mut invalid = Worker::launch_isolated(
        &[],
        &Isolation { user: None, allow_missing: vec!["every-layer".to_owned()] },
    );
    assert_eq!(failure(invalid.receive()).0, ErrorKind::InvalidArgument);
    assert_eq!(invalid.exit().code(), Some(1));
}

#[cfg(feature = "fault")]
#[test]
fn a_worker_without_a_volume_is_confined_and_fails_every_request_until_its_channel_ends() {
    let mut worker = Worker::launch();
    let page = worker.page.file().unwrap();
    let refuse = Refuse {
        versions: versions(),
        mapping_id: "0123abcd".to_owned(),
        name: "test-volume".to_owned(),
        log: String::new(),
    };
    worker.send(&ToWorker::Refuse(Box::new(refuse)), &[page.as_fd()]);
    assert!(matches!(worker.receive(), FromWorker::Ready(_)));
    let sockets = worker.serve(2);
    assert_eq!(worker.status("CapEff"), "0000000000000000");
    assert_eq!(worker.status("NoNewPrivs"), "1");
    assert_eq!(worker.status("Seccomp"), "2");
    assert!(sockets.iter().all(|socket| nbd::write(socket, 0, &[1; 4096]) != 0));
    assert_eq!(failure(worker.call(&ToWorker::RefreshSize)).0, ErrorKind::Unsupported);
    worker.channel = None;
    assert_eq!(worker.exit().code(), Some(0));
}

#[test]
fn a_worker_with_a_hung_volume_stops_and_a_fenced_one_reports_it() {
    let (mut worker, sockets) = Worker::serving("fault:mem:1M?fault.hang=true&fault.ops=write", 1);
    nbd::send(&sockets[0], nbd::WRITE, 5, 0, 512, &[1; 512]);
    assert!(nbd::read(&sockets[0], 0, 512).iter().all(|byte| *byte == 0));
    worker.send(&ToWorker::Stop, &[]);
    assert!(worker.exit().success());

    let (worker, sockets) = Worker::serving("fault:mem:1M", 1);
    let plan = ToWorker::SetFault { plan: "error=fenced&ops=write".to_owned() };
    assert_eq!(worker.call(&plan), FromWorker::Done);
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 512]), 108, "ESHUTDOWN");
    worker.send(&ToWorker::Ping, &[]);
    assert_eq!(worker.receive(), FromWorker::Fenced);
    assert_eq!(worker.receive(), FromWorker::Done);
}

/// The statistics page belongs to the mapping, and survives the worker; the fence does not.
#[test]
fn a_successor_of_a_fenced_worker_is_not_fenced() {
    let worker = Worker::launch();
    let recorder = worker.page.recorder(0).unwrap();
    recorder.ended(Op::Write, 512, 1, Err(IoError::Fenced));
    drop(recorder);
    worker.send_start(&start_message("mem:1M"));
    assert!(matches!(worker.receive(), FromWorker::Ready(_)));
    assert_eq!(worker.call(&ToWorker::Ping), FromWorker::Done);
}

/// Counts only memory that the worker has written to. The pages of the executable are not counted: the
/// page cache decides how many of them are resident, and in an unoptimised build they are the majority. Nor are the
/// addresses in it that the dynamic linker has relocated, whose number depends on the build as well.
#[test]
fn an_idle_worker_uses_less_than_4_mib_of_memory() {
    memory::without_huge_pages();
    let (_directory, uri) = file("a.img", 64 << 20);
    let (worker, sockets) = Worker::serving(&uri, 4);
    for (n, socket) in sockets.iter().enumerate() {
        assert_eq!(nbd::write(socket, (n as u64) << 20, &vec![1; 1 << 20]), 0);
        nbd::read(socket, 0, 1 << 20);
    }
    // The buffers are freed a second after the last request.
    std::thread::sleep(Duration::from_millis(2500));
    let (own_kib, relocated_kib) =
        (memory::own_kib(worker.child.id()), memory::relocated_kib(worker.child.id()));
    println!(
        "figures: an idle worker, 4 connections: {own_kib} KiB of its own, {relocated_kib} KiB of it relocated addresses"
    );
    assert!(relocated_kib > 0 && own_kib - relocated_kib < 4 << 10, "{own_kib} KiB");
}

/// Libraries that are loaded later, such as librbd, must use the program's allocator for all of these
/// functions, because memory of one allocator must not be freed by another.
#[test]
fn the_executable_exports_its_allocator_to_libraries() {
    let program = env!("CARGO_BIN_EXE_cleat");
    let listed = Command::new("nm").args(["-D", "--defined-only", program]).output();
    let symbols = String::from_utf8(listed.expect("apt install binutils").stdout).unwrap();
    for name in [
        "malloc",
        "calloc",
        "realloc",
        "free",
        "posix_memalign",
        "aligned_alloc",
        "memalign",
        "malloc_usable_size",
        "reallocarray",
        "strdup",
        "strndup",
    ] {
        assert!(symbols.lines().any(|line| line.ends_with(&format!(" T {name}"))), "{name}");
    }
}

#[test]
fn an_outage_is_reported_and_ends_with_the_fault_or_with_another_policy() {
    let (mut worker, sockets) = Worker::serving("fault:mem:1M", 1);
    let fault = |plan: &str| ToWorker::SetFault { plan: plan.to_owned() };
    assert_eq!(worker.call(&fault("error=retry")), FromWorker::Done);
    nbd::send(&sockets[0], nbd::WRITE, 7, 0, 512, &[3; 512]);
    let FromWorker::Outage { outage: Some(outage) } = worker.receive() else { panic!("no outage") };
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis() as u64;
    assert!(now - outage.since_unix_ms < 10_000, "{now} {outage:?}");
    assert_eq!(outage.reason.as_deref(), Some("injected: error=retry"));
    assert_eq!(worker.page.snapshot().queued, 1);
    // A supervisor that adopts the worker later receives it, too.
    worker.adopt();
    assert_eq!(worker.receive(), FromWorker::Outage { outage: Some(outage) });
    assert_eq!(worker.call(&fault("")), FromWorker::Done);
    assert_eq!(nbd::reply(&sockets[0]), (7, 0));
    assert_eq!(worker.receive(), FromWorker::Outage { outage: None });

    assert_eq!(worker.call(&fault("error=retry")), FromWorker::Done);
    nbd::send(&sockets[0], nbd::WRITE, 8, 0, 512, &[3; 512]);
    assert!(matches!(worker.receive(), FromWorker::Outage { outage: Some(_) }));
    let fail = Policy { outage: OnOutage::Fail, ..Policy::default() };
    assert_eq!(worker.call(&ToWorker::SetPolicy(fail)), FromWorker::Done);
    assert_eq!(nbd::reply(&sockets[0]), (8, 5), "EIO");
    assert_eq!(nbd::write(&sockets[0], 0, &[4; 512]), 5, "EIO");
}

#[test]
fn a_rate_limit_applies_from_the_start_and_uses_no_cpu_time() {
    let worker = Worker::launch();
    let mut start = start_message("mem:1M");
    start.policy.limits.iops = 1;
    worker.send_start(&start);
    assert!(matches!(worker.receive(), FromWorker::Ready(_)));
    let mut worker = worker;
    let sockets = worker.serve(1);
    for cookie in 0..3 {
        nbd::send(&sockets[0], nbd::WRITE, cookie, 0, 512, &[3; 512]);
    }
    assert_eq!(nbd::reply(&sockets[0]), (0, 0));
    let spent_ns = || -> u64 {
        let spent = |stat: &String| stat.split(' ').next().unwrap().parse::<u64>().unwrap();
        threads(worker.child.id(), "schedstat").iter().map(spent).sum()
    };
    let before = spent_ns();
    std::thread::sleep(Duration::from_millis(600));
    let spent = spent_ns() - before;
    assert!(spent < 60_000_000, "{spent} ns of CPU time in 600 ms of waiting");
    assert_eq!(nbd::reply(&sockets[0]), (1, 0));
    assert!(worker.page.snapshot().limited_ns > 500_000_000);
    let wrong = RateLimits { iops: 0, bytes_per_s: 1 };
    let wrong = ToWorker::SetPolicy(Policy { limits: wrong, ..Policy::default() });
    assert_eq!(failure(worker.call(&wrong)).0, ErrorKind::InvalidArgument);
}
