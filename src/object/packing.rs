//! How the extents of a volume are stored: each is compressed by itself, unless that does not make it shorter.

use std::borrow::Cow;
use std::ops::Range;

use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};

use crate::codec::{Compression, Damage, Description, Entry, Extent, LogObject, MAX_EXTENT_BYTES};

/// The form in which one volume stores extents.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Packing {
    compression: Option<Compression>,
}

/// Packs the extents of an object, one after the other.
pub(crate) struct Packer {
    packing: Packing,
    table: CompressTable,
    buffer: Vec<u8>,
}

impl Packing {
    /// The form of the volume itself; its parents may have others.
    pub(crate) fn of(description: &Description) -> Self {
        Self { compression: description.compression }
    }

    /// Whether all extents are stored as they are.
    pub(crate) fn is_plain(self) -> bool {
        self.compression.is_none()
    }

    /// The length of the stored bytes of an extent.
    pub(crate) fn stored_length(self, extent: &Extent) -> u32 {
        extent.packed_length()
    }

    /// The length of the stored bytes of all extents of an object.
    pub(crate) fn stored_bytes(self, object: &LogObject) -> u64 {
        object.extents().map(|(_, extent)| u64::from(self.stored_length(&extent))).sum()
    }

    /// The stored bytes of the extent of an entry, in its object.
    pub(crate) fn stored(self, entry: &Entry) -> Range<u64> {
        let begin = u64::from(entry.stored_at);
        begin..begin + u64::from(entry.packed_length())
    }

    /// Returns the data of an entry's extent, after the stored bytes were verified.
    ///
    /// # Errors
    /// Returns an error if the stored bytes have another length or checksum, or cannot be decompressed to exactly the
    /// length of the extent.
    pub(crate) fn unpack<'a>(
        self,
        entry: &Entry,
        stored: &'a [u8],
    ) -> Result<Cow<'a, [u8]>, Damage> {
        let is_whole = stored.len() as u64 == u64::from(entry.packed_length());
        if !is_whole || crc32c::crc32c(stored) != entry.checksum {
            return Err(Damage::Data);
        }
        if entry.saved == 0 {
            return Ok(Cow::Borrowed(stored));
        }
        let mut plain = vec![0; entry.extent_length as usize];
        let length = match self.compression {
            Some(Compression::Lz4) => decompress_into(stored, &mut plain).ok(),
            None => None,
        };
        match length == Some(plain.len()) {
            true => Ok(Cow::Owned(plain)),
            false => Err(Damage::Field("compressed extent")),
        }
    }
}

impl Packer {
    pub(crate) fn new(packing: Packing) -> Self {
        let buffer = vec![0; get_maximum_output_size(MAX_EXTENT_BYTES as usize)];
        Self { packing, table: CompressTable::large(), buffer }
    }

    /// Appends the stored bytes of `plain`, the data of `extent`, to `to`. Returns the description of the stored extent.
    pub(crate) fn pack(&mut self, extent: &Extent, plain: &[u8], to: &mut Vec<u8>) -> Extent {
        let (packed, saved) = match self.compress(plain) {
            Some(length) => (&self.buffer[..length], plain.len() - length),
            None => (plain, 0),
        };
        to.extend_from_slice(packed);
        let saved = u16::try_from(saved).unwrap_or(0);
        Extent { checksum: crc32c::crc32c(packed), saved, ..*extent }
    }

    /// Compresses an extent into the buffer. Returns the length, unless the result is not shorter.
    fn compress(&mut self, plain: &[u8]) -> Option<usize> {
        let compressed = match self.packing.compression? {
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
    use crate::name::Position;

    const LZ4: Packing = Packing { compression: Some(Compression::Lz4) };

    fn entry(extent: &Extent) -> Entry {
        Entry {
            offset: 0,
            length: extent.length,
            ancestor: 0,
            object: Position { epoch: 1, slot: 2 },
            extent_at: 500,
            extent_length: extent.length,
            stored_at: 300,
            saved: extent.saved,
            checksum: extent.checksum,
            skip: 0,
        }
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
        fn an_extent_is_unpacked_to_itself(all in vec(data(), 1..4)) {
            let (mut packer, mut stored, mut lengths) = (Packer::new(LZ4), Vec::new(), 0);
            for plain in all {
                let before = stored.len();
                let extent = packer.pack(&Extent::of(512, &plain), &plain, &mut stored);
                let (entry, bytes) = (entry(&extent), &stored[before..]);
                prop_assert!(bytes.len() <= plain.len());
                prop_assert_eq!(LZ4.stored(&entry), 300..300 + bytes.len() as u64);
                prop_assert_eq!(LZ4.unpack(&entry, bytes), Ok(Cow::Borrowed(&*plain)));
                lengths += LZ4.stored_length(&extent) as usize;
            }
            prop_assert_eq!(lengths, stored.len());
        }

        #[test]
        fn any_bytes_are_refused_or_have_the_length_of_the_extent(
            stored in vec(any::<u8>(), 1..300), saved in 1..u16::MAX,
        ) {
            let length = u32::try_from(stored.len()).unwrap() + u32::from(saved);
            prop_assume!(length <= MAX_EXTENT_BYTES);
            let checksum = crc32c::crc32c(&stored);
            let entry = entry(&Extent { offset: 0, length, checksum, saved });
            match LZ4.unpack(&entry, &stored) {
                Ok(plain) => prop_assert_eq!(plain.len(), length as usize),
                Err(damage) => prop_assert_eq!(damage, Damage::Field("compressed extent")),
            }
        }
    }

    #[test]
    fn damage_is_found_before_it_is_decompressed() {
        let (plain, mut stored) = ([9; 4096], Vec::new());
        let extent = Packer::new(LZ4).pack(&Extent::of(0, &plain), &plain, &mut stored);
        let entry = entry(&extent);
        assert!(stored.len() < 100, "{} bytes", stored.len());
        assert_eq!(LZ4.unpack(&entry, &stored[1..]), Err(Damage::Data));
        stored[3] ^= 1;
        assert_eq!(LZ4.unpack(&entry, &stored), Err(Damage::Data));
        stored[3] ^= 1;
        // A volume without compression has no such extents.
        let refused = Packing::default().unpack(&entry, &stored);
        assert_eq!(refused, Err(Damage::Field("compressed extent")));
    }

    #[test]
    fn what_does_not_become_shorter_is_stored_as_it_is() {
        let plain: Vec<u8> = (0..=255).collect();
        for packing in [LZ4, Packing::default()] {
            let mut stored = Vec::new();
            let extent = Packer::new(packing).pack(&Extent::of(0, &plain), &plain, &mut stored);
            assert_eq!((extent, stored), (Extent::of(0, &plain), plain.clone()));
        }
    }
}
