//! LUKS, done by the library between an image and its objects.

use std::ffi::{c_char, c_void};

use librbd_sys::{
    RBD_ENCRYPTION_ALGORITHM_AES256, RBD_ENCRYPTION_FORMAT_LUKS1, RBD_ENCRYPTION_FORMAT_LUKS2,
    rbd_encryption_luks1_format_options_t,
};

use crate::error::{Result, check};
use crate::image::Image;

/// How an image's content is encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Luks {
    One,
    Two,
}

impl Image {
    /// Reads and writes plain text from now on, as `passphrase` unlocks it; the size becomes that of
    /// the plain text. To be called before the first operation.
    ///
    /// # Errors
    /// EPERM for a wrong passphrase, EINVAL without such a header, ENOSYS for a library before Ceph 16,
    /// or what the library gives.
    pub fn unlock(&self, format: Luks, passphrase: &[u8]) -> Result<()> {
        let action = || "unlock the image's encryption".to_owned();
        let load = self.api().rbd_encryption_load.ok_or_else(|| {
            let action = "unlock the image's encryption, for which librbd is too old (Ceph 16 can)";
            crate::Error::new(action, libc::ENOSYS)
        })?;
        // The options of both look the same.
        let format = match format {
            Luks::One => RBD_ENCRYPTION_FORMAT_LUKS1,
            Luks::Two => RBD_ENCRYPTION_FORMAT_LUKS2,
        };
        let mut options = rbd_encryption_luks1_format_options_t {
            // Only of use when one formats.
            alg: RBD_ENCRYPTION_ALGORITHM_AES256,
            passphrase: passphrase.as_ptr().cast::<c_char>(),
            passphrase_size: passphrase.len(),
        };
        let size = size_of_val(&options);
        let options = (&raw mut options).cast::<c_void>();
        // SAFETY: the image is open; the options are of the type and size that the format has, and the
        // library copies the passphrase.
        check(unsafe { load(self.raw(), format, options, size) }, action).map(drop)
    }
}
