//! The faults of a simulated kernel: injected into single calls, or random from a seed.

use std::time::{Duration, Instant};

use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind};
use cleat_core::random::Random;

/// A call that can have a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// [`Kernel::connect`](crate::Kernel::connect)
    Connect,
    /// [`Kernel::reconfigure`](crate::Kernel::reconfigure)
    Reconfigure,
    /// [`Kernel::resize`](crate::Kernel::resize)
    Resize,
    /// [`Kernel::disconnect`](crate::Kernel::disconnect)
    Disconnect,
    /// [`Kernel::unmount`](crate::Kernel::unmount)
    Unmount,
    /// [`Kernel::force_disconnect`](crate::Kernel::force_disconnect)
    ForceDisconnect,
    /// [`Kernel::freeze`](crate::Kernel::freeze)
    Freeze,
    /// [`Kernel::thaw`](crate::Kernel::thaw)
    Thaw,
    /// [`Kernel::devices`](crate::Kernel::devices)
    Devices,
    /// [`Kernel::holders`](crate::Kernel::holders)
    Holders,
    /// [`Kernel::wait_ready`](crate::Kernel::wait_ready)
    WaitReady,
    /// [`Kernel::flush`](crate::Kernel::flush)
    Flush,
    /// [`Kernel::events`](crate::Kernel::events)
    Events,
}

/// A fault of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The call fails at once with this kind of error and has no effect.
    Fail(ErrorKind),
    /// The call blocks until its deadline (not at all with [`Script::skip_waits`]) and has no effect.
    Hang,
    /// The call takes this long, even beyond its deadline, and then has its effect.
    Slow(Duration),
    /// As `Hang`, but the call has its effect. On `Connect` this stands for a caller that died during the
    /// call: the device stays connected.
    LateEffect,
    /// On `Connect`: the device is connected, but udevd never makes the symlink.
    NoSymlink,
    /// On `Connect`: the device is connected, and then disconnected by another program.
    Vanish,
    /// On `Reconfigure`: the kernel drops the sockets without an error, although a connection is dead.
    DropSockets,
}

/// The properties of a simulated kernel.
#[derive(Debug, Clone)]
pub struct Script {
    /// The seed of all random choices.
    pub seed: u64,
    /// How many of a thousand calls have a random fault.
    pub faults_per_mille: u32,
    /// The number of nbd devices at the start (`nbds_max`); further ones are created on demand.
    pub devices: u32,
    /// The maximum number of devices; CONNECT fails with `NoSpace` beyond.
    pub devices_max: u32,
    /// The time from CONNECT until the symlink exists.
    pub symlink_delay: Duration,
    /// The time limit of calls that have no deadline.
    pub command_timeout: Duration,
    /// Whether waits that only their deadline would end fail at once with the same error, so that a
    /// simulation needs no real time.
    pub skip_waits: bool,
    /// Whether a thread watches the connections, as the kernel does. Without the thread, the next call, or
    /// `SimKernel::check_connections`, notices a dead connection, which is deterministic.
    pub watch_connections: bool,
    /// The clock; a simulation has its own.
    pub now: fn() -> Instant,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            seed: 0,
            faults_per_mille: 0,
            devices: 4,
            devices_max: 1024,
            symlink_delay: Duration::ZERO,
            command_timeout: Duration::from_secs(10),
            skip_waits: false,
            watch_connections: true,
            now: || SystemClock.now(),
        }
    }
}

impl Script {
    /// Makes the properties of a deterministic kernel: no thread, no real waits, random faults.
    pub fn seeded(seed: u64, faults_per_mille: u32) -> Self {
        Self {
            seed,
            faults_per_mille,
            skip_waits: true,
            watch_connections: false,
            ..Self::default()
        }
    }
}

/// Chooses a fault that is possible on `call`, with the given probability.
pub(super) fn random_fault(random: &Random, call: Call, per_mille: u32) -> Option<Fault> {
    if per_mille == 0 || random.next() % 1000 >= u64::from(per_mille) {
        return None;
    }
    use ErrorKind::{InUse, Internal, NotFound, Unavailable};
    let choices: &[Fault] = match call {
        Call::Connect => &[
            Fault::Fail(InUse),
            Fault::Fail(Internal),
            Fault::Hang,
            Fault::LateEffect,
            Fault::NoSymlink,
            Fault::Vanish,
        ],
        Call::Reconfigure => {
            &[Fault::Fail(NotFound), Fault::Hang, Fault::LateEffect, Fault::DropSockets]
        }
        Call::Resize | Call::Disconnect | Call::ForceDisconnect | Call::Freeze | Call::Thaw => {
            &[Fault::Fail(Internal), Fault::Hang, Fault::LateEffect]
        }
        Call::WaitReady | Call::Flush | Call::Unmount => &[Fault::Fail(Internal), Fault::Hang],
        Call::Devices | Call::Holders | Call::Events => &[Fault::Fail(Unavailable)],
    };
    let index = usize::try_from(random.next() % choices.len() as u64).unwrap_or(0);
    choices.get(index).copied()
}

/// Returns the error of an injected failure.
pub(super) fn failure(call: Call, kind: ErrorKind) -> Error {
    Error::new(kind, format!("the simulated kernel failed {call:?}"))
}

/// Returns the error of a call that missed its deadline.
pub(super) fn timed_out(call: Call) -> Error {
    Error::new(ErrorKind::TimedOut, format!("the simulated kernel did not finish {call:?} in time"))
}
