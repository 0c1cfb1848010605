//! Durability of acknowledged requests: what FLUSH and FUA have covered survives a power cut.
//!
//! The volume is on dm-log-writes, which logs a write only when a later flush covers it, or when it has FUA.
//! The entries of the log up to a mark are therefore the content of a disk whose power failed at the mark and
//! whose cache lost everything that was not flushed. Each test also runs with a volume that leaves out its
//! syncs (`fault.drop_syncs`), and must detect the loss.

mod write_log;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use libtest_mimic::Trial;
use test_kit::nbd::wire::{self, Request};

use self::write_log::WriteLog;
use crate::fixture::{Node, TIMEOUT, cleat_ok, shell};
use crate::trial;

const SIZE: &str = "64M";
const SOCKET: &str = "/tmp/durability.sock";

/// The mount point of the file system on the store, and the file there.
const BELOW: &str = "/mnt/below";
const FILE: &str = "/mnt/below/volume";

/// NBD_CMD_FLAG_FUA.
const FUA: u16 = 1;

/// The offset and the content of the write that a FLUSH follows, and of the write with FUA.
const FLUSHED: (u64, u8) = (64 << 10, 0xa5);
const FORCED: (u64, u8) = (8 << 20, 0x5a);
const LENGTH: usize = 16 << 10;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("durability_of_flush_and_fua_with_a_power_cut", || {
            for volume in MappedVolume::ALL {
                assert_eq!(survivors(volume, ""), [true, true], "{volume:?}");
            }
        }),
        trial("durability_missing_syncs_are_detected", || {
            for volume in MappedVolume::ALL {
                let lost = survivors(volume, "fault.drop_syncs=true");
                assert_eq!(lost, [false, false], "{volume:?}");
            }
        }),
        trial("durability_of_fsync_on_a_file_system_with_a_power_cut", || {
            assert!(file_survives(""));
            assert!(!file_survives("?fault.drop_syncs=true"));
        }),
    ]
}

/// The kinds of volumes that make data durable in different ways.
#[derive(Debug, Clone, Copy, PartialEq)]
enum MappedVolume {
    Device,
    DirectDevice,
    File,
    DirectFile,
}

impl MappedVolume {
    const ALL: [Self; 4] = [Self::Device, Self::DirectDevice, Self::File, Self::DirectFile];

    fn is_file(self) -> bool {
        matches!(self, Self::File | Self::DirectFile)
    }

    fn uri(self, store: &WriteLog, faults: &str) -> String {
        let place = if self.is_file() { FILE } else { store.device() };
        let direct = matches!(self, Self::DirectDevice | Self::DirectFile);
        format!("fault:file:{place}?direct={direct}&{faults}").trim_end_matches('&').to_owned()
    }
}

/// Writes to a volume, once followed by FLUSH and once with FUA. Returns whether each write is on the store
/// after a power cut that follows its acknowledgement.
fn survivors(volume: MappedVolume, faults: &str) -> [bool; 2] {
    let store = WriteLog::new(SIZE, |raw| {
        if volume.is_file() {
            // A sparse file, so that a sync must also make the allocation durable.
            shell(&format!(
                "mkfs.ext4 -q {raw}; mkdir -p {BELOW}; mount {raw} {BELOW}
                 truncate -s 32M {FILE}; umount {BELOW}"
            ));
        }
    });
    if volume.is_file() {
        // No commit of the journal on its own: it would make data durable without a sync.
        shell(&format!("mount -o commit=600 {} {BELOW}", store.device()));
    }
    let server = Server::start(&volume.uri(&store, faults));
    let mut client = server.connect();
    request(&mut client, 0, wire::WRITE, FLUSHED.0, &[FLUSHED.1; LENGTH]);
    request(&mut client, 0, wire::FLUSH, 0, &[]);
    store.mark("flushed");
    request(&mut client, FUA, wire::WRITE, FORCED.0, &[FORCED.1; LENGTH]);
    store.mark("forced");
    drop((client, server));
    if volume.is_file() {
        // The kernel closes the files of a ring after the end of the process (io_ring_exit_work in io_uring).
        let unmounted = format!("until umount {BELOW} 2> /dev/null; do sleep 0.1; done");
        shell(&format!("timeout 60 bash -c '{unmounted}'"));
    }
    let log = store.finish();
    [("flushed", FLUSHED), ("forced", FORCED)].map(|(mark, (offset, byte))| {
        let image = log.image_at(mark);
        let content = read(&image, volume, offset);
        let found = content == [byte; LENGTH];
        assert!(found || content == [0; LENGTH], "{volume:?}: a part of the write is durable");
        found
    })
}

/// Reads the volume from the image of its store.
fn read(image: &Path, volume: MappedVolume, offset: u64) -> Vec<u8> {
    let mut content = vec![0; LENGTH];
    if !volume.is_file() {
        File::open(image).unwrap().read_exact_at(&mut content, offset).unwrap();
        return content;
    }
    // Mounting replays the journal, as after a power cut.
    shell(&format!("mount -o loop {} {BELOW}", image.display()));
    File::open(FILE).unwrap().read_exact_at(&mut content, offset).unwrap();
    shell(&format!("umount {BELOW}"));
    content
}

/// Sends a request and waits for its reply, which must be success.
fn request(client: &mut UnixStream, flags: u16, command: u16, offset: u64, data: &[u8]) {
    let length = u32::try_from(data.len()).unwrap();
    let request = Request { flags, ..Request::new(command, 1, offset, length) };
    let mut bytes = request.encode().to_vec();
    bytes.extend(data);
    std::io::Write::write_all(client, &bytes).unwrap();
    assert_eq!(wire::read_reply(client), (1, 0));
}

/// A `cleat serve`, which is killed when the value is dropped: nothing is synced at its end.
struct Server(Child);

impl Server {
    fn start(uri: &str) -> Self {
        let _ = std::fs::remove_file(SOCKET);
        let mut command = Command::new("./cleat");
        command.args(["serve", uri, "--socket", SOCKET]).stdin(Stdio::null());
        let mut child = command.stdout(Stdio::piped()).spawn().expect("cleat serve starts");
        // It prints its URI as soon as clients can connect.
        let mut line = String::new();
        let output = child.stdout.as_mut().expect("it is a pipe");
        BufReader::new(output).read_line(&mut line).expect("the output is text");
        assert!(line.starts_with("nbd+unix:"), "cleat serve has ended: {line:?}");
        Self(child)
    }

    fn connect(&self) -> UnixStream {
        let mut stream = UnixStream::connect(SOCKET).expect("the server accepts clients");
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        wire::handshake(&mut stream);
        stream
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes a file to a file system on a mapped device, and calls fsync. Returns whether the file is there after
/// a power cut of the store right after that.
fn file_survives(faults: &str) -> bool {
    let node = Node::start();
    let store = WriteLog::new(SIZE, |_| ());
    let uri = format!("fault:file:{}{faults}", store.device());
    let device = cleat_ok(&["map", &uri, "--name", "durable"]);
    shell(&format!(
        "mkfs.ext4 -q {device}; mkdir -p /mnt/durable; mount -o commit=600 {device} /mnt/durable
         head -c 1M /dev/urandom > /mnt/durable/file; sync /mnt/durable/file"
    ));
    store.mark("synced");
    let sum = |path: &str| shell(&format!("sha256sum < {path} || true"));
    let written = sum("/mnt/durable/file");
    shell("umount /mnt/durable");
    cleat_ok(&["unmap", "durable"]);
    drop(node);
    let log = store.finish();
    let image = log.image_at("synced");
    // Without any sync there is not even a file system.
    let mounted = shell(&format!("mount -o loop {} /mnt/durable || echo no", image.display()));
    if mounted.ends_with("no") {
        return false;
    }
    let found = sum("/mnt/durable/file");
    shell("umount /mnt/durable");
    found == written
}
