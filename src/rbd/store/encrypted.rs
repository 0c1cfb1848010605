//! Images whose URI says how they are encrypted. Their sizes are those of the plain text; the image has
//! the header in addition.

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

/// What a header takes, in bytes: libcryptsetup's sizes.
const HEADERS: [(Luks, u64); 2] = [(Luks::One, 4 << 20), (Luks::Two, 16 << 20)];

/// How much longer a call may take that makes a key, which is tried out before its costs are decided on.
pub(crate) const PATIENCE: Duration = encryption::TIMEOUT.saturating_mul(2);

impl Target {
    /// The size that an image of `size` bytes of plain text has; the same where it is not encrypted.
    pub(crate) fn whole(&self, size: u64, layout: &Layout) -> Result<u64> {
        let Some(encryption) = &self.spec.encryption else { return Ok(size) };
        let [only] = &*encryption.layers else {
            return Err(invalid("a new image has no parent, and one encryption"));
        };
        let header = HEADERS.iter().find(|(format, _)| *format == only.format);
        let Some((_, header)) = header else {
            return Err(invalid("a new image needs to be told which version of LUKS")
                .with_repair("write encryption=luks2"));
        };
        if size == 0 || !size.is_multiple_of(u64::from(encryption::ENCRYPTED_BLOCK)) {
            let message = format!("an encrypted volume cannot have {} bytes", Size(size));
            return Err(invalid(message).with_repair("give a multiple of 4096"));
        }
        // The library has the data begin with an object.
        let together = layout.object_size.unwrap_or(0).max(1);
        let header = header.checked_next_multiple_of(together);
        let whole = header.and_then(|header| size.checked_add(header));
        whole.ok_or_else(|| invalid(format!("an image cannot hold {} bytes", Size(size))))
    }

    /// Encrypts an image that was just made, or was made before and holds nothing; sees that one that is
    /// encrypted already is so as it is wanted. Returns whether anything was changed.
    pub(crate) fn encrypt(&self, size: u64, layout: &Layout) -> Result<bool> {
        let Some(encryption) = &self.spec.encryption else { return Ok(false) };
        let failed = |error| self.failed(error);
        let passphrases = Passphrases::read(encryption)?;
        let image = self.open(Open::ReadOnly)?;
        let fresh = encryption::kind(&image).map_err(failed)? == Kind::Plain;
        let (image, header) = if fresh {
            self.check_empty(&image)?;
            let image = self.open_alone()?;
            // Nobody else can write from here on.
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
            // Where objects are not of the usual size, a header is not, either.
            let mut unseen = |_, _| ControlFlow::Continue(());
            encryption::resize(&image, Some(header), size, true, &mut unseen).map_err(failed)?;
        } else if now != size {
            differences.insert(0, format!("a size of {}, not {}", Size(now), Size(size)));
        }
        self.same(&differences)?;
        Ok(fresh)
    }

    /// Unlocks an image that was opened, where it is encrypted; with the share of it that is no plain
    /// text.
    pub(crate) fn unlock(&self, image: &Arc<Image>) -> Result<Option<u64>> {
        let Some(encryption) = &self.spec.encryption else { return Ok(None) };
        Passphrases::read(encryption)?.unlock(image, &self.name).map(Some)
    }

    /// Refuses an image that holds anything: formatting would destroy it.
    fn check_empty(&self, image: &Image) -> Result<()> {
        let failed = |error| self.failed(error);
        let mut held = image.parent().map_err(failed)?.is_some();
        let size = image.size().map_err(failed)?;
        let walked = image.diff(None, 0, size, true, &mut |_, _, exists| {
            held |= exists;
            !held
        });
        if !held {
            return walked.map_err(failed);
        }
        let message = format!("{} exists, and is not encrypted; it holds data", self.name);
        Err(Error::new(ErrorKind::AlreadyExists, message).with_repair(
            "choose another name; to encrypt it would destroy its content (rbd encryption format)",
        ))
    }
}
