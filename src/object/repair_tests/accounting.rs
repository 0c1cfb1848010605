//! The accounting of the space, and what nothing refers to.

use super::{Damaged, Objects, config, descriptions, plain};
use crate::codec::{Damage, Identity, LogObject, Usage};
use crate::name::{Name, Position};
use crate::snapshot_tests::take;
use crate::tests::block_on;
use crate::volume::Repair;

/// Changes a page of the accounting.
pub(super) fn forge(damaged: &Damaged, change: impl Fn(&mut Usage) -> bool) {
    let mut objects = damaged.memory.objects.lock().unwrap();
    for (name, bytes) in objects.iter_mut() {
        let Some(Name::Page { epoch, number }) = Name::parse(name) else { continue };
        let volume = plain().volume;
        let Ok(mut page) = Usage::decode(Identity { volume, epoch, number }, bytes) else {
            continue;
        };
        if change(&mut page) {
            *bytes = page.encode();
            return;
        }
    }
    panic!("no page was changed");
}

#[test]
fn wrong_counts_of_the_accounting_are_corrected() {
    for description in descriptions() {
        type Forgery = fn(&mut Usage) -> bool;
        let forgeries: [Forgery; 3] = [
            |page| {
                page.objects.last_mut().is_some_and(|object| {
                    object.live = 512;
                    true
                })
            },
            |page| page.objects.pop().is_some(),
            |page| {
                page.objects.first_mut().is_some_and(|object| {
                    (object.live, object.dead_since) = (0, Some(Position { epoch: 1, slot: 1 }));
                    true
                })
            },
        ];
        for forgery in forgeries {
            let mut damaged = Damaged::new(&description);
            let volume = damaged.open().unwrap();
            damaged.write(&volume, 0..20, 1);
            damaged.settle(&volume);
            drop(volume);
            forge(&damaged, forgery);
            let found = damaged.repairs();
            assert!(matches!(found.repairs[..], [Repair::Usage(_)]), "{found:?}");
            let volume = damaged.open().unwrap();
            damaged.write(&volume, 0..3, 9);
            damaged.settle(&volume);
            damaged.has_content(&volume);
        }
    }
}

#[test]
fn what_only_a_snapshot_needs_is_accounted_again() {
    for lose_page in [false, true] {
        let mut damaged = Damaged::new(&plain());
        let volume = damaged.open().unwrap();
        damaged.write(&volume, 0..20, 1);
        damaged.settle(&volume);
        let id = take(&volume, "s");
        let taken = damaged.content.clone();
        damaged.write(&volume, 0..20, 2);
        damaged.settle(&volume);
        drop(volume);
        // Nothing says any more that the objects of the first round are needed.
        if lose_page {
            let mut checked = Vec::new();
            for page in damaged.names("page/") {
                let before = damaged.objects();
                damaged.remove(page);
                let found = damaged.plan();
                checked.push(found.repairs.iter().any(|r| matches!(r, Repair::UsagePage(_))));
                if *checked.last().unwrap() {
                    break;
                }
                *damaged.memory.objects.lock().unwrap() = before;
            }
            assert!(checked.contains(&true));
        } else {
            forge(&damaged, |page| {
                let before = page.objects.len();
                page.objects.retain(|object| object.live > 0);
                page.objects.len() < before
            });
        }
        let found = damaged.repairs();
        assert!(!found.repairs.is_empty() && found.leftovers.is_empty(), "{found:?}");
        let volume = damaged.open().unwrap();
        damaged.settle(&volume);
        let view = block_on(volume.view_snapshot(id, config())).unwrap();
        let mut read = vec![0; taken.len()];
        block_on(view.read(0, &mut read)).unwrap();
        assert!(read == taken, "the snapshot has its content");
    }
}

/// A later writer would otherwise delete what only the snapshot needs.
#[test]
fn all_objects_are_accounted_if_a_part_is_lost_and_a_snapshot_cannot_be_read() {
    let mut damaged = Damaged::new(&plain());
    let volume = damaged.open().unwrap();
    damaged.write(&volume, 0..20, 1);
    damaged.settle(&volume);
    take(&volume, "s");
    let leaf = damaged.names("page/")[0];
    damaged.write(&volume, 0..20, 2);
    damaged.settle(&volume);
    drop(volume);
    let volume = plain().volume;
    let is_usage = |name: &Name| {
        let Name::Page { epoch, number } = *name else { return false };
        let bytes = &damaged.objects()[&name.to_string()];
        Usage::decode(Identity { volume, epoch, number }, bytes).is_ok()
    };
    let usage = damaged.names("page/").into_iter().rfind(is_usage).unwrap();
    let data: Vec<Name> = damaged.names("log/").into_iter().take(20).collect();
    damaged.remove(usage);
    damaged.remove(leaf);
    let found = damaged.repair();
    assert!(matches!(found.repairs[..], [Repair::UsagePage(_)]), "{found:?}");
    assert_eq!((found.refusals.len(), found.leftover_count), (1, 0), "{found:?}");
    let volume = damaged.open().unwrap();
    damaged.settle(&volume);
    damaged.has_content(&volume);
    let kept = damaged.names("log/");
    assert!(data.iter().all(|name| kept.contains(name)), "{kept:?}");
}

#[test]
fn objects_that_nothing_refers_to_are_deleted() {
    for description in descriptions() {
        let mut damaged = Damaged::new(&description);
        let volume = damaged.open().unwrap();
        let mut before = Objects::new();
        for round in 1..4 {
            damaged.write(&volume, 0..20, round);
            before.extend(damaged.objects());
            damaged.settle(&volume);
        }
        take(&volume, "s");
        damaged.write(&volume, 0..20, 4);
        damaged.settle(&volume);
        drop(volume);
        damaged.is_intact();
        // Puts that arrive late, or deletions that were never executed.
        let kept = damaged.objects();
        damaged.memory.objects.lock().unwrap().extend(before.clone());
        let late: Vec<Name> = before
            .keys()
            .filter(|name| !kept.contains_key(*name))
            .map(|name| Name::parse(name).unwrap())
            .collect();
        for kind in ["log/", "page/", "ckpt/"] {
            assert!(late.iter().any(|name| name.to_string().starts_with(kind)), "{kind}");
        }
        let mut found = damaged.repairs();
        let mut late = late;
        late.sort_unstable();
        found.leftovers.sort_unstable();
        assert_eq!((found.leftovers, found.leftover_count), (late.clone(), late.len() as u64));
        assert_eq!(found.repairs, []);
        assert!(late.iter().all(|name| !damaged.objects().contains_key(&name.to_string())));
    }
}

/// A seal looks like an object that nothing refers to.
#[test]
fn seals_are_kept() {
    let mut damaged = Damaged::new(&plain());
    for round in 1..4 {
        let volume = damaged.open().unwrap();
        damaged.write(&volume, 0..4, round);
        damaged.settle(&volume);
    }
    let seals = |damaged: &Damaged| {
        let is_seal = |name: &&Name| {
            let Name::Slot(at) = **name else { return false };
            let volume = plain().volume;
            let identity = Identity { volume, epoch: at.epoch, number: at.slot };
            matches!(
                LogObject::decode(identity, &damaged.objects()[&name.to_string()]),
                Err(Damage::Kind(_))
            )
        };
        damaged.names("log/").iter().filter(is_seal).copied().collect::<Vec<_>>()
    };
    let before = seals(&damaged);
    assert!(before.len() >= 2, "{before:?}");
    let late = Name::Page { epoch: 1, number: 999 };
    damaged.memory.objects.lock().unwrap().insert(late.to_string(), vec![1, 2, 3]);
    assert_eq!(damaged.repairs().leftovers, [late]);
    let after = seals(&damaged);
    assert!(before.iter().all(|seal| after.contains(seal)), "{before:?} {after:?}");
}
