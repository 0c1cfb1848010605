//! The list of backends of this program, one line each. No other code of this crate names a concrete backend.

use cleat_backend::uri::{StoreUri, VolumeUri};
use cleat_backend::{Registry, Unavailable};
use cleat_core::error::Result;

/// The backends. A new backend is a crate and a line here.
pub static REGISTRY: Registry = Registry::new(&[
    cleat_backend::mem::BACKEND,
    cleat_backend::file::BACKEND,
    cleat_rbd::BACKEND,
    cleat_object_backend::DIRECTORY,
    cleat_object_backend::S3,
    #[cfg(feature = "fault")]
    cleat_backend::fault::BACKEND,
    #[cfg(not(feature = "fault"))]
    &Unavailable {
        scheme: "fault",
        message: "are for tests, and this binary was built without them",
        repair: "build it with `cargo build --features fault`",
    },
    &planned("gs"),
    &planned("az"),
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

const fn planned(scheme: &'static str) -> Unavailable {
    Unavailable {
        scheme,
        message: "are not supported by this version of cleat",
        repair: "use s3:, dir:, file:, rbd: or mem:",
    }
}

#[cfg(test)]
mod tests {
    use cleat_core::error::ErrorKind;

    use super::*;

    #[test]
    fn a_planned_scheme_is_refused_with_the_reason() {
        let error = volume("gs://b/p").expect_err("not supported");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("gs:"), "{error}");
        assert!(error.repair().unwrap_or("").contains("file:"), "{error}");
    }

    #[test]
    fn each_scheme_is_registered_once() {
        let mut schemes: Vec<_> = REGISTRY.backends().map(|backend| backend.scheme()).collect();
        schemes.sort_unstable();
        let count = schemes.len();
        schemes.dedup();
        assert_eq!(schemes.len(), count, "{schemes:?}");
    }
}
