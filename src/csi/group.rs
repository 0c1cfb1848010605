//! Gives the files of a volume to a group (fsGroup), as kubelet does for drivers that cannot
//! (pkg/volume/volume_linux.go): every file gets the group and its permissions, every directory also the
//! set-group-id bit.
//!
//! Pods may change the files meanwhile. So every step goes through descriptors of directories and follows no
//! symbolic link: a link that replaces a directory leads to an error and not out of the volume.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_filesystem::bounded;
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat};
use nix::sys::stat::{FchmodatFlags, FileStat, Mode, SFlag, fchmod, fchmodat, fstat, fstatat};
use nix::unistd::{Gid, fchown, fchownat};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout_at};

/// The maximum depth of directories. Each level keeps a descriptor open.
const MAX_DEPTH: usize = 200;

/// How long an unmount waits for the end of a change. A change ends after the file that it works on.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The changes that run at the same time. Other calls need threads, too.
static PERMITS: Semaphore = Semaphore::const_new(32);

/// The changes that have not ended, by the root directory. A change whose call has reached its deadline continues.
static CHANGES: Mutex<BTreeMap<PathBuf, Running>> = Mutex::new(BTreeMap::new());

/// A change that has not ended.
#[derive(Debug, Clone)]
struct Running {
    group: u32,
    stop: Arc<AtomicBool>,
    /// Closed when the change has ended.
    end: watch::Receiver<()>,
}

/// The only change below a root directory, which has ended when this is dropped.
struct Change {
    root: PathBuf,
    group: u32,
    stop: Arc<AtomicBool>,
    _end: watch::Sender<()>,
}

/// Gives everything below `root` to the group `group`. Does nothing if `root` itself has the group and the bits
/// already: it is changed last, so then everything below was changed.
///
/// With many files, this takes longer than a call may. The change continues after the deadline, and a repeated call
/// waits for its end. [`stop`] ends it.
///
/// # Errors
/// Returns `TimedOut` at the deadline, and `Aborted` after [`stop`]. Otherwise returns the error of the first file
/// that cannot be changed.
pub(crate) async fn apply(root: &Path, group: u32, deadline: Instant) -> Result<()> {
    loop {
        match Change::begin(root, group) {
            Ok(change) => return change.run(deadline).await,
            Err(mut other) => {
                if other.group != group {
                    other.stop.store(true, Ordering::Relaxed);
                }
                // Its result is that of the call which has started it: this one finds the root changed, or tries again.
                if !other.has_ended(deadline).await {
                    return Err(late(root));
                }
            }
        }
    }
}

/// Ends a change of the files below `root`, which keeps its filesystem in use. Waits for its end at most for
/// [`STOP_TIMEOUT`], because the storage may not answer. Returns whether no change is left.
pub(crate) async fn stop(root: &Path, deadline: Instant) -> bool {
    let running = changes().get(root).cloned();
    let Some(mut running) = running else { return true };
    running.stop.store(true, Ordering::Relaxed);
    running.has_ended(deadline.min(Instant::now() + STOP_TIMEOUT)).await
}

fn changes() -> MutexGuard<'static, BTreeMap<PathBuf, Running>> {
    // No code panics while it holds the lock.
    CHANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn late(root: &Path) -> Error {
    let message = format!(
        "{} has too many files to change their group in time; the change continues",
        root.display()
    );
    Error::new(ErrorKind::TimedOut, message).with_repair("repeat the call; it waits for the end")
}

impl Running {
    /// Waits for the end of the change. Returns whether it has ended before the deadline.
    async fn has_ended(&mut self, deadline: Instant) -> bool {
        timeout_at(deadline, self.end.changed()).await.is_ok()
    }
}

impl Change {
    /// Registers a change. Returns the other one if one has not ended.
    fn begin(root: &Path, group: u32) -> Result<Self, Running> {
        let mut changes = changes();
        if let Some(other) = changes.get(root) {
            return Err(other.clone());
        }
        let (sender, end) = watch::channel(());
        let stop = Arc::new(AtomicBool::new(false));
        changes.insert(root.to_owned(), Running { group, stop: Arc::clone(&stop), end });
        Ok(Self { root: root.to_owned(), group, stop, _end: sender })
    }

    /// Changes the files on a thread of its own, which continues after the deadline.
    async fn run(self, deadline: Instant) -> Result<()> {
        let root = self.root.clone();
        // The semaphore is never closed.
        let Ok(Ok(permit)) = timeout_at(deadline, PERMITS.acquire()).await else {
            let message =
                format!("the files of {} wait for changes of other volumes", root.display());
            return Err(Error::new(ErrorKind::TimedOut, message).with_repair("repeat the call"));
        };
        let work = move || {
            let _permit = permit;
            let result = self.files();
            if Instant::now() >= deadline {
                let path = self.root.display();
                match &result {
                    Ok(()) => tracing::info!(%path, "the files belong to the group {}", self.group),
                    Err(error) => tracing::warn!(%path, "{}", error.report()),
                }
            }
            // The change ends when its thread is no longer counted: the next change would be refused otherwise.
            Ok((self, result))
        };
        match bounded("change the group of the files of", &root, deadline, work).await {
            Ok((_change, result)) => result,
            Err(error) if error.kind() == ErrorKind::TimedOut && changes().contains_key(&root) => {
                Err(late(&root))
            }
            Err(error) => Err(error),
        }
    }

    /// Changes the files. Blocks as the filesystem does.
    fn files(&self) -> Result<()> {
        let path = self.root.display();
        let failed = |errno: Errno| match errno {
            Errno::ECANCELED => {
                let message = format!("the change of the group of the files of {path} was ended");
                Error::new(ErrorKind::Aborted, message).with_repair("repeat the call")
            }
            errno => {
                Error::from_io(format!("cannot give the files of {path} to a group"), errno.into())
            }
        };
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let root = openat(AT_FDCWD, &self.root, flags, Mode::empty()).map_err(failed)?;
        let found = fstat(&root).map_err(failed)?;
        if found.st_gid == self.group && has(&found, DIRECTORY) {
            return Ok(());
        }
        let (group, device) = (Gid::from_raw(self.group), found.st_dev);
        let walk = Walk { group, device, stop: &self.stop };
        walk.directory(root, 0).map_err(failed)
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        changes().remove(&self.root);
    }
}

/// The permissions that a directory gets, and a file.
const DIRECTORY: Mode = Mode::from_bits_truncate(0o2770);
const FILE: Mode = Mode::from_bits_truncate(0o660);

fn has(found: &FileStat, bits: Mode) -> bool {
    Mode::from_bits_truncate(found.st_mode).contains(bits)
}

struct Walk<'a> {
    group: Gid,
    /// The device of the volume's filesystem: other mounts below it are left alone.
    device: u64,
    /// Whether the walk must end.
    stop: &'a AtomicBool,
}

impl Walk<'_> {
    /// Changes a directory after everything in it.
    fn directory(&self, directory: OwnedFd, depth: usize) -> Result<(), Errno> {
        if depth > MAX_DEPTH {
            return Err(Errno::ELOOP);
        }
        let mut entries = Dir::from_fd(directory)?;
        let names: Vec<_> = entries
            .iter()
            .map(|entry| entry.map(|entry| entry.file_name().to_owned()))
            .collect::<Result<_, _>>()?;
        for name in names {
            if ![&b"."[..], b".."].contains(&name.to_bytes()) {
                self.entry(&entries, &name, depth)?;
            }
        }
        let found = fstat(&entries)?;
        if found.st_gid == self.group.as_raw() && has(&found, DIRECTORY) {
            // An earlier walk has changed it.
            return Ok(());
        }
        fchown(&entries, None, Some(self.group))?;
        fchmod(&entries, Mode::from_bits_truncate(found.st_mode) | DIRECTORY)
    }

    fn entry(&self, parent: &Dir, name: &CStr, depth: usize) -> Result<(), Errno> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Errno::ECANCELED);
        }
        let found = match fstatat(parent, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            // A pod has removed it.
            Err(Errno::ENOENT) => return Ok(()),
            other => other?,
        };
        if found.st_dev != self.device {
            return Ok(());
        }
        let kind = SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT;
        if kind == SFlag::S_IFDIR {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let inner = openat(parent.as_fd(), name, flags, Mode::empty())?;
            return self.directory(inner, depth + 1);
        }
        if found.st_gid != self.group.as_raw() {
            fchownat(parent, name, None, Some(self.group), AtFlags::AT_SYMLINK_NOFOLLOW)?;
        }
        if kind == SFlag::S_IFREG && !has(&found, FILE) {
            let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let file = openat(parent.as_fd(), name, flags, Mode::empty())?;
            // A descriptor of O_PATH cannot be changed itself, but the file that it stands for can.
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
            let mode = Mode::from_bits_truncate(found.st_mode) | FILE;
            fchmodat(AT_FDCWD, path.as_str(), mode, FchmodatFlags::FollowSymlink)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn files_get_the_group_and_links_lead_nowhere() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (root, outside) = (directory.path().join("v"), directory.path().join("outside"));
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(root.join("a/b/file"), "x").unwrap();
        std::fs::write(&outside, "x").unwrap();
        std::fs::set_permissions(&outside, PermissionsExt::from_mode(0o600)).unwrap();
        symlink(&outside, root.join("a/link")).unwrap();
        let deadline = || Instant::now() + Duration::from_secs(10);
        apply(&root, 4242, deadline()).await.unwrap();
        for path in ["", "a", "a/b", "a/b/file", "a/link"] {
            let found = std::fs::symlink_metadata(root.join(path)).unwrap();
            assert_eq!(found.gid(), 4242, "{path:?}");
            let wanted = if found.is_dir() { 0o2770 } else { 0o660 };
            assert!(
                found.is_symlink() || found.mode() & wanted == wanted,
                "{path:?}: {:o}",
                found.mode()
            );
        }
        let untouched = std::fs::metadata(&outside).unwrap();
        assert_eq!((untouched.gid(), untouched.mode() & 0o777), (0, 0o600));
        // The root has the group already, so nothing is read again.
        std::fs::write(root.join("new"), "x").unwrap();
        std::os::unix::fs::chown(root.join("new"), None, Some(0)).unwrap();
        apply(&root, 4242, deadline()).await.unwrap();
        assert_eq!(std::fs::metadata(root.join("new")).unwrap().gid(), 0);
    }

    #[tokio::test]
    async fn a_change_continues_after_its_deadline_and_a_repeated_call_waits_for_it() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        for number in 0..5000 {
            std::fs::write(root.join(number.to_string()), "").unwrap();
        }
        let group = |path: &Path| std::fs::metadata(path).unwrap().gid();
        let past = || Instant::now() - Duration::from_secs(1);
        let later = || Instant::now() + Duration::from_secs(60);
        let late = apply(root, 4243, past()).await.unwrap_err();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        while group(root) != 4243 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(group(&root.join("4999")), 4243);

        apply(root, 4244, past()).await.unwrap_err();
        apply(root, 4244, later()).await.unwrap();
        assert_eq!((group(root), group(&root.join("0"))), (4244, 4244));
        // The group of the last call wins.
        apply(root, 4245, past()).await.unwrap_err();
        apply(root, 4246, later()).await.unwrap();
        assert_eq!((group(root), group(&root.join("0"))), (4246, 4246));
    }

    #[tokio::test]
    async fn an_unmount_ends_a_change() {
        let directory = tempfile::tempdir().unwrap();
        let (root, later) = (directory.path(), Instant::now() + Duration::from_secs(60));
        let change = Change::begin(root, 4247).unwrap_or_else(|other| panic!("{other:?}"));
        let joined = apply(root, 4247, Instant::now()).await.unwrap_err();
        assert!(joined.message().contains("the change continues"), "{joined}");
        std::fs::write(root.join("file"), "").unwrap();
        let ends = tokio::spawn({
            let root = root.to_owned();
            async move { stop(&root, later).await }
        });
        while !change.stop.load(Ordering::Relaxed) {
            tokio::task::yield_now().await;
        }
        assert_eq!(change.run(later).await.unwrap_err().kind(), ErrorKind::Aborted);
        ends.await.unwrap();
        stop(root, later).await;
        assert!(!changes().contains_key(root));
    }
}
