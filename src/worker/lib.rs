//! The worker process: one a volume. It receives its volume and sockets over an inherited
//! descriptor, opens the backend, gives up every privilege, and runs the data path.
//!
//! Comes in: commands of [`protocol`] and kernel sockets, over a [`channel`]. Goes out: answers, and
//! events (device disconnected, volume fenced, backend out of reach). [`process`] is the way from
//! start to an open volume, [`sandbox`] what is given up on it, `session` the control thread from then
//! on, `succession` its part in a planned hand-over.
//!
//! What may never happen here: an end that nobody asked for while a device is served; a privilege
//! after `Ready`; a wait for the supervisor without bound; work for the data path on this thread.

pub mod channel;
#[cfg(test)]
mod fake_image;
mod outage_monitor;
pub mod process;
pub mod protocol;
mod quiesce;
mod refuse;
mod resize;
pub mod sandbox;
mod session;
pub mod version;
