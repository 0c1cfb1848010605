//! Log objects: the records of a slot and the data of its extents.
//!
//! ```text
//! confirmed    8  the slots of the epoch that were confirmed when the object was sent
//! records      4  their count
//! record          each: a byte that says which one, and its fields
//! ```
//!
//! The data of all writes and moves follows the header, in the order of the records and without gaps. So an
//! extent has no position of its own in the record, and no two extents can overlap.
//!
//! An extent that is compressed has fewer bytes in the object than in the volume. Everything that refers to bytes of an
//! object (the source of a relocation, the accounting) counts as if all extents were stored as they are; only the map
//! has the stored position as well.

use super::history::{History, decode_position, decode_snapshot, encode_position, encode_snapshot};
use super::reader::{Reader, Writer};
use super::snapshot::Snapshot;
use super::{Damage, Identity, Kind, MAX_HEADER_BYTES, open, seal};
use crate::name::{Nonce, Position, SnapshotId};

/// The maximum number of records in an object.
pub const MAX_RECORDS: usize = 64 << 10;

/// The maximum length of an extent in bytes. A read that needs a part of an extent reads all of it, because the
/// checksum covers all of it.
pub const MAX_EXTENT_BYTES: u32 = 64 << 10;

/// The maximum length of the data behind the header in bytes.
pub const MAX_DATA_BYTES: u64 = 16 << 20;

/// The maximum length of an object, header included, in bytes.
const MAX_OBJECT_BYTES: u64 = MAX_DATA_BYTES + MAX_HEADER_BYTES as u64;

/// The length of the shortest record in bytes: an open record of an empty volume.
const MIN_RECORD_BYTES: usize = 6;

/// A range of the volume with data in the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The first byte in the volume.
    pub offset: u64,
    /// The length in bytes, from 1 to [`MAX_EXTENT_BYTES`].
    pub length: u32,
    /// The CRC32C of the data as it is stored.
    pub checksum: u32,
    /// The bytes by which compression has made it shorter; 0 if it is not compressed.
    pub saved: u16,
}

impl Extent {
    /// Describes `data` at `offset` of the volume, which is stored as it is.
    ///
    /// # Panics
    /// Panics if the data is longer than 4 GiB.
    pub fn of(offset: u64, data: &[u8]) -> Self {
        let length = u32::try_from(data.len()).expect("an extent is short");
        Self { offset, length, checksum: crc32c::crc32c(data), saved: 0 }
    }

    /// The bytes of the data that are left after compression.
    pub fn packed_length(&self) -> u32 {
        self.length - u32::from(self.saved)
    }
}

/// Where the data of a relocated extent lay before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The log object.
    pub object: Position,
    /// The position of the first relocated byte in the object, header included.
    pub at: u32,
}

/// One change of the volume. The records of a slot are applied in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// The range has the data of the object.
    Write(Extent),
    /// The content of the range is no longer needed; it reads as zeroes.
    Trim {
        /// The first byte.
        offset: u64,
        /// The length in bytes, at least 1.
        length: u64,
    },
    /// The range reads as zeroes.
    WriteZeroes {
        /// The first byte.
        offset: u64,
        /// The length in bytes, at least 1.
        length: u64,
    },
    /// The collector has copied the data of the range. Applied only to the bytes that still lie at the source.
    Move(Extent, Source),
    /// The checkpoint is complete: what it makes superfluous may be deleted once this record is confirmed.
    Base(Position),
    /// The first record of an epoch: it commits the take-over. Contains what precedes the epoch.
    Open(History),
    /// A snapshot of all records before this one.
    Snapshot(Snapshot),
    /// The snapshot no longer exists.
    DeleteSnapshot(SnapshotId),
    /// The volume has the content of the snapshot.
    RollBack(SnapshotId),
    /// The volume has the size in bytes. Smaller ones remove the data behind it.
    Resize(u64),
}

/// The header of a log object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogObject {
    /// Where the object belongs.
    pub identity: Identity,
    /// The nonce of the writer.
    pub nonce: Nonce,
    /// The number of slots of the epoch, from slot 0 on and without a gap, that were durable when the object
    /// was sent. If one of them is missing later, it was lost.
    pub confirmed: u64,
    /// The records.
    pub records: Vec<Record>,
}

impl LogObject {
    /// Returns the object's header. The data of the extents follows it.
    pub fn encode(&self) -> Vec<u8> {
        debug_assert!(self.records.len() <= MAX_RECORDS && self.data_bytes() <= MAX_DATA_BYTES);
        let mut body = Writer::default();
        body.u64(self.confirmed);
        body.length(self.records.len());
        self.records.iter().for_each(|record| record.encode(&mut body));
        seal(Kind::Log, self.identity, self.nonce, body)
    }

    /// Decodes the header of the object that was read under the name of `identity`. `bytes` are the beginning
    /// of the object, or all of it; the data is not verified.
    ///
    /// # Errors
    /// Returns [`Damage::Short`] with the number of bytes that are needed if `bytes` end within the header,
    /// and another error if they are not a log object with that name.
    pub fn decode(identity: Identity, bytes: &[u8]) -> Result<Self, Damage> {
        let (nonce, mut body) = open(Kind::Log, identity, bytes)?;
        let confirmed = body.u64()?;
        if confirmed > identity.number {
            return Err(Damage::Field("number of confirmed slots"));
        }
        let count = body.count(MIN_RECORD_BYTES, MAX_RECORDS)?;
        let mut records = Vec::with_capacity(count);
        let mut data = 0;
        for _ in 0..count {
            let record = Record::decode(&mut body)?;
            data += record.data_bytes();
            if data > MAX_DATA_BYTES {
                return Err(Damage::Field("length of the data"));
            }
            records.push(record);
        }
        body.end()?;
        Ok(Self { identity, nonce, confirmed, records })
    }

    /// Returns the length of the data behind the header in bytes.
    pub fn data_bytes(&self) -> u64 {
        self.records.iter().map(Record::data_bytes).sum()
    }

    /// Returns the extents with their positions in the data.
    pub fn extents(&self) -> impl Iterator<Item = (u32, Extent)> {
        let extents = self.records.iter().filter_map(|record| record.extent().copied());
        extents.scan(0, |at, extent| {
            let begin = *at;
            *at += extent.length;
            Some((begin, extent))
        })
    }
}

impl Record {
    /// The extent whose data the object has for the record.
    pub fn extent(&self) -> Option<&Extent> {
        match self {
            Self::Write(extent) | Self::Move(extent, _) => Some(extent),
            _ => None,
        }
    }

    /// As [`Record::extent`].
    pub(crate) fn extent_mut(&mut self) -> Option<&mut Extent> {
        match self {
            Self::Write(extent) | Self::Move(extent, _) => Some(extent),
            _ => None,
        }
    }

    /// Returns the length of the record's data in bytes.
    fn data_bytes(&self) -> u64 {
        self.extent().map_or(0, |extent| extent.length.into())
    }

    fn encode(&self, to: &mut Writer) {
        match self {
            Self::Write(extent) => {
                to.u8(if extent.saved == 0 { 1 } else { 11 });
                encode_extent(to, extent);
            }
            Self::Trim { offset, length } => {
                to.u8(2);
                to.u64(*offset);
                to.u64(*length);
            }
            Self::WriteZeroes { offset, length } => {
                to.u8(3);
                to.u64(*offset);
                to.u64(*length);
            }
            Self::Move(extent, source) => {
                to.u8(if extent.saved == 0 { 4 } else { 12 });
                encode_extent(to, extent);
                encode_position(to, source.object);
                to.u32(source.at);
            }
            Self::Base(position) => {
                to.u8(5);
                encode_position(to, *position);
            }
            Self::Open(history) => {
                to.u8(6);
                history.encode(to);
            }
            Self::Snapshot(snapshot) => {
                to.u8(7);
                snapshot.encode(to);
            }
            Self::DeleteSnapshot(id) => {
                to.u8(8);
                encode_snapshot(to, *id);
            }
            Self::RollBack(id) => {
                to.u8(9);
                encode_snapshot(to, *id);
            }
            Self::Resize(size) => {
                to.u8(10);
                to.u64(*size);
            }
        }
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, Damage> {
        Ok(match from.u8()? {
            byte @ (1 | 11) => Self::Write(decode_extent(from, byte == 11)?),
            2 => {
                let (offset, length) = decode_range(from)?;
                Self::Trim { offset, length }
            }
            3 => {
                let (offset, length) = decode_range(from)?;
                Self::WriteZeroes { offset, length }
            }
            byte @ (4 | 12) => {
                let extent = decode_extent(from, byte == 12)?;
                let source = Source { object: decode_position(from)?, at: from.u32()? };
                if u64::from(source.at) + u64::from(extent.length) > MAX_OBJECT_BYTES {
                    return Err(Damage::Field("source of a relocation"));
                }
                Self::Move(extent, source)
            }
            5 => Self::Base(decode_position(from)?),
            6 => Self::Open(History::decode(from)?),
            7 => Self::Snapshot(Snapshot::decode(from)?),
            8 => Self::DeleteSnapshot(decode_snapshot(from)?),
            9 => Self::RollBack(decode_snapshot(from)?),
            10 => Self::Resize(from.u64()?),
            _ => return Err(Damage::Field("record")),
        })
    }
}

fn encode_extent(to: &mut Writer, extent: &Extent) {
    to.u64(extent.offset);
    to.u32(extent.length);
    to.u32(extent.checksum);
    if extent.saved > 0 {
        to.u16(extent.saved);
    }
}

fn decode_extent(from: &mut Reader<'_>, is_packed: bool) -> Result<Extent, Damage> {
    let (offset, length, checksum) = (from.u64()?, from.u32()?, from.u32()?);
    let saved = if is_packed { from.u16()? } else { 0 };
    let extent = Extent { offset, length, checksum, saved };
    let ends = extent.offset.checked_add(extent.length.into()).is_some();
    let is_canonical = u32::from(saved) < length && is_packed == (saved > 0);
    match ends && is_canonical && (1..=MAX_EXTENT_BYTES).contains(&extent.length) {
        true => Ok(extent),
        false => Err(Damage::Field("extent")),
    }
}

fn decode_range(from: &mut Reader<'_>) -> Result<(u64, u64), Damage> {
    let (offset, length) = (from.u64()?, from.u64()?);
    match length > 0 && offset.checked_add(length).is_some() {
        true => Ok((offset, length)),
        false => Err(Damage::Field("range")),
    }
}
