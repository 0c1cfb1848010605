//! Breadth-first enumeration of all states of a model.

use std::collections::HashSet;
use std::fmt::Debug;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// A system whose states are enumerated.
pub(super) trait Model {
    type State: Copy + Eq + Hash + Debug;

    /// Returns the state from which the enumeration starts.
    fn initial(&self) -> Self::State;

    /// Appends every state that can follow `state`, with a text for the trace.
    fn steps(&self, state: &Self::State, next: &mut Vec<(Label, Self::State)>);

    /// Returns the property that `state` violates, if there is one.
    fn violation(&self, state: &Self::State) -> Option<String>;
}

/// The name of a step: who, what, and a number such as a slot.
pub(super) type Label = (&'static str, &'static str, u8);

/// The result of an enumeration.
pub(super) struct Explored {
    /// The number of different states.
    pub(super) states: usize,
    /// The first violation with the shortest path to it.
    pub(super) violation: Option<String>,
}

/// Enumerates the states of `model` until one violates a property or all are known.
///
/// A state is remembered by a hash of 64 bits. With 10 million states the probability that two have the
/// same hash is 3 in a million.
pub(super) fn explore<M: Model>(model: &M) -> Explored {
    let initial = model.initial();
    let mut seen = HashSet::<u64, BuildHasherDefault<Mixer>>::default();
    seen.insert(hash(&initial));
    // For each state: the number of its predecessor, and which of the predecessor's steps leads to it.
    let mut origins: Vec<(u32, u16)> = vec![(0, 0)];
    let mut level = vec![(0_u32, initial)];
    let mut next = Vec::new();
    while !level.is_empty() {
        let mut following = Vec::new();
        for (number, state) in level {
            if let Some(violation) = model.violation(&state) {
                let path = path(model, &origins, number);
                let violation = Some(format!("{violation}\n{path}{state:#?}"));
                return Explored { states: origins.len(), violation };
            }
            next.clear();
            model.steps(&state, &mut next);
            for (step, (_, state)) in next.iter().enumerate() {
                if seen.insert(hash(state)) {
                    following.push((u32::try_from(origins.len()).unwrap(), *state));
                    origins.push((number, u16::try_from(step).unwrap()));
                }
            }
        }
        level = following;
    }
    Explored { states: origins.len(), violation: None }
}

/// Returns the names of the steps that lead to the state `number`, one per line.
fn path<M: Model>(model: &M, origins: &[(u32, u16)], mut number: u32) -> String {
    let mut steps = Vec::new();
    while number != 0 {
        let (before, step) = origins[number as usize];
        steps.push(usize::from(step));
        number = before;
    }
    let mut state = model.initial();
    let mut text = String::new();
    for step in steps.into_iter().rev() {
        let mut next = Vec::new();
        model.steps(&state, &mut next);
        let ((actor, action, at), after) = next[step];
        text.push_str(&format!("  {actor} {action} {at}\n"));
        state = after;
    }
    text
}

fn hash<T: Hash>(value: &T) -> u64 {
    let mut hasher = Mixer::default();
    value.hash(&mut hasher);
    hasher.finish()
}

/// A hash that is several times as fast as the standard one for states of many small fields. Each field is
/// mixed with a multiplication of 128 bits, as in wyhash.
#[derive(Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(value.into());
    }

    fn write_u16(&mut self, value: u16) {
        self.write_u64(value.into());
    }

    fn write_isize(&mut self, value: isize) {
        self.write_u64(value.cast_unsigned() as u64);
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn write_u64(&mut self, value: u64) {
        let wide = u128::from(self.0 ^ value ^ 0x9e37_79b9_7f4a_7c15)
            * u128::from(0xe703_7ed1_a0b4_28db_u64.wrapping_add(self.0.rotate_left(29) | 1));
        let [low, high] =
            [wide, wide >> 64].map(|half| u64::try_from(half & u128::from(u64::MAX)).unwrap());
        self.0 = low ^ high;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
