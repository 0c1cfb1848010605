//! The API server of a world: one object with its history, conditional writes, backups.

use std::sync::Arc;

use super::messages::{Answer, Call, Object, Read};
use crate::object::{StoredGrant, Version, VolumeGrant};

#[derive(Debug, Default)]
pub(crate) struct Api {
    revision: u64,
    object: Read,
    /// The states that a stale list may return, oldest first.
    history: Vec<Read>,
    backup: Option<Read>,
    pub(crate) writes: u64,
}

/// How far back a stale list may go.
const HISTORY: usize = 4;

impl Api {
    pub(crate) fn object(&self) -> &Read {
        &self.object
    }

    pub(crate) fn grant(&self) -> Option<&VolumeGrant> {
        self.object.as_ref().map(|object| &object.stored.grant)
    }

    /// Returns the state of `age` changes ago.
    pub(crate) fn list(&self, age: usize) -> Read {
        let at = self.history.len().checked_sub(age);
        at.and_then(|at| self.history.get(at)).unwrap_or(&self.object).clone()
    }

    /// Executes a write. A write that changes nothing does not change the revision, as in the API server.
    pub(crate) fn write(&mut self, call: Call) -> Answer {
        let now = self.object.as_ref().map(|object| &object.stored);
        let (version, mut grant) = match (&call, now) {
            (Call::Create(_), Some(_)) => return Answer::Conflict,
            (Call::Create(_), None) => (None, VolumeGrant::default()),
            (_, None) => return Answer::Conflict,
            (
                Call::WriteSpec(version, _)
                | Call::WriteFences(version, _)
                | Call::WriteEntry(version, _)
                | Call::Forget(version, _),
                Some(now),
            ) => {
                if version.as_ref().is_some_and(|version| *version != now.version) {
                    return Answer::Conflict;
                }
                (version.clone(), now.grant.clone())
            }
            _ => unreachable!("a call for the storage"),
        };
        let _ = version;
        match call {
            Call::Create(spec) | Call::WriteSpec(_, spec) => grant.spec = spec,
            Call::WriteFences(_, fences) => grant.status.fences = fences,
            Call::Forget(_, node) => grant.status.forget(&node),
            Call::WriteEntry(_, entry) => {
                let entries = &mut grant.status.nodes;
                match entries.iter_mut().find(|known| known.node == entry.node) {
                    Some(known) => *known = entry,
                    None => entries.push(entry),
                }
            }
            _ => unreachable!("a call for the storage"),
        }
        self.writes += 1;
        if let Some(object) = self.object.as_ref().filter(|object| object.stored.grant == grant) {
            return Answer::Written(object.clone());
        }
        Answer::Written(self.store(grant))
    }

    fn store(&mut self, grant: VolumeGrant) -> Arc<Object> {
        self.revision += 1;
        let version = Version(self.revision.to_string());
        let stored = StoredGrant { version, deleting: false, grant };
        let object = Arc::new(Object { revision: self.revision, stored });
        self.history.push(self.object.replace(object.clone()));
        if self.history.len() > HISTORY {
            self.history.remove(0);
        }
        object
    }

    pub(crate) fn take_backup(&mut self) {
        self.backup = Some(self.object.clone());
    }

    /// Restores the backup, with a revision above all earlier ones. Returns whether there was one.
    pub(crate) fn restore(&mut self) -> bool {
        let Some(backup) = self.backup.clone() else { return false };
        self.history.clear();
        match backup {
            Some(object) => drop(self.store(object.stored.grant.clone())),
            None => self.object = None,
        }
        self.history.clear();
        true
    }
}
