//! A model of a mapping, its devices and its workers, in which every action can fail and faults occur
//! between actions.

use cleat_kernel::Holder;

use super::observed_with;
use crate::planner::{
    Action, Intent, Observed, ObservedDevice, ObservedWorker, Plan, Record, State, plan,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ModelWorker {
    None,
    /// Serves this number of connections of its mapping's device.
    Alive(u32),
    /// Serves, and does not answer the supervisor.
    Hung,
    Dead,
}

impl ModelWorker {
    pub(super) fn has_ended(self) -> bool {
        matches!(self, Self::None | Self::Dead)
    }

    fn observed(self, pid: u32, size: u64) -> ObservedWorker {
        match self {
            Self::None | Self::Dead => ObservedWorker::Gone,
            Self::Alive(connections) => ObservedWorker::Alive { connections, size },
            Self::Hung => ObservedWorker::Unreachable { pid, reason: "does not answer".into() },
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ModelDevice {
    /// Whether the device carries the mapping's identity.
    pub ours: bool,
    /// The number of its sockets that a worker serves.
    pub served: u32,
}

impl ModelDevice {
    pub(super) const FOREIGN: Self = Self { ours: false, served: 0 };
}

const SIZE: u64 = 1 << 20;

#[derive(Debug, Clone)]
pub(super) struct Model {
    /// `None` after the record has been removed.
    pub record: Option<Record>,
    pub devices: Vec<ModelDevice>,
    pub worker: ModelWorker,
    /// In an interrupted handover, the old worker.
    pub predecessor: ModelWorker,
    /// In an interrupted handover, whether the new worker has taken over.
    pub handed_over: bool,
    pub fenced: bool,
    /// Whether a new worker would find another volume.
    pub replaced: bool,
    /// Whether a worker without a volume fails the device's requests.
    pub refusing: bool,
    /// Whether a process holds the device.
    pub in_use: bool,
    pub paths_known: bool,
    pub failures: u32,
    /// Whether a device works on other content than it had.
    pub replaced_by_zeroes: bool,
}

impl Model {
    /// Returns a mapping with its device, whose worker has died.
    pub(super) fn new(record: Record) -> Self {
        Self {
            record: Some(record),
            devices: vec![ModelDevice { ours: true, served: 0 }],
            worker: ModelWorker::Dead,
            predecessor: ModelWorker::None,
            handed_over: false,
            fenced: false,
            replaced: false,
            refusing: false,
            in_use: false,
            paths_known: true,
            failures: 0,
            replaced_by_zeroes: false,
        }
    }

    pub(super) fn observe(&self) -> Observed {
        let ours = self.devices.iter().enumerate().filter(|(_, device)| device.ours);
        let devices = ours
            .map(|(index, _)| ObservedDevice { index: u32::try_from(index).unwrap(), size: SIZE });
        let worker = match self.worker {
            ModelWorker::Alive(_) if self.fenced => ObservedWorker::Fenced,
            worker => worker.observed(7, SIZE),
        };
        let in_handover = self.record.as_ref().is_some_and(|record| record.predecessor.is_some());
        let answers = [self.worker, self.predecessor]
            .iter()
            .any(|worker| matches!(worker, ModelWorker::Alive(_)));
        let holder = self.in_use.then(|| Holder::Process { pid: 1, command: "fio".into() });
        Observed {
            devices: devices.collect(),
            predecessor: self.predecessor.observed(6, SIZE),
            handed_over: (in_handover && answers).then_some(self.handed_over),
            holders: holder.into_iter().collect(),
            paths_known: self.paths_known,
            failures: self.failures,
            refusing: self.refusing,
            ..observed_with(worker)
        }
    }

    /// Applies one action. With `fail`, the action fails, after a part of it where it has parts.
    fn apply(&mut self, action: Action, fail: bool) -> Result<(), ()> {
        let device_count = self.devices.iter().filter(|device| device.ours).count();
        let record = self.record.as_mut().expect("no action without a record");
        match action {
            Action::StartWorker => return self.start_worker(device_count, fail),
            Action::Connect => {
                assert_eq!(device_count, 0, "a second device");
                if fail {
                    return Err(());
                }
                let ModelWorker::Alive(connections) = &mut self.worker else { return Err(()) };
                *connections = record.options.connections;
                self.devices.push(ModelDevice { ours: true, served: record.options.connections });
            }
            Action::WaitForDevice
            | Action::RecordMapped
            | Action::RecordFenced
            | Action::RecordUnmapping
            | Action::StopWorker
            | Action::StopPredecessor
            | Action::RestorePredecessor
            | Action::ReleaseClaim
                if fail =>
            {
                return Err(());
            }
            Action::WaitForDevice => self.paths_known = true,
            Action::RecordMapped => record.established = true,
            Action::Reconnect { index, missing } => return self.reconnect(index, missing, fail),
            // A forced intent stays as it is.
            Action::RecordUnmapping if record.intent != Intent::Mapped => {}
            Action::GrowDevice { .. } => unreachable!("the model's volume keeps its size"),
            Action::RefuseIo { .. } => return self.refuse_io(fail),
            Action::RecordFenced => record.fenced = true,
            Action::RecordSyncFailed => record.sync_failed = true,
            Action::RecordUnmapping => record.intent = Intent::Unmapped,
            Action::Flush(index) => {
                assert!(self.devices[index as usize].ours);
                if fail || !matches!(self.worker, ModelWorker::Alive(1..) | ModelWorker::Hung) {
                    return Err(());
                }
            }
            Action::OpenExclusively(index) => {
                assert!(self.devices[index as usize].ours);
                if fail || self.in_use {
                    return Err(());
                }
            }
            Action::Disconnect(index) => {
                assert!(self.devices[index as usize].ours, "disconnects a foreign device");
                if fail || self.in_use {
                    return Err(());
                }
                self.devices[index as usize] = ModelDevice::FOREIGN;
            }
            Action::StopWorker | Action::StopPredecessor | Action::RestorePredecessor => {
                self.change_workers(action);
            }
            Action::RemoveRecord => {
                assert_eq!(device_count, 0, "a device without a record");
                assert!(self.worker.has_ended());
                if fail {
                    return Err(());
                }
                self.record = None;
            }
            Action::ReleaseClaim => assert!(self.worker.has_ended()),
            Action::WaitForConnect => {}
            forced => return self.apply_forced(forced, fail),
        }
        Ok(())
    }

    fn refuse_io(&mut self, fail: bool) -> Result<(), ()> {
        let replaced = self.record.as_ref().is_some_and(|record| record.replaced.is_some());
        assert!(replaced, "the model has no time for another reason");
        assert!(self.worker.has_ended(), "it may have requests");
        self.refusing |= !fail;
        if fail { Err(()) } else { Ok(()) }
    }

    fn reconnect(&mut self, index: u32, missing: u32, fail: bool) -> Result<(), ()> {
        let device = &mut self.devices[index as usize];
        assert!(device.ours, "sockets for a device of another identity");
        // The kernel replaces only dead sockets, and drops the other new ones.
        let replaced = if fail { missing / 2 } else { missing };
        let ModelWorker::Alive(connections) = &mut self.worker else { return Err(()) };
        *connections += replaced;
        device.served = *connections;
        if replaced < missing { Err(()) } else { Ok(()) }
    }

    /// Applies an action of a forced unmap.
    fn apply_forced(&mut self, action: Action, fail: bool) -> Result<(), ()> {
        let forced = self.record.as_ref().is_some_and(|r| matches!(r.intent, Intent::Forced(_)));
        assert!(forced, "{action:?} without a forced intent");
        match action {
            // A worker that does not answer is killed.
            Action::FailIo if self.worker == ModelWorker::Hung && !fail => {
                self.worker = ModelWorker::Dead;
            }
            Action::FailIo | Action::Unmount(..) => {}
            Action::ForceDisconnect(_) if fail => return Err(()),
            Action::ForceDisconnect(index) => {
                // The device may have gone already. A foreign device is not touched.
                if self.devices[index as usize].ours {
                    self.devices[index as usize] = ModelDevice::FOREIGN;
                }
            }
            Action::ProveNoWrites => {
                assert!(self.worker.has_ended());
                if fail {
                    return Err(());
                }
            }
            other => panic!("{other:?} is not an action of a forced unmap"),
        }
        Ok(())
    }

    /// Applies an action that ends a handover or the worker.
    fn change_workers(&mut self, action: Action) {
        let record = self.record.as_mut().expect("no action without a record");
        match action {
            Action::StopWorker => {
                let serves = record.predecessor.is_none() || self.handed_over;
                assert!(!serves || record.intent != Intent::Mapped, "stops the serving worker");
                self.worker = ModelWorker::Dead;
            }
            Action::StopPredecessor => {
                let serves = matches!(self.predecessor, ModelWorker::Alive(_) | ModelWorker::Hung);
                assert!(!serves || self.handed_over, "stops the serving worker");
                self.predecessor = ModelWorker::None;
                record.predecessor = None;
            }
            Action::RestorePredecessor => {
                assert!(self.worker.has_ended());
                assert!(!self.handed_over || !matches!(self.predecessor, ModelWorker::Alive(_)));
                record.worker = record.predecessor.take();
                self.worker = std::mem::replace(&mut self.predecessor, ModelWorker::None);
            }
            _ => unreachable!("{action:?} does not change workers"),
        }
    }

    fn start_worker(&mut self, device_count: usize, fail: bool) -> Result<(), ()> {
        assert!(self.worker.has_ended(), "a second worker beside {:?}", self.worker);
        let record = self.record.as_mut().expect("no action without a record");
        assert!(record.predecessor.is_none(), "a third worker");
        assert!(record.replaced.is_none(), "a worker is started for a replaced volume");
        record.generation += 1;
        if fail || self.replaced {
            self.worker = ModelWorker::Dead;
            record.replaced = self.replaced.then(|| "another volume".to_owned());
            return Err(());
        }
        self.replaced_by_zeroes |=
            !record.volume.as_ref().expect("set").outlives_worker && device_count > 0;
        self.worker = ModelWorker::Alive(0);
        Ok(())
    }

    /// Plans and applies until a plan has no actions, and returns its state. Before each action, the next
    /// of `faults` occurs. Returns `None` if `rounds` plans are not enough.
    pub(super) fn run(
        &mut self,
        faults: &mut dyn Iterator<Item = u8>,
        rounds: u32,
    ) -> Option<State> {
        for _ in 0..rounds {
            let Some(record) = &self.record else { return Some(State::Unmapped) };
            let Plan { state, actions } = plan(record, &self.observe());
            let again = plan(record, &self.observe());
            assert_eq!((&state, &actions), (&again.state, &again.actions), "not a function");
            if actions.is_empty() {
                return Some(state);
            }
            for action in actions {
                let fault = faults.next().unwrap_or(0);
                self.inject(fault);
                if self.apply_if_possible(action, fault == 1).is_err() {
                    self.failures += 1;
                    break;
                }
            }
        }
        None
    }

    /// Applies an action, unless a fault has removed its device. The executor checks the same.
    fn apply_if_possible(&mut self, action: Action, fail: bool) -> Result<(), ()> {
        let index = match action {
            Action::Reconnect { index, .. }
            | Action::OpenExclusively(index)
            | Action::Flush(index)
            | Action::Disconnect(index) => Some(index),
            _ => None,
        };
        if index.is_some_and(|index| !self.devices[index as usize].ours) {
            return Err(());
        }
        self.apply(action, fail)
    }

    /// Injects a fault. The numbers 0 and 1 inject none here; 1 makes the action fail.
    fn inject(&mut self, fault: u8) {
        match fault {
            2 if self.worker != ModelWorker::None => {
                self.worker = ModelWorker::Dead;
                self.devices.iter_mut().for_each(|device| device.served = 0);
            }
            3 if matches!(self.worker, ModelWorker::Alive(_)) => self.worker = ModelWorker::Hung,
            4 => self.in_use = !self.in_use,
            5 => {
                for device in self.devices.iter_mut().filter(|device| device.ours) {
                    *device = ModelDevice::FOREIGN;
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
            9 if matches!(self.predecessor, ModelWorker::Alive(_) | ModelWorker::Hung) => {
                self.predecessor = ModelWorker::Dead;
            }
            10 if matches!(self.predecessor, ModelWorker::Alive(_)) => {
                self.predecessor = ModelWorker::Hung;
            }
            11 => self.replaced = true,
            _ => {}
        }
    }
}
