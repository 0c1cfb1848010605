//! The actions that a plan consists of.

use cleat_kernel::{DeviceIndex, UnmountScope};

/// One action. Each is bounded in time and safe to repeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Starts a worker of the next generation, which opens the volume.
    StartWorker,
    /// Connects a new device to the worker.
    Connect,
    /// Waits for the device's node, symlink and size.
    WaitForDevice,
    /// Records that the mapping has been created.
    RecordMapped,
    /// Replaces dead connections of the device by new ones to the worker.
    Reconnect {
        /// The device.
        index: DeviceIndex,
        /// The number of connections to replace.
        missing: u32,
    },
    /// Grows the device to the size of its volume. If this is not possible now, it is deferred, which
    /// is no failure: the mapping works.
    GrowDevice {
        /// The device.
        index: DeviceIndex,
        /// The size of the volume in bytes, a multiple of the block size.
        size: u64,
    },
    /// Starts a worker without a volume, which answers the device's requests with errors, also those that
    /// an earlier worker did not answer.
    RefuseIo {
        /// The device.
        index: DeviceIndex,
        /// The number of its connections.
        connections: u32,
    },
    /// Records that the mapping is being removed.
    RecordUnmapping,
    /// Opens the device exclusively until it is disconnected. Fails if a user inside the kernel has claimed
    /// the device or a partition of it.
    OpenExclusively(DeviceIndex),
    /// Writes back the page cache of the device.
    Flush(DeviceIndex),
    /// Looks for holders again, then disconnects the device.
    Disconnect(DeviceIndex),
    /// Ends the worker, by SIGKILL if necessary. Succeeds only when its end is proved.
    StopWorker,
    /// Ends the predecessor as `StopWorker` ends the worker, and removes it from the record.
    StopPredecessor,
    /// Makes the predecessor the worker again, after a handover that did not happen.
    RestorePredecessor,
    /// Releases the claim of the volume, if the ended worker has not done so and the claim may outlive it.
    ReleaseClaim,
    /// Waits until the kernel has ended an attempt to connect a device. The mapping is then observed
    /// again.
    WaitForConnect,
    /// Removes the record of the mapping.
    RemoveRecord,
    /// Makes the worker answer every request with an error. A worker that does not do so is killed.
    FailIo,
    /// Unmounts the device lazily. A blocked unmount is no failure.
    Unmount(DeviceIndex, UnmountScope),
    /// Disconnects the device regardless of its holders. From then on it does not belong to the
    /// mapping.
    ForceDisconnect(DeviceIndex),
    /// Quiesces the device for a snapshot, and answers the snapshot's request. A failure is a failure
    /// of the snapshot, not of the mapping.
    Quiesce {
        /// The device.
        index: DeviceIndex,
        /// The worker's number for the snapshot.
        snapshot: u64,
    },
    /// Ends the quiescing. If this is not possible now and the mapping stays, it is deferred.
    Unquiesce,
    /// Ends the quiescing during a forced unmap. A failure is only reported.
    TryUnquiesce,
    /// Records that another client owns the volume.
    RecordFenced,
    /// Records that a sync of the volume has failed. An error of the journal is no failure of the mapping.
    RecordSyncFailed,
    /// Proves that the backend executes no request of the worker any more. The worker has ended.
    ProveNoWrites,
}
