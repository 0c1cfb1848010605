//! What the actors of a world send: calls of the API server and of the storage, and their answers.

use std::sync::Arc;

use super::scenario::Kind;
use crate::object::{FenceEntry, GrantSpec, NodeEntry, StoredGrant, Version};
use crate::record::{Claim, Record, Refusal, Target};

/// A controller or the agent of a node, by its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Actor {
    Controller(usize),
    Node(usize),
}

/// The grant object at a revision. Revisions only grow, also when a backup is restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Object {
    pub(crate) revision: u64,
    pub(crate) stored: StoredGrant,
}

/// An object that was read; `None` if it does not exist.
pub(crate) type Read = Option<Arc<Object>>;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Call {
    List,
    Create(GrantSpec),
    WriteSpec(Option<Version>, GrantSpec),
    WriteFences(Option<Version>, Vec<FenceEntry>),
    WriteEntry(Option<Version>, NodeEntry),
    Forget(Option<Version>, String),
    ReadRecord,
    Claim(Claim),
    Reclaim(Claim),
    Release(String),
    Cut(Target),
    Seal { target: Target, cut: Option<String>, revision: u64 },
    Unfence(String),
}

impl Call {
    /// Returns the kind of a call at which its sender can be stopped.
    pub(crate) fn kind(&self) -> Option<Kind> {
        match self {
            Self::Claim(_) => Some(Kind::Claim),
            Self::WriteEntry(..) => Some(Kind::WriteEntry),
            Self::Release(_) => Some(Kind::Release),
            Self::Cut(_) => Some(Kind::Cut),
            Self::Seal { .. } => Some(Kind::Seal),
            Self::WriteSpec(..) => Some(Kind::WriteSpec),
            _ => None,
        }
    }

    pub(crate) fn is_for_storage(&self) -> bool {
        !matches!(
            self,
            Self::List
                | Self::Create(_)
                | Self::WriteSpec(..)
                | Self::WriteFences(..)
                | Self::WriteEntry(..)
                | Self::Forget(..)
        )
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Answer {
    Listed(Read),
    Written(Arc<Object>),
    Conflict,
    Record(Record),
    Claimed,
    Refused(Refusal),
    /// Whether the record had such a claim.
    Released(bool),
    /// The client that was cut off, and the revision of the record at that time.
    Cut(Option<String>, u64),
    Done,
}
