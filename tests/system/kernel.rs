//! The simulated kernel: the suite that the real kernel passes too, and its injected faults.

use std::time::{Duration, Instant};

use cleat_core::error::ErrorKind;
use cleat_kernel::sim::{Call, Fault, Script, SimKernel};
use cleat_kernel::{Holder, Kernel};
use test_kit::kernel::{SIZE, connect, identity, soon, spec, suite};
use test_kit::nbd::server::Server;
use test_kit::wait::LIMIT;

#[test]
fn the_simulated_kernel_passes_the_kernel_suite() {
    suite(&SimKernel::new(Script::default()));
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
    assert!(kernel.read(mapped.index, 0, 512).is_err(), "a read of a disconnected device fails");
}

#[test]
fn injected_faults_are_reported() {
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
    assert_eq!(held.kind(), ErrorKind::TimedOut, "a held device stays configured");
    assert!(mapped.is_listed());
    kernel.set_holders(mapped.index, Vec::new());
    mapped.disconnect();

    kernel.inject(Call::Connect, Fault::LateEffect);
    assert_eq!(second().unwrap_err().kind(), ErrorKind::TimedOut);
    let left_behind = kernel.devices().unwrap()[0].identity();
    assert_eq!(
        left_behind,
        Some(identity("second")),
        "the device of a CONNECT that timed out exists"
    );
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
fn calls_that_hang_time_out_at_their_deadline() {
    let kernel = SimKernel::new(Script::default());
    let mapped = connect(&kernel, "hangs", 1);
    kernel.inject(Call::Disconnect, Fault::Hang);
    let (start, limit) = (Instant::now(), Duration::from_millis(200));
    let hung = kernel.disconnect(mapped.index, &mapped.identity, start + limit).unwrap_err();
    assert_eq!(hung.kind(), ErrorKind::TimedOut);
    assert!(start.elapsed() >= limit && start.elapsed() < LIMIT);
    assert!(mapped.is_listed(), "a call that hangs has no effect");

    kernel.inject(Call::Disconnect, Fault::LateEffect);
    let late = kernel.disconnect(mapped.index, &mapped.identity, soon()).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::TimedOut);
    assert!(!mapped.is_listed(), "the disconnect takes effect after its timeout");
}

#[test]
fn the_same_seed_gives_the_same_simulated_faults() {
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
