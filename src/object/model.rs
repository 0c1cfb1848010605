//! The protocol at small scope, checked by exhaustive enumeration.
//!
//! [`takeover`] has three writers, their claims, seals and checkpoints. [`space`] has the records of one
//! log: relocations, snapshots, clones, and the deletion of objects; there a take-over is one step, as
//! [`takeover`] shows that it may be.
//!
//! Each rule of the protocol can be switched off; a test then expects that the enumeration finds a
//! violation. So no rule is superfluous at this scope, and the enumeration can fail.

mod explore;
mod space;
mod takeover;
