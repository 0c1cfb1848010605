//! The tail file as the tail memory of the engine.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use cleat_backend::claimant::Claimant;
use cleat_core::error::{Error, Result};
use cleat_object::tail_memory::Memory;
use cleat_object::volume::Keep;
use nix::sys::uio::pwritev;

/// The length of the file in bytes: the log objects that are sent at the same time fit.
pub(crate) const TAIL_BYTES: u64 = 32 << 20;

struct TailFile(File);

/// Returns the tail memory of a mapping. An earlier process of the mapping may have truncated the file, so nothing maps
/// it into memory.
///
/// # Errors
/// Returns an error if the process has no descriptor left.
pub(crate) fn keep(file: &Arc<OwnedFd>, claimant: &Claimant) -> Result<Keep> {
    let file = file.try_clone().map_err(|error| Error::from_io("the tail file", error))?;
    let owner = number(&[&claimant.mapping_id, &claimant.boot_id]);
    Ok(Keep { memory: Arc::new(TailFile(file.into())), owner })
}

/// Returns a number for texts: FNV-1a. It protects from mistakes, not from an attacker.
fn number(texts: &[&str]) -> u64 {
    let bytes = texts.iter().flat_map(|text| text.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl Memory for TailFile {
    fn size(&self) -> u64 {
        TAIL_BYTES
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        buffer.fill(0);
        let mut done = 0;
        while done < buffer.len() {
            match self.0.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => return Ok(()),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, parts: [&[u8]; 2]) -> io::Result<()> {
        let length = parts[0].len() + parts[1].len();
        let at = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let written = loop {
            match pwritev(&self.0, &parts.map(IoSlice::new), at) {
                Err(nix::errno::Errno::EINTR) => {}
                other => break other?,
            }
        };
        // A file in memory is written in part only if there is no memory left.
        if written == length { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
    }
}
