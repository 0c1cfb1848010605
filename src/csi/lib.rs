//! The CSI driver of a node: kubelet calls it, and it maps volumes through the supervisor. On request it is also
//! the controller that creates them.
//!
//! - In: gRPC calls of CSI 1.13 on a unix socket of mode 0600 (`server`), and kubelet's plugin registration
//!   (`registration`).
//! - Out: calls of the supervisor's [`cleat_node::executor::Executor`], and filesystem operations (`host`).
//!
//! Nothing is remembered between calls. The name of a mapping follows from the id of the volume
//! (`volume_id`), the journal of the supervisor says what is mapped, and the kernel's mount table says what
//! is mounted. Every call therefore can be repeated after a crash at any point, except a format that is cut off: what
//! it leaves is never taken for an empty device.
//!
//! What must never happen here: formatting of a device that is not proved to be empty; trust in a mount
//! whose device is not the mapping's; a wait without a deadline; a second call for a volume that is busy.
//!
//! Reading order: `volume_id`, `attributes`, `source`, `capability`, `host`, `node`, `controller`.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests wait in real time"))]

mod addons;
mod attach;
mod attributes;
mod busy;
mod capability;
mod controller;
mod deadline;
mod driver;
mod grants;
mod group;
mod health;
pub mod host;
mod identity;
mod network_fence;
mod node;
mod paths;
mod registration;
mod secrets;
mod server;
mod services;
mod source;
mod status;
mod threads;
mod volume_id;

pub use attach::{Attacher, Published, Usage, serve_attacher};
pub use controller::remote_ids;
pub use driver::Driver;
pub use grants::{Grants, Kept, Permission};
pub use source::{is_shared, remote_uri};
pub use volume_id::{PREFIX, VolumeId, mapping_name};
