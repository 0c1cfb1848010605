//! An open image: its control half, and what it shares with its queues.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cleat_backend::claimant::Claimant;
use cleat_backend::uri::{Size, invalid};
use cleat_backend::{BackgroundWork, RunningTask};
use cleat_backend::{Completer, Extents, Handover, HandoverFiles, HandoverState, Resize, Shrink};
use cleat_backend::{Image, ImageQueue, OpenOptions, SnapshotQuiesce, Waker};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::volume::{BlockSizes, Extent, Features};
use cleat_sys::ring::Ring;

use crate::background::{self, Background, Pause};
use crate::claim::decision::Occasion;
use crate::claim::header::ImageHeader;
use crate::claim::{self, Contest};
use crate::connection::{load_library, open_library};
use crate::encryption::{self, ENCRYPTED_BLOCK, Passphrases};
use crate::errors::{self, problem};
use crate::permissions::{self, Rights};
use crate::pool_space::Room;
use crate::queue::RbdQueue;
use crate::quiesce::Snapshots;
use crate::shared::{Shared, whole_blocks};
use crate::spec::RbdSpec;
use crate::{cache, extents, mirror, timeouts};

/// How long opening may take in all, less than a supervisor waits for it. OSDs that do not answer have
/// no limit of their own.
const OPEN_PATIENCE: Duration = Duration::from_secs(15);

/// How often the size should be read again. librbd reports changes to writers only, and a report can be
/// lost with the connection.
const SIZE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// How long closing may take before it is left to itself.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// How often closing looks whether the last user is gone.
const CLOSE_PAUSE: Duration = Duration::from_millis(2);

/// The longest payload of one request: what NBD clients expect to be able to send.
const MAX_PAYLOAD: u32 = 32 << 20;

/// Objects that one piece of a long range touches at once.
const PIECE_OBJECTS: u64 = 64;

/// Bytes of such a piece where zeroes are encrypted: it takes the connection's thread as long as a write
/// of that length.
const ENCRYPTED_PIECE: u64 = 1 << 20;

/// An open image.
pub(crate) struct RbdImage {
    /// `None` once it was closed. Locked by calls of the control half only.
    open: Mutex<Option<Open>>,
    name: String,
    /// `None`: nothing is claimed, since nothing is written or others write, too.
    claimant: Option<Claimant>,
    blocks: BlockSizes,
    features: Features,
    shared: Arc<Shared>,
}

/// What closing ends.
struct Open {
    /// `None` for a reader, to which librbd reports no changes, and which has no claim.
    background: Option<Background>,
    /// Where somebody wants to be told of them.
    snapshots: Option<Snapshots>,
    image: Arc<librbd::Image>,
}

impl RbdImage {
    /// Opens `spec`, claiming it unless it is only read.
    pub(crate) fn open(spec: &RbdSpec, options: &OpenOptions) -> Result<Self> {
        Self::open_in_time(spec, options, true)
    }

    /// Opens `spec` while another process still serves it; claimed when it succeeds.
    pub(crate) fn open_successor(spec: &RbdSpec, options: &OpenOptions) -> Result<Self> {
        Self::open_in_time(spec, options, false)
    }

    fn open_in_time(spec: &RbdSpec, options: &OpenOptions, claim: bool) -> Result<Self> {
        load_library()?;
        let passphrases = spec.encryption.as_ref().map(Passphrases::read).transpose()?;
        let name = spec.image_name();
        let (wanted, read_only) = (spec.clone(), options.read_only || spec.snapshot.is_some());
        let (named, watched) = (name.clone(), options.snapshots && !read_only);
        let opening = format!("open {name}");
        let began = Instant::now();
        let (image, snapshots) = timeouts::within(OPEN_PATIENCE, &opening, move || {
            let image = open_library(&wanted, read_only)?;
            // At once: one that begins before this aborts the process (librbd 16).
            let watch = || Snapshots::watch(&image, &named);
            let snapshots = watched.then(watch).transpose()?;
            Ok((image, snapshots))
        })?;
        let left = OPEN_PATIENCE.saturating_sub(began.elapsed());
        let (image, header) = match passphrases {
            Some(passphrases) => {
                let (image, header) = encryption::unlock_in_time(passphrases, image, name)?;
                (image, Some(header))
            }
            None => (image, None),
        };
        let (wanted, options) = (spec.clone(), options.clone());
        timeouts::within(left, &opening, move || {
            let opened = Self::around(image, header, snapshots, &wanted, options)?;
            let claimed = if claim { opened.claimed() } else { Ok(opened) };
            claimed.map_err(|error| errors::explained(error, &wanted))
        })
    }

    /// What serves an image that the library has opened.
    fn around(
        image: Arc<librbd::Image>,
        header: Option<u64>,
        snapshots: Option<Snapshots>,
        spec: &RbdSpec,
        options: OpenOptions,
    ) -> Result<Self> {
        let name = spec.image_name();
        let failed = |error| problem(error, &name, spec);
        let encrypted = header.is_some();
        let read_only = options.read_only || spec.snapshot.is_some();
        let stat = image.stat().map_err(failed)?;
        if stat.size == 0 {
            let error = invalid(format!("{name} is empty"));
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
            pause: Pause::default(),
            rights: Rights::of(spec, &data_pool),
            room: Room::of(data_pool),
            read_only,
            piece: if encrypted {
                ENCRYPTED_PIECE
            } else {
                stat.object_size.saturating_mul(PIECE_OBJECTS)
            },
        });
        let background =
            if read_only { None } else { Some(Background::start(&image, &name, &shared)?) };
        // Also where they have to be encrypted: a device keeps what its last owner offered (Linux 6.12), and
        // asks for them all the same.
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
        if !read_only && spec.shared {
            // Whoever claims an image looks himself.
            mirror::check_primary(&image, &name)?;
        }
        let claimant = (!read_only && !spec.shared).then_some(options.claimant);
        let open = Mutex::new(Some(Open { background, snapshots, image }));
        let blocks = block_sizes(stat, encrypted);
        Ok(Self { open, name, claimant, blocks, features, shared })
    }

    /// Claims what was just opened. Where a device exists, and somebody else has had its volume since,
    /// it is served all the same: with errors, which is the end of whatever is mounted there.
    fn claimed(self) -> Result<Self> {
        match self.claim(Occasion::Opening) {
            Err(_) if self.is_fenced() && self.resumes() => return Ok(self),
            other => other?,
        }
        // Until now it could change.
        self.read_size()?;
        Ok(self)
    }

    fn resumes(&self) -> bool {
        self.claimant.as_ref().is_some_and(|claimant| claimant.resumes)
    }

    fn image(&self) -> Result<Arc<librbd::Image>> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.as_ref().map(|open| Arc::clone(&open.image)).ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, format!("{} is closed already", self.name))
        })
    }

    fn change_size(&self, size: u64, shrink: bool) -> Result<()> {
        if self.shared.read_only {
            return Err(Error::new(ErrorKind::PermissionDenied, "the volume is read-only"));
        }
        let now = self.read_size()?;
        if size < now && !shrink {
            let (size, now) = (Size(size), Size(now));
            return Err(invalid(format!("{} holds {now}; {size} would cut it off", self.name)));
        }
        if size == 0 {
            return Err(invalid(format!("{} cannot be made empty", self.name)));
        }
        let (image, mut unseen) = (self.image()?, |_, _| ControlFlow::Continue(()));
        let resized =
            encryption::resize(&image, self.shared.luks_header, size, shrink, &mut unseen);
        resized.map_err(|error| self.failed(error))?;
        self.read_size().map(drop)
    }

    fn claim(&self, occasion: Occasion) -> Result<()> {
        let lost = || {
            let message = format!("{} belongs to somebody else", self.name);
            Error::new(ErrorKind::Fenced, message)
        };
        if self.is_fenced() {
            return Err(lost());
        }
        let Some(claimant) = &self.claimant else { return Ok(()) };
        let (image, name) = (self.image()?, &self.name);
        let header = &ImageHeader { image: &image, name };
        let contest = Contest { header, name, claimant, occasion, only: None };
        let Some(claim) = contest.acquire().inspect_err(|error| self.note(error))? else {
            self.shared.fenced.store(true, Ordering::Release);
            return Err(lost());
        };
        *self.shared.claim() = Some(claim);
        Ok(())
    }

    fn read_size(&self) -> Result<u64> {
        let size = self.image()?.size().map_err(|error| self.failed(error))?;
        self.shared.set_size(size);
        Ok(self.size())
    }

    /// Remembers what an error says of whose the volume is.
    fn note(&self, error: &Error) {
        self.shared.fenced.fetch_or(error.kind() == ErrorKind::Fenced, Ordering::AcqRel);
    }

    /// Nothing where nobody wants to be told of snapshots.
    fn with_snapshots<T>(&self, use_them: impl FnOnce(&Snapshots) -> T) -> Option<T> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.as_ref().and_then(|open| open.snapshots.as_ref()).map(use_them)
    }

    fn failed(&self, error: librbd::Error) -> Error {
        let error = errors::later(error, &self.name);
        self.note(&error);
        error
    }
}

impl Image for RbdImage {
    fn size(&self) -> u64 {
        self.shared.size.load(Ordering::Acquire)
    }

    fn block_sizes(&self) -> BlockSizes {
        self.blocks
    }

    fn features(&self) -> Features {
        self.features
    }

    fn queue(&self, _ring: &mut Ring, completer: &Completer) -> Result<Box<dyn ImageQueue>> {
        let (image, shared) = (self.image()?, Arc::clone(&self.shared));
        Ok(Box::new(RbdQueue::new(&image, shared, completer.clone())))
    }

    fn refresh_size(&self) -> Result<u64> {
        self.read_size()
    }

    fn watch_changes(&self, waker: Waker) {
        // The worker that serves the volume calls this once.
        let _ = self.shared.watcher.set(waker);
    }

    fn size_check_interval(&self) -> Option<Duration> {
        Some(SIZE_CHECK_INTERVAL)
    }

    /// A request that fails for lack of space has no effect later: the OSDs have answered it.
    fn retries_no_space(&self) -> bool {
        true
    }

    fn failure_reason(&self) -> Option<String> {
        self.shared.room.failure_reason(&self.name)
    }

    fn is_fenced(&self) -> bool {
        self.shared.fenced.load(Ordering::Acquire)
    }

    fn resize(&self) -> Option<&dyn Resize> {
        Some(self)
    }

    fn shrink(&self) -> Option<&dyn Shrink> {
        Some(self)
    }

    /// For the content of an encrypted image the library would report where the ciphertext lies.
    fn extents(&self) -> Option<&dyn Extents> {
        self.shared.luks_header.is_none().then_some(self as &dyn Extents)
    }

    fn handover(&self) -> Option<&dyn Handover> {
        Some(self)
    }

    fn snapshot_quiesce(&self) -> Option<&dyn SnapshotQuiesce> {
        Some(self)
    }

    fn background(&self) -> Option<&dyn BackgroundWork> {
        Some(self)
    }

    /// Closing gives the lock back, so it is waited for; but not for ever, where the cluster is away:
    /// it forgets a client that is gone by itself.
    fn close(&self) {
        let taken = self.open.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(open) = taken else { return };
        let (sender, closed) = mpsc::channel();
        // What somebody else owns is not to be touched any more.
        let claim = self.shared.claim().take().filter(|_| !self.is_fenced());
        let name = self.name.clone();
        let close = move || {
            if let Some(claim) = claim
                && let Err(error) = claim::release(&open.image, &claim, &name)
            {
                tracing::warn!(image = %name, error = %error.report(), "the claim stays");
            }
            let _ = sender.send(open.close());
        };
        if let Err(error) = thread::Builder::new().name("rbd-close".to_owned()).spawn(close) {
            tracing::warn!(image = %self.name, %error, "no thread for the close, which had no limit");
            return;
        }
        match closed.recv_timeout(CLOSE_PATIENCE) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(image = %self.name, %error, "the close failed"),
            Err(_) => tracing::warn!(image = %self.name, "the cluster does not let it be closed"),
        }
    }
}

impl Resize for RbdImage {
    fn grow(&self, size: u64) -> Result<()> {
        self.change_size(size, false)
    }
}

impl Shrink for RbdImage {
    fn shrink_to(&self, size: u64) -> Result<()> {
        self.change_size(size, true)
    }
}

impl Extents for RbdImage {
    fn list(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        let extents = extents::extents(&*self.image()?, offset..offset + length, limit);
        extents.map_err(|error| self.failed(error))
    }
}

impl SnapshotQuiesce for RbdImage {
    fn watch(&self, waker: Waker, active: bool) -> Result<()> {
        if self.shared.read_only {
            let message = format!("{} is read-only: there is nothing to quiesce", self.name);
            return Err(invalid(message).with_repair("map it without --quiesce"));
        }
        self.with_snapshots(|snapshots| snapshots.attend(waker, active)).ok_or_else(|| {
            let message = format!("{} was opened without notification of snapshots", self.name);
            Error::new(ErrorKind::Internal, message)
        })
    }

    fn pending(&self) -> Option<u64> {
        self.with_snapshots(Snapshots::waiting).flatten()
    }

    fn answer(&self, number: u64, result: Result<(), i32>) -> bool {
        self.with_snapshots(|snapshots| snapshots.answer(number, result)).unwrap_or(false)
    }
}

impl BackgroundWork for RbdImage {
    fn stop(&self, deadline: Instant) -> Vec<RunningTask> {
        // Quiesce and size notifications only set numbers; their thread reads.
        let stopped = self.shared.pause.stop(deadline);
        let running = RunningTask { name: background::THREAD, may_write: false };
        if stopped { Vec::new() } else { vec![running] }
    }

    fn restart(&self) {
        self.shared.pause.resume();
    }
}

impl Handover for RbdImage {
    fn prepare(&self) -> Result<HandoverFiles> {
        Ok(HandoverFiles { descriptors: Vec::new() })
    }

    fn release(&self) -> Result<HandoverState> {
        let fenced = self.is_fenced();
        let image = self.image()?;
        self.with_snapshots(Snapshots::refuse);
        if let Some(claim) = self.shared.claim().take().filter(|_| !fenced) {
            let released = claim::release(&image, &claim, &self.name)
                .inspect_err(|error| self.note(error))
                .and_then(|()| image.lock_release().map_err(|error| self.failed(error)));
            if let Err(error) = released {
                // The lock is ours still, and so the right to write.
                self.resume()?;
                return Err(error);
            }
        }
        Ok(HandoverState { fenced, ..HandoverState::default() })
    }

    fn resume(&self) -> Result<()> {
        self.with_snapshots(Snapshots::take_charge);
        let taken = self.claim(Occasion::HandOver);
        if taken.as_ref().is_err_and(|error| error.kind() == ErrorKind::InUse) {
            // Somebody else was faster. librbd would wait for the lock, and go on.
            self.shared.fenced.store(true, Ordering::Release);
        }
        taken
    }

    fn take_over(&self, state: &HandoverState) -> Result<()> {
        if state.fenced {
            self.shared.fenced.store(true, Ordering::Release);
            return Ok(());
        }
        self.claim(Occasion::HandOver)?;
        self.with_snapshots(Snapshots::take_charge);
        // It may have grown since this one opened it.
        self.read_size().map(drop)
    }
}

impl Drop for RbdImage {
    fn drop(&mut self) {
        self.close();
    }
}

impl Open {
    /// Ends what follows the size and waits for the last queue.
    fn close(self) -> librbd::Result<()> {
        drop(self.snapshots);
        self.background.into_iter().for_each(Background::end);
        let mut image = self.image;
        loop {
            match Arc::try_unwrap(image) {
                Ok(image) => return image.close(),
                // A connection's thread, say, that has not ended quite.
                Err(shared) => image = shared,
            }
            thread::sleep(CLOSE_PAUSE);
        }
    }
}

fn block_sizes(stat: librbd::Stat, encrypted: bool) -> BlockSizes {
    // What lies together: an object, or the part of it that a stripe fills.
    let together = stat.object_size.min(stat.stripe_unit).clamp(4096, MAX_PAYLOAD.into());
    let together = u32::try_from(together).unwrap_or(MAX_PAYLOAD);
    // Powers of two, but for stripes that somebody chose oddly.
    let preferred = if together.is_power_of_two() { together } else { 4096 };
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
