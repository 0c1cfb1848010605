//! Who holds a device: mounts, processes and other block devices.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::context::Context;
use crate::mapping::Guard;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{DeviceIndex, Holder};

/// How long udev may look at a device before it counts as a holder.
pub(crate) const TRANSIENT_LIMIT: Duration = Duration::from_secs(3);

/// Who holds a device.
pub(crate) async fn holders_of(
    cx: &Context,
    index: DeviceIndex,
    deadline: Instant,
) -> Result<Vec<Holder>> {
    cx.kernel.wait("look for holders", deadline, None, move |k, _| k.holders(index)).await
}

/// Sees to it that nobody holds a device, but for those who only look, and soon go.
pub(crate) async fn check_unused(
    cx: &Context,
    guard: &Guard,
    index: DeviceIndex,
    deadline: Instant,
) -> Result<()> {
    let patience = deadline.min(Instant::now() + TRANSIENT_LIMIT);
    loop {
        let holders = holders_of(cx, index, deadline).await?;
        if holders.is_empty() {
            return Ok(());
        }
        if !holders.iter().all(is_transient) || Instant::now() >= patience {
            return Err(in_use_error(&guard.record.name, &holders));
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// udev and what it runs.
pub(crate) fn is_transient(holder: &Holder) -> bool {
    let Holder::Process { command, .. } = holder else { return false };
    ["(udev-worker)", "systemd-udevd", "udevd", "blkid"].iter().any(|name| command.contains(name))
}

/// An error that names who holds a device.
pub(crate) fn in_use_error(name: &str, holders: &[Holder]) -> Error {
    const SHOWN: usize = 8;
    let mut who: Vec<String> = holders.iter().take(SHOWN).map(describe).collect();
    if holders.len() > SHOWN {
        who.push(format!("{} more", holders.len() - SHOWN));
    }
    let repair = match holders.first() {
        Some(Holder::Mount { path, namespace_pid: None, .. }) => {
            format!("umount {}", path.display())
        }
        Some(Holder::Mount { path, namespace_pid: Some(pid), .. }) => {
            format!("nsenter --mount --target {pid} umount {}", path.display())
        }
        Some(Holder::Process { pid, .. }) => format!("end process {pid}, or have it close {name}"),
        Some(Holder::Device { name: upper }) if upper == "swap" => {
            "end its use as swap: swapoff, see /proc/swaps".to_owned()
        }
        Some(Holder::Device { name: upper }) => format!("take {upper} down first"),
        None => String::new(),
    };
    Error::new(ErrorKind::InUse, format!("{name} is in use: {}", who.join(", ")))
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
        Holder::Device { name } if name == "swap" => "used as swap".to_owned(),
        Holder::Device { name } => format!("under the block device {name}"),
    }
}

/// Adds the way out to an error that keeps a mapping from being unmapped.
pub(crate) fn or_by_force(error: Error, name: &str) -> Error {
    let way = format!("cleat unmap {name} --force, which gives up what is not written yet");
    let repair = match error.repair() {
        Some(repair) => format!("{repair}; or {way}"),
        None => way,
    };
    error.with_repair(repair)
}
