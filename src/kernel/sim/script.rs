//! What goes wrong on a simulated kernel: faults put on single calls, and seeded random ones.

use std::time::{Duration, Instant};

use cleat_core::error::{Error, ErrorKind};
use cleat_core::random::Random;

/// A call that can be made to misbehave.
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

/// How one call misbehaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It fails at once with this kind and does nothing.
    Fail(ErrorKind),
    /// It hangs until its deadline (at once with [`Script::skip_waits`]) and does nothing.
    Hang,
    /// It takes so long, whatever its deadline, and then does what it should.
    Slow(Duration),
    /// As `Hang`, but the kernel carries it out nevertheless. On `Connect` this stands for a
    /// caller that died in the call: a device is left behind.
    LateEffect,
    /// On `Connect`: works, but udev never makes the symlink.
    NoSymlink,
    /// On `Connect`: works, and then somebody else disconnects the device.
    Vanish,
    /// On `Reconfigure`: the sockets are dropped in silence, although a connection is dead.
    DropSockets,
}

/// The character of a simulated kernel.
#[derive(Debug, Clone)]
pub struct Script {
    /// Of every random choice.
    pub seed: u64,
    /// Calls in a thousand that misbehave at random.
    pub faults_per_mille: u32,
    /// nbd devices that exist from the start (`nbds_max`); more are made on demand.
    pub devices: u32,
    /// The most devices there can be; CONNECT gives `NoSpace` beyond.
    pub devices_max: u32,
    /// From CONNECT to the symlink.
    pub symlink_delay: Duration,
    /// Bound on calls that are given no deadline.
    pub command_timeout: Duration,
    /// Waits that only their deadline would end, end at once with the same error: a simulation
    /// needs no real time.
    pub skip_waits: bool,
    /// Whether a thread watches the connections, as the kernel does. Without it a dead connection
    /// is noticed in the next call, or by `SimKernel::check_connections`: deterministic.
    pub watch_connections: bool,
    /// What time it is; a simulation has its own.
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
            now: Instant::now,
        }
    }
}

impl Script {
    /// A deterministic kernel for seeded runs: no thread, no real waiting, faults at random.
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

/// A fault that makes sense on `call`, with the given probability.
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

/// The error of `fault`'s kind, as a simulated kernel words it.
pub(super) fn failure(call: Call, kind: ErrorKind) -> Error {
    Error::new(kind, format!("the simulated kernel failed {call:?}"))
}

/// The error of a call that met its deadline.
pub(super) fn timed_out(call: Call) -> Error {
    Error::new(ErrorKind::TimedOut, format!("the simulated kernel did not finish {call:?} in time"))
}
