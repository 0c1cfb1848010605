//! Opening an image, with a timeout, and claiming it.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use cleat_backend::uri::invalid;
use cleat_backend::{OpenOptions, VolumeIdentity};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::Result;
use cleat_core::volume::{BlockSizes, Features};
use cleat_grants::object::Mode;

use super::RbdImage;
use super::close::Handles;
use super::identity::identity;
use crate::background::Background;
use crate::claim::decision::Purpose;
use crate::connection::{load_library, open_library};
use crate::encryption::{self, ENCRYPTED_BLOCK, Passphrases};
use crate::errors::{self, open_error};
use crate::hold::Wanted;
use crate::keyring::ClientKey;
use crate::pause::Pause;
use crate::permissions::{self, MissingCaps};
use crate::pool_space::PoolSpace;
use crate::quiesce::Snapshots;
use crate::shared::{Shared, whole_blocks};
use crate::sharer::Sharer;
use crate::spec::RbdSpec;
use crate::{cache, mirror, timeouts};

/// The timeout of opening, without unlocking. It is shorter than the supervisor's. librbd has no timeout of
/// its own for OSDs that do not answer.
const OPEN_TIMEOUT: Duration = Duration::from_secs(15);

/// The maximum payload of one request in bytes, the size that NBD clients expect to be able to send.
const MAX_PAYLOAD: u32 = 32 << 20;

/// The number of objects in one piece of a long range.
const PIECE_OBJECTS: u64 = 64;

/// The length of such a piece in bytes if the zeroes are encrypted. It occupies the connection's thread as
/// long as a write of this length.
const ENCRYPTED_PIECE: u64 = 1 << 20;

impl RbdImage {
    /// Opens `spec`, and claims it unless it is opened read-only. Blocks at most for the timeout of opening
    /// and that of unlocking.
    ///
    /// # Errors
    /// Returns `InUse` if another client has claimed the image, `TimedOut` if the cluster does not answer,
    /// and otherwise the error of opening.
    pub(crate) fn open(spec: &RbdSpec, options: &OpenOptions) -> Result<Self> {
        Self::open_in_time(spec, options, true)
    }

    /// Opens `spec` while another process still serves it. It is claimed later, by the handover.
    ///
    /// # Errors
    /// Returns `TimedOut` if the cluster does not answer, and otherwise the error of opening.
    pub(crate) fn open_successor(spec: &RbdSpec, options: &OpenOptions) -> Result<Self> {
        Self::open_in_time(spec, options, false)
    }

    fn open_in_time(spec: &RbdSpec, options: &OpenOptions, claim: bool) -> Result<Self> {
        load_library()?;
        let mut credentials = options.credentials.clone();
        credentials.complete(&spec.files_with_secrets())?;
        let passphrases = spec.encryption.as_ref();
        let passphrases =
            passphrases.map(|layers| Passphrases::find(layers, &credentials)).transpose()?;
        let key = ClientKey::find(spec, &credentials)?;
        drop(credentials);
        let name = spec.image_name();
        let (wanted, read_only) = (spec.clone(), options.read_only || spec.snapshot.is_some());
        let (named, watched) = (name.clone(), options.snapshots && !read_only);
        let is_granted = is_granted(options);
        let opening = format!("open {name}");
        let started = SystemClock.now();
        let (image, snapshots, key) = timeouts::with_timeout(OPEN_TIMEOUT, &opening, move || {
            let image = open_library(&wanted, key.as_ref(), read_only, is_granted)?;
            // Immediately: a snapshot that starts before the watch aborts the process (librbd 16).
            let watch = || Snapshots::watch(&image, &named);
            let snapshots = watched.then(watch).transpose()?;
            Ok((image, snapshots, key))
        })?;
        let left = OPEN_TIMEOUT.saturating_sub(SystemClock.elapsed_since(started));
        let (image, header) = match passphrases {
            Some(passphrases) => {
                let (image, header) = encryption::unlock_in_time(passphrases, image, name)?;
                (image, Some(header))
            }
            None => (image, None),
        };
        let (wanted, options) = (spec.clone(), options.clone());
        timeouts::with_timeout(left, &opening, move || {
            let mut opened = Self::from_library(image, header, snapshots, &wanted, options)?;
            opened.key = key;
            let claimed = if claim { opened.claim_opened() } else { Ok(opened) };
            claimed.map_err(|error| errors::with_caps_repair(error, &wanted))
        })
    }

    /// Makes the volume of an image that the library has opened. `header` is the size of its encryption
    /// header.
    fn from_library(
        image: Arc<librbd::Image>,
        header: Option<u64>,
        snapshots: Option<Snapshots>,
        spec: &RbdSpec,
        options: OpenOptions,
    ) -> Result<Self> {
        let name = spec.image_name();
        let failed = |error| open_error(error, &name, spec);
        let encrypted = header.is_some();
        let read_only = options.read_only || spec.snapshot.is_some();
        // Before the claim, which would fence the clients of another image.
        let identity = identity(&image, spec)?;
        VolumeIdentity::check(&identity, options.expected.as_ref(), &name)?;
        let stat = image.stat().map_err(failed)?;
        if stat.size == 0 {
            let error = invalid(format!("{name} has a size of 0 bytes"));
            return Err(error.with_repair(format!("give it a size: rbd resize --size 10G {name}")));
        }
        if !read_only {
            cache::check_off(&image.config().map_err(failed)?, &name)?;
        }
        let data_pool = if image.features().map_err(failed)? & librbd::RBD_FEATURE_DATA_POOL == 0 {
            spec.pool.clone()
        } else {
            let data_pool = image.data_pool().map_err(failed)?;
            permissions::check(&image, &data_pool, spec, read_only)?;
            data_pool
        };
        let shared = Arc::new(Shared {
            size: AtomicU64::new(whole_blocks(stat.size, encrypted)),
            watcher: OnceLock::new(),
            luks_header: header,
            fenced: AtomicBool::new(false),
            claim: Mutex::default(),
            hold: Wanted::default(),
            pause: Pause::default(),
            missing_caps: MissingCaps::new(spec, &data_pool),
            pool_space: PoolSpace::new(data_pool),
            read_only,
            piece: if encrypted {
                ENCRYPTED_PIECE
            } else {
                stat.object_size.saturating_mul(PIECE_OBJECTS)
            },
        });
        let mode = mode(spec, &options);
        let is_followed = !read_only || mode.is_some();
        let background = is_followed.then(|| Background::start(&image, &name, &shared));
        let background = background.transpose()?;
        // Also for an encrypted image: a device keeps the write-zeroes limit of its last owner (Linux 6.12)
        // and sends such requests even if they are not offered.
        let write_zeroes = image.can_write_zeroes();
        let features = Features {
            read_only,
            flush: true,
            fua: true,
            trim: spec.trim,
            write_zeroes,
            fast_zero: write_zeroes,
            cache: false,
            multi_connection: true,
            keeps_acknowledged_writes: true,
        };
        let (claimant, sharer) = match mode {
            Some(mode) => (Some((options.claimant, mode)), None),
            None if read_only => (None, None),
            None => {
                // For an image that is claimed, the claim includes this check.
                mirror::check_primary(&image, &name)?;
                (None, Sharer::new(options.claimant))
            }
        };
        let handles = Mutex::new(Some(Handles { background, snapshots, image }));
        let blocks = block_sizes(stat, encrypted);
        let key = None;
        Ok(Self { handles, name, identity, claimant, sharer, key, blocks, features, shared })
    }

    /// Claims the image after opening. If the mapping has a device and another mapping has claimed the image
    /// in the meantime, the volume is served nevertheless, as fenced: all its requests fail.
    fn claim_opened(self) -> Result<Self> {
        match self.claim(Purpose::Open) {
            Err(_) if self.shared.is_fenced() && self.resumes() => return Ok(self),
            other => other?,
        }
        // Before the claim another client could resize the image.
        self.read_size()?;
        Ok(self)
    }

    fn resumes(&self) -> bool {
        self.claimant.as_ref().is_some_and(|(claimant, _)| claimant.resumes)
    }
}

fn is_granted(options: &OpenOptions) -> bool {
    options.claimant.grant.is_some_and(|grant| grant > 0)
}

/// Returns how the volume is claimed; `None` for a volume without a claim. Only a mapping with a grant shares its
/// claim.
fn mode(spec: &RbdSpec, options: &OpenOptions) -> Option<Mode> {
    match (spec.snapshot.is_some(), options.read_only, spec.shared) {
        (true, ..) => None,
        (false, true, _) => is_granted(options).then_some(Mode::ReadOnly),
        (false, false, true) => is_granted(options).then_some(Mode::SharedReadWrite),
        (false, false, false) => Some(Mode::ReadWrite),
    }
}

/// Derives the block sizes from the image's layout.
fn block_sizes(stat: librbd::Stat, encrypted: bool) -> BlockSizes {
    // The unit of contiguous data: an object, or the part of it that a stripe fills.
    let unit = stat.object_size.min(stat.stripe_unit).clamp(4096, MAX_PAYLOAD.into());
    let unit = u32::try_from(unit).unwrap_or(MAX_PAYLOAD);
    // Only an unusual stripe unit is not a power of two.
    let preferred = if unit.is_power_of_two() { unit } else { 4096 };
    let minimum = if encrypted { ENCRYPTED_BLOCK } else { 1 };
    BlockSizes { minimum, preferred, maximum: MAX_PAYLOAD }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_sizes_follow_the_objects() {
        let stat = |object_size, stripe_unit| librbd::Stat {
            size: 1 << 30,
            object_size,
            stripe_unit,
            stripe_count: 1,
        };
        for (object, unit, preferred) in [
            (4 << 20, 4 << 20, 4 << 20),
            (4 << 20, 65536, 65536),
            (64 << 20, 64 << 20, 32 << 20),
            (4 << 20, 3 << 10, 4096),
            (12288, 12288, 4096),
        ] {
            assert_eq!(block_sizes(stat(object, unit), false).preferred, preferred);
        }
    }
}
