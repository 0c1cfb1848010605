//! How the extents of a volume are stored: each is compressed by itself, unless that does not make it shorter, and then
//! encrypted.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};

use crate::codec::{Compression, Damage, Description, Entry, Extent, LogObject, MAX_EXTENT_BYTES};
use crate::encryption::{Cipher, DataKey, Spot, TAG_BYTES};
use crate::name::Position;

/// The form in which one volume stores extents.
#[derive(Debug, Clone, Default)]
pub(crate) struct Packing {
    compression: Option<Compression>,
    pub(crate) encryption: Encryption,
}

/// The encryption of one volume.
#[derive(Clone, Default)]
pub(crate) enum Encryption {
    /// There is none.
    #[default]
    None,
    /// The key is not known: data can be neither read nor written.
    Locked,
    /// The key is known.
    Open(Arc<Cipher>),
}

/// Compresses the extents of an object, one after the other.
pub(crate) struct Compressor {
    compression: Option<Compression>,
    room: usize,
    table: CompressTable,
    buffer: Vec<u8>,
}

impl Packing {
    /// The form of the volume itself; its parents may have others.
    pub(crate) fn of(description: &Description, encryption: Encryption) -> Self {
        Self { compression: description.compression, encryption }
    }

    /// Whether all extents are stored as they are.
    pub(crate) fn is_plain(&self) -> bool {
        self.compression.is_none() && !self.is_encrypted()
    }

    fn is_encrypted(&self) -> bool {
        !matches!(self.encryption, Encryption::None)
    }

    /// The bytes that an extent has in addition to its data.
    fn room(&self) -> u16 {
        if self.is_encrypted() { TAG_BYTES } else { 0 }
    }

    /// The length of the stored bytes of an extent.
    pub(crate) fn stored_length(&self, extent: &Extent) -> u32 {
        extent.packed_length() + u32::from(self.room())
    }

    /// The length of the stored bytes of all extents of an object.
    pub(crate) fn stored_bytes(&self, object: &LogObject) -> u64 {
        object.extents().map(|(_, extent)| u64::from(self.stored_length(&extent))).sum()
    }

    /// The stored bytes of the extent of an entry, in its object.
    pub(crate) fn stored(&self, entry: &Entry) -> Range<u64> {
        let begin = u64::from(entry.stored_at);
        begin..begin + u64::from(entry.packed_length()) + u64::from(self.room())
    }

    /// Makes the stored bytes of an extent from those of [`Compressor::append`], which are `bytes`. `at` is its place in
    /// `object`. `key` is the data key of the epoch if the volume is encrypted.
    pub(crate) fn finish(
        &self,
        key: Option<&DataKey>,
        (object, at): (Position, u32),
        extent: &mut Extent,
        bytes: &mut [u8],
    ) {
        debug_assert_eq!(key.is_some(), self.is_encrypted());
        if let Some(key) = key {
            let Extent { offset, length, saved, .. } = *extent;
            key.seal(&Spot { object, at, offset, length, saved }, bytes);
        }
        extent.checksum = crc32c::crc32c(bytes);
    }

    /// Returns the data of an entry's extent, after the stored bytes were verified. `base` is the first byte of the
    /// entry's page in the volume. `key` is the data key of the object's epoch if the volume is encrypted.
    ///
    /// # Errors
    /// Returns an error if the stored bytes have another length or checksum, were not encrypted for this place, or cannot
    /// be decompressed to exactly the length of the extent.
    pub(crate) fn unpack<'a>(
        &self,
        key: Option<&DataKey>,
        (entry, base): (&Entry, u64),
        stored: &'a [u8],
    ) -> Result<Cow<'a, [u8]>, Damage> {
        debug_assert_eq!(key.is_some(), self.is_encrypted());
        let range = self.stored(entry);
        let is_whole = stored.len() as u64 == range.end - range.start;
        if !is_whole || crc32c::crc32c(stored) != entry.checksum {
            return Err(Damage::Data);
        }
        let packed = match key {
            Some(key) => {
                let opened = key.open(&spot(entry, base), stored);
                Cow::Owned(opened.ok_or(Damage::Authenticity)?)
            }
            None => Cow::Borrowed(stored),
        };
        if entry.saved == 0 {
            return Ok(packed);
        }
        let mut plain = vec![0; entry.extent_length as usize];
        let length = match self.compression {
            Some(Compression::Lz4) => decompress_into(&packed, &mut plain).ok(),
            None => None,
        };
        match length == Some(plain.len()) {
            true => Ok(Cow::Owned(plain)),
            false => Err(Damage::Field("compressed extent")),
        }
    }
}

/// The place of the extent of an entry.
fn spot(entry: &Entry, base: u64) -> Spot {
    let offset = (base + u64::from(entry.offset)).saturating_sub(entry.skip.into());
    let (length, saved) = (entry.extent_length, entry.saved);
    Spot { object: entry.object, at: entry.extent_at, offset, length, saved }
}

/// Shows no key.
impl fmt::Debug for Encryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Locked => "Locked",
            Self::Open(_) => "Open",
        })
    }
}

impl Compressor {
    pub(crate) fn new(packing: &Packing) -> Self {
        Self {
            compression: packing.compression,
            room: packing.room().into(),
            table: CompressTable::large(),
            buffer: vec![0; get_maximum_output_size(MAX_EXTENT_BYTES as usize)],
        }
    }

    /// Appends `plain`, the data of `extent`, to `to` in the compressed form, with room for what encryption adds. The
    /// extent gets the number of saved bytes.
    pub(crate) fn append(&mut self, extent: &mut Extent, plain: &[u8], to: &mut Vec<u8>) {
        let packed = match self.compress(plain) {
            Some(length) => &self.buffer[..length],
            None => plain,
        };
        to.extend_from_slice(packed);
        to.resize(to.len() + self.room, 0);
        extent.saved = u16::try_from(plain.len() - packed.len()).unwrap_or(0);
    }

    /// Compresses an extent into the buffer. Returns the length, unless the result is not shorter.
    fn compress(&mut self, plain: &[u8]) -> Option<usize> {
        let compressed = match self.compression? {
            Compression::Lz4 => {
                compress_into_with_table(plain, &mut self.buffer, &mut self.table).ok()?
            }
        };
        // An extent that saves nothing, or would be empty, is stored as it is.
        (compressed > 0 && compressed < plain.len()).then_some(compressed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::encryption::KeyFile;
    use crate::name::{Nonce, VolumeId};

    const OBJECT: Position = Position { epoch: 1, slot: 2 };
    const AT: u32 = 500;
    const OFFSET: u64 = (5 << 20) + 4096;

    fn packing(compression: Option<Compression>, is_encrypted: bool) -> Packing {
        let description = Description::new(VolumeId([1; 16]), Nonce([2; 16]), 1 << 30, 1 << 20);
        let mut description = Description { compression, ..description };
        let file = KeyFile::new(&[7; 32]).unwrap();
        description.key = is_encrypted.then(|| file.wrap(&description, &[8; 32]));
        let encryption = match is_encrypted {
            true => Encryption::Open(Arc::new(file.open(&description).unwrap())),
            false => Encryption::None,
        };
        Packing::of(&description, encryption)
    }

    fn all() -> [Packing; 4] {
        let lz4 = Some(Compression::Lz4);
        [packing(None, false), packing(lz4, false), packing(None, true), packing(lz4, true)]
    }

    fn key(packing: &Packing) -> Option<Arc<DataKey>> {
        let Encryption::Open(cipher) = &packing.encryption else { return None };
        Some(cipher.data_key(OBJECT.epoch, Nonce([3; 16])))
    }

    /// Packs an extent. Returns the entry and the stored bytes.
    fn pack(packing: &Packing, plain: &[u8]) -> (Entry, Vec<u8>) {
        let (mut extent, mut stored) = (Extent::of(OFFSET, plain), Vec::new());
        Compressor::new(packing).append(&mut extent, plain, &mut stored);
        packing.finish(key(packing).as_deref(), (OBJECT, AT), &mut extent, &mut stored);
        assert_eq!(packing.stored_length(&extent) as usize, stored.len());
        (entry(&extent), stored)
    }

    /// The entry of the extent without its first sector.
    fn entry(extent: &Extent) -> Entry {
        let skip = extent.length.min(512);
        Entry {
            offset: 4096 + skip,
            length: extent.length - skip,
            ancestor: 0,
            object: OBJECT,
            extent_at: AT,
            extent_length: extent.length,
            stored_at: 300,
            saved: extent.saved,
            checksum: extent.checksum,
            skip,
        }
    }

    fn unpack(packing: &Packing, entry: &Entry, stored: &[u8]) -> Result<Vec<u8>, Damage> {
        let unpacked = packing.unpack(key(packing).as_deref(), (entry, 5 << 20), stored);
        unpacked.map(Cow::into_owned)
    }

    /// Data that compresses well, badly, and not at all.
    fn data() -> impl Strategy<Value = Vec<u8>> {
        let length = 1..=MAX_EXTENT_BYTES as usize;
        prop_oneof![
            (any::<u8>(), length.clone()).prop_map(|(byte, length)| vec![byte; length]),
            (vec(any::<u8>(), 1..600), length).prop_map(|(mut some, length)| {
                some.resize(length, 7);
                some
            }),
            vec(any::<u8>(), 1..600),
        ]
    }

    proptest! {
        #[test]
        fn an_extent_is_unpacked_to_itself(plain in data()) {
            for packing in all() {
                let (entry, stored) = pack(&packing, &plain);
                let room = if packing.is_encrypted() { 16 } else { 0 };
                prop_assert!(stored.len() <= plain.len() + room);
                prop_assert_eq!(packing.stored(&entry), 300..300 + stored.len() as u64);
                prop_assert!(unpack(&packing, &entry, &stored) == Ok(plain.clone()));
            }
        }

        #[test]
        fn any_bytes_are_refused_or_have_the_length_of_the_extent(
            stored in vec(any::<u8>(), 1..300), saved in 1..u16::MAX,
        ) {
            let length = u32::try_from(stored.len()).unwrap() + u32::from(saved);
            prop_assume!(length <= MAX_EXTENT_BYTES);
            let checksum = crc32c::crc32c(&stored);
            let entry = entry(&Extent { offset: 0, length, checksum, saved });
            match unpack(&packing(Some(Compression::Lz4), false), &entry, &stored) {
                Ok(plain) => prop_assert_eq!(plain.len(), length as usize),
                Err(damage) => prop_assert_eq!(damage, Damage::Field("compressed extent")),
            }
        }
    }

    #[test]
    fn damage_is_found_before_anything_else() {
        for packing in all() {
            let (entry, mut stored) = pack(&packing, &[9; 4096]);
            assert_eq!(stored.len() < 100, packing.compression.is_some(), "{packing:?}");
            assert_eq!(unpack(&packing, &entry, &stored[1..]), Err(Damage::Data));
            stored[3] ^= 1;
            assert_eq!(unpack(&packing, &entry, &stored), Err(Damage::Data));
        }
        // A volume without compression has no compressed extents.
        let (entry, stored) = pack(&packing(Some(Compression::Lz4), false), &[9; 4096]);
        let refused = unpack(&packing(None, false), &entry, &stored);
        assert_eq!(refused, Err(Damage::Field("compressed extent")));
    }

    #[test]
    fn what_does_not_become_shorter_is_stored_as_it_is() {
        let plain: Vec<u8> = (0..=255).collect();
        for packing in &all()[..2] {
            let (entry, stored) = pack(packing, &plain);
            assert_eq!((entry.saved, stored), (0, plain.clone()));
        }
    }

    #[test]
    fn an_encrypted_extent_belongs_to_its_place() {
        for packing in &all()[2..] {
            let (good, stored) = pack(packing, &[9; 4096]);
            assert!(!stored.windows(16).any(|bytes| bytes == [9; 16]), "the data is readable");
            let other = |change: &dyn Fn(&mut Entry)| {
                let mut entry = good;
                change(&mut entry);
                unpack(packing, &entry, &stored)
            };
            assert!(other(&|_| ()).is_ok());
            let refused = Err(Damage::Authenticity);
            assert_eq!(other(&|entry| entry.offset += 512), refused, "another place in the volume");
            assert_eq!(
                other(&|entry| entry.extent_at += 1),
                refused,
                "another place in the object"
            );
            assert_eq!(other(&|entry| entry.object.slot += 1), refused, "another object");
            assert_eq!(other(&|entry| entry.object.epoch += 1), refused, "another epoch");
            let shorter = |entry: &mut Entry| {
                entry.extent_length -= 1;
                entry.saved = entry.saved.saturating_sub(1);
            };
            let shorter = other(&shorter);
            assert!(shorter == refused || shorter == Err(Damage::Data), "another length");
            // Changed bytes with a checksum that is correct.
            let mut changed = stored.clone();
            changed[5] ^= 1;
            let entry = Entry { checksum: crc32c::crc32c(&changed), ..good };
            assert_eq!(unpack(packing, &entry, &changed), refused);
        }
    }
}
