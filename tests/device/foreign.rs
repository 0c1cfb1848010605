//! What happens to a volume outside of cleat while no worker serves it: a disk that comes back under the name
//! of another one, and the kernel's own RBD client, which knows no claim.

use libtest_mimic::Trial;
use test_kit::ceph::{ID, POOL};

use crate::fixture::{Node, cleat, cleat_ok, shell, signal, status};
use crate::rbd::{cluster, image, wait_until};
use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("another_disk_under_the_same_name_is_fenced", disk),
        trial("rbd_writes_of_the_kernel_client_fence_the_image", kernel_client),
    ]
}

/// Writes a block of `byte` to a block device, past the page cache.
fn write(device: &str, byte: u8) {
    shell(&format!(
        "head -c 4096 /dev/zero | tr '\\0' '\\{byte:o}' |
         dd of={device} bs=4096 count=1 oflag=direct iflag=fullblock status=none"
    ));
}

/// The first byte of a block device, as `od` prints it.
fn first_byte(device: &str) -> String {
    shell(&format!("dd if={device} bs=4096 count=1 iflag=direct status=none | od -An -tu1 -N1"))
        .trim()
        .to_owned()
}

/// Maps a volume such that requests fail after a few seconds if no worker will serve them again.
fn map(uri: &str, name: &str) -> String {
    cleat_ok(&["map", uri, "--name", name, "--dead-connection-timeout", "5s"])
}

/// Kills the daemon and the worker of `name`, so that nothing serves the volume.
fn kill_both(node: &mut Node, name: &str) {
    let worker = status(name)["worker_pid"].as_u64().expect("a worker");
    node.kill();
    signal("KILL", u32::try_from(worker).expect("a pid"));
}

/// Waits until the mapping is fenced with this reason, and its device fails reads and writes.
fn wait_until_fenced(name: &str, device: &str, reason: &str) {
    wait_until("the mapping is fenced", || status(name)["fenced"] == true);
    let shown = status(name);
    assert!(shown["message"].as_str().is_some_and(|message| message.contains(reason)), "{shown}");
    for access in [format!("if={device} of=/dev/null iflag=direct"), {
        format!("if=/dev/zero of={device} oflag=direct")
    }] {
        shell(&format!("if timeout 60 dd {access} bs=4096 count=1; then exit 1; fi"));
    }
}

/// A disk of scsi_debug, which the kernel removes and adds again as it does with an unplugged disk.
struct Disk;

impl Disk {
    fn load() -> Self {
        shell("modprobe scsi_debug dev_size_mb=16 add_host=1");
        Self
    }

    fn path() -> Option<String> {
        let found = shell(
            "grep -l scsi_debug /sys/block/*/device/model 2>/dev/null | cut -d / -f 4 || true",
        );
        (!found.is_empty()).then(|| format!("/dev/{found}"))
    }

    fn present(&self) -> String {
        wait_until("the disk is there", || {
            Self::path().is_some_and(|path| std::path::Path::new(&path).exists())
        });
        Self::path().expect("it is there")
    }

    /// Returns the path of the new disk.
    fn replace(&self) -> String {
        let hosts = "/sys/bus/pseudo/drivers/scsi_debug/add_host";
        shell(&format!("echo -1 > {hosts}"));
        wait_until("the disk is gone", || Self::path().is_none());
        shell(&format!("echo 1 > {hosts}"));
        self.present()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        shell("rmmod scsi_debug || true");
    }
}

fn disk() {
    let disk = Disk::load();
    let path = disk.present();
    let mut node = Node::start();
    let uri = format!("file:{path}");
    let device = map(&uri, "disk");
    write(&device, 1);
    kill_both(&mut node, "disk");
    let other = disk.replace();
    assert_eq!(other, path, "the new disk has the name of the old one");
    write(&other, 2);
    node.restart();
    wait_until_fenced("disk", &device, "was replaced");
    assert_eq!(first_byte(&other), "2", "the other disk was written");

    // After a forced unmap it is a volume like any other.
    cleat_ok(&["unmap", "--force", "disk"]);
    let device = cleat_ok(&["map", &uri, "--name", "disk"]);
    assert_eq!(first_byte(&device), "2");
    cleat_ok(&["unmap", "disk"]);
    drop(node);
}

fn kernel_client() {
    let uri = image("foreign", "32M");
    let mut node = Node::start();
    let device = map(&uri, "foreign");
    write(&device, 1);
    kill_both(&mut node, "foreign");

    // The kernel's client breaks the lock of the dead worker once the OSDs have given up its watch.
    let (conf, keyring) = (cluster().conf(), cluster().keyring(ID));
    let client = format!("-c {} --id {ID} -k {}", conf.display(), keyring.display());
    let other =
        shell(&format!("modprobe rbd; rbd {client} map -o ms_mode=prefer-crc {POOL}/foreign"));
    write(&other, 2);
    assert_eq!(first_byte(&other), "2");
    shell(&format!("rbd {client} unmap {other}"));

    node.restart();
    wait_until_fenced("foreign", &device, "another client");
    cleat_ok(&["unmap", "--force", "foreign"]);
    let device = cleat_ok(&["map", &uri, "--name", "foreign"]);
    assert_eq!(first_byte(&device), "2", "the other client's write is the last one");
    cleat_ok(&["unmap", "foreign"]);
    assert!(!cleat(&["status", "foreign"]).status.success());
}
