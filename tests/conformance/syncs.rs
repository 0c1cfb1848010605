//! Failures to make data durable: the kernel reports a lost page once for each open file description, and
//! every request that depends on the page must fail.
//!
//! The volume is a loop device whose backing file is on a full tmpfs. Writes reach the page cache of the loop
//! device, and the kernel loses their pages when it writes them back.

use std::path::Path;
use std::process::Command;

use cleat::backends::REGISTRY;
use cleat_backend::{Image, OpenOptions};
use cleat_core::request::{Flags, IoError, Op};

use crate::checks::pattern;
use crate::client::{Client, Job, LocalClient, job, write};
use crate::places::needs_root;
use test_kit::temp::on_disk;

/// A loop device that has room for its first [`FullDevice::ROOM`] bytes only.
struct FullDevice {
    directory: tempfile::TempDir,
    device: String,
}

impl FullDevice {
    const ROOM: u64 = 1 << 20;
    const SIZE: u64 = 16 << 20;

    fn new() -> Self {
        needs_root();
        let directory = tempfile::tempdir_in(on_disk()).unwrap();
        let room = format!("size={}", Self::ROOM);
        run("mount", &["-t", "tmpfs", "-o", &room, "cleat-test", text(directory.path())]);
        let file = directory.path().join("file");
        std::fs::File::create(&file).unwrap().set_len(Self::SIZE).unwrap();
        let device = run("losetup", &["--find", "--show", text(&file)]);
        Self { directory, device }
    }

    fn open(&self, options: &OpenOptions) -> std::sync::Arc<dyn Image> {
        REGISTRY.volume(&format!("file:{}", self.device)).unwrap().open(options).unwrap()
    }

    /// Returns writes of 64 KiB each to places without room, which no page has at present.
    fn lost_writes(count: u64, flags: Flags) -> Vec<Job> {
        let offset = |number| Self::ROOM + (number << 16);
        (0..count).map(|number| write(offset(number), &pattern(1, 65536)).with(flags)).collect()
    }
}

impl Drop for FullDevice {
    fn drop(&mut self) {
        let directory = text(self.directory.path());
        for (command, arguments) in
            [("losetup", ["--detach", &self.device]), ("umount", ["--lazy", directory])]
        {
            let _ = Command::new(command).args(arguments).status();
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn run(command: &str, arguments: &[&str]) -> String {
    let output = Command::new(command).args(arguments).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Fills the store, so that each later write of another page is lost when it is written back.
fn fill(client: &mut dyn Client) {
    let room = FullDevice::ROOM;
    let all = (0..room / 65536).map(|n| write(n << 16, &pattern(2, 65536))).collect();
    assert!(client.run(all).iter().all(|done| done.result.is_ok()));
    client.one(job(Op::Flush, 0, 0));
}

const FUA: Flags = Flags { fua: true, no_hole: false, fast_zero: false };

#[test]
fn all_concurrent_flushes_report_a_lost_page_and_all_later_ones_too() {
    let device = FullDevice::new();
    let image = device.open(&OpenOptions::default());
    let mut clients = [LocalClient::new(&*image, 64), LocalClient::new(&*image, 64)];
    let client: &mut dyn Client = &mut clients[0];
    fill(client);
    let writes = client.run(FullDevice::lost_writes(16, Flags::default()));
    assert!(writes.iter().all(|done| done.result.is_ok()), "the page cache has room: {writes:?}");
    let flushes = client.run((0..16).map(|_| job(Op::Flush, 0, 0)).collect());
    let results: Vec<_> = flushes.into_iter().map(|done| done.result).collect();
    assert_eq!(results, vec![Err(IoError::Broken); 16]);
    for client in &mut clients {
        let client: &mut dyn Client = client;
        assert_eq!(client.try_one(job(Op::Flush, 0, 0)), Err(IoError::Broken));
        let durable = write(0, &pattern(3, 4096)).with(FUA);
        assert_eq!(client.try_one(durable), Err(IoError::Broken), "a durable write, too");
        client.one(write(0, &pattern(3, 4096)));
        assert_eq!(client.read(0, 4096), pattern(3, 4096));
    }
}

#[test]
fn no_concurrent_durable_write_succeeds_with_a_lost_page() {
    let device = FullDevice::new();
    let image = device.open(&OpenOptions::default());
    let client: &mut dyn Client = &mut LocalClient::new(&*image, 64);
    fill(client);
    let writes = client.run(FullDevice::lost_writes(16, FUA));
    let results: Vec<_> = writes.into_iter().map(|done| done.result).collect();
    assert_eq!(results, vec![Err(IoError::Broken); 16]);
}
