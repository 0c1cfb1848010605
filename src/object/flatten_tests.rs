//! Flattening of clones on a store that always works.

use std::future::poll_fn;
use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use crate::clone_tests::{Interposed, Stores};
use crate::codec::Compression;
use crate::encryption::KeyFile;
use crate::name::{Nonce, SnapshotId};
use crate::rules::{Rule, without};
use crate::snapshot_tests::{settle, take};
use crate::store::{Store, StoreError};
use crate::tests::{Memory, block_on, byte_at, create, open, yield_once};
use crate::volume::{Config, Failure, Flattening, Parents, Place, Volume};

const MIB: u64 = 1 << 20;

/// The data of the parent in each MiB of the volume, from its sector 1 on.
const DATA: usize = 200 << 10;

/// A volume with a snapshot, and a clone of it in the second store.
struct Family {
    memories: [Arc<Memory>; 2],
    stores: Vec<Arc<dyn Store>>,
    parent: Volume,
    snapshot: SnapshotId,
    key: Option<KeyFile>,
}

impl Family {
    fn new() -> Self {
        Self::with(None)
    }

    fn with(compression: Option<Compression>) -> Self {
        let memories: [Arc<Memory>; 2] = [Arc::default(), Arc::default()];
        let stores: Vec<Arc<dyn Store>> = memories.iter().map(|one| Arc::clone(one) as _).collect();
        create(&stores[0], 8 * MIB);
        let parent = open(&stores[0], 10, Config::default()).unwrap();
        with_volume(&parent, async {
            for number in 0..8 {
                parent.write(number * MIB + 512, &vec![1; DATA]).await?;
            }
            parent.flush().await
        })
        .unwrap();
        settle(&parent, &memories[0]);
        let snapshot = take(&parent, "s");
        let family = Self { memories, stores, parent, snapshot, key: None };
        Stores(&family.stores).clone_with(1, snapshot, compression, None).unwrap();
        family
    }

    fn find(&self, nonce: u8) -> Result<Place, Failure> {
        Stores(&self.stores).find(1, nonce, self.key.as_ref())
    }

    /// Opens the clone, with objects that are shorter than the data of a page, and a short tail.
    fn open(&self, nonce: u8) -> Result<(Place, Volume), Failure> {
        let place = self.find(nonce)?;
        let config = Config { object_bytes: 64 << 10, tail_bytes: 512 << 10, ..Config::default() };
        let opened = async { place.open(place.claim_next("node").await?, config).await };
        let volume = block_on(opened)?;
        Ok((place, volume))
    }

    /// Removes the parent with everything that it has.
    fn remove_parent(&self) {
        self.memories[0].objects.lock().unwrap().clear();
    }

    fn has(&self, at: usize, prefix: &str) -> bool {
        self.memories[at].objects.lock().unwrap().keys().any(|name| name.starts_with(prefix))
    }
}

/// Runs a future beside the work of the volume. What receives the progress is not sent to other threads.
fn with_volume<T>(
    volume: &Volume,
    future: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let (mut run, mut work) = (pin!(volume.run()), pin!(future));
    block_on(poll_fn(|context| {
        if let Poll::Ready(failure) = run.as_mut().poll(context) {
            return Poll::Ready(Err(failure));
        }
        work.as_mut().poll(context)
    }))
}

fn flatten(volume: &Volume) -> Result<(), Failure> {
    with_volume(volume, async { volume.flatten(&mut |_, _| ControlFlow::Continue(())).await })
}

/// The first bytes of each MiB, from sector 1 on, and the last one of the data.
fn bytes(volume: &Volume) -> Vec<[u8; 3]> {
    let last = (DATA as u64).next_multiple_of(512);
    let at = |offset| block_on(byte_at(volume, offset)).unwrap();
    (0..8).map(|mib| [512, last, last + 512].map(|offset| at(mib * MIB + offset))).collect()
}

#[test]
fn a_flattened_clone_reads_nothing_from_its_parent() {
    for compression in [None, Some(Compression::Lz4)] {
        let family = Family::with(compression);
        let (place, clone) = family.open(20).unwrap();
        with_volume(&clone, async {
            clone.write(MIB + 512, &vec![2; DATA]).await?;
            clone.trim(2 * MIB, MIB).await?;
            clone.flush().await
        })
        .unwrap();
        let before = family.parent.snapshots().len();
        let mut steps = Vec::new();
        let flattened = with_volume(&clone, async {
            clone
                .flatten(&mut |done, total| {
                    steps.push((done, total));
                    ControlFlow::Continue(())
                })
                .await
        });
        flattened.unwrap();
        assert!(steps.is_sorted() && steps.last() == Some(&(8 * MIB, 8 * MIB)), "{steps:?}");
        // The parent has a sector and 8 ranges. Of these, one was overwritten in the clone, and one trimmed.
        assert_eq!(clone.status().live_bytes, 512 + 7 * DATA as u64);
        assert!(place.parent().is_some());
        block_on(place.make_independent()).unwrap();
        with_volume(&family.parent, async { family.parent.delete_snapshot(family.snapshot).await })
            .unwrap();
        assert_eq!(family.parent.snapshots().len(), before - 1);
        family.remove_parent();
        drop(clone);

        let (place, clone) = family.open(21).unwrap();
        assert!(place.parent().is_none() && block_on(place.is_pinned()).unwrap());
        let mut expected = vec![[1, 1, 0]; 8];
        (expected[1], expected[2]) = ([2, 2, 0], [0, 0, 0]);
        assert_eq!(bytes(&clone), expected);
        with_volume(&clone, async { clone.check_accounting().await }).unwrap();
        take(&clone, "own");
        assert_eq!(flatten(&clone), Ok(()));
        settle(&clone, &family.memories[1]);
        drop(clone);
        let (_, clone) = family.open(22).unwrap();
        assert_eq!(bytes(&clone)[3..], expected[3..]);
    }
}

#[test]
fn an_encrypted_clone_is_flattened_with_its_own_key() {
    let mut family = Family::new();
    let file = KeyFile::new(&[7; 32]).unwrap();
    family.memories[0].objects.lock().unwrap().clear();
    family.memories[1].objects.lock().unwrap().clear();
    let mut description = crate::tests::description(8 * MIB, 1 << 20);
    description.key = Some(file.wrap(&description, &[3; 32]));
    block_on(Volume::create(Arc::clone(&family.stores[0]), &description)).unwrap();
    family.key = Some(file.clone());
    let stores = Stores(&family.stores);
    let parent = stores.open_with(0, 10, family.key.as_ref());
    with_volume(&parent, async {
        parent.write(512, &vec![1; DATA]).await?;
        parent.flush().await
    })
    .unwrap();
    stores.clone_with(1, take(&parent, "s"), None, family.key.as_ref()).unwrap();
    let (place, clone) = family.open(20).unwrap();
    flatten(&clone).unwrap();
    block_on(place.make_independent()).unwrap();
    family.remove_parent();
    drop(clone);
    let (_, clone) = family.open(21).unwrap();
    assert_eq!(bytes(&clone)[0], [1, 1, 0]);
}

/// Flattens in processes that end after `polls` polls, beside writes. The last one completes it.
fn flatten_in_pieces(family: &Family, polls: usize) {
    let last = (DATA as u64).next_multiple_of(512);
    for process in 0..9_u8 {
        let (place, clone) = family.open(20 + process).unwrap();
        let expected: Vec<u8> = (0..8).map(|mib| if process > mib { 5 } else { 1 }).collect();
        assert_eq!(bytes(&clone).iter().map(|found| found[1]).collect::<Vec<_>>(), expected);
        with_volume(&clone, async {
            clone.start_flatten();
            for _ in 0..polls {
                yield_once().await;
            }
            // The write of this process follows what was copied.
            if process < 8 {
                clone.write(u64::from(process) * MIB + last, &[5; 512]).await?;
                return clone.flush().await;
            }
            clone.flatten(&mut |_, _| ControlFlow::Continue(())).await
        })
        .unwrap();
        if process == 8 {
            block_on(place.make_independent()).unwrap();
        }
    }
}

#[test]
fn a_flattening_that_was_interrupted_anywhere_goes_on() {
    for polls in [0, 1, 2, 3, 10, 40, 150] {
        let family = Family::new();
        flatten_in_pieces(&family, polls);
        family.remove_parent();
        let (_, clone) = family.open(200).unwrap();
        assert_eq!(bytes(&clone), vec![[1, 5, 0]; 8], "{polls} polls");
    }
}

#[test]
fn a_flattening_that_goes_on_copies_nothing_again() {
    let family = Family::new();
    let (_, clone) = family.open(20).unwrap();
    flatten(&clone).unwrap();
    let copied = family.memories[1].put_bytes();
    assert!(copied > 8 * DATA as u64);
    drop(clone);
    let (_, clone) = family.open(21).unwrap();
    flatten(&clone).unwrap();
    let more = family.memories[1].put_bytes() - copied;
    assert!(more < 64 << 10, "{more} bytes were put again");
}

#[test]
fn a_pause_interrupts_a_flattening_and_a_stop_ends_it() {
    let family = Family::new();
    let (_, clone) = family.open(20).unwrap();
    with_volume(&clone, async {
        clone.start_flatten();
        yield_once().await;
        clone.pause().await?;
        let paused = clone.flattening();
        assert_eq!(paused, Flattening::Running { done: 0, total: 8 * MIB });
        for _ in 0..200 {
            yield_once().await;
        }
        assert_eq!(clone.flattening(), paused);
        clone.resume();
        clone.stop_flatten();
        let stopped = clone.flatten(&mut |_, _| ControlFlow::Break(())).await;
        assert_eq!(stopped, Err(Failure::Invalid("the flattening was stopped")));
        assert_eq!(clone.flattening(), Flattening::Idle);
        clone.flatten(&mut |_, _| ControlFlow::Continue(())).await
    })
    .unwrap();
}

#[test]
fn a_snapshot_that_needs_the_parent_forbids_a_flattening() {
    let family = Family::new();
    let (_, clone) = family.open(20).unwrap();
    let early = take(&clone, "early");
    assert_eq!(flatten(&clone), Err(Failure::NeedParent(vec!["early".into()])));
    assert!(clone.status().live_bytes == 0, "nothing was copied");
    with_volume(&clone, async { clone.delete_snapshot(early).await }).unwrap();
    // A snapshot that is taken before everything is copied is found at the end.
    let late = with_volume(&clone, async {
        clone.start_flatten();
        while !matches!(clone.flattening(), Flattening::Running { done, .. } if done > 0) {
            yield_once().await;
        }
        let late = clone.take_snapshot("late", 0).await?;
        let ended = clone.flatten(&mut |_, _| ControlFlow::Continue(())).await;
        assert_eq!(ended, Err(Failure::NeedParent(vec!["late".into()])));
        Ok(late)
    })
    .unwrap();
    with_volume(&clone, async { clone.delete_snapshot(late).await }).unwrap();
    flatten(&clone).unwrap();
    // One that starts from a checkpoint without references does not.
    take(&clone, "own");
    drop(clone);
    let (place, clone) = family.open(21).unwrap();
    flatten(&clone).unwrap();
    block_on(place.make_independent()).unwrap();
    family.remove_parent();
    let own = clone.snapshots()[0].id;
    let view = with_volume(&clone, async { clone.view_snapshot(own, Config::default()).await });
    assert_eq!(bytes(&view.unwrap()), vec![[1, 1, 0]; 8]);
}

/// Flattens, ends the process, removes the parent, and reads the clone and its snapshots.
fn is_readable_without(rule: Option<Rule>, has_snapshot: bool) -> bool {
    without(rule, || {
        let family = Family::new();
        let (place, clone) = family.open(20).unwrap();
        if has_snapshot {
            take(&clone, "early");
        }
        if flatten(&clone).is_err() {
            return true;
        }
        drop(clone);
        block_on(place.make_independent()).unwrap();
        family.remove_parent();
        let Ok((_, clone)) = family.open(21) else { return false };
        clone.snapshots().into_iter().all(|snapshot| {
            let view = async { clone.view_snapshot(snapshot.id, Config::default()).await };
            with_volume(&clone, async { byte_at(&view.await?, 512).await }).is_ok()
        })
    })
}

/// Writes at any moment of a flattening, and returns whether nothing is copied over the new data.
fn keeps_what_is_written_meanwhile(rule: Option<Rule>) -> bool {
    let last = (DATA as u64).next_multiple_of(512);
    without(rule, || {
        (0..40).all(|polls| {
            let family = Family::new();
            let (_, clone) = family.open(20).unwrap();
            with_volume(&clone, async {
                clone.start_flatten();
                for _ in 0..polls {
                    yield_once().await;
                }
                for mib in 0..8 {
                    clone.write(mib * MIB + last, &[5; 512]).await?;
                }
                clone.flatten(&mut |_, _| ControlFlow::Continue(())).await
            })
            .unwrap();
            bytes(&clone) == vec![[1, 5, 0]; 8]
        })
    })
}

#[test]
fn each_rule_of_flattening_is_needed() {
    assert!(keeps_what_is_written_meanwhile(None));
    assert!(!keeps_what_is_written_meanwhile(Some(Rule::Copy)));
    assert!(is_readable_without(None, false));
    assert!(is_readable_without(None, true));
    assert!(!is_readable_without(Some(Rule::OwnBase), false));
    assert!(!is_readable_without(Some(Rule::OwnSnapshots), true));
}

/// Whether the clone still has its pin when it says that it needs no parent.
fn is_pinned_until_it_is_flat(rule: Option<Rule>) -> bool {
    without(rule, || {
        let family = Family::new();
        flatten(&family.open(20).unwrap().1).unwrap();
        let store = Arc::new(Interposed::of(&family.memories[1]));
        let (parent, is_pinned) =
            (Arc::clone(&family.memories[0]), Arc::new(Mutex::new(Vec::new())));
        let seen = Arc::clone(&is_pinned);
        store.before("flat", move || {
            let objects = parent.objects.lock().unwrap();
            seen.lock().unwrap().push(objects.keys().any(|name| name.starts_with("pin/")));
        });
        let stores = [Arc::clone(&family.stores[0]), store as Arc<dyn Store>];
        let place = Stores(&stores).find(1, 40, None).unwrap();
        block_on(place.make_independent()).unwrap();
        assert!(!family.has(0, "pin/") && family.has(1, "flat"));
        let seen = is_pinned.lock().unwrap().clone();
        seen == [true]
    })
}

#[test]
fn the_pin_is_removed_only_after_the_clone_says_that_it_needs_no_parent() {
    assert!(is_pinned_until_it_is_flat(None));
    assert!(!is_pinned_until_it_is_flat(Some(Rule::FlatFirst)));
    // A call that is interrupted in the middle leaves a clone that is independent and has a pin.
    let family = Family::new();
    let (place, clone) = family.open(20).unwrap();
    flatten(&clone).unwrap();
    block_on(family.stores[1].create("flat", b"")).unwrap();
    assert!(family.find(21).unwrap().parent().is_none() && family.has(0, "pin/"));
    block_on(place.make_independent()).unwrap();
    assert!(!family.has(0, "pin/"));
}

/// The clone is flattened, and its parent removed, between the two looks of an opener.
struct Removing<'a> {
    family: &'a Family,
    event: Mutex<Option<Box<dyn FnOnce() + Send + 'a>>>,
}

impl Parents for Removing<'_> {
    fn store(&self, _: &str) -> Result<Arc<dyn Store>, StoreError> {
        if let Some(event) = self.event.lock().unwrap().take() {
            event();
        }
        Ok(Arc::clone(&self.family.stores[0]))
    }
}

#[test]
fn an_opener_finds_a_clone_that_is_flattened_meanwhile() {
    let family = Family::new();
    let (place, clone) = family.open(20).unwrap();
    flatten(&clone).unwrap();
    let event = || {
        block_on(place.make_independent()).unwrap();
        family.remove_parent();
    };
    let parents = Removing { family: &family, event: Mutex::new(Some(Box::new(event))) };
    let store = Arc::clone(&family.stores[1]);
    let found = block_on(Place::find_clone(store, Nonce([30; 16]), &parents, None)).unwrap();
    assert!(found.parent().is_none());
    let view = block_on(found.view(Config::default())).unwrap();
    assert_eq!(block_on(byte_at(&view, 512)), Ok(1));
}

#[test]
fn a_flattened_clone_without_its_checkpoint_is_not_taken_for_an_empty_volume() {
    let family = Family::new();
    let (place, clone) = family.open(20).unwrap();
    flatten(&clone).unwrap();
    block_on(place.make_independent()).unwrap();
    family.remove_parent();
    drop(clone);
    let is_checkpoint = |name: &String| name.starts_with("ckpt/");
    family.memories[1].objects.lock().unwrap().retain(|name, _| !is_checkpoint(name));
    assert!(matches!(family.open(21), Err(Failure::Lost(_))));
    let place = family.find(22).unwrap();
    let mut on = |_, _| ControlFlow::Continue(());
    let found = block_on(place.plan_repair(Config::default(), &mut on)).unwrap();
    assert!(!found.has_work() && !found.refusals.is_empty(), "{found:?}");
}
