//! The list of backends of this program, one line each. No other code of this crate names a concrete backend.

use cleat_backend::Registry;
#[cfg(not(feature = "fault"))]
use cleat_backend::Unavailable;
use cleat_backend::uri::{StoreUri, VolumeUri};
use cleat_core::error::Result;

/// The backends. A new backend is a crate and a line here.
pub static REGISTRY: Registry = Registry::new(&[
    cleat_backend::mem::BACKEND,
    cleat_backend::file::BACKEND,
    cleat_rbd::BACKEND,
    cleat_object_backend::DIRECTORY,
    cleat_object_backend::AMAZON,
    cleat_object_backend::GOOGLE,
    cleat_object_backend::AZURE,
    #[cfg(feature = "fault")]
    cleat_backend::fault::BACKEND,
    #[cfg(not(feature = "fault"))]
    &Unavailable {
        scheme: "fault",
        message: "are for tests, and this binary was built without them",
        repair: "build it with `cargo build --features fault`",
    },
]);

/// Parses the URI of a volume, for the command line.
///
/// # Errors
/// Returns the errors of [`Registry::volume`].
pub fn volume(text: &str) -> Result<VolumeUri> {
    REGISTRY.volume(text)
}

/// Parses the URI of a store, for the command line.
///
/// # Errors
/// Returns the errors of [`Registry::store`].
pub fn store(text: &str) -> Result<StoreUri> {
    REGISTRY.store(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_scheme_is_registered_once() {
        let mut schemes: Vec<_> = REGISTRY.backends().map(|backend| backend.scheme()).collect();
        schemes.sort_unstable();
        let count = schemes.len();
        schemes.dedup();
        assert_eq!(schemes.len(), count, "{schemes:?}");
    }
}
