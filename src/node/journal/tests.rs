//! Tests of the journal: on the file system of the machine, and on a simulated disk that loses what was not
//! synced.

use std::collections::BTreeMap;
use std::fs;

use super::simulated_disk::SimulatedDisk;
use super::*;
use crate::planner::{self, Intent};
use cleat_core::random::Random;
use cleat_kernel::UnmountScope;

const A: &str = "00000000000000aa";
const B: &str = "00000000000000bb";

fn record(id: &str, name: &str) -> Record {
    Record { mapping_id: id.into(), name: name.into(), ..planner::tests::record(1, true) }
}

fn open(directory: &Path) -> Result<Journal> {
    open_on(directory, Arc::new(RealDisk))
}

fn open_on(directory: &Path, disk: Arc<dyn Disk>) -> Result<Journal> {
    Journal::open(directory, &directory.join("run"), disk)
}

fn path_of(journal: &Journal, mapping_id: &str) -> PathBuf {
    file(&journal.records, mapping_id, "json").unwrap()
}

#[test]
fn records_are_stored_replaced_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(dir.path()).unwrap();
    let mut a = record("00000000000000aa", "a");
    journal.store(&a).unwrap();
    a.generation = 2;
    journal.store(&a).unwrap();
    let b = record("00000000000000bb", "b");
    journal.store(&b).unwrap();
    assert_eq!(journal.load().unwrap().records, [a.clone(), b.clone()]);
    journal.remove(&a.mapping_id).unwrap();
    journal.remove(&a.mapping_id).unwrap();
    assert_eq!(journal.load().unwrap().records, [b]);
}

#[test]
fn a_forced_unmap_is_stored_with_its_scope() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(dir.path()).unwrap();
    let mut forced = record("00000000000000aa", "a");
    forced.intent = Intent::Forced(UnmountScope::Own);
    journal.store(&forced).unwrap();
    assert_eq!(journal.load().unwrap().records, [forced.clone()]);
    let path = path_of(&journal, &forced.mapping_id);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"own\"", "\"some\"")).unwrap();
    assert_eq!(journal.load().unwrap().rejected.len(), 1);
}

#[test]
fn only_one_supervisor_opens_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path()).unwrap();
    let error = open(dir.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    drop(first);
    open(dir.path()).unwrap();
}

#[test]
fn damaged_records_are_quarantined_and_reported() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(dir.path()).unwrap();
    journal.store(&record("00000000000000aa", "a")).unwrap();
    let good = fs::read_to_string(path_of(&journal, "00000000000000aa")).unwrap();
    let bad = [
        ("00000000000000b0", good[..good.len() / 2].to_owned()),
        ("00000000000000b2", good.replace("\"version\": 1", "\"version\": 0")),
        ("00000000000000b3", good.clone()),
        ("00000000000000b4", "x".repeat(70_000)),
        (
            "00000000000000b5",
            good.replace("00000000000000aa", "00000000000000b5")
                .replace("\"name\": \"a\"", "\"name\": \"../a\""),
        ),
    ];
    for (id, text) in &bad {
        fs::write(path_of(&journal, id), text).unwrap();
    }
    fs::write(journal.records.join("00000000000000cc.tmp"), "half").unwrap();
    let loaded = journal.load().unwrap();
    assert_eq!(loaded.records.len(), 1);
    assert_eq!(loaded.rejected.len(), bad.len(), "{:?}", loaded.rejected);
    assert!(loaded.rejected.iter().all(|file| file.path.starts_with(&journal.quarantine)));
    assert!(loaded.rejected.iter().all(|file| file.path.exists()));
    assert!(journal.load().unwrap().rejected.is_empty());
    assert!(!journal.records.join("00000000000000cc.tmp").exists());
}

#[test]
fn unknown_fields_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(dir.path()).unwrap();
    let a = record("00000000000000aa", "a");
    journal.store(&a).unwrap();
    let path = path_of(&journal, &a.mapping_id);
    let text = fs::read_to_string(&path).unwrap();
    let newer = text.replace("\"read_only\"", "\"later\": {\"x\": 1}, \"read_only\"");
    fs::write(&path, newer.replace("\"generation\"", "\"surprise\": 1, \"generation\"")).unwrap();
    let loaded = journal.load().unwrap();
    assert_eq!((loaded.records, loaded.rejected.len()), (vec![a], 0));
}

#[test]
fn the_old_record_stays_when_the_disk_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(dir.path()).unwrap();
    let a = record("00000000000000aa", "a");
    journal.store(&a).unwrap();
    // Every write to /dev/full fails with ENOSPC, as on a full disk.
    let temporary = path_of(&journal, &a.mapping_id).with_extension("tmp");
    std::os::unix::fs::symlink("/dev/full", &temporary).unwrap();
    let error = journal.store(&Record { generation: 9, ..a.clone() }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(error.repair().is_some());
    assert_eq!(journal.load().unwrap().records, [a]);
}

#[test]
fn a_cancelled_write_does_not_take_effect() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(dir.path()).unwrap();
    let a = record("00000000000000aa", "a");
    journal.store(&a).unwrap();
    let later = Record { generation: 9, ..a.clone() };
    let error = journal.store_unless_cancelled(&later, &AtomicBool::new(true)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(journal.load().unwrap().records, std::slice::from_ref(&a));
    assert!(!path_of(&journal, &a.mapping_id).with_extension("tmp").exists());
}

#[test]
fn a_record_above_the_size_limit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(dir.path()).unwrap();
    let long = Record { uri: "x".repeat(70_000), ..record("00000000000000aa", "a") };
    assert!(journal.store(&long).is_err());
    assert!(journal.load().unwrap().records.is_empty());
}

/// Returns a record of `revision`, with the revision as generation, too.
fn revision(id: &str, revision: u64) -> Record {
    Record { revision, generation: revision, ..record(id, id) }
}

#[test]
fn the_newer_one_of_a_record_and_its_copy_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(dir.path()).unwrap();
    journal.store(&revision(A, 3)).unwrap();
    journal.store_copy(&revision(A, 4)).unwrap();
    journal.store(&revision(B, 3)).unwrap();
    journal.store_copy(&revision(B, 2)).unwrap();
    for loaded in [journal.load().unwrap(), journal.load_one(A).unwrap()] {
        assert_eq!(loaded.records[0], revision(A, 4));
        assert!(loaded.copied.contains(A) && !loaded.copied.contains(B), "{loaded:?}");
    }
    assert_eq!(journal.load().unwrap().records[1], revision(B, 3));
    // The state directory has taken a newer revision, and the supervisor has crashed before it removed the copy.
    journal.store(&revision(A, 5)).unwrap();
    assert_eq!(journal.load().unwrap().records[0], revision(A, 5));
    assert!(journal.disk.list(&journal.copies).unwrap().is_empty());
}

#[test]
fn a_copy_alone_is_used_and_can_replace_a_damaged_record() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(dir.path()).unwrap();
    journal.store_copy(&revision(A, 1)).unwrap();
    fs::write(path_of(&journal, B), "{").unwrap();
    journal.store_copy(&revision(B, 2)).unwrap();
    let loaded = journal.load().unwrap();
    assert_eq!(loaded.records, [revision(A, 1), revision(B, 2)]);
    assert_eq!((loaded.copied.len(), loaded.rejected.len()), (2, 1));
}

#[test]
fn a_record_that_is_marked_as_removed_does_not_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(SimulatedDisk::default());
    let journal = open_on(dir.path(), Arc::clone(&disk) as Arc<dyn Disk>).unwrap();
    journal.store(&revision(A, 1)).unwrap();
    journal.store_copy(&revision(A, 2)).unwrap();
    disk.fail_changes_under(&journal.records, io::ErrorKind::ReadOnlyFilesystem);
    let error = journal.remove(A).unwrap_err();
    assert!(error.repair().unwrap().contains("remount"), "{error:?}");
    journal.mark_removed(A).unwrap();
    for _ in 0..2 {
        let loaded = journal.load().unwrap();
        assert!(loaded.records.is_empty(), "{loaded:?}");
        assert!(loaded.marked.contains(A), "{loaded:?}");
    }
    disk.end_failures();
    let loaded = journal.load().unwrap();
    assert!(loaded.records.is_empty() && loaded.marked.is_empty(), "{loaded:?}");
    assert!(disk.list(&journal.copies).unwrap().is_empty());
    assert!(disk.list(&journal.records).unwrap().is_empty());
}

#[test]
fn a_record_that_cannot_be_read_now_is_left_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(SimulatedDisk::default());
    let journal = open_on(dir.path(), Arc::clone(&disk) as Arc<dyn Disk>).unwrap();
    journal.store(&revision(A, 1)).unwrap();
    for error in [io::ErrorKind::OutOfMemory, io::ErrorKind::Other] {
        disk.fail_reads_under(&journal.records, error);
        let loaded = journal.load().unwrap();
        assert!(loaded.records.is_empty());
        let [rejected] = loaded.rejected.as_slice() else { panic!("{loaded:?}") };
        assert!(rejected.is_unreadable(), "{rejected}");
        assert_eq!((rejected.mapping_id.as_str(), &rejected.path), (A, &path_of(&journal, A)));
        assert!(rejected.to_string().contains("left in place"), "{rejected}");
        disk.end_failures();
        assert_eq!(journal.load_one(A).unwrap().records, [revision(A, 1)]);
    }
}

#[test]
fn a_copy_that_cannot_be_read_now_is_not_replaced_by_an_older_record() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(SimulatedDisk::default());
    let journal = open_on(dir.path(), Arc::clone(&disk) as Arc<dyn Disk>).unwrap();
    journal.store(&revision(A, 1)).unwrap();
    journal.store_copy(&revision(A, 2)).unwrap();
    disk.fail_reads_under(&journal.copies, io::ErrorKind::Other);
    let loaded = journal.load().unwrap();
    assert!(loaded.records.is_empty(), "{loaded:?}");
    assert!(loaded.rejected[0].is_unreadable(), "{loaded:?}");
    disk.end_failures();
    let loaded = journal.load_one(A).unwrap();
    assert_eq!(loaded.records, [revision(A, 2)]);
    assert!(loaded.copied.contains(A));
}

#[test]
fn a_newer_record_is_left_in_place_whatever_its_fields_contain() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(dir.path()).unwrap();
    journal.store_copy(&revision(B, 9)).unwrap();
    let newer = [
        (A, "{\"version\": 2, \"name\": \"a\"}", Some("a")),
        (B, "{\"version\": 5000000000, \"name\": {\"first\": \"b\"}}", None),
    ];
    for (id, text, _) in newer {
        fs::write(path_of(&journal, id), text).unwrap();
    }
    for _ in 0..2 {
        let mut rejected = journal.load().unwrap().rejected;
        rejected.sort_by(|one, other| one.mapping_id.cmp(&other.mapping_id));
        assert_eq!(rejected.len(), 2, "{rejected:?}");
        for (found, (id, text, expected)) in rejected.iter().zip(newer) {
            let Rejection::NewerVersion { name, .. } = &found.reason else { panic!("{found}") };
            assert_eq!((found.mapping_id.as_str(), name.as_deref()), (id, expected));
            assert_eq!(fs::read_to_string(path_of(&journal, id)).unwrap(), text);
        }
    }
}

/// The number of seeds of the power losses.
const POWER_LOSSES: u64 = 1500;

#[test]
fn after_a_power_loss_the_journal_has_the_last_record_or_the_one_in_progress() {
    let dir = tempfile::tempdir().unwrap();
    for seed in 0..POWER_LOSSES {
        lose_power(seed, dir.path(), &SimulatedDisk::default()).unwrap();
    }
}

/// A simulated disk that found no defect would prove nothing.
#[test]
fn a_power_loss_shows_a_missing_sync() {
    let dir = tempfile::tempdir().unwrap();
    let without = |files: bool, directories: bool| {
        (0..POWER_LOSSES).any(|seed| {
            let disk = SimulatedDisk::without_syncs(files, directories);
            lose_power(seed, dir.path(), &disk).is_err()
        })
    };
    assert!(without(true, false), "of the file");
    assert!(without(false, true), "of the directory");
}

/// Stores and removes records on `disk`, loses power at some point, and checks what is left; several times.
fn lose_power(seed: u64, directory: &Path, disk: &SimulatedDisk) -> Result<(), String> {
    let random = Random::seeded(seed);
    let open = || open_on(directory, Arc::new(disk.clone())).unwrap();
    // What the journal may contain of each mapping. There is more than one possibility only after a write
    // that the loss of power has interrupted.
    let mut possible: BTreeMap<&str, Vec<Option<Record>>> =
        [A, B].into_iter().map(|id| (id, vec![None])).collect();
    let mut number = 0;
    for _ in 0..3 {
        let journal = open();
        disk.lose_power_after(random.next() % 40);
        for _ in 0..8 {
            let id = if random.next().is_multiple_of(2) { A } else { B };
            number += 1;
            let wanted = (!random.next().is_multiple_of(4)).then(|| revision(id, number));
            let done = match &wanted {
                Some(record) => journal.store(record),
                None => journal.remove(id),
            };
            let possible = possible.entry(id).or_default();
            if done.is_ok() {
                possible.clear();
            }
            possible.push(wanted);
            if done.is_err() {
                break;
            }
        }
        drop(journal);
        disk.restart(&random);
        let loaded = open().load().unwrap();
        if !loaded.rejected.is_empty() {
            return Err(format!("seed {seed}: damaged: {:?}", loaded.rejected));
        }
        for (id, possible) in &mut possible {
            let found = loaded.records.iter().find(|record| record.mapping_id == **id).cloned();
            if !possible.contains(&found) {
                return Err(format!("seed {seed}: {found:?} is not one of {possible:?}"));
            }
            *possible = vec![found];
        }
    }
    Ok(())
}
