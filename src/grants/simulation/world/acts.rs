//! What the events of a scenario do to a world, and the end of all failures.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Checks, Event, World};
use crate::controller::Request;
use crate::simulation::messages::Actor;
use crate::simulation::scenario::Act;

impl World<'_> {
    pub(super) fn act(&mut self, act: Act, checks: &mut Checks) -> Option<String> {
        let now_ms = self.now_ms;
        match act {
            Act::Attach(node) => {
                self.nodes[node].local.wanted = true;
                self.request(node, true);
            }
            Act::Detach(node) => {
                self.nodes[node].local.wanted = false;
                self.request(node, false);
            }
            Act::Withdraw(node) => self.request(node, false),
            Act::Stage(node) => self.nodes[node].local.wanted = true,
            Act::Unstage(node) => self.nodes[node].local.wanted = false,
            Act::Freeze(node, ms) => {
                self.fate(Actor::Node(node)).frozen_until = now_ms + ms;
            }
            Act::CutFromApi(node, ms) => {
                self.fate(Actor::Node(node)).cut_from_api_until = now_ms + ms;
            }
            Act::CutFromStorage(node, ms) => {
                self.fate(Actor::Node(node)).cut_from_storage_until = now_ms + ms;
            }
            Act::RestartAgent(node) => {
                self.fate(Actor::Node(node)).life += 1;
                self.nodes[node].restart_agent();
            }
            Act::Reboot(node) | Act::Reinstall(node) => {
                self.fate(Actor::Node(node)).life += 1;
                self.fate(Actor::Node(node)).frozen_until = now_ms + 500;
                self.nodes[node].reboot();
                if matches!(act, Act::Reinstall(_)) {
                    self.nodes[node].forget();
                }
            }
            Act::ReplaceMachine(node) => self.replace_machine(node),
            Act::CrashWorker(node, leaves_process) => self.nodes[node].crash_worker(leaves_process),
            Act::Taint(node, is_on) => set(&mut self.tainted, node, is_on),
            Act::Delete(node, is_on) => set(&mut self.deleted, node, is_on),
            Act::ApiDown(ms) => self.api_down_until = now_ms + ms,
            Act::StorageDown(ms) => self.storage_down_until = now_ms + ms,
            Act::DropWatches => self.drop_watches(),
            Act::FreezeAt(node, kind, ms) => {
                self.fate(Actor::Node(node)).stops_at = Some((kind, ms));
            }
            Act::PauseAt(at, kind, ms) => {
                self.fate(Actor::Controller(at)).stops_at = Some((kind, ms));
            }
            Act::DelayAt(node, kind, ms) => {
                self.fate(Actor::Node(node)).delays = Some((kind, ms));
            }
            Act::PauseController(at, ms) => {
                self.fate(Actor::Controller(at)).frozen_until = now_ms + ms;
            }
            Act::RestartController(at) => {
                self.fate(Actor::Controller(at)).life += 1;
                self.controllers[at].restart();
            }
            Act::Backup => self.api.take_backup(),
            Act::Restore => {
                if self.api.restore() {
                    checks.after_restore(self);
                    self.drop_watches();
                }
            }
        }
        None
    }

    /// Does nothing while a client of the node may still write: only its own machine can release such a claim, so
    /// that only fencing could end it, which the policy may not permit.
    fn replace_machine(&mut self, at: usize) {
        let processes = &self.nodes[at].processes;
        if processes.is_empty() || !processes.keys().all(|client| self.storage.is_cut(client)) {
            return;
        }
        self.count("machine replaced");
        let fate = self.fate(Actor::Node(at));
        fate.life += 1;
        fate.frozen_until = 0;
        self.nodes[at].replace_machine();
    }

    fn drop_watches(&mut self) {
        for actor in self.fates.keys().copied().collect::<Vec<_>>() {
            self.fate(actor).watch += 1;
            self.reopen_later(actor);
        }
    }

    fn request(&mut self, node: usize, is_requested: bool) {
        let name = self.nodes[node].name.clone();
        let known = self.requests.iter().any(|request| request.node == name);
        if is_requested && !known {
            let mode = self.nodes[node].mode;
            self.requests.push(Request { node: name, mode, pod_uids: Vec::new() });
        } else if !is_requested {
            self.requests.retain(|request| request.node != name);
        }
        self.send_requests();
    }

    pub(super) fn send_requests(&mut self) {
        let requests = Arc::new(self.requests.clone());
        for at in 0..self.controllers.len() {
            let delay = self.dice.below(200);
            let sent = self.sent + 1;
            self.push(self.now_ms + delay, Event::Requests(at, sent, requests.clone()));
        }
    }

    /// Ends all failures and sets the state that must be reached.
    pub(super) fn heal(&mut self) {
        self.note("the failures end");
        self.is_faulty = false;
        (self.api_down_until, self.storage_down_until) = (0, 0);
        (self.tainted, self.deleted) = (BTreeSet::new(), BTreeSet::new());
        for fate in self.fates.values_mut() {
            fate.frozen_until = self.now_ms;
            (fate.cut_from_api_until, fate.cut_from_storage_until) = (0, 0);
        }
        for controller in &mut self.controllers {
            controller.sweep_again();
        }
        for node in 0..self.nodes.len() {
            let is_last = self.scenario.last.contains(&node);
            self.nodes[node].local.wanted = is_last;
            self.request(node, is_last);
        }
        self.drop_watches();
        for actor in self.fates.keys().copied().collect::<Vec<_>>() {
            self.push(self.now_ms, Event::Tick(actor));
        }
    }
}

fn set(nodes: &mut BTreeSet<usize>, node: usize, is_on: bool) {
    if is_on {
        nodes.insert(node);
    } else {
        nodes.remove(&node);
    }
}
