//! The actions that a plan consists of.

use cleat_kernel::{DeviceIndex, UnmountScope};

/// One thing to do. Each is bounded in time and safe to repeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Start a worker of the next generation and open the volume in it.
    StartWorker,
    /// Connect a new device to the worker.
    Connect,
    /// Wait for the device's node, symlink and size.
    WaitForDevice,
    /// Remember that the mapping has been made.
    RecordMapped,
    /// Give the device's dead connections new sockets to the worker: so many are missing.
    Reconnect {
        /// The device.
        index: DeviceIndex,
        /// Connections to replace.
        missing: u32,
    },
    /// Make the device as large as its volume has become, in bytes. One that cannot be done now is
    /// put off, and no failure: the mapping works.
    GrowDevice {
        /// The device.
        index: DeviceIndex,
        /// Of the volume, in whole blocks.
        size: u64,
    },
    /// Have the device's requests answered with errors, those included that a worker left.
    RefuseIo {
        /// The device.
        index: DeviceIndex,
        /// Its connections.
        connections: u32,
    },
    /// Remember that the mapping is being taken down.
    RecordUnmapping,
    /// Write back what the device's page cache holds.
    Flush(DeviceIndex),
    /// Look for holders once more, then disconnect.
    Disconnect(DeviceIndex),
    /// End the worker; by SIGKILL when it does not go. Proved before this succeeds.
    StopWorker,
    /// End the worker that was succeeded, as `StopWorker` does, and forget it.
    StopPredecessor,
    /// Make the worker that was not succeeded the worker again.
    RestorePredecessor,
    /// Wait until the kernel has ended an attempt to connect a device; then look again.
    WaitForConnect,
    /// Forget the mapping.
    RemoveRecord,
    /// Have the worker answer every request with an error; end one that does not do so.
    FailIo,
    /// UnmountScope the device lazily. That it hangs is no failure.
    Unmount(DeviceIndex, UnmountScope),
    /// Disconnect, whoever holds the device. From here on it is not the mapping's any more.
    ForceDisconnect(DeviceIndex),
    /// Make the device quiet for a snapshot, and answer for it. What goes wrong is the snapshot's
    /// failure.
    Quiesce {
        /// The device.
        index: DeviceIndex,
        /// The worker's number for it.
        snapshot: u64,
    },
    /// End that. Where it cannot be done now and the mapping stays, it is put off.
    Unquiesce,
    /// The same on the way of a forced unmap, whose failure is told and no more.
    TryUnquiesce,
    /// Record that somebody else owns the volume.
    RecordFenced,
    /// Make sure that nothing of the worker, whose end is proved, is under way at the backend.
    ProveNoWrites,
}
