//! A worker with a local cache in files, which it gets from the supervisor.

use std::fs::File;
use std::os::unix::net::UnixStream;

use cleat_worker::protocol::ToWorker;
use test_kit::nbd::kernel as nbd;
use test_kit::wait;
use test_kit::worker::Worker;

use super::objects::{BLOCK, CACHE_FILE_BYTES, ObjectVolume, cache_files, stamp, start_with_cache};

const BLOCKS: u64 = 64;

fn stop(mut worker: Worker) {
    worker.send(&ToWorker::Stop, &[]);
    assert!(worker.exit().success(), "{}", worker.log());
}

/// Whether all blocks can be read.
fn can_read(socket: &UnixStream) -> bool {
    (0..BLOCKS).all(|number| {
        nbd::send(socket, nbd::READ, number, number * u64::from(BLOCK), BLOCK, &[]);
        let (_, error) = nbd::reply(socket);
        if error == 0 {
            let mut data = vec![0; BLOCK as usize];
            std::io::Read::read_exact(&mut &*socket, &mut data).unwrap();
            assert!(data == stamp(1, number), "block {number}");
        }
        error == 0
    })
}

/// Writes all blocks.
fn fill(volume: &ObjectVolume, files: &[File]) {
    let (worker, sockets) = start_with_cache(&volume.uri, files);
    for number in 0..BLOCKS {
        let data = stamp(1, number);
        assert_eq!(nbd::write(&sockets[0], number * u64::from(BLOCK), &data), 0);
    }
    stop(worker);
}

/// The objects are removed from the store, so only the cache can have the data.
#[test]
fn a_cache_survives_the_worker_and_may_be_wiped() {
    let volume = ObjectVolume::in_directory();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let files = cache_files(directory.path(), 2);
    fill(&volume, &files);
    let objects = volume.objects();
    let (worker, sockets) = start_with_cache(&volume.uri, &files);
    wait::wait_until("the first checkpoint", || objects.join("ckpt").read_dir().is_ok());
    assert!(can_read(&sockets[0]));
    // A crash; what was read is in the files.
    std::thread::sleep(std::time::Duration::from_secs(1));
    drop((worker, sockets));
    let log = objects.join("log").join(format!("{:016x}", 1));
    let saved = directory.path().join("saved");
    std::fs::rename(&log, &saved).unwrap();
    let (worker, sockets) = start_with_cache(&volume.uri, &files);
    assert!(can_read(&sockets[0]));
    // Wiped while it is in use.
    files.iter().for_each(|file| file.set_len(0).unwrap());
    assert!(!can_read(&sockets[0]), "nothing has the data any more");
    std::fs::rename(&saved, &log).unwrap();
    assert!(can_read(&sockets[0]));
    assert!(can_read(&sockets[0]));
    stop(worker);
    for file in &files {
        assert!(file.metadata().unwrap().len() <= CACHE_FILE_BYTES);
    }
}

/// Volumes of a bucket share the files. Here they are in a directory, so that the objects can be taken away.
#[test]
fn a_clone_finds_what_the_worker_of_its_parent_has_cached() {
    let volume = ObjectVolume::in_directory();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let files = cache_files(directory.path(), 2);
    fill(&volume, &files);
    let clone = volume.make_clone();
    let (parent, sockets) = start_with_cache(&volume.uri, &files);
    assert!(can_read(&sockets[0]));
    std::thread::sleep(std::time::Duration::from_secs(1));
    let log = volume.objects().join("log").join(format!("{:016x}", 1));
    let saved = directory.path().join("saved");
    for (files, has_data) in [(&files[..], true), (&[], false)] {
        let (worker, sockets) = start_with_cache(&clone, files);
        std::fs::rename(&log, &saved).unwrap();
        assert_eq!(can_read(&sockets[0]), has_data, "{} files", files.len());
        std::fs::rename(&saved, &log).unwrap();
        stop(worker);
    }
    drop(parent);
}
