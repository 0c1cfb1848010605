//! The repair of volumes, on a store that always works and has lost or damaged some objects.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use crate::clone_tests::Stores;
use crate::codec::{Compression, Description, Identity, LogObject};
use crate::encryption::KeyFile;
use crate::name::{Name, Position};
use crate::snapshot_tests::{settle, take};
use crate::store::Store;
use crate::tests::{Memory, block_on, description, with_volume};
use crate::volume::{Check, Config, Depth, Failure, Findings, Place, Repair, Volume};

mod accounting;
mod evicted;
mod interrupted;
mod proofs;
mod shared;

const SIZE: u64 = 4 << 20;
const BLOCK: u64 = 4096;

/// All objects of a store.
type Objects = BTreeMap<String, Vec<u8>>;

/// A volume, and the content that it must have.
struct Damaged {
    memory: Arc<Memory>,
    key: Option<KeyFile>,
    content: Vec<u8>,
    nonce: u8,
}

/// A volume in which each page is an object, so that the tests can lose one page.
fn plain() -> Description {
    Description { shared_pages: false, ..description(SIZE, 1 << 20) }
}

/// The volumes that each test has: plain, compressed, encrypted, both.
fn descriptions() -> [Description; 4] {
    let compressed = || Description { compression: Some(Compression::Lz4), ..plain() };
    let encrypted =
        |plain: Description| Description { key: Some(key_file().wrap(&plain, &[8; 32])), ..plain };
    [plain(), compressed(), encrypted(plain()), encrypted(compressed())]
}

fn key_file() -> KeyFile {
    KeyFile::new(&[7; 32]).unwrap()
}

/// Nothing is relocated, so that the tests know where data is.
fn config() -> Config {
    Config { max_space_percent: 1 << 20, ..Config::default() }
}

impl Damaged {
    fn new(description: &Description) -> Self {
        let memory = Arc::new(Memory::default());
        block_on(Volume::create(Arc::clone(&memory) as _, description)).unwrap();
        let key = description.key.map(|_| key_file());
        Self { memory, key, content: vec![0; usize::try_from(SIZE).unwrap()], nonce: 10 }
    }

    fn place(&mut self) -> Place {
        self.nonce += 1;
        let store: Arc<dyn Store> = Arc::clone(&self.memory) as _;
        Stores(&[store]).find(0, self.nonce, self.key.as_ref()).unwrap()
    }

    fn open(&mut self) -> Result<Volume, Failure> {
        let place = self.place();
        block_on(async { place.open(place.claim_next("node").await?, config()).await })
    }

    /// Writes blocks, each in a slot of its own.
    fn write(&mut self, volume: &Volume, blocks: impl IntoIterator<Item = u64>, byte: u8) {
        for number in blocks {
            self.write_at_once(volume, number..number + 1, byte);
        }
    }

    /// Writes blocks in one slot.
    fn write_at_once(&mut self, volume: &Volume, blocks: Range<u64>, byte: u8) {
        let offset = blocks.start * BLOCK;
        let [at, end] = [blocks.start, blocks.end].map(|at| usize::try_from(at * BLOCK).unwrap());
        self.content[at..end].fill(byte);
        let written = async {
            volume.write(offset, &vec![byte; end - at]).await?;
            volume.flush().await
        };
        with_volume(volume, written).unwrap();
    }

    fn trim(&mut self, volume: &Volume, number: u64) {
        let at = usize::try_from(number * BLOCK).unwrap();
        self.content[at..at + usize::try_from(BLOCK).unwrap()].fill(0);
        let trimmed = async {
            volume.trim(number * BLOCK, BLOCK).await?;
            volume.flush().await
        };
        with_volume(volume, trimmed).unwrap();
    }

    /// Lets the volume write a checkpoint and delete what it makes superfluous. The first sector has another content
    /// then.
    fn settle(&mut self, volume: &Volume) {
        settle(volume, &self.memory);
        self.content[..512].fill(99);
    }

    /// As [`Damaged::settle`], and the deletions are not executed yet.
    fn checkpoint(&mut self, volume: &Volume) {
        let before = self.objects();
        self.settle(volume);
        let mut objects = self.memory.objects.lock().unwrap();
        for (name, bytes) in before {
            objects.entry(name).or_insert(bytes);
        }
    }

    fn objects(&self) -> Objects {
        self.memory.objects.lock().unwrap().clone()
    }

    /// The names of a kind.
    fn names(&self, kind: &str) -> Vec<Name> {
        let objects = self.memory.objects.lock().unwrap();
        let names = objects.keys().filter(|name| name.starts_with(kind));
        names.map(|name| Name::parse(name).unwrap()).collect()
    }

    fn remove(&self, name: Name) {
        self.memory.objects.lock().unwrap().remove(&name.to_string()).unwrap();
    }

    fn damage(&self, name: Name) {
        let mut objects = self.memory.objects.lock().unwrap();
        *objects.get_mut(&name.to_string()).unwrap().last_mut().unwrap() ^= 1;
    }

    fn plan(&mut self) -> Findings {
        let before = self.objects();
        let findings = block_on(self.place().plan_repair(config(), &mut on)).unwrap();
        assert!(self.objects() == before, "a plan changes nothing");
        findings
    }

    fn repair(&mut self) -> Findings {
        let place = self.place();
        block_on(async {
            let epoch = place.claim_next("repair").await?;
            let found = place.repair(epoch, config(), &mut on).await?;
            place.release(epoch).await?;
            Ok::<_, Failure>(found)
        })
        .unwrap()
    }

    /// Repairs the volume, which is intact then: another repair has nothing to do.
    fn repairs(&mut self) -> Findings {
        let planned = self.plan();
        assert_eq!((planned.refusals.as_slice(), planned.defects.as_slice()), (&[][..], &[][..]));
        assert_eq!(self.repair(), planned, "a plan says what the repair does");
        self.is_intact();
        planned
    }

    fn is_intact(&mut self) {
        assert_eq!(without_counts(self.plan()), Findings::default());
        let place = self.place();
        let view = block_on(place.view(config())).unwrap();
        self.has_content(&view);
        let mut check = Check::new(Depth::Data);
        for number in 0..view.map_pages() {
            assert_eq!(block_on(check.page(&view, number)), Ok(Vec::new()));
        }
        assert_eq!(check.wrong_usage(&view), []);
    }

    fn has_content(&self, volume: &Volume) {
        let mut found = vec![0; self.content.len()];
        block_on(volume.read(0, &mut found)).unwrap();
        assert!(found == self.content, "the content differs");
    }

    /// The repair changes nothing but its claim and the ends of the log.
    fn is_refused(&mut self) -> Findings {
        let (before, planned) = (self.objects(), self.plan());
        assert!(!planned.has_work() && !planned.refusals.is_empty(), "{planned:?}");
        assert_eq!(self.repair(), planned);
        for (name, bytes) in self.objects() {
            let is_own = name.starts_with("epoch/") || name.starts_with("free/");
            let is_seal = name.starts_with("log/") && !before.contains_key(&name);
            assert!(is_own || is_seal || before.get(&name) == Some(&bytes), "{name}");
        }
        assert!(before.keys().all(|name| self.objects().contains_key(name)));
        planned
    }
}

fn without_counts(findings: Findings) -> Findings {
    Findings { objects: 0, snapshots: 0, ..findings }
}

fn on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A volume with two checkpoints. The deletions that the second one permits are not executed yet.
fn with_two_checkpoints(description: &Description) -> Damaged {
    let mut damaged = Damaged::new(description);
    let volume = damaged.open().unwrap();
    damaged.write(&volume, 0..20, 1);
    // Nothing later changes the page of this one.
    damaged.write(&volume, [600], 5);
    damaged.settle(&volume);
    damaged.write(&volume, 5..10, 2);
    damaged.trim(&volume, 12);
    damaged.write(&volume, 300..304, 3);
    damaged.checkpoint(&volume);
    damaged.write(&volume, 8..12, 4);
    drop(volume);
    damaged
}

#[test]
fn a_volume_without_defects_stays_as_it_is() {
    for description in descriptions() {
        let mut damaged = Damaged::new(&description);
        assert_eq!(damaged.plan(), Findings::default(), "it was never opened");
        let volume = damaged.open().unwrap();
        damaged.write(&volume, 0..20, 1);
        damaged.settle(&volume);
        damaged.write(&volume, 3..5, 2);
        drop(volume);
        damaged.is_intact();
        let before = damaged.objects();
        assert!(!damaged.repair().has_work());
        let more: Vec<String> =
            damaged.objects().into_keys().filter(|name| !before.contains_key(name)).collect();
        let is_small = |name: &String| {
            let is_own = name.starts_with("epoch/") || name.starts_with("free/");
            is_own || name.starts_with("log/0000000000000001/")
        };
        assert!(more.iter().all(is_small), "a claim, its release and seals: {more:?}");
    }
}

#[test]
fn a_checkpoint_is_rebuilt_from_an_older_one_and_the_log() {
    for description in descriptions() {
        for damage in [Damaged::remove, Damaged::damage] {
            let mut damaged = with_two_checkpoints(&description);
            let checkpoints = damaged.names("ckpt/");
            let [Name::Checkpoint(first), newest] = checkpoints[..] else {
                panic!("{checkpoints:?}");
            };
            damage(&damaged, newest);
            assert!(damaged.open().is_err());
            let found = damaged.repairs();
            let [Repair::Checkpoint { failure, from }] = &found.repairs[..] else {
                panic!("{found:?}");
            };
            assert!(failure.to_string().contains(&newest.to_string()), "{failure}");
            assert_eq!(from.base, Some(first));
            let volume = damaged.open().unwrap();
            damaged.write(&volume, 0..3, 9);
            damaged.settle(&volume);
            damaged.has_content(&volume);
        }
    }
}

#[test]
fn a_first_checkpoint_is_rebuilt_from_the_beginning_of_the_log() {
    for lost in [Damaged::remove, Damaged::damage] {
        let mut damaged = Damaged::new(&plain());
        let volume = damaged.open().unwrap();
        damaged.write(&volume, 0..20, 1);
        // The slot with the open record is deleted.
        damaged.settle(&volume);
        drop(volume);
        assert!(!damaged.names("log/").contains(&Name::Slot(Position { epoch: 1, slot: 0 })));
        lost(&damaged, damaged.names("ckpt/")[0]);
        let found = damaged.repairs();
        let [Repair::Checkpoint { from, .. }] = &found.repairs[..] else { panic!("{found:?}") };
        assert_eq!(from.base, None);
    }
}

#[test]
fn a_checkpoint_of_an_earlier_epoch_is_rebuilt_across_epochs() {
    let mut damaged = Damaged::new(&plain());
    let volume = damaged.open().unwrap();
    damaged.write(&volume, 0..8, 1);
    damaged.checkpoint(&volume);
    damaged.write(&volume, 4..12, 2);
    drop(volume);
    let before = damaged.objects();
    let volume = damaged.open().unwrap();
    damaged.write(&volume, 6..9, 3);
    damaged.checkpoint(&volume);
    drop(volume);
    damaged.memory.objects.lock().unwrap().extend(before);
    let newest = *damaged.names("ckpt/").last().unwrap();
    assert!(matches!(newest, Name::Checkpoint(Position { epoch: 2.., .. })), "{newest}");
    // The first open does not get as far as to write.
    damaged.remove(newest);
    damaged.repairs();
}

/// Replaying only what exists would bring data back that was trimmed.
#[test]
fn a_map_is_not_rebuilt_without_a_slot_that_may_have_been_collected() {
    for lost in [Damaged::remove, Damaged::damage] {
        let mut damaged = Damaged::new(&plain());
        let volume = damaged.open().unwrap();
        damaged.write_at_once(&volume, 0..2, 1);
        damaged.write(&volume, 2..8, 1);
        damaged.trim(&volume, 1);
        damaged.settle(&volume);
        drop(volume);
        let trim = Name::Slot(Position { epoch: 1, slot: 8 });
        assert!(!damaged.names("log/").contains(&trim), "it was collected");
        let first = Name::Slot(Position { epoch: 1, slot: 1 });
        assert!(damaged.names("log/").contains(&first), "it has data that was trimmed");
        lost(&damaged, damaged.names("ckpt/")[0]);
        let refusal = damaged.is_refused().refusals.remove(0);
        assert!(refusal.reason.contains("lack writes"), "{}", refusal.reason);
        let text = format!("{} {}", refusal.failure, refusal.reason);
        assert!(text.contains(&trim.to_string()), "{text}");
        assert!(damaged.open().is_err(), "the volume does not open");
    }
}

#[test]
fn a_volume_never_returns_to_an_earlier_epoch() {
    let mut damaged = Damaged::new(&plain());
    let volume = damaged.open().unwrap();
    damaged.write(&volume, 0..4, 1);
    drop(volume);
    let volume = damaged.open().unwrap();
    damaged.write(&volume, 4..8, 2);
    drop(volume);
    // A slot that does not prove that earlier ones were confirmed.
    let at = Position { epoch: 2, slot: 1 };
    let identity = Identity { volume: plain().volume, epoch: 2, number: 1 };
    {
        let mut objects = damaged.memory.objects.lock().unwrap();
        objects.retain(|name, _| {
            !name.contains("/0000000000000002/") || *name == Name::Slot(at).to_string()
        });
        let bytes = objects.get_mut(&Name::Slot(at).to_string()).unwrap();
        let mut object = LogObject::decode(identity, bytes).unwrap();
        let header = object.encode().len();
        object.confirmed = 0;
        let mut forged = object.encode();
        forged.extend_from_slice(&bytes[header..]);
        *bytes = forged;
    }
    let found = damaged.is_refused();
    let lost = Failure::Lost(Name::Slot(Position { epoch: 2, slot: 0 }));
    assert_eq!(found.refusals[0].failure, lost);
}

#[test]
fn pages_of_the_map_are_rebuilt() {
    for description in descriptions() {
        for damage in [Damaged::remove, Damaged::damage] {
            let clean = with_two_checkpoints(&description);
            let before = clean.objects();
            let mut kinds = [0; 3];
            for page in clean.names("page/") {
                let mut damaged = with_two_checkpoints(&description);
                *damaged.memory.objects.lock().unwrap() = before.clone();
                let leftover = damaged.plan().leftovers.contains(&page);
                damage(&damaged, page);
                if leftover {
                    damaged.repairs();
                    continue;
                }
                let found = damaged.repairs();
                for repair in &found.repairs {
                    match repair {
                        Repair::Page { failure, .. } => {
                            kinds[0] += 1;
                            assert!(failure.to_string().contains(&page.to_string()), "{failure}");
                        }
                        Repair::UsagePage(_) => kinds[1] += 1,
                        Repair::Checkpoint { .. } => kinds[2] += 1,
                        Repair::Usage(_) => panic!("{found:?}"),
                    }
                }
            }
            // A leaf that the log above the checkpoint changes keeps the volume from being opened.
            assert!(kinds.iter().all(|count| *count > 0), "{kinds:?}");
        }
    }
}

#[test]
fn a_page_that_cannot_be_rebuilt_stays_unreadable() {
    let mut damaged = Damaged::new(&plain());
    let volume = damaged.open().unwrap();
    for round in 0..3 {
        damaged.write(&volume, 0..20, round);
        damaged.write(&volume, 300..304, round);
        damaged.settle(&volume);
    }
    drop(volume);
    let place = damaged.place();
    let lost = damaged.names("page/").into_iter().find(|page| {
        let before = damaged.objects();
        damaged.remove(*page);
        let view = block_on(place.view(config()));
        let reads = |at| {
            let mut sector = [0; 512];
            view.as_ref().is_ok_and(|view| block_on(view.read(at, &mut sector)).is_ok())
        };
        let is_found = reads(0) && !reads(301 * BLOCK);
        *damaged.memory.objects.lock().unwrap() = before;
        is_found
    });
    let lost = lost.expect("the page of the second mebibyte");
    damaged.remove(lost);
    let found = damaged.is_refused();
    assert_eq!(found.refusals[0].failure, Failure::Lost(lost));
    let [(None, defect)] = &found.defects[..] else { panic!("{found:?}") };
    assert_eq!(defect.range, 1 << 20..2 << 20);
}

#[test]
fn damaged_data_is_reported_and_stays() {
    for description in descriptions() {
        for lost in [false, true] {
            let mut damaged = Damaged::new(&description);
            let volume = damaged.open().unwrap();
            damaged.write(&volume, 0..20, 1);
            damaged.settle(&volume);
            drop(volume);
            let data = Name::Slot(Position { epoch: 1, slot: 6 });
            match lost {
                true => damaged.remove(data),
                false => {
                    let mut objects = damaged.memory.objects.lock().unwrap();
                    objects.get_mut(&data.to_string()).unwrap().pop();
                }
            }
            let found = damaged.plan();
            let [(None, defect)] = &found.defects[..] else { panic!("{found:?}") };
            assert_eq!(defect.range, 5 * BLOCK..6 * BLOCK);
            assert!(defect.failure.to_string().contains(&data.to_string()), "{}", defect.failure);
            assert!(!found.has_work() && found.refusals.is_empty(), "{found:?}");
            // A map that refers to an object that does not exist is not proved to be complete.
            damaged.remove(damaged.names("ckpt/")[0]);
            let refused = damaged.plan();
            assert_eq!((refused.has_work(), refused.refusals.len()), (!lost, usize::from(lost)));
        }
    }
}

#[test]
fn the_pages_of_a_snapshot_are_not_rebuilt_and_keep_what_is_unnamed() {
    for loses_checkpoint in [false, true] {
        let mut damaged = Damaged::new(&plain());
        let volume = damaged.open().unwrap();
        damaged.write(&volume, 0..20, 1);
        damaged.settle(&volume);
        take(&volume, "s");
        let leaf = damaged.names("page/")[0];
        let lost = if loses_checkpoint { damaged.names("ckpt/")[0] } else { leaf };
        damaged.write(&volume, 0..20, 2);
        damaged.settle(&volume);
        drop(volume);
        let late = Name::Page { epoch: 1, number: 999 };
        damaged.memory.objects.lock().unwrap().insert(late.to_string(), vec![1, 2, 3]);
        assert_eq!(damaged.plan().leftovers, [late]);
        damaged.remove(lost);
        let found = damaged.is_refused();
        assert_eq!(found.refusals[0].failure, Failure::Lost(lost));
        assert_eq!(found.defects[0].0.as_deref(), Some("s"));
    }
}

#[test]
fn an_interrupted_look_changes_nothing() {
    let mut damaged = with_two_checkpoints(&plain());
    damaged.remove(*damaged.names("ckpt/").last().unwrap());
    let before = damaged.objects();
    let mut stop = |_, _| ControlFlow::Break(());
    let stopped = block_on(damaged.place().plan_repair(config(), &mut stop));
    assert!(matches!(stopped, Err(Failure::Invalid(_))), "{stopped:?}");
    assert!(damaged.objects() == before);
}

#[test]
fn an_encrypted_volume_is_not_repaired_without_its_key() {
    let [.., encrypted, _] = descriptions();
    let mut damaged = with_two_checkpoints(&encrypted);
    damaged.key = None;
    let found = block_on(damaged.place().plan_repair(config(), &mut on));
    assert_eq!(found, Err(Failure::Locked));
}
