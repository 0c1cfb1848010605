//! File systems on block devices: what a device contains, and how it is formatted, checked, mounted, grown,
//! measured and trimmed.
//!
//! Input: a device or a mount point, and a deadline. Output: what was found or done. Every function is
//! async and returns at its deadline, also when the storage below the device does not answer.
//!
//! A system call on such a device can wait in the kernel without an end, and a thread that waits there
//! keeps its process from ending. So whatever writes to a device, mounts or unmounts runs in a child
//! process, which is one of the system's own programs (`mount`, `mkfs.ext4`, …). The threads of this
//! process only read, in calls that end when the process is killed.
//!
//! Two things never happen here. A device is never formatted unless [`content()`] has found it empty. And
//! no function decides which volume belongs to which device or mount point: that is the caller's task,
//! which must also keep two operations on one volume apart.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests wait in real time"))]

mod blkid;
mod blocking;
mod call;
mod check;
mod content;
mod encryption;
mod format;
mod grow;
mod kind;
#[cfg(test)]
mod loop_tests;
mod mkfs_options;
mod mount;
mod mount_options;
mod mount_table;
mod output;
mod path;
mod superblock;
mod tools;
mod trim;
mod unlocked;
mod unmount;
mod usage;
mod writers;
mod zeroes;

pub use blkid::Found;
pub use blocking::bounded;
pub use check::{CheckPolicy, Checked, check};
pub use cleat_kernel::{MountEntry, Propagation};
pub use content::{Content, content};
pub use encryption::{encrypt, unlock};
pub use format::{FormatOptions, format};
pub use grow::{grow, needs_growth};
pub use kind::Kind;
pub use mount::{MountSpec, bind, bind_device, mount};
pub use mount_table::{find, mounts};
pub use trim::trim;
pub use unlocked::{Unlocked, grow_unlocked, lock, unlocked};
pub use unmount::{detach, unmount};
pub use usage::{Amount, Usage, device_size, usage};
