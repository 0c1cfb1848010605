//! A worker with a volume of objects, in a directory and in a bucket. It is confined before it opens the volume, whose
//! client has threads.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[cfg(feature = "fault")]
use super::surroundings::Surroundings;
use cleat::backends::REGISTRY;
use cleat_backend::store::{Layout, Source};
use cleat_core::error::ErrorKind;
use cleat_core::space::SpaceUse;
use cleat_worker::protocol::{FromWorker, Start, ToWorker};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_kit::ceph::{BUCKET, shared};
use test_kit::nbd::kernel as nbd;
use test_kit::process::threads;
use test_kit::wait::wait_until;
use test_kit::worker::{Worker, failure, start_message};

pub(super) const SIZE: u64 = 8 << 20;
pub(super) const BLOCK: u32 = 4096;

/// A new volume. The directory is removed with it.
pub(super) struct ObjectVolume {
    pub(super) uri: String,
    directory: tempfile::TempDir,
}

impl ObjectVolume {
    pub(super) fn in_directory() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let store = format!("dir:{}", directory.path().display());
        Self { uri: create(&store), directory }
    }

    fn in_bucket() -> Self {
        Self::in_bucket_at(&shared().s3().0)
    }

    /// The same through another address.
    pub(super) fn in_bucket_at(endpoint: &str) -> Self {
        let directory = tempfile::Builder::new().prefix("system-").tempdir().unwrap();
        let prefix = directory.path().file_name().unwrap().to_str().unwrap();
        let credentials = shared().s3().1;
        let credentials = credentials.display();
        let options = format!("endpoint=http://{endpoint}&credentials_file={credentials}");
        let store = format!("s3://{BUCKET}/{prefix}?{options}");
        Self { uri: create(&store), directory }
    }

    /// Returns the newest slot of the newest epoch, of a volume in a directory. Older ones may be collected.
    fn newest_slot(&self) -> u64 {
        let newest = |path: &Path| {
            let names = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
            let numbers =
                names.filter_map(|name| u64::from_str_radix(name.to_str().unwrap(), 16).ok());
            numbers.max().unwrap()
        };
        let log = self.directory.path().join("v/objects/log");
        newest(&log.join(format!("{:016x}", newest(&log))))
    }

    /// Makes a clone of a volume in a directory. Returns its URI.
    pub(super) fn make_clone(&self) -> String {
        let store = REGISTRY.store(self.uri.strip_suffix("/v").unwrap()).unwrap();
        let connected = store.connect().unwrap();
        let on = || |_, _| std::ops::ControlFlow::Continue(());
        connected.snapshots().unwrap().create("v", "s", &mut on()).unwrap();
        let source = Source { store: store.spec(), name: "v", snapshot: Some("s") };
        let clones = connected.clones().unwrap();
        assert!(clones.create_clone(&source, "clone", &Layout::default(), &mut on()).unwrap());
        store.volume("clone", None).unwrap().to_string()
    }

    /// Returns the directory of the objects, of a volume in a directory.
    pub(super) fn objects(&self) -> PathBuf {
        self.directory.path().join("v/objects")
    }

    pub(super) fn start(&self) -> Start {
        start_message(&self.uri)
    }
}

fn create(store: &str) -> String {
    let store = REGISTRY.store(store).unwrap();
    let made = store.connect().unwrap().create("v", SIZE, &Layout::default());
    assert!(made.unwrap_or_else(|error| panic!("{}", error.report())));
    store.volume("v", None).unwrap().to_string()
}

fn is_served_by_a_confined_process(volume: &ObjectVolume) {
    let (mut worker, ready) = Worker::ready(&volume.uri);
    assert_eq!((ready.size, ready.preferred_block), (SIZE, BLOCK));
    assert!(ready.outlives_worker);
    for status in threads(worker.child.id(), "status") {
        let line = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).unwrap().trim();
        assert_eq!((line("Seccomp:"), line("NoNewPrivs:")), ("2", "1"), "{status}");
        assert_eq!(line("CapEff:"), "0000000000000000", "{status}");
    }
    let sockets = worker.serve(2);
    let data: Vec<u8> = (0..1_u32 << 20).map(|n| (n % 251) as u8).collect();
    assert_eq!(nbd::write(&sockets[0], 12345 * 512, &data), 0);
    assert_eq!(nbd::simple(&sockets[1], nbd::FLUSH, 0, 0), 0);
    assert!(nbd::read(&sockets[1], 12345 * 512, 1 << 20) == data);
    assert_eq!(nbd::simple(&sockets[1], nbd::TRIM, 0, 4 << 20), 0);
    let grown = worker.call(&ToWorker::Resize { size: 2 * SIZE, shrink: false });
    assert_eq!(grown, FromWorker::Size { size: 2 * SIZE });
    assert!(nbd::read(&sockets[0], 2 * SIZE - 4096, BLOCK).iter().all(|byte| *byte == 0));
    worker.send(&ToWorker::Stop, &[]);
    assert!(worker.exit().success(), "{}", worker.log());
    let log = worker.log();
    assert!(log.contains("confinement=[\"single-thread\", "), "confined with one thread: {log}");
    // The worker released the volume: another node can open it at once.
    let other = Start { node: "node-b".into(), mapping_id: "other".into(), ..volume.start() };
    let worker = Worker::launch();
    worker.send_start(&other);
    let FromWorker::Ready(ready) = worker.receive() else { panic!("not ready") };
    assert_eq!(ready.size, 2 * SIZE);
}

#[test]
fn a_volume_in_a_directory_is_served_by_a_confined_process() {
    is_served_by_a_confined_process(&ObjectVolume::in_directory());
}

#[test]
fn a_clone_in_a_directory_is_served_by_a_confined_process() {
    let volume = ObjectVolume::in_directory();
    {
        let (mut worker, sockets) = Worker::serving(&volume.uri, 1);
        assert_eq!(nbd::write(&sockets[0], 0, &[7; BLOCK as usize]), 0);
        worker.send(&ToWorker::Stop, &[]);
        assert!(worker.exit().success(), "{}", worker.log());
    }
    let clone = volume.make_clone();
    let (_worker, sockets) = Worker::serving(&clone, 1);
    assert_eq!(nbd::read(&sockets[0], 0, BLOCK), [7; BLOCK as usize]);
    assert_eq!(nbd::write(&sockets[0], 0, &[8; BLOCK as usize]), 0);
    // The worker may not write there.
    assert_eq!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
    assert_eq!(nbd::read(&sockets[0], 0, BLOCK), [8; BLOCK as usize]);
    // Without its pin, the worker does not see the parent.
    let pins = Path::new(volume.uri.strip_prefix("dir:").unwrap()).join("objects/pin");
    drop((_worker, sockets));
    std::fs::remove_dir_all(pins).unwrap();
    let worker = Worker::launch();
    worker.send_start(&start_message(&clone));
    let (kind, message) = failure(worker.receive());
    assert_eq!(kind, ErrorKind::NotFound, "{message}");
}

/// The page has the amplification while the worker serves and after it has died.
#[test]
fn the_page_of_a_worker_has_the_amplification() {
    let volume = ObjectVolume::in_directory();
    let (worker, sockets) = Worker::serving(&volume.uri, 1);
    let written = |sockets: &[UnixStream], byte: u8| {
        assert_eq!(nbd::write(&sockets[0], 0, &vec![byte; 1 << 20]), 0);
        assert_eq!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
    };
    written(&sockets, 1);
    written(&sockets, 2);
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let is_complete =
        |space: &SpaceUse| (space.written_bytes, space.live_bytes) == (2 << 20, 1 << 20);
    while !is_complete(&worker.page.space()) {
        assert!(std::time::Instant::now() < deadline, "{:?}", worker.page.space());
        std::thread::sleep(Duration::from_millis(50));
    }
    let space = worker.page.space();
    assert!(space.put_bytes > 2 << 20 && space.put_bytes < 3 << 20, "{space:?}");
    assert_eq!(space.object_bytes, 2 << 20, "nothing was collected yet");
    let page = worker.page.clone();
    drop((worker, sockets));
    assert_eq!(page.space(), space);
    // The next worker counts from the beginning.
    let (worker, sockets) = Worker::serving(&volume.uri, 1);
    written(&sockets, 3);
    while worker.page.space().written_bytes != 1 << 20 {
        assert!(std::time::Instant::now() < deadline, "{:?}", worker.page.space());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_volume_in_a_bucket_is_served_by_a_confined_process() {
    is_served_by_a_confined_process(&ObjectVolume::in_bucket());
}

/// Not even the store: a second process makes the connections.
#[cfg(feature = "fault")]
#[test]
fn code_inside_the_worker_of_a_bucket_finds_every_road_closed() {
    let around = Surroundings::new();
    let volume = ObjectVolume::in_bucket();
    let (worker, sockets) = Worker::serving(&volume.uri, 1);
    let store = shared().s3().0;
    for port in [around.port(), store.rsplit_once(':').unwrap().1.parse().unwrap()] {
        let answer = worker.call(&ToWorker::SetFault { plan: around.plan(port) });
        assert_eq!(answer, FromWorker::Done);
    }
    assert_eq!(nbd::write(&sockets[0], 0, &[1; BLOCK as usize]), 0);
}

/// Returns the process that makes the connections of a worker.
fn connecting_process(worker: &Worker) -> u32 {
    let pid = worker.child.id();
    let children = worker.proc(&format!("task/{pid}/children"));
    let children = std::fs::read_to_string(children).unwrap();
    let [child] = *children.split_whitespace().collect::<Vec<_>>() else { panic!("{children:?}") };
    child.parse().unwrap()
}

#[test]
fn the_process_that_connects_is_confined_and_ends_with_its_worker_and_the_worker_with_it() {
    let volume = ObjectVolume::in_bucket();
    let mut worker = Worker::ready(&volume.uri).0;
    let helper = connecting_process(&worker);
    let status = std::fs::read_to_string(format!("/proc/{helper}/status")).unwrap();
    let line = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).unwrap().trim();
    assert_eq!((line("Seccomp:"), line("NoNewPrivs:")), ("2", "1"), "{status}");
    assert_eq!(line("CapEff:"), "0000000000000000", "{status}");
    assert_eq!(line("Name:"), "cleat:connect");
    worker.child.kill().unwrap();
    worker.exit();
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    let has_ended = || {
        let stat = std::fs::read_to_string(format!("/proc/{helper}/stat"));
        stat.map_or(true, |stat| stat.contains(") Z "))
    };
    while !has_ended() {
        assert!(std::time::Instant::now() < deadline, "process {helper} still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut worker = Worker::launch();
    worker.send_start(&Start { resumes: true, ..volume.start() });
    assert!(matches!(worker.receive(), FromWorker::Ready(_)));
    let helper = connecting_process(&worker).cast_signed();
    kill(Pid::from_raw(helper), Signal::SIGKILL).unwrap();
    let status = worker.exit();
    let log = worker.log();
    assert!(status.code() == Some(1) && log.contains("has ended, so this one ends"), "{log}");
}

/// The length of a file of a cache.
pub(super) const CACHE_FILE_BYTES: u64 = 32 << 20;

pub(super) fn cache_files(directory: &Path, count: usize) -> Vec<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    (0..count).map(|number| options.open(directory.join(number.to_string())).unwrap()).collect()
}

/// Starts a worker with a cache in files, and one connection.
pub(super) fn start_with_cache(uri: &str, files: &[File]) -> (Worker, Vec<UnixStream>) {
    let mut worker = Worker::launch();
    let start = Start {
        cache_files: files.len(),
        cache_file_bytes: CACHE_FILE_BYTES,
        ..start_message(uri)
    };
    let descriptors: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    worker.send_start_with(&start, &descriptors);
    let answer = worker.receive();
    assert!(matches!(answer, FromWorker::Ready(_)), "{answer:?}");
    let sockets = worker.serve(1);
    (worker, sockets)
}

/// What the n-th write of a round has in its block.
pub(super) fn stamp(round: u64, number: u64) -> Vec<u8> {
    [round.to_le_bytes(), number.to_le_bytes()].concat().repeat(BLOCK as usize / 16)
}

/// The worker is killed while it has 32 writes in flight, each to a block of its own, of which some are answered.
/// `CLEAT_TEST_KILLS` sets the number of rounds. `cache` has the files of the cache.
fn keeps_acknowledged_writes(volume: &ObjectVolume, rounds: u64, cache: &[File]) {
    const WRITES: u64 = 32;
    let asked = std::env::var("CLEAT_TEST_KILLS").ok().and_then(|text| text.parse().ok());
    let rounds = asked.unwrap_or(rounds);
    // The rounds whose content each block may have.
    let mut allowed = vec![vec![0_u64]; WRITES as usize];
    for round in 1..=rounds {
        let (mut worker, sockets) = start_with_cache(&volume.uri, cache);
        for (number, allowed) in (0..).zip(&mut allowed) {
            let found = nbd::read(&sockets[0], number * u64::from(BLOCK), BLOCK);
            let content = |round: u64| match round {
                0 => vec![0; BLOCK as usize],
                round => stamp(round, number),
            };
            allowed.retain(|round| content(*round) == found);
            assert_eq!(allowed.len(), 1, "round {round}, block {number}: {:?}", &found[..16]);
        }
        for number in 0..WRITES {
            let data = stamp(round, number);
            nbd::send(&sockets[0], nbd::WRITE, number, number * u64::from(BLOCK), BLOCK, &data);
            allowed[number as usize].push(round);
        }
        for _ in 0..(round * 7) % WRITES {
            let (number, error) = nbd::reply(&sockets[0]);
            assert_eq!(error, 0);
            allowed[number as usize] = vec![round];
        }
        worker.child.kill().unwrap();
        worker.exit();
    }
}

#[test]
fn acknowledged_writes_survive_the_death_of_the_worker_of_a_directory() {
    keeps_acknowledged_writes(&ObjectVolume::in_directory(), 50, &[]);
}

#[test]
fn acknowledged_writes_survive_the_death_of_a_worker_with_a_cache() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cache = cache_files(directory.path(), 2);
    keeps_acknowledged_writes(&ObjectVolume::in_directory(), 50, &cache);
}

#[test]
fn acknowledged_writes_survive_the_death_of_the_worker_of_a_bucket() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    keeps_acknowledged_writes(&ObjectVolume::in_bucket(), 5, &cache_files(directory.path(), 2));
}

/// Writes that no flush covers are acknowledged when they are in the tail file, and many of them share a put. The next
/// worker of the mapping has them. They are given up when another client has taken the volume over.
#[test]
fn writes_without_a_flush_survive_the_worker_in_the_tail_file() {
    const WRITES: u64 = 32;
    const ROUNDS: u64 = 10;
    let volume = ObjectVolume::in_directory();
    let tail = tempfile::tempfile().unwrap();
    let tail_bytes = REGISTRY.volume(&volume.uri).unwrap().spec().tail_bytes();
    tail.set_len(tail_bytes).unwrap();
    let start = Start { tail_bytes, ..volume.start() };
    let launch = |start: &Start| {
        let worker = Worker::launch();
        worker.send_start_with(start, &[tail.as_fd()]);
        let answer = worker.receive();
        (worker, answer)
    };
    let serve = |start: &Start| {
        let (mut worker, answer) = launch(start);
        assert!(matches!(answer, FromWorker::Ready(_)), "{answer:?}");
        let sockets = worker.serve(1);
        (worker, sockets)
    };
    let end = |mut worker: Worker| {
        worker.child.kill().unwrap();
        worker.exit();
    };
    let resumed = Start { resumes: true, ..start.clone() };
    for round in 1..=ROUNDS {
        let (worker, sockets) = serve(if round == 1 { &start } else { &resumed });
        for number in 0..if round == 1 { 0 } else { WRITES } {
            let found = nbd::read(&sockets[0], number * u64::from(BLOCK), BLOCK);
            assert!(found == stamp(round - 1, number), "round {round}, block {number}");
        }
        let before = volume.newest_slot();
        for number in 0..WRITES {
            let data = stamp(round, number);
            assert_eq!(nbd::write(&sockets[0], number * u64::from(BLOCK), &data), 0);
        }
        let puts = volume.newest_slot() - before;
        assert!(puts < WRITES / 4, "{WRITES} writes took {puts} puts");
        end(worker);
    }
    let (worker, sockets) = serve(&resumed);
    assert_eq!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
    assert_eq!(nbd::write(&sockets[0], 0, &[9; BLOCK as usize]), 0);
    end(worker);
    let other = Start { node: "node-b".into(), mapping_id: "other".into(), ..volume.start() };
    let mut second = Worker::launch();
    second.send_start(&Start { take_over: true, ..other });
    assert!(matches!(second.receive(), FromWorker::Ready(_)));
    let taken = second.serve(1);
    for number in 1..WRITES {
        let found = nbd::read(&taken[0], number * u64::from(BLOCK), BLOCK);
        assert!(found == stamp(ROUNDS, number), "block {number} was flushed");
    }
    assert_eq!(nbd::write(&taken[0], 0, &[3; BLOCK as usize]), 0);
    // The device of the mapping fails, and nothing of it reaches the history of the other client.
    let (worker, sockets) = serve(&resumed);
    assert_ne!(nbd::write(&sockets[0], 4096, &[4; BLOCK as usize]), 0);
    end(worker);
    second.send(&ToWorker::Stop, &[]);
    assert!(second.exit().success());
    let (_worker, answer) = launch(&Start { take_over: true, ..start });
    let (kind, message) = failure(answer);
    assert_eq!(kind, ErrorKind::Fenced, "{message}");
    assert!(message.contains("4096 bytes of acknowledged writes"), "{message}");
    let (_worker, sockets) = Worker::serving(&volume.uri, 1);
    assert!(nbd::read(&sockets[0], 0, BLOCK) == [3; BLOCK as usize]);
}

/// Stops a process. Its threads go on until the one has run that gets the signal, so this waits until all are stopped.
fn stop(pid: Pid) {
    kill(pid, Signal::SIGSTOP).unwrap();
    let is_stopped = |stat: &String| stat.rsplit(") ").next().unwrap().starts_with('T');
    wait_until("all threads are stopped", || {
        threads(pid.as_raw().unsigned_abs(), "stat").iter().all(is_stopped)
    });
}

/// A worker is stopped while it has writes in flight, another node takes the volume over, and the worker continues.
fn a_stopped_writer_is_fenced(volume: &ObjectVolume, has_tail: bool) {
    let tail = tempfile::tempfile().unwrap();
    let all = REGISTRY.volume(&volume.uri).unwrap().spec().tail_bytes();
    tail.set_len(all).unwrap();
    let tail_bytes = if has_tail { all } else { 0 };
    let descriptors = if has_tail { vec![tail.as_fd()] } else { Vec::new() };
    let mut worker = Worker::launch();
    worker.send_start_with(&Start { tail_bytes, ..volume.start() }, &descriptors);
    assert!(matches!(worker.receive(), FromWorker::Ready(_)));
    let sockets = worker.serve(1);
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
    assert_eq!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
    let pid = Pid::from_raw(worker.child.id().cast_signed());
    stop(pid);
    let stopped = std::time::Instant::now();
    for number in 0..16 {
        let offset = number * u64::from(BLOCK);
        nbd::send(&sockets[0], nbd::WRITE, number, offset, BLOCK, &[2; BLOCK as usize]);
    }
    let stranger = Start { node: "node-b".into(), mapping_id: "other".into(), ..volume.start() };
    let refused = Worker::launch();
    refused.send_start(&stranger);
    let (kind, message) = failure(refused.receive());
    assert_eq!(kind, ErrorKind::InUse, "{message}");
    assert!(message.contains("node-a") && message.contains("0123abcd"), "{message}");
    let mut second = Worker::launch();
    second.send_start(&Start { take_over: true, ..stranger.clone() });
    let answer = second.receive();
    assert!(matches!(answer, FromWorker::Ready(_)), "{answer:?}");
    let taken = second.serve(1);
    assert_eq!(nbd::write(&taken[0], 4096, &[3; 4096]), 0);
    // A shorter time is not noticed.
    std::thread::sleep(Duration::from_secs(3).saturating_sub(stopped.elapsed()));
    kill(pid, Signal::SIGCONT).unwrap();
    for _ in 0..16 {
        let (number, error) = nbd::reply(&sockets[0]);
        assert_ne!(error, 0, "write {number} was acknowledged");
    }
    assert_eq!(worker.receive(), FromWorker::Fenced);
    assert_ne!(nbd::write(&sockets[0], 0, &[4; 4096]), 0);
    assert_ne!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
    let read = nbd::read(&taken[0], 0, 16 * BLOCK);
    assert!(read[..4096] == [1; 4096] && read[4096..8192] == [3; 4096]);
    assert!(read[8192..].iter().all(|byte| *byte == 0));
    // A worker that resumes the device of the first one serves nothing, because the users of the device rely on what
    // they have read.
    drop(worker);
    let resuming = Worker::launch();
    resuming.send_start(&Start { resumes: true, take_over: true, ..volume.start() });
    let answer = resuming.receive();
    assert!(matches!(answer, FromWorker::Ready(_)), "{answer:?}");
    assert_eq!(nbd::write(&taken[0], 8192, &[5; 4096]), 0, "the second one continues");
}

#[test]
fn a_stopped_writer_of_a_directory_is_fenced_by_a_take_over() {
    for has_tail in [false, true] {
        a_stopped_writer_is_fenced(&ObjectVolume::in_directory(), has_tail);
    }
}

#[test]
fn a_stopped_writer_of_a_bucket_is_fenced_by_a_take_over() {
    for has_tail in [false, true] {
        a_stopped_writer_is_fenced(&ObjectVolume::in_bucket(), has_tail);
    }
}

/// Writes wait while the store does not answer, and none fails or is lost.
#[test]
fn an_outage_of_the_store_delays_writes() {
    let volume = ObjectVolume::in_bucket();
    let (_worker, sockets) = Worker::serving(&volume.uri, 1);
    shared().tell("pause rgw");
    for number in 0..8 {
        let offset = number * u64::from(BLOCK);
        nbd::send(&sockets[0], nbd::WRITE, number, offset, BLOCK, &stamp(1, number));
    }
    std::thread::sleep(Duration::from_secs(1));
    shared().tell("resume rgw");
    for _ in 0..8 {
        assert_eq!(nbd::reply(&sockets[0]).1, 0);
    }
    for number in 0..8 {
        assert!(nbd::read(&sockets[0], number * u64::from(BLOCK), BLOCK) == stamp(1, number));
    }
}

/// The worker of a directory has no network, and sees no directory but that of its objects.
#[cfg(feature = "fault")]
#[test]
fn code_inside_the_worker_of_a_directory_finds_every_road_closed() {
    let around = Surroundings::new();
    let volume = ObjectVolume::in_directory();
    let (worker, sockets) = Worker::serving(&volume.uri, 1);
    let answer = worker.call(&ToWorker::SetFault { plan: around.plan(around.port()) });
    assert_eq!(answer, FromWorker::Done);
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
}
