//! Random identities.

use std::fs::File;
use std::io::Read;

use cleat_core::error::{Error, Result};
use cleat_object::encryption::KEY_BYTES;
use cleat_object::name::Nonce;
use zeroize::Zeroizing;

/// The device that a confined worker can read, too.
pub(crate) const DEVICE: &str = "/dev/urandom";

/// Returns random bytes that nothing else has.
///
/// # Errors
/// Returns an error if the device of the kernel cannot be read.
pub(crate) fn random() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    fill(&mut bytes).map(|()| bytes)
}

/// Returns the key of a new volume.
///
/// # Errors
/// Fails as [`random`] does.
pub(crate) fn key() -> Result<Zeroizing<[u8; KEY_BYTES]>> {
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    fill(&mut *key).map(|()| key)
}

fn fill(bytes: &mut [u8]) -> Result<()> {
    File::open(DEVICE)
        .and_then(|mut device| device.read_exact(bytes))
        .map_err(|error| Error::from_io(format!("cannot read {DEVICE}"), error))
}

/// Returns the identity of a new opener.
///
/// # Errors
/// Fails as [`random`] does.
pub(crate) fn nonce() -> Result<Nonce> {
    random().map(Nonce)
}

/// Returns a random number.
///
/// # Errors
/// Fails as [`random`] does.
pub(crate) fn token() -> Result<u64> {
    random().map(|bytes| u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default()))
}
