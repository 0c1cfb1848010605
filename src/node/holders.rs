//! The holders of a device: mounts, processes and other block devices.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::context::Context;
use crate::mapping::Guard;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{DeviceIndex, Holder, Mapper};

/// How long udev's probes may have a device open before they count as holders.
pub(crate) const TRANSIENT_TIMEOUT: Duration = Duration::from_secs(3);

/// Returns the holders of a device.
///
/// # Errors
/// Returns an error if the kernel's state cannot be read until `deadline`.
pub(crate) async fn holders_of(
    cx: &Context,
    index: DeviceIndex,
    deadline: Instant,
) -> Result<Vec<Holder>> {
    let found = cx.kernel.wait("find the holders", deadline, None, move |k, _| k.holders(index));
    Ok(without_own(found.await?))
}

/// Removes this process from the holders of a device. It has a device open only to flush it, or so that no
/// other program can use it, and a disconnect ends both.
pub(crate) fn without_own(mut holders: Vec<Holder>) -> Vec<Holder> {
    let own = std::process::id();
    holders.retain(|holder| !matches!(holder, Holder::Process { pid, .. } if *pid == own));
    holders
}

/// Waits until a device has no holders. Short-lived udev probes may have it open for [`TRANSIENT_TIMEOUT`].
///
/// # Errors
/// Returns `InUse`, with the holders, if the device has others or the probes do not end in time.
pub(crate) async fn check_unused(
    cx: &Context,
    guard: &Guard,
    index: DeviceIndex,
    deadline: Instant,
) -> Result<()> {
    let transient_deadline = deadline.min(Instant::now() + TRANSIENT_TIMEOUT);
    loop {
        let holders = holders_of(cx, index, deadline).await?;
        if holders.is_empty() {
            return Ok(());
        }
        if !holders.iter().all(is_transient) || Instant::now() >= transient_deadline {
            return Err(in_use_error(&guard.record.name, &holders));
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Returns whether a holder is a probe of udev, which closes the device soon.
pub(crate) fn is_transient(holder: &Holder) -> bool {
    let Holder::Process { command, .. } = holder else { return false };
    ["(udev-worker)", "systemd-udevd", "udevd", "blkid"].iter().any(|name| command.contains(name))
}

/// Returns an error that lists the holders of a device.
pub(crate) fn in_use_error(name: &str, holders: &[Holder]) -> Error {
    const SHOWN: usize = 8;
    let mut shown: Vec<String> = holders.iter().take(SHOWN).map(describe).collect();
    if holders.len() > SHOWN {
        shown.push(format!("{} more", holders.len() - SHOWN));
    }
    let repair = match holders.first() {
        Some(Holder::Mount { path, namespace_pid: None, .. }) => {
            format!("umount {}", path.display())
        }
        Some(Holder::Mount { path, namespace_pid: Some(pid), .. }) => {
            format!("nsenter --mount --target {pid} umount {}", path.display())
        }
        Some(Holder::Process { pid, .. }) => format!("end process {pid}, or make it close {name}"),
        Some(Holder::Device { name: upper, mapper }) => remove_device(upper, mapper.as_ref()),
        Some(Holder::Kernel { .. }) => {
            "end its use first: unmount the file system that it is a part of, or remove the export"
                .to_owned()
        }
        None => String::new(),
    };
    Error::new(ErrorKind::InUse, format!("{name} is in use: {}", shown.join(", ")))
        .with_repair(repair)
}

fn describe(holder: &Holder) -> String {
    match holder {
        Holder::Mount { path, filesystem, namespace_pid: None } => {
            format!("mounted on {} ({filesystem})", path.display())
        }
        Holder::Mount { path, filesystem, namespace_pid: Some(pid) } => {
            format!(
                "mounted on {} ({filesystem}) in the namespace of process {pid}",
                path.display()
            )
        }
        Holder::Process { pid, command } => format!("open in process {pid} ({command})"),
        Holder::Device { name, .. } if name == "swap" => "used as swap".to_owned(),
        Holder::Device { name, mapper: Some(mapper) } => {
            format!("under the block device {name} ({})", mapper.name)
        }
        Holder::Device { name, mapper: None } => format!("under the block device {name}"),
        Holder::Kernel { what } => what.clone(),
    }
}

/// Returns the command that removes a block device from on top of another one.
fn remove_device(name: &str, mapper: Option<&Mapper>) -> String {
    match mapper {
        Some(Mapper { name, uuid }) if uuid.starts_with("LVM-") => {
            format!("lvchange --activate n /dev/mapper/{name}")
        }
        Some(Mapper { name, uuid }) if uuid.starts_with("CRYPT-") => {
            format!("cryptsetup close {name}")
        }
        Some(Mapper { name, .. }) => format!("dmsetup remove {name}"),
        None if name == "swap" => "swapoff the device; see /proc/swaps".to_owned(),
        None if name.starts_with("loop") => format!("losetup --detach /dev/{name}"),
        None if name.starts_with("md") => format!("mdadm --stop /dev/{name}"),
        None => format!("remove the device {name} first"),
    }
}

/// Adds the hint to unmap by force to an error of an unmap.
pub(crate) fn or_by_force(error: Error, name: &str) -> Error {
    let force = format!("cleat unmap {name} --force, which loses data that is not written yet");
    let repair = match error.repair() {
        Some(repair) => format!("{repair}; or {force}"),
        None => force,
    };
    error.with_repair(repair)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_for_a_device_on_top_can_be_typed() {
        let hint = |name: &str, mapper: Option<(&str, &str)>| {
            let mapper = mapper.map(|(name, uuid)| Mapper { name: name.into(), uuid: uuid.into() });
            let error = in_use_error("a", &[Holder::Device { name: name.into(), mapper }]);
            (error.message().to_owned(), error.repair().unwrap().to_owned())
        };
        let (message, repair) = hint("dm-0", Some(("vg0-data", "LVM-x")));
        assert_eq!(message, "a is in use: under the block device dm-0 (vg0-data)");
        assert_eq!(repair, "lvchange --activate n /dev/mapper/vg0-data");
        assert_eq!(hint("dm-1", Some(("safe", "CRYPT-LUKS2-x"))).1, "cryptsetup close safe");
        assert_eq!(hint("dm-2", Some(("any", ""))).1, "dmsetup remove any");
        assert_eq!(hint("loop3", None).1, "losetup --detach /dev/loop3");
        assert_eq!(hint("md0", None).1, "mdadm --stop /dev/md0");
        assert!(hint("swap", None).1.contains("swapoff"));
    }
}
