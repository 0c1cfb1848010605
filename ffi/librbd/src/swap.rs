//! Replaces an entry of an image's metadata if it has not changed, and if the image's lock is in a certain state.

use std::ffi::CStr;

use librbd_sys::LIBRADOS_CMPXATTR_OP_EQ;

use crate::error::{Error, Result, check};
use crate::image::Image;
use crate::lock::LOCK;
use crate::metadata::{metadata_entry, put_bytes};
use crate::text::c_string;

/// The prefix of the keys of the object with the metadata (`RBD_METADATA_KEY_PREFIX` of the object class).
const PREFIX: &str = "metadata_";

/// The attribute of the same object in which the object class for locks keeps librbd's lock.
const LOCK_ATTRIBUTE: &CStr = c"lock.rbd_lock";

/// The tag of librbd's exclusive lock (`ManagedLock`).
const LOCK_TAG: &str = "internal";

/// The type of an exclusive lock (`ClsLockType::EXCLUSIVE`).
const LOCK_EXCLUSIVE: u8 = 1;

/// The maximum size of the attribute, in bytes.
const MAX_ATTRIBUTE: usize = 1 << 20;

/// The state of the image's exclusive lock that a change of the metadata requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockState {
    /// Any state.
    Any,
    /// No client holds the lock.
    Free,
    /// This client holds the lock.
    Own,
}

impl Image {
    /// Sets `key` to `value` if it has the value `expected` (`None` or empty: no value), and the lock is in the state
    /// `lock`. The OSD does all of this in one step. Returns whether it has set the value. Does not acquire the lock,
    /// and works with an image that is open read-only.
    ///
    /// # Errors
    /// Returns EBUSY if this client should hold the lock and does not, and another error of the OSD.
    pub fn metadata_swap(
        &self,
        key: &str,
        expected: Option<&str>,
        value: &str,
        lock: LockState,
    ) -> Result<bool> {
        let action = || format!("replace the image's metadata {key}");
        let required = match lock {
            LockState::Any => Required::Nothing,
            LockState::Own => Required::Held(self.own_lock()?),
            LockState::Free => {
                let attribute = self.lock_attribute()?;
                if !is_free(&attribute) {
                    return Ok(false);
                }
                Required::Attribute(attribute)
            }
        };
        let entry = metadata_entry(key, value, action)?;
        match self.swap(key, expected.unwrap_or_default(), &entry, &required) {
            Err(error) if error.errno() == Some(libc::ECANCELED) => Ok(false),
            other => other.map(|()| true),
        }
    }

    fn swap(&self, key: &str, expected: &str, entry: &[u8], required: &Required) -> Result<()> {
        let action = || format!("replace the image's metadata {key}");
        let (header, stored) = (self.header()?, c_string(&format!("{PREFIX}{key}"), "a key")?);
        let rados = &self.pool().cluster().api.rados;
        let (mut compared, mut checked, mut set) = (0, 0, 0);
        // SAFETY: the pool is open. The operation is released once, after it was executed. The names are C strings,
        // each value has the length that is passed with it, and all of them, with the integers for results, live
        // until the operation is released.
        let returned = unsafe {
            let operation = (rados.rados_create_write_op)();
            (rados.rados_write_op_omap_cmp)(
                operation,
                stored.as_ptr(),
                LIBRADOS_CMPXATTR_OP_EQ,
                expected.as_ptr().cast(),
                expected.len(),
                &raw mut compared,
            );
            match required {
                Required::Nothing => {}
                Required::Attribute(value) => (rados.rados_write_op_cmpxattr)(
                    operation,
                    LOCK_ATTRIBUTE.as_ptr(),
                    LIBRADOS_CMPXATTR_OP_EQ,
                    value.as_ptr().cast(),
                    value.len(),
                ),
                Required::Held(lock) => (rados.rados_write_op_exec)(
                    operation,
                    c"lock".as_ptr(),
                    c"assert_locked".as_ptr(),
                    lock.as_ptr().cast(),
                    lock.len(),
                    &raw mut checked,
                ),
            }
            (rados.rados_write_op_exec)(
                operation,
                c"rbd".as_ptr(),
                c"metadata_set".as_ptr(),
                entry.as_ptr().cast(),
                entry.len(),
                &raw mut set,
            );
            let returned = (rados.rados_write_op_operate)(
                operation,
                self.pool().raw(),
                header.as_ptr(),
                std::ptr::null_mut(),
                0,
            );
            (rados.rados_release_write_op)(operation);
            returned
        };
        check(returned, action).map(drop)
    }

    /// Returns the argument with which the object class checks that this client holds the lock.
    fn own_lock(&self) -> Result<Vec<u8>> {
        let action = || "check that this client holds the lock".to_owned();
        let own = self.pool().cluster().addresses()?;
        let lockers = self.lockers()?;
        let Some(locker) = lockers.iter().find(|locker| locker.address == own) else {
            return Err(Error::new(action(), libc::EBUSY));
        };
        let mut content = Vec::new();
        put_bytes(&mut content, LOCK.to_bytes(), action)?;
        content.push(LOCK_EXCLUSIVE);
        put_bytes(&mut content, locker.cookie.as_bytes(), action)?;
        put_bytes(&mut content, LOCK_TAG.as_bytes(), action)?;
        // The version of the structure, and the oldest one that can read it.
        let mut argument = vec![1, 1];
        put_bytes(&mut argument, &content, action)?;
        Ok(argument)
    }

    /// Reads the attribute with the lock; empty if there is none.
    fn lock_attribute(&self) -> Result<Vec<u8>> {
        let action = || "read the image's lock".to_owned();
        let header = self.header()?;
        let mut buffer = vec![0_u8; 512];
        loop {
            // SAFETY: the pool is open, the names are C strings, and the buffer has the length that is passed with it.
            let returned = unsafe {
                (self.pool().cluster().api.rados.rados_getxattr)(
                    self.pool().raw(),
                    header.as_ptr(),
                    LOCK_ATTRIBUTE.as_ptr(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                )
            };
            match returned {
                returned if returned == -libc::ENODATA => return Ok(Vec::new()),
                returned if returned == -libc::ERANGE => {
                    if buffer.len() >= MAX_ATTRIBUTE {
                        return Err(Error::invalid(action(), "the answer is too long"));
                    }
                    buffer.resize(buffer.len() * 2, 0);
                }
                returned => {
                    let length = check(returned, action)?;
                    buffer.truncate(usize::try_from(length).unwrap_or(0));
                    return Ok(buffer);
                }
            }
        }
    }
}

/// What a swap requires beside the value.
enum Required {
    Nothing,
    /// The attribute with the lock has this value.
    Attribute(Vec<u8>),
    /// The object class for locks accepts this argument.
    Held(Vec<u8>),
}

/// Returns whether the attribute with the lock has no holder: a structure (version, oldest version, length in 4 bytes)
/// that begins with the number of holders in 4 bytes.
fn is_free(attribute: &[u8]) -> bool {
    attribute.is_empty() || attribute.get(6..10) == Some(&[0; 4])
}
