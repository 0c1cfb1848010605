//! What this machine is called, and which boot of its kernel this is.

use std::io;

/// The host's name, as the kernel has it.
///
/// # Errors
/// When /proc is not there.
pub fn host_name() -> io::Result<String> {
    line("/proc/sys/kernel/hostname")
}

/// Of the kernel now running: another one after each boot.
///
/// # Errors
/// As [`host_name`].
pub fn boot_id() -> io::Result<String> {
    line("/proc/sys/kernel/random/boot_id")
}

fn line(path: &str) -> io::Result<String> {
    std::fs::read_to_string(path).map(|text| text.trim().to_owned())
}
