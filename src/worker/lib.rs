//! The worker process: one for each volume. It receives its volume and sockets over an inherited descriptor,
//! opens the backend, gives up every privilege, and runs the data path.
//!
//! - Input: commands of [`protocol`] and kernel sockets, over a [`channel`].
//! - Output: answers, and reports (device disconnected, volume fenced, outage of the backend).
//!
//! [`process`] covers the time from the start to an open volume, [`sandbox`] the confinement, and `session`
//! the control thread of the open volume, with its part in a planned handover. `refuse` is a worker without a
//! volume, which answers every request with an error.
//!
//! The following never happens here: a worker that serves a device ends without a command or a disconnect; a
//! privilege remains after `Ready`; the control thread waits for the supervisor without a timeout, or does
//! work of the data path.

pub mod channel;
#[cfg(test)]
mod fake_image;
mod outage_monitor;
pub mod process;
mod quiesce;
mod refuse;
mod resize;
pub mod sandbox;
mod session;
mod write_hold;

pub use cleat_worker_protocol::{isolation, protocol, version};
