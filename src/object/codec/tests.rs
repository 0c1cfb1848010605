//! Properties of the codec: every value is decoded to itself, any bytes are refused or are those of the value
//! that they decode to, and damage is found.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::name::{Position, SnapshotId};

fn identity() -> impl Strategy<Value = Identity> {
    (any::<[u8; 16]>(), any::<u64>(), any::<u64>()).prop_map(|(volume, epoch, number)| Identity {
        volume: VolumeId(volume),
        epoch,
        number,
    })
}

fn nonce() -> impl Strategy<Value = Nonce> {
    any::<[u8; 16]>().prop_map(Nonce)
}

fn position() -> impl Strategy<Value = Position> {
    any::<(u64, u64)>().prop_map(|(epoch, slot)| Position { epoch, slot })
}

fn snapshot_id() -> impl Strategy<Value = SnapshotId> {
    any::<(u64, u64)>().prop_map(|(epoch, number)| SnapshotId { epoch, number })
}

/// The bytes that compression has saved, before they are limited by the length of the extent.
fn saved() -> impl Strategy<Value = u16> {
    prop_oneof![Just(0), any::<u16>()]
}

fn less_than(saved: u16, length: u32) -> u16 {
    u16::try_from(u32::from(saved) % length).unwrap()
}

fn extent() -> impl Strategy<Value = Extent> {
    (0..u64::MAX >> 1, 1..=MAX_EXTENT_BYTES, any::<u32>(), saved()).prop_map(
        |(offset, length, checksum, saved)| Extent {
            offset,
            length,
            checksum,
            saved: less_than(saved, length),
        },
    )
}

fn history() -> impl Strategy<Value = History> {
    let base = proptest::option::of((0..10_u64, 0..100_u64));
    (base, vec((1..10_u64, 1..100_u64), 0..5)).prop_map(|(base, steps)| {
        let base = base.map(|(epoch, slot)| Position { epoch, slot });
        let mut epoch = base.map_or(0, |base| base.epoch);
        let cuts = steps.into_iter().map(|(step, slot)| {
            epoch += step;
            Position { epoch, slot }
        });
        History { base, cuts: cuts.collect() }
    })
}

/// A snapshot in an epoch that follows those of its history.
fn snapshot() -> impl Strategy<Value = Snapshot> {
    (snapshot_id(), 1..100_u64, any::<u32>(), "\\PC{0,40}", any::<[u64; 3]>(), history()).prop_map(
        |(id, slot, record, name, [created_at_s, size, next_page], history)| {
            let at = (Position { epoch: 100, slot }, record);
            Snapshot { id, at, name, created_at_s, size, next_page, history }
        },
    )
}

fn record() -> impl Strategy<Value = Record> {
    let range = (0..u64::MAX >> 1, 1..u64::MAX >> 1);
    let source = (position(), 0_u32..15 << 20).prop_map(|(object, at)| Source { object, at });
    prop_oneof![
        extent().prop_map(Record::Write),
        range.clone().prop_map(|(offset, length)| Record::Trim { offset, length }),
        range.prop_map(|(offset, length)| Record::WriteZeroes { offset, length }),
        (extent(), source).prop_map(|(extent, source)| Record::Move(extent, source)),
        position().prop_map(Record::Base),
        history().prop_map(Record::Open),
        snapshot().prop_map(Record::Snapshot),
        snapshot_id().prop_map(Record::DeleteSnapshot),
        snapshot_id().prop_map(Record::RollBack),
        any::<u64>().prop_map(Record::Resize),
    ]
}

fn log_object() -> impl Strategy<Value = LogObject> {
    (identity(), nonce(), any::<u64>(), vec(record(), 0..50)).prop_map(
        |(identity, nonce, confirmed, records)| LogObject {
            identity,
            nonce,
            confirmed: confirmed % identity.number.saturating_add(1).max(1),
            records,
        },
    )
}

fn description() -> impl Strategy<Value = Description> {
    let parent =
        (any::<[u8; 16]>(), "\\PC{0,40}", snapshot()).prop_map(|(volume, location, snapshot)| {
            Parent { volume: VolumeId(volume), location, snapshot }
        });
    let compression = proptest::option::of(Just(Compression::Lz4));
    let key = proptest::option::of((any::<[u8; 32]>(), any::<[u8; 16]>()));
    let features = (compression, key, any::<bool>());
    (identity(), nonce(), any::<u64>(), 12..=24_u32, proptest::option::of(parent), features)
        .prop_map(|(identity, nonce, size, page, parent, (compression, key, shared_pages))| {
            Description {
                parent,
                compression,
                shared_pages,
                key: key
                    .map(|(key, tag)| WrappedKey([&key[..], &tag].concat().try_into().unwrap())),
                ..Description::new(identity.volume, nonce, size, 1 << page)
            }
        })
}

fn page_id() -> impl Strategy<Value = Option<PageId>> {
    let lengths = [PREFIX_BYTES, MAX_HEADER_BYTES].map(|bytes| u32::try_from(bytes).unwrap());
    let range = (0..u32::MAX >> 1, lengths[0]..=lengths[1]);
    let range = prop_oneof![1 => Just((0, 0)), 2 => range];
    let page = (any::<u8>(), 1..=u64::MAX, any::<u64>(), range).prop_map(
        |(ancestor, epoch, number, (at, length))| PageId { ancestor, epoch, number, at, length },
    );
    proptest::option::of(page)
}

fn leaf() -> impl Strategy<Value = Leaf> {
    let stored = proptest::option::of((any::<u32>(), saved()));
    let ranges = (0..1000_u32, 1..=4096_u32, 0..1000_u32);
    let entry = (ranges, any::<u8>(), position(), any::<[u32; 2]>(), stored);
    (identity(), nonce(), any::<u64>(), vec(entry, 0..50)).prop_map(
        |(identity, nonce, range, entries)| {
            let mut end = 0;
            let entries = entries.into_iter().map(|(range, ancestor, object, more, stored)| {
                let (gap, length, skip) = range;
                let (offset, extent_length) = (end + gap, skip + length);
                end = offset + length;
                let [extent_at, checksum] = more;
                let (stored_at, saved) = stored.unwrap_or((extent_at, 0));
                let saved = less_than(saved, extent_length);
                Entry {
                    offset,
                    length,
                    ancestor,
                    object,
                    extent_at,
                    extent_length,
                    stored_at,
                    saved,
                    checksum,
                    skip,
                }
            });
            Leaf { identity, nonce, range, entries: entries.collect() }
        },
    )
}

fn usage() -> impl Strategy<Value = Usage> {
    let used = (1..100_u64, 0..1_u32 << 24, any::<u32>(), proptest::option::of(position()));
    (identity(), nonce(), any::<u64>(), vec(used, 0..50)).prop_map(
        |(identity, nonce, epoch, objects)| {
            let mut slot = 0;
            let objects = objects.into_iter().map(|(step, bytes, live, dead_since)| {
                slot += step;
                let live = if dead_since.is_some() { 0 } else { live % (bytes + 1) };
                Used { slot, bytes, live, dead_since }
            });
            Usage { identity, nonce, epoch, objects: objects.collect() }
        },
    )
}

fn checkpoint() -> impl Strategy<Value = Checkpoint> {
    let pages = || vec(page_id(), 0..20);
    (identity(), nonce(), any::<[u64; 2]>(), pages(), pages(), vec(snapshot(), 0..5)).prop_map(
        |(identity, nonce, [size, next_page], index, usage, mut snapshots)| {
            let mut last = 0;
            for snapshot in &mut snapshots {
                last += snapshot.at.0.slot;
                snapshot.at.0.slot = last;
            }
            Checkpoint { identity, nonce, size, next_page, index, usage, snapshots }
        },
    )
}

/// Decodes `bytes` as every kind, and checks that what is accepted has exactly these bytes.
fn decode_all(identity: Identity, bytes: &[u8]) {
    let check = |encoded: Vec<u8>| assert_eq!(encoded, bytes);
    if let Ok(claim) = Claim::decode(identity, bytes) {
        check(claim.encode());
    }
    match Slot::decode(identity, bytes) {
        Ok(Slot::Log(object)) => assert!(bytes.starts_with(&object.encode())),
        Ok(Slot::Seal(nonce)) => check(Slot::encode_seal(identity, nonce)),
        Err(_) => {}
    }
    if let Ok(description) = Description::decode(bytes) {
        check(description.encode());
    }
    if let Ok(page) = Leaf::decode(identity, bytes) {
        check(page.encode());
    }
    if let Ok(page) = Index::decode(identity, bytes) {
        check(page.encode());
    }
    if let Ok(page) = Usage::decode(identity, bytes) {
        check(page.encode());
    }
    if let Ok(checkpoint) = Checkpoint::decode(identity, bytes) {
        check(checkpoint.encode());
    }
}

/// Corrects the checksum, so that the fields behind it are tested.
fn correct(bytes: &mut [u8]) {
    let Ok(length) = header_length(bytes) else { return };
    bytes[CHECKSUM_AT..CHECKSUM_AT + 4].fill(0);
    let checksum = crc32c::crc32c(&bytes[..length]);
    bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&checksum.to_le_bytes());
}

fn objects() -> impl Strategy<Value = (Identity, Vec<u8>)> {
    let index = (identity(), nonce(), any::<u64>(), vec(page_id(), 0..50));
    prop_oneof![
        log_object().prop_map(|object| (object.identity, object.encode())),
        (identity(), nonce(), "\\PC{0,400}").prop_map(|(identity, nonce, owner)| {
            (identity, Claim { identity, nonce, owner }.encode())
        }),
        (identity(), nonce())
            .prop_map(|(identity, nonce)| (identity, Release { identity, nonce }.encode())),
        (identity(), nonce())
            .prop_map(|(identity, nonce)| (identity, Slot::encode_seal(identity, nonce))),
        leaf().prop_map(|page| (page.identity, page.encode())),
        index.prop_map(|(identity, nonce, first, pages)| {
            (identity, Index { identity, nonce, first, pages }.encode())
        }),
        description().prop_map(|found| {
            (Identity { volume: found.volume, epoch: 0, number: 0 }, found.encode())
        }),
        usage().prop_map(|page| (page.identity, page.encode())),
        checkpoint().prop_map(|checkpoint| (checkpoint.identity, checkpoint.encode())),
    ]
}

proptest! {
    #[test]
    fn a_log_object_is_decoded_to_itself(object in log_object(), data in vec(any::<u8>(), 0..100)) {
        let header = object.encode();
        let bytes = [header.clone(), data].concat();
        prop_assert_eq!(LogObject::decode(object.identity, &bytes), Ok(object.clone()));
        let total: u64 = object.extents().map(|(_, extent)| u64::from(extent.length)).sum();
        prop_assert_eq!(total, object.data_bytes());
        // A reader that has too little learns how much it needs.
        let mut have = 0;
        while let Err(Damage::Short(needed)) = Slot::decode(object.identity, &bytes[..have]) {
            prop_assert!(needed > have && needed <= header.len());
            have = needed;
        }
        prop_assert_eq!(have, header.len());
    }

    #[test]
    fn pages_and_checkpoints_are_decoded_to_themselves(
        leaf in leaf(), usage in usage(), checkpoint in checkpoint(), description in description(),
    ) {
        prop_assert_eq!(Description::decode(&description.encode()), Ok(description));
        prop_assert_eq!(Leaf::decode(leaf.identity, &leaf.encode()), Ok(leaf));
        prop_assert_eq!(Usage::decode(usage.identity, &usage.encode()), Ok(usage));
        prop_assert_eq!(Checkpoint::decode(checkpoint.identity, &checkpoint.encode()), Ok(checkpoint));
    }

    #[test]
    fn any_bytes_are_refused_or_canonical(identity in identity(), bytes in vec(any::<u8>(), 0..300)) {
        decode_all(identity, &bytes);
    }

    #[test]
    fn changed_fields_are_refused_or_canonical(
        (identity, mut bytes) in objects(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        for (at, byte) in changes {
            // The identity, the nonce and the checksum may have any value.
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        correct(&mut bytes);
        decode_all(identity, &bytes);
    }

    #[test]
    fn every_changed_bit_of_a_header_is_found(
        (identity, bytes) in objects(), at in any::<prop::sample::Index>(), bit in 0..8_u8,
    ) {
        let mut damaged = bytes.clone();
        damaged[at.index(bytes.len())] ^= 1_u8 << bit;
        prop_assert!(Slot::decode(identity, &damaged).is_err());
        prop_assert!(Claim::decode(identity, &damaged).is_err());
        prop_assert!(Leaf::decode(identity, &damaged).is_err());
        prop_assert!(Index::decode(identity, &damaged).is_err());
        prop_assert!(Usage::decode(identity, &damaged).is_err());
        prop_assert!(Checkpoint::decode(identity, &damaged).is_err());
    }

    #[test]
    fn an_object_under_another_name_is_damaged(object in log_object(), other in identity()) {
        let moved = Slot::decode(other, &object.encode());
        prop_assert_eq!(moved, Err(Damage::Name));
    }
}

#[test]
fn the_checksum_of_an_extent_is_a_known_one() {
    // The value of RFC 3720, appendix B.4, for 32 bytes of zeroes.
    assert_eq!(Extent::of(0, &[0; 32]).checksum, 0x8a91_36aa);
}

#[test]
fn counts_that_the_object_cannot_hold_are_refused() {
    let identity = Identity { volume: VolumeId([1; 16]), epoch: 1, number: 1 };
    let nonce = Nonce([2; 16]);
    let mut bytes = LogObject { identity, nonce, confirmed: 0, records: Vec::new() }.encode();
    for count in [1, 1 << 16, u32::MAX] {
        bytes[PREFIX_BYTES + 8..PREFIX_BYTES + 12].copy_from_slice(&count.to_le_bytes());
        correct(&mut bytes);
        assert_eq!(LogObject::decode(identity, &bytes), Err(Damage::Field("count")));
    }
}

#[test]
fn the_shortest_items_are_decoded() {
    let identity = Identity { volume: VolumeId([1; 16]), epoch: 1, number: 1 };
    let nonce = Nonce([2; 16]);
    let history = History { base: None, cuts: Vec::new() };
    let records = vec![Record::Open(history.clone())];
    let object = LogObject { identity, nonce, confirmed: 0, records };
    assert_eq!(LogObject::decode(identity, &object.encode()), Ok(object));
    let id = SnapshotId { epoch: 1, number: 0 };
    let at = (Position { epoch: 1, slot: 0 }, 0);
    let snapshots = vec![Snapshot {
        id,
        at,
        name: String::new(),
        created_at_s: 0,
        size: 0,
        next_page: 0,
        history,
    }];
    let (index, usage) = (Vec::new(), Vec::new());
    let checkpoint = Checkpoint { identity, nonce, size: 0, next_page: 0, index, usage, snapshots };
    assert_eq!(Checkpoint::decode(identity, &checkpoint.encode()), Ok(checkpoint));
}

#[test]
fn features_of_a_later_build_are_refused_by_their_bits() {
    let mut bytes = Description::new(VolumeId([1; 16]), Nonce([2; 16]), 512, 4096).encode();
    for (features, unknown) in [(1 << 31 | 2, 1 << 31), (28, 16)] {
        bytes[PREFIX_BYTES + 12..PREFIX_BYTES + 16].copy_from_slice(&u32::to_le_bytes(features));
        correct(&mut bytes);
        assert_eq!(Description::decode(&bytes), Err(Damage::Features(unknown)));
    }
}

/// Volumes without features have had these bytes since the first build.
#[test]
fn plain_extents_have_the_bytes_of_the_first_build() {
    let identity = Identity { volume: VolumeId([1; 16]), epoch: 1, number: 1 };
    let (nonce, object) = (Nonce([2; 16]), Position { epoch: 1, slot: 1 });
    let extent = Extent { offset: 4096, length: 512, checksum: 7, saved: 0 };
    let records = vec![Record::Write(extent), Record::Move(extent, Source { object, at: 9 })];
    let log = LogObject { identity, nonce, confirmed: 0, records }.encode();
    let fields = [
        &[0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0][..],
        &[1, 0, 16, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 7, 0, 0, 0],
        &[4, 0, 16, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 7, 0, 0, 0],
        &[1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0],
    ];
    assert_eq!(log[PREFIX_BYTES..], fields.concat());
    let mut entry = Entry {
        offset: 512,
        length: 256,
        ancestor: 3,
        object,
        extent_at: 300,
        extent_length: 512,
        stored_at: 300,
        saved: 0,
        checksum: 7,
        skip: 128,
    };
    let mut leaf = Leaf { identity, nonce, range: 5, entries: vec![entry] };
    let bytes = leaf.encode();
    let fields = [
        &[5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0][..],
        &[0, 2, 0, 0, 0, 1, 0, 0, 3],
        &[1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        &[44, 1, 0, 0, 0, 2, 0, 0, 7, 0, 0, 0, 128, 0, 0, 0],
    ];
    assert_eq!((bytes[9], &bytes[PREFIX_BYTES..]), (4, &*fields.concat()));
    entry.saved = 2;
    leaf.entries.push(Entry { offset: 1024, ..entry });
    let bytes = leaf.encode();
    assert_eq!((bytes[9], bytes.len()), (10, PREFIX_BYTES + 12 + 2 * 47));
    let description = Description::new(VolumeId([1; 16]), nonce, 512, 4096);
    let description = Description { shared_pages: false, ..description }.encode();
    assert_eq!(description[PREFIX_BYTES + 8..], [0, 16, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn places_of_whole_pages_have_the_bytes_of_the_first_build() {
    let identity = Identity { volume: VolumeId([1; 16]), epoch: 1, number: 1 };
    let whole = PageId { ancestor: 2, epoch: 3, number: 4, at: 0, length: 0 };
    let page = |pages: Vec<_>| Index { identity, nonce: Nonce([2; 16]), first: 5, pages }.encode();
    let (none, bytes) = ([0; 17], page(vec![None, Some(whole)]));
    let fields = [
        &[5, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0][..],
        &none,
        &[2, 3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0],
    ];
    assert_eq!((bytes[9], &bytes[PREFIX_BYTES..]), (5, &*fields.concat()));
    let range = PageId { at: 6, length: 72, ..whole };
    let bytes = page(vec![Some(range), Some(whole)]);
    let fields = [
        &[5, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0][..],
        &[2, 3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 72, 0, 0, 0],
        &[2, 3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ];
    assert_eq!((bytes[9], &bytes[PREFIX_BYTES..]), (11, &*fields.concat()));
    // Too short, and no length.
    for (at, length) in [(6, 71), (6, 0)] {
        let bytes = page(vec![Some(range), Some(PageId { at, length, ..range })]);
        assert_eq!(Index::decode(identity, &bytes), Err(Damage::Field("page")));
    }
}

#[test]
fn every_kind_has_its_byte() {
    for (kind, byte) in Kind::ALL {
        assert_eq!(kind.byte(), byte);
        assert_eq!(Kind::from_byte(byte), Some(kind));
    }
}
