//! The planner against a model of the world that fails, loses and is meddled with at every step.

use proptest::prelude::*;

use super::*;
use cleat_core::policy::Policy;
use cleat_kernel::{Holder, UnmountScope};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ModelWorker {
    None,
    /// Serves this many connections of the device of its mapping.
    Alive(u32),
    /// Does not answer the supervisor, and serves.
    Hung,
    Dead,
}

#[derive(Debug, Clone)]
struct World {
    record: Option<Record>,
    /// (carries our identity, sockets that somebody serves)
    devices: Vec<(bool, u32)>,
    worker: ModelWorker,
    /// Of a hand-over that was cut short: the old worker, and whether the new one has taken over.
    predecessor: ModelWorker,
    handed_over: bool,
    fenced: bool,
    in_use_error: bool,
    paths_known: bool,
    failures: u32,
    /// Content that a dead worker took with it.
    lost: bool,
    /// Set when the device works on content that is not the one it had.
    replaced_by_zeroes: bool,
}

pub(crate) fn record(connections: u32, outlives_worker: bool) -> Record {
    Record {
        version: Record::VERSION,
        mapping_id: "00c1ea70".into(),
        name: "v".into(),
        uri: "file:/v".into(),
        options: Options {
            read_only: false,
            connections,
            block_size: 0,
            dead_connection_timeout_s: 60,
            replay_delay_ms: 1000,
            policy: Policy::default(),
            quiesce: false,
        },
        intent: Intent::Mapped,
        generation: 0,
        worker: None,
        predecessor: None,
        volume: Some(DeviceProperties {
            size: 1 << 20,
            block_size: 512,
            transmission_flags: 1,
            outlives_worker,
        }),
        established: false,
        fenced: false,
        quiesced: None,
        created_at_s: 0,
        boot_id: "boot".into(),
    }
}

impl World {
    /// A mapping with its device, whose worker has died.
    fn of(record: Record) -> Self {
        Self {
            record: Some(record),
            devices: vec![(true, 0)],
            worker: ModelWorker::Dead,
            predecessor: ModelWorker::None,
            handed_over: false,
            fenced: false,
            in_use_error: false,
            paths_known: true,
            failures: 0,
            lost: false,
            replaced_by_zeroes: false,
        }
    }

    fn observe(&self) -> Observed {
        let ours = self.devices.iter().enumerate().filter(|(_, device)| device.0);
        Observed {
            devices: ours
                .map(|(index, _)| ObservedDevice {
                    index: u32::try_from(index).unwrap(),
                    size: 1 << 20,
                })
                .collect(),
            worker: match self.worker {
                ModelWorker::None | ModelWorker::Dead => ObservedWorker::Gone,
                ModelWorker::Alive(_) if self.fenced => ObservedWorker::Fenced,
                ModelWorker::Alive(connections) => {
                    ObservedWorker::Alive { connections, size: 1 << 20 }
                }
                ModelWorker::Hung => {
                    ObservedWorker::Unreachable { pid: 7, reason: "does not answer".into() }
                }
            },
            predecessor: match self.predecessor {
                ModelWorker::None | ModelWorker::Dead => ObservedWorker::Gone,
                ModelWorker::Alive(connections) => {
                    ObservedWorker::Alive { connections, size: 1 << 20 }
                }
                ModelWorker::Hung => {
                    ObservedWorker::Unreachable { pid: 6, reason: "does not answer".into() }
                }
            },
            handed_over: (self.record.as_ref().is_some_and(|record| record.predecessor.is_some())
                && [self.worker, self.predecessor]
                    .iter()
                    .any(|worker| matches!(worker, ModelWorker::Alive(_))))
            .then_some(self.handed_over),
            holders: if self.in_use_error {
                vec![Holder::Process { pid: 1, command: "fio".into() }]
            } else {
                Vec::new()
            },
            paths_known: self.paths_known,
            failures: self.failures,
            history: String::new(),
            unserved_too_long: false,
            refusing: false,
            resize_deferred: false,
            quiesced: ObservedQuiesce::default(),
            connecting: false,
        }
    }

    /// Carries out one action; `fail` makes it fail half way, as far as it can be half done.
    fn apply(&mut self, action: Action, fail: bool) -> Result<(), ()> {
        let ours_count = self.devices.iter().filter(|device| device.0).count();
        let record = self.record.as_mut().expect("no action without a record");
        match action {
            Action::StartWorker => return self.start_worker(ours_count, fail),
            Action::Connect => {
                assert_eq!(ours_count, 0, "a second device");
                if fail {
                    return Err(());
                }
                let ModelWorker::Alive(connections) = &mut self.worker else { return Err(()) };
                *connections = record.options.connections;
                self.devices.push((true, record.options.connections));
            }
            Action::WaitForDevice
            | Action::RecordMapped
            | Action::RecordUnmapping
            | Action::StopWorker
            | Action::StopPredecessor
            | Action::RestorePredecessor
                if fail =>
            {
                return Err(());
            }
            Action::WaitForDevice => self.paths_known = true,
            Action::RecordMapped => record.established = true,
            Action::Reconnect { index, missing } => {
                let device = &mut self.devices[index as usize];
                assert!(device.0, "sockets for a device of another identity");
                // The kernel takes what is dead and drops the rest.
                let handed_over = if fail { missing / 2 } else { missing };
                let ModelWorker::Alive(connections) = &mut self.worker else { return Err(()) };
                *connections += handed_over;
                device.1 = *connections;
                if handed_over < missing {
                    return Err(());
                }
            }
            // Kept, when it says how.
            Action::RecordUnmapping if record.intent != Intent::Mapped => {}
            Action::GrowDevice { .. } => unreachable!("the model's volume keeps its size"),
            Action::RefuseIo { .. } => unreachable!("the model has no time"),
            Action::RecordFenced if fail => return Err(()),
            Action::RecordFenced => record.fenced = true,
            Action::RecordUnmapping => record.intent = Intent::Unmapped,
            Action::Flush(index) => {
                assert!(self.devices[index as usize].0);
                if fail || !matches!(self.worker, ModelWorker::Alive(1..) | ModelWorker::Hung) {
                    return Err(());
                }
            }
            Action::Disconnect(index) => {
                assert!(self.devices[index as usize].0, "disconnects another's device");
                if fail || self.in_use_error {
                    return Err(());
                }
                self.devices[index as usize] = (false, 0);
            }
            Action::StopWorker | Action::StopPredecessor | Action::RestorePredecessor => {
                self.change_workers(action);
            }
            Action::RemoveRecord => {
                assert_eq!(ours_count, 0, "a device without a record");
                assert!(matches!(self.worker, ModelWorker::None | ModelWorker::Dead));
                if fail {
                    return Err(());
                }
                self.record = None;
            }
            Action::WaitForConnect => {}
            forced => return self.apply_forced(forced, fail),
        }
        Ok(())
    }

    /// The actions of an unmap by force.
    fn apply_forced(&mut self, action: Action, fail: bool) -> Result<(), ()> {
        let forced = self.record.as_ref().is_some_and(|r| matches!(r.intent, Intent::Forced(_)));
        assert!(forced, "{action:?} without being asked");
        match action {
            // One that does not answer is killed.
            Action::FailIo if self.worker == ModelWorker::Hung && !fail => {
                self.worker = ModelWorker::Dead;
            }
            Action::FailIo | Action::Unmount(..) => {}
            Action::ForceDisconnect(_) if fail => return Err(()),
            Action::ForceDisconnect(index) => {
                // It may have gone already; another's is not touched.
                if self.devices[index as usize].0 {
                    self.devices[index as usize] = (false, 0);
                }
            }
            Action::ProveNoWrites => {
                assert!(matches!(self.worker, ModelWorker::None | ModelWorker::Dead));
                if fail {
                    return Err(());
                }
            }
            other => panic!("{other:?} is none of them"),
        }
        Ok(())
    }

    /// What ends a hand-over, one way or the other.
    fn change_workers(&mut self, action: Action) {
        let record = self.record.as_mut().expect("no action without a record");
        match action {
            Action::StopWorker => {
                let serves = record.predecessor.is_none() || self.handed_over;
                assert!(!serves || record.intent != Intent::Mapped, "ends who serves");
                self.worker = ModelWorker::Dead;
            }
            Action::StopPredecessor => {
                let serves = matches!(self.predecessor, ModelWorker::Alive(_) | ModelWorker::Hung);
                assert!(!serves || self.handed_over, "ends who serves");
                self.predecessor = ModelWorker::None;
                record.predecessor = None;
            }
            Action::RestorePredecessor => {
                assert!(matches!(self.worker, ModelWorker::None | ModelWorker::Dead));
                assert!(!self.handed_over || !matches!(self.predecessor, ModelWorker::Alive(_)));
                record.worker = record.predecessor.take();
                self.worker = std::mem::replace(&mut self.predecessor, ModelWorker::None);
            }
            _ => unreachable!("{action:?} is not about workers"),
        }
    }

    fn start_worker(&mut self, devices: usize, fail: bool) -> Result<(), ()> {
        let free = matches!(self.worker, ModelWorker::None | ModelWorker::Dead);
        assert!(free, "a second worker beside {:?}", self.worker);
        let record = self.record.as_mut().expect("no action without a record");
        assert!(record.predecessor.is_none(), "a third worker");
        record.generation += 1;
        if fail {
            self.worker = ModelWorker::Dead;
            return Err(());
        }
        self.replaced_by_zeroes |= !record.volume.expect("set").outlives_worker && devices > 0;
        self.worker = ModelWorker::Alive(0);
        Ok(())
    }

    /// Plans and applies until the planner rests; `meddle` gives, per action, what goes wrong.
    fn run(&mut self, meddle: &mut dyn Iterator<Item = u8>, rounds: u32) -> Option<State> {
        for _ in 0..rounds {
            let Some(record) = &self.record else { return Some(State::Unmapped) };
            let plan = plan(record, &self.observe());
            assert_eq!(plan, super::plan(record, &self.observe()), "the planner is a function");
            if plan.actions.is_empty() {
                return Some(plan.state);
            }
            for action in plan.actions {
                let failure = meddle.next().unwrap_or(0);
                self.meddle(failure);
                if self.apply_if_possible(action, failure == 1).is_err() {
                    self.failures += 1;
                    break;
                }
            }
        }
        None
    }

    /// Meddling may have taken away what the action was planned for; the executor checks the same.
    fn apply_if_possible(&mut self, action: Action, fail: bool) -> Result<(), ()> {
        let index = match action {
            Action::Reconnect { index, .. } | Action::Flush(index) | Action::Disconnect(index) => {
                Some(index)
            }
            _ => None,
        };
        if index.is_some_and(|index| !self.devices[index as usize].0) {
            return Err(());
        }
        self.apply(action, fail)
    }

    fn meddle(&mut self, failure: u8) {
        match failure {
            2 if self.worker != ModelWorker::None => {
                self.worker = ModelWorker::Dead;
                self.devices.iter_mut().for_each(|device| device.1 = 0);
                self.lost |= !self.record.as_ref().is_some_and(|record| {
                    record.volume.is_some_and(|volume| volume.outlives_worker)
                });
            }
            3 if matches!(self.worker, ModelWorker::Alive(_)) => self.worker = ModelWorker::Hung,
            4 => self.in_use_error = !self.in_use_error,
            5 => {
                for device in self.devices.iter_mut().filter(|device| device.0) {
                    *device = (false, 0);
                }
                if let ModelWorker::Alive(connections) = &mut self.worker {
                    *connections = 0;
                }
            }
            6 => {
                if let ModelWorker::Alive(connections) = &mut self.worker {
                    *connections = connections.saturating_sub(1);
                }
            }
            7 => self.paths_known = false,
            8 => self.fenced = true,
            9 => {
                if matches!(self.predecessor, ModelWorker::Alive(_) | ModelWorker::Hung) {
                    self.predecessor = ModelWorker::Dead;
                    self.lost |= !self.handed_over;
                }
            }
            10 if matches!(self.predecessor, ModelWorker::Alive(_)) => {
                self.predecessor = ModelWorker::Hung;
            }
            _ => {}
        }
    }
}

pub(crate) fn established(connections: u32, outlives_worker: bool) -> Record {
    Record { established: true, ..record(connections, outlives_worker) }
}

/// A mapping's device and worker, with nothing special about them.
pub(crate) fn seen(worker: ObservedWorker) -> Observed {
    Observed {
        devices: vec![ObservedDevice { index: 3, size: 1 << 20 }],
        worker,
        predecessor: ObservedWorker::Gone,
        handed_over: None,
        holders: Vec::new(),
        paths_known: true,
        failures: 0,
        history: String::new(),
        unserved_too_long: false,
        refusing: false,
        resize_deferred: false,
        quiesced: ObservedQuiesce::default(),
        connecting: false,
    }
}

const OLD: WorkerId = WorkerId { pid: 6, started_ticks: 6 };

fn intents() -> impl Strategy<Value = Intent> {
    let forced = [UnmountScope::All, UnmountScope::Own, UnmountScope::None].map(Intent::Forced);
    prop_oneof![
        2 => Just(Intent::Mapped),
        2 => Just(Intent::Unmapped),
        1 => proptest::sample::select(forced.to_vec()),
    ]
}

fn worlds() -> impl Strategy<Value = World> {
    let one = || {
        prop_oneof![
            Just(ModelWorker::None),
            (0u32..5).prop_map(ModelWorker::Alive),
            Just(ModelWorker::Hung),
            Just(ModelWorker::Dead),
        ]
    };
    let worker = (one(), proptest::option::of((one(), any::<bool>())));
    let devices = proptest::collection::vec((any::<bool>(), 0u32..5), 0..4);
    let bits = proptest::array::uniform4(any::<bool>());
    (worker, devices, bits, intents(), 1u32..5, 0..MAX_FAILURES + 2).prop_map(
        |(
            (worker, handing),
            devices,
            [outlives, established, in_use_error, paths_known],
            intent,
            n,
            failures,
        )| {
            let mut record = record(n, outlives);
            record.established = established;
            record.intent = intent;
            let worker = match worker {
                ModelWorker::Alive(connections) => ModelWorker::Alive(connections.min(n)),
                other => other,
            };
            let (predecessor, handed_over) = handing.unwrap_or((ModelWorker::None, false));
            record.predecessor = handing.map(|_| OLD);
            let record = Some(record);
            let (fenced, lost, replaced_by_zeroes) = (false, false, false);
            World {
                record,
                devices,
                worker,
                predecessor,
                handed_over,
                fenced,
                in_use_error,
                paths_known,
                failures,
                lost,
                replaced_by_zeroes,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// From every state, after any meddling, the planner comes to rest in a state that it keeps,
    /// and that says the truth.
    #[test]
    fn comes_to_rest_and_tells_the_truth(
        mut world in worlds(),
        troubles in proptest::collection::vec(0u8..11, 0..24),
        then in intents(),
    ) {
        let others: Vec<_> = world.devices.iter().map(|device| !device.0).collect();
        world.run(&mut troubles.into_iter(), 40);
        let then_unmap = then != Intent::Mapped;
        // What was begun by force is not taken back.
        let begun = world.record.as_ref().map(|record| record.intent);
        let forced = matches!(begun, Some(Intent::Forced(_)));
        if let Some(record) = world.record.as_mut().filter(|_| then_unmap && !forced) {
            record.intent = then;
        }
        let forced = forced || matches!(then, Intent::Forced(_));
        let rest = world.run(&mut std::iter::empty(), 20).expect("comes to rest");
        let again = world.clone().run(&mut std::iter::empty(), 1).expect("stays at rest");
        prop_assert_eq!(&rest, &again);
        match rest {
            State::Mapped => {
                let ours: Vec<_> = world.devices.iter().filter(|device| device.0).collect();
                prop_assert_eq!(ours.len(), 1);
                let wanted = world.record.as_ref().expect("kept").options.connections;
                prop_assert!(matches!(world.worker, ModelWorker::Alive(n) if n >= wanted));
                let record = world.record.expect("kept");
                prop_assert!(record.established && record.predecessor.is_none());
                prop_assert!(!record.fenced);
            }
            State::Unmapped => {
                prop_assert!(!world.devices.iter().any(|device| device.0));
                for worker in [world.worker, world.predecessor] {
                    prop_assert!(matches!(worker, ModelWorker::None | ModelWorker::Dead));
                }
            }
            State::Held(holders) => {
                prop_assert!(world.in_use_error && !holders.is_empty() && !forced);
            }
            State::Failed(failure) => {
                prop_assert!(!failure.message.is_empty() && !failure.repair.is_empty());
                // Of two that do not answer, nobody can tell which one serves.
                let blind = world.worker == ModelWorker::Hung
                    && world.record.as_ref().is_some_and(|record| record.predecessor.is_some());
                prop_assert!(!then_unmap || blind && !forced, "unmap ends unmapped or held: {:?}", failure);
            }
            other => prop_assert!(false, "rests in {:?}", other),
        }
        prop_assert!(!world.replaced_by_zeroes);
        for (index, other) in others.iter().enumerate() {
            // Devices of others were not in the way: each is as it was.
            prop_assert!(!other || !world.devices[index].0);
        }
    }

    /// Without trouble, a new mapping works after one plan and is gone after another.
    #[test]
    fn maps_and_unmaps_in_one_plan_each(connections in 1u32..16, outlives in any::<bool>()) {
        let mut world = World {
            devices: vec![(false, 3)],
            worker: ModelWorker::None,
            paths_known: false,
            ..World::of(record(connections, outlives))
        };
        prop_assert_eq!(world.run(&mut std::iter::empty(), 2), Some(State::Mapped));
        world.record.as_mut().expect("kept").intent = Intent::Unmapped;
        prop_assert_eq!(world.run(&mut std::iter::empty(), 2), Some(State::Unmapped));
        prop_assert_eq!(world.devices[0], (false, 3));
    }
}

#[test]
fn a_dead_worker_is_replaced_and_its_generation_raised() {
    let mut world = World { in_use_error: true, ..World::of(established(2, true)) };
    let plan = plan(world.record.as_ref().unwrap(), &world.observe());
    assert_eq!(plan.state, State::Recovering);
    assert_eq!(plan.actions, [Action::StartWorker, Action::Reconnect { index: 0, missing: 2 }]);
    assert_eq!(world.run(&mut std::iter::empty(), 3), Some(State::Mapped));
    assert_eq!(world.record.unwrap().generation, 1);
}

#[test]
fn memory_that_died_is_lost_and_said_so() {
    let mut world = World { in_use_error: true, lost: true, ..World::of(established(1, false)) };
    let Some(State::Failed(failure)) = world.run(&mut std::iter::empty(), 3) else {
        panic!("not failed")
    };
    assert!(failure.message.contains("content"), "{}", failure.message);
    // While it is held it stays; then it goes.
    world.record.as_mut().unwrap().intent = Intent::Unmapped;
    assert!(matches!(world.run(&mut std::iter::empty(), 3), Some(State::Held(_))));
    world.in_use_error = false;
    assert_eq!(world.run(&mut std::iter::empty(), 3), Some(State::Unmapped));
}

#[test]
fn a_device_that_somebody_took_away_is_not_made_again_in_silence() {
    let mut world = World {
        devices: Vec::new(),
        worker: ModelWorker::Alive(0),
        ..World::of(established(1, true))
    };
    assert!(matches!(world.run(&mut std::iter::empty(), 3), Some(State::Failed(_))));
    assert!(world.devices.is_empty());
}

#[test]
fn what_a_worker_out_of_reach_has_answered_is_flushed_before_it_is_killed() {
    let mut record = record(1, true);
    record.intent = Intent::Unmapped;
    record.established = true;
    let observed =
        seen(ObservedWorker::Unreachable { pid: 7, reason: "speaks another version".into() });
    let actions = plan(&record, &observed).actions;
    assert_eq!(actions[..2], [Action::Flush(3), Action::RecordUnmapping]);
    assert_eq!(actions[3..], [Action::StopWorker, Action::RemoveRecord]);
}

#[test]
fn by_force_the_worker_goes_last_and_nothing_is_waited_for() {
    let mut record = record(1, true);
    record.intent = Intent::Forced(UnmountScope::Own);
    let mut observed = Observed {
        holders: vec![Holder::Process { pid: 1, command: "fio".into() }],
        ..seen(ObservedWorker::Alive { connections: 1, size: 1 << 20 })
    };
    let (detach, sever) = (Action::Unmount(3, UnmountScope::Own), Action::ForceDisconnect(3));
    let rest = [detach, sever, Action::StopWorker, Action::ProveNoWrites, Action::RemoveRecord];
    let plan_of = |observed: &Observed| plan(&record, observed).actions;
    assert_eq!(plan_of(&observed)[..2], [Action::RecordUnmapping, Action::FailIo]);
    assert_eq!(plan_of(&observed)[2..], rest);
    observed.worker = ObservedWorker::Gone;
    assert_eq!(plan_of(&observed)[..3], [Action::RecordUnmapping, detach, sever]);
    assert_eq!(plan_of(&observed)[3..], [Action::ProveNoWrites, Action::RemoveRecord]);
    // A device that may still come is waited for, and then looked for.
    observed.connecting = true;
    assert_eq!(plan_of(&observed)[3..], [Action::ProveNoWrites, Action::WaitForConnect]);
    // Of two workers one goes first, but not before the wish is recorded.
    let mut two = record.clone();
    two.predecessor = Some(WorkerId { pid: 7, started_ticks: 7 });
    for handed_over in [Some(true), Some(false), None] {
        let observed = Observed { handed_over, ..observed.clone() };
        assert_eq!(plan(&two, &observed).actions[0], Action::RecordUnmapping);
    }
    // As the journal keeps it.
    let text = serde_json::to_string(&record.intent).unwrap();
    assert_eq!(text, r#"{"forced":"own"}"#);
    assert_eq!(serde_json::from_str::<Intent>(&text).unwrap(), record.intent);
}

#[test]
fn a_device_grows_with_its_volume_in_whole_blocks_once_it_works() {
    let record = established(1, true);
    let grows = |record: &Record, size, connections, resize_deferred| {
        let observed = Observed {
            failures: MAX_FAILURES,
            resize_deferred,
            ..seen(ObservedWorker::Alive { connections, size })
        };
        let plan = plan(record, &observed);
        assert!(plan.state == State::Mapped || connections == 0 || size < 1 << 20);
        plan.actions
    };
    let action = Action::GrowDevice { index: 3, size: (1 << 20) + 1024 };
    assert_eq!(grows(&record, (1 << 20) + 1024 + 511, 1, false), [action]);
    assert_eq!(grows(&record, (1 << 20) + 511, 1, false), []);
    assert_eq!(grows(&record, (1 << 20) + 1024, 1, true), []);
    // First it works again, then it grows; and nothing shrinks by itself.
    for (size, connections) in [((1 << 20) + 1024, 0), (1 << 19, 1)] {
        let actions = grows(&record, size, connections, false);
        assert!(!actions.iter().any(|action| matches!(action, Action::GrowDevice { .. })));
    }
}

#[test]
fn what_no_worker_will_serve_again_is_refused_when_it_has_waited_long_enough() {
    let mut record = established(2, true);
    let mut observed = Observed {
        failures: MAX_FAILURES,
        history: "worker 7 was killed by SIGKILL".into(),
        ..seen(ObservedWorker::Gone)
    };
    let refuse = Action::RefuseIo { index: 3, connections: 2 };
    let failed = |record: &Record, observed: &Observed| match plan(record, observed) {
        Plan { state: State::Failed(failure), actions } => (failure.message, actions),
        other => panic!("{other:?}"),
    };
    let (message, actions) = failed(&record, &observed);
    assert!(message.contains("SIGKILL") && message.contains("waited for 60 s"), "{message}");
    assert_eq!(actions, []);
    observed.unserved_too_long = true;
    assert_eq!(failed(&record, &observed).1, [refuse]);
    observed.refusing = true;
    let (message, actions) = failed(&record, &observed);
    assert!(message.ends_with("its I/O fails"), "{message}");
    assert_eq!(actions, []);
    // Who asks for another attempt gets one; memory that is lost gets none, and waits no longer.
    observed.failures = 0;
    let actions = plan(&record, &observed).actions;
    assert_eq!(actions, [Action::StartWorker, Action::Reconnect { index: 3, missing: 2 }]);
    record.volume.as_mut().unwrap().outlives_worker = false;
    observed.refusing = false;
    assert_eq!(failed(&record, &observed).1, [refuse]);
}
