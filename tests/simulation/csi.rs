//! The daemon is killed between any two steps of each call of the Node service, and during each step. Then a new
//! daemon gets the same call again: the result is that of a call that was not interrupted. Or it gets the call that
//! undoes the first one: nothing is left.
//!
//! The steps are all that change something: the driver's operations on files, mounts and filesystems, and the calls of
//! the supervisor to the kernel, to its journal and to workers. The supervisor and the driver are the real ones.

mod calls;
mod host;
mod life;
mod machine;
mod one_pod;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use cleat_csi::host::Kind;

use calls::{Call, Event, STAGING, Volume, directory};
use life::{Play, State};
use machine::Stored;
use steps::{Kill, Moment};

/// A filesystem with data that is smaller than its volume, as on a clone that has grown.
const fn filesystem(kind: Kind) -> Stored {
    Stored::Filesystem { kind, size: Volume::SIZE / 2, data: 7, group: 0 }
}

const EMPTY: Volume = Volume {
    title: "empty",
    content: Stored::Empty,
    read_only: false,
    block: false,
    group: 0,
    encrypted: false,
    stale: false,
    one_pod: false,
};
const VOLUMES: [Volume; 8] = [
    EMPTY,
    Volume { title: "ext4", content: filesystem(Kind::Ext4), group: 5, ..EMPTY },
    Volume { title: "xfs", content: filesystem(Kind::Xfs), ..EMPTY },
    Volume { title: "read-only", content: filesystem(Kind::Ext4), read_only: true, ..EMPTY },
    Volume { title: "stale mounts", content: filesystem(Kind::Ext4), stale: true, ..EMPTY },
    Volume { title: "empty, to be encrypted", encrypted: true, ..EMPTY },
    Volume { title: "encrypted", content: filesystem(Kind::Ext4), encrypted: true, ..EMPTY },
    Volume { title: "block", content: Stored::Data, block: true, ..EMPTY },
];

/// A call that is interrupted.
#[derive(Debug, Clone, Copy)]
struct Interrupted {
    /// The calls before it.
    before: &'static [Call],
    /// What happens to the volume after them.
    event: Event,
    call: Call,
    /// The calls that undo it.
    undo: &'static [Call],
}

const END: &[Call] = &[Call::Unpublish, Call::Unstage];
const CALLS: [Interrupted; 8] = [
    Interrupted::new(&[], Call::Stage, &[Call::Unstage]),
    Interrupted::new(&[Call::Stage], Call::Publish, END),
    // kubelet does not always repeat NodeStageVolume.
    Interrupted::new(&[], Call::Publish, END),
    Interrupted {
        event: Event::Grows,
        ..Interrupted::new(&[Call::Stage, Call::Publish], Call::Expand, END)
    },
    Interrupted::new(&[Call::Stage, Call::Publish], Call::Unpublish, &[Call::Publish]),
    Interrupted::new(&[Call::Stage], Call::Unstage, &[Call::Stage]),
    // Both end by force. Only then can the volume be staged again.
    Interrupted {
        event: Event::Fenced,
        ..Interrupted::new(&[Call::Stage], Call::Unstage, &[Call::Unstage, Call::Stage])
    },
    Interrupted {
        event: Event::Hangs,
        ..Interrupted::new(&[Call::Stage], Call::Unstage, &[Call::Unstage, Call::Stage])
    },
];

impl Interrupted {
    /// Returns the name of the call, and what happens before it.
    fn title(&self) -> String {
        match self.event {
            Event::Nothing | Event::Grows => format!("{:?}", self.call),
            event => format!("{:?} ({event:?})", self.call),
        }
    }

    const fn new(before: &'static [Call], call: Call, undo: &'static [Call]) -> Self {
        Self { before, event: Event::Nothing, call, undo }
    }
}

/// Steps that each call must have, for one volume or another.
const STEPS: [(&str, &[&str]); 7] = [
    (
        "Stage",
        &[
            "connect a device",
            "make the directory",
            "unmount",
            "encrypt",
            "unlock",
            "format",
            "check",
            "mount",
            "grow",
        ],
    ),
    (
        "Publish",
        &["make the directory", "make the file", "change the group", "bind", "bind the device"],
    ),
    ("Expand", &["a call that blocks", "grow the decrypted device", "grow"]),
    ("Unpublish", &["unmount", "remove"]),
    ("Unstage", &["unmount", "lock", "flush the device", "disconnect the device"]),
    ("Unstage (Fenced)", &["unmount the device", "lock", "disconnect the device"]),
    ("Unstage (Hangs)", &["unmount", "lock", "flush the device", "disconnect the device"]),
];

/// The names of the steps of each call, and the number of points at which it was killed.
type Killed = BTreeMap<String, (usize, BTreeSet<String>)>;

/// One call for one volume.
#[derive(Debug, Clone, Copy)]
struct Case {
    volume: Volume,
    interrupted: Interrupted,
}

#[test]
fn csi_calls_are_killed_at_every_step() {
    let _turn = crate::ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let cases = VOLUMES
        .into_iter()
        .flat_map(|volume| CALLS.map(|interrupted| Case { volume, interrupted }));
    let cases: Vec<Case> = cases.collect();
    let (next, killed) = (AtomicUsize::new(0), Mutex::new(Killed::new()));
    let failures = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (points, steps, failed) = case.check();
                    let mut killed = killed.lock().unwrap();
                    let of_call = killed.entry(case.interrupted.title()).or_default();
                    of_call.0 += points;
                    of_call.1.extend(steps);
                    failures.lock().unwrap().extend(failed);
                }
            });
        }
    });
    let killed = killed.into_inner().unwrap();
    for (call, (points, steps)) in &killed {
        println!("figures: {call} was killed {points} times, in {} kinds of steps", steps.len());
    }
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    for (call, wanted) in STEPS {
        let steps = &killed[call].1;
        let has = |wanted: &&&str| steps.iter().any(|step| step.starts_with(**wanted));
        let missing: Vec<_> = wanted.iter().filter(|wanted| !has(wanted)).collect();
        assert!(missing.is_empty(), "{call} has no steps {missing:?}: {steps:#?}");
    }
}

impl Case {
    /// Kills the call at every point. Returns the number of points, the steps, and what is wrong.
    fn check(&self) -> (usize, Vec<String>, Vec<String>) {
        let Interrupted { before, event, call, undo } = self.interrupted;
        let steps = Play::new(self.volume).first_life(before, event, call, None).0;
        let title = self.interrupted.title();
        let title = format!("{title} of {} after {before:?}", self.volume.title);
        let mut failures = Vec::new();
        let wanted = [&[call][..], undo].map(|calls| self.ends(None, calls, &mut failures));
        if !failures.is_empty() {
            let failures = failures.iter().map(|what| format!("{title}: {what}"));
            return (0, steps, failures.collect());
        }
        let mut points = 0;
        for (step, name) in steps.iter().enumerate() {
            for moment in [Moment::Before, Moment::During, Moment::After] {
                for (calls, wanted) in [&[call][..], undo].into_iter().zip(&wanted) {
                    let mut wrong = Vec::new();
                    match self.ends(Some((step, moment)), calls, &mut wrong) {
                        Some(state) if Some(&state) != wanted.as_ref() => {
                            wrong.push(format!("{state:#?} instead of {wanted:#?}"));
                        }
                        None if moment == Moment::During => continue,
                        None => wrong.push("it was not killed".to_owned()),
                        Some(_) => {}
                    }
                    points += 1;
                    let at = format!("{title}, killed {moment:?} {step} ({name}), then {calls:?}");
                    failures.extend(wrong.iter().map(|what| format!("{at}: {what}")));
                }
            }
        }
        (points, steps, failures)
    }

    /// Kills the call at `kill`, and makes `calls` with another daemon. Returns the state of the machine then; `None` if
    /// the step has no such moment. At the end, everything is undone.
    fn ends(&self, kill: Option<Kill>, calls: &[Call], wrong: &mut Vec<String>) -> Option<State> {
        let play = Play::new(self.volume);
        let Interrupted { before, event, call, undo } = self.interrupted;
        let (_, was_killed) = play.first_life(before, event, call, kill);
        if kill.is_some() && !was_killed {
            return None;
        }
        if calls == undo {
            play.happens(event, false);
        }
        play.next_life(calls);
        let mut state = play.state();
        if calls == [Call::Unstage] || calls == END {
            // How far the call came differs.
            state.paths.retain(|path| *path != directory(STAGING));
            state.content = String::new();
        }
        play.happens(event, false);
        play.next_life(END);
        wrong.extend(play.world.violations());
        wrong.extend(self.leftovers(&play.state()));
        Some(state)
    }

    /// Returns what is left of a volume that is not in use any more, and what is lost.
    fn leftovers(&self, state: &State) -> Vec<String> {
        let mut left = state.mounts.clone();
        left.extend(state.mappings.clone());
        left.extend(state.paths.iter().filter(|path| **path != directory(STAGING)).cloned());
        if state.records + state.workers > 0 {
            left.push(format!("{} records, {} workers", state.records, state.workers));
        }
        let is_kept = match self.volume.content {
            Stored::Empty | Stored::Encrypted => true,
            Stored::Filesystem { data, .. } => state.content.contains(&format!("data: {data}")),
            Stored::Data => state.content.contains("Data"),
        };
        let mut wrong: Vec<String> =
            left.into_iter().map(|left| format!("{left} is left")).collect();
        if !is_kept {
            wrong.push(format!("data is lost: {}", state.content));
        }
        wrong
    }
}
