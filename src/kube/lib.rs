//! The controller of cleat for Kubernetes: VolumeAttachments of the driver become requests, `cleat_grants` decides
//! which node may use a volume, and this crate carries the decisions out.
//!
//! - Input: VolumeAttachments, PersistentVolumes, Nodes, CSINodes, Leases and grants, all watched; the record of a
//!   volume at its storage.
//! - Output: grants ([`grant::VolumeGrant`]), the status, annotations and finalizers of VolumeAttachments,
//!   finalizers of PersistentVolumes, events; fences at the storage ([`storage::Fencing`]).
//!
//! With external-attacher, that program handles VolumeAttachments, and calls (`calls`); both ways use `attaching`.
//!
//! One process leads (`lease`), and everything that it knows can be read again: a new leader begins with empty
//! mirrors. `leader` watches and queues, `attachments`, `volumes` and `persistent_volumes` work on one object each.
//!
//! What must never happen here: a write that is not conditional on the version from which it was decided; a decision
//! about a volume that is not made by `cleat_grants`; a grant of a volume whose storage cannot cut a client off.

pub mod agent;
mod api;
mod attach_detach;
mod attaching;
mod attachments;
mod call_server;
mod calls;
mod client;
mod cluster;
mod config;
mod controller;
pub mod crd;
mod events;
mod failures;
#[cfg(test)]
mod fake;
pub mod grant;
mod guard;
mod heartbeat;
mod kind;
mod leader;
mod lease;
mod lost;
mod marks;
mod metrics;
mod mirror;
mod nodes;
mod objects;
mod persistent_volumes;
mod preserve;
mod queue;
mod remediation;
mod renewals;
pub mod report;
pub mod rights;
mod server;
mod source;
mod standby;
pub mod storage;
mod sweep;
mod unknown_claims;
mod volumes;

pub use call_server::{CallAnswer, CallServer, Calls, Publish};
pub use cleat_grants::policy::Policy;
pub use config::{Config, Remediation, SWEEP_PERIOD};
pub use controller::{Stop, run, run_until};
pub use lease::Timing;
