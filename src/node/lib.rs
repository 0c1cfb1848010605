//! The supervisor: it makes volumes fast to the node and lets them go.
//!
//! Comes in: calls of the control API (`admin`), events of the kernel and of workers (`node`).
//! Goes out: workers (`workers`), commands to the kernel, durable records (`journal`).
//!
//! `mapping` decides, and only it: a pure function from what is wanted and what is seen to what
//! is done next. `executor` carries it out under a guard per volume; `recover` does so for
//! everything that an earlier supervisor left. `handover` lets a new worker succeed one that serves,
//! `upgrade` and `restart` do so for all of them and for the daemon itself.
//!
//! What may never happen here: a decision from memory where the kernel can be asked; a device taken
//! by its number; a second worker while the first is not proved dead; a wait without a bound.
//!
//! Reading order: `mapping`, `journal`, `executor`, `steps`, `workers`, `recover`, `admin`, `node`.

pub mod admin;
pub mod config;
pub mod convert;
pub mod directory;
pub mod executor;
pub mod force;
pub mod growth;
mod handover;
mod hook;
pub mod journal;
pub mod kernel_calls;
pub mod link;
mod listener;
pub mod mapping;
pub mod metrics;
mod naming;
pub mod node;
mod observe;
pub mod offload;
mod operations;
pub mod process;
pub mod quiesce;
pub mod recover;
mod restart;
pub mod setbacks;
mod steps;
mod unlocking;
mod upgrade;
pub mod validate;
pub mod volume;
pub mod workers;
