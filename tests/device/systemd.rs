//! The unit under systemd: start, map, restart, reload and stop, with devices that stay.

use libtest_mimic::Trial;

use crate::fixture::{Image, cleat_ok, shell, status, wait_for_state};
use crate::{force, memory, trial};

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("systemd_unit_starts_works_and_keeps_devices", unit)]
}

/// Installs the unit as a package does, and starts it.
pub(crate) fn install() {
    shell(
        "install -D cleat /usr/bin/cleat
         install -m 0644 60-cleat.rules /etc/udev/rules.d/; udevadm control --reload
         for unit in *.service; do sed 's#/usr/local/bin/#/usr/bin/#' $unit > /etc/systemd/system/$unit; done
         systemd-analyze verify --man=no /etc/systemd/system/cleat.service
         mkdir -p /etc/cleat; printf '[metrics]\\nlisten = \"127.0.0.1:9599\"\\n' > /etc/cleat/cleat.toml
         systemctl daemon-reload; systemctl enable --quiet cleat; systemctl start cleat || { journalctl -u cleat; exit 1; }",
    );
    assert_eq!(shell("systemctl is-active cleat"), "active");
}

fn unit() {
    install();
    // The unit permits the daemon to listen on a port.
    assert!(shell("cleat metrics 127.0.0.1:9599 | grep cleat_build_info").contains("version="));
    let device = cleat_ok(&["map", "mem:64M", "--name", "unit"]);
    shell(&format!(
        "mkfs.ext4 -q {device}; mkdir -p /mnt/unit; mount {device} /mnt/unit; echo here > /mnt/unit/file; sync -f /mnt/unit"
    ));
    shell("systemctl restart cleat");
    wait_for_state("unit", "mapped");
    reload();
    shell("systemctl stop cleat; echo 3 > /proc/sys/vm/drop_caches; grep -q here /mnt/unit/file");
    shell("systemctl start cleat");
    wait_for_state("unit", "mapped");
    shell("umount /mnt/unit");
    // The unit permits swapoff, and keeps the processes of the unit out of swap.
    memory::swap_is_refused(&device);
    let group = shell("systemctl show cleat -p ControlGroup --value");
    assert_eq!(shell(&format!("cat /sys/fs/cgroup{group}/memory.swap.max")), "0");
    cleat_ok(&["unmap", "unit"]);
    by_force();
    // Log entries have their own fields in the journal.
    let entries = "journalctl -t cleat -o json MAPPING=unit";
    assert!(shell(&format!("{entries} | grep -c '\"MESSAGE\":\"mapped\"'")) == "1");
    assert!(
        shell(&format!("{entries} --output-fields=TARGET,PRIORITY | head -1")).contains("cleat_")
    );
    shell("systemctl stop cleat; test \"$(systemctl show cleat -p Result --value)\" = success");
}

/// The unit's confinement lets the daemon enter other mount namespaces and unmount there.
fn by_force() {
    let image = Image::new("forced", "320M");
    let device = cleat_ok(&["map", &format!("fault:{}", image.uri()), "--name", "forced"]);
    force::namespaces(&device);
}

/// Replaces the running executable by another one with a reload. No process of the daemon ends.
fn reload() {
    let pid = || shell("systemctl show cleat -p MainPID --value");
    let (before, worker) = (pid(), status("unit")["worker_pid"].clone());
    shell("cp /usr/bin/cleat /usr/bin/cleat.next; mv /usr/bin/cleat.next /usr/bin/cleat");
    shell("systemctl reload cleat || { journalctl -u cleat; exit 1; }");
    assert_eq!(shell("systemctl is-active cleat"), "active");
    assert_eq!(pid(), before);
    assert_ne!(status("unit")["worker_pid"], worker);
    assert_eq!(shell(&format!("readlink /proc/{before}/exe")), "/usr/bin/cleat");
    shell(
        "echo 3 > /proc/sys/vm/drop_caches; grep -q here /mnt/unit/file; echo more >> /mnt/unit/file; sync -f /mnt/unit",
    );
    // A second reload has nothing to do.
    shell("systemctl reload-or-restart cleat");
    assert_eq!(pid(), before);
}
