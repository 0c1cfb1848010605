//! The supervisor: maps volumes to block devices of this node, and unmaps them.
//!
//! - In: calls of the control API (`api`), events of the kernel and of workers (`daemon`).
//! - Out: worker processes (`workers`), commands to the kernel (`kernel_calls`), durable records
//!   (`journal`).
//!
//! The `planner` decides: it is a pure function of the desired and the observed state, and returns the
//! next actions. `reconcile` runs them (`actions`) under the guard of one mapping. `operations` are the
//! calls of users; each changes the desired state and reconciles.
//!
//! What must never happen here: a decision from memory where the kernel has the answer; the use of a
//! device by its number alone; the start of a second worker before the end of the first is proved; a
//! wait without a timeout.
//!
//! Reading order: `planner`, `journal`, `mapping`, `context`, `records`, `reconcile`, `actions`,
//! `operations`, `workers`, `api`, `daemon`.

mod actions;
mod api;
pub mod blocking;
pub mod cache_config;
pub mod config;
mod config_values;
mod context;
pub mod control_socket;
mod credentials;
pub mod csi_config;
pub mod daemon;
mod devices;
mod directory;
pub mod executor;
mod force_disconnected;
mod holders;
pub mod journal;
mod kernel_calls;
mod liveness;
pub mod mapping;
mod metrics;
mod naming;
mod observe;
mod operations;
pub mod planner;
mod quiesce_hook;
mod reconcile;
mod record_directory;
mod record_store;
mod records;
mod restart;
mod retry;
mod status;
mod target;
mod unlock;
mod unmanaged;
mod worker_failures;
mod worker_start;
pub mod workers;
