//! A simulated disk. It fails on demand, and at a loss of power it loses what was not synced: the content of
//! files in part, and any of the changes to directories.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::Disk;
use cleat_core::random::Random;

/// A simulated disk. Clones are the same disk.
#[derive(Debug, Clone, Default)]
pub(super) struct SimulatedDisk(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    contents: Vec<Content>,
    /// The entries that processes see: the number of the content of each file.
    entries: BTreeMap<PathBuf, usize>,
    /// The entries on the disk.
    durable: BTreeMap<PathBuf, usize>,
    /// The changes of entries since the last sync of their directory.
    pending: Vec<Change>,
    /// The number of steps until the loss of power.
    steps_left: Option<u64>,
    /// The reads of files under this directory fail.
    reads_fail: Option<(PathBuf, io::ErrorKind)>,
    changes_fail: Option<(PathBuf, io::ErrorKind)>,
    ignores_file_syncs: bool,
    ignores_directory_syncs: bool,
}

#[derive(Debug, Default)]
struct Content {
    bytes: Vec<u8>,
    is_synced: bool,
}

/// A change of entries, which a loss of power keeps or loses as a whole.
#[derive(Debug)]
enum Change {
    Create(PathBuf, usize),
    Rename(PathBuf, PathBuf, usize),
    Remove(PathBuf),
}

impl Change {
    fn is_in(&self, directory: &Path) -> bool {
        let (Self::Create(path, _) | Self::Rename(_, path, _) | Self::Remove(path)) = self;
        path.parent() == Some(directory)
    }

    fn apply(&self, entries: &mut BTreeMap<PathBuf, usize>) {
        match self {
            Self::Create(path, content) => {
                entries.insert(path.clone(), *content);
            }
            Self::Rename(from, to, content) => {
                entries.remove(from);
                entries.insert(to.clone(), *content);
            }
            Self::Remove(path) => {
                entries.remove(path);
            }
        }
    }
}

impl SimulatedDisk {
    /// Creates a disk that reports syncs of files or of directories as done without doing them.
    pub(super) fn without_syncs(files: bool, directories: bool) -> Self {
        let disk = Self::default();
        disk.state().ignores_file_syncs = files;
        disk.state().ignores_directory_syncs = directories;
        disk
    }

    /// Makes every read of a file under a directory fail.
    pub(super) fn fail_reads_under(&self, directory: &Path, error: io::ErrorKind) {
        self.state().reads_fail = Some((directory.to_owned(), error));
    }

    /// Makes every change under a directory fail.
    pub(super) fn fail_changes_under(&self, directory: &Path, error: io::ErrorKind) {
        self.state().changes_fail = Some((directory.to_owned(), error));
    }

    /// Ends these failures.
    pub(super) fn end_failures(&self) {
        let mut state = self.state();
        (state.reads_fail, state.changes_fail) = (None, None);
    }

    /// Makes the power fail after `steps` steps of the following calls.
    pub(super) fn lose_power_after(&self, steps: u64) {
        self.state().steps_left = Some(steps);
    }

    /// Loses the power, if it is not lost yet, and restores it. `random` decides what of the changes that were
    /// not synced is on the disk.
    pub(super) fn restart(&self, random: &Random) {
        let mut state = self.state();
        let state = &mut *state;
        for change in state.pending.drain(..) {
            if random.next().is_multiple_of(2) {
                change.apply(&mut state.durable);
            }
        }
        state.entries = state.durable.clone();
        for content in &mut state.contents {
            if !content.is_synced {
                let length = random.next() % (content.bytes.len() as u64 + 1);
                content.bytes.truncate(usize::try_from(length).unwrap());
                content.is_synced = true;
            }
        }
        state.steps_left = None;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

impl State {
    /// Counts a step. Fails when the power is lost.
    fn step(&mut self) -> io::Result<()> {
        match &mut self.steps_left {
            Some(0) => Err(io::Error::other("the power is lost")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn change(&mut self, change: Change) -> io::Result<()> {
        let (Change::Create(path, _) | Change::Rename(_, path, _) | Change::Remove(path)) = &change;
        if let Some((directory, error)) = &self.changes_fail
            && path.starts_with(directory)
        {
            return Err((*error).into());
        }
        self.step()?;
        change.apply(&mut self.entries);
        self.pending.push(change);
        Ok(())
    }

    fn content_of(&self, path: &Path) -> io::Result<usize> {
        self.entries.get(path).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Disk for SimulatedDisk {
    fn write_synced(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        let number = match state.content_of(path) {
            Ok(number) => {
                state.step()?;
                state.contents[number] = Content::default();
                number
            }
            Err(_) => {
                let number = state.contents.len();
                state.contents.push(Content::default());
                state.change(Change::Create(path.to_owned(), number))?;
                number
            }
        };
        state.step()?;
        state.contents[number].bytes = content.to_vec();
        state.step()?;
        state.contents[number].is_synced = !state.ignores_file_syncs;
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state();
        let number = state.content_of(from)?;
        state.change(Change::Rename(from.to_owned(), to.to_owned(), number))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.content_of(path)?;
        state.change(Change::Remove(path.to_owned()))
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.step()?;
        let state = &mut *state;
        if state.ignores_directory_syncs {
            return Ok(());
        }
        let (synced, pending) =
            state.pending.drain(..).partition::<Vec<_>, _>(|change| change.is_in(path));
        state.pending = pending;
        synced.iter().for_each(|change| change.apply(&mut state.durable));
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let state = self.state();
        Ok(state.entries.keys().filter(|file| file.parent() == Some(path)).cloned().collect())
    }

    fn read(&self, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
        let state = self.state();
        if let Some((directory, error)) = &state.reads_fail
            && path.starts_with(directory)
        {
            return Err((*error).into());
        }
        let bytes = &state.contents[state.content_of(path)?].bytes;
        Ok(bytes.iter().copied().take(usize::try_from(limit).unwrap()).collect())
    }
}
