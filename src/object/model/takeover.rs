//! Claims, seals, checkpoints and the deletion of slots, with three writers.
//!
//! W has epoch 1, X claims epoch 2, Y claims epoch 3. Each step is one access to the store, and each actor
//! may stop for ever after any step. A put that was sent lands at any later time, also after its writer was
//! fenced, and also a second time after its object was deleted: this covers delayed and duplicated
//! puts and lost answers. A deletion that is permitted once is executed at any later time, any number of
//! times, on whatever then has the name.
//!
//! Of the old checkpoints only the deletion of all those of epoch 1 is a step, because only the newest one of
//! an epoch matters. Map pages are not objects here. A page is needed while an open writer has not replaced it
//! by a checkpoint of its own, since it is loaded when it is used first; it must then be in no permitted
//! deletion.

use super::explore::{Label, Model, explore};

/// The maximum number of slots of epoch 1 and of epoch 2.
const SLOTS: [usize; 2] = [4, 3];

/// The number of puts that a writer has in flight.
const DEPTH: u8 = 2;

/// A checkpoint, by its position in the history: 0 is the empty volume, then the slots of epoch 1, then those
/// of epoch 2.
type Checkpoint = u8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Slot {
    Empty,
    Data,
    Base(Checkpoint),
    Open { by: u8, cut: u8, base: Checkpoint },
    Seal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Writer {
    is_open: bool,
    is_fenced: bool,
    /// What was sent to each slot.
    sent: [Slot; SLOTS[0]],
    /// For each slot that was sent: the number of slots that were confirmed then.
    marks: [u8; SLOTS[0]],
    next: u8,
    /// The number of slots that are confirmed, from 0 on without a gap. All of them may be acknowledged.
    confirmed: u8,
    /// The newest checkpoint with a confirmed BASE record.
    base: Checkpoint,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    List,
    Scan,
    Check,
    Commit,
    Open,
    Stopped,
    Damaged,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Opener {
    phase: Phase,
    /// The epoch whose end is searched: 0 for epoch 1.
    epoch: usize,
    at: u8,
    base: Checkpoint,
    cuts: [Option<u8>; 2],
    /// The cut was taken although a later slot proves that the slot at the cut was durable.
    ignores_witness: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct State {
    logs: [[Slot; SLOTS[0]]; 2],
    /// The checkpoints that exist, and those that were sent, as bits.
    roots: u16,
    roots_sent: u16,
    seals_sent: [u8; 2],
    writers: [Writer; 2],
    /// X and Y.
    openers: [Opener; 2],
    /// Slots behind the cut of epoch 1 in which X has seen data.
    swept: u8,
    is_lost: bool,
}

/// The rules that can be switched off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    Claim,
    Commit,
    Recheck,
    Nonce,
    Contiguous,
    Base,
    Rebase,
    KeepSeals,
    Witness,
}

struct Takeover {
    /// The number of slots of epoch 1 and of epoch 2.
    slots: [usize; 2],
    without: Option<Rule>,
    /// The store loses one slot. Y does not act.
    with_loss: bool,
}

type Steps = Vec<(Label, State)>;

impl Takeover {
    fn has(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    /// The puts that land, whenever their name is free.
    fn landings(&self, s: &State, next: &mut Steps) {
        for (epoch, name) in NAMES.into_iter().enumerate() {
            for at in 0..self.slots[epoch] {
                if s.logs[epoch][at] != Slot::Empty {
                    continue;
                }
                let mut land = |what, slot| {
                    let mut after = *s;
                    after.logs[epoch][at] = slot;
                    next.push(((name, what, number(at)), after));
                };
                if number(at) < s.writers[epoch].next {
                    land("lands", s.writers[epoch].sent[at]);
                }
                if s.seals_sent[epoch] & 1 << at != 0 {
                    land("is sealed", Slot::Seal);
                }
                let y = &s.openers[1];
                if !self.has(Rule::Claim) && (epoch, at) == (1, 0) && y.phase == Phase::Commit {
                    land("has OPEN of Y", open(2, y));
                }
            }
        }
        for id in bits(s.roots_sent & !s.roots) {
            next.push((("store", "has checkpoint", id), State { roots: s.roots | 1 << id, ..*s }));
        }
    }

    fn writer(&self, s: &State, epoch: usize, next: &mut Steps) {
        let (w, name) = (&s.writers[epoch], WRITERS[epoch]);
        if w.is_open && !w.is_fenced {
            if usize::from(w.next) < self.slots[epoch] && w.next - w.confirmed < DEPTH {
                let mut send = |what, slot| {
                    let mut after = *s;
                    let w = &mut after.writers[epoch];
                    w.sent[usize::from(w.next)] = slot;
                    w.marks[usize::from(w.next)] = w.confirmed;
                    w.next += 1;
                    next.push(((name, what, w.next - 1), after));
                };
                send("sends", Slot::Data);
                let newest = newest(s.roots, epoch).filter(|id| *id > w.base);
                if let Some(id) = newest.filter(|id| !w.sent.contains(&Slot::Base(*id))) {
                    send("sends BASE as", Slot::Base(id));
                }
            }
            if let Some(after) = self.confirm(s, epoch) {
                next.push(((name, "examines", w.confirmed), after));
            }
            let id = w.confirmed.checked_sub(1).map(|at| checkpoint(epoch, at));
            if let Some(id) = id.filter(|id| newest(s.roots_sent, epoch).is_none_or(|n| n < *id)) {
                let after = State { roots_sent: s.roots_sent | 1 << id, ..*s };
                next.push(((name, "sends checkpoint", id), after));
            }
        }
        self.deletions(s, epoch, next);
    }

    /// The writer reads its first slot that is not confirmed.
    fn confirm(&self, s: &State, epoch: usize) -> Option<State> {
        let w = &s.writers[epoch];
        let ahead = (w.confirmed..w.next).find(|at| {
            let slot = s.logs[epoch][usize::from(*at)];
            !self.has(Rule::Contiguous) && slot == w.sent[usize::from(*at)]
        });
        let at = ahead.unwrap_or(w.confirmed);
        if at >= w.next {
            return None;
        }
        let mut after = *s;
        let w = &mut after.writers[epoch];
        let own = w.sent[usize::from(at)];
        match s.logs[epoch][usize::from(at)] {
            Slot::Empty => return None,
            found if found == own || !self.has(Rule::Nonce) => {
                w.confirmed = at + 1;
                if let Slot::Base(id) = own {
                    w.base = w.base.max(id);
                }
            }
            _ => w.is_fenced = true,
        }
        Some(after)
    }

    /// The newest checkpoint that permits the writer to delete what it covers.
    fn covered(&self, s: &State, epoch: usize) -> Checkpoint {
        let w = &s.writers[epoch];
        match self.has(Rule::Base) {
            true => w.base,
            false => newest(s.roots, epoch).unwrap_or(w.base).max(w.base),
        }
    }

    /// The deletions that the writer of `epoch` has sent. They are executed at any time.
    fn deletions(&self, s: &State, epoch: usize, next: &mut Steps) {
        let name = WRITERS[epoch];
        let covered = self.covered(s, epoch);
        let covers_epoch_1 = epoch == 1 && covered >= checkpoint(1, 0);
        let old: u16 = bits(s.roots).filter(|id| *id < checkpoint(1, 0)).map(|id| 1 << id).sum();
        if covers_epoch_1 && old != 0 {
            let after = State { roots: s.roots & !old, ..*s };
            next.push(((name, "deletes the checkpoints of epoch 1", 0), after));
        }
        let mut delete = |of: usize, at: usize| {
            if s.logs[of][at] != Slot::Empty {
                let mut after = *s;
                after.logs[of][at] = Slot::Empty;
                let what = if of == epoch { "deletes" } else { "deletes in epoch 1:" };
                next.push(((name, what, number(at)), after));
            }
        };
        for at in 0..self.slots[epoch] {
            if checkpoint(epoch, number(at)) <= covered {
                delete(epoch, at);
            }
        }
        let x = &s.openers[0];
        let (true, Some(cut)) = (covers_epoch_1, x.cuts[0]) else { return };
        for at in 0..self.slots[0] {
            let is_swept = s.swept & 1 << at != 0 || !self.has(Rule::KeepSeals);
            if number(at) < cut || is_swept {
                delete(0, at);
            }
        }
        for at in usize::from(cut) + 1..self.slots[0] {
            if s.swept & 1 << at == 0 && matches!(s.logs[0][at], Slot::Data | Slot::Base(_)) {
                let after = State { swept: s.swept | 1 << at, ..*s };
                next.push(((name, "finds a late object at", number(at)), after));
            }
        }
    }

    fn opener(&self, s: &State, who: usize, next: &mut Steps) {
        let o = &s.openers[who];
        let mut go = |what, at, after: Opener| {
            let mut state = *s;
            state.openers[who] = after;
            next.push(((OPENERS[who], what, at), state));
        };
        match o.phase {
            Phase::List => {
                let root = newest(s.roots, o.epoch);
                let at = root.map_or(0, |id| after(o.epoch, id));
                let base = root.unwrap_or(0).max(o.base);
                go("lists, starts at", at, Opener { phase: Phase::Scan, at, base, ..*o });
            }
            Phase::Scan => self.scan(s, who, next),
            Phase::Check => self.check(s, who, next),
            Phase::Commit => self.commit(s, who, next),
            Phase::Open | Phase::Stopped | Phase::Damaged => {}
        }
    }

    fn scan(&self, s: &State, who: usize, next: &mut Steps) {
        let o = &s.openers[who];
        let mut state = *s;
        let after = &mut state.openers[who];
        let what = if usize::from(o.at) >= self.slots[o.epoch] {
            after.phase = Phase::Stopped;
            "leaves the scope at"
        } else {
            after.at += 1;
            match s.logs[o.epoch][usize::from(o.at)] {
                Slot::Empty if s.seals_sent[o.epoch] & 1 << o.at != 0 => return,
                Slot::Empty => {
                    after.at -= 1;
                    state.seals_sent[o.epoch] |= 1 << o.at;
                    "sends SEAL to"
                }
                Slot::Seal => {
                    after.at -= 1;
                    after.phase = Phase::Check;
                    "finds SEAL at"
                }
                Slot::Data => "finds data at",
                Slot::Base(id) => {
                    after.base = if self.has(Rule::Rebase) { o.base.max(id) } else { o.base };
                    "finds BASE at"
                }
                Slot::Open { cut, base, .. } => {
                    after.cuts[0] = Some(cut);
                    after.base = o.base.max(base);
                    "finds OPEN at"
                }
            }
        };
        next.push(((OPENERS[who], what, o.at), state));
    }

    /// A seal is at `at`: it is the end of the epoch, unless a checkpoint covers it.
    fn check(&self, s: &State, who: usize, next: &mut Steps) {
        let o = &s.openers[who];
        let mut to = *o;
        let root = newest(s.roots, o.epoch).filter(|id| after(o.epoch, *id) > o.at);
        let log = &s.logs[o.epoch];
        let witness = (usize::from(o.at) + 1..SLOTS[o.epoch]).any(|at| {
            let is_own = log[at] == s.writers[o.epoch].sent[at];
            is_own && log[at] != Slot::Empty && s.writers[o.epoch].marks[at] > o.at
        });
        let what = if let Some(id) = root.filter(|_| self.has(Rule::Recheck)) {
            (to.at, to.base, to.phase) = (after(o.epoch, id), id.max(o.base), Phase::Scan);
            "finds a newer checkpoint, goes on above"
        } else if witness && self.has(Rule::Witness) {
            to.phase = Phase::Damaged;
            "reports the loss of"
        } else {
            to.cuts[o.epoch] = Some(o.at);
            to.ignores_witness |= witness;
            to.phase = Phase::Commit;
            if (o.epoch, o.at) == (1, 0) {
                (to.phase, to.epoch) = (Phase::List, 0);
            }
            "takes the cut"
        };
        let mut state = *s;
        state.openers[who] = to;
        next.push(((OPENERS[who], what, o.at), state));
    }

    fn commit(&self, s: &State, who: usize, next: &mut Steps) {
        let o = &s.openers[who];
        let own = open(number(who) + 1, o);
        let mut state = *s;
        let what = if who == 1 && self.has(Rule::Claim) {
            state.openers[1].phase = Phase::Open;
            "commits OPEN"
        } else if who == 0 && s.writers[1].next == 0 && self.has(Rule::Commit) {
            state.writers[1].sent[0] = own;
            state.writers[1].next = 1;
            "sends OPEN"
        } else {
            match s.logs[1][0] {
                found if found == own || !self.has(Rule::Commit) => {
                    state.openers[who].phase = Phase::Open;
                    if who == 0 {
                        let w = &mut state.writers[1];
                        (w.is_open, w.next, w.confirmed, w.sent[0]) = (true, 1, 1, own);
                    }
                    "is open"
                }
                Slot::Empty => return,
                _ => {
                    state.openers[who].phase = Phase::Stopped;
                    "is fenced before the start"
                }
            }
        };
        next.push(((OPENERS[who], what, 0), state));
    }

    /// Checks that an opener which is not disturbed finds a complete history in `s`.
    fn recovery(&self, s: &State) -> Result<(), String> {
        let [x, y] = &s.openers;
        let is_open = y.phase == Phase::Open && self.has(Rule::Claim);
        let (base, cuts) = if is_open {
            let cut = if y.cuts[1] == Some(0) { y.cuts[0] } else { y.cuts[0].or(x.cuts[0]) };
            (y.base, [cut.unwrap_or(0), y.cuts[1].unwrap_or(0)])
        } else {
            let (end, base, cut) = undisturbed(s, 1);
            match end {
                0 => {
                    let (end, base, _) = undisturbed(s, 0);
                    (base, [end, 0])
                }
                end => (base, [cut.or(x.cuts[0]).unwrap_or(0), end]),
            }
        };
        if base > 0 && s.roots & 1 << base == 0 {
            return Err(format!("checkpoint {base}, from which a recovery starts, does not exist"));
        }
        self.page(s, base)?;
        for (epoch, cut) in cuts.iter().enumerate() {
            if s.writers[epoch].confirmed > *cut {
                return Err(format!("a recovery lacks acknowledged slots of epoch {}", epoch + 1));
            }
            let from = if base < checkpoint(epoch, 0) { 0 } else { after(epoch, base) };
            for at in from..*cut {
                if matches!(s.logs[epoch][usize::from(at)], Slot::Empty | Slot::Seal) {
                    return Err(format!("a recovery lacks slot {at} of epoch {}", epoch + 1));
                }
            }
        }
        Ok(())
    }

    /// Checks that no writer may delete the pages of checkpoint `id`.
    fn page(&self, s: &State, id: Checkpoint) -> Result<(), String> {
        match (0..2).any(|epoch| id < self.covered(s, epoch)) {
            true => Err(format!("pages of checkpoint {id} are needed and may be deleted")),
            false => Ok(()),
        }
    }

    fn check_all(&self, s: &State) -> Result<(), String> {
        let [x, y] = &s.openers;
        let is_open = |o: &Opener| o.phase == Phase::Open;
        if !self.with_loss && [x, y].iter().any(|o| o.phase == Phase::Damaged) {
            return Err("a loss is reported, but nothing was lost".into());
        }
        if self.with_loss {
            let ignored = [x, y].iter().any(|o| is_open(o) && o.ignores_witness);
            return if ignored {
                Err("a loss that can be proved is ignored".into())
            } else {
                Ok(())
            };
        }
        let lacks =
            |cut: Option<u8>, epoch: usize| cut.is_some_and(|cut| s.writers[epoch].confirmed > cut);
        if is_open(x) && lacks(x.cuts[0], 0) {
            return Err("the history of X lacks acknowledged slots".into());
        }
        if is_open(y) {
            if is_open(x) && !self.has(Rule::Claim) {
                return Err("X and Y are open in the same epoch".into());
            }
            if lacks(y.cuts[0], 0) || lacks(y.cuts[1], 1) {
                return Err("the history of Y lacks acknowledged slots".into());
            }
            if is_open(x) && y.cuts[1] == Some(0) {
                return Err("X is open, and Y takes its epoch for empty".into());
            }
            if is_open(x) && y.cuts[0].is_some_and(|cut| x.cuts[0] != Some(cut)) {
                return Err("X and Y have different histories".into());
            }
            self.page(s, y.base)?;
        } else if is_open(x) {
            self.page(s, newest(s.roots_sent, 1).unwrap_or(x.base))?;
        }
        self.recovery(s)
    }
}

/// The end, the base and the preceding cut of an epoch, as an opener finds them if no other actor acts. The end
/// is 0 if the epoch was never opened.
fn undisturbed(s: &State, epoch: usize) -> (u8, Checkpoint, Option<u8>) {
    let root = newest(s.roots, epoch);
    let (mut at, mut base) = (root.map_or(0, |id| after(epoch, id)), root.unwrap_or(0));
    let mut cut = None;
    while usize::from(at) < SLOTS[epoch] {
        match s.logs[epoch][usize::from(at)] {
            Slot::Empty | Slot::Seal => break,
            Slot::Base(id) => base = base.max(id),
            Slot::Open { cut: before, base: first, .. } => {
                (cut, base) = (Some(before), base.max(first));
            }
            Slot::Data => {}
        }
        at += 1;
    }
    (at, base, cut)
}

impl Model for Takeover {
    type State = State;

    fn initial(&self) -> State {
        let writer = Writer {
            is_open: false,
            is_fenced: false,
            sent: [Slot::Empty; SLOTS[0]],
            marks: [0; SLOTS[0]],
            next: 0,
            confirmed: 0,
            base: 0,
        };
        let (epoch, second) = match self.with_loss {
            true => (0, Phase::Stopped),
            false => (usize::from(self.has(Rule::Claim)), Phase::List),
        };
        let opener = Opener {
            phase: Phase::List,
            epoch: 0,
            at: 0,
            base: 0,
            cuts: [None; 2],
            ignores_witness: false,
        };
        State {
            logs: [[Slot::Empty; SLOTS[0]]; 2],
            roots: 0,
            roots_sent: 0,
            seals_sent: [0; 2],
            writers: [Writer { is_open: true, ..writer }, writer],
            openers: [opener, Opener { phase: second, epoch, ..opener }],
            swept: 0,
            is_lost: false,
        }
    }

    fn steps(&self, s: &State, next: &mut Steps) {
        if s.openers.iter().all(|o| [Phase::Stopped, Phase::Damaged].contains(&o.phase)) {
            return;
        }
        self.landings(s, next);
        for index in 0..2 {
            self.writer(s, index, next);
            self.opener(s, index, next);
        }
        if self.with_loss && !s.is_lost {
            for at in 0..s.writers[0].confirmed {
                let mut after = State { is_lost: true, ..*s };
                after.logs[0][usize::from(at)] = Slot::Empty;
                next.push((("store", "loses", at), after));
            }
        }
    }

    fn violation(&self, s: &State) -> Option<String> {
        self.check_all(s).err()
    }
}

const NAMES: [&str; 2] = ["epoch 1", "epoch 2"];
const WRITERS: [&str; 2] = ["W", "X, open,"];
const OPENERS: [&str; 2] = ["X", "Y"];

/// The OPEN record of an opener.
fn open(by: u8, o: &Opener) -> Slot {
    Slot::Open { by, cut: o.cuts[0].unwrap_or(0), base: o.base }
}

fn checkpoint(epoch: usize, at: u8) -> Checkpoint {
    if epoch == 0 { at + 1 } else { number(SLOTS[0]) + at + 1 }
}

/// The first slot of `epoch` that the checkpoint does not cover.
fn after(epoch: usize, id: Checkpoint) -> u8 {
    if epoch == 0 { id.min(number(SLOTS[0])) } else { id - number(SLOTS[0]) }
}

/// The newest checkpoint of `epoch` among `roots`.
fn newest(roots: u16, epoch: usize) -> Option<Checkpoint> {
    bits(roots).filter(|id| (*id > number(SLOTS[0])) == (epoch == 1)).last()
}

fn bits(set: u16) -> impl Iterator<Item = u8> {
    (0..16).filter(move |bit| set & 1 << bit != 0)
}

fn number(index: usize) -> u8 {
    u8::try_from(index).unwrap()
}

/// The number of slots of epoch 1 and of epoch 2 are in `CLEAT_MODEL_SLOTS`, for example `3,2`, which takes two
/// minutes.
#[test]
fn no_take_over_loses_acknowledged_data() {
    let given = std::env::var("CLEAT_MODEL_SLOTS").ok();
    let scopes = given.map_or(vec![[2, 2], [3, 1]], |text| {
        let slots: Vec<usize> = text.split(',').map(|slots| slots.parse().unwrap()).collect();
        vec![slots.try_into().unwrap()]
    });
    for slots in scopes {
        let found = explore(&Takeover { slots, without: None, with_loss: false });
        assert_eq!(found.violation, None);
        assert!(found.states > 50_000, "{} states", found.states);
    }
}

#[test]
fn a_lost_slot_is_reported_if_a_later_slot_proves_it() {
    let found = explore(&Takeover { slots: [3, 1], without: None, with_loss: true });
    assert_eq!(found.violation, None);
}

#[test]
fn every_rule_of_a_take_over_is_needed() {
    use Rule::{Base, Claim, Commit, Contiguous, KeepSeals, Nonce, Rebase, Recheck, Witness};
    for rule in [Commit, Recheck, Nonce, Contiguous, Base, Rebase, KeepSeals, Claim, Witness] {
        let with_loss = rule == Witness;
        let found = explore(&Takeover { slots: [3, 2], without: Some(rule), with_loss });
        assert!(found.violation.is_some(), "without {rule:?}: {} states", found.states);
    }
}
