//! Device tests: `cleat` with a real kernel's nbd driver, filesystems and fio on top.
//!
//! Outside the VM this program boots it (`tests/vm/run`) with the binary, the udev rules and itself as
//! payload, and returns the VM's output and exit status. Inside
//! (`CLEAT_TEST_REAL_KERNEL` set) it runs the tests, one after the other: they share one kernel.
//! Arguments are libtest's, so `cargo test --test device -- crash` runs the tests with "crash" in
//! their name.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test prints figures, fails by panicking, and waits in real time"
)]

mod campaign;
mod crash;
mod csi;
mod durability;
mod facts;
mod filesystems;
mod fixture;
mod force;
mod foreign;
mod host;
mod isolation;
mod kernel;
mod lifecycle;
mod memory;
mod objects;
mod outage;
mod peers;
mod pod;
mod quiesce;
mod rbd;
mod readonly;
mod resize;
mod shutdown;
mod state_directory;
mod systemd;
mod unit_rbd;
mod upgrade;
mod verify;

use libtest_mimic::{Arguments, Trial};

/// Set inside the VM, or by a user who wants the tests to use the nbd driver of the running kernel.
const REAL_KERNEL: &str = "CLEAT_TEST_REAL_KERNEL";

fn main() {
    let mut arguments = Arguments::from_args();
    let is_guest = std::env::var_os(REAL_KERNEL).is_some();
    if !is_guest && !arguments.list {
        std::process::exit(host::run(
            &arguments,
            &trials(),
            &trials_with_systemd(),
            &shutdown::trials(),
        ));
    }
    // The tests of a machine share one kernel, and each needs the only daemon.
    arguments.test_threads = Some(1);
    let mut all: Vec<Trial> = trials().into_iter().chain(trials_with_systemd()).collect();
    all.extend(shutdown::trials());
    if is_guest && let Some(list) = std::env::var_os(host::TRIALS) {
        let list = std::fs::read_to_string(list).expect("the list of tests is in the payload");
        all.retain(|trial| list.lines().any(|name| name == trial.name()));
    }
    libtest_mimic::run(&arguments, all).exit();
}

/// The tests of the unit, on a machine with systemd.
fn trials_with_systemd() -> Vec<Trial> {
    [systemd::trials(), unit_rbd::trials(), csi::trials_with_systemd()]
        .into_iter()
        .flatten()
        .collect()
}

/// The tests on a machine with a small init.
fn trials() -> Vec<Trial> {
    [
        kernel::trials(),
        lifecycle::trials(),
        filesystems::trials(),
        verify::trials(),
        crash::trials(),
        state_directory::trials(),
        durability::trials(),
        facts::trials(),
        campaign::trials(),
        peers::trials(),
        resize::trials(),
        readonly::trials(),
        force::trials(),
        foreign::trials(),
        outage::trials(),
        memory::trials(),
        upgrade::trials(),
        objects::trials(),
        rbd::trials(),
        quiesce::trials(),
        pod::trials(),
        isolation::trials(),
        csi::trials(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A named test that fails by panicking.
fn trial(name: impl Into<String>, body: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, move || {
        let began = std::time::Instant::now();
        body();
        println!("took {:.1?}", began.elapsed());
        Ok(())
    })
}
