//! The headers of the objects of a volume on an object store, which any client with access to the store may
//! have changed.

use cleat_object::codec::{
    Checkpoint, Claim, Description, Identity, Index, Leaf, LogObject, Release, Slot, Usage,
};
use cleat_object::name::{Name, VolumeId};

/// Where the identity, the length and the checksum are in a header.
const VOLUME_AT: usize = 16;
const LENGTH_AT: usize = 12;
const CHECKSUM_AT: usize = 68;

/// Checks that every kind of object is refused, or has exactly the bytes of the value that it is decoded to;
/// once as it is, and once with the correct checksum, so that the fields behind it are reached. The input is
/// also parsed as a name.
pub(crate) fn check(data: &[u8]) {
    let identity = identity(data);
    decode(identity, data);
    decode(identity, &with_checksum(data));
    if let Some((text, name)) =
        std::str::from_utf8(data).ok().and_then(|text| Some((text, Name::parse(text)?)))
    {
        assert_eq!(name.to_string(), text);
    }
}

fn decode(identity: Identity, bytes: &[u8]) {
    let same = |encoded: Vec<u8>| assert_eq!(encoded, bytes);
    if let Ok(claim) = Claim::decode(identity, bytes) {
        same(claim.encode());
    }
    if let Ok(release) = Release::decode(identity, bytes) {
        same(release.encode());
    }
    if let Ok(description) = Description::decode(bytes) {
        same(description.encode());
    }
    match Slot::decode(identity, bytes) {
        Ok(Slot::Log(object)) => check_log(&object, bytes),
        Ok(Slot::Seal(nonce)) => same(Slot::encode_seal(identity, nonce)),
        Err(_) => {}
    }
    if let Ok(page) = Leaf::decode(identity, bytes) {
        let ends = page.entries.iter().map(|entry| entry.offset + entry.length);
        assert!(ends.zip(page.entries.iter().skip(1)).all(|(end, next)| end <= next.offset));
        same(page.encode());
    }
    if let Ok(page) = Index::decode(identity, bytes) {
        same(page.encode());
    }
    if let Ok(page) = Usage::decode(identity, bytes) {
        same(page.encode());
    }
    if let Ok(checkpoint) = Checkpoint::decode(identity, bytes) {
        same(checkpoint.encode());
    }
}

/// The header is the beginning of the object, and the extents cover the data exactly.
fn check_log(object: &LogObject, bytes: &[u8]) {
    assert!(bytes.starts_with(&object.encode()));
    let end =
        object.extents().last().map_or(0, |(at, extent)| u64::from(at) + u64::from(extent.length));
    assert_eq!(end, object.data_bytes());
    assert!(end <= cleat_object::codec::MAX_DATA_BYTES);
}

/// The identity that the header states. Missing bytes are 0.
fn identity(data: &[u8]) -> Identity {
    let mut field = [0; 32];
    let given = data.get(VOLUME_AT..).unwrap_or_default();
    let length = given.len().min(field.len());
    field[..length].copy_from_slice(&given[..length]);
    let [volume, numbers] =
        [&field[..16], &field[16..]].map(|half| half.try_into().unwrap_or([0; 16]));
    let numbers = u128::from_le_bytes(numbers);
    let [epoch, number] = [numbers, numbers >> 64].map(|half| half & u128::from(u64::MAX));
    let [epoch, number] = [epoch, number].map(|half| u64::try_from(half).unwrap_or(0));
    Identity { volume: VolumeId(volume), epoch, number }
}

/// The input with the correct checksum of its header, if it states the length of one.
fn with_checksum(data: &[u8]) -> Vec<u8> {
    let mut bytes = data.to_owned();
    let length = data.get(LENGTH_AT..LENGTH_AT + 4).and_then(|field| field.try_into().ok());
    let length = length.map_or(0, |field| u32::from_le_bytes(field) as usize);
    if (CHECKSUM_AT + 4..=data.len()).contains(&length) {
        bytes[CHECKSUM_AT..CHECKSUM_AT + 4].fill(0);
        let checksum = crc32c::crc32c(&bytes[..length]);
        bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&checksum.to_le_bytes());
    }
    bytes
}
