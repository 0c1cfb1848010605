//! The users of workers: each worker has a user and a group that no other process has.
//!
//! The numbers are from a configured range and have no entry in a user database. A number is taken by a lock
//! on a file in the runtime directory. The worker inherits the open file, so the number is free exactly when
//! the worker has ended, also after a crash of the supervisor. The lowest free number is used, because
//! journald has a file for each user that has ever logged.

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
        let User { number, lock } = Users::new(self, runtime_dir.join("users")).take()?;
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

/// The number of a user and a group. It is taken while any process has `lock` open.
#[derive(Debug)]
pub(super) struct User {
    pub(super) number: u32,
    pub(super) lock: OwnedFd,
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
            if let Some(lock) = self.lock(number).map_err(failed)? {
                return Ok(User { number, lock });
            }
        }
        let message = "every user of workers.users has a worker";
        Err(Error::new(ErrorKind::NoSpace, message)
            .with_repair("set workers.users to a larger range, and restart the daemon"))
    }

    /// Locks the file of a number. Returns `None` if another process has locked it.
    fn lock(&self, number: u32) -> io::Result<Option<OwnedFd>> {
        let path = self.directory.join(number.to_string());
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(path)?;
        #[allow(clippy::cast_possible_truncation, reason = "small constants, wider in C")]
        let whole = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        // The lock belongs to the open file description, which the worker inherits.
        match fcntl(file.as_fd(), FcntlArg::F_OFD_SETLK(&whole)) {
            Ok(_) => Ok(Some(file.into())),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(None),
            Err(error) => Err(error.into()),
        }
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
        let inherited = first.lock.try_clone().unwrap();
        drop(first);
        assert_eq!(users.take().unwrap_err().kind(), ErrorKind::NoSpace);
        drop(inherited);
        assert_eq!(users.take().unwrap().number, 2_100_000_000);
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
