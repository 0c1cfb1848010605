//! The file system of the journal, which fails as a script says, and the records in it.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use cleat_node::journal::{Disk, RealDisk};
use serde_json::Value;

use super::World;

/// The state of the disk with the state directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum StateDisk {
    #[default]
    Works,
    /// Nothing can be written. Files can be removed.
    Full,
    ReadOnly,
    /// Writes wait until the disk works again. The gate around calls that block delays them.
    Hung,
}

/// The file system of a world's journal.
pub(crate) struct SimDisk(pub(crate) World);

impl std::fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimDisk")
    }
}

impl SimDisk {
    /// Fails as the disk with `path` does; `writes`: for a change that needs space.
    fn check(&self, path: &Path, writes: bool) -> io::Result<()> {
        let state = self.0.look();
        let is_copy = path.starts_with(self.0.copies());
        let full = match is_copy {
            true => state.runtime_full,
            false => state.state_disk == StateDisk::Full,
        };
        if full && writes {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let is_read_only = match is_copy {
            true => state.runtime_full,
            false => state.state_disk == StateDisk::ReadOnly,
        };
        if is_read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        Ok(())
    }
}

impl Disk for SimDisk {
    fn write_synced(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        self.check(path, true)?;
        RealDisk.write_synced(path, content)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.check(from, false)?;
        RealDisk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.check(path, false)?;
        RealDisk.remove(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        RealDisk.sync_directory(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        RealDisk.list(path)
    }

    fn read(&self, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
        RealDisk.read(path, limit)
    }
}

/// The directory of copies that belongs to the state directory's `records`.
pub(super) fn copies(records: &Path) -> PathBuf {
    let root = records.parent().and_then(Path::parent).unwrap_or(records);
    root.join("run/records")
}

/// The newest record of a mapping; null if there is none or if it is marked as removed.
pub(super) fn newest(records: &Path, id: &str) -> Value {
    let copies = copies(records);
    if copies.join(format!("{id}.removed")).exists() {
        return Value::Null;
    }
    let read = |directory: &Path| -> Value {
        let text = std::fs::read(directory.join(format!("{id}.json"))).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    };
    let (stored, copy) = (read(records), read(&copies));
    let revision = |record: &Value| record["revision"].as_u64();
    if revision(&copy) > revision(&stored) { copy } else { stored }
}

/// The ids and names of all records.
pub(super) fn all(records: &Path) -> Vec<(String, String)> {
    let files = [records.to_owned(), copies(records)].into_iter().flat_map(std::fs::read_dir);
    let paths = files.flatten().flatten().map(|entry| entry.path());
    let ids: BTreeSet<String> = paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    let named = ids.into_iter().filter_map(|id| {
        let name = newest(records, &id)["name"].as_str()?.to_owned();
        Some((id, name))
    });
    named.collect()
}
