//! What surrounds an image: its parent and its clones, its objects, its age, what it takes up.

use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

use librbd_sys::{
    RBD_MIRROR_IMAGE_ENABLED, rbd_image_info_t, rbd_linked_image_spec_t, rbd_mirror_image_info_t,
    rbd_snap_spec_t,
};

use crate::error::{Error, Result, check};
use crate::image::Image;
use crate::list::listed;
use crate::progress::with_extents;
use crate::text::{owned, until_zero};

/// An image, and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkedImage {
    pub pool: String,
    /// Empty for none.
    pub namespace: String,
    pub id: String,
    pub name: String,
    /// Whether it lies in the trash.
    pub in_trash: bool,
}

/// What a clone was made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    pub image: LinkedImage,
    pub snapshot: String,
    /// Bytes from the beginning that may still be read from it.
    pub overlap: u64,
}

/// The objects that hold an image's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Objects {
    /// As many as there are when all of it is written.
    pub count: u64,
    /// What their names begin with.
    pub prefix: String,
}

impl Image {
    /// What the image was cloned from; `None` for one that stands for itself.
    ///
    /// # Errors
    /// What the library gives.
    pub fn parent(&self) -> Result<Option<Parent>> {
        let mut image = NO_IMAGE;
        let mut snapshot = rbd_snap_spec_t { id: 0, namespace_type: 0, name: null_mut() };
        // SAFETY: the image is open; both take texts that are ours to clean up on success.
        let returned =
            unsafe { (self.api().rbd_get_parent)(self.raw(), &raw mut image, &raw mut snapshot) };
        if returned == -libc::ENOENT {
            return Ok(None);
        }
        check(returned, || "ask for the image's parent".to_owned())?;
        // SAFETY: the library filled both with C strings, which the clean-ups free.
        let (image, snapshot) = unsafe {
            let found = (linked(&image), owned(snapshot.name));
            (self.api().rbd_linked_image_spec_cleanup)(&raw mut image);
            (self.api().rbd_snap_spec_cleanup)(&raw mut snapshot);
            found
        };
        let overlap = self.number(self.api().rbd_get_overlap, "ask for the parent's part")?;
        Ok(Some(Parent { image, snapshot, overlap }))
    }

    /// Whether mirroring writes to the image, as a copy of another cluster's; `false` where the library
    /// cannot tell.
    ///
    /// # Errors
    /// What the library gives.
    pub fn is_mirror_copy(&self) -> Result<bool> {
        let api = self.api();
        let get_info = api.rbd_mirror_image_get_info.zip(api.rbd_mirror_image_get_info_cleanup);
        let Some((get_info, clean_up)) = get_info else {
            return Ok(false);
        };
        let mut info = rbd_mirror_image_info_t { global_id: null_mut(), state: 0, primary: false };
        // SAFETY: the image is open; `info` takes a text that is ours to clean up on success.
        let returned = unsafe { get_info(self.raw(), &raw mut info, size_of_val(&info)) };
        check(returned, || "ask whether the image is mirrored".to_owned())?;
        // SAFETY: the library filled it.
        unsafe { clean_up(&raw mut info) };
        Ok(info.state == RBD_MIRROR_IMAGE_ENABLED && !info.primary)
    }

    /// The clones of all snapshots, in every pool that this client may look into.
    ///
    /// # Errors
    /// EPERM where there is a pool that it may not, or what the library gives.
    pub fn children(&self) -> Result<Vec<LinkedImage>> {
        let action = || "list the image's clones".to_owned();
        let mut children = listed(NO_IMAGE, action, |entries, count| {
            // SAFETY: the image is open, and there is room for `count` entries.
            unsafe { (self.api().rbd_list_children3)(self.raw(), entries, count) }
        })?;
        // SAFETY: the library filled these with C strings, which the clean-up frees.
        unsafe {
            let found = children.iter().map(|child| linked(child)).collect();
            let clean_up = self.api().rbd_linked_image_spec_list_cleanup;
            clean_up(children.as_mut_ptr(), children.len());
            Ok(found)
        }
    }

    /// The objects that it is made of.
    ///
    /// # Errors
    /// What the library gives.
    pub fn objects(&self) -> Result<Objects> {
        let mut info = MaybeUninit::<rbd_image_info_t>::uninit();
        // SAFETY: the image is open; `info` is filled on success.
        let info = unsafe {
            let returned = (self.api().rbd_stat)(self.raw(), info.as_mut_ptr(), size_of_val(&info));
            check(returned, || "ask for the image's objects".to_owned())?;
            info.assume_init()
        };
        let prefix: Vec<u8> = info.block_name_prefix.iter().map(|c| c.cast_unsigned()).collect();
        Ok(Objects { count: info.num_objs, prefix: until_zero(&prefix) })
    }

    /// The pool that the data lies in, where that is another one than the image's own.
    ///
    /// # Errors
    /// What the library gives.
    pub fn data_pool(&self) -> Result<String> {
        // SAFETY: the image is open.
        let id = unsafe { (self.api().rbd_get_data_pool_id)(self.raw()) };
        if id < 0 {
            let errno = i32::try_from(-id).unwrap_or(libc::EIO);
            return Err(Error::new("ask for the image's data pool", errno));
        }
        self.pool().cluster().pool_name(id)
    }

    /// When it was made, in seconds since 1970.
    ///
    /// # Errors
    /// What the library gives.
    pub fn created_at(&self) -> Result<i64> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the image is open, and `time` takes the answer.
        let returned = unsafe { (self.api().rbd_get_create_timestamp)(self.raw(), &raw mut time) };
        check(returned, || "ask for the image's age".to_owned())?;
        Ok(time.tv_sec)
    }

    /// Bytes of the objects that it has of its own now, a parent's and snapshots' not counted. Quick
    /// with the feature fast-diff, while that is valid; else every object is looked at.
    ///
    /// # Errors
    /// What the library gives.
    pub fn used(&self) -> Result<u64> {
        let size = self.size()?;
        let mut used = 0_u64;
        let mut extent = |_offset, length, exists| {
            used = used.saturating_add(if exists { length } else { 0 });
            true
        };
        let returned = with_extents(&mut extent, |callback, argument| {
            // SAFETY: the image is open, no snapshot is named, the callback good for the call.
            unsafe {
                (self.api().rbd_diff_iterate2)(
                    self.raw(),
                    null(),
                    0,
                    size,
                    0,
                    1,
                    callback,
                    argument,
                )
            }
        });
        check(returned, || "count what the image takes up".to_owned())?;
        Ok(used)
    }
}

const NO_IMAGE: rbd_linked_image_spec_t = rbd_linked_image_spec_t {
    pool_id: 0,
    pool_name: null_mut(),
    pool_namespace: null_mut(),
    image_id: null_mut(),
    image_name: null_mut(),
    trash: false,
};

/// # Safety
/// The texts of `spec` are null or C strings.
unsafe fn linked(spec: &rbd_linked_image_spec_t) -> LinkedImage {
    // SAFETY: by this function's contract.
    unsafe {
        LinkedImage {
            pool: owned(spec.pool_name),
            namespace: owned(spec.pool_namespace),
            id: owned(spec.image_id),
            name: owned(spec.image_name),
            in_trash: spec.trash,
        }
    }
}
