//! Images with encryption options in their URI. Their sizes are those of the plain text; the image also
//! contains the encryption header.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use librbd::{Image, Open};

use super::{Target, layout};
use crate::encryption::{self, Kind, Passphrases};
use crate::spec::Luks;
use cleat_backend::store::Layout;
use cleat_backend::uri::{Size, invalid};
use cleat_core::error::{Error, ErrorKind, Result};

/// libcryptsetup's sizes of encryption headers, in bytes.
const HEADERS: [(Luks, u64); 2] = [(Luks::One, 4 << 20), (Luks::Two, 16 << 20)];

/// The additional timeout of a call that formats an image: the key derivation is calibrated first.
pub(crate) const FORMAT_TIMEOUT: Duration = encryption::TIMEOUT.saturating_mul(2);

impl Target {
    /// Returns the size of an image for `size` bytes of plain text. It is the same if the image is not
    /// encrypted.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for encryption options or a size that a new image cannot have.
    pub(crate) fn raw_size(&self, size: u64, layout: &Layout) -> Result<u64> {
        let Some(encryption) = &self.spec.encryption else { return Ok(size) };
        let [only] = &*encryption.layers else {
            return Err(invalid("a new image has no parent: give exactly one encryption"));
        };
        let header = HEADERS.iter().find(|(format, _)| *format == only.format);
        let Some((_, header)) = header else {
            return Err(invalid("the LUKS version of a new image must be given")
                .with_repair("write encryption=luks2"));
        };
        if size == 0 || !size.is_multiple_of(u64::from(encryption::ENCRYPTED_BLOCK)) {
            let message = format!("the size of an encrypted volume cannot be {} bytes", Size(size));
            return Err(invalid(message).with_repair("give a multiple of 4096 above 0"));
        }
        // The library starts the data at an object boundary.
        let object_size = layout.object_size.unwrap_or(0).max(1);
        let header = header.checked_next_multiple_of(object_size);
        let whole = header.and_then(|header| size.checked_add(header));
        whole.ok_or_else(|| invalid(format!("{} bytes are too large for an image", Size(size))))
    }

    /// Formats an image that was created now, or earlier and has no data. If the image is already encrypted,
    /// checks that its properties are the requested ones. Returns whether anything was changed.
    ///
    /// # Errors
    /// Returns `AlreadyExists` for an image with data or with other properties, and otherwise the cluster's
    /// error.
    pub(crate) fn encrypt(&self, size: u64, layout: &Layout) -> Result<bool> {
        let Some(encryption) = &self.spec.encryption else { return Ok(false) };
        let failed = |error| self.failed(error);
        let passphrases = Passphrases::load(encryption)?;
        let image = self.open(Open::ReadOnly)?;
        let fresh = encryption::kind(&image).map_err(failed)? == Kind::Plain;
        let (image, header) = if fresh {
            self.check_empty(&image)?;
            let image = self.open_exclusively()?;
            // Checked again under the lock: no other client can write from here on.
            self.check_empty(&image)?;
            let header = passphrases.format(&image, &self.name)?;
            (image, header)
        } else {
            let header = passphrases.unlock(&image, &self.name)?;
            (image, header)
        };
        let now = image.size().map_err(failed)?;
        let mut differences = layout::differences(layout, &image).map_err(failed)?;
        if now != size && fresh {
            // The size of the header depends on the object size, so the image may have to be adapted.
            let mut ignore = |_, _| ControlFlow::Continue(());
            encryption::resize(&image, Some(header), size, true, &mut ignore).map_err(failed)?;
        } else if now != size {
            differences.insert(0, format!("a size of {}, not {}", Size(now), Size(size)));
        }
        self.check_same(&differences)?;
        Ok(fresh)
    }

    /// Unlocks an open image if it is encrypted. Returns the size of the encryption header in bytes.
    pub(crate) fn unlock(&self, image: &Arc<Image>) -> Result<Option<u64>> {
        let Some(encryption) = &self.spec.encryption else { return Ok(None) };
        Passphrases::load(encryption)?.unlock(image, &self.name).map(Some)
    }

    /// Rejects an image with data, which formatting would destroy.
    fn check_empty(&self, image: &Image) -> Result<()> {
        let failed = |error| self.failed(error);
        let mut has_data = image.parent().map_err(failed)?.is_some();
        let size = image.size().map_err(failed)?;
        let walked = image.diff(None, 0, size, true, &mut |_, _, exists| {
            has_data |= exists;
            !has_data
        });
        if !has_data {
            return walked.map_err(failed);
        }
        let message = format!("{} exists, has data and is not encrypted", self.name);
        Err(Error::new(ErrorKind::AlreadyExists, message).with_repair(
            "choose another name; formatting it for encryption would destroy its content",
        ))
    }
}
