//! An open volume: its control half.

mod capabilities;
mod serving;
pub(crate) mod shared;
mod tail_file;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cleat_backend::claimant::Claimant;
use cleat_backend::{
    BackgroundWork, Completer, Extents, Handover, Image, ImageQueue, OpenOptions, RenewCredentials,
    Resize, SnapshotQuiesce, VolumeIdentity, Waker,
};
use cleat_core::clock::SystemClock;
use cleat_core::error::{Error, Result};
use cleat_core::space::SpaceUse;
use cleat_core::volume::{BlockSizes, Features};
use cleat_object::cache::Cache;
use cleat_object::codec::Description;
use cleat_object::encryption::KeyFile;
use cleat_object::name::{SnapshotId, VolumeId};
use cleat_object::store::Store;
use cleat_object::volume::{Config, Keep, Place};
use cleat_sys::ring::Ring;

use crate::cache::FileCache;
use crate::claim::decision::Purpose;
use crate::connection::Connection;
use crate::errors::{failed, no_snapshot, wait};
use crate::executor::Executor;
use crate::nonce::nonce;
use crate::parents;
use crate::queue::ObjectQueue;
use crate::spec::VolumeAt;
use crate::timeouts::{CALL_TIMEOUT, CLOSE_TIMEOUT, DROP_TIMEOUT, after};
use crate::watched::Watched;
use serving::Serving;
use shared::Shared;
pub(crate) use tail_file::TAIL_BYTES;

/// The blocks of every volume. Extents and requests of the engine are multiples of a sector.
const BLOCKS: BlockSizes = BlockSizes { minimum: 512, preferred: 4096, maximum: 32 << 20 };

/// An open volume.
pub(crate) struct ObjectImage {
    spec: VolumeAt,
    connection: Arc<dyn Connection>,
    store: Arc<Watched>,
    identity: VolumeIdentity,
    claimant: Claimant,
    /// The key file of an encrypted volume.
    key: Option<KeyFile>,
    /// The tail memory, for a writer.
    keep: Option<Keep>,
    cache: Option<Arc<dyn Cache>>,
    read_only: bool,
    shared: Arc<Shared>,
    /// The claim of this process, and its futures. `None` for a reader, and while the volume is released.
    serving: Mutex<Option<Serving>>,
    /// Ends last: the futures belong to its thread.
    _executor: Executor,
}

/// Returns the identity of a volume.
pub(crate) fn identity(volume: VolumeId) -> VolumeIdentity {
    VolumeIdentity::new(format!("object volume {volume}"))
}

fn snapshot_identity(description: &Description, id: SnapshotId) -> VolumeIdentity {
    VolumeIdentity::new(format!("snapshot {id} of object volume {}", description.volume))
}

fn with_cache(place: Place, cache: Option<&Arc<dyn Cache>>) -> Place {
    match cache {
        Some(cache) => place.with_cache(cache),
        None => place,
    }
}

/// Finds a snapshot by its name.
fn find_snapshot(place: &Place, name: &str, snapshot: &str) -> Result<SnapshotId> {
    let view = wait(name, after(CALL_TIMEOUT), place.view(Config::default()))?;
    let found = view.snapshots().into_iter().find(|found| found.name == snapshot);
    found.map(|found| found.id).ok_or_else(|| no_snapshot(name, snapshot))
}

impl ObjectImage {
    /// Opens the volume and, unless it is opened read-only, claims it.
    ///
    /// # Errors
    /// Fails as `VolumeSpec::open` does.
    pub(crate) fn open(spec: &VolumeAt, options: &OpenOptions) -> Result<Self> {
        let (image, place) = Self::find(spec, options)?;
        if image.read_only {
            let opened = image.shared.read_from(place);
            wait(&image.shared.name, after(CALL_TIMEOUT), opened)?;
            return Ok(image);
        }
        let claimed = match options.claim_only {
            true => image.end_earlier(&place),
            false => image.serve(place, Purpose::Open),
        };
        match claimed {
            // The device stays, and all its requests fail.
            Err(_) if image.shared.is_fenced() && image.claimant.resumes => Ok(image),
            other => other.map(|()| image),
        }
    }

    /// Opens a volume that another process serves. Changes nothing.
    ///
    /// # Errors
    /// Fails as `VolumeSpec::open_successor` does.
    pub(crate) fn open_successor(spec: &VolumeAt, options: &OpenOptions) -> Result<Self> {
        let (image, place) = Self::find(spec, options)?;
        let (name, deadline) = (&image.shared.name, after(CALL_TIMEOUT));
        if image.read_only {
            wait(name, deadline, image.shared.read_from(place))?;
        } else {
            let view = wait(name, deadline, place.view(Config::default()))?;
            image.shared.set_size(view.size());
        }
        Ok(image)
    }

    /// Connects to the volume and checks its identity.
    fn find(spec: &VolumeAt, options: &OpenOptions) -> Result<(Self, Place)> {
        let connection = spec.home.connect(&options.credentials, options.connector.clone())?;
        let store = Arc::new(Watched::new(connection.store(&spec.name)?, Arc::new(SystemClock)));
        let name = spec.shown();
        let dynamic: Arc<dyn Store> = Arc::<Watched>::clone(&store);
        let (key, deadline) = (spec.home.key(&options.credentials)?, after(CALL_TIMEOUT));
        // A claim needs neither the parents nor the key.
        let place = if options.claim_only {
            wait(&name, deadline, Place::find_alone(dynamic, nonce()?))?
        } else {
            let found = parents::find(&*connection, dynamic, nonce()?, key.as_ref());
            let place = wait(&name, deadline, found)?;
            place.check_key().map_err(|failure| failed(&name, failure))?;
            place
        };
        let cache: Option<Arc<dyn Cache>> = match options.cache.files.is_empty() {
            true => None,
            false => Some(Arc::new(FileCache::open(&options.cache)?)),
        };
        let place = with_cache(place, cache.as_ref());
        let snapshot = match &spec.snapshot {
            Some(snapshot) => Some(find_snapshot(&place, &name, snapshot)?),
            None => None,
        };
        let identity = match &snapshot {
            Some(id) => snapshot_identity(place.description(), *id),
            None => identity(place.description().volume),
        };
        VolumeIdentity::check(&identity, options.expected.as_ref(), &name)?;
        let executor = Executor::start("object-volume")
            .map_err(|error| Error::from_io("cannot start the thread of the volume", error))?;
        let writes = !options.read_only && snapshot.is_none();
        let keep = options.tail_file.as_ref().filter(|_| writes);
        let keep = keep.map(|file| tail_file::keep(file, &options.claimant)).transpose()?;
        let size = place.description().size;
        let image = Self {
            spec: spec.clone(),
            connection,
            store,
            identity,
            claimant: options.claimant.clone(),
            key,
            keep,
            cache,
            read_only: options.read_only || snapshot.is_some(),
            shared: Arc::new(Shared::new(
                name,
                executor.spawner(),
                size,
                (snapshot, spec.home.collector()),
            )),
            serving: Mutex::new(None),
            _executor: executor,
        };
        Ok((image, place))
    }

    /// Claims the volume and opens it for writing.
    fn serve(&self, place: Place, purpose: Purpose) -> Result<()> {
        let client = (&self.claimant, self.keep.as_ref());
        let serving = Serving::start(place, client, purpose, &self.shared, &self.store)?;
        self.connection.tidy(&self.spec.name);
        *self.serving() = Some(serving);
        Ok(())
    }

    /// Claims the volume, ends every earlier writer, and releases the claim. What such writers have left in the tail
    /// file is given up.
    fn end_earlier(&self, place: &Place) -> Result<()> {
        let epoch = serving::acquire(place, &self.claimant, Purpose::Open, &self.shared)?;
        wait(&self.shared.name, after(CALL_TIMEOUT), async {
            place.end_earlier(epoch).await?;
            place.release(epoch).await
        })
    }

    /// Finds the volume again, to claim it with a new identity.
    fn place(&self) -> Result<Place> {
        let store: Arc<dyn Store> = Arc::<Watched>::clone(&self.store);
        let found = parents::find(&*self.connection, store, nonce()?, self.key.as_ref());
        let place = wait(&self.shared.name, after(CALL_TIMEOUT), found)?;
        Ok(with_cache(place, self.cache.as_ref()))
    }

    fn serving(&self) -> MutexGuard<'_, Option<Serving>> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops serving and releases the claim. Returns whether the claim is released.
    fn close_within(&self, timeout: Duration) -> bool {
        let serving = self.serving().take();
        let released = serving.is_none_or(|serving| {
            let released = serving.stop(&self.shared, after(timeout));
            if let Err(error) = &released {
                let (volume, error) = (&self.shared.name, error.report());
                tracing::warn!(%volume, %error, "the claim stays");
            }
            released.is_ok()
        });
        self.shared.set_volume(None);
        released
    }
}

impl Image for ObjectImage {
    fn size(&self) -> u64 {
        self.shared.size()
    }

    fn block_sizes(&self) -> BlockSizes {
        BLOCKS
    }

    fn features(&self) -> Features {
        Features {
            read_only: self.read_only,
            flush: true,
            fua: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            cache: false,
            multi_connection: true,
            keeps_acknowledged_writes: true,
        }
    }

    fn identity(&self) -> VolumeIdentity {
        self.identity.clone()
    }

    fn queue(&self, _ring: &mut Ring, completer: &Completer) -> Result<Box<dyn ImageQueue>> {
        let (shared, store) = (Arc::clone(&self.shared), Arc::clone(&self.store));
        Ok(Box::new(ObjectQueue { shared, store, completer: completer.clone(), reads: Vec::new() }))
    }

    /// The size changes only by this process.
    fn refresh_size(&self) -> Result<u64> {
        Ok(self.shared.size())
    }

    fn watch_changes(&self, waker: Waker) {
        self.shared.watch(waker);
    }

    fn is_fenced(&self) -> bool {
        self.shared.is_fenced()
    }

    fn failure_reason(&self) -> Option<String> {
        self.shared.broken().clone().or_else(|| self.store.reason())
    }

    fn report_unsaved(&self, report: Box<dyn Fn(u64) + Send + Sync>) {
        self.shared.set_report(report);
    }

    fn report_space(&self, report: Box<dyn Fn(SpaceUse) + Send + Sync>) {
        self.shared.set_space_report(report);
    }

    fn permit_tail_file(&self, is_passed_on: bool) {
        self.shared.permit_tail_file(is_passed_on);
    }

    fn close(&self) -> bool {
        self.close_within(CLOSE_TIMEOUT)
    }

    fn resize(&self) -> Option<&dyn Resize> {
        Some(self)
    }

    fn extents(&self) -> Option<&dyn Extents> {
        Some(self)
    }

    fn snapshot_quiesce(&self) -> Option<&dyn SnapshotQuiesce> {
        Some(self)
    }

    fn handover(&self) -> Option<&dyn Handover> {
        Some(self)
    }

    fn background(&self) -> Option<&dyn BackgroundWork> {
        (!self.read_only).then_some(self)
    }

    fn renew_credentials(&self) -> Option<&dyn RenewCredentials> {
        (!self.spec.home.credential_files().is_empty()).then_some(self)
    }
}

impl Drop for ObjectImage {
    fn drop(&mut self) {
        self.close_within(DROP_TIMEOUT);
    }
}
