//! The journal: one JSON file per mapping under the state directory, so that a supervisor that
//! comes later knows what was wanted.
//!
//! A record is written to a temporary file, synced, renamed over the old one, and the directory
//! synced: after a crash there is the old record or the new one. A file that cannot be read is put
//! aside under `quarantine/` and reported; it never stops the daemon.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{Flock, FlockArg};
use serde_json::Value;

use super::directory::create_private;
use super::planner::{Intent, Record};
use cleat_core::error::{Error, ErrorKind, Result};

/// The longest record, in bytes: a URI of 4096 bytes, escaped, fits many times.
pub const MAX_RECORD: u64 = 64 * 1024;

/// An open journal. While it lives, no other supervisor can open the same state directory.
#[derive(Debug)]
pub struct Journal {
    directory: PathBuf,
    quarantine: PathBuf,
    _lock: Flock<File>,
}

/// What reading the journal found.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Records, in the order of their names.
    pub records: Vec<Record>,
    /// Files that were put aside, and why.
    pub corrupt: Vec<(PathBuf, String)>,
}

impl Journal {
    /// Opens the journal under `state_dir`, and creates it if need be.
    ///
    /// # Errors
    /// `InUse` when another supervisor has it; `PermissionDenied`, `NoSpace` from the filesystem.
    pub fn open(state_dir: &Path) -> Result<Self> {
        let directory = state_dir.join("mappings");
        let quarantine = state_dir.join("quarantine");
        for path in [state_dir, &directory, &quarantine] {
            create_private(path)?;
        }
        let lock = lock(&state_dir.join("lock"))?;
        Ok(Self { directory, quarantine, _lock: lock })
    }

    /// Reads every record. Unfinished temporary files are removed, unreadable records put aside.
    ///
    /// # Errors
    /// When the directory itself cannot be read.
    pub fn load(&self) -> Result<Loaded> {
        let context = || format!("cannot read the journal {}", self.directory.display());
        let entries =
            fs::read_dir(&self.directory).map_err(|error| Error::from_io(context(), error))?;
        let mut loaded = Loaded::default();
        for entry in entries {
            let path = entry.map_err(|error| Error::from_io(context(), error))?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                // A write that a crash cut short: the record it was to replace still stands.
                Some("tmp") => {
                    let _ = fs::remove_file(&path);
                }
                _ => match read_record(&path) {
                    Ok(record) => loaded.records.push(record),
                    Err(reason) => loaded.corrupt.push((self.put_aside(&path), reason)),
                },
            }
        }
        loaded.records.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(loaded)
    }

    /// Stores `record` durably, in place of its earlier version.
    ///
    /// # Errors
    /// `NoSpace` on a full disk; the earlier version then still stands.
    pub fn store(&self, record: &Record) -> Result<()> {
        self.store_unless(record, &AtomicBool::new(false))
    }

    /// As [`Journal::store`], unless nobody waits for it any more when the record is about to take the
    /// place of its earlier version: what was told as failed is not to come true minutes later.
    ///
    /// # Errors
    /// `TimedOut`, then.
    pub fn store_unless(&self, record: &Record, given_up: &AtomicBool) -> Result<()> {
        let path = self.path(&record.mapping_id)?;
        let temporary = path.with_extension("tmp");
        let written = self.write(record, &temporary, &path, given_up);
        if written.is_err() {
            // Best effort: what stays is removed by the next `load`.
            let _ = fs::remove_file(&temporary);
        }
        written.map_err(|error| {
            let message = format!("cannot record the mapping {} in the journal", record.name);
            let full = matches!(
                error.kind(),
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded
            );
            let error = Error::from_io(message, error);
            match full {
                true => error.with_repair(format!("make room under {}", self.directory.display())),
                false => error,
            }
        })
    }

    /// Removes the record of a mapping, durably. One that is not there is success.
    ///
    /// # Errors
    /// When the filesystem refuses.
    pub fn withdraw(&self, mapping_id: &str) -> Result<()> {
        let path = self.path(mapping_id)?;
        let removed = match fs::remove_file(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            other => other.and_then(|()| sync_directory(&self.directory)),
        };
        removed.map_err(|error| {
            Error::from_io(format!("cannot remove {} from the journal", path.display()), error)
        })
    }

    fn write(
        &self,
        record: &Record,
        temporary: &Path,
        path: &Path,
        given_up: &AtomicBool,
    ) -> std::io::Result<()> {
        let mut text = written(record)?;
        text.push(b'\n');
        if text.len() as u64 > MAX_RECORD {
            return Err(std::io::Error::other("the record is longer than a record may be"));
        }
        let mut options = File::options();
        let mut file =
            options.write(true).create(true).truncate(true).mode(0o600).open(temporary)?;
        file.write_all(&text)?;
        file.sync_all()?;
        if given_up.load(Ordering::SeqCst) {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        fs::rename(temporary, path)?;
        sync_directory(&self.directory)
    }

    /// The record's file; an id that is not plainly hexadecimal never becomes a path.
    fn path(&self, mapping_id: &str) -> Result<PathBuf> {
        if !is_mapping_id(mapping_id) {
            return Err(Error::new(ErrorKind::Internal, format!("no mapping id: {mapping_id:?}")));
        }
        Ok(self.directory.join(format!("{mapping_id}.json")))
    }

    fn put_aside(&self, path: &Path) -> PathBuf {
        let name = path.file_name().unwrap_or_default();
        let aside = self.quarantine.join(name);
        match fs::rename(path, &aside) {
            Ok(()) => aside,
            Err(_) => path.to_owned(),
        }
    }
}

/// Whether `text` can be a mapping's id.
pub fn is_mapping_id(text: &str) -> bool {
    (8..=32).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Takes the lock file at `path` without waiting.
///
/// # Errors
/// `InUse` when another process has it.
pub fn lock(path: &Path) -> Result<Flock<File>> {
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(|error| Error::from_io(format!("cannot open {}", path.display()), error))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        nix::errno::Errno::EWOULDBLOCK => {
            let message = format!("another cleat daemon runs here: it holds {}", path.display());
            Error::new(ErrorKind::InUse, message).with_repair(
                "stop it first, or give this one its own --state-dir and --runtime-dir",
            )
        }
        errno => Error::from_io(format!("cannot lock {}", path.display()), errno.into()),
    })
}

fn sync_directory(path: &Path) -> std::io::Result<()> {
    File::open(path)?.sync_all()
}

/// That a mapping goes by force stands beside the intent, so that a build which knows no force reads
/// the record, and takes the mapping down in its own way.
const FORCED: &str = "forced";

fn written(record: &Record) -> serde_json::Result<Vec<u8>> {
    let Intent::Forced(unmount) = record.intent else { return serde_json::to_vec_pretty(record) };
    let mut value = serde_json::to_value(record)?;
    value["intent"] = serde_json::to_value(Intent::Unmapped)?;
    value[FORCED] = serde_json::to_value(unmount)?;
    serde_json::to_vec_pretty(&value)
}

fn read(mut value: Value) -> serde_json::Result<Record> {
    let forced = value.get_mut(FORCED).map(Value::take);
    let mut record: Record = serde_json::from_value(value)?;
    if let Some(unmount) = forced {
        record.intent = Intent::Forced(serde_json::from_value(unmount)?);
    }
    Ok(record)
}

/// Reads and checks a record, or says why not.
fn read_record(path: &Path) -> Result<Record, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let mut text = String::new();
    let mut limited = file.take(MAX_RECORD + 1);
    limited.read_to_string(&mut text).map_err(|error| error.to_string())?;
    if text.len() as u64 > MAX_RECORD {
        return Err(format!("longer than {MAX_RECORD} bytes"));
    }
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    parse_record(&text, stem)
}

/// Parses and checks the record of the mapping `mapping_id`, or returns the reason why it is not one.
fn parse_record(text: &str, mapping_id: &str) -> Result<Record, String> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        version: u32,
    }
    // The version first: a record of a later version may be another thing altogether.
    let version: Versioned = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if version.version != Record::VERSION {
        return Err(format!("has version {}, this is {}", version.version, Record::VERSION));
    }
    let value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let record = read(value).map_err(|error| error.to_string())?;
    if mapping_id != record.mapping_id || !is_mapping_id(mapping_id) {
        return Err("carries another mapping's id".to_owned());
    }
    if !crate::api::validate::is_name(&record.name) || record.options.connections == 0 {
        return Err("carries an impossible name or option".to_owned());
    }
    Ok(record)
}

/// For the fuzz target: parses the record of the mapping `mapping_id`, and prints it as the journal does.
#[cfg(feature = "fuzz")]
pub fn reprint_record(text: &str, mapping_id: &str) -> Result<Vec<u8>, String> {
    written(&parse_record(text, mapping_id)?).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner;
    use cleat_kernel::UnmountScope;

    fn record(id: &str, name: &str) -> Record {
        Record { mapping_id: id.into(), name: name.into(), ..planner::tests::record(1, true) }
    }

    #[test]
    fn stores_replaces_and_withdraws() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let mut a = record("00000000000000aa", "a");
        journal.store(&a).unwrap();
        a.generation = 2;
        journal.store(&a).unwrap();
        let b = record("00000000000000bb", "b");
        journal.store(&b).unwrap();
        assert_eq!(journal.load().unwrap().records, [a.clone(), b.clone()]);
        journal.withdraw(&a.mapping_id).unwrap();
        journal.withdraw(&a.mapping_id).unwrap();
        assert_eq!(journal.load().unwrap().records, [b]);
    }

    #[test]
    fn who_knows_no_force_reads_a_forced_record_as_one_to_be_unmapped() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let mut forced = record("00000000000000aa", "a");
        forced.intent = Intent::Forced(UnmountScope::Own);
        journal.store(&forced).unwrap();
        assert_eq!(journal.load().unwrap().records, [forced.clone()]);
        let path = journal.path(&forced.mapping_id).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        // As such a build reads it: without the field.
        let other: Record = serde_json::from_str(&text).unwrap();
        assert_eq!(other.intent, Intent::Unmapped);
        // As it was written for a while.
        fs::write(&path, serde_json::to_vec(&forced).unwrap()).unwrap();
        assert_eq!(journal.load().unwrap().records, [forced]);
        fs::write(&path, text.replace("\"own\"", "\"some\"")).unwrap();
        assert_eq!(journal.load().unwrap().corrupt.len(), 1);
    }

    #[test]
    fn one_supervisor_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = Journal::open(dir.path()).unwrap();
        let error = Journal::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
        drop(first);
        Journal::open(dir.path()).unwrap();
    }

    #[test]
    fn what_cannot_be_read_is_put_aside_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        journal.store(&record("00000000000000aa", "a")).unwrap();
        let good = fs::read_to_string(journal.path("00000000000000aa").unwrap()).unwrap();
        let bad = [
            ("00000000000000b0", good[..good.len() / 2].to_owned()),
            ("00000000000000b2", good.replace("\"version\": 1", "\"version\": 99")),
            ("00000000000000b3", good.clone()),
            ("00000000000000b4", "x".repeat(70_000)),
            (
                "00000000000000b5",
                good.replace("00000000000000aa", "00000000000000b5")
                    .replace("\"name\": \"a\"", "\"name\": \"../a\""),
            ),
        ];
        for (id, text) in &bad {
            fs::write(journal.path(id).unwrap(), text).unwrap();
        }
        fs::write(journal.directory.join("00000000000000cc.tmp"), "half").unwrap();
        let loaded = journal.load().unwrap();
        assert_eq!(loaded.records.len(), 1);
        assert_eq!(loaded.corrupt.len(), bad.len(), "{:?}", loaded.corrupt);
        assert!(loaded.corrupt.iter().all(|(path, _)| path.exists()));
        assert!(journal.load().unwrap().corrupt.is_empty());
        assert!(!journal.directory.join("00000000000000cc.tmp").exists());
    }

    #[test]
    fn what_a_newer_build_has_added_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let a = record("00000000000000aa", "a");
        journal.store(&a).unwrap();
        let path = journal.path(&a.mapping_id).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let newer = text.replace("\"read_only\"", "\"later\": {\"x\": 1}, \"read_only\"");
        fs::write(&path, newer.replace("\"generation\"", "\"surprise\": 1, \"generation\""))
            .unwrap();
        let loaded = journal.load().unwrap();
        assert_eq!((loaded.records, loaded.corrupt.len()), (vec![a], 0));
    }

    #[test]
    fn a_full_disk_leaves_the_old_record() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let a = record("00000000000000aa", "a");
        journal.store(&a).unwrap();
        // /dev/full answers every write with ENOSPC, as a full disk does.
        let temporary = journal.path(&a.mapping_id).unwrap().with_extension("tmp");
        std::os::unix::fs::symlink("/dev/full", &temporary).unwrap();
        let error = journal.store(&Record { generation: 9, ..a.clone() }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert!(error.repair().is_some());
        assert_eq!(journal.load().unwrap().records, [a]);
    }

    #[test]
    fn a_write_that_was_given_up_does_not_come_true() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let a = record("00000000000000aa", "a");
        journal.store(&a).unwrap();
        let later = Record { generation: 9, ..a.clone() };
        let error = journal.store_unless(&later, &AtomicBool::new(true)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(journal.load().unwrap().records, std::slice::from_ref(&a));
        assert!(!journal.path(&a.mapping_id).unwrap().with_extension("tmp").exists());
    }

    #[test]
    fn a_record_that_is_too_long_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let long = Record { uri: "x".repeat(70_000), ..record("00000000000000aa", "a") };
        assert!(journal.store(&long).is_err());
        assert!(journal.load().unwrap().records.is_empty());
    }
}
