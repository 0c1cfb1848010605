//! Tests of the ring, and of content that no writer has left.

use std::sync::Mutex;

use super::*;

struct Bytes(Mutex<Vec<u8>>);

impl Memory for Bytes {
    fn size(&self) -> u64 {
        self.0.lock().unwrap().len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let at = usize::try_from(offset).unwrap();
        buffer.copy_from_slice(&self.0.lock().unwrap()[at..at + buffer.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, parts: [&[u8]; 2]) -> io::Result<()> {
        let at = usize::try_from(offset).unwrap();
        let all = parts.concat();
        self.0.lock().unwrap()[at..at + all.len()].copy_from_slice(&all);
        Ok(())
    }
}

const VOLUME: VolumeId = VolumeId([3; 16]);

fn memory() -> Arc<Bytes> {
    Arc::new(Bytes(Mutex::new(vec![0; 20 << 10])))
}

fn open(memory: &Arc<Bytes>) -> Result<(TailMemory, Vec<Found>), Unusable> {
    TailMemory::open(Arc::clone(memory) as Arc<dyn Memory>, VOLUME, 5).unwrap()
}

fn entry(slot: u64, data: &[u8]) -> Entry {
    let (length, checksum) = (data.len() as u64, crc32c::crc32c(data));
    Entry { change: Change::Write, epoch: 1, slot, offset: 512 * slot, length, checksum }
}

#[test]
fn the_ring_wraps_around_and_has_the_records_that_were_not_released() {
    let memory = memory();
    let (mut tail, found) = open(&memory).unwrap();
    assert!(found.is_empty());
    tail.prepare(found, None, 1).unwrap().unwrap();
    for slot in 1..200 {
        let data = vec![u8::try_from(slot).unwrap(); 64 + usize::try_from(slot % 7).unwrap() * 512];
        assert!(tail.has_room(data.len()), "slot {slot}");
        tail.append(&entry(slot, &data), &data);
        assert!(tail.is_complete());
        if slot > 2 {
            tail.release(slot - 1, false).unwrap();
        }
        let (again, found) = open(&memory).unwrap();
        let slots: Vec<_> =
            found.iter().filter(|found| found.entry.change != Change::Skip).collect();
        let first = if slot > 2 { slot - 1 } else { 1 };
        assert!(slots.iter().map(|found| found.entry.slot).eq(first..=slot), "slot {slot}");
        assert_eq!(again.data(slots.last().unwrap()).unwrap(), data);
    }
    let bytes = tail.bytes();
    assert!(bytes > 0 && tail.has_room(64));
    while tail.has_room(4096) {
        tail.append(&entry(200, &[1; 4096]), &[1; 4096]);
    }
    assert!(tail.is_complete() && !tail.has_room(4096));
    tail.release(201, true).unwrap();
    assert_eq!((tail.bytes(), tail.has_room(4096)), (0, true));
}

#[test]
fn content_of_others_is_refused_and_damage_ends_the_records() {
    let memory = memory();
    let (mut tail, found) = open(&memory).unwrap();
    tail.prepare(found, None, 1).unwrap().unwrap();
    let data = [7; 1024];
    (1..6).for_each(|slot| tail.append(&entry(slot, &data), &data));
    let dynamic = || Arc::clone(&memory) as Arc<dyn Memory>;
    for (volume, owner) in [(VOLUME, 6), (VolumeId([4; 16]), 5)] {
        let opened = TailMemory::open(dynamic(), volume, owner).unwrap();
        assert_eq!(opened.err(), Some(Unusable::Damaged("identity")));
    }
    // Each byte of the second record, and the states, in turn.
    let record = usize::try_from(RECORDS_AT).unwrap() + BLOCK + 1024;
    for at in (record..record + BLOCK + 1024).chain(BLOCK..3 * BLOCK) {
        memory.0.lock().unwrap()[at] ^= 1;
        let is_state = at < 3 * BLOCK;
        let found = open(&memory).map(|(_, found)| found.len());
        // Without the newest state, the one before still leads to the first record.
        let expected = if is_state { 5 } else { 1 };
        assert_eq!(found, Ok(expected), "byte {at}");
        memory.0.lock().unwrap()[at] ^= 1;
    }
    for state in [BLOCK, 2 * BLOCK] {
        memory.0.lock().unwrap()[state] ^= 1;
    }
    assert_eq!(open(&memory).err(), Some(Unusable::Damaged("state")));
}

#[test]
fn lengths_that_no_writer_uses_are_not_followed() {
    let ok = entry(1, &[0; 64]);
    let far = Entry { offset: u64::MAX - 8, ..ok };
    let long = Entry { length: u64::from(MAX_EXTENT_BYTES) + 1, ..ok };
    let empty = Entry { length: 0, ..ok };
    let skip = Entry { change: Change::Skip, length: 7, ..ok };
    let whole = Entry { change: Change::Skip, length: 1 << 40, ..ok };
    for bad in [far, long, empty, skip, whole] {
        let memory = memory();
        let (mut tail, found) = open(&memory).unwrap();
        tail.prepare(found, None, 1).unwrap().unwrap();
        let block = block::record(&bad, 1);
        memory.write_at(RECORDS_AT, [&block.0, &[]]).unwrap();
        assert!(open(&memory).unwrap().1.is_empty(), "{bad:?}");
    }
}
