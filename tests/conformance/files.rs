//! Guarantees of the file, device and fault backends beyond the common contract.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use cleat::backends::REGISTRY;
use cleat_backend::{HandoverState, OpenOptions};
use cleat_core::error::{Error, ErrorKind};
use cleat_core::request::{Flags, IoError, Op};

use crate::checks::pattern;
use crate::client::{Client, Local, LocalClient, Volume, job, write};
use crate::places::{Place, needs_root};
use test_kit::temp::{in_memory, on_disk};

fn refused(uri: &str) -> Error {
    match REGISTRY.volume(uri).unwrap().open(&OpenOptions::default()) {
        Ok(_) => panic!("{uri} was opened"),
        Err(error) => error,
    }
}

#[test]
fn a_second_writer_is_refused_with_the_pid_of_the_first_and_a_reader_is_not() {
    let place = Place::file(on_disk(), "");
    let uri = place.uri(1 << 20);
    let first = Local::open(&uri, OpenOptions::default());
    let error = refused(&uri.to_string());
    assert_eq!(error.kind(), ErrorKind::InUse);
    let first_writer = format!("is being written by process {}", std::process::id());
    assert!(error.message().contains(&first_writer), "{}", error.message());
    Local::open(&uri, OpenOptions { read_only: true, ..OpenOptions::default() });
    drop(first);
    Local::open(&uri, OpenOptions::default());
}

#[test]
fn a_mounted_device_is_refused_with_its_mount_point() {
    needs_root();
    let place = Place::loop_device(512, "");
    let uri = place.uri(16 << 20).to_string();
    let device = uri.strip_prefix("file:").unwrap();
    let point = tempfile::tempdir_in(on_disk()).unwrap();
    let run = |command: &str, arguments: &[&str]| {
        let output = Command::new(command).args(arguments).output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let directory = point.path().to_str().unwrap();
    run("mkfs.ext4", &["-q", device]);
    run("mount", &[device, directory]);
    let error = std::panic::catch_unwind(|| refused(&uri));
    run("umount", &[directory]);
    let error = error.unwrap();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(error.message().contains(&format!("a mount at {directory}")), "{}", error.message());
}

#[test]
fn missing_empty_and_special_files_are_refused_or_created() {
    let directory = tempfile::tempdir_in(on_disk()).unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let missing = refused(&format!("file:{}", path("missing.img")));
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert!(missing.repair().unwrap().contains("create=10G"));
    let nowhere = refused(&format!("file:{}?create=1M", path("none/new.img")));
    assert_eq!(nowhere.kind(), ErrorKind::NotFound);
    assert!(nowhere.repair().unwrap().ends_with(&path("none")), "{nowhere:?}");
    let nowhere = refused(&format!("file:{}", path("none/old.img")));
    assert!(nowhere.message().contains("directory"), "{nowhere:?}");
    assert!(!nowhere.repair().unwrap().contains("truncate"), "{nowhere:?}");
    let odd = refused(&format!("file:{}", path("")));
    assert!(odd.message().contains("is a directory"), "{}", odd.message());
    nix::unistd::mkfifo(path("fifo").as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(refused(&format!("file:{}", path("fifo"))).kind(), ErrorKind::InvalidArgument);
    File::create(path("empty")).unwrap();
    assert!(refused(&format!("file:{}", path("empty"))).repair().unwrap().contains("truncate"));

    for name in ["new.img", "empty"] {
        let uri = REGISTRY.volume(&format!("file:{}?create=5G", path(name))).unwrap();
        assert_eq!(Local::open(&uri, OpenOptions::default()).size(), 5 << 30);
        let made = fs::metadata(path(name)).unwrap();
        assert!(made.len() == 5 << 30 && made.blocks() < 100, "sparse");
    }
    // Some file systems support a sparse file of this size. On the others, the
    // open leaves no file behind.
    let uri = REGISTRY.volume(&format!("file:{}?create=4E", path("huge.img"))).unwrap();
    let huge = uri.open(&OpenOptions::default());
    assert_eq!(fs::exists(path("huge.img")).unwrap(), huge.is_ok());
    let uri = REGISTRY.volume(&format!("file:{}?create=1G", path("new.img"))).unwrap();
    let kept = Local::open(&uri, OpenOptions::default());
    assert_eq!(kept.size(), 5 << 30, "an existing file keeps its size");
}

#[test]
fn a_file_of_any_size_is_served_to_the_last_byte_or_with_direct_io_the_last_block() {
    let place = Place::file(on_disk(), "");
    let uri = place.uri((1 << 20) + 100);
    let volume = Local::open(&uri, OpenOptions::default());
    assert_eq!((volume.size(), volume.blocks().minimum), ((1 << 20) + 100, 1));
    volume.client().one(write(1 << 20, &pattern(1, 100)));
    assert!(volume.client().read(1 << 20, 100) == pattern(1, 100));
    drop(volume);
    let direct = REGISTRY.volume(&format!("{uri}?direct=true")).unwrap();
    let volume = Local::open(&direct, OpenOptions::default());
    assert_eq!(volume.size(), 1 << 20);
    assert!(volume.blocks().minimum >= 512);
}

#[test]
fn trims_and_zeroes_of_more_than_4_gib_work() {
    for place in [Place::mem(), Place::file(on_disk(), ""), Place::file(in_memory(), "")] {
        let volume = Local::open(&place.uri(9 << 30), OpenOptions::default());
        let mut client = volume.client();
        let spots = [0, 1 << 30, (4 << 30) - 2048, 5 << 30, (9 << 30) - 4096];
        let data = pattern(1, 4096);
        for op in [Op::WriteZeroes, Op::Trim] {
            for spot in spots {
                client.one(write(spot, &data));
            }
            client.one(job(op, 4096, (9 << 30) - 8192));
            for spot in &spots[1..4] {
                assert!(client.read(*spot, 4096).iter().all(|byte| *byte == 0), "{op:?} {spot}");
            }
            assert!(client.read(spots[0], 4096) == data && client.read(spots[4], 4096) == data);
        }
    }
}

#[test]
fn trim_and_zeroes_free_space_and_no_hole_keeps_it_allocated() {
    let place = Place::file(on_disk(), "");
    let uri = place.uri(8 << 20);
    let path = uri.to_string().strip_prefix("file:").unwrap().to_owned();
    let volume = Local::open(&uri, OpenOptions::default());
    let mut client = volume.client();
    let allocated = |client: &mut dyn Client| {
        client.one(job(Op::Flush, 0, 0));
        fs::metadata(&path).unwrap().blocks() * 512
    };
    let no_hole = Flags { no_hole: true, ..Flags::default() };
    client.one(write(0, &pattern(1, 8 << 20)));
    assert!(allocated(&mut *client) >= 8 << 20);
    client.one(job(Op::WriteZeroes, 0, 8 << 20).with(no_hole));
    assert!(allocated(&mut *client) >= 8 << 20);
    client.one(job(Op::WriteZeroes, 0, 4 << 20));
    assert!(allocated(&mut *client) < 5 << 20);
    client.one(job(Op::Trim, 0, 8 << 20));
    assert!(allocated(&mut *client) < 1 << 20);
}

#[test]
fn reads_beyond_a_truncated_file_fail_and_do_not_return_zeroes() {
    let place = Place::file(on_disk(), "");
    let uri = place.uri(1 << 20);
    let path = uri.to_string().strip_prefix("file:").unwrap().to_owned();
    let volume = Local::open(&uri, OpenOptions::default());
    let mut client = volume.client();
    client.one(write(0, &pattern(1, 1 << 20)));
    // Where the file system permits it, the second read of a short range is copied from a mapping of the file.
    for offset in [499_712, 499_900, 600_000].repeat(2) {
        assert_eq!(client.read(offset, 100).len(), 100);
    }
    File::options().write(true).open(path).unwrap().set_len(500_000).unwrap();
    assert!(client.read(0, 500_000) == pattern(1, 500_000));
    assert!(client.read(499_900, 100) == pattern(1, 500_000)[499_900..]);
    assert_eq!(client.try_one(job(Op::Read, 0, 500_001)), Err(IoError::Broken));
    assert_eq!(client.try_one(job(Op::Read, 499_901, 100)), Err(IoError::Broken));
    assert_eq!(client.try_one(job(Op::Read, 600_000, 10)), Err(IoError::Broken));
}

#[test]
fn a_full_file_system_gives_the_error_no_space() {
    needs_root();
    let point = tempfile::tempdir_in(on_disk()).unwrap();
    let mount = |source, kind, options| {
        nix::mount::mount(
            Some(source),
            point.path(),
            Some(kind),
            nix::mount::MsFlags::empty(),
            Some(options),
        )
    };
    mount("tmpfs", "tmpfs", "size=1m").unwrap();
    let full = std::panic::catch_unwind(|| {
        let place = Place::file(point.path().to_owned(), "");
        let volume = Local::open(&place.uri(8 << 20), OpenOptions::default());
        let mut client = volume.client();
        client.one(write(0, &pattern(1, 4096)));
        let written = client.try_one(write(0, &pattern(1, 4 << 20)));
        let keep = Flags { no_hole: true, ..Flags::default() };
        let zeroed = client.try_one(job(Op::WriteZeroes, 0, 4 << 20).with(keep));
        // Space that a trim freed can be used again.
        client.one(job(Op::Trim, 0, 8 << 20));
        client.one(write(1 << 20, &pattern(2, 4096)));
        (written, zeroed)
    });
    nix::mount::umount2(point.path(), nix::mount::MntFlags::MNT_DETACH).unwrap();
    assert_eq!(full.unwrap(), (Err(IoError::NoSpace), Err(IoError::NoSpace)));
}

#[test]
fn a_full_ring_makes_requests_wait_and_loses_none() {
    let place = Place::file(in_memory(), "");
    let image = place.uri(8 << 20).open(&OpenOptions::default()).unwrap();
    // Two entries for 32 requests; the poll of the waker takes one of them.
    let mut client = LocalClient::new(&*image, 2);
    let client: &mut dyn Client = &mut client;
    let data = pattern(1, 4096);
    let keep = Flags { no_hole: true, fua: true, ..Flags::default() };
    let jobs = (0..100).map(|n| match n % 3 {
        0 => job(Op::WriteZeroes, n * 4096, 4096).with(keep),
        _ => write(n * 4096, &data),
    });
    assert!(client.run(jobs.collect()).iter().all(|done| done.result == Ok(())));
    for n in 0..100 {
        let read = client.read(n * 4096, 4096);
        assert!(if n % 3 == 0 { read.iter().all(|b| *b == 0) } else { read == data }, "{n}");
    }
}

#[cfg(feature = "fault")]
mod fault {
    use std::time::{Duration, Instant};

    use super::*;

    fn volume(plan: &str) -> Local {
        let uri = REGISTRY.volume(&format!("fault:mem:1M?{plan}")).unwrap();
        Local::open(&uri, OpenOptions::default())
    }

    #[test]
    fn errors_are_injected_by_kind_operation_and_range() {
        let volume = volume("fault.error=nospace&fault.ops=write&fault.from=4K&fault.to=8K");
        let mut client = volume.client();
        let data = pattern(1, 4096);
        client.one(write(0, &data));
        assert_eq!(client.try_one(write(4096, &data)), Err(IoError::NoSpace));
        assert!(client.read(4096, 4096).iter().all(|byte| *byte == 0), "nothing was written");
        volume.set_fault("").unwrap();
        client.one(write(4096, &data));
        assert_eq!(volume.set_fault("oops=1").unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn injected_latency_delays_a_request_and_not_the_others() {
        let latency = Duration::from_millis(400);
        let volume = volume("fault.latency=400ms&fault.ops=read");
        let mut client = volume.client();
        let begin = Instant::now();
        client.one(write(0, &pattern(1, 4096)));
        assert!(begin.elapsed() < latency);
        let reads = client.run((0..20).map(|_| job(Op::Read, 0, 4096)).collect());
        let elapsed = begin.elapsed();
        assert!(elapsed >= latency, "{elapsed:?}");
        assert!(elapsed < 10 * latency, "the delays were added up: {elapsed:?}");
        assert!(reads.iter().all(|done| done.data == Some(pattern(1, 4096))));
    }

    #[test]
    fn a_new_plan_releases_requests_that_hang() {
        let volume = volume("fault.hang=true&fault.ops=write");
        let image = &volume;
        std::thread::scope(|scope| {
            let (sent, started) = std::sync::mpsc::channel();
            let hung = scope.spawn(move || {
                let mut client = image.client();
                sent.send(()).unwrap();
                client.one(write(0, &pattern(1, 4096)));
            });
            started.recv().unwrap();
            std::thread::sleep(Duration::from_millis(100));
            assert!(!hung.is_finished());
            volume.set_fault("").unwrap();
            hung.join().unwrap();
        });
        assert!(volume.client().read(0, 4096) == pattern(1, 4096));
    }

    #[test]
    fn an_injected_fence_is_permanent() {
        let volume = volume("fault.error=fenced&fault.from=8K");
        let mut clients = [volume.client(), volume.client()];
        clients[0].one(write(0, &pattern(1, 4096)));
        assert_eq!(clients[0].try_one(job(Op::Read, 8192, 1)), Err(IoError::Fenced));
        volume.set_fault("").unwrap();
        assert_eq!(clients[1].try_one(write(0, &pattern(2, 4096))), Err(IoError::Fenced));
    }

    #[test]
    fn the_same_seed_injects_the_same_faults() {
        let run = || {
            let volume = volume("fault.error=broken&fault.rate=0.3&fault.seed=42");
            let ends = volume.client().run((0..200).map(|_| job(Op::Read, 0, 512)).collect());
            ends.iter().map(|done| done.result.is_err()).collect::<Vec<_>>()
        };
        let first = run();
        assert!(first.contains(&true) && first.contains(&false));
        assert_eq!(first, run());
    }
}

#[test]
fn a_successor_fails_flushes_after_a_failed_sync_of_its_predecessor() {
    let place = Place::file(on_disk(), "");
    let uri = place.uri(1 << 20);
    let options = OpenOptions::default();
    let mut image = uri.open(&options).unwrap();
    let mut state =
        HandoverState { sync_failed: true, ..image.handover().unwrap().release().unwrap() };
    for _ in 0..2 {
        let next =
            uri.open_successor(&options, image.handover().unwrap().prepare().unwrap()).unwrap();
        next.handover().unwrap().take_over(&state).unwrap();
        let client: &mut dyn Client = &mut LocalClient::new(&*next, 64);
        client.one(write(0, &pattern(1, 4096)));
        assert_eq!(client.try_one(job(Op::Flush, 0, 0)), Err(IoError::Broken));
        state = next.handover().unwrap().release().unwrap();
        assert!(state.sync_failed);
        image = next;
    }
}

#[test]
fn an_inherited_image_must_match_the_uri_and_the_options() {
    let place = Place::file(on_disk(), "");
    let uri = place.uri(1 << 20);
    let image = uri.open(&OpenOptions::default()).unwrap();
    let refused = |uri: &str, read_only: bool| {
        let options = OpenOptions { read_only, ..OpenOptions::default() };
        let inherited = REGISTRY
            .volume(uri)
            .unwrap()
            .open_successor(&options, image.handover().unwrap().prepare().unwrap());
        assert_eq!(inherited.err().map(|error| error.kind()), Some(ErrorKind::InvalidArgument));
    };
    refused(&uri.to_string(), true);
    refused(&format!("{uri}?direct=true"), false);
    refused("mem:1M", false);
}
