//! A controller of a world: it performs the steps that `controller::decide` returns, one at a time.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::messages::{Answer, Call, Object, Read};
use crate::controller::{Request, Step, View, adopt_unrequested, decide};
use crate::object::{Time, Version};
use crate::policy::{NodeState, Policy};
use crate::record::{Record, Target};

#[derive(Debug, Default)]
pub(crate) struct Controller {
    /// The grant; the outer `None` if it was not listed.
    grant: Option<Read>,
    pub(crate) requests: Option<Arc<Vec<Request>>>,
    /// The record, with the version of the grant before the read.
    record: Option<(Option<Version>, Record)>,
    record_read_ms: u64,
    /// Whether it has looked for claims that no grant names, as a controller does at its start.
    has_swept: bool,
    /// The fencing in progress: the client is cut off, the seal is next.
    sealing: Option<(Target, Option<String>, u64)>,
    calling: Option<(u64, Call)>,
}

/// How long a record is used for decisions, in milliseconds.
const RECORD_MS: u64 = 3_000;

impl Controller {
    pub(crate) fn is_calling(&self) -> bool {
        self.calling.is_some()
    }

    /// Decides the next call, with the number `op`.
    pub(crate) fn wake(
        &mut self,
        op: u64,
        nodes: &BTreeMap<String, NodeState>,
        policy: &Policy,
        now_ms: u64,
    ) -> Option<Call> {
        if self.calling.is_some() {
            return None;
        }
        let call = self.next_call(nodes, policy, now_ms)?;
        self.calling = Some((op, call.clone()));
        Some(call)
    }

    fn next_call(
        &mut self,
        nodes: &BTreeMap<String, NodeState>,
        policy: &Policy,
        now_ms: u64,
    ) -> Option<Call> {
        let Some(read) = &self.grant else { return Some(Call::List) };
        let requests = self.requests.clone()?;
        if let Some((target, cut, revision)) = self.sealing.take() {
            return Some(Call::Seal { target, cut, revision });
        }
        let grant = read.as_ref().map(|object| &object.stored);
        let version = grant.map(|stored| stored.version.clone());
        let is_fresh = now_ms < self.record_read_ms + RECORD_MS;
        let record = self.record.as_ref().filter(|(read_for, _)| *read_for == version && is_fresh);
        let record = record.map(|(_, record)| record);
        let view = View { grant, requests: &requests, nodes, record, is_gone: false };
        let now = Time(now_ms / 1000);
        let mut step = decide(&view, policy, now);
        if matches!(step, Step::Wait(_)) && !self.has_swept && requests.is_empty() {
            self.has_swept = record.is_some();
            let adopted = || adopt_unrequested(&view, now);
            step = if record.is_some() { adopted().unwrap_or(step) } else { Step::ReadRecord };
        }
        match step {
            Step::Wait(_) | Step::RemoveFinalizer(_) => None,
            Step::ReadRecord => {
                self.record_read_ms = now_ms;
                Some(Call::ReadRecord)
            }
            Step::Create(spec) => Some(Call::Create(spec)),
            Step::WriteSpec { version, spec, .. } => Some(Call::WriteSpec(version, spec)),
            Step::WriteFences { version, fences } => Some(Call::WriteFences(version, fences)),
            Step::Forget { version, node } => Some(Call::Forget(version, node)),
            Step::Fence(target, _) => Some(Call::Cut(target)),
            Step::Unfence(client) => Some(Call::Unfence(client)),
        }
    }

    /// Takes the answer of the call `op`; `None` if the call has timed out.
    pub(crate) fn answer(&mut self, op: u64, answer: Option<Answer>) {
        let Some((_, call)) = self.calling.take_if(|(calling, _)| *calling == op) else { return };
        match (call, answer) {
            (_, Some(Answer::Listed(read))) => self.grant = Some(read),
            (_, Some(Answer::Written(object))) => self.observe(object),
            (Call::Seal { .. }, _) => self.record = None,
            (_, Some(Answer::Conflict) | None) => self.grant = None,
            (_, Some(Answer::Record(record))) => {
                let version = self.grant.as_ref().and_then(Option::as_ref);
                let version = version.map(|object| object.stored.version.clone());
                self.record = Some((version, record));
            }
            (Call::Cut(target), Some(Answer::Cut(client, revision))) => {
                self.sealing = Some((target, client, revision));
            }
            _ => self.record = None,
        }
    }

    /// Takes a newer object, from the watch or from the answer of a write. Before a list it is not used,
    /// because it may be old.
    pub(crate) fn observe(&mut self, object: Arc<Object>) {
        let Some(known) = &self.grant else { return };
        if known.as_ref().is_none_or(|known| known.revision < object.revision) {
            // A record that is being read may be older than this version.
            if matches!(self.calling, Some((_, Call::ReadRecord))) {
                self.calling = None;
            }
            self.grant = Some(Some(object));
        }
    }

    /// Starts again, with nothing but the requests, which are listed at once.
    pub(crate) fn restart(&mut self) {
        *self = Self { requests: self.requests.take(), ..Self::default() };
    }

    /// Has it look again for claims that no grant names, as once a day.
    pub(crate) fn sweep_again(&mut self) {
        self.has_swept = false;
    }

    /// Forgets the grant, so that it is listed again.
    pub(crate) fn lose_watch(&mut self) {
        self.grant = None;
    }
}
