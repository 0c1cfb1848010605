//! The registration and the URI of volumes in memory: `mem:SIZE`.

use std::sync::Arc;

use cleat_core::error::Result;

use super::MemImage;
use crate::spec::{Backend, Nested, OpenOptions, VisibleSize, VolumeSpec};
use crate::uri::{Options, Size, parse_size};
use crate::{HandoverFiles, Image, VolumeIdentity};

/// The registration of volumes in memory.
pub const BACKEND: &dyn Backend = &Mem;

#[derive(Debug)]
struct Mem;

impl Backend for Mem {
    fn scheme(&self) -> &'static str {
        "mem"
    }

    fn examples(&self) -> &'static [&'static str] {
        &["mem:1G"]
    }

    fn parse(
        &self,
        location: &str,
        options: Options,
        _nested: Nested<'_>,
    ) -> Result<Arc<dyn VolumeSpec>> {
        options.finish("mem:", &[])?;
        Ok(Arc::new(MemSpec { size: parse_size(location)? }))
    }
}

/// A volume in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MemSpec {
    /// The size in bytes; never zero.
    size: u64,
}

impl VolumeSpec for MemSpec {
    fn scheme(&self) -> &'static str {
        "mem"
    }

    fn location(&self) -> String {
        Size(self.size).to_string()
    }

    fn visible_size(&self) -> VisibleSize {
        VisibleSize::Fixed
    }

    fn warning(&self) -> Option<String> {
        // Without /proc, nothing is known about the memory.
        let has = memory_and_swap(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
        too_large(self.size, has)
    }

    fn open(&self, options: &OpenOptions) -> Result<Arc<dyn Image>> {
        let image = MemImage::create(self.size, options.read_only)?;
        // New memory never has the content of a volume that was open before.
        VolumeIdentity::check(&image.identity(), options.expected.as_ref(), "mem:")?;
        Ok(Arc::new(image))
    }

    fn open_successor(
        &self,
        options: &OpenOptions,
        files: HandoverFiles,
    ) -> Result<Arc<dyn Image>> {
        Ok(Arc::new(MemImage::open_successor(files, options.read_only)?))
    }
}

/// Returns the warning for a volume of `size` bytes on a machine with `has` bytes of memory and swap.
fn too_large(size: u64, has: u64) -> Option<String> {
    let (shown, mib) = (Size(size), has >> 20);
    (size > has).then(|| {
        format!(
            "mem:{shown} is larger than this machine's memory and swap ({mib} MiB); when more is written than \
             fits, the kernel ends processes"
        )
    })
}

/// Returns the bytes of memory and swap of a machine with this /proc/meminfo (proc_meminfo(5)).
fn memory_and_swap(meminfo: &str) -> Option<u64> {
    let kib = |key: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().strip_suffix("kB")?.trim_end().parse::<u64>().ok()
    };
    Some((kib("MemTotal:")? + kib("SwapTotal:").unwrap_or(0)) << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_that_exceeds_the_memory_is_reported() {
        let meminfo = "MemTotal:        4194304 kB\nMemFree:  1 kB\nSwapTotal:       1048576 kB\n";
        let has = memory_and_swap(meminfo).unwrap();
        assert_eq!(has, 5 << 30);
        assert_eq!(memory_and_swap("MemTotal: many kB\n"), None);
        assert_eq!(too_large(has, has), None);
        let warning = too_large(64 << 30, has).unwrap();
        assert!(warning.contains("mem:64G") && warning.contains("5120 MiB"), "{warning}");
    }
}
