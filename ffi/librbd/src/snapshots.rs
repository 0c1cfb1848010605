//! The snapshots of an image.

use std::ptr::null;

use librbd_sys::{
    RBD_SNAP_NAMESPACE_TYPE_MIRROR, RBD_SNAP_NAMESPACE_TYPE_TRASH, RBD_SNAP_NAMESPACE_TYPE_USER,
    rbd_snap_info_t,
};

use crate::error::{Error, Result, check};
use crate::image::Image;
use crate::progress::{Progress, with_progress};
use crate::text::{c_string, growing, owned, until_zero};

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub id: u64,
    /// The size of the image when the snapshot was taken, in bytes.
    pub size: u64,
    /// The name. For a snapshot in the trash, its former name.
    pub name: String,
    pub kind: SnapshotKind,
    /// When it was taken, in seconds since the Unix epoch.
    pub taken_at: i64,
}

/// The origin of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotKind {
    /// A user took it.
    User,
    /// It was removed and remains until its last clone is removed.
    Trash,
    /// It belongs to mirroring and is removed with the image.
    Mirror,
    /// Any other, such as a group's snapshot.
    Other,
}

/// The maximum number of snapshots that are listed.
const MAX_LISTED: i32 = 65_536;

impl Image {
    /// Lists all snapshots.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>> {
        let mut count = 16_i32;
        loop {
            let none = rbd_snap_info_t { id: 0, size: 0, name: null() };
            let mut snapshots = vec![none; usize::try_from(count).unwrap_or(0) + 1];
            let room = count;
            // SAFETY: `snapshots` has room for `count` entries and the end mark; the names are cleaned up
            // below.
            let returned = unsafe {
                (self.api().rbd_snap_list)(self.raw(), snapshots.as_mut_ptr(), &raw mut count)
            };
            if returned == -libc::ERANGE && count > room {
                if count <= MAX_LISTED {
                    continue;
                }
                return Err(Error::invalid("list the snapshots", "there are too many"));
            }
            let listed = check(returned, || "list the snapshots".to_owned())?;
            // SAFETY: the library has filled `listed` entries with C strings for names, and has added the
            // end mark that the clean-up needs.
            unsafe {
                let found = snapshots.iter().take(usize::try_from(listed).unwrap_or(0));
                let found: Vec<_> = found.map(|s| (s.id, s.size, owned(s.name))).collect();
                (self.api().rbd_snap_list_end)(snapshots.as_mut_ptr());
                return self.described(found);
            }
        }
    }

    fn described(&self, found: Vec<(u64, u64, String)>) -> Result<Vec<Snapshot>> {
        let mut snapshots = Vec::with_capacity(found.len());
        for (id, size, name) in found {
            match self.describe(id, size, name) {
                Ok(snapshot) => snapshots.push(snapshot),
                // It was removed in the meantime.
                Err(error) if error.errno() == Some(libc::ENOENT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(snapshots)
    }

    fn describe(&self, id: u64, size: u64, mut name: String) -> Result<Snapshot> {
        let action = || format!("read the snapshot {id}");
        let mut kind = RBD_SNAP_NAMESPACE_TYPE_USER;
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the image is open; each call that succeeds has filled its argument.
        let (of_kind, timed) = unsafe {
            (
                (self.api().rbd_snap_get_namespace_type)(self.raw(), id, &raw mut kind),
                (self.api().rbd_snap_get_timestamp)(self.raw(), id, &raw mut time),
            )
        };
        check(of_kind.min(timed), action)?;
        if kind == RBD_SNAP_NAMESPACE_TYPE_TRASH {
            let before = growing(128, action, |buffer, size| {
                // SAFETY: the image is open, and `buffer` has room for `size` bytes.
                unsafe { (self.api().rbd_snap_get_trash_namespace)(self.raw(), id, buffer, *size) }
            })?;
            name = until_zero(&before);
        }
        let kind = match kind {
            RBD_SNAP_NAMESPACE_TYPE_USER => SnapshotKind::User,
            RBD_SNAP_NAMESPACE_TYPE_TRASH => SnapshotKind::Trash,
            RBD_SNAP_NAMESPACE_TYPE_MIRROR => SnapshotKind::Mirror,
            _ => SnapshotKind::Other,
        };
        Ok(Snapshot { id, size, name, kind, taken_at: time.tv_sec })
    }

    /// Takes a snapshot.
    ///
    /// # Errors
    /// Returns EEXIST if it exists, or another error of the library.
    pub fn snapshot_create(&self, name: &str) -> Result<()> {
        let text = c_string(name, "a snapshot's name")?;
        // SAFETY: the image is open, and the name is a C string.
        let returned = unsafe { (self.api().rbd_snap_create)(self.raw(), text.as_ptr()) };
        check(returned, || format!("take the snapshot {name}")).map(drop)
    }

    /// Removes a snapshot. A snapshot with clones of format 2 moves to the trash until the last of them is
    /// removed.
    ///
    /// # Errors
    /// Returns ENOENT if it does not exist, EBUSY if it is protected, or another error of the library.
    pub fn snapshot_remove(&self, name: &str) -> Result<()> {
        let text = c_string(name, "a snapshot's name")?;
        // SAFETY: the image is open, and the name is a C string.
        let returned = unsafe { (self.api().rbd_snap_remove)(self.raw(), text.as_ptr()) };
        check(returned, || format!("remove the snapshot {name}")).map(drop)
    }

    /// Renames the snapshot `from` to `to`.
    ///
    /// # Errors
    /// Returns ENOENT if `from` does not exist, EEXIST if `to` exists, or another error of the library.
    pub fn snapshot_rename(&self, from: &str, to: &str) -> Result<()> {
        let (old, new) = (c_string(from, "a snapshot's name")?, c_string(to, "a snapshot's name")?);
        // SAFETY: the image is open, and the names are C strings.
        let returned =
            unsafe { (self.api().rbd_snap_rename)(self.raw(), old.as_ptr(), new.as_ptr()) };
        check(returned, || format!("rename the snapshot {from} to {to}")).map(drop)
    }

    /// Sets the image's content and size back to those of the snapshot. If it is interrupted, a part of the
    /// image has the content of the snapshot, and another call continues.
    ///
    /// # Errors
    /// Returns ENOENT if it does not exist, ECANCELED if `progress` returned `Break`, or another error of
    /// the library.
    pub fn snapshot_rollback(&self, name: &str, progress: Progress<'_>) -> Result<()> {
        let text = c_string(name, "a snapshot's name")?;
        let returned = with_progress(progress, |callback, argument| {
            // SAFETY: the image is open, the name is a C string, and the callback is valid for the call.
            unsafe {
                (self.api().rbd_snap_rollback_with_progress)(
                    self.raw(),
                    text.as_ptr(),
                    callback,
                    argument,
                )
            }
        });
        check(returned, || format!("roll back to the snapshot {name}")).map(drop)
    }

    /// Protects a snapshot from removal, or removes the protection. Clones of format 1 need a protected
    /// snapshot.
    ///
    /// # Errors
    /// Returns EBUSY if it is protected already or has clones, EINVAL if it is not protected, or another
    /// error of the library.
    pub fn snapshot_protect(&self, name: &str, protect: bool) -> Result<()> {
        let text = c_string(name, "a snapshot's name")?;
        let call =
            if protect { self.api().rbd_snap_protect } else { self.api().rbd_snap_unprotect };
        // SAFETY: the image is open, and the name is a C string.
        let returned = unsafe { call(self.raw(), text.as_ptr()) };
        let verb = if protect { "protect" } else { "unprotect" };
        check(returned, || format!("{verb} the snapshot {name}")).map(drop)
    }

    /// Returns whether a snapshot is protected.
    ///
    /// # Errors
    /// Returns ENOENT if it does not exist, or another error of the library.
    pub fn snapshot_is_protected(&self, name: &str) -> Result<bool> {
        let text = c_string(name, "a snapshot's name")?;
        let mut protected = 0;
        // SAFETY: the image is open, and the name is a C string.
        let returned = unsafe {
            (self.api().rbd_snap_is_protected)(self.raw(), text.as_ptr(), &raw mut protected)
        };
        check(returned, || format!("read the snapshot {name}"))?;
        Ok(protected != 0)
    }
}
