//! The contract of `cleat_backend`: each function checks one guarantee.

use cleat_backend::uri::VolumeUri;
use cleat_backend::{Image, OpenOptions};
use cleat_core::error::ErrorKind;
use cleat_core::request::{Flags, IoError, Op};

use crate::client::{Client, Job, Local, LocalClient, Volume, job, write};

/// Returns `length` bytes that differ by position and by `seed`.
pub fn pattern(seed: u64, length: u64) -> Vec<u8> {
    // 251 is prime, so the pattern does not repeat at a power of two.
    (0..length).map(|at| ((at + 1 + 31 * seed) % 251) as u8 + 1).collect()
}

/// A length that is a multiple of every block size, but not a power of two.
const PIECE: u64 = 3 * 4096;

pub fn reads_see_writes_of_other_clients(volume: &dyn Volume) {
    let mut clients: Vec<_> = (0..3).map(|_| volume.client()).collect();
    assert!(clients[0].read(0, PIECE).iter().all(|byte| *byte == 0), "a fresh volume is zero");
    for turn in 0..30 {
        let offset = turn * PIECE / 3;
        let data = pattern(turn, PIECE);
        let (writer, reader) = (turn as usize % 3, (turn as usize + 1) % 3);
        clients[writer].one(write(offset, &data));
        assert!(clients[reader].read(offset, PIECE) == data, "turn {turn}");
    }
    let zeroed = Flags { fua: true, ..Flags::default() };
    clients[0].one(job(Op::WriteZeroes, 4096, 4096).with(zeroed));
    assert!(clients[2].read(4096, 4096).iter().all(|byte| *byte == 0));
}

pub fn the_first_and_the_last_block_can_be_written(volume: &dyn Volume) {
    let mut client = volume.client();
    let block = u64::from(volume.blocks().minimum);
    let size = volume.size();
    assert_eq!(size % block, 0);
    for length in [block, 4096, 5 * 4096] {
        for offset in [0, block, size - length - block, size - length] {
            let data = pattern(offset, length);
            client.one(write(offset, &data));
            assert!(client.read(offset, length) == data, "{length} bytes at {offset}");
        }
    }
    client.one(job(Op::WriteZeroes, size - block, block));
    assert!(client.read(size - block, block).iter().all(|byte| *byte == 0));
    client.one(job(Op::Trim, 0, size));
    client.one(job(Op::Cache, 0, size));
}

pub fn writes_can_be_made_durable(volume: &dyn Volume) {
    let mut clients = [volume.client(), volume.client()];
    assert!(volume.features().flush && volume.features().fua);
    let fua = Flags { fua: true, ..Flags::default() };
    let data = pattern(7, PIECE);
    clients[0].one(job(Op::Flush, 0, 0));
    clients[0].one(write(0, &data));
    clients[1].one(job(Op::Flush, 0, 0));
    clients[1].one(write(PIECE, &data).with(fua));
    clients[1].one(job(Op::Trim, 2 * PIECE, PIECE).with(fua));
    clients[0].one(job(Op::WriteZeroes, 3 * PIECE, PIECE).with(fua));
    assert!(clients[0].read(0, 2 * PIECE) == [&data[..], &data[..]].concat());
    let mixed = (0..16).map(|n| match n % 4 {
        0 => job(Op::Flush, 0, 0),
        1 => write(n * PIECE, &data).with(fua),
        _ => write(n * PIECE, &data),
    });
    assert!(clients[0].run(mixed.collect()).iter().all(|done| done.result == Ok(())));
}

pub fn trimmed_ranges_that_read_as_zeroes_stay_zeroes(volume: &dyn Volume) {
    let mut clients = [volume.client(), volume.client()];
    let length = 1 << 20;
    let data = pattern(1, length);
    clients[0].one(write(0, &data));
    let block = u64::from(volume.blocks().minimum);
    let (from, to) = (PIECE + block, length - PIECE);
    clients[0].one(job(Op::Trim, from, to - from));
    let first = clients[1].read(0, length);
    for (at, (byte, was)) in first.iter().zip(&data).enumerate() {
        let inside = (from..to).contains(&(at as u64));
        assert!(byte == was || inside && *byte == 0, "byte {at} is {byte}, was {was}");
    }
    clients[0].one(job(Op::Flush, 0, 0));
    // A write to the range before must not restore the trimmed data.
    clients[0].one(write(0, &data[..PIECE as usize]));
    let second = clients[0].read(0, length);
    assert!(first.iter().zip(&second).all(|(one, two)| *one != 0 || *two == 0));
    clients[1].one(write(from, &data[..PIECE as usize]));
    assert!(clients[0].read(from, PIECE) == data[..PIECE as usize]);
}

pub fn write_zeroes_works_with_every_combination_of_flags(volume: &dyn Volume) {
    let mut client = volume.client();
    let block = u64::from(volume.blocks().minimum);
    let length = 1 << 20;
    let data = pattern(3, length);
    for bits in 0..8_u32 {
        let flags = Flags { fua: bits & 1 != 0, no_hole: bits & 2 != 0, fast_zero: bits & 4 != 0 };
        for (from, to) in [(block, 2 * block), (PIECE, length - block), (0, length)] {
            client.one(write(0, &data));
            let result = client.try_one(job(Op::WriteZeroes, from, to - from).with(flags));
            if flags.fast_zero && result == Err(IoError::Unsupported) {
                assert!(
                    client.read(0, length) == data,
                    "{flags:?}: the refused request changed the volume"
                );
                continue;
            }
            assert_eq!(result, Ok(()), "{flags:?} {from}..{to}");
            let mut expected = data.clone();
            expected[from as usize..to as usize].fill(0);
            assert!(client.read(0, length) == expected, "{flags:?} {from}..{to}");
        }
    }
    // Several requests at once, each longer than one write of zeroes by a backend that must write them.
    let keep = Flags { no_hole: true, ..Flags::default() };
    let at_once = (0..8).map(|n| job(Op::WriteZeroes, n * length, length).with(keep));
    client.run((0..8).map(|n| write(n * length, &data)).collect());
    assert!(client.run(at_once.collect()).iter().all(|done| done.result == Ok(())));
    assert!(client.read(0, 8 * length).iter().all(|byte| *byte == 0));
}

pub fn the_longest_payload_is_served(volume: &dyn Volume) {
    let mut client = volume.client();
    let length = u64::from(volume.blocks().maximum).min(volume.size());
    assert_eq!(length, 32 << 20);
    let data = pattern(9, length);
    let offset = volume.size() - length;
    client.one(write(offset, &data));
    assert!(client.read(offset, length) == data);
    client.one(job(Op::WriteZeroes, 0, volume.size()));
    assert!(client.read(offset, length).iter().all(|byte| *byte == 0));
}

pub fn many_requests_are_in_flight_at_once(volume: &dyn Volume) {
    let mut client = volume.client();
    let data: Vec<_> = (0..500).map(|n| pattern(n, 4096)).collect();
    let writes: Vec<Job> = (0..500).map(|n| write(n * 8192, &data[n as usize])).collect();
    assert!(client.run(writes).iter().all(|done| done.result == Ok(())));
    let reads = client.run((0..500).map(|n| job(Op::Read, n * 8192, 4096)).collect());
    for (n, done) in reads.iter().enumerate() {
        assert!(done.result == Ok(()) && done.data.as_ref() == Some(&data[n]), "request {n}");
    }
}

pub fn growing_keeps_the_content(volume: &dyn Volume) {
    let mut client = volume.client();
    let old = volume.size();
    let data = pattern(5, PIECE);
    client.one(write(old - PIECE, &data));
    if let Err(error) = volume.resize(old + (1 << 20)) {
        // A backend that cannot resize reports it with a repair hint, and the size does not change.
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{}", error.report());
        assert!(error.repair().is_some());
        assert_eq!(volume.size(), old);
        return;
    }
    assert_eq!(volume.size(), old + (1 << 20));
    assert!(client.read(old - PIECE, PIECE) == data);
    assert!(client.read(old, 1 << 20).iter().all(|byte| *byte == 0));
    let across = pattern(6, 2 * PIECE);
    client.one(write(old - PIECE, &across));
    assert!(volume.client().read(old - PIECE, 2 * PIECE) == across);
    client.one(job(Op::WriteZeroes, old - 4096, 8192));
    assert!(client.read(old - 4096, 8192).iter().all(|byte| *byte == 0));
    assert!(volume.resize(old).is_err(), "a resize must not shrink the volume");
    assert_eq!(volume.size(), old + (1 << 20));
}

pub fn read_only(uri: &VolumeUri) {
    let data = pattern(2, PIECE);
    let keeps = {
        let volume = Local::open(uri, OpenOptions::default());
        assert!(!volume.features().read_only);
        volume.client().one(write(PIECE, &data));
        volume.features().keeps_acknowledged_writes
    };
    let volume = Local::open(uri, OpenOptions { read_only: true, ..OpenOptions::default() });
    assert!(volume.features().read_only);
    let read = volume.client().read(PIECE, PIECE);
    assert!(if keeps { read == data } else { read.iter().all(|byte| *byte == 0) });
    assert!(volume.resize(volume.size() * 2).is_err());
}

/// Hands the volume over as from one process to the next: it always has a claim, and loses no data.
pub fn a_handover_keeps_the_claim_and_the_content(uri: &VolumeUri) {
    let options = OpenOptions::default();
    let successor = |image: &dyn Image| {
        uri.open_successor(&options, image.handover().unwrap().prepare().unwrap()).unwrap()
    };
    let put = |image: &dyn Image, at: u64| {
        let client: &mut dyn Client = &mut LocalClient::new(image, 64);
        client.one(write(at * PIECE, &pattern(at, PIECE)));
    };
    let holds = |image: &dyn Image, pieces: u64| {
        let client: &mut dyn Client = &mut LocalClient::new(image, 64);
        for at in 0..pieces {
            assert!(client.read(at * PIECE, PIECE) == pattern(at, PIECE), "piece {at}");
        }
    };
    let mut old = uri.open(&options).unwrap_or_else(|error| panic!("{}", error.report()));
    let keeps = old.features().keeps_acknowledged_writes;
    put(&*old, 0);
    for round in 0..2 {
        let new = successor(&*old);
        assert_eq!((new.size(), new.features()), (old.size(), old.features()));
        assert_eq!(new.block_sizes(), old.block_sizes());
        // The old image serves until the release, and again when the handover is cancelled.
        put(&*old, 1);
        old.handover().unwrap().release().unwrap();
        old.handover().unwrap().resume().unwrap();
        put(&*old, 2);
        let state = old.handover().unwrap().release().unwrap();
        new.handover().unwrap().take_over(&state).unwrap();
        old = new;
        if keeps {
            let second = uri.open(&options).err().map(|error| error.kind());
            assert_eq!(second, Some(ErrorKind::InUse), "round {round}");
        }
        holds(&*old, 3 + round);
        put(&*old, 3 + round);
    }
    holds(&*old, 5);
    drop(old);
    if keeps {
        holds(&*uri.open(&options).unwrap(), 5);
    }
}
