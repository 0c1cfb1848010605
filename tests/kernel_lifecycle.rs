//! One lifecycle suite for every kernel: the simulated one always, the real one as root with nbd
//! when `CLEAT_TEST_REAL_KERNEL=1` says that it must be there (it is in the VM).

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]
#![allow(clippy::print_stdout, reason = "figures are for the reader of the test's output")]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use cleat_core::error::ErrorKind;
use cleat_kernel::real::RealKernel;
use cleat_kernel::sim::{Call, Fault, Script, SimKernel};
use cleat_kernel::udev::{RUN_DIRECTORY, rule_installed, udevd_runs};
use cleat_kernel::{ConnectSpec, DeviceIndex, DevicePaths, Holder, Identity, Kernel, KernelEvent};
use test_kit::nbd::server::{FLAGS, Server, hangs_up};

const SIZE: u64 = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(30);

/// A mapped device and what serves it.
struct Mapped<'a> {
    kernel: &'a dyn Kernel,
    index: DeviceIndex,
    identity: Identity,
    server: Server,
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn identity(name: &str) -> Identity {
    Identity::new(&format!("{:08x}", std::process::id()), name)
}

fn spec(name: &str, sockets: Vec<OwnedFd>) -> ConnectSpec {
    ConnectSpec {
        sockets,
        size: SIZE,
        block_size: 4096,
        transmission_flags: FLAGS,
        identity: identity(name),
        dead_connection_timeout: PATIENCE,
        request_timeout: Duration::ZERO,
        replay_delay: Some(Duration::from_millis(500)),
    }
}

fn connect<'a>(kernel: &'a dyn Kernel, name: &str, connections: usize) -> Mapped<'a> {
    let server = Server::new(SIZE);
    let sockets = (0..connections).map(|_| server.connection()).collect();
    let index = kernel.connect(spec(name, sockets)).unwrap();
    Mapped { kernel, index, identity: identity(name), server }
}

impl Mapped<'_> {
    fn is_listed(&self) -> bool {
        let devices = self.kernel.devices().unwrap();
        let ours = Some(&self.identity);
        devices.iter().any(|d| d.index == self.index && d.identity().as_ref() == ours)
    }

    fn ready(&self) -> DevicePaths {
        self.kernel.wait_ready(self.index, &self.identity, SIZE, soon()).unwrap()
    }

    fn disconnect(&self) {
        self.kernel.disconnect(self.index, &self.identity, soon()).unwrap();
        assert!(!self.is_listed(), "still there after its disconnect");
    }
}

/// What both kernels must do.
fn suite(kernel: &dyn Kernel) {
    a_device_lives_and_goes(kernel);
    devices_do_not_mix(kernel);
    many_at_once(kernel);
    another_identity_is_refused(kernel);
    sockets_that_nobody_needs_are_dropped(kernel);
    a_dead_connection_is_told_and_replaced(kernel);
    growth_shows(kernel);
    the_impossible_is_refused(kernel);
}

fn a_device_lives_and_goes(kernel: &dyn Kernel) {
    let mapped = connect(kernel, "lives", 1);
    let paths = mapped.ready();
    assert_eq!(paths.node.to_str().unwrap(), format!("/dev/nbd{}", mapped.index));
    assert_eq!(paths.symlink.to_str().unwrap(), "/dev/disk/by-id/cleat-lives");
    let devices = kernel.devices().unwrap();
    let device = devices.iter().find(|device| device.index == mapped.index).unwrap();
    assert!(device.connected && device.size == SIZE, "{device:?}");
    kernel.flush(mapped.index, soon()).unwrap();
    assert_eq!(settled_holders(kernel, mapped.index), []);
    mapped.disconnect();
    assert!(mapped.server.ended_in_order(1), "the kernel sends NBD_CMD_DISC");
    mapped.disconnect();
    assert!(!paths.symlink.exists(), "{} is left behind", paths.symlink.display());
}

/// Who uses the device once udev has looked at it.
fn settled_holders(kernel: &dyn Kernel, index: DeviceIndex) -> Vec<Holder> {
    let deadline = soon();
    loop {
        let holders = kernel.holders(index).unwrap();
        if holders.is_empty() || Instant::now() > deadline {
            return holders;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn devices_do_not_mix(kernel: &dyn Kernel) {
    let (one, two) = (connect(kernel, "one", 1), connect(kernel, "two", 4));
    assert_ne!(one.index, two.index);
    assert_ne!(one.ready().symlink, two.ready().symlink);
    one.disconnect();
    assert!(two.is_listed());
    two.disconnect();
    assert!(two.server.ended_in_order(4), "the kernel ends each connection");
}

fn many_at_once(kernel: &dyn Kernel) {
    let names: Vec<String> = (0..20).map(|n| format!("many-{n}")).collect();
    std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(move || {
                let mapped = connect(kernel, name, 1);
                mapped.ready();
                mapped.disconnect();
            });
        }
    });
    let ours = identity("many-");
    let mut left = kernel.devices().unwrap();
    left.retain(|d| d.backend.as_ref().is_some_and(|b| b.starts_with(ours.as_str())));
    assert_eq!(left, []);
}

fn another_identity_is_refused(kernel: &dyn Kernel) {
    let mapped = connect(kernel, "mine", 1);
    mapped.ready();
    let other = Identity::new("ffffffff", "mine");
    let refused = kernel.reconfigure(mapped.index, &other, vec![mapped.server.connection()]);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::NotFound);
    let refused = kernel.resize(mapped.index, &other, 2 * SIZE);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::NotFound);
    // Success, because that identity is not connected; and the device is untouched.
    kernel.disconnect(mapped.index, &other, soon()).unwrap();
    assert!(mapped.is_listed());
    mapped.ready();
    mapped.disconnect();
    let gone = kernel.reconfigure(mapped.index, &mapped.identity, vec![mapped.server.connection()]);
    assert_eq!(gone.unwrap_err().kind(), ErrorKind::NotFound);
}

fn sockets_that_nobody_needs_are_dropped(kernel: &dyn Kernel) {
    let mapped = connect(kernel, "enough", 2);
    mapped.ready();
    let (ours, theirs) = UnixStream::pair().unwrap();
    kernel.reconfigure(mapped.index, &mapped.identity, vec![OwnedFd::from(theirs)]).unwrap();
    assert!(hangs_up(&ours, PATIENCE), "the kernel keeps a socket without need");
    kernel.flush(mapped.index, soon()).unwrap();
    mapped.disconnect();
}

fn a_dead_connection_is_told_and_replaced(kernel: &dyn Kernel) {
    let events = kernel.events().unwrap();
    let mapped = connect(kernel, "revived", 1);
    mapped.ready();
    mapped.server.cut();
    let deadline = soon();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match events.recv_timeout(left).expect("the kernel tells of the dead connection") {
            KernelEvent::LinkDead(index) if index == mapped.index => break,
            _ => {}
        }
    }
    assert!(mapped.is_listed(), "a device outlives its connections");
    let replacement = mapped.server.connection();
    kernel.reconfigure(mapped.index, &mapped.identity, vec![replacement]).unwrap();
    kernel.flush(mapped.index, soon()).unwrap();
    assert_eq!(mapped.server.connections_alive(), 1, "the new socket is in place");
    mapped.disconnect();
}

fn growth_shows(kernel: &dyn Kernel) {
    let mapped = connect(kernel, "grows", 1);
    mapped.ready();
    mapped.server.grow(2 * SIZE);
    kernel.resize(mapped.index, &mapped.identity, 2 * SIZE).unwrap();
    kernel.wait_ready(mapped.index, &mapped.identity, 2 * SIZE, soon()).unwrap();
    let deadline = Instant::now() + Duration::from_millis(100);
    let wrong = kernel.wait_ready(mapped.index, &mapped.identity, SIZE, deadline).unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::TimedOut, "the size is checked");
    mapped.disconnect();
}

fn the_impossible_is_refused(kernel: &dyn Kernel) {
    let none = kernel.connect(spec("impossible", Vec::new())).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::InvalidArgument);
    let server = Server::new(SIZE);
    let empty = ConnectSpec { size: 0, ..spec("impossible", vec![server.connection()]) };
    assert_eq!(kernel.connect(empty).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn simulated_kernel() {
    suite(&SimKernel::new(Script::default()));
}

/// As root, with nbd; refuses to pass where it was to run and cannot.
#[test]
fn real_kernel() {
    match std::env::var("CLEAT_TEST_REAL_KERNEL").as_deref() {
        Ok("1") => {}
        _ => return,
    }
    let left_behind = Path::new(RUN_DIRECTORY).join("udev/cleat.00.left-behind");
    std::fs::create_dir_all(left_behind.parent().unwrap()).unwrap();
    std::fs::write(&left_behind, "CLEAT_NAME=left-behind\n").unwrap();
    let kernel = RealKernel::new(Path::new(RUN_DIRECTORY));
    assert!(!left_behind.exists(), "names of a supervisor that died are cleared");
    suite(&kernel);
    real_io(&kernel);
    real_holders(&kernel);
    real_layers(&kernel);
    real_latency(&kernel);
    nothing_is_left(&kernel);
}

/// Whoever opens a device that is gone, as udev does for a look, makes the driver call it connected.
fn nothing_is_left(kernel: &RealKernel) {
    let deadline = soon();
    loop {
        let mut left = kernel.status().unwrap();
        left.retain(|(_, connected)| *connected);
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "left behind: {left:?} of {:?}", kernel.devices());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What was written is there, before and after a crash of the server.
fn real_io(kernel: &RealKernel) {
    let mapped = connect(kernel, "io", 1);
    let node = mapped.ready().node;
    let file = File::options().read(true).write(true).open(&node).unwrap();
    file.write_all_at(&[7; 8192], 4096).unwrap();
    kernel.flush(mapped.index, soon()).unwrap();
    assert_eq!(mapped.server.bytes(4096, 8192), [7; 8192], "flushed to the server");
    mapped.server.cut();
    let writer = std::thread::spawn(move || {
        file.write_all_at(&[8; 4096], 0).unwrap();
        file.sync_all().unwrap();
    });
    kernel.reconfigure(mapped.index, &mapped.identity, vec![mapped.server.connection()]).unwrap();
    writer.join().unwrap();
    assert_eq!(mapped.server.bytes(0, 4096), [8; 4096]);
    mapped.disconnect();
}

/// Whoever holds a device is named, keeps it, and lets it go.
fn real_holders(kernel: &RealKernel) {
    let mapped = connect(kernel, "held", 1);
    let node = mapped.ready().node;
    settled_holders(kernel, mapped.index);
    let file = File::open(&node).unwrap();
    let holders = kernel.holders(mapped.index).unwrap();
    let pid = std::process::id();
    let ours = |h: &Holder| matches!(h, Holder::Process { pid: found, .. } if *found == pid);
    assert!(holders.iter().any(ours), "{holders:?}");
    let deadline = Instant::now() + Duration::from_millis(300);
    let held = kernel.disconnect(mapped.index, &mapped.identity, deadline).unwrap_err();
    assert_eq!(held.kind(), ErrorKind::TimedOut, "{}", held.report());
    assert!(Instant::now() < deadline + Duration::from_secs(5), "long after its deadline");
    drop(file);
    mapped.disconnect();
}

/// A filesystem, in two mount namespaces, on a partition with a name of its own; a loop device.
fn real_layers(kernel: &RealKernel) {
    let mapped = connect(kernel, "layers", 1);
    let paths = mapped.ready();
    let node = paths.node.to_str().unwrap();
    let named = |wanted: &dyn Fn(&Holder) -> bool| {
        let deadline = soon();
        while !kernel.holders(mapped.index).unwrap().iter().any(wanted) {
            assert!(Instant::now() < deadline, "{:?}", kernel.holders(mapped.index));
            std::thread::sleep(Duration::from_millis(20));
        }
    };

    run(&format!("echo 'start=64, size=900' | sfdisk --quiet {node}"));
    if udevd_runs() && rule_installed() {
        let partition = format!("{}-part1", paths.symlink.display());
        let found = || std::fs::canonicalize(&partition).unwrap_or_default();
        let deadline = soon();
        while found() != Path::new(&format!("{node}p1")) {
            assert!(Instant::now() < deadline, "{partition} leads to {}", found().display());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("a place");
    let shown = place.display();
    std::fs::create_dir(&place).unwrap();
    run(&format!("mkfs.ext4 -q -F {node}p1 && mount {node}p1 '{shown}'"));
    let at = |h: &Holder, own| {
        matches!(h, Holder::Mount { path, filesystem, namespace_pid }
            if *path == place && filesystem == "ext4" && namespace_pid.is_none() == own)
    };
    named(&|holder| at(holder, true));
    // Its copy of the mount is told only once ours is gone: as long as both are there, one is enough.
    let mut other = Command::new("unshare").args(["--mount", "sleep", "1000"]).spawn().unwrap();
    let shared = std::fs::read_link("/proc/self/ns/mnt").unwrap();
    let theirs = format!("/proc/{}/ns/mnt", other.id());
    let deadline = soon();
    while std::fs::read_link(&theirs).unwrap() == shared {
        assert!(Instant::now() < deadline, "unshare does not unshare");
        std::thread::sleep(Duration::from_millis(20));
    }
    run(&format!("umount '{shown}'"));
    named(&|holder| at(holder, false));
    other.kill().unwrap();
    other.wait().unwrap();

    run(&format!("losetup /dev/loop7 {node}p1"));
    named(&|holder| matches!(holder, Holder::Device { name } if name == "loop7"));
    run("losetup -d /dev/loop7");
    run(&format!("mkswap {node}p1 && swapon {node}p1"));
    named(&|holder| matches!(holder, Holder::Device { name } if name == "swap"));
    run(&format!("swapoff {node}p1"));
    assert_eq!(settled_holders(kernel, mapped.index), []);
    mapped.disconnect();
}

/// How long a map and an unmap take on the kernel's side: told, not judged.
fn real_latency(kernel: &RealKernel) {
    let mut steps = [const { Vec::new() }; 3];
    for round in 0..20 {
        let start = Instant::now();
        let mapped = connect(kernel, &format!("round-{round}"), 1);
        let connected = Instant::now();
        mapped.ready();
        let ready = Instant::now();
        mapped.disconnect();
        let times = [connected - start, ready - connected, ready.elapsed()];
        steps.iter_mut().zip(times).for_each(|(step, time)| step.push(time));
    }
    let median = steps.map(|mut step| {
        step.sort_unstable();
        (step[step.len() / 2], step[step.len() - 1])
    });
    println!(
        "median and worst: connect {:?}, ready {:?}, disconnect {:?}",
        median[0], median[1], median[2]
    );
}

fn run(script: &str) {
    let output = Command::new("sh").args(["-c", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn simulated_io_survives_a_worker_crash() {
    let kernel = SimKernel::new(Script::default());
    let _events = kernel.events().unwrap();
    let mapped = connect(&kernel, "io", 2);
    kernel.write(mapped.index, 4096, &[7; 4096]).unwrap();
    mapped.server.cut();
    std::thread::scope(|scope| {
        let read = scope.spawn(|| kernel.read(mapped.index, 4096, 4096));
        std::thread::sleep(Duration::from_millis(20));
        let sockets = (0..2).map(|_| mapped.server.connection()).collect();
        kernel.reconfigure(mapped.index, &mapped.identity, sockets).unwrap();
        assert_eq!(read.join().unwrap().unwrap(), [7; 4096]);
    });
    mapped.disconnect();
    assert!(kernel.read(mapped.index, 0, 512).is_err(), "a device that is gone answers nothing");
}

#[test]
fn simulated_faults_show() {
    let script = Script { skip_waits: true, devices: 1, devices_max: 1, ..Script::default() };
    let kernel = SimKernel::new(script);

    kernel.inject(Call::Connect, Fault::NoSymlink);
    let mapped = connect(&kernel, "faulty", 1);
    let lost = kernel.wait_ready(mapped.index, &mapped.identity, SIZE, soon()).unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::TimedOut);
    assert!(lost.report().contains("symlink"), "{}", lost.report());

    let server = Server::new(SIZE);
    let second = || kernel.connect(spec("second", vec![server.connection()]));
    assert_eq!(second().unwrap_err().kind(), ErrorKind::NoSpace, "the only device is in use");

    let holder = Holder::Process { pid: 1, command: "dd".into() };
    kernel.set_holders(mapped.index, vec![holder.clone()]);
    assert_eq!(kernel.holders(mapped.index).unwrap(), [holder]);
    let held = kernel.disconnect(mapped.index, &mapped.identity, soon()).unwrap_err();
    assert_eq!(held.kind(), ErrorKind::TimedOut, "held: it stays configured");
    assert!(mapped.is_listed());
    kernel.set_holders(mapped.index, Vec::new());
    mapped.disconnect();

    kernel.inject(Call::Connect, Fault::LateEffect);
    assert_eq!(second().unwrap_err().kind(), ErrorKind::TimedOut);
    let left_behind = kernel.devices().unwrap()[0].identity();
    assert_eq!(left_behind, Some(identity("second")), "as by a caller that died in CONNECT");
    kernel.vanish(0);
    assert!(!kernel.devices().unwrap()[0].connected);

    kernel.set_permission(false);
    assert_eq!(second().unwrap_err().kind(), ErrorKind::PermissionDenied);
    kernel.set_module(false);
    let missing = second().unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Unsupported);
    assert!(missing.repair().unwrap().contains("modprobe nbd"));
}

#[test]
fn simulated_hangs_end_at_their_deadline() {
    let kernel = SimKernel::new(Script::default());
    let mapped = connect(&kernel, "hangs", 1);
    kernel.inject(Call::Disconnect, Fault::Hang);
    let (start, limit) = (Instant::now(), Duration::from_millis(200));
    let hung = kernel.disconnect(mapped.index, &mapped.identity, start + limit).unwrap_err();
    assert_eq!(hung.kind(), ErrorKind::TimedOut);
    assert!(start.elapsed() >= limit && start.elapsed() < PATIENCE);
    assert!(mapped.is_listed(), "it had no effect");

    kernel.inject(Call::Disconnect, Fault::LateEffect);
    let late = kernel.disconnect(mapped.index, &mapped.identity, soon()).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::TimedOut);
    assert!(!mapped.is_listed(), "late, but carried out");
}

#[test]
fn the_same_seed_gives_the_same_kernel() {
    let run = |seed| {
        let kernel = SimKernel::new(Script::seeded(seed, 300));
        let server = Server::new(SIZE);
        let connect = |n| kernel.connect(spec(&format!("v{n}"), vec![server.connection()]));
        (0..200).map(|n| connect(n).map_err(|error| error.kind())).collect::<Vec<_>>()
    };
    let first = run(7);
    assert_eq!(first, run(7));
    assert_ne!(first, run(8));
    assert!(first.iter().any(Result::is_err) && first.iter().any(Result::is_ok));
}
