//! A node of a world: the agent, which performs the steps that `agent::next_step` returns one at a time, and
//! the workers, which outlive it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::messages::{Answer, Call, Object, Read};
use crate::agent::{Grants, Local, Mapping, MappingState, OwnClaim, Permit, Step, View, next_step};
use crate::object::{Generation, Mode, Time};
use crate::record::Claim;

pub(crate) struct Node {
    pub(crate) name: String,
    /// The machine that has the name now.
    machine: String,
    pub(crate) mode: Mode,
    pub(crate) local: Local,
    /// The worker processes that may still send requests, with their generations: the current one, and those
    /// whose end is not proved.
    pub(crate) processes: BTreeMap<String, Generation>,
    /// The processes of machines that had the name before. They stand still, and may send requests at any time.
    pub(crate) strays: BTreeMap<String, Generation>,
    clients: u32,
    grant: Option<Read>,
    permit: Option<Permit>,
    /// The generation of the intent that is about to be written.
    intent: Option<Generation>,
    calling: Option<(u64, Call, Option<Generation>)>,
    /// The end of a mapping that is in progress.
    ending: Option<u64>,
    retry_ms: u64,
}

/// What an agent does next.
pub(crate) enum Action {
    Call(Call),
    /// End the mapping, which takes some time.
    End {
        by_force: bool,
    },
}

/// How long a node tries to end a revoked mapping before it uses force, in seconds.
const FORCE_AFTER_S: u64 = 3;

/// After which time a claim is tried again that a client of another node has prevented.
const RETRY_MS: u64 = 2_000;

impl Node {
    pub(crate) fn new(name: String, mode: Mode) -> Self {
        Self {
            machine: name.clone(),
            name,
            mode,
            local: Local::default(),
            processes: BTreeMap::new(),
            strays: BTreeMap::new(),
            clients: 0,
            grant: None,
            permit: None,
            intent: None,
            calling: None,
            ending: None,
            retry_ms: 0,
        }
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.calling.is_some() || self.ending.is_some()
    }

    /// Decides the next action, with the number `op`. `is_cut` says whether the storage refuses a client.
    pub(crate) fn wake(
        &mut self,
        op: u64,
        is_reachable: bool,
        is_cut: impl Fn(&str) -> bool,
        now_ms: u64,
    ) -> Option<Action> {
        if self.is_busy() {
            return None;
        }
        let serving = self.local.mapping.as_mut().filter(|m| m.state == MappingState::Usable);
        if let Some(mapping) = serving.filter(|mapping| is_cut(&mapping.client)) {
            mapping.state = MappingState::CutOff;
        }
        if now_ms >= self.retry_ms {
            self.local.refusal.take_if(|(_, refusal)| !refusal.is_final());
        }
        let action = self.next_action(is_reachable, Time(now_ms / 1000))?;
        match &action {
            Action::Call(call) => self.calling = Some((op, call.clone(), self.intent.take())),
            Action::End { .. } => self.ending = Some(op),
        }
        Some(action)
    }

    fn next_action(&mut self, is_reachable: bool, now: Time) -> Option<Action> {
        let Some(read) = self.grant.clone() else {
            if is_reachable {
                return Some(Action::Call(Call::List));
            }
            return self.step(Grants::NotListed, now);
        };
        let grant = read.as_ref().map(|object| &object.stored);
        self.step(Grants::Listed { grant, is_reachable }, now)
    }

    fn step(&mut self, grants: Grants<'_>, now: Time) -> Option<Action> {
        let view = View {
            node: &self.name,
            machine: &self.machine,
            grants,
            local: &self.local,
            permit: self.permit.as_ref(),
            force_after_s: Some(FORCE_AFTER_S),
        };
        match next_step(&view, now) {
            Step::Wait => None,
            Step::ReadClaim => Some(Action::Call(Call::ReadRecord)),
            Step::Publish { version, entry, intent } => {
                if intent.is_some() || self.permit.as_ref().is_some_and(|p| !p.survives(&entry)) {
                    self.permit = None;
                }
                self.intent = intent;
                Some(Action::Call(Call::WriteEntry(version, entry)))
            }
            Step::Claim(generation) => {
                let claim = self.start_worker(generation);
                self.local.mapping = Some(Mapping {
                    generation,
                    client: claim.client.clone(),
                    device_path: "/dev/nbd0".to_owned(),
                    state: MappingState::Starting,
                    ending_since: None,
                });
                Some(Action::Call(Call::Claim(claim)))
            }
            Step::Reclaim(generation) => {
                let claim = self.start_worker(generation);
                Some(Action::Call(Call::Reclaim(claim)))
            }
            Step::Finish => {
                if let Some(mapping) = &mut self.local.mapping {
                    mapping.ending_since.get_or_insert(now);
                }
                // A mounted file system that is in use cannot be unmounted.
                (!self.local.wanted).then_some(Action::End { by_force: false })
            }
            Step::Force => Some(Action::End { by_force: true }),
            Step::Release(client) => Some(Action::Call(Call::Release(client))),
        }
    }

    fn start_worker(&mut self, generation: Generation) -> Claim {
        self.clients += 1;
        let client = format!("{}/{}", self.machine, self.clients);
        self.processes.insert(client.clone(), generation);
        Claim { node: self.name.clone(), generation, client, mode: self.mode }
    }

    /// Takes the answer of the call `op`; `None` if the call has timed out.
    pub(crate) fn answer(&mut self, op: u64, answer: Option<Answer>, now_ms: u64) {
        let calling = self.calling.take_if(|(calling, ..)| *calling == op);
        let Some((_, call, intent)) = calling else { return };
        match (call, answer) {
            (_, Some(Answer::Listed(read))) => self.grant = Some(read),
            (_, Some(Answer::Written(object))) => {
                let grant = &object.stored.grant;
                self.permit = self.permit.take().or_else(|| {
                    intent.and_then(|generation| Permit::from_answer(grant, &self.name, generation))
                });
                self.observe(object);
            }
            (Call::ReadRecord, Some(Answer::Record(record))) => {
                let own = record.claim_of(&self.name).map(|claim| claim.client.clone());
                self.local.claim = own.map_or(OwnClaim::None, OwnClaim::Held);
            }
            (Call::Release(_), Some(Answer::Released(true))) => self.local.claim = OwnClaim::None,
            (Call::Claim(claim) | Call::Reclaim(claim), Some(Answer::Claimed)) => {
                self.permit = None;
                self.local.claim = OwnClaim::Held(claim.client.clone());
                if let Some(mapping) = &mut self.local.mapping {
                    (mapping.state, mapping.client) = (MappingState::Usable, claim.client);
                }
            }
            (Call::Claim(claim), answer) => {
                self.processes.remove(&claim.client);
                self.local.mapping = None;
                self.local.claim = OwnClaim::Uncertain;
                let Some(Answer::Refused(refusal)) = answer else { return self.permit = None };
                self.retry_ms = now_ms + RETRY_MS;
                if refusal.is_final() {
                    self.permit = None;
                }
                self.local.refusal = Some((claim.generation, refusal));
            }
            (Call::Reclaim(claim), answer) => {
                self.processes.remove(&claim.client);
                let mapping = self.local.mapping.as_mut().filter(|_| answer.is_some());
                if let Some(mapping) = mapping {
                    mapping.state = MappingState::CutOff;
                }
            }
            (Call::Release(_) | Call::ReadRecord, _) => self.local.claim = OwnClaim::Uncertain,
            _ => self.grant = None,
        }
    }

    /// Takes the end of the mapping: all its processes have ended. Returns whether it ended.
    pub(crate) fn end_mapping(&mut self, op: u64) -> bool {
        let is_ended = self.ending.take_if(|ending| *ending == op).is_some();
        if is_ended && self.local.mapping.take().is_some() {
            self.processes.clear();
            self.local.claim = OwnClaim::Uncertain;
        }
        is_ended
    }

    /// Takes a newer object, from the watch or from the answer of a write. Before a list it is not used,
    /// because it may be old.
    pub(crate) fn observe(&mut self, object: Arc<Object>) {
        let Some(known) = &self.grant else { return };
        if known.as_ref().is_none_or(|known| known.revision < object.revision) {
            self.grant = Some(Some(object));
        }
    }

    pub(crate) fn lose_watch(&mut self) {
        self.grant = None;
    }

    /// Starts the agent again. Workers that serve stay; one that is still starting is ended.
    pub(crate) fn restart_agent(&mut self) {
        (self.grant, self.permit, self.calling, self.ending) = (None, None, None, None);
        let is_journaled =
            matches!(self.local.claim, OwnClaim::Held(_) | OwnClaim::Lost | OwnClaim::Uncertain);
        let is_journaled = is_journaled || self.local.mapping.is_some();
        self.local.claim = if is_journaled { OwnClaim::Lost } else { OwnClaim::Unread };
        self.local.refusal = None;
        let starting = self.local.mapping.take_if(|m| m.state == MappingState::Starting);
        if let Some(mapping) = starting {
            self.processes.remove(&mapping.client);
        }
        if let Some(mapping) = &mut self.local.mapping {
            mapping.ending_since = None;
            // A worker that was about to replace another one has ended with the agent.
            self.processes.retain(|client, _| *client == mapping.client);
        }
    }

    /// Returns the generation that the agent claims or may claim without another write.
    pub(crate) fn permitted(&self) -> Option<Generation> {
        let claiming = self.calling.as_ref().and_then(|(_, call, _)| match call {
            Call::Claim(claim) => Some(claim.generation),
            _ => None,
        });
        self.permit.as_ref().map(Permit::generation).or(claiming)
    }

    pub(crate) fn reboot(&mut self) {
        self.restart_agent();
        self.processes.clear();
        self.local.mapping = None;
    }

    /// Gives the name to another machine. The processes of the last one stand still.
    pub(crate) fn replace_machine(&mut self) {
        self.strays.append(&mut self.processes);
        self.reboot();
        self.forget();
        self.machine.push('+');
    }

    /// Loses the journal.
    pub(crate) fn forget(&mut self) {
        self.local.claim = OwnClaim::Unread;
    }

    /// Ends the worker. With `leaves_process`, the agent takes it for dead, and its requests may still arrive.
    pub(crate) fn crash_worker(&mut self, leaves_process: bool) {
        let serving = |mapping: &&mut Mapping| mapping.state == MappingState::Usable;
        let Some(mapping) = self.local.mapping.as_mut().filter(serving) else { return };
        mapping.state = MappingState::WorkerDead;
        if !leaves_process {
            self.processes.remove(&mapping.client);
        }
    }
}
