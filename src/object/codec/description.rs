//! The description of a volume: what never changes.

use super::reader::{Reader, Writer};
use super::snapshot::Snapshot;
use super::{Damage, Identity, Kind, exact, open, seal, volume_of};
use crate::name::{Nonce, VolumeId};

/// The sizes that a page of the map may have in bytes of the volume: powers of two in this range.
pub const PAGE_BYTES: std::ops::RangeInclusive<u32> = 4 << 10..=16 << 20;

/// The maximum length of the location of a parent in bytes.
pub const MAX_LOCATION_BYTES: usize = 4096;

/// The features of a volume that a reader must support, one bit for each.
mod feature {
    /// The volume has a parent.
    pub(super) const PARENT: u32 = 1;
    /// The data is compressed with LZ4.
    pub(super) const LZ4: u32 = 2;
    /// The data is encrypted.
    pub(super) const ENCRYPTED: u32 = 4;
    /// Objects have several pages.
    pub(super) const SHARED_PAGES: u32 = 8;
    /// All that this build supports.
    pub(super) const ALL: u32 = PARENT | LZ4 | ENCRYPTED | SHARED_PAGES;
}

/// How the data of a volume is compressed: each extent by itself, unless that makes it longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Blocks of LZ4, without a frame.
    Lz4,
}

impl Compression {
    /// The name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
        }
    }
}

/// The description of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// The volume.
    pub volume: VolumeId,
    /// The nonce of the creator.
    pub nonce: Nonce,
    /// The size of the volume in bytes when it was created.
    pub size: u64,
    /// The range of the volume that a page of the map covers, in bytes: a power of two in [`PAGE_BYTES`].
    pub page_bytes: u32,
    /// For a clone, the content with which it begins.
    pub parent: Option<Parent>,
    /// How the data of the volume itself is compressed.
    pub compression: Option<Compression>,
    /// The key of the data of the volume itself, if it is encrypted.
    pub key: Option<WrappedKey>,
    /// Whether several pages are put as one object. Earlier builds have put each page as an object of its own.
    pub shared_pages: bool,
}

/// The key of a volume, encrypted with a key that is derived from a key file, and its authentication tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrappedKey(pub [u8; 48]);

/// The snapshot from which a volume was cloned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    /// The volume of the snapshot.
    pub volume: VolumeId,
    /// Where the volume is, as a text of the embedder: at most [`MAX_LOCATION_BYTES`] bytes.
    pub location: String,
    /// The snapshot.
    pub snapshot: Snapshot,
}

impl Description {
    /// Describes a volume without a parent, whose data is stored as it is.
    pub fn new(volume: VolumeId, nonce: Nonce, size: u64, page_bytes: u32) -> Self {
        Self {
            volume,
            nonce,
            size,
            page_bytes,
            parent: None,
            compression: None,
            key: None,
            shared_pages: true,
        }
    }

    fn features(&self) -> u32 {
        let parent = if self.parent.is_some() { feature::PARENT } else { 0 };
        let compression = match self.compression {
            Some(Compression::Lz4) => feature::LZ4,
            None => 0,
        };
        let key = if self.key.is_some() { feature::ENCRYPTED } else { 0 };
        let shared_pages = if self.shared_pages { feature::SHARED_PAGES } else { 0 };
        parent | compression | key | shared_pages
    }

    /// Returns the object's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::default();
        body.u64(self.size);
        body.u32(self.page_bytes);
        body.u32(self.features());
        if let Some(parent) = &self.parent {
            body.bytes(&parent.volume.0);
            body.long_text(&parent.location);
            parent.snapshot.encode(&mut body);
        }
        if let Some(key) = &self.key {
            body.bytes(&key.0);
        }
        let identity = Identity { volume: self.volume, epoch: 0, number: 0 };
        seal(Kind::Description, identity, self.nonce, body)
    }

    /// Decodes the description.
    ///
    /// # Errors
    /// Returns an error if the bytes are not those of a description, or if the volume has features that this
    /// build does not support.
    pub fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        let volume = volume_of(bytes)?;
        let identity = Identity { volume, epoch: 0, number: 0 };
        let (nonce, mut body) = open(Kind::Description, identity, bytes)?;
        let (size, page_bytes, features) = (body.u64()?, body.u32()?, body.u32()?);
        if features & !feature::ALL != 0 {
            return Err(Damage::Features(features & !feature::ALL));
        }
        let has = |feature: u32| features & feature != 0;
        let parent = has(feature::PARENT).then(|| Parent::decode(&mut body)).transpose()?;
        let compression = has(feature::LZ4).then_some(Compression::Lz4);
        let key = has(feature::ENCRYPTED).then(|| body.array().map(WrappedKey)).transpose()?;
        let shared_pages = has(feature::SHARED_PAGES);
        body.end()?;
        exact(bytes)?;
        if !page_bytes.is_power_of_two() || !PAGE_BYTES.contains(&page_bytes) {
            return Err(Damage::Field("size of the map's pages"));
        }
        Ok(Self { volume, nonce, size, page_bytes, parent, compression, key, shared_pages })
    }
}

impl Parent {
    fn decode(from: &mut Reader<'_>) -> Result<Self, Damage> {
        Ok(Self {
            volume: VolumeId(from.array()?),
            location: from.long_text(MAX_LOCATION_BYTES)?,
            snapshot: Snapshot::decode(from)?,
        })
    }
}
