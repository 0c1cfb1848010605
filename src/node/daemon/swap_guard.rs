//! Refuses swap on cleat's devices.
//!
//! A page of swap is written when memory is short, and the worker of the device then needs memory itself: for the
//! sockets of its backend, in the page cache of the file below, in librbd. Nothing reserves this memory for a
//! process, so with swap on its own device the machine could stop. The kernel offers no way to forbid swapon(8)
//! on one device, so swap is turned off as soon as the kernel reports it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use cleat_kernel::swap::{SwapAreas, turn_off};

/// How often the swap areas are read without a report of the kernel, and how often swapoff(2) is repeated after a
/// failure.
const INTERVAL: Duration = Duration::from_secs(5);

/// Starts a thread that turns off swap on cleat's devices, for the rest of the process.
pub(super) fn start() {
    let started = std::thread::Builder::new().name("swap".to_owned()).spawn(run);
    if let Err(error) = started {
        tracing::error!(%error, "cannot start the thread that refuses swap on devices of cleat");
    }
}

fn run() {
    // `None`: the kernel has no support for swap.
    let Ok(areas) = SwapAreas::open() else { return };
    // The areas that cannot be turned off, with the errors that were logged.
    let mut failed: BTreeMap<PathBuf, String> = BTreeMap::new();
    loop {
        let found = areas.on_devices();
        failed.retain(|path, _| found.iter().any(|area| area.path == *path));
        for area in found {
            let (path, device) = (area.path.display(), &area.device);
            match turn_off(&area) {
                Ok(()) => {
                    tracing::error!(
                        %path, device,
                        "swap on a device of cleat was turned off: writing it out needs memory in the process that \
                         serves the device, so the machine could stop; use a local disk for swap"
                    );
                }
                Err(error) => {
                    let text = error.to_string();
                    if failed.insert(area.path.clone(), text.clone()).as_ref() != Some(&text) {
                        tracing::error!(
                            %path, device, %error,
                            "cannot turn off swap on a device of cleat, on which the machine could stop when memory \
                             is short; run swapoff, and use a local disk for swap"
                        );
                    }
                }
            }
        }
        areas.wait(INTERVAL);
    }
}
