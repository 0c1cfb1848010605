//! Exclusive opens of block devices.
//!
//! The kernel refuses an exclusive open of a disk while a part of the kernel or another program has claimed the
//! disk or a partition of it, and it refuses their claims while the exclusive open exists (`bd_may_claim` in
//! block/bdev.c). So an exclusive open shows users that neither /proc nor sysfs lists.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::sysfs::Disk;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::descriptor::block_device;

/// An exclusive open of a device and its partitions, until it is dropped.
pub struct ExclusiveOpen {
    _held: Box<dyn Send + Sync>,
}

impl ExclusiveOpen {
    /// Makes an exclusive open that ends when `held` is dropped.
    pub(crate) fn new(held: impl Send + Sync + 'static) -> Self {
        Self { _held: Box::new(held) }
    }
}

impl std::fmt::Debug for ExclusiveOpen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ExclusiveOpen")
    }
}

/// An open device node. The last close of a device writes its dirty pages, which blocks while the backend does
/// not answer, so a thread of its own closes it.
struct OpenNode(Option<File>);

impl Drop for OpenNode {
    fn drop(&mut self) {
        let file = self.0.take();
        // If no thread can be started, the file is closed here, with the closure.
        let _ = std::thread::Builder::new().name("close-device".into()).spawn(move || drop(file));
    }
}

/// Opens `disk`, whose node is below `dev`, exclusively. Returns the names of the disk and partitions that are
/// claimed already as the inner error.
///
/// # Errors
/// Returns `NotFound` if the node is that of another device, and otherwise the error of opening it.
pub(super) fn open(dev: &Path, disk: &Disk) -> Result<Result<ExclusiveOpen, Vec<String>>> {
    let [name, partitions @ ..] = disk.names.as_slice() else { return Ok(Err(Vec::new())) };
    let node = dev.join(name);
    let failed =
        |error| Error::from_io(format!("cannot open {} exclusively", node.display()), error);
    if block_device(&node).map_err(failed)? != disk.numbers.first().copied() {
        let message = format!("{} is the node of another device", node.display());
        return Err(Error::new(ErrorKind::NotFound, message));
    }
    match open_node(&node) {
        Ok(file) => Ok(Ok(ExclusiveOpen::new(OpenNode(Some(file))))),
        Err(error) if is_busy(&error) => {
            let busy = |name: &&String| open_node(&dev.join(name)).is_err_and(|e| is_busy(&e));
            let mut claimed: Vec<String> = partitions.iter().filter(busy).cloned().collect();
            // While the disk itself is claimed, each partition is refused, too.
            if claimed.len() == partitions.len() {
                claimed = vec![name.clone()];
            }
            Ok(Err(claimed))
        }
        Err(error) => Err(failed(error)),
    }
}

/// Opens a node for reading: closing a device that was open for writing makes udevd probe it again.
fn open_node(node: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_EXCL).open(node)
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EBUSY)
}
