//! What keeps a map from being rebuilt: each proof that fails.

use super::accounting::forge;
use super::{Damaged, plain, with_two_checkpoints};
use crate::codec::{Identity, Leaf};
use crate::name::{Name, Position};
use crate::volume::{Failure, Repair};

/// A volume whose newest checkpoint is lost, and what else is wrong with it.
fn without_newest(change: impl Fn(&Damaged)) -> String {
    let mut damaged = with_two_checkpoints(&plain());
    let newest = *damaged.names("ckpt/").last().unwrap();
    damaged.remove(newest);
    change(&damaged);
    let refusal = damaged.is_refused().refusals.remove(0);
    assert_eq!(refusal.failure, Failure::Lost(newest));
    refusal.reason
}

#[test]
fn a_map_that_refers_to_a_lost_object_is_not_taken() {
    // The older checkpoint covers it.
    let lost = Name::Slot(Position { epoch: 1, slot: 1 });
    let reason = without_newest(|damaged| damaged.remove(lost));
    assert!(reason.contains(&format!("{lost} is lost")), "{reason}");
}

/// The map is rebuilt from the beginning of the log, and not from the older checkpoint.
fn avoids_the_older_one(change: impl Fn(&Damaged)) {
    let mut damaged = with_two_checkpoints(&plain());
    damaged.remove(*damaged.names("ckpt/").last().unwrap());
    change(&damaged);
    let found = damaged.repairs();
    let [Repair::Checkpoint { from, .. }] = &found.repairs[..] else { panic!("{found:?}") };
    assert_eq!(from.base, None);
}

#[test]
fn a_map_that_differs_from_its_accounting_is_not_taken() {
    avoids_the_older_one(|damaged| {
        forge(damaged, |page| {
            page.objects[3].live = 512;
            true
        });
    });
}

#[test]
fn a_map_whose_pages_are_lost_is_not_taken() {
    // The replay needs only the other page.
    avoids_the_older_one(|damaged| damaged.remove(damaged.names("page/")[1]));
}

#[test]
fn a_map_that_differs_from_what_can_be_read_is_not_taken() {
    let mut damaged = with_two_checkpoints(&plain());
    let pages = damaged.names("page/");
    // A leaf that the log above does not change, and the one before it, the index and the accounting.
    let [.., first, second, _, _] = pages[..] else { panic!("{pages:?}") };
    damaged.remove(second);
    assert_eq!(damaged.plan().refusals, []);
    let Name::Page { epoch, number } = first else { panic!("{first}") };
    let identity = Identity { volume: plain().volume, epoch, number };
    {
        let mut objects = damaged.memory.objects.lock().unwrap();
        let bytes = objects.get_mut(&first.to_string()).unwrap();
        let mut leaf = Leaf::decode(identity, bytes).unwrap();
        leaf.entries.remove(1);
        *bytes = leaf.encode();
    }
    let found = damaged.is_refused();
    let reason = &found.refusals[0].reason;
    assert!(reason.contains("differs from what can be read"), "{reason}");
}
