//! Access to the objects of one volume: retries, and puts whose outcome is decided by the nonce.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::stored::Stored;
use crate::cache::{Cache, Key, Step};
use crate::codec::{
    Damage, Description, Entry, Identity, LogObject, PREFIX_BYTES, PageId, nonce_of,
};
use crate::encryption::{DataKey, KeyFile};
use crate::name::{Name, Nonce, Position, VolumeId};
use crate::packing::{Encryption, Packing};
use crate::rules::{Rule, applies};
use crate::store::{Store, StoreError};

/// The first bytes of an object that are read to decode its header: the header of a log object with 4096 writes, and
/// every page of the map with extents of 4 KiB, fit.
const HEADER_READ_BYTES: u64 = 80 << 10;

/// The number of failures after which an operation with a caller that waits returns the error.
const MAX_ATTEMPTS: u32 = 8;

/// The content of an object whose name says everything.
const MARKER: &[u8] = b"\n";

/// Why a volume cannot continue, or cannot serve a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Another node has opened the volume. This one never writes or acknowledges again.
    #[error("the volume was opened elsewhere: this node is fenced")]
    Fenced,
    /// An operation of the store failed.
    #[error("{name}: {error}")]
    Store {
        /// The object or prefix.
        name: String,
        /// The error of the store.
        error: StoreError,
    },
    /// An object has other bytes than a writer has put.
    #[error("{name}{}: {damage}", shown(.range))]
    Damaged {
        /// The object.
        name: Name,
        /// The bytes of an extent or of a page in it; `None`: its header.
        range: Option<Range<u64>>,
        /// What is wrong.
        damage: Damage,
    },
    /// An object that the volume needs does not exist.
    #[error("{0} is lost: the volume needs the object, and it does not exist")]
    Lost(Name),
    /// The volume uses a part of the format that this build cannot serve.
    #[error("the volume has {0}, which this build does not support")]
    Unsupported(&'static str),
    /// The volume is encrypted, and the opener has no key file.
    #[error("the volume is encrypted, and there is no key file")]
    Locked,
    /// The key file is another one than that with which the volume, or its parent, was created.
    #[error("the key file does not belong to the volume")]
    WrongKey,
    /// The opener has a key file for a volume that is not encrypted.
    #[error("the volume is not encrypted, and there is a key file")]
    NotEncrypted,
    /// The snapshot does not exist.
    #[error("the snapshot does not exist")]
    NoSnapshot,
    /// A clone needs the snapshot.
    #[error("the snapshot has clones")]
    HasClones,
    /// Snapshots of a clone need its parent: these, and maybe more.
    #[error("snapshots of the volume read from its parent: {}", .0.join(", "))]
    NeedParent(Vec<String>),
    /// Another client has opened the volume since this mapping has written to it.
    #[error(
        "another client has opened the volume, and {bytes} bytes of acknowledged writes, which no flush has covered, \
         were not in the store: they are lost"
    )]
    Stale {
        /// The data of the writes in bytes.
        bytes: u64,
    },
    /// The tail memory cannot be used.
    #[error("the tail memory cannot be used: {0}")]
    TailMemory(String),
    /// The request is invalid.
    #[error("invalid request: {0}")]
    Invalid(&'static str),
}

/// The result of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Put {
    /// The own object is durable.
    Own,
    /// The name belongs to an object of another opener.
    Foreign,
}

/// The store, and what identifies the objects of this opener.
#[derive(Clone)]
pub(super) struct Access {
    store: Arc<dyn Store>,
    pub(super) volume: VolumeId,
    pub(super) nonce: Nonce,
    /// How the volume stores extents.
    pub(super) packing: Packing,
    /// What the volume was cloned from.
    parent: Option<Arc<Ancestor>>,
    /// The cache of extents. The ancestors have the same one.
    cache: Option<Arc<dyn Cache>>,
    /// The bytes of the objects that this opener has created.
    put_bytes: Arc<AtomicU64>,
}

/// A volume from which another one was cloned, with its own parents behind it.
pub(super) struct Ancestor {
    pub(super) access: Access,
    pub(super) description: Description,
}

impl Access {
    /// Access to the objects of a volume without its content.
    pub(super) fn new(store: Arc<dyn Store>, volume: VolumeId, nonce: Nonce) -> Self {
        Self {
            store,
            volume,
            nonce,
            packing: Packing::default(),
            parent: None,
            cache: None,
            put_bytes: Arc::default(),
        }
    }

    /// The access to the volume of a description, with its content. Without a key file, the data of an encrypted volume
    /// cannot be read or written.
    ///
    /// # Errors
    /// Returns an error if the key file is not that of the volume, or if the volume is not encrypted.
    pub(super) fn to(
        store: Arc<dyn Store>,
        description: &Description,
        nonce: Nonce,
        key: Option<&KeyFile>,
    ) -> Result<Self, Failure> {
        let encryption = match (&description.key, key) {
            (None, None) => Encryption::None,
            (None, Some(_)) => return Err(Failure::NotEncrypted),
            (Some(_), None) => Encryption::Locked,
            (Some(_), Some(key)) => {
                Encryption::Open(Arc::new(key.open(description).ok_or(Failure::WrongKey)?))
            }
        };
        let packing = Packing::of(description, encryption);
        Ok(Self { packing, ..Self::new(store, description.volume, nonce) })
    }

    /// The access of a clone to its parents.
    pub(super) fn with_parent(self, parent: Option<Ancestor>) -> Self {
        Self { parent: parent.map(Arc::new), ..self }
    }

    /// The same access with a cache of extents, for the ancestors, too.
    pub(super) fn with_cache(self, cache: &Arc<dyn Cache>) -> Self {
        let parent = self.parent.map(|parent| {
            let access = parent.access.clone().with_cache(cache);
            Arc::new(Ancestor { access, description: parent.description.clone() })
        });
        Self { parent, cache: Some(Arc::clone(cache)), ..self }
    }

    /// The identity of the volume in the keys of a cache: a copy of it in another place has another one.
    pub(super) fn cached_volume(&self) -> VolumeId {
        let mut id = self.volume;
        id.0.iter_mut().zip(self.store.place().to_le_bytes()).for_each(|(byte, of)| *byte ^= of);
        id
    }

    pub(super) fn has_cache(&self) -> bool {
        self.cache.is_some()
    }

    /// Returns the bytes of an extent if the cache has them. They are not verified.
    pub(super) async fn cached(&self, key: Key) -> Option<Vec<u8>> {
        self.cache.as_ref()?.get(key).await
    }

    /// Gives the bytes of an extent to `take` if the cache has them at once. They are not verified. Returns what `take`
    /// returns; false if it was not called.
    pub(super) fn cached_at_once(&self, key: Key, take: &mut dyn FnMut(&[u8]) -> bool) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.get_at_once(key, take))
    }

    /// Copies the part of an extent from byte `skip` on to `target`, if the cache has it at once and has verified it. Returns
    /// false otherwise; `target` may have changed then.
    pub(super) fn copy_cached(&self, key: Key, skip: u32, target: &mut [u8]) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.copy_verified(key, skip, target))
    }

    /// Prepares [`Access::copy_cached`] with the same arguments.
    pub(super) fn prepare(&self, key: Key, skip: u32, step: Step) {
        self.cache.iter().for_each(|cache| cache.prepare(key, skip, step));
    }

    /// Offers the verified bytes of an extent to the cache.
    pub(super) fn cache(&self, key: Key, bytes: &[u8]) {
        self.cache.iter().for_each(|cache| cache.put(key, bytes));
    }

    /// What the volume was cloned from.
    pub(super) fn parent(&self) -> Option<&Ancestor> {
        self.parent.as_deref()
    }

    /// The access to an ancestor: 0 is the volume itself, 1 its parent, and so on.
    ///
    /// # Errors
    /// Returns an error if there is no such ancestor.
    pub(super) fn of(&self, ancestor: u8) -> Result<&Self, Failure> {
        let mut access = self;
        for _ in 0..ancestor {
            let parent = access.parent().ok_or(Failure::Lost(Name::Description))?;
            access = &parent.access;
        }
        Ok(access)
    }

    /// The stored bytes of the extent of an entry.
    pub(super) fn stored(&self, entry: &Entry) -> Stored {
        // A read of the extent fails if there is no such ancestor.
        let packing = self.of(entry.ancestor).map(|access| &access.packing);
        let range = packing.unwrap_or(&self.packing).stored(entry);
        Stored::of(entry, u32::try_from(range.end - range.start).unwrap_or(u32::MAX))
    }

    /// Creates an object unless it exists. Its name says everything. It is not empty, because servers differ in the answer to
    /// a read of a range of an empty object: 416, or 206 with a range that clients refuse (Azurite).
    ///
    /// # Errors
    /// Returns the error of the store; the object may exist then, or be created later.
    pub(super) async fn create_marker(&self, name: Name) -> Result<(), Failure> {
        let text = name.to_string();
        let mut failures = 0;
        loop {
            // A store may report that the object exists although it does not.
            let error = match self.store.create(&text, MARKER).await {
                Ok(()) => return Ok(()),
                Err(StoreError::Exists) => match self.store.read(&text, 0..1).await {
                    Ok(_) => return Ok(()),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            failures += 1;
            if failures >= MAX_ATTEMPTS || is_final(&error) {
                return Err(Failure::Store { name: text, error });
            }
            self.store.back_off(failures).await;
        }
    }

    /// The identity of the object with this name.
    pub(super) fn identity(&self, epoch: u64, number: u64) -> Identity {
        Identity { volume: self.volume, epoch, number }
    }

    /// The bytes of the objects that this opener has created.
    pub(super) fn put_bytes(&self) -> u64 {
        self.put_bytes.load(Ordering::Relaxed)
    }

    /// Creates the object, and finds out whether this opener has created it if the answer is not clear.
    ///
    /// # Errors
    /// Returns an error if the store fails `attempts` times or, unless they have no limit, refuses once. The object may
    /// exist then, or be created later.
    pub(super) async fn put(
        &self,
        name: Name,
        bytes: &[u8],
        attempts: u32,
    ) -> Result<Put, Failure> {
        let put = self.put_until(name, bytes, attempts).await?;
        if put == Put::Own {
            self.put_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        Ok(put)
    }

    async fn put_until(&self, name: Name, bytes: &[u8], attempts: u32) -> Result<Put, Failure> {
        let text = name.to_string();
        let mut failures = 0;
        loop {
            let error = match self.store.create(&text, bytes).await {
                Ok(()) => return Ok(Put::Own),
                Err(StoreError::Exists) if !applies(Rule::Nonce) => return Ok(Put::Own),
                Err(error) => error,
            };
            let error = match self.store.read(&text, 0..PREFIX_BYTES as u64).await {
                Ok(header) => {
                    let found = nonce_of(&header);
                    return Ok(if found == Some(self.nonce) { Put::Own } else { Put::Foreign });
                }
                Err(StoreError::NotFound) => error,
                Err(error) => error,
            };
            failures += 1;
            if failures >= attempts || attempts != u32::MAX && is_final(&error) {
                return Err(Failure::Store { name: text, error });
            }
            self.store.back_off(failures).await;
        }
    }

    /// As [`Access::put`], with a limited number of attempts.
    pub(super) async fn put_soon(&self, name: Name, bytes: &[u8]) -> Result<Put, Failure> {
        self.put(name, bytes, MAX_ATTEMPTS).await
    }

    /// Returns the data of an entry's extent from its stored bytes, which are verified. `base` is the first byte of the
    /// entry's page in the volume.
    ///
    /// # Errors
    /// Returns [`Failure::Damaged`] if they are damaged, and another error if the key is not known.
    pub(super) async fn unpack<'a>(
        &self,
        entry: &Entry,
        base: u64,
        stored: &'a [u8],
    ) -> Result<Cow<'a, [u8]>, Failure> {
        let key = self.data_key(entry.object).await?;
        self.packing.unpack(key.as_deref(), (entry, base), stored).map_err(|damage| {
            let (name, range) = (Name::Slot(entry.object), Some(self.packing.stored(entry)));
            Failure::Damaged { name, range, damage }
        })
    }

    /// As [`Access::unpack`], if the key of the data is known; `None` also if the bytes are damaged.
    pub(super) fn unpack_at_once<'a>(
        &self,
        entry: &Entry,
        base: u64,
        stored: &'a [u8],
    ) -> Option<Cow<'a, [u8]>> {
        let key = match &self.packing.encryption {
            Encryption::None => None,
            Encryption::Locked => return None,
            Encryption::Open(cipher) => Some(cipher.known(entry.object.epoch)?),
        };
        self.packing.unpack(key.as_deref(), (entry, base), stored).ok()
    }

    /// Returns the key of the data in a log object; `None` if the volume is not encrypted. The writer of the object's
    /// epoch is in its header, which is read once for each epoch.
    async fn data_key(&self, object: Position) -> Result<Option<Arc<DataKey>>, Failure> {
        let cipher = match &self.packing.encryption {
            Encryption::None => return Ok(None),
            Encryption::Locked => return Err(Failure::Locked),
            Encryption::Open(cipher) => cipher,
        };
        if let Some(known) = cipher.known(object.epoch) {
            return Ok(Some(known));
        }
        let (name, identity) = (Name::Slot(object), self.identity(object.epoch, object.slot));
        let header = self.decode(name, |bytes| LogObject::decode(identity, bytes)).await?;
        let writer = header.ok_or(Failure::Lost(name))?.nonce;
        Ok(Some(cipher.data_key(object.epoch, writer)))
    }

    /// The key of the data that this opener writes in an epoch that it has claimed.
    pub(super) fn writer_key(&self, epoch: u64) -> Option<Arc<DataKey>> {
        let Encryption::Open(cipher) = &self.packing.encryption else { return None };
        Some(cipher.known(epoch).unwrap_or_else(|| cipher.data_key(epoch, self.nonce)))
    }

    /// Whether the key of the volume or of a parent is not known.
    pub(super) fn is_locked(&self) -> bool {
        matches!(self.packing.encryption, Encryption::Locked)
            || self.parent().is_some_and(|parent| parent.access.is_locked())
    }

    /// Reads a range of an object; `None` if there is no object.
    pub(super) async fn read(
        &self,
        name: Name,
        range: Range<u64>,
    ) -> Result<Option<Vec<u8>>, Failure> {
        let text = name.to_string();
        let mut failures = 0;
        loop {
            match self.store.read(&text, range.clone()).await {
                Ok(bytes) => return Ok(Some(bytes)),
                Err(StoreError::NotFound) => return Ok(None),
                Err(error) => {
                    failures += 1;
                    if failures >= MAX_ATTEMPTS || is_final(&error) {
                        return Err(Failure::Store { name: text, error });
                    }
                    self.store.back_off(failures).await;
                }
            }
        }
    }

    /// Whether an object exists.
    pub(super) async fn exists(&self, name: Name) -> Result<bool, Failure> {
        Ok(self.read(name, 0..1).await?.is_some())
    }

    /// Reads and decodes the header of an object, or all of an object that has no data; `None` if there is no
    /// object.
    pub(super) async fn decode<T>(
        &self,
        name: Name,
        decode: impl Fn(&[u8]) -> Result<T, Damage>,
    ) -> Result<Option<T>, Failure> {
        let mut length = HEADER_READ_BYTES;
        loop {
            let Some(bytes) = self.read(name, 0..length).await? else { return Ok(None) };
            match decode(&bytes) {
                Ok(value) => return Ok(Some(value)),
                Err(Damage::Short(needed)) if needed as u64 > length => length = needed as u64,
                Err(damage) => return Err(Failure::Damaged { name, range: None, damage }),
            }
        }
    }

    /// Reads and decodes a page of this volume; `None` if its object does not exist.
    pub(super) async fn page<T>(
        &self,
        id: PageId,
        decode: impl Fn(Identity, &[u8]) -> Result<T, Damage>,
    ) -> Result<Option<T>, Failure> {
        let (name, identity) = (id.object(), self.identity(id.epoch, id.number));
        let Some(range) = id.range() else {
            return self.decode(name, |bytes| decode(identity, bytes)).await;
        };
        let Some(bytes) = self.read(name, range.clone()).await? else { return Ok(None) };
        let damaged = |damage| Failure::Damaged { name, range: Some(range), damage };
        decode(identity, &bytes).map(Some).map_err(damaged)
    }

    /// Lists the names of the volume below `prefix` that follow `after`.
    pub(super) async fn list(&self, prefix: &str, after: &str) -> Result<Vec<Name>, Failure> {
        let mut names = Vec::new();
        let mut after = after.to_owned();
        loop {
            let some = self.list_some(prefix, &after).await?;
            let Some(last) = some.last() else { return Ok(names) };
            after.clone_from(last);
            names.extend(some.iter().filter_map(|text| Name::parse(text)));
        }
    }

    /// Lists some names below `prefix` that follow `after`; none only if there are no more.
    pub(super) async fn list_some(
        &self,
        prefix: &str,
        after: &str,
    ) -> Result<Vec<String>, Failure> {
        let mut failures = 0;
        loop {
            match self.store.list(prefix, after).await {
                Ok(names) => return Ok(names),
                Err(error) => {
                    failures += 1;
                    if failures >= MAX_ATTEMPTS || is_final(&error) {
                        return Err(Failure::Store { name: prefix.to_owned(), error });
                    }
                    self.store.back_off(failures).await;
                }
            }
        }
    }

    /// Deletes an object. The deletion may also be executed later.
    pub(super) async fn delete(&self, name: Name) -> Result<(), Failure> {
        let text = name.to_string();
        self.store.delete(&text).await.map_err(|error| Failure::Store { name: text, error })
    }

    /// As [`Access::delete`], repeated if the store fails, with a limited number of attempts.
    ///
    /// # Errors
    /// Returns the error of the store; the object may be deleted then, or later.
    pub(super) async fn delete_soon(&self, name: Name) -> Result<(), Failure> {
        let text = name.to_string();
        let mut failures = 0;
        while let Err(error) = self.store.delete(&text).await {
            failures += 1;
            if failures >= MAX_ATTEMPTS || is_final(&error) {
                return Err(Failure::Store { name: text, error });
            }
            self.store.back_off(failures).await;
        }
        Ok(())
    }

    pub(super) async fn back_off(&self, attempt: u32) {
        self.store.back_off(attempt).await;
    }
}

/// The range of an object in the text of an error.
fn shown(range: &Option<Range<u64>>) -> String {
    let bytes = |range: &Range<u64>| format!(", bytes {} to {}", range.start, range.end - 1);
    range.as_ref().map_or_else(String::new, bytes)
}

/// Whether a caller that waits gets the error at once.
fn is_final(error: &StoreError) -> bool {
    matches!(error, StoreError::Refused(_))
}

/// The prefix of the names of an epoch's slots, checkpoints or pages.
pub(super) fn prefix_of(kind: &str, epoch: u64) -> String {
    format!("{kind}/{epoch:016x}/")
}

/// The text that follows all names of an epoch and precedes those of the next one.
pub(super) fn behind(kind: &str, epoch: u64) -> String {
    format!("{kind}/{epoch:016x}/~")
}

/// The name of a slot.
pub(super) fn slot(epoch: u64, slot: u64) -> Name {
    Name::Slot(Position { epoch, slot })
}
