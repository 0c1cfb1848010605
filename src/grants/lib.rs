//! The protocol that decides who may use a volume: grants.
//!
//! Input: the grant object of a volume, the requests for the volume, the states of the nodes, the record at
//! the storage, what a node observes locally, and the time. Output: the next single step of the controller
//! ([`controller::decide`]) or of a node's agent ([`agent::next_step`]): one conditional write or one
//! operation at the storage. The caller performs the step, observes again and calls again.
//!
//! Three sources of truth, in this order: the record at the storage ([`record::Record`]) says who can write;
//! the grant ([`object::GrantSpec`]) says who may claim; the status ([`object::GrantStatus`]) says what is
//! true on a node, as observed there. [`rules::Rule`] lists the rules of the protocol, and each rule names
//! the function that implements it.
//!
//! Storages implement [`storage::Fencing`].
//!
//! Never: I/O, a clock, randomness, a runtime or a client of Kubernetes. A decision never depends on memory
//! that a restarted process would not have, except for a [`agent::Permit`], whose loss costs one more write.

pub mod agent;
pub mod answers;
pub mod controller;
pub mod limits;
pub mod object;
pub mod policy;
pub mod record;
pub mod rules;
#[cfg(test)]
mod simulation;
pub mod storage;
mod time;
