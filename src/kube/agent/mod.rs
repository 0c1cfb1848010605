//! The agent of a node: says whether the node may map a volume, and publishes what is true of it there.
//!
//! `cleat_grants::agent` decides, one step at a time. This module observes for it, and performs the steps: it reads and
//! writes the grants of its node at the API server, and asks the node ([`NodeVolumes`]) for everything else. Every
//! write is conditional on the version from which it was decided.
//!
//! Without the API server, mappings stay, and nothing new is mapped ([`Agent::admit`] fails and names the cause).

mod admission;
mod heartbeat;
mod node;
mod run;
mod shared;
mod volume;
mod work;

pub use admission::Admission;
pub use node::{Answer, NodeVolumes, Observed, ObservedMapping};
pub use shared::{Agent, AgentConfig};
