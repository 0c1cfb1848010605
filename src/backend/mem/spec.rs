//! The registration and the URI of volumes in memory: `mem:SIZE`.

use std::sync::Arc;

use cleat_core::error::Result;

use super::MemImage;
use crate::spec::{Backend, Nested, OpenOptions, VolumeSpec};
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
