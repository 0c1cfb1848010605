//! The users of workers: each worker has a user and a group that no other process has.
//!
//! The numbers are from a configured range and have no entry in a user database. A number is taken by a shared
//! lock on a file in the runtime directory, which two open files hold. The worker inherits one, so the number
//! stays taken while the worker runs, also after a crash of the supervisor. The supervisor keeps the other one,
//! also for a worker that it adopts, so a compromised worker that closes its own cannot share its user with the
//! next worker. The lowest free number is used, because journald has a file for each user that has ever logged.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker_protocol::isolation::is_usable;

/// A range of numbers of users and groups. Its text is `FIRST-LAST`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UserRange {
    first: u32,
    last: u32,
}

impl Default for UserRange {
    /// Above the numbers that SSSD gives to users of a directory (up to 2000200000), and below those that
    /// systemd reserves (from 2147352576).
    fn default() -> Self {
        Self { first: 2_100_000_000, last: 2_100_065_535 }
    }
}

impl UserRange {
    /// Takes the lowest number of the range that no worker has, for this process. It is taken until the
    /// descriptor is closed.
    ///
    /// # Errors
    /// Returns `NoSpace` if every number is taken, and the error of the file system otherwise.
    pub fn take(self, runtime_dir: &Path) -> Result<(u32, OwnedFd)> {
        let User { number, lock, .. } = Users::new(self, runtime_dir.join("users")).take()?;
        Ok((number, lock))
    }
}

impl FromStr for UserRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed: Option<(u32, u32)> = text
            .split_once('-')
            .and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
        match parsed {
            Some((first, last)) if first <= last && is_usable(first) && is_usable(last) => {
                Ok(Self { first, last })
            }
            _ => Err(format!("{text:?} is not a range of users such as \"2100000000-2100065535\"")),
        }
    }
}

/// Gives numbers of a range to workers.
#[derive(Debug)]
pub(super) struct Users {
    range: UserRange,
    directory: PathBuf,
}

/// The number of a user and a group. It is taken while any process has `lock` or `own` open.
#[derive(Debug)]
pub(super) struct User {
    pub(super) number: u32,
    /// For the worker. It is open only for reading: a worker must not be able to fill the file system of the
    /// runtime directory.
    pub(super) lock: OwnedFd,
    /// For the supervisor.
    pub(super) own: OwnedFd,
}

impl Users {
    /// Creates the allocator of a range. Its lock files are in `directory`, which is created when needed.
    pub(super) fn new(range: UserRange, directory: PathBuf) -> Self {
        Self { range, directory }
    }

    /// Takes the lowest free number.
    ///
    /// # Errors
    /// Returns `NoSpace` if every number is taken, and the error of the file system otherwise.
    pub(super) fn take(&self) -> Result<User> {
        let directory = self.directory.display();
        let failed = |error| Error::from_io(format!("cannot take a user in {directory}"), error);
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory).map_err(failed)?;
        for number in self.range.first..=self.range.last {
            if let Some(user) = self.lock(number).map_err(failed)? {
                return Ok(user);
            }
        }
        let message = "every user of workers.users has a worker";
        Err(Error::new(ErrorKind::NoSpace, message)
            .with_repair("set workers.users to a larger range, and restart the daemon"))
    }

    /// Takes part in the lock of a worker's user. Returns `None` if `number` is not in the range.
    ///
    /// # Errors
    /// Returns the error of the file system, for example if no lock file exists.
    pub(super) fn share(&self, number: u32) -> io::Result<Option<OwnedFd>> {
        if !(self.range.first..=self.range.last).contains(&number) {
            return Ok(None);
        }
        let file = File::open(self.directory.join(number.to_string()))?;
        Ok(set_lock(&file, libc::F_RDLCK)?.then(|| file.into()))
    }

    /// Locks the file of a number. Returns `None` if another process has locked it.
    fn lock(&self, number: u32) -> io::Result<Option<User>> {
        let path = self.directory.join(number.to_string());
        let mut options = File::options();
        let own =
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        // Only one process at a time gets past this. Then its lock becomes a shared one, at no time absent.
        if !set_lock(&own, libc::F_WRLCK)? {
            return Ok(None);
        }
        let lock = File::open(path)?;
        if set_lock(&own, libc::F_RDLCK)? && set_lock(&lock, libc::F_RDLCK)? {
            return Ok(Some(User { number, lock: lock.into(), own: own.into() }));
        }
        Ok(None)
    }
}

/// Sets the lock of an open file, which everything shares that has inherited the open file. Returns whether no
/// other lock prevents it.
fn set_lock(file: &File, kind: libc::c_int) -> io::Result<bool> {
    #[allow(clippy::cast_possible_truncation, reason = "small constants, wider in C")]
    let whole = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    match fcntl(file.as_fd(), FcntlArg::F_OFD_SETLK(&whole)) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_free_when_its_lock_is_closed_everywhere() {
        let directory = tempfile::tempdir().unwrap();
        let range = "2100000000-2100000001".parse().unwrap();
        let users = Users::new(range, directory.path().join("users"));
        let (first, second) = (users.take().unwrap(), users.take().unwrap());
        assert_eq!((first.number, second.number), (2_100_000_000, 2_100_000_001));
        assert_eq!(users.take().unwrap_err().kind(), ErrorKind::NoSpace);
        // The worker closes its lock, or the supervisor ends.
        let User { lock, own, .. } = first;
        drop(lock);
        assert_eq!(users.take().unwrap_err().kind(), ErrorKind::NoSpace);
        drop(own);
        let User { number, lock, own } = users.take().unwrap();
        assert_eq!(number, 2_100_000_000);
        drop(own);
        assert_eq!(users.take().unwrap_err().kind(), ErrorKind::NoSpace);
        // The next supervisor adopts the worker.
        let adopted = users.share(number).unwrap().unwrap();
        drop(lock);
        assert_eq!(users.take().unwrap_err().kind(), ErrorKind::NoSpace);
        drop(adopted);
        assert_eq!(users.take().unwrap().number, number);
        assert!(users.share(0).unwrap().is_none());
    }

    #[test]
    fn a_worker_cannot_write_to_its_lock() {
        let directory = tempfile::tempdir().unwrap();
        let range = "2100000000-2100000000".parse().unwrap();
        let user = Users::new(range, directory.path().join("users")).take().unwrap();
        let error = io::Write::write(&mut File::from(user.lock), b"x").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn only_ranges_without_root_are_parsed() {
        for text in ["", "1", "0-5", "5-4", "1-4294967295", "a-b", "1-2-3"] {
            assert!(text.parse::<UserRange>().is_err(), "{text}");
        }
        let default: UserRange = "2100000000-2100065535".parse().unwrap();
        assert_eq!(default, UserRange::default());
    }
}
