//! The certificates that a client trusts.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use cleat_backend::uri::invalid;
use cleat_core::error::{Error, Result};

/// The maximum length of a file with certificates, in bytes.
const MAX_ROOTS: u64 = 4 << 20;

/// Reads a file of trusted certificates.
///
/// # Errors
/// Returns `InvalidArgument` if there is none, and the error of the read otherwise.
pub(super) fn read_roots(file: Option<PathBuf>) -> Result<Vec<u8>> {
    let path = file.ok_or_else(|| {
        invalid("this machine has no file of trusted certificates")
            .with_repair("install the package ca-certificates, or name a file with ca_file=")
    })?;
    read_bounded(&path).map_err(|error| {
        Error::from_io(format!("cannot read the certificates in {}", path.display()), error)
    })
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path)?.take(MAX_ROOTS + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_ROOTS {
        return Err(io::Error::other(format!("the file is longer than {MAX_ROOTS} bytes")));
    }
    Ok(content)
}
