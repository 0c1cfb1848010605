//! `cargo bench --bench object_peer [-- sequential|random]`: volumes of objects in the bucket of a real Ceph cluster, of which the benchmark starts
//! one. Random writes of 4 KiB at depth 32 with a flush each second, against s3backer on the same bucket, if it is
//! installed. Sequential writes and cold reads, against curl, which puts and gets objects of 8 MiB.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark measures real time, prints figures, and fails by panicking"
)]

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cleat::backends::REGISTRY;
use cleat_backend::store::{Layout, Removal};
use cleat_backend::uri::StoreUri;
use cleat_worker::protocol::ToWorker;
use test_kit::ceph::{BUCKET, Cluster};
use test_kit::worker::Worker;

#[path = "common/objects.rs"]
mod objects;
#[path = "common/random.rs"]
mod random;
#[path = "common/reads.rs"]
mod reads;

use objects::{BLOCK, SECONDS, SIZE, fill, load, noise, offset, start};
use random::Random;
use reads::read_in_order;

const DEPTH: u64 = 32;
const ROUNDS: u64 = 3;
/// What the sequential load writes and reads, in MiB.
const LENGTH: u64 = 512;
/// The objects of the same length together.
const OBJECTS: u64 = LENGTH / 8;

/// The forms of s3backer: what is different, a name, and arguments. It answers fsync(2) at once, without a write to the
/// store (`fuse_op_fsync` in its `fuse_ops.c`), so what a flush promises holds for synchronous writes only.
const S3BACKERS: [(&str, &str, &[&str]); 2] = [
    ("", "default", &[]),
    (" with synchronous writes", "sync", &["--blockCacheSync", "--blockCacheWriteDelay=0"]),
];

/// Loads the bucket, in the round of this number.
type Load = fn(&Bucket, u64);

fn main() {
    let only = std::env::args().find(|argument| argument == "sequential" || argument == "random");
    let loads: [(&str, Load); 2] = [("sequential", Bucket::sequential), ("random", Bucket::random)];
    for (name, load) in loads {
        if only.as_deref().is_some_and(|only| only != name) {
            continue;
        }
        // The disk of a cluster has 4 GiB, and the gateway keeps the data of removed objects for two hours.
        let cluster = Cluster::start_on_disk();
        let (endpoint, keys) = cluster.s3();
        let bucket = Bucket { endpoint, keys, directory: tempfile::tempdir().unwrap() };
        (0..ROUNDS).for_each(|round| load(&bucket, round));
    }
}

/// The bucket of the cluster.
struct Bucket {
    endpoint: String,
    /// The file with the keys, as AWS has them.
    keys: PathBuf,
    directory: tempfile::TempDir,
}

impl Bucket {
    fn random(&self, round: u64) {
        for (what, has_tail) in [("durable", false), ("tail file", true)] {
            let (store, name) = self.volume(&format!("random-{round}-{has_tail}"));
            let uri = store.volume(&name, None).unwrap().to_string();
            let (worker, sockets, _tail) = start(&uri, has_tail);
            println!("random writes, {what}: {}", load(&sockets[0], DEPTH));
            end(worker, &store, &name);
        }
        for (what, name, arguments) in S3BACKERS {
            match self.s3backer(&format!("s3backer-{name}-{round}"), arguments) {
                Some(peer) => println!("random writes, s3backer{what}: {}", peer.load()),
                None => println!("s3backer is not installed: apt-get install s3backer"),
            }
        }
    }

    fn sequential(&self, round: u64) {
        println!("curl: {:.0} MiB/s in puts of 8 MiB, 4 at a time", self.curl(round, "put"));
        let (store, name) = self.volume(&format!("sequential-{round}"));
        let uri = store.volume(&name, None).unwrap().to_string();
        let (mut worker, sockets, _tail) = start(&uri, true);
        println!("volume: {:.0} MiB/s in writes of 1 MiB, 4 at a time", fill(&sockets[0]));
        worker.send(&ToWorker::Stop, &[]);
        assert!(worker.exit().success());
        println!("curl: {:.0} MiB/s in gets of 8 MiB, 4 at a time", self.curl(round, "get"));
        let (worker, sockets, _tail) = start(&uri, true);
        let rate = read_in_order(&sockets[0], LENGTH, 4);
        println!("volume: {rate:.0} MiB/s in reads of 1 MiB, 4 at a time");
        end(worker, &store, &name);
    }

    /// Creates a volume in a place of its own.
    fn volume(&self, name: &str) -> (StoreUri, String) {
        let (endpoint, keys) = (&self.endpoint, self.keys.display());
        let uri = format!("s3://{BUCKET}/bench?endpoint=http://{endpoint}&credentials_file={keys}");
        let store = REGISTRY.store(&uri).unwrap();
        store.connect().unwrap().create(name, SIZE, &Layout::default()).unwrap();
        (store, name.to_owned())
    }

    /// The two keys.
    fn pair(&self) -> String {
        let text = fs::read_to_string(&self.keys).unwrap();
        let value = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_once('=').unwrap().1.trim().to_owned()
        };
        format!("{}:{}", value("aws_access_key_id"), value("aws_secret_access_key"))
    }

    /// Moves 512 MiB, with 4 transfers at a time. Returns MiB per second.
    fn curl(&self, round: u64, what: &str) -> f64 {
        let data = self.directory.path().join("data");
        fs::write(&data, noise()).unwrap();
        // In a file, so that the keys are in no argument.
        let mut config = format!("user = {}\naws-sigv4 = \"aws:amz:us-east-1:s3\"\n", self.pair());
        config += "header = \"x-amz-content-sha256: UNSIGNED-PAYLOAD\"\n";
        for number in 0..OBJECTS {
            let url = format!("http://{}/{BUCKET}/curl/{round}/{number}", self.endpoint);
            config += &format!("url = \"{url}\"\n");
            config += &match what {
                "put" => format!("upload-file = \"{}\"\n", data.display()),
                _ => "output = \"/dev/null\"\n".to_owned(),
            };
        }
        let began = Instant::now();
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--fail", "--parallel", "--parallel-max", "4"]);
        let mut curl = curl.args(["--config", "-"]).stdin(Stdio::piped()).spawn().unwrap();
        curl.stdin.take().unwrap().write_all(config.as_bytes()).unwrap();
        assert!(curl.wait().unwrap().success());
        LENGTH as f64 / began.elapsed().as_secs_f64()
    }

    fn s3backer(&self, name: &str, arguments: &[&str]) -> Option<S3backer> {
        let keys = self.directory.path().join("s3backer.keys");
        let mut file = OpenOptions::new();
        let mut file =
            file.write(true).create(true).truncate(true).mode(0o600).open(&keys).unwrap();
        file.write_all(self.pair().as_bytes()).unwrap();
        let mount = self.directory.path().join(name);
        fs::create_dir(&mount).unwrap();
        let child = Command::new("s3backer")
            .args(["-f", "--quiet", "--authVersion=aws4", "--force"])
            .args(["--blockSize=4k", "--size=1g"])
            .args(arguments)
            .arg(format!("--prefix={name}/"))
            .arg(format!("--accessFile={}", keys.display()))
            .arg(format!("--baseURL=http://{}/", self.endpoint))
            .arg(BUCKET)
            .arg(&mount)
            .stdout(Stdio::null())
            .spawn();
        let child = child.ok()?;
        let file = mount.join("file");
        let deadline = Instant::now() + Duration::from_secs(30);
        while !file.exists() {
            assert!(Instant::now() < deadline, "s3backer has mounted nothing");
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(S3backer { child, mount })
    }
}

/// A mounted s3backer. Its cache has 1000 blocks, which 20 threads write back.
struct S3backer {
    child: Child,
    mount: PathBuf,
}

impl S3backer {
    /// Writes at random with 32 threads, and syncs each second. The unmount, which writes the cache back, counts, too.
    fn load(self) -> String {
        let file = OpenOptions::new().read(true).write(true).open(self.mount.join("file")).unwrap();
        let (writes, began) = (AtomicU64::new(0), Instant::now());
        let is_over = || began.elapsed() >= Duration::from_secs(SECONDS);
        let (flushes, longest) = std::thread::scope(|scope| {
            for number in 1..=DEPTH {
                let (file, writes) = (&file, &writes);
                scope.spawn(move || {
                    let mut random = Random(number * 0x9e37_79b9);
                    let mut data = vec![7; BLOCK as usize];
                    while !is_over() {
                        data[..8].copy_from_slice(&random.next().to_le_bytes());
                        file.write_all_at(&data, offset(&mut random)).unwrap();
                        writes.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            sync_each_second(&file, is_over)
        });
        drop((file, self));
        let rate = writes.into_inner() as f64 / began.elapsed().as_secs_f64();
        format!("{rate:.0} writes/s, {flushes} flushes, the longest in {longest:.0?}")
    }
}

impl Drop for S3backer {
    /// Ends the process, which writes its cache back first.
    fn drop(&mut self) {
        let ended = Command::new("umount").arg(&self.mount).status();
        assert!(ended.unwrap().success(), "{} stays mounted", self.mount.display());
        let _ = self.child.wait();
    }
}

fn sync_each_second(file: &File, is_over: impl Fn() -> bool) -> (u64, Duration) {
    let (mut flushes, mut longest) = (0, Duration::ZERO);
    while !is_over() {
        std::thread::sleep(Duration::from_secs(1));
        let since = Instant::now();
        file.sync_all().unwrap();
        longest = longest.max(since.elapsed());
        flushes += 1;
    }
    (flushes, longest)
}

/// Stops a worker and removes its volume.
fn end(mut worker: Worker, store: &StoreUri, name: &str) {
    worker.send(&ToWorker::Stop, &[]);
    assert!(worker.exit().success());
    let on = &mut |_, _| std::ops::ControlFlow::Continue(());
    store.connect().unwrap().remove(name, Removal::Now, on).unwrap();
}
