//! The names of objects, and the identities in them.
//!
//! Numbers in names have 16 hexadecimal digits, so that a listing, which is in the order of the bytes, is in
//! the order of the numbers.

use std::fmt;

/// The identity of a volume. No two volumes ever have the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub [u8; 16]);

/// The identity of one attempt to open a volume. An opener draws it at random; it is in every object that the
/// opener creates, so that the opener recognizes its own objects after an answer was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce(pub [u8; 16]);

/// A slot of the log. Positions are in the order of the history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The epoch, counted from 1.
    pub epoch: u64,
    /// The slot in the epoch, counted from 0.
    pub slot: u64,
}

/// A snapshot. The identity is never used again, also after the snapshot was deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotId {
    /// The epoch in which the snapshot was taken.
    pub epoch: u64,
    /// The number among the snapshots of the epoch.
    pub number: u64,
}

/// The name of an object, relative to the volume's prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Name {
    /// The description of the volume.
    Description,
    /// The claim of an epoch.
    Claim(u64),
    /// The statement of an epoch's claimant that it has stopped.
    Release(u64),
    /// A slot of the log: a log object or a seal.
    Slot(Position),
    /// A page of the map, of its index or of the usage, by the epoch of its writer and a number.
    Page {
        /// The epoch in which the page was written.
        epoch: u64,
        /// The number among the pages of the epoch.
        number: u64,
    },
    /// The checkpoint that covers the history up to and including a slot.
    Checkpoint(Position),
    /// The statement that the volume, a clone, needs no object of its parent.
    Flat,
    /// The reference of a clone to a snapshot of this volume.
    Pin(SnapshotId, VolumeId),
    /// The token of an attempt to delete a snapshot.
    Token {
        /// The snapshot.
        snapshot: SnapshotId,
        /// The epoch of the writer that deletes it.
        epoch: u64,
        /// The number of the attempt in that epoch.
        attempt: u64,
    },
}

impl Name {
    /// Parses a name that a listing has returned. `None` if no object of a volume has this name; the name is
    /// the only one that [`Name::to_string`] gives for the value.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let kind = parts.next()?;
        let (first, second) = (parts.next(), parts.next());
        if parts.next().is_some() {
            return None;
        }
        let pair = || Some((number(first?)?, number(second?)?));
        Some(match (kind, second) {
            ("desc", None) if first.is_none() => Self::Description,
            ("flat", None) if first.is_none() => Self::Flat,
            ("epoch", None) => Self::Claim(number(first?)?),
            ("free", None) => Self::Release(number(first?)?),
            ("log", _) => pair().map(|(epoch, slot)| Self::Slot(Position { epoch, slot }))?,
            ("page", _) => pair().map(|(epoch, number)| Self::Page { epoch, number })?,
            ("ckpt", _) => {
                pair().map(|(epoch, slot)| Self::Checkpoint(Position { epoch, slot }))?
            }
            ("pin", Some(clone)) => Self::Pin(snapshot(first?)?, volume(clone)?),
            ("dead", Some(attempt)) => {
                let (epoch, attempt) = attempt.split_once('-')?;
                let (epoch, attempt) = (number(epoch)?, number(attempt)?);
                Self::Token { snapshot: snapshot(first?)?, epoch, attempt }
            }
            _ => return None,
        })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Description => f.write_str("desc"),
            Self::Flat => f.write_str("flat"),
            Self::Claim(epoch) => write!(f, "epoch/{epoch:016x}"),
            Self::Release(epoch) => write!(f, "free/{epoch:016x}"),
            Self::Slot(at) => write!(f, "log/{:016x}/{:016x}", at.epoch, at.slot),
            Self::Page { epoch, number } => write!(f, "page/{epoch:016x}/{number:016x}"),
            Self::Checkpoint(at) => write!(f, "ckpt/{:016x}/{:016x}", at.epoch, at.slot),
            Self::Pin(snapshot, clone) => write!(f, "pin/{snapshot}/{clone}"),
            Self::Token { snapshot, epoch, attempt } => {
                write!(f, "dead/{snapshot}/{epoch:016x}-{attempt:016x}")
            }
        }
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{:016x}", self.epoch, self.number)
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// Parses 16 lowercase hexadecimal digits.
fn number(text: &str) -> Option<u64> {
    is_hex(text, 16).then(|| u64::from_str_radix(text, 16).ok())?
}

fn snapshot(text: &str) -> Option<SnapshotId> {
    let (epoch, index) = text.split_once('-')?;
    Some(SnapshotId { epoch: number(epoch)?, number: number(index)? })
}

fn volume(text: &str) -> Option<VolumeId> {
    let id = is_hex(text, 32).then(|| u128::from_str_radix(text, 16).ok())??;
    Some(VolumeId(id.to_be_bytes()))
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names() -> impl Strategy<Value = Name> {
        let snapshot = any::<(u64, u64)>().prop_map(|(epoch, number)| SnapshotId { epoch, number });
        let position = any::<(u64, u64)>().prop_map(|(epoch, slot)| Position { epoch, slot });
        prop_oneof![
            Just(Name::Flat),
            Just(Name::Description),
            any::<u64>().prop_map(Name::Claim),
            any::<u64>().prop_map(Name::Release),
            position.clone().prop_map(Name::Slot),
            any::<(u64, u64)>().prop_map(|(epoch, number)| Name::Page { epoch, number }),
            position.prop_map(Name::Checkpoint),
            (snapshot.clone(), any::<[u8; 16]>())
                .prop_map(|(snapshot, clone)| Name::Pin(snapshot, VolumeId(clone))),
            (snapshot, any::<(u64, u64)>()).prop_map(|(snapshot, (epoch, attempt))| Name::Token {
                snapshot,
                epoch,
                attempt
            }),
        ]
    }

    proptest! {
        #[test]
        fn a_name_is_parsed_to_itself(name in names()) {
            prop_assert_eq!(Name::parse(&name.to_string()), Some(name));
        }

        #[test]
        fn a_text_is_no_name_or_the_name_of_its_value(text in "[a-g0-9/-]{0,60}|(log|ckpt)/[0-9a-f]{16}/[0-9a-fA-F+]{15,17}") {
            if let Some(name) = Name::parse(&text) {
                prop_assert_eq!(name.to_string(), text);
            }
        }

        #[test]
        fn the_order_of_slots_is_that_of_their_names(a in any::<(u64, u64)>(), b in any::<(u64, u64)>()) {
            let [a, b] = [a, b].map(|(epoch, slot)| Position { epoch, slot });
            let names = [a, b].map(|at| Name::Slot(at).to_string());
            prop_assert_eq!(a.cmp(&b), names[0].cmp(&names[1]));
        }
    }
}
