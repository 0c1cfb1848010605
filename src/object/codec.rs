//! The bytes of objects.
//!
//! Every object begins with a header, which is checked as a whole before any of its fields is used:
//!
//! ```text
//!  0  magic        8  "cleatvol"
//!  8  version      1  1
//!  9  kind         1  see `Kind`
//! 10  reserved     2  0
//! 12  length       4  length of the header in bytes, with this part of 72 bytes
//! 16  volume      16  the volume's identity
//! 32  epoch        8  the epoch in the object's name
//! 40  number       8  the slot or number in the object's name
//! 48  nonce       16  the nonce of the writer
//! 64  reserved     4  0
//! 68  checksum     4  CRC32C of the header with 0 in this place
//! 72  body            depends on the kind
//! ```
//!
//! Numbers are little-endian. Only log objects have data behind the header; each extent of it has its own
//! CRC32C in the header. An object with several pages has such a header for each of them, one behind the other.
//!
//! A decoder compares volume, epoch and number with the name under which it has read the object, so an object
//! in a wrong place is damaged. It accepts exactly the bytes that the encoder produces for a value:
//! reserved fields are 0 and nothing follows the last field. Counts are checked against the length of
//! what follows before memory is allocated for them, so decoding takes memory in proportion to the input.

mod checkpoint;
mod description;
mod history;
mod log;
mod page;
mod reader;
mod snapshot;
#[cfg(test)]
mod tests;

pub use checkpoint::{Checkpoint, MAX_USAGE_PAGES};
pub use description::{
    Compression, Description, MAX_LOCATION_BYTES, PAGE_BYTES, Parent, WrappedKey,
};
pub use history::{History, MAX_CUTS};
pub use log::{Extent, LogObject, MAX_DATA_BYTES, MAX_EXTENT_BYTES, MAX_RECORDS, Record, Source};
pub use page::{Entry, Index, Leaf, MAX_CHILDREN, MAX_ENTRIES, PageId, Usage, Used};
pub use reader::{Damage, MAX_NAME_BYTES};
pub use snapshot::{MAX_SNAPSHOTS, Snapshot};

use crate::name::{Nonce, VolumeId};
use reader::{Reader, Writer};

/// The length of the part of the header that all objects have, in bytes.
pub const PREFIX_BYTES: usize = 72;

/// The maximum length of a header in bytes.
pub const MAX_HEADER_BYTES: usize = 8 << 20;

/// The maximum number of pages of the map: a checkpoint names the pages of the index.
pub const MAX_MAP_PAGES: u64 = checkpoint::MAX_PAGES as u64 * MAX_CHILDREN as u64;

/// The maximum length of the text in a claim, in bytes.
pub const MAX_OWNER_BYTES: usize = 64 << 10;

const MAGIC: [u8; 8] = *b"cleatvol";
const VERSION: u8 = 1;
const CHECKSUM_AT: usize = 68;

/// What an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The claim of an epoch.
    Claim,
    /// A slot with records.
    Log,
    /// A slot that no writer can use any more.
    Seal,
    /// A page of the map.
    Leaf,
    /// A page with the names of map pages.
    Index,
    /// A page with the live bytes of log objects.
    Usage,
    /// A checkpoint.
    Checkpoint,
    /// The description of the volume.
    Description,
    /// The end of an epoch's use by its claimant.
    Release,
    /// A page of the map with extents that are not stored as they are.
    PackedLeaf,
    /// A page with the places of map pages, of which some are ranges of objects.
    IndexOfRanges,
    /// A checkpoint some of whose pages are ranges of objects.
    CheckpointOfRanges,
}

impl Kind {
    const ALL: [(Self, u8); 12] = [
        (Self::Claim, 1),
        (Self::Log, 2),
        (Self::Seal, 3),
        (Self::Leaf, 4),
        (Self::Index, 5),
        (Self::Usage, 6),
        (Self::Checkpoint, 7),
        (Self::Description, 8),
        (Self::Release, 9),
        (Self::PackedLeaf, 10),
        (Self::IndexOfRanges, 11),
        (Self::CheckpointOfRanges, 12),
    ];

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.iter().find(|(_, number)| *number == byte).map(|(kind, _)| *kind)
    }

    fn byte(self) -> u8 {
        match self {
            Self::Claim => 1,
            Self::Log => 2,
            Self::Seal => 3,
            Self::Leaf => 4,
            Self::Index => 5,
            Self::Usage => 6,
            Self::Checkpoint => 7,
            Self::Description => 8,
            Self::Release => 9,
            Self::PackedLeaf => 10,
            Self::IndexOfRanges => 11,
            Self::CheckpointOfRanges => 12,
        }
    }
}

/// Where an object belongs: its volume, and the numbers in its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The volume.
    pub volume: VolumeId,
    /// The epoch in the name.
    pub epoch: u64,
    /// The slot or number in the name; 0 for a claim and a release. Epoch and number are 0 for a description.
    pub number: u64,
}

/// The claim of an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Where the object belongs.
    pub identity: Identity,
    /// The nonce of the opener.
    pub nonce: Nonce,
    /// Who has opened the volume, as a text of the embedder: at most [`MAX_OWNER_BYTES`] bytes.
    pub owner: String,
}

impl Claim {
    /// Returns the object's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::default();
        body.long_text(&self.owner);
        seal(Kind::Claim, self.identity, self.nonce, body)
    }

    /// Decodes the object that was read under the name of `identity`.
    ///
    /// # Errors
    /// Returns an error if the bytes are not those of a claim with that name.
    pub fn decode(identity: Identity, bytes: &[u8]) -> Result<Self, Damage> {
        let (nonce, mut body) = open(Kind::Claim, identity, bytes)?;
        let owner = body.long_text(MAX_OWNER_BYTES)?;
        body.end()?;
        exact(bytes)?;
        Ok(Self { identity, nonce, owner })
    }
}

/// The statement of an opener that it has stopped: it writes and acknowledges nothing more in its epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    /// Where the object belongs.
    pub identity: Identity,
    /// The nonce of the opener.
    pub nonce: Nonce,
}

impl Release {
    /// Returns the object's bytes.
    pub fn encode(&self) -> Vec<u8> {
        seal(Kind::Release, self.identity, self.nonce, Writer::default())
    }

    /// Decodes the object that was read under the name of `identity`.
    ///
    /// # Errors
    /// Returns an error if the bytes are not those of a release with that name.
    pub fn decode(identity: Identity, bytes: &[u8]) -> Result<Self, Damage> {
        let (nonce, body) = open(Kind::Release, identity, bytes)?;
        body.end()?;
        exact(bytes)?;
        Ok(Self { identity, nonce })
    }
}

/// What a slot holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slot {
    /// Records.
    Log(LogObject),
    /// A seal, with the nonce of the opener that has created it.
    Seal(Nonce),
}

impl Slot {
    /// Returns the bytes of a seal.
    pub fn encode_seal(identity: Identity, nonce: Nonce) -> Vec<u8> {
        seal(Kind::Seal, identity, nonce, Writer::default())
    }

    /// Decodes the header of the object in a slot. `bytes` are the beginning of the object, or all of it.
    ///
    /// # Errors
    /// Returns [`Damage::Short`] with the number of bytes that are needed if `bytes` end within the header,
    /// and another error if the object is neither a log object nor a seal with that name.
    pub fn decode(identity: Identity, bytes: &[u8]) -> Result<Self, Damage> {
        match prefix(bytes)? {
            Kind::Seal => {
                let (nonce, body) = open(Kind::Seal, identity, bytes)?;
                body.end()?;
                exact(bytes)?;
                Ok(Self::Seal(nonce))
            }
            _ => LogObject::decode(identity, bytes).map(Self::Log),
        }
    }

    /// Returns the nonce of the opener that has created the object.
    pub fn nonce(&self) -> Nonce {
        match self {
            Self::Log(object) => object.nonce,
            Self::Seal(nonce) => *nonce,
        }
    }
}

/// Builds the header of an object from its body.
fn seal(kind: Kind, identity: Identity, nonce: Nonce, body: Writer) -> Vec<u8> {
    let mut header = Writer::default();
    header.bytes(&MAGIC);
    header.u8(VERSION);
    header.u8(kind.byte());
    header.u16(0);
    header.length(PREFIX_BYTES + body.0.len());
    header.bytes(&identity.volume.0);
    header.u64(identity.epoch);
    header.u64(identity.number);
    header.bytes(&nonce.0);
    header.u32(0);
    header.u32(0);
    header.bytes(&body.0);
    let mut bytes = header.0;
    debug_assert!(bytes.len() <= MAX_HEADER_BYTES, "{} bytes", bytes.len());
    let checksum = crc32c::crc32c(&bytes);
    bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Returns the kind of an object from the beginning of its header, which is not verified yet.
fn prefix(bytes: &[u8]) -> Result<Kind, Damage> {
    let mut reader = Reader::new(bytes);
    if reader.array::<8>()? != MAGIC {
        return Err(Damage::Magic);
    }
    match reader.u8()? {
        VERSION => Kind::from_byte(reader.u8()?).ok_or(Damage::Field("kind")),
        other => Err(Damage::Version(other)),
    }
}

/// Returns the length of the header that `bytes` begin with.
fn header_length(bytes: &[u8]) -> Result<usize, Damage> {
    let mut reader = Reader::new(bytes);
    reader.take(12)?;
    let length = reader.u32()? as usize;
    match length {
        PREFIX_BYTES..=MAX_HEADER_BYTES if length <= bytes.len() => Ok(length),
        PREFIX_BYTES..=MAX_HEADER_BYTES => Err(Damage::Short(length)),
        _ => Err(Damage::Field("length of the header")),
    }
}

/// Verifies the header of an object, and returns the nonce and the body.
fn open(kind: Kind, identity: Identity, bytes: &[u8]) -> Result<(Nonce, Reader<'_>), Damage> {
    let found = prefix(bytes)?;
    let header = &bytes[..header_length(bytes)?];
    let (before, rest) = header.split_at(CHECKSUM_AT);
    let checksum = crc32c::crc32c_append(crc32c::crc32c(before), &[0; 4]);
    let checksum = crc32c::crc32c_append(checksum, &rest[4..]);
    if rest[..4] != checksum.to_le_bytes() {
        return Err(Damage::Checksum);
    }
    if found != kind {
        return Err(Damage::Kind(found));
    }
    let mut reader = Reader::new(header);
    reader.take(10)?;
    reader.zero(2)?;
    reader.take(4)?;
    let volume = VolumeId(reader.array()?);
    if identity != (Identity { volume, epoch: reader.u64()?, number: reader.u64()? }) {
        return Err(Damage::Name);
    }
    let nonce = Nonce(reader.array()?);
    reader.zero(4)?;
    reader.take(4)?;
    Ok((nonce, reader))
}

/// Returns the volume that a header states, which is not verified yet.
fn volume_of(bytes: &[u8]) -> Result<VolumeId, Damage> {
    prefix(bytes)?;
    let mut reader = Reader::new(bytes);
    reader.take(16)?;
    Ok(VolumeId(reader.array()?))
}

/// Returns the nonce in the first [`PREFIX_BYTES`] of an object, which are not verified; `None` if they are
/// not the beginning of a header. A damaged nonce is that of no opener.
pub(crate) fn nonce_of(bytes: &[u8]) -> Option<Nonce> {
    prefix(bytes).ok()?;
    let mut reader = Reader::new(bytes);
    reader.take(48).ok()?;
    reader.array().ok().map(Nonce)
}

/// Checks that nothing follows the header.
fn exact(bytes: &[u8]) -> Result<(), Damage> {
    match header_length(bytes)? == bytes.len() {
        true => Ok(()),
        false => Err(Damage::Field("length of the object")),
    }
}
