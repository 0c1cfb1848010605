//! LUKS encryption, which the library applies between an image and its objects.

use std::ffi::{c_char, c_void};

use librbd_sys::{
    RBD_ENCRYPTION_ALGORITHM_AES256, RBD_ENCRYPTION_FORMAT_LUKS, RBD_ENCRYPTION_FORMAT_LUKS1,
    RBD_ENCRYPTION_FORMAT_LUKS2, rbd_encryption_format_t, rbd_encryption_luks_format_options_t,
    rbd_encryption_luks1_format_options_t, rbd_encryption_spec_t,
};

use crate::error::{Error, Result, check};
use crate::image::Image;

/// The version of LUKS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Luks {
    One,
    Two,
    /// The version that the image's header has.
    Any,
}

/// The key of an image or of one of the images that it was cloned from.
#[derive(Clone, Copy)]
pub struct Key<'a> {
    pub format: Luks,
    pub passphrase: &'a [u8],
}

/// The library's form of a [`Key`].
enum Options {
    Of(rbd_encryption_format_t, rbd_encryption_luks1_format_options_t),
    Any(rbd_encryption_luks_format_options_t),
}

impl Image {
    /// Returns whether the library detects the version of LUKS and accepts a key for each image of a chain
    /// of clones (Ceph 18 does, 16 does not).
    pub fn can_unlock_chains(&self) -> bool {
        self.api().rbd_encryption_load2.is_some()
    }

    /// Unlocks the image: reads and writes then use plain text, and the size is that of the plain text. The
    /// first key is that of the image, the next one that of its parent, and so on. The last key also
    /// applies to the rest of the chain, up to an image that is not encrypted. Blocks for seconds.
    ///
    /// # Errors
    /// Returns EPERM for a wrong passphrase, and EINVAL if the image has no such header. Returns ENOSYS for
    /// a library before Ceph 16, and for several keys or [`Luks::Any`] with a library that cannot unlock
    /// chains. Returns other errors of the library.
    pub fn unlock(&self, keys: &[Key<'_>]) -> Result<()> {
        let action = || "unlock the image's encryption".to_owned();
        let mut options: Vec<Options> = keys.iter().map(Options::new).collect();
        let api = self.api();
        if let Some(load2) = api.rbd_encryption_load2 {
            let specs: Vec<_> = options.iter_mut().map(Options::spec).collect();
            // SAFETY: the image is open; each spec points to options with the type and size of its
            // format, which live until the end of the call; the library copies the data that it keeps.
            let loaded = unsafe { load2(self.raw(), specs.as_ptr(), specs.len()) };
            return check(loaded, action).map(drop);
        }
        let (Some(load), [only @ Options::Of(..)]) = (api.rbd_encryption_load, &mut *options)
        else {
            return Err(Error::new(action(), libc::ENOSYS));
        };
        let rbd_encryption_spec_t { format, opts, opts_size } = only.spec();
        // SAFETY: see above.
        check(unsafe { load(self.raw(), format, opts, opts_size) }, action).map(drop)
    }

    /// Writes a new header with a new key over the beginning of the image. The previous content is lost.
    ///
    /// # Errors
    /// Returns EINVAL for [`Luks::Any`], ENOSPC if the image is smaller than the header, ENOSYS for a
    /// library before Ceph 16, or another error of the library.
    pub fn format(&self, key: Key<'_>) -> Result<()> {
        let action = || "format the image for encryption".to_owned();
        let format = self.api().rbd_encryption_format;
        let format = format.ok_or_else(|| Error::new(action(), libc::ENOSYS))?;
        let mut options = Options::new(&key);
        if matches!(options, Options::Any(_)) {
            return Err(Error::new(action(), libc::EINVAL));
        }
        let rbd_encryption_spec_t { format: kind, opts, opts_size } = options.spec();
        // SAFETY: the image is open; the options have the type and size of the format and live until the
        // end of the call; the library copies the data that it keeps.
        check(unsafe { format(self.raw(), kind, opts, opts_size) }, action).map(drop)
    }
}

impl Options {
    /// Makes options that point to the key's passphrase.
    fn new(key: &Key<'_>) -> Self {
        let passphrase = key.passphrase.as_ptr().cast::<c_char>();
        let passphrase_size = key.passphrase.len();
        let of = |format| {
            let alg = RBD_ENCRYPTION_ALGORITHM_AES256;
            // The options of both versions have the same layout.
            let options =
                rbd_encryption_luks1_format_options_t { alg, passphrase, passphrase_size };
            Self::Of(format, options)
        };
        match key.format {
            Luks::One => of(RBD_ENCRYPTION_FORMAT_LUKS1),
            Luks::Two => of(RBD_ENCRYPTION_FORMAT_LUKS2),
            Luks::Any => {
                Self::Any(rbd_encryption_luks_format_options_t { passphrase, passphrase_size })
            }
        }
    }

    /// Makes a spec that points to these options.
    fn spec(&mut self) -> rbd_encryption_spec_t {
        let (format, opts, opts_size): (_, *mut c_void, _) = match self {
            Self::Of(format, options) => {
                (*format, (&raw mut *options).cast(), size_of_val(options))
            }
            Self::Any(options) => {
                let format = RBD_ENCRYPTION_FORMAT_LUKS;
                (format, (&raw mut *options).cast(), size_of_val(options))
            }
        };
        rbd_encryption_spec_t { format, opts, opts_size }
    }
}
