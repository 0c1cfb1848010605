//! RBD images under the systemd unit, on a client in its usual setup: host names in ceph.conf, and the key
//! in Ceph's default place.

use libtest_mimic::Trial;
use test_kit::ceph::{ID, POOL};

use crate::fixture::{cleat, cleat_ok, shell, status, wait_for_state};
use crate::rbd::{cluster, goes_on, rbd, wait_until};
use crate::resize::{Load, no_io_errors};
use crate::{systemd, trial};

const NAME: &str = "inunit";

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("systemd_unit_serves_rbd_images_until_they_are_fenced", unit)]
}

fn unit() {
    let (conf, key) = (cluster().conf(), cluster().keyring(ID));
    shell(&format!(
        "echo 127.0.0.1 mon.cleat.test >> /etc/hosts
         mkdir -p /etc/ceph
         echo '[global]' > /etc/ceph/ceph.conf
         sed -nE 's#^(mon host = ).*:([0-9]+)/0$#\\1mon.cleat.test:\\2#p' {} >> /etc/ceph/ceph.conf
         grep -q mon.cleat.test /etc/ceph/ceph.conf
         install -m 0600 {} /etc/ceph/ceph.client.{ID}.keyring",
        conf.display(),
        key.display(),
    ));
    systemd::install();
    // The exit statuses 20 and 21 mean that there are findings.
    let findings = String::from_utf8(cleat(&["doctor"]).stdout).expect("UTF-8");
    assert!(findings.contains("can be loaded"), "{findings}");
    rbd(&["create", &format!("{POOL}/{NAME}"), "--size", "96M"]);
    let device = cleat_ok(&["map", &uri(), "--name", NAME]);
    let missing = shell(&format!("journalctl -t cleat MAPPING={NAME} -o cat -p warning"));
    assert_eq!(missing, "", "a worker is not confined, or worse");
    under_load(&device);
    fenced(&device);
    shell("systemctl stop cleat; test \"$(systemctl show cleat -p Result --value)\" = success");
}

fn uri() -> String {
    format!("rbd:{POOL}/{NAME}?id={ID}")
}

/// Runs the commands of systemctl on the unit, with a file system on the device under load.
fn under_load(device: &str) {
    shell(&format!(
        "dmesg -C; mkfs.ext4 -q {device}; mkdir -p /mnt/{NAME}; mount {device} /mnt/{NAME}"
    ));
    let load =
        Load::start(&format!("--directory=/mnt/{NAME} --ioengine=libaio --iodepth=8 --size=8M"));
    goes_on(NAME, 50);
    let worker = || status(NAME)["worker_pid"].as_u64().filter(|pid| *pid != 0);
    let first = worker();
    shell("systemctl restart cleat");
    wait_for_state(NAME, "mapped");
    assert_eq!(worker(), first);
    goes_on(NAME, 50);

    let daemon = || shell("systemctl show cleat -p MainPID --value");
    let before = daemon();
    shell("cp /usr/bin/cleat /usr/bin/cleat.next; mv /usr/bin/cleat.next /usr/bin/cleat");
    shell("systemctl reload-or-restart cleat || { journalctl -u cleat; exit 1; }");
    assert_eq!(daemon(), before);
    assert_ne!(worker(), first);
    goes_on(NAME, 50);

    shell("systemctl stop cleat");
    let written = written_to(device);
    wait_until("I/O continues without a supervisor", || written_to(device) > written + 50);
    shell("systemctl start cleat");
    wait_for_state(NAME, "mapped");
    goes_on(NAME, 50);
    load.stop();
    shell(&format!("umount /mnt/{NAME}; e2fsck -fn {device}"));
    no_io_errors(device);
}

/// The number of writes that the kernel has completed.
fn written_to(device: &str) -> u64 {
    let stat = shell(&format!("awk '{{ print $5 }}' /sys/block/{}/stat", &device[5..]));
    stat.parse().expect("a number")
}

/// Fences the client by hand. Checks the reports to the administrator, and that the volume can be mapped
/// again.
fn fenced(device: &str) {
    let metric = |value: u32| {
        let seen = shell("./cleat metrics 127.0.0.1:9599 | grep ^cleat_volume_fenced");
        assert_eq!(seen, format!("cleat_volume_fenced{{volume=\"{NAME}\"}} {value}.0"));
    };
    metric(0);
    let locks = cluster().rbd(&["lock", "ls", &format!("{POOL}/{NAME}"), "--format", "json"]);
    let locks: serde_json::Value =
        serde_json::from_slice(&locks.expect("it is listed")).expect("JSON");
    let owner = locks[0]["address"].as_str().expect("a lock");
    cluster().ceph(&["osd", "blocklist", "add", owner]);
    wait_until("the fence is detected without a request", || status(NAME)["fenced"] == true);
    assert_eq!(status(NAME)["state"], "failed");
    metric(1);
    shell(&format!("fails dd if=/dev/zero of={device} bs=4k count=1 oflag=direct"));
    let errors = shell(&format!("journalctl -t cleat MAPPING={NAME} -o cat -p err"));
    assert!(errors.contains("another client owns the volume"), "{errors:?}");
    assert_eq!(cleat(&["map", &uri(), "--name", NAME]).status.code(), Some(12));
    cleat_ok(&["unmap", NAME]);
    let device = cleat_ok(&["map", &uri(), "--name", NAME]);
    shell(&format!("dd if=/dev/zero of={device} bs=4k count=1 oflag=direct status=none"));
    metric(0);
    cleat_ok(&["unmap", NAME]);
}
