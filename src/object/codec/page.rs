//! Pages: of the extent map, of the index of these pages, and of the live bytes of log objects. A page never
//! changes; a checkpoint writes a new page in place of one whose content has changed. An object has several pages, one
//! behind the other. Each has a header of its own, with the numbers in the name of the object.

use std::ops::Range;

use super::log::{MAX_DATA_BYTES, MAX_EXTENT_BYTES};
use super::reader::{Reader, Writer};
use super::{Damage, Identity, Kind, MAX_HEADER_BYTES, PREFIX_BYTES, exact, open, prefix, seal};
use crate::name::{Name, Nonce, Position};

/// The maximum number of entries in a page of the map: a page covers 16 MiB of the volume, and no entry is
/// shorter than 512 bytes.
pub const MAX_ENTRIES: usize = 32 << 10;

/// The maximum number of pages in a page of the index, and of objects in a page of the usage.
pub const MAX_CHILDREN: usize = 1024;

/// Where a page of this volume or of one of its ancestors is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId {
    /// The volume: 0 is this one, 1 its parent, and so on.
    pub ancestor: u8,
    /// The epoch in which the page was written.
    pub epoch: u64,
    /// The number of its object among those of the epoch.
    pub number: u64,
    /// The first byte in the object.
    pub at: u32,
    /// The length in bytes; 0 if the page is the whole object, as earlier builds have written it.
    pub length: u32,
}

impl PageId {
    /// The object that has the page.
    pub fn object(&self) -> Name {
        Name::Page { epoch: self.epoch, number: self.number }
    }

    /// The bytes of the page in the object; `None`: all of them.
    pub fn range(&self) -> Option<Range<u64>> {
        let (at, length) = (u64::from(self.at), u64::from(self.length));
        (length > 0).then_some(at..at + length)
    }
}

/// A range of the volume and where its data lies. It may be a part of an extent, because later writes have
/// replaced the rest; the extent is what the checksum covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The first byte, relative to the first byte of the page.
    pub offset: u32,
    /// The length in bytes, at least 1.
    pub length: u32,
    /// The volume of the object: 0 is this one, 1 its parent, and so on.
    pub ancestor: u8,
    /// The log object.
    pub object: Position,
    /// The first byte of the extent in the object, header included, if all extents were stored as they are.
    pub extent_at: u32,
    /// The length of the extent in bytes.
    pub extent_length: u32,
    /// The first byte of what is stored of the extent in the object, header included.
    pub stored_at: u32,
    /// The bytes by which compression has made the extent shorter; 0 if it is not compressed.
    pub saved: u16,
    /// The CRC32C of the extent as it is stored.
    pub checksum: u32,
    /// The first byte of the range in the extent.
    pub skip: u32,
}

/// The length of an encoded entry in bytes: of an extent that is stored as it is, and of another one.
const ENTRY_BYTES: usize = 41;
const PACKED_ENTRY_BYTES: usize = ENTRY_BYTES + 6;

impl Entry {
    /// The bytes of the extent that are left after compression.
    pub fn packed_length(&self) -> u32 {
        self.extent_length - u32::from(self.saved)
    }

    fn is_packed(&self) -> bool {
        self.stored_at != self.extent_at || self.saved > 0
    }
}

/// A page of the map: entries in the order of their ranges, which do not overlap. What no entry covers reads
/// as zeroes. The stored positions are encoded only if one of them differs from that of the extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaf {
    /// Where the object belongs.
    pub identity: Identity,
    /// The nonce of the writer.
    pub nonce: Nonce,
    /// The number of the page's range in the volume.
    pub range: u64,
    /// The entries.
    pub entries: Vec<Entry>,
}

impl Leaf {
    /// Returns the object's bytes.
    pub fn encode(&self) -> Vec<u8> {
        debug_assert!(self.entries.len() <= MAX_ENTRIES);
        let kind = kind_of(&self.entries);
        let mut body = Writer::default();
        body.u64(self.range);
        body.length(self.entries.len());
        for entry in &self.entries {
            body.u32(entry.offset);
            body.u32(entry.length);
            body.u8(entry.ancestor);
            body.u64(entry.object.epoch);
            body.u64(entry.object.slot);
            body.u32(entry.extent_at);
            body.u32(entry.extent_length);
            body.u32(entry.checksum);
            body.u32(entry.skip);
            if kind == Kind::PackedLeaf {
                body.u32(entry.stored_at);
                body.u16(entry.saved);
            }
        }
        seal(kind, self.identity, self.nonce, body)
    }

    /// Decodes the page that was read under the name of `identity`.
    ///
    /// # Errors
    /// Returns an error if the bytes are not those of a page of the map with that name.
    pub fn decode(identity: Identity, bytes: &[u8]) -> Result<Self, Damage> {
        let is_packed = prefix(bytes)? == Kind::PackedLeaf;
        let (kind, entry_bytes) = match is_packed {
            true => (Kind::PackedLeaf, PACKED_ENTRY_BYTES),
            false => (Kind::Leaf, ENTRY_BYTES),
        };
        let (nonce, mut body) = open(kind, identity, bytes)?;
        let range = body.u64()?;
        let count = body.count(entry_bytes, MAX_ENTRIES)?;
        let mut entries = Vec::with_capacity(count);
        let mut end = 0;
        for _ in 0..count {
            let entry = decode_entry(&mut body, is_packed)?;
            if u64::from(entry.offset) < end {
                return Err(Damage::Field("order of entries"));
            }
            end = u64::from(entry.offset) + u64::from(entry.length);
            entries.push(entry);
        }
        if kind_of(&entries) != kind {
            return Err(Damage::Field("form of the entries"));
        }
        body.end()?;
        exact(bytes)?;
        Ok(Self { identity, nonce, range, entries })
    }
}

fn kind_of(entries: &[Entry]) -> Kind {
    match entries.iter().any(Entry::is_packed) {
        true => Kind::PackedLeaf,
        false => Kind::Leaf,
    }
}

fn decode_entry(from: &mut Reader<'_>, is_packed: bool) -> Result<Entry, Damage> {
    let mut entry = Entry {
        offset: from.u32()?,
        length: from.u32()?,
        ancestor: from.u8()?,
        object: Position { epoch: from.u64()?, slot: from.u64()? },
        extent_at: from.u32()?,
        extent_length: from.u32()?,
        checksum: from.u32()?,
        skip: from.u32()?,
        stored_at: 0,
        saved: 0,
    };
    (entry.stored_at, entry.saved) = match is_packed {
        true => (from.u32()?, from.u16()?),
        false => (entry.extent_at, 0),
    };
    let is_inside = u64::from(entry.skip) + u64::from(entry.length) <= entry.extent_length.into();
    let is_short = entry.length > 0 && entry.extent_length <= MAX_EXTENT_BYTES;
    let is_packed = u32::from(entry.saved) < entry.extent_length;
    match is_inside && is_short && is_packed && entry.offset.checked_add(entry.length).is_some() {
        true => Ok(entry),
        false => Err(Damage::Field("entry")),
    }
}

/// A page of the index: for each range of the volume in order, its page of the map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    /// Where the object belongs.
    pub identity: Identity,
    /// The nonce of the writer.
    pub nonce: Nonce,
    /// The number of the first page of the map.
    pub first: u64,
    /// The pages; `None` where the range reads as zeroes.
    pub pages: Vec<Option<PageId>>,
}

impl Index {
    /// Returns the object's bytes.
    pub fn encode(&self) -> Vec<u8> {
        debug_assert!(self.pages.len() <= MAX_CHILDREN);
        let form = Form::of(&self.pages);
        let mut body = Writer::default();
        body.u64(self.first);
        encode_pages(&mut body, &self.pages, form);
        seal(form.index(), self.identity, self.nonce, body)
    }

    /// Decodes the page that was read under the name of `identity`.
    ///
    /// # Errors
    /// Returns an error if the bytes are not those of a page of the index with that name.
    pub fn decode(identity: Identity, bytes: &[u8]) -> Result<Self, Damage> {
        let form = match prefix(bytes)? {
            Kind::IndexOfRanges => Form::Ranges,
            _ => Form::Objects,
        };
        let (nonce, mut body) = open(form.index(), identity, bytes)?;
        let first = body.u64()?;
        let pages = decode_pages(&mut body, MAX_CHILDREN, form)?;
        form.check(&pages)?;
        body.end()?;
        exact(bytes)?;
        Ok(Self { identity, nonce, first, pages })
    }
}

/// The space that a log object takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// The slot of the object.
    pub slot: u64,
    /// The length of its data in bytes.
    pub bytes: u32,
    /// The bytes of it that the map refers to.
    pub live: u32,
    /// The position from which on the map refers to none, if there is one: snapshots that are older need the
    /// object. The position is that of the slot's end in the history.
    pub dead_since: Option<Position>,
}

/// The length of the shortest encoded item in bytes.
const USED_BYTES: usize = 17;

/// A page of the usage: log objects of one epoch in the order of their slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// Where the object belongs.
    pub identity: Identity,
    /// The nonce of the writer.
    pub nonce: Nonce,
    /// The epoch of the log objects.
    pub epoch: u64,
    /// The objects.
    pub objects: Vec<Used>,
}

impl Usage {
    /// Returns the object's bytes.
    pub fn encode(&self) -> Vec<u8> {
        debug_assert!(self.objects.len() <= MAX_CHILDREN);
        let mut body = Writer::default();
        body.u64(self.epoch);
        body.length(self.objects.len());
        for used in &self.objects {
            body.u64(used.slot);
            body.u32(used.bytes);
            body.u32(used.live);
            body.u8(used.dead_since.is_some().into());
            if let Some(since) = used.dead_since {
                body.u64(since.epoch);
                body.u64(since.slot);
            }
        }
        seal(Kind::Usage, self.identity, self.nonce, body)
    }

    /// Decodes the page that was read under the name of `identity`.
    ///
    /// # Errors
    /// Returns an error if the bytes are not those of a page of the usage with that name.
    pub fn decode(identity: Identity, bytes: &[u8]) -> Result<Self, Damage> {
        let (nonce, mut body) = open(Kind::Usage, identity, bytes)?;
        let epoch = body.u64()?;
        let count = body.count(USED_BYTES, MAX_CHILDREN)?;
        let mut objects: Vec<Used> = Vec::with_capacity(count);
        for _ in 0..count {
            let used = decode_used(&mut body)?;
            if objects.last().is_some_and(|before| before.slot >= used.slot) {
                return Err(Damage::Field("order of objects"));
            }
            objects.push(used);
        }
        body.end()?;
        exact(bytes)?;
        Ok(Self { identity, nonce, epoch, objects })
    }
}

fn decode_used(from: &mut Reader<'_>) -> Result<Used, Damage> {
    let (slot, bytes, live) = (from.u64()?, from.u32()?, from.u32()?);
    let dead_since = match from.u8()? {
        0 => None,
        1 => Some(Position { epoch: from.u64()?, slot: from.u64()? }),
        _ => return Err(Damage::Field("state of an object")),
    };
    let is_possible = live <= bytes && u64::from(bytes) <= MAX_DATA_BYTES;
    match is_possible && (dead_since.is_none() || live == 0) {
        true => Ok(Used { slot, bytes, live, dead_since }),
        false => Err(Damage::Field("live bytes of an object")),
    }
}

/// How the places of pages are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Each page is a whole object. Earlier builds have written this form.
    Objects,
    /// Some pages are ranges of objects.
    Ranges,
}

impl Form {
    pub(super) fn of<'a>(pages: impl IntoIterator<Item = &'a Option<PageId>>) -> Self {
        let mut pages = pages.into_iter().flatten();
        match pages.any(|page| page.length > 0) {
            true => Self::Ranges,
            false => Self::Objects,
        }
    }

    /// Checks that the encoder would have chosen this form for the pages.
    pub(super) fn check<'a>(
        self,
        pages: impl IntoIterator<Item = &'a Option<PageId>>,
    ) -> Result<(), Damage> {
        match Self::of(pages) == self {
            true => Ok(()),
            false => Err(Damage::Field("form of the pages")),
        }
    }

    fn index(self) -> Kind {
        match self {
            Self::Objects => Kind::Index,
            Self::Ranges => Kind::IndexOfRanges,
        }
    }

    fn bytes_of_page(self) -> usize {
        match self {
            Self::Objects => 17,
            Self::Ranges => 25,
        }
    }
}

/// No page: epoch 0 has none.
const NO_PAGE: PageId = PageId { ancestor: 0, epoch: 0, number: 0, at: 0, length: 0 };

/// Encodes the places of pages.
pub(super) fn encode_pages(to: &mut Writer, pages: &[Option<PageId>], form: Form) {
    to.length(pages.len());
    for page in pages {
        let page = page.unwrap_or(NO_PAGE);
        to.u8(page.ancestor);
        to.u64(page.epoch);
        to.u64(page.number);
        if form == Form::Ranges {
            to.u32(page.at);
            to.u32(page.length);
        }
    }
}

/// Decodes at most `max` places of pages.
pub(super) fn decode_pages(
    from: &mut Reader<'_>,
    max: usize,
    form: Form,
) -> Result<Vec<Option<PageId>>, Damage> {
    let count = from.count(form.bytes_of_page(), max)?;
    let mut pages = Vec::with_capacity(count);
    for _ in 0..count {
        let (ancestor, epoch, number) = (from.u8()?, from.u64()?, from.u64()?);
        let (at, length) = match form {
            Form::Objects => (0, 0),
            Form::Ranges => (from.u32()?, from.u32()?),
        };
        let page = PageId { ancestor, epoch, number, at, length };
        pages.push(match page {
            NO_PAGE => None,
            PageId { epoch: 1.., .. } if is_possible(&page) => Some(page),
            _ => return Err(Damage::Field("page")),
        });
    }
    Ok(pages)
}

/// Whether a page can have this length and place.
fn is_possible(page: &PageId) -> bool {
    match page.length as usize {
        0 => page.at == 0,
        length => {
            (PREFIX_BYTES..=MAX_HEADER_BYTES).contains(&length)
                && page.at.checked_add(page.length).is_some()
        }
    }
}
