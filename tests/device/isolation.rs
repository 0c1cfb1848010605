//! Code inside a worker, on real kernels and under the daemon's default configuration, which demands every layer of
//! the confinement.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};

use cleat_sys::escape_attempts::roads::{DATAGRAMS, SharedMemory};
use libtest_mimic::Trial;

use crate::fixture::{Image, Node, cleat, cleat_ok, shell, status};
use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("isolation_code_inside_a_worker_reaches_nothing", reaches_nothing),
        trial("isolation_udev_does_not_read_devices_with_the_optional_rules", no_scan),
    ]
}

/// What udev has made of the content of a volume with an ext4 on its only partition.
#[derive(Debug, PartialEq)]
struct Scanned {
    /// The links with names from the content: the UUID and the label of the file system and of the partition.
    links: usize,
    /// The properties that blkid has found, of the disk and of the partition.
    properties: usize,
}

fn no_scan() {
    const RULES: &str = "/etc/udev/rules.d/59-cleat-no-scan.rules";
    let _node = Node::start();
    let image = Image::new("scanned", "64M");
    shell(&format!(
        "sfdisk --quiet {0} <<< 'label: gpt
         size=60M, uuid=11111111-2222-3333-4444-555555555555, name=of-the-content'
         mkfs.ext4 -q -E offset=1048576 -L of-the-content -U 66666666-7777-8888-9999-000000000000 {0} 60M",
        image.path()
    ));
    assert_eq!(scan(&image), Scanned { links: 4, properties: 2 }, "without the rules");
    shell(&format!("cp 59-cleat-no-scan.rules {RULES}; udevadm control --reload"));
    let scanned = std::panic::catch_unwind(|| scan(&image));
    shell(&format!("rm {RULES}; udevadm control --reload"));
    assert_eq!(scanned.expect("the volume works"), Scanned { links: 0, properties: 0 });
}

/// Maps the volume, mounts its partition by the link of cleat, and returns what udev has read.
fn scan(image: &Image) -> Scanned {
    let device = cleat_ok(&["map", &image.uri(), "--name", "scanned"]);
    shell(
        "udevadm settle --timeout=60; mkdir -p /mnt/scanned
         mount /dev/disk/by-id/cleat-scanned-part1 /mnt/scanned
         echo data > /mnt/scanned/file; umount /mnt/scanned; udevadm settle --timeout=60",
    );
    let number = |script: &str| shell(script).parse().expect("a number");
    let links = number(
        "cd /dev/disk; ls -d by-uuid/66666666-* by-label/of-the-content by-partuuid/11111111-* \
             by-partlabel/of-the-content 2> /dev/null | wc -l || true",
    );
    // A partition also inherits the properties of its disk.
    let properties = number(&format!(
        "{{ udevadm info --query=property {device} | grep ^ID_PART_TABLE_UUID= || true
            udevadm info --query=property {device}p1 | grep ^ID_FS_UUID= || true; }} | wc -l"
    ));
    cleat_ok(&["unmap", "scanned"]);
    Scanned { links, properties }
}

fn reaches_nothing() {
    let mut node = Node::start();
    let file = "/tmp/of-root";
    std::fs::write(file, "secret").expect("a file");
    std::fs::set_permissions(file, PermissionsExt::from_mode(0o600)).expect("its mode");
    let _shared_memory = SharedMemory::make();
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = tcp.local_addr().expect("its number").port();
    let name = |name: &[u8]| SocketAddr::from_abstract_name(name).expect("a name");
    let _abstract = UnixListener::bind_addr(&name(b"roads")).expect("an abstract socket");
    let datagrams = UnixDatagram::bind_addr(&name(&[b"roads", DATAGRAMS].concat()));
    let _datagrams = datagrams.expect("an abstract socket for datagrams");
    // Another worker, its control socket, and its device.
    let device = cleat_ok(&["map", "mem:32M", "--name", "other"]);
    let other = worker("other");
    let other_socket = shell(&format!("find /run/cleat -type s -name '*.{other}.sock'"));
    assert!(!other_socket.is_empty(), "{}", shell("find /run/cleat"));
    let image = Image::new("jail", "32M");
    for uri in ["mem:32M".to_owned(), image.uri()] {
        let own_device = cleat_ok(&["map", &uri, "--name", "jail"]);
        let pid = worker("jail");
        let ids = shell(&format!("grep -hE '^(Uid|Gid):' /proc/{pid}/status /proc/{other}/status"));
        let mut ids: Vec<_> = ids.split_whitespace().collect();
        assert!(!ids.contains(&"0"), "{ids:?}");
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 4, "two users, and the names of the fields: {ids:?}");
        assert_eq!(shell(&format!("ls -A /proc/{pid}/root | wc -l")), "0");
        assert_eq!(shell(&format!("wc -l < /proc/{pid}/mountinfo")), "1");
        let targets = [
            (file, "/run/cleat/cleat.sock", 1),
            (device.as_str(), other_socket.as_str(), other),
            ("/dev/mem", "/run/cleat/cleat.sock", u64::from(node.pid())),
        ];
        for (path, socket, process) in targets {
            let plan = format!("break-in {path} {socket} {process} {port} roads");
            let tried = cleat(&["fault", "jail", &plan]);
            assert!(tried.status.success(), "{uri}: {}", String::from_utf8_lossy(&tried.stderr));
        }
        // The worker serves on.
        shell(&format!("dd if=/dev/zero of={own_device} bs=1M count=4 oflag=direct status=none"));
        assert_eq!((worker("jail"), worker("other")), (pid, other));
        cleat_ok(&["unmap", "jail"]);
    }
    assert_eq!(std::fs::read_to_string(file).expect("the file"), "secret");
    cleat_ok(&["unmap", "other"]);
    node.terminate();
}

fn worker(name: &str) -> u64 {
    status(name)["worker_pid"].as_u64().expect("a worker")
}
