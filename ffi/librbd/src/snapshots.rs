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
    /// Of the image when it was taken, in bytes.
    pub size: u64,
    /// For one in the trash, what it was called before.
    pub name: String,
    pub kind: SnapshotKind,
    /// When it was taken, in seconds since 1970.
    pub taken_at: i64,
}

/// Whose a snapshot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotKind {
    /// Somebody took it.
    User,
    /// It was removed, and stays until its last clone is gone.
    Trash,
    /// Mirroring's; it goes with the image.
    Mirror,
    /// A group's, which looks after it.
    Other,
}

/// Most snapshots that are listed.
const MAX_LISTED: i32 = 65_536;

impl Image {
    /// All snapshots.
    ///
    /// # Errors
    /// What the library gives.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>> {
        let mut count = 16_i32;
        loop {
            let none = rbd_snap_info_t { id: 0, size: 0, name: null() };
            let mut snapshots = vec![none; usize::try_from(count).unwrap_or(0) + 1];
            let room = count;
            // SAFETY: `snapshots` has room for `count` and the end mark; names are ours to clean up.
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
            // SAFETY: the library filled `listed` entries, with C strings for names, and an end mark
            // by which the clean-up finds them.
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
                // It was removed meanwhile.
                Err(error) if error.errno() == Some(libc::ENOENT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(snapshots)
    }

    fn describe(&self, id: u64, size: u64, mut name: String) -> Result<Snapshot> {
        let action = || format!("look at the snapshot {id}");
        let mut kind = RBD_SNAP_NAMESPACE_TYPE_USER;
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the image is open; each call fills what it is given, and says so by its result.
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
    /// EEXIST, or what the library gives.
    pub fn snapshot_create(&self, name: &str) -> Result<()> {
        let text = c_string(name, "a snapshot's name")?;
        // SAFETY: the image is open, the name a C string.
        let returned = unsafe { (self.api().rbd_snap_create)(self.raw(), text.as_ptr()) };
        check(returned, || format!("take the snapshot {name}")).map(drop)
    }

    /// Removes a snapshot. One that has clones which need no protection goes into the trash until they
    /// are gone.
    ///
    /// # Errors
    /// ENOENT, EBUSY for a protected one, or what the library gives.
    pub fn snapshot_remove(&self, name: &str) -> Result<()> {
        let text = c_string(name, "a snapshot's name")?;
        // SAFETY: the image is open, the name a C string.
        let returned = unsafe { (self.api().rbd_snap_remove)(self.raw(), text.as_ptr()) };
        check(returned, || format!("remove the snapshot {name}")).map(drop)
    }

    /// Makes the image what the snapshot is. Ended half way, a part of it is, and another call goes on.
    ///
    /// # Errors
    /// ENOENT, or what the library gives.
    pub fn snapshot_rollback(&self, name: &str, progress: Progress<'_>) -> Result<()> {
        let text = c_string(name, "a snapshot's name")?;
        let returned = with_progress(progress, |callback, argument| {
            // SAFETY: the image is open, the name a C string, the callback good for the call.
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

    /// Protects a snapshot from being removed, or lets go of it. Cloning in the
    /// format 1 needs it protected.
    ///
    /// # Errors
    /// EBUSY when it is protected already or has clones, EINVAL when it is not protected.
    pub fn snapshot_protect(&self, name: &str, protect: bool) -> Result<()> {
        let text = c_string(name, "a snapshot's name")?;
        let call =
            if protect { self.api().rbd_snap_protect } else { self.api().rbd_snap_unprotect };
        // SAFETY: the image is open, the name a C string.
        let returned = unsafe { call(self.raw(), text.as_ptr()) };
        let verb = if protect { "protect" } else { "unprotect" };
        check(returned, || format!("{verb} the snapshot {name}")).map(drop)
    }

    /// Whether a snapshot is protected.
    ///
    /// # Errors
    /// ENOENT, or what the library gives.
    pub fn snapshot_is_protected(&self, name: &str) -> Result<bool> {
        let text = c_string(name, "a snapshot's name")?;
        let mut protected = 0;
        // SAFETY: the image is open, the name a C string.
        let returned = unsafe {
            (self.api().rbd_snap_is_protected)(self.raw(), text.as_ptr(), &raw mut protected)
        };
        check(returned, || format!("look at the snapshot {name}"))?;
        Ok(protected != 0)
    }
}
