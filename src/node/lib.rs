//! The supervisor: maps volumes to block devices of this node, and takes the mappings down again.
//!
//! - In: calls of the control API (`api`), events of the kernel and of workers (`daemon`).
//! - Out: worker processes (`workers`), commands to the kernel (`kernel_calls`), durable records
//!   (`journal`).
//!
//! The `planner` decides: it is a pure function from what is wanted and what is observed to the
//! actions that come next. `reconcile` runs them (`actions`) under the guard of one mapping.
//! `operations` are what users ask for; each changes what is wanted and reconciles.
//!
//! What must never happen here: a decision from memory where the kernel can be asked; a device that
//! is addressed by its number alone; a second worker before the first is proved dead; a wait without
//! a bound.
//!
//! Reading order: `planner`, `journal`, `mapping`, `context`, `reconcile`, `actions`, `operations`,
//! `workers`, `api`, `daemon`.

mod actions;
mod api;
pub mod blocking;
pub mod config;
mod context;
mod control_socket;
pub mod daemon;
mod devices;
mod directory;
pub mod executor;
mod find;
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
mod records;
mod restart;
mod retry;
mod status;
mod unlock;
mod worker_failures;
mod worker_start;
pub mod workers;
