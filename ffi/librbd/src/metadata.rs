//! The metadata of an image: texts with keys.

use crate::error::{Error, Result, check};
use crate::image::Image;
use crate::text::{c_string, growing, texts, until_zero};

/// The number of entries that are read at a time.
const PAGE: u64 = 64;

/// The maximum length of a page of keys or of values, in bytes.
const MAX_PAGE: usize = 16 << 20;

impl Image {
    /// Reads the value of `key`. `None` if there is none.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn metadata_get(&self, key: &str) -> Result<Option<String>> {
        let name = c_string(key, "a key")?;
        let value = growing(
            256,
            || format!("read the image's metadata {key}"),
            |buffer, size| {
                // SAFETY: the image is open, and `buffer` has room for `size` bytes.
                unsafe { (self.api().rbd_metadata_get)(self.raw(), name.as_ptr(), buffer, size) }
            },
        );
        match value {
            Ok(value) => Ok(Some(until_zero(&value))),
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sets `key` to `value`.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn metadata_set(&self, key: &str, value: &str) -> Result<()> {
        let (name, text) = (c_string(key, "a key")?, c_string(value, "a value")?);
        // SAFETY: the image is open, the texts are C strings.
        let returned =
            unsafe { (self.api().rbd_metadata_set)(self.raw(), name.as_ptr(), text.as_ptr()) };
        check(returned, || format!("set the image's metadata {key}")).map(drop)
    }

    /// Sets `key` to `value` without the exclusive lock. [`Image::metadata_set`] acquires the lock, or has
    /// its owner make the change. This method is for entries that must exist before the lock is acquired.
    ///
    /// # Errors
    /// Returns the OSD's error.
    pub fn metadata_put(&self, key: &str, value: &str) -> Result<()> {
        let action = || format!("set the image's metadata {key}");
        let entry = metadata_entry(key, value, action)?;
        let header = self.header()?;
        // SAFETY: the pool is open, the names are C strings, `entry` has the given length, and there is no
        // buffer for output.
        let returned = unsafe {
            (self.pool().cluster().api.rados.rados_exec)(
                self.pool().raw(),
                header.as_ptr(),
                c"rbd".as_ptr(),
                c"metadata_set".as_ptr(),
                entry.as_ptr().cast(),
                entry.len(),
                std::ptr::null_mut(),
                0,
            )
        };
        check(returned, action).map(drop)
    }

    /// Removes `key`.
    ///
    /// # Errors
    /// Returns ENOENT if there is no such key, or another error of the library.
    pub fn metadata_remove(&self, key: &str) -> Result<()> {
        let name = c_string(key, "a key")?;
        // SAFETY: the image is open, and the key is a C string.
        let returned = unsafe { (self.api().rbd_metadata_remove)(self.raw(), name.as_ptr()) };
        check(returned, || format!("remove the image's metadata {key}")).map(drop)
    }

    /// Reads all keys with their values, in the order of the keys.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn metadata(&self) -> Result<Vec<(String, String)>> {
        let mut entries: Vec<(String, String)> = Vec::new();
        loop {
            let after = entries.last().map_or("", |(key, _)| key);
            let page = self.metadata_page(after)?;
            let more = page.len() as u64 == PAGE;
            entries.extend(page);
            if !more {
                return Ok(entries);
            }
        }
    }

    fn metadata_page(&self, after: &str) -> Result<Vec<(String, String)>> {
        let start = c_string(after, "a key")?;
        let action = || "list the image's metadata".to_owned();
        let (mut keys_len, mut values_len) = (4096, 4096);
        loop {
            let (mut keys, mut values) = (vec![0_u8; keys_len], vec![0_u8; values_len]);
            // SAFETY: the image is open, and each buffer has the length that is passed with it.
            let returned = unsafe {
                (self.api().rbd_metadata_list)(
                    self.raw(),
                    start.as_ptr(),
                    PAGE,
                    keys.as_mut_ptr().cast(),
                    &raw mut keys_len,
                    values.as_mut_ptr().cast(),
                    &raw mut values_len,
                )
            };
            if returned == -libc::ERANGE {
                if keys_len.max(values_len) > MAX_PAGE {
                    return Err(Error::invalid(action(), "the answer is too long"));
                }
                // A length that was sufficient may come back as the part that was used.
                (keys_len, values_len) = (keys_len.max(keys.len()), values_len.max(values.len()));
                continue;
            }
            check(returned, action)?;
            keys.truncate(keys_len);
            values.truncate(values_len);
            return Ok(texts(&keys).zip(texts(&values)).collect());
        }
    }
}

/// Returns the argument with which the object class sets `key` to `value`: a map with one entry in Ceph's encoding.
pub(crate) fn metadata_entry(
    key: &str,
    value: &str,
    action: impl Fn() -> String,
) -> Result<Vec<u8>> {
    let mut entry = 1_u32.to_le_bytes().to_vec();
    for text in [c_string(key, "a key")?, c_string(value, "a value")?] {
        put_bytes(&mut entry, text.as_bytes(), &action)?;
    }
    Ok(entry)
}

/// Appends a text in Ceph's encoding: its length, and its bytes.
pub(crate) fn put_bytes(to: &mut Vec<u8>, bytes: &[u8], action: impl Fn() -> String) -> Result<()> {
    let length =
        u32::try_from(bytes.len()).map_err(|_| Error::invalid(action(), "the text is too long"))?;
    to.extend_from_slice(&length.to_le_bytes());
    to.extend_from_slice(bytes);
    Ok(())
}
