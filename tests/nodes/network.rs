//! The network of a cluster: a network namespace of this process, in which the control plane, Ceph and QEMU run. Each
//! machine has a card at a bridge there. The namespace has no name, and ends with its last process.

use std::fs::File;
use std::process::Command;

use nix::sched::{CloneFlags, setns, unshare};

use test_kit::control_plane::HOST_OF_MACHINES;

use crate::programs::output;

/// A network namespace.
pub(crate) struct Network(File);

impl Network {
    /// Makes a namespace with a bridge, which has the address [`HOST_OF_MACHINES`].
    pub(crate) fn new() -> Self {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET)
                .expect("the tests of nodes need root: they make a network namespace");
            ip("link set lo up");
            ip("link add nodes type bridge");
            ip(&format!("address add {HOST_OF_MACHINES}/24 dev nodes"));
            ip("link set nodes up");
            File::open("/proc/thread-self/ns/net").unwrap()
        };
        Self(std::thread::scope(|scope| scope.spawn(make).join().unwrap()))
    }

    /// Runs an action on a thread in the namespace. The threads and the processes that it starts are in the namespace,
    /// too.
    pub(crate) fn enter<T: Send>(&self, action: impl FnOnce() -> T + Send) -> T {
        let run = || {
            setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
            action()
        };
        let result = std::thread::scope(|scope| scope.spawn(run).join());
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Makes the tap device of a machine. The calling thread is in the namespace.
pub(crate) fn make_tap(name: &str) {
    ip(&format!("tuntap add dev {name} mode tap"));
    ip(&format!("link set dev {name} master nodes up"));
}

/// Returns the address of the machine with this number.
pub(crate) fn address(number: usize) -> String {
    let (network, _) = HOST_OF_MACHINES.rsplit_once('.').expect("an IPv4 address");
    format!("{network}.{}", 11 + number)
}

fn ip(arguments: &str) {
    output(Command::new("ip").args(arguments.split(' ')));
}
