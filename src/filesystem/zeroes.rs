//! Searches a device for data: bytes that are not zero.
//!
//! A small device is read completely. Of a larger one, both ends are read completely, and between them
//! samples at even distances and at the places where known formats keep copies of their metadata. So what
//! is proved of a large device is: both ends are zero, and so is each sample. Data that lies entirely
//! between two samples is not found. The distance between samples is a 1024th of the device.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use tokio::time::Instant;

/// The size up to which a device is read completely, in bytes.
const WHOLE_MAX: u64 = 64 << 20;

/// The length of the part at each end that is read completely, in bytes. Signatures of all formats that
/// libblkid knows are within it, and so is the beginning of a first partition (at 1 MiB).
const EDGE: u64 = 4 << 20;

/// The number of samples at even distances. It is a power of two, so that the beginnings of the allocation
/// groups of XFS are among them: mkfs.xfs divides a device into 4 (16 or 32 for striped devices) equal parts.
const SAMPLES: u64 = 1024;

/// The length of a sample, in bytes.
const SAMPLE: u64 = 32 << 10;

/// The size of a block group of ext4 with blocks of 4 KiB, in bytes.
const EXT4_GROUP: u64 = 128 << 20;

/// The first block groups in which ext4 keeps copies of the superblock: powers of 3, 5 and 7.
const EXT4_COPIES: [u64; 12] = [1, 3, 5, 7, 9, 25, 27, 49, 81, 125, 243, 343];

/// The number of samples that the kernel is asked to read in advance, so that they are read concurrently.
const IN_ADVANCE: usize = 64;

/// The length of a single read, in bytes.
const READ: usize = 1 << 20;

/// Returns the position of the first byte found in a part of the device that is not zero; `None` if all bytes that were
/// read are zero. `part` is in bytes. Blocks while the device does not answer, in reads that
/// end when the process is killed.
///
/// # Errors
/// Returns `TimedOut` after the deadline, and the errors of reads.
pub(crate) fn first_data(
    device: &File,
    part: Range<u64>,
    deadline: Instant,
) -> io::Result<Option<u64>> {
    // What other clients of the storage have written is not in this machine's cache. Failures of advice only
    // cost time, except for this one, and a block device accepts it.
    posix_fadvise(device, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    let zeroes = vec![0; READ];
    let mut buffer = vec![0; READ];
    let mut places = places(part.end.saturating_sub(part.start));
    for place in &mut places {
        *place = part.start + place.start..part.start + place.end;
    }
    for some in places.chunks(IN_ADVANCE) {
        some.iter().for_each(|place| will_need(device, place));
        for place in some {
            let mut at = place.start;
            while at < place.end {
                if Instant::now() >= deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                let length = usize::try_from(place.end - at).map_or(READ, |left| left.min(READ));
                let read = &mut buffer[..length];
                device.read_exact_at(read, at)?;
                if read != &zeroes[..length] {
                    let within = read.iter().position(|byte| *byte != 0).unwrap_or_default();
                    return Ok(Some(at + within as u64));
                }
                at += length as u64;
            }
        }
    }
    Ok(None)
}

fn will_need(device: &File, place: &Range<u64>) {
    let (start, length) = (i64::try_from(place.start), i64::try_from(place.end - place.start));
    if let (Ok(start), Ok(length)) = (start, length) {
        let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
        let _ = posix_fadvise(device, start, length, advice);
    }
}

/// Returns the parts of a device of `size` bytes that are read: in order, none empty, none adjacent.
fn places(size: u64) -> Vec<Range<u64>> {
    if size <= WHOLE_MAX {
        return Vec::from_iter((size > 0).then_some(0..size));
    }
    let even = (0..SAMPLES).map(|number| {
        // In 128 bits, because the product exceeds 64 bits for sizes above 16 PiB.
        let at = u128::from(size) * u128::from(number) / u128::from(SAMPLES);
        u64::try_from(at).unwrap_or(size)
    });
    let powers = (0..u64::BITS).map(|power| 1 << power).take_while(|at| *at < size);
    let from_end = powers.clone().map(|distance: u64| size - distance);
    let copies = EXT4_COPIES.map(|group| group * EXT4_GROUP);
    let samples = even.chain(powers).chain(from_end).chain(copies).filter(|at| *at < size);
    let mut all: Vec<Range<u64>> = samples
        // On a boundary of a page: reads of parts of a page cost as much.
        .map(|at| at & !0xfff)
        .map(|at| at..size.min(at + SAMPLE))
        .chain([0..EDGE, size - EDGE..size])
        .collect();
    all.sort_by_key(|place| place.start);
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(all.len());
    for place in all {
        match merged.last_mut() {
            Some(last) if place.start <= last.end => last.end = last.end.max(place.end),
            _ => merged.push(place),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn a_single_byte_is_found_anywhere_in_a_small_device() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(WHOLE_MAX).unwrap();
        assert_eq!(first_data(&file, 0..WHOLE_MAX, later()).unwrap(), None);
        for at in [WHOLE_MAX - 1, 33 << 20 | 77, 1 << 20, 0] {
            file.write_all_at(&[1], at).unwrap();
            assert_eq!(first_data(&file, 0..WHOLE_MAX, later()).unwrap(), Some(at));
        }
    }

    #[test]
    fn data_in_a_large_device_is_found_at_both_ends_and_at_samples() {
        let size = 1 << 40;
        let even = size / SAMPLES;
        let group = EXT4_GROUP * 25;
        for at in [0, EDGE - 1, even, 7 * even + SAMPLE - 1, size / 4, group, size - EDGE, size - 1]
        {
            let file = tempfile::tempfile().unwrap();
            file.set_len(size).unwrap();
            file.write_all_at(&[1], at).unwrap();
            assert_eq!(first_data(&file, 0..size, later()).unwrap(), Some(at), "{at}");
        }
    }

    #[test]
    fn a_short_device_and_an_expired_deadline_are_errors() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let short = first_data(&file, 0..8192, later()).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
        let late = first_data(&file, 0..4096, Instant::now()).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    }

    proptest! {
        #[test]
        fn places_are_ordered_bounded_and_include_both_ends(size in 1_u64..) {
            let places = places(size);
            prop_assert!(places.iter().all(|place| place.start < place.end && place.end <= size));
            prop_assert!(places.windows(2).all(|pair| pair[0].end < pair[1].start));
            let total: u64 = places.iter().map(|place| place.end - place.start).sum();
            prop_assert!(total <= WHOLE_MAX, "{} bytes", total);
            prop_assert!(places[0].start == 0 && places[0].end >= EDGE.min(size));
            let last = places.last().unwrap();
            prop_assert!(last.end == size && last.start <= size.saturating_sub(EDGE));
        }

        /// Data without holes that is longer than the distance between two samples is always found.
        #[test]
        fn no_gap_is_longer_than_the_distance_between_samples(size in WHOLE_MAX..1 << 50) {
            let distance = size / SAMPLES + 1;
            for pair in places(size).windows(2) {
                prop_assert!(pair[1].start - pair[0].end <= distance);
            }
        }
    }
}
