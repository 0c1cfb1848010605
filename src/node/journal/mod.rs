//! The journal: one JSON file per mapping under the state directory. After a restart, the supervisor
//! reads from it which mappings the users want.
//!
//! A record is written to a temporary file, synced, and renamed over the old one; then the directory is
//! synced. After a crash the file contains either the old record or the new one. A file that cannot be
//! read is moved to `quarantine/` and reported. A record of a newer version is reported and left in
//! place, for the build that wrote it. Neither stops the daemon.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{Flock, FlockArg};

use super::directory::create_private;
use super::planner::Record;
use cleat_core::error::{Error, ErrorKind, Result};

/// The longest record, in bytes: a URI of 4096 bytes, escaped, fits many times.
pub const MAX_RECORD: u64 = 64 * 1024;

/// An open journal. It holds a lock, so that no other supervisor can open the same state directory.
#[derive(Debug)]
pub struct Journal {
    directory: PathBuf,
    quarantine: PathBuf,
    _lock: Flock<File>,
}

/// The content of the journal, as [`Journal::load`] returns it.
#[derive(Debug, Default)]
pub struct Loaded {
    /// The valid records, sorted by name.
    pub records: Vec<Record>,
    /// The files that contain no valid record.
    pub rejected: Vec<RejectedRecord>,
}

/// A file of the journal that contains no valid record.
#[derive(Debug)]
pub struct RejectedRecord {
    /// The current path of the file.
    pub path: PathBuf,
    /// Why this build cannot use the record.
    pub reason: Rejection,
}

/// Why a record was rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rejection {
    /// A newer build wrote the record; the file was left in place. Contains the record's version.
    NewerVersion(u32),
    /// The record is damaged; the file was moved to the quarantine directory. Contains the cause.
    Invalid(String),
}

impl std::fmt::Display for RejectedRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let path = self.path.display();
        match &self.reason {
            Rejection::NewerVersion(version) => write!(
                f,
                "the journal record {path} was left in place and its mapping is not managed: it has \
                 version {version}, and this build reads version {} at most; install the newer build \
                 again",
                Record::VERSION
            ),
            Rejection::Invalid(cause) => {
                write!(f, "a damaged journal record was moved to {path}: {cause}")
            }
        }
    }
}

impl Journal {
    /// Opens the journal under `state_dir`, and creates the directories that are missing. Blocks.
    ///
    /// # Errors
    /// Returns `InUse` if another supervisor has the journal open, and an error if the file system
    /// refuses to create a directory.
    pub fn open(state_dir: &Path) -> Result<Self> {
        let directory = state_dir.join("mappings");
        let quarantine = state_dir.join("quarantine");
        for path in [state_dir, &directory, &quarantine] {
            create_private(path)?;
        }
        let lock = lock(&state_dir.join("lock"))?;
        Ok(Self { directory, quarantine, _lock: lock })
    }

    /// Reads every record. Removes temporary files of interrupted writes, and moves damaged records to the
    /// quarantine directory. Blocks.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn load(&self) -> Result<Loaded> {
        let context = || format!("cannot read the journal {}", self.directory.display());
        let entries =
            fs::read_dir(&self.directory).map_err(|error| Error::from_io(context(), error))?;
        let mut loaded = Loaded::default();
        for entry in entries {
            let path = entry.map_err(|error| Error::from_io(context(), error))?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                // A crash interrupted this write: the record that it was to replace is still valid.
                Some("tmp") => {
                    let _ = fs::remove_file(&path);
                }
                _ => match read_record(&path) {
                    Ok(record) => loaded.records.push(record),
                    Err(reason @ Rejection::NewerVersion(_)) => {
                        loaded.rejected.push(RejectedRecord { path, reason });
                    }
                    Err(reason) => {
                        let path = self.quarantine(&path);
                        loaded.rejected.push(RejectedRecord { path, reason });
                    }
                },
            }
        }
        loaded.records.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(loaded)
    }

    /// Writes `record` durably and replaces its previous content. Blocks until the disk has the record.
    ///
    /// # Errors
    /// Returns `NoSpace` if the disk is full, and an error if the file system refuses the write. The
    /// previous content is then still valid.
    pub fn store(&self, record: &Record) -> Result<()> {
        self.store_unless_cancelled(record, &AtomicBool::new(false))
    }

    /// Writes `record` as [`Journal::store`] does, unless `cancelled` is set when the new file is about to
    /// replace the old one. A write that timed out was reported as failed, so it must not take effect
    /// minutes later.
    ///
    /// # Errors
    /// Returns `TimedOut` if `cancelled` was set; otherwise as [`Journal::store`].
    pub fn store_unless_cancelled(&self, record: &Record, cancelled: &AtomicBool) -> Result<()> {
        let path = self.path(&record.mapping_id)?;
        let temporary = path.with_extension("tmp");
        let written = self.write(record, &temporary, &path, cancelled);
        if written.is_err() {
            // Best effort: the next `load` removes the file if this fails.
            let _ = fs::remove_file(&temporary);
        }
        written.map_err(|error| {
            let message = format!("cannot write the journal record of {}", record.name);
            let full = matches!(
                error.kind(),
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded
            );
            let error = Error::from_io(message, error);
            match full {
                true => {
                    error.with_repair(format!("free disk space under {}", self.directory.display()))
                }
                false => error,
            }
        })
    }

    /// Removes the record of a mapping durably. Succeeds if there is no such record. Blocks.
    ///
    /// # Errors
    /// Returns an error if the file system refuses the removal.
    pub fn remove(&self, mapping_id: &str) -> Result<()> {
        let path = self.path(mapping_id)?;
        let removed = match fs::remove_file(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            other => other.and_then(|()| sync_directory(&self.directory)),
        };
        removed.map_err(|error| {
            Error::from_io(format!("cannot remove the journal record {}", path.display()), error)
        })
    }

    fn write(
        &self,
        record: &Record,
        temporary: &Path,
        path: &Path,
        cancelled: &AtomicBool,
    ) -> std::io::Result<()> {
        let mut text = serde_json::to_vec_pretty(record)?;
        text.push(b'\n');
        if text.len() as u64 > MAX_RECORD {
            return Err(std::io::Error::other(format!(
                "it is {} bytes long, and the limit is {MAX_RECORD}",
                text.len()
            )));
        }
        let mut options = File::options();
        let mut file =
            options.write(true).create(true).truncate(true).mode(0o600).open(temporary)?;
        file.write_all(&text)?;
        file.sync_all()?;
        if cancelled.load(Ordering::SeqCst) {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        fs::rename(temporary, path)?;
        sync_directory(&self.directory)
    }

    /// Returns the path of the record's file. An id that is not hexadecimal never becomes a path.
    fn path(&self, mapping_id: &str) -> Result<PathBuf> {
        if !is_mapping_id(mapping_id) {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("not a mapping id: {mapping_id:?}"),
            ));
        }
        Ok(self.directory.join(format!("{mapping_id}.json")))
    }

    /// Moves a file to the quarantine directory and returns its path, which is the old one if the file
    /// system refuses the move.
    fn quarantine(&self, path: &Path) -> PathBuf {
        let name = path.file_name().unwrap_or_default();
        let quarantined = self.quarantine.join(name);
        match fs::rename(path, &quarantined) {
            Ok(()) => quarantined,
            Err(_) => path.to_owned(),
        }
    }
}

/// Returns whether `text` has the form of a mapping's id: 8 to 32 lower-case hexadecimal digits.
pub fn is_mapping_id(text: &str) -> bool {
    (8..=32).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Locks the file at `path` without waiting, and creates it if it is missing.
///
/// # Errors
/// Returns `InUse` if another process holds the lock, and an error if the file cannot be opened.
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
            let message =
                format!("another cleat daemon is running: it has locked {}", path.display());
            Error::new(ErrorKind::InUse, message).with_repair(
                "stop it first, or use another --state-dir and --runtime-dir for this one",
            )
        }
        errno => Error::from_io(format!("cannot lock {}", path.display()), errno.into()),
    })
}

fn sync_directory(path: &Path) -> std::io::Result<()> {
    File::open(path)?.sync_all()
}

/// Reads and checks a record.
fn read_record(path: &Path) -> Result<Record, Rejection> {
    let unreadable = |error: std::io::Error| Rejection::Invalid(error.to_string());
    let file = File::open(path).map_err(unreadable)?;
    let mut text = String::new();
    let mut limited = file.take(MAX_RECORD + 1);
    limited.read_to_string(&mut text).map_err(unreadable)?;
    if text.len() as u64 > MAX_RECORD {
        return Err(Rejection::Invalid(format!("it is longer than {MAX_RECORD} bytes")));
    }
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    parse_record(&text, stem)
}

/// Parses and checks the record of the mapping `mapping_id`.
fn parse_record(text: &str, mapping_id: &str) -> Result<Record, Rejection> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        version: u32,
    }
    let malformed = |error: serde_json::Error| Rejection::Invalid(error.to_string());
    let invalid = |cause: &str| Err(Rejection::Invalid(cause.to_owned()));
    // The version comes first: the record of another version may have other fields.
    let Versioned { version } = serde_json::from_str(text).map_err(malformed)?;
    if version > Record::VERSION {
        return Err(Rejection::NewerVersion(version));
    }
    if version != Record::VERSION {
        return invalid(&format!("version {version} does not exist"));
    }
    let record: Record = serde_json::from_str(text).map_err(malformed)?;
    if mapping_id != record.mapping_id || !is_mapping_id(mapping_id) {
        return invalid("it contains the id of another mapping");
    }
    if !crate::api::validate::is_name(&record.name) || record.options.connections == 0 {
        return invalid("its name or its number of connections is invalid");
    }
    Ok(record)
}

/// Parses the record of the mapping `mapping_id` and returns it as the journal writes it. For the fuzz
/// target.
///
/// # Errors
/// Returns the reason if `text` is not a valid record.
#[cfg(feature = "fuzz")]
pub fn reprint_record(text: &str, mapping_id: &str) -> Result<Vec<u8>, String> {
    let record = parse_record(text, mapping_id).map_err(|rejection| format!("{rejection:?}"))?;
    serde_json::to_vec_pretty(&record).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::{self, Intent};
    use cleat_kernel::UnmountScope;

    fn record(id: &str, name: &str) -> Record {
        Record { mapping_id: id.into(), name: name.into(), ..planner::tests::record(1, true) }
    }

    #[test]
    fn records_are_stored_replaced_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
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
        let journal = Journal::open(dir.path()).unwrap();
        let mut forced = record("00000000000000aa", "a");
        forced.intent = Intent::Forced(UnmountScope::Own);
        journal.store(&forced).unwrap();
        assert_eq!(journal.load().unwrap().records, [forced.clone()]);
        let path = journal.path(&forced.mapping_id).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("\"own\"", "\"some\"")).unwrap();
        assert_eq!(journal.load().unwrap().rejected.len(), 1);
    }

    #[test]
    fn only_one_supervisor_opens_the_journal() {
        let dir = tempfile::tempdir().unwrap();
        let first = Journal::open(dir.path()).unwrap();
        let error = Journal::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
        drop(first);
        Journal::open(dir.path()).unwrap();
    }

    #[test]
    fn damaged_records_are_quarantined_and_reported() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        journal.store(&record("00000000000000aa", "a")).unwrap();
        let good = fs::read_to_string(journal.path("00000000000000aa").unwrap()).unwrap();
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
            fs::write(journal.path(id).unwrap(), text).unwrap();
        }
        fs::write(journal.directory.join("00000000000000cc.tmp"), "half").unwrap();
        let loaded = journal.load().unwrap();
        assert_eq!(loaded.records.len(), 1);
        assert_eq!(loaded.rejected.len(), bad.len(), "{:?}", loaded.rejected);
        assert!(loaded.rejected.iter().all(|file| file.path.starts_with(&journal.quarantine)));
        assert!(loaded.rejected.iter().all(|file| file.path.exists()));
        assert!(journal.load().unwrap().rejected.is_empty());
        assert!(!journal.directory.join("00000000000000cc.tmp").exists());
    }

    #[test]
    fn unknown_fields_are_ignored() {
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
        assert_eq!((loaded.records, loaded.rejected.len()), (vec![a], 0));
    }

    #[test]
    fn the_old_record_stays_when_the_disk_is_full() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let a = record("00000000000000aa", "a");
        journal.store(&a).unwrap();
        // Every write to /dev/full fails with ENOSPC, as on a full disk.
        let temporary = journal.path(&a.mapping_id).unwrap().with_extension("tmp");
        std::os::unix::fs::symlink("/dev/full", &temporary).unwrap();
        let error = journal.store(&Record { generation: 9, ..a.clone() }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert!(error.repair().is_some());
        assert_eq!(journal.load().unwrap().records, [a]);
    }

    #[test]
    fn a_cancelled_write_does_not_take_effect() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let a = record("00000000000000aa", "a");
        journal.store(&a).unwrap();
        let later = Record { generation: 9, ..a.clone() };
        let error = journal.store_unless_cancelled(&later, &AtomicBool::new(true)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(journal.load().unwrap().records, std::slice::from_ref(&a));
        assert!(!journal.path(&a.mapping_id).unwrap().with_extension("tmp").exists());
    }

    #[test]
    fn a_record_above_the_size_limit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let long = Record { uri: "x".repeat(70_000), ..record("00000000000000aa", "a") };
        assert!(journal.store(&long).is_err());
        assert!(journal.load().unwrap().records.is_empty());
    }
}
