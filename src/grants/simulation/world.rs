//! A world: two controllers, the agents of some nodes, the API server and the storage, in virtual time. Every
//! message has a random delay, and may be lost or late. The same seed gives the same run.

mod acts;
mod checks;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

use super::api::Api;
use super::controllers::Controller;
use super::messages::{Actor, Answer, Call, Object};
use super::nodes::{Action, Node};
use super::scenario::{Act, Dice, FAULTS_END_MS, Kind, Scenario};
use super::storage::Storage;
use crate::controller::Request;
use crate::object::{Mode, Time};
use crate::policy::NodeState;
use crate::record::Refusal;
use checks::{Checks, unfinished};

/// When everything must have converged at the latest.
const CONVERGED_MS: u64 = FAULTS_END_MS + 90_000;

/// The longest time that a message and its answer are on their way, with a pause of the actor between.
const LATEST_MS: u64 = 2 * LATE_MS + 15_000;

/// The longest delay of a late message.
const LATE_MS: u64 = 8_000;

/// For how long nothing may be written afterwards.
const QUIET_MS: u64 = 20_000;

/// After which time a call has failed for its caller. It may still take effect.
const TIMEOUT_MS: u64 = 1_000;

/// How often each actor looks without a reason.
const TICK_MS: u64 = 1_000;

/// After which time a node that does not answer is not ready.
const NOT_READY_MS: u64 = 1_000;

#[derive(Debug, Clone)]
enum Event {
    Act(Act),
    Tick(Actor),
    Wake(Actor),
    Arrive { from: Actor, life: u32, op: u64, call: Call },
    Answer { to: Actor, life: u32, op: u64, answer: Answer },
    Timeout { to: Actor, life: u32, op: u64 },
    Watch { to: Actor, watch: u32, object: Arc<Object> },
    Requests(usize, u64, Arc<Vec<Request>>),
    Ended { node: usize, life: u32, op: u64, by_force: bool },
    Reopen(Actor, u32),
}

/// What the world knows of an actor.
#[derive(Debug, Default, Clone, Copy)]
struct Fate {
    /// Counts the starts.
    life: u32,
    /// Counts the watches; events of an earlier one are dropped.
    watch: u32,
    frozen_until: u64,
    cut_from_api_until: u64,
    cut_from_storage_until: u64,
    /// Since when the API server has no news of a node.
    silent_since: Option<u64>,
    will_wake: bool,
    /// The call after which the actor stands still, and for how long.
    stops_at: Option<(Kind, u64)>,
    /// The call that arrives late, and how late.
    delays: Option<(Kind, u64)>,
}

pub(crate) struct World<'a> {
    scenario: &'a Scenario,
    dice: Dice,
    now_ms: u64,
    queue: BTreeMap<(u64, u64), Event>,
    sent: u64,
    pub(super) api: Api,
    pub(super) storage: Storage,
    controllers: Vec<Controller>,
    pub(super) nodes: Vec<Node>,
    fates: BTreeMap<Actor, Fate>,
    requests: Vec<Request>,
    /// When the requests that each controller knows were sent.
    newest_requests: [u64; 2],
    tainted: BTreeSet<usize>,
    deleted: BTreeSet<usize>,
    api_down_until: u64,
    storage_down_until: u64,
    is_faulty: bool,
    /// How often each situation has occurred.
    pub(super) tally: BTreeMap<&'static str, u64>,
    pub(super) trace: Option<String>,
}

impl<'a> World<'a> {
    pub(crate) fn new(seed: u64, scenario: &'a Scenario, traces: bool) -> Self {
        let nodes = scenario.modes.iter().enumerate();
        let nodes: Vec<Node> = nodes.map(|(at, mode)| Node::new(format!("n{at}"), *mode)).collect();
        let actors = (0..2).map(Actor::Controller).chain((0..nodes.len()).map(Actor::Node));
        let fates = actors.map(|actor| (actor, Fate::default())).collect();
        let mut world = Self {
            scenario,
            dice: Dice::new(!seed),
            now_ms: 0,
            queue: BTreeMap::new(),
            sent: 0,
            api: Api::default(),
            storage: Storage::new(scenario.forgets),
            controllers: (0..2).map(|_| Controller::default()).collect(),
            nodes,
            fates,
            requests: Vec::new(),
            newest_requests: [0; 2],
            tainted: BTreeSet::new(),
            deleted: BTreeSet::new(),
            api_down_until: 0,
            storage_down_until: 0,
            is_faulty: true,
            tally: BTreeMap::new(),
            trace: traces.then(String::new),
        };
        for (at, act) in &scenario.acts {
            world.push(*at, Event::Act(*act));
        }
        for actor in world.fates.keys().copied().collect::<Vec<_>>() {
            let at = world.dice.below(TICK_MS);
            world.push(at, Event::Tick(actor));
        }
        world.send_requests();
        world
    }

    /// Runs the scenario. Returns the violation that ended it, if there was one.
    pub(crate) fn run(&mut self) -> Option<String> {
        let mut checks = Checks::default();
        while self.now_ms < FAULTS_END_MS {
            if let Some(violation) = self.step(&mut checks) {
                return Some(violation);
            }
        }
        self.heal();
        let mut problem = unfinished(self, &self.scenario.last);
        // Late messages of the faulty time may still change something.
        while problem.is_some() || self.now_ms < FAULTS_END_MS + LATEST_MS {
            if let Some(missing) = problem.filter(|_| self.now_ms > CONVERGED_MS) {
                return Some(format!("has not converged: {missing}"));
            }
            if let Some(violation) = self.step(&mut checks) {
                return Some(violation);
            }
            problem = unfinished(self, &self.scenario.last);
        }
        let writes = (self.api.writes, self.storage.revision);
        let quiet_until = self.now_ms + QUIET_MS;
        while self.now_ms < quiet_until {
            if let Some(violation) = self.step(&mut checks) {
                return Some(violation);
            }
        }
        if writes != (self.api.writes, self.storage.revision) {
            return Some("something is written although nothing changes".to_owned());
        }
        unfinished(self, &self.scenario.last).map(|why| format!("has diverged: {why}"))
    }

    fn step(&mut self, checks: &mut Checks) -> Option<String> {
        let ((at, _), event) = self.queue.pop_first()?;
        self.now_ms = at;
        if let Some(until) = self.frozen(&event) {
            self.push(until, event);
            return None;
        }
        if self.trace.is_some() && !matches!(event, Event::Tick(_) | Event::Wake(_)) {
            self.note(&format!("{event:?}"));
        }
        let violation = self.dispatch(event, checks);
        violation.or_else(|| checks.after_event(self))
    }

    /// Returns until when the actor of an event stands still.
    fn frozen(&self, event: &Event) -> Option<u64> {
        let actor = match event {
            Event::Tick(actor) | Event::Wake(actor) | Event::Reopen(actor, _) => *actor,
            Event::Answer { to, .. } | Event::Timeout { to, .. } | Event::Watch { to, .. } => *to,
            Event::Ended { node, .. } => Actor::Node(*node),
            Event::Requests(at, ..) => Actor::Controller(*at),
            Event::Act(_) | Event::Arrive { .. } => return None,
        };
        let until = self.fates[&actor].frozen_until;
        (until > self.now_ms).then_some(until)
    }

    fn dispatch(&mut self, event: Event, checks: &mut Checks) -> Option<String> {
        match event {
            Event::Act(act) => return self.act(act, checks),
            Event::Tick(actor) => {
                self.push(self.now_ms + TICK_MS, Event::Tick(actor));
                self.wake_soon(actor);
            }
            Event::Wake(actor) => {
                self.fate(actor).will_wake = false;
                return self.wake(actor);
            }
            Event::Arrive { from, life, op, call } => {
                return self.arrive(from, life, op, call, checks);
            }
            Event::Answer { to, life, op, answer } => self.answer(to, life, op, Some(answer)),
            Event::Timeout { to, life, op } => self.answer(to, life, op, None),
            Event::Watch { to, watch, object } => {
                if self.fates[&to].watch == watch {
                    match to {
                        Actor::Controller(at) => self.controllers[at].observe(object),
                        Actor::Node(at) => self.nodes[at].observe(object),
                    }
                    self.wake_soon(to);
                }
            }
            Event::Requests(at, sent, requests) => {
                let newest = &mut self.newest_requests[at];
                if sent > *newest {
                    *newest = sent;
                    self.controllers[at].requests = Some(requests);
                    self.wake_soon(Actor::Controller(at));
                }
            }
            Event::Ended { node, life, op, by_force } => {
                if self.fates[&Actor::Node(node)].life == life {
                    let violation = checks.before_end(self, node, by_force);
                    self.count(if by_force { "ended by force" } else { "ended" });
                    self.nodes[node].end_mapping(op);
                    self.wake_soon(Actor::Node(node));
                    return violation;
                }
            }
            Event::Reopen(actor, watch) => {
                if self.fates[&actor].watch == watch {
                    self.lose_watch(actor);
                }
            }
        }
        None
    }

    fn wake(&mut self, actor: Actor) -> Option<String> {
        let op = self.sent;
        let now_ms = self.now_ms;
        let call = match actor {
            Actor::Controller(at) => {
                if self.controllers[at].is_calling() {
                    return None;
                }
                let nodes = self.node_states();
                self.controllers[at].wake(op, &nodes, &self.scenario.policy, now_ms)
            }
            Actor::Node(at) => {
                let is_reachable = self.reaches_api(actor);
                let reaches_storage = self.reaches_storage(actor);
                let is_cut = |client: &str| reaches_storage && self.storage.is_cut(client);
                match self.nodes[at].wake(op, is_reachable, is_cut, now_ms) {
                    Some(Action::Call(call)) => Some(call),
                    Some(Action::End { by_force }) => {
                        let life = self.fates[&actor].life;
                        let delay = self.dice.below(if by_force { 100 } else { 500 });
                        self.push(now_ms + delay, Event::Ended { node: at, life, op, by_force });
                        None
                    }
                    None => None,
                }
            }
        };
        if let Some(call) = call {
            self.send(actor, op, call);
        }
        None
    }

    fn send(&mut self, from: Actor, op: u64, call: Call) {
        let life = self.fates[&from].life;
        self.push(self.now_ms + TIMEOUT_MS, Event::Timeout { to: from, life, op });
        let stops = self.fates[&from].stops_at;
        let stops = stops.filter(|(kind, _)| self.is_faulty && call.kind() == Some(*kind));
        let delays = self.fates[&from].delays;
        let delays = delays.filter(|(kind, _)| self.is_faulty && call.kind() == Some(*kind));
        let at = match (stops, delays) {
            (None, Some((_, ms))) => {
                self.fate(from).delays = None;
                Some(self.now_ms + ms)
            }
            (Some((_, ms)), _) => {
                let now_ms = self.now_ms;
                let fate = self.fate(from);
                (fate.stops_at, fate.frozen_until) = (None, now_ms + ms);
                Some(now_ms + self.dice.below(ms))
            }
            (None, None) => self.delivery(),
        };
        if let Some(at) = at {
            self.push(at, Event::Arrive { from, life, op, call });
        }
    }

    /// Returns when a message that is sent now arrives; `None` if it is lost.
    fn delivery(&mut self) -> Option<u64> {
        let roll = self.dice.below(1_000);
        let delay = 1 + self.dice.below(20);
        let Scenario { lost_per_mille, late_per_mille, .. } = self.scenario;
        if !self.is_faulty || roll >= lost_per_mille + late_per_mille {
            return Some(self.now_ms + delay);
        }
        (roll >= *lost_per_mille).then(|| self.now_ms + delay + self.dice.below(LATE_MS))
    }

    fn arrive(
        &mut self,
        from: Actor,
        life: u32,
        op: u64,
        call: Call,
        checks: &mut Checks,
    ) -> Option<String> {
        let is_for_storage = call.is_for_storage();
        let is_open = if is_for_storage {
            self.now_ms >= self.storage_down_until
        } else {
            self.now_ms >= self.api_down_until
        };
        if !is_open || !self.network(from, is_for_storage) {
            return None;
        }
        let mut violation = None;
        let answer = if is_for_storage {
            let is_alive = match (&call, from) {
                (Call::Claim(claim) | Call::Reclaim(claim), Actor::Node(at)) => {
                    self.nodes[at].processes.contains_key(&claim.client)
                }
                _ => true,
            };
            let answer = self.storage.call(call, is_alive);
            violation = checks.after_fencing(&mut self.storage);
            answer
        } else if call == Call::List {
            let age = if self.is_faulty && self.dice.one_in(4) { 3 } else { 0 };
            Answer::Listed(self.api.list(age))
        } else {
            self.write(call, checks, &mut violation)
        };
        self.count(situation(&answer));
        if let Some(at) = self.delivery() {
            self.push(at, Event::Answer { to: from, life, op, answer });
        }
        violation
    }

    fn write(&mut self, call: Call, checks: &mut Checks, violation: &mut Option<String>) -> Answer {
        let before = self.api.object().as_ref().map(|object| object.revision);
        let answer = self.api.write(call);
        if let Answer::Written(object) = &answer
            && before != Some(object.revision)
        {
            *violation = checks.after_write(self, object);
            checks.changes().into_iter().for_each(|change| self.count(change));
            self.publish(&object.clone());
        }
        answer
    }

    /// Sends a new state of the object to every watch.
    fn publish(&mut self, object: &Arc<Object>) {
        for to in self.fates.keys().copied().collect::<Vec<_>>() {
            let watch = self.fates[&to].watch;
            match self.delivery().filter(|_| self.network(to, false)) {
                Some(at) => self.push(at, Event::Watch { to, watch, object: object.clone() }),
                None => self.reopen_later(to),
            }
        }
    }

    fn reopen_watch(&mut self, actor: Actor) {
        self.fate(actor).watch += 1;
        let watch = self.fates[&actor].watch;
        if let (Some(object), Some(at)) = (self.api.object().clone(), self.delivery()) {
            // The list may be old; the watch brings what came after it.
            self.push(at + 30, Event::Watch { to: actor, watch, object });
        } else {
            self.reopen_later(actor);
        }
    }

    /// The watch has lost an event: the client opens it again at some time.
    fn reopen_later(&mut self, actor: Actor) {
        let at = self.now_ms + 50 + self.dice.below(3_000);
        let watch = self.fates[&actor].watch;
        self.push(at, Event::Reopen(actor, watch));
    }

    fn lose_watch(&mut self, actor: Actor) {
        match actor {
            Actor::Controller(at) => self.controllers[at].lose_watch(),
            Actor::Node(at) => self.nodes[at].lose_watch(),
        }
        self.wake_soon(actor);
    }

    fn answer(&mut self, to: Actor, life: u32, op: u64, answer: Option<Answer>) {
        if self.fates[&to].life != life {
            return;
        }
        if matches!(answer, Some(Answer::Listed(_))) {
            self.reopen_watch(to);
        }
        match to {
            Actor::Controller(at) => self.controllers[at].answer(op, answer),
            Actor::Node(at) => self.nodes[at].answer(op, answer, self.now_ms),
        }
        self.wake_soon(to);
    }

    fn node_states(&mut self) -> BTreeMap<String, NodeState> {
        let now_ms = self.now_ms;
        let mut states = BTreeMap::new();
        for at in 0..self.nodes.len() {
            let actor = Actor::Node(at);
            let is_silent = self.fates[&actor].frozen_until > now_ms || !self.reaches_api(actor);
            let fate = self.fate(actor);
            let since = is_silent.then(|| fate.silent_since.unwrap_or(now_ms));
            fate.silent_since = since;
            let silent_ms = since.map_or(0, |since| now_ms - since);
            let timeout_ms = self.scenario.policy.lease_timeout_s.map(|timeout_s| timeout_s * 1000);
            let is_stale = since.zip(timeout_ms).is_some_and(|(since, ms)| now_ms >= since + ms);
            let not_ready_since = since.filter(|since| now_ms >= since + NOT_READY_MS);
            let state = NodeState {
                out_of_service: self.tainted.contains(&at),
                not_ready_since: not_ready_since.map(|since| Time(since / 1000)),
                silent_s: Some(silent_ms / 1000),
                lost: self.scenario.remediates && is_stale,
            };
            if !self.deleted.contains(&at) {
                states.insert(self.nodes[at].name.clone(), state);
            }
        }
        states
    }

    fn reaches_api(&self, actor: Actor) -> bool {
        self.now_ms >= self.api_down_until && self.network(actor, false)
    }

    fn reaches_storage(&self, actor: Actor) -> bool {
        self.now_ms >= self.storage_down_until && self.network(actor, true)
    }

    fn network(&self, actor: Actor, to_storage: bool) -> bool {
        let fate = &self.fates[&actor];
        let cut = if to_storage { fate.cut_from_storage_until } else { fate.cut_from_api_until };
        self.now_ms >= cut
    }

    fn fate(&mut self, actor: Actor) -> &mut Fate {
        self.fates.get_mut(&actor).expect("every actor has one")
    }

    fn wake_soon(&mut self, actor: Actor) {
        if !self.fates[&actor].will_wake {
            self.fate(actor).will_wake = true;
            let delay = 1 + self.dice.below(10);
            self.push(self.now_ms + delay, Event::Wake(actor));
        }
    }

    fn push(&mut self, at: u64, event: Event) {
        self.sent += 1;
        self.queue.insert((at, self.sent), event);
    }

    /// Returns how a node uses the volume.
    pub(super) fn mode_of(&self, node: &str) -> Mode {
        let node = self.nodes.iter().find(|known| known.name == node);
        node.map_or(Mode::ReadWrite, |node| node.mode)
    }

    /// Returns the client of a mapping on `node` that was fenced; `None` if there is none.
    pub(super) fn left_of_a_fence(&self, node: &str) -> Option<&str> {
        let node = self.nodes.iter().find(|known| known.name == node)?;
        let mapping = node.local.mapping.as_ref()?;
        let client = mapping.client.as_str();
        let seals = &self.storage.record.seals;
        seals.iter().any(|seal| seal.client.as_deref() == Some(client)).then_some(client)
    }

    fn count(&mut self, situation: &'static str) {
        *self.tally.entry(situation).or_default() += 1;
    }

    pub(crate) fn note(&mut self, text: &str) {
        let now = self.now_ms;
        if let Some(trace) = &mut self.trace {
            let _ = writeln!(trace, "{:>4}.{:03} {text}", now / 1000, now % 1000);
        }
    }
}

/// Names what an answer shows.
fn situation(answer: &Answer) -> &'static str {
    match answer {
        Answer::Conflict => "conflict",
        Answer::Cut(Some(_), _) => "client cut off",
        Answer::Cut(None, _) => "fenced before a claim",
        Answer::Released(true) => "released",
        Answer::Refused(Refusal::Superseded(_)) => "superseded",
        Answer::Refused(Refusal::Sealed) => "refused: sealed",
        Answer::Refused(Refusal::ClaimedElsewhere(_)) => "claimed elsewhere",
        Answer::Claimed => "claimed",
        _ => "other",
    }
}
