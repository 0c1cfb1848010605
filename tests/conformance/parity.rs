//! Features that rbd-nbd has too, on a real cluster: encryption, journals, mirrors, refused trims, and
//! resizes by other clients.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleat::backends::REGISTRY;
use cleat_backend::{OpenOptions, Waker};
use cleat_core::error::{Error, ErrorKind};
use cleat_core::request::{Flags, IoError, Op};
use librbd::{Key, Luks, NewImage, Open, RBD_FEATURE_EXCLUSIVE_LOCK, RBD_FEATURE_JOURNALING};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tempfile::TempDir;
use test_kit::ceph::{ID, POOL, shared};
use test_kit::wait::wait_until;

use crate::checks::pattern;
use crate::client::{Job, Local, Volume, job, write};
use crate::places::{image_uri, pool};
use crate::rbd::{MIB, fresh, local, refused};
use crate::{checks, model};

/// Creates a file in `directory` with the passphrase `text` and returns its path.
fn passphrase(directory: &TempDir, text: &str) -> PathBuf {
    let path = directory.path().join(format!("passphrase-{text}"));
    std::fs::write(&path, text).unwrap();
    path
}

/// Opens `uri`, and retries for 180 s after a timeout: on a busy machine, unlocking takes many seconds,
/// and an attempt that timed out holds the image until it ends.
fn opened(uri: &str) -> Result<Local, Error> {
    let begun = Instant::now();
    loop {
        match REGISTRY.volume(uri).unwrap().open(&OpenOptions::default()) {
            Ok(image) => return Ok(Local::of(image)),
            Err(error) => {
                let late = [ErrorKind::TimedOut, ErrorKind::InUse].contains(&error.kind());
                if !late || begun.elapsed() > Duration::from_secs(180) {
                    return Err(error);
                }
            }
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn read(image: &Arc<librbd::Image>, offset: u64, length: usize) -> Vec<u8> {
    let bytes = image.read(offset, length).unwrap();
    assert_eq!(bytes.len(), length);
    bytes
}

#[test]
fn encrypted_images_are_served_decrypted() {
    let directory = tempfile::tempdir().unwrap();
    let right = passphrase(&directory, "right");
    for (format, luks, header) in [("luks1", Luks::One, 4 * MIB), ("luks2", Luks::Two, 16 * MIB)] {
        let name = format!("secret-{format}");
        let plain = fresh(shared(), &name, 64 * MIB);
        shared()
            .rbd(&[
                "encryption",
                "format",
                &format!("{POOL}/{name}"),
                format,
                right.to_str().unwrap(),
            ])
            .unwrap();
        let with = |file: &PathBuf| {
            format!("{plain}&encryption={format}&passphrase_file={}", file.display())
        };
        let volume = opened(&with(&right)).unwrap();
        assert_eq!((volume.size(), volume.blocks().minimum), (64 * MIB - header, 4096));
        let mut client = volume.client();
        let last = volume.size() - 4096;
        client.one(write(8192, &pattern(1, 65536)));
        client.one(write(last, &pattern(2, 4096)).with(Flags { fua: true, ..Flags::default() }));
        assert!(client.read(last, 4096) == pattern(2, 4096));
        let expected = pattern(1, 65536);
        assert!(client.read(8192, 65536) == expected);
        assert!(volume.features().write_zeroes && !volume.features().trim);
        assert_eq!(volume.extents(0, MIB, 9).unwrap().len(), 1, "no holes are reported");
        for size in [128 * MIB, 128 * MIB + 4096, 96 * MIB] {
            // Sizes are those of the decrypted volume, to the block.
            let shrinks = size < volume.size();
            let resized = if shrinks { volume.shrink(size) } else { volume.resize(size) };
            resized.unwrap();
            assert_eq!(volume.size(), size);
            client.one(write(size - 4096, &pattern(3, 4096)));
            assert!(client.read(size - 4096, 4096) == pattern(3, 4096));
        }
        assert_eq!(volume.resize(64 * MIB).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert!(client.read(8192, 65536) == expected);
        drop(volume);
        // Another client reads the same data with the passphrase, and cipher text without it.
        let image = pool(shared(), ID).open(&name, None, Open::ReadOnly).unwrap();
        let cipher = read(&image, header + 8192, 4096);
        assert!(cipher != expected[..4096] && cipher != [0; 4096]);
        assert_eq!(image.size().unwrap(), 96 * MIB + header);
        image.unlock(&[Key { format: luks, passphrase: b"right" }]).unwrap();
        assert!(read(&image, 8192, 8192) == expected[..8192]);
        drop(image);
        if luks == Luks::Two {
            // Unlocking LUKS2 takes seconds, so its error cases are not checked.
            continue;
        }
        for (file, kind) in [
            (passphrase(&directory, "wrong"), ErrorKind::PermissionDenied),
            ("/no/such/file".into(), ErrorKind::NotFound),
            (passphrase(&directory, ""), ErrorKind::InvalidArgument),
        ] {
            let Err(error) = opened(&with(&file)) else {
                panic!("{} unlocked the image", file.display())
            };
            assert_eq!(error.kind(), kind, "{}", error.report());
            assert!(!error.report().contains("right"), "{}", error.report());
        }
    }
}

/// The expected content of a volume. A byte that was never written has no expected value.
struct Expected(Vec<Option<u8>>);

impl Expected {
    fn put(&mut self, at: u64, data: &[u8]) -> Job {
        let known = self.0[at as usize..].iter_mut().zip(data);
        known.for_each(|(known, byte)| *known = Some(*byte));
        write(at, data)
    }

    fn zero(&mut self, at: u64, length: u64) -> Job {
        self.0[at as usize..(at + length) as usize].fill(Some(0));
        job(Op::WriteZeroes, at, length)
    }

    fn is_in(&self, volume: &Local) -> bool {
        let now = volume.client().read(0, volume.size());
        assert_eq!(now.len(), self.0.len());
        self.0.iter().zip(&now).all(|(known, now)| known.is_none_or(|byte| byte == *now))
    }
}

/// Writes ranges of zeroes, data around them, and later data into the same objects.
fn zero_and_surround(volume: &Local, expected: &mut Expected, seed: u64) {
    let mut client = volume.client();
    client.one(expected.put(3 * MIB, &pattern(seed, 10 * MIB)));
    // Parts of objects and whole objects; the end of an object that was never written, and all of
    // another; more requests than are encrypted at the same time; and beside them a write and a read
    // that need not wait.
    let mut jobs = vec![
        expected.zero(3 * MIB + 4096, 9 * MIB + 8192),
        expected.zero(16 * MIB - 4096, 4 * MIB + 4096),
    ];
    jobs.extend((0..8).map(|n| expected.zero((21 + n) * MIB, MIB - 4096)));
    jobs.push(expected.put(30 * MIB, &pattern(seed + 1, 4096)));
    jobs.push(job(Op::Read, 3 * MIB, 4096));
    let ends = client.run(jobs);
    assert!(ends.iter().all(|done| done.result == Ok(())), "{ends:?}");
    assert!(ends.last().unwrap().data.as_deref() == Some(&pattern(seed, 10 * MIB)[..4096]));
    // Write into each of the objects afterwards.
    for n in 0..8 {
        client.one(expected.put((n * 4 + 3) * MIB - 8192, &pattern(seed + 2 + n, 4096)));
    }
}

/// Repeats the checks with trims.
fn zeroes_with_trims(uri: &str, expected: &mut Expected) {
    let volume = opened(&format!("{uri}&trim=true")).unwrap();
    assert!(volume.features().trim);
    assert!(expected.is_in(&volume));
    checks::write_zeroes_works_with_every_combination_of_flags(&volume);
    checks::writes_can_be_made_durable(&volume);
    checks::trimmed_ranges_that_read_as_zeroes_stay_zeroes(&volume);
    model::random_requests_give_the_same_content_as_the_model(&volume);
    let keep = Flags { no_hole: true, fua: true, ..Flags::default() };
    volume.client().one(expected.zero(0, volume.size()).with(keep));
    zero_and_surround(&volume, expected, 2);
}

/// If the backend removed cipher text instead of overwriting it, the range would read as the decryption
/// of zeroes once other data of the object is written.
#[test]
fn zeroes_of_encrypted_images_stay_zeroes_after_later_writes() {
    let directory = tempfile::tempdir().unwrap();
    let file = passphrase(&directory, "zeroes");
    for (format, order, header) in [("luks1", 22, 4 * MIB), ("luks2", 14, 16 * MIB)] {
        let (name, size) = (format!("zeroes-{format}"), 32 * MIB);
        let new = NewImage { order: Some(order), ..NewImage::default() };
        pool(shared(), ID).create(&name, size + header, &new).unwrap();
        let image = format!("{POOL}/{name}");
        shared().rbd(&["encryption", "format", &image, format, file.to_str().unwrap()]).unwrap();
        let uri = image_uri(shared(), &name);
        let uri = format!("{uri}&encryption={format}&passphrase_file={}", file.display());
        let volume = opened(&uri).unwrap();
        assert!(volume.features().write_zeroes && volume.features().fast_zero);
        let mut expected = Expected(vec![None; size as usize]);
        zero_and_surround(&volume, &mut expected, 1);
        assert!(expected.is_in(&volume), "{format}");
        drop(volume);
        let image = pool(shared(), ID).open(&name, None, Open::ReadOnly).unwrap();
        let cipher = read(&image, header + 16 * MIB, 4 * MIB as usize);
        assert!(cipher.chunks(4096).all(|block| block.iter().any(|byte| *byte != 0)), "{format}");
        drop(image);

        if format == "luks1" {
            zeroes_with_trims(&uri, &mut expected);
        }
        let volume = opened(&uri).unwrap();
        assert!(expected.is_in(&volume), "{format}: opened again");
        let fast = Flags { fast_zero: true, ..Flags::default() };
        let refused = volume.client().try_one(job(Op::WriteZeroes, 0, size).with(fast));
        assert_eq!(refused, Err(IoError::Unsupported));
        assert!(expected.is_in(&volume), "{format}: the refused request changed the volume");
        // A queued request writes nothing after its connection was dropped or it was abandoned.
        let data = pattern(3, size);
        let zeroes = || (0..8).map(|n| job(Op::WriteZeroes, 4 * n * MIB, 4 * MIB)).collect();
        volume.client().one(write(0, &data));
        volume.cut_off(zeroes());
        drop(volume);
        let volume = opened(&uri).unwrap();
        assert!((1..=4).contains(&zeroed(&volume, &data)), "{format}: connection dropped");
        volume.client().one(write(0, &data));
        let ended = volume.abandon(zeroes());
        assert_eq!(ended, [Err(IoError::Broken); 8], "{format}");
        assert!((1..=4).contains(&zeroed(&volume, &data)), "{format}: abandoned");
    }
}

/// Returns how many MiB of `data` have become zeroes.
fn zeroed(volume: &Local, data: &[u8]) -> usize {
    let now = volume.client().read(0, data.len() as u64);
    let pieces = now.chunks(MIB as usize).zip(data.chunks(MIB as usize));
    let zeroed = pieces.filter(|(now, was)| {
        assert!(now == was || now.iter().all(|byte| *byte == 0), "a MiB was zeroed in part");
        now != was
    });
    zeroed.count()
}

#[test]
fn images_with_a_journal_and_mirrored_ones_are_served() {
    let journal = RBD_FEATURE_EXCLUSIVE_LOCK | RBD_FEATURE_JOURNALING;
    let new = NewImage { features: Some(journal), ..NewImage::default() };
    pool(shared(), ID).create("journaled", 8 * MIB, &new).unwrap();
    fresh(shared(), "mirrored", 8 * MIB);
    shared().rbd(&["mirror", "pool", "enable", POOL, "image"]).unwrap();
    for (name, mode) in [("journaled", "journal"), ("mirrored", "snapshot")] {
        shared().rbd(&["mirror", "image", "enable", &format!("{POOL}/{name}"), mode]).unwrap();
        let uri = image_uri(shared(), name);
        let volume = local(&uri);
        volume.client().one(write(4096, &pattern(3, 100_000)));
        volume.client().one(job(Op::Trim, 0, 4096));
        volume.client().one(job(Op::Flush, 0, 0));
        assert!(volume.client().read(4096, 100_000) == pattern(3, 100_000), "{name}");
        drop(volume);
        assert!(local(&uri).client().read(4096, 100_000) == pattern(3, 100_000), "{name}");
        // After the demotion the image is as in the cluster that it is mirrored to.
        let image = format!("{POOL}/{name}");
        shared().rbd(&["mirror", "image", "demote", &image]).unwrap();
        for uri in [&uri, &format!("{uri}&lock=shared")] {
            let error = refused(uri);
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{}", error.report());
            assert!(error.message().contains("mirror's copy"), "{}", error.report());
            assert!(error.repair().unwrap().contains(&format!("promote {image}")));
        }
        let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
        let copy = Local::open(&REGISTRY.volume(&uri).unwrap(), read_only);
        assert!(copy.client().read(4096, 100_000) == pattern(3, 100_000), "{name}");
        shared().rbd(&["mirror", "image", "promote", &image]).unwrap();
        local(&uri).client().one(write(0, &pattern(4, 4096)));
    }
}

#[test]
fn trim_false_disables_the_trim_feature() {
    let uri = format!("{}&trim=false", fresh(shared(), "kept", 8 * MIB));
    assert!(!local(&uri).features().trim);
    assert!(local(&uri).features().write_zeroes);
}

#[test]
fn a_watcher_is_woken_when_the_image_grows() {
    let uri = fresh(shared(), "watched", 8 * MIB);
    let volume = Local::open(&REGISTRY.volume(&uri).unwrap(), OpenOptions::default());
    let waker = Waker::new().unwrap();
    volume.watch_changes(waker.clone());
    let admin = pool(shared(), ID).open("watched", None, Open::Write).unwrap();
    admin.resize(12 * MIB, false, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let mut set = [PollFd::new(waker.descriptor(), PollFlags::POLLIN)];
    assert_eq!(
        poll(&mut set, PollTimeout::from(60_000_u16)).unwrap(),
        1,
        "the watcher was not woken"
    );
    wait_until("the volume has its new size", || volume.size() == 12 * MIB);
}
