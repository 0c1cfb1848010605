//! The list of backends of this program, one line each. No other code of this crate names a concrete backend.

use cleat_backend::Registry;
#[cfg(feature = "fault")]
use cleat_backend::fault;
use cleat_backend::uri::{StoreUri, VolumeUri};
use cleat_core::error::Result;
#[cfg(feature = "object")]
use cleat_object_backend as object;
#[cfg(feature = "rbd")]
use cleat_rbd as rbd;

/// The backends. A new backend is a crate and a line here.
pub static REGISTRY: Registry = Registry::new(&[
    cleat_backend::mem::BACKEND,
    cleat_backend::file::BACKEND,
    rbd::BACKEND,
    object::DIRECTORY,
    object::AMAZON,
    object::GOOGLE,
    object::AZURE,
    fault::BACKEND,
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

/// Refuses the volumes of `cleat-rbd`.
#[cfg(not(feature = "rbd"))]
mod rbd {
    use cleat_backend::{Backend, Unavailable};

    pub(super) const BACKEND: &dyn Backend = &Unavailable {
        scheme: "rbd",
        message: "need the feature `rbd`, and this program was built without it",
        repair: "build it with `cargo build --release --features rbd`",
    };
}

/// Refuses the volumes of `cleat-object-backend`.
#[cfg(not(feature = "object"))]
mod object {
    use cleat_backend::{Backend, Unavailable};

    pub(super) const DIRECTORY: &dyn Backend = &unavailable("dir");
    pub(super) const AMAZON: &dyn Backend = &unavailable("s3");
    pub(super) const GOOGLE: &dyn Backend = &unavailable("gs");
    pub(super) const AZURE: &dyn Backend = &unavailable("az");

    const fn unavailable(scheme: &'static str) -> Unavailable {
        Unavailable {
            scheme,
            message: "need the feature `object`, and this program was built without it",
            repair: "build it with `cargo build --release --features object`",
        }
    }
}

/// Refuses the volumes of `cleat_backend::fault`.
#[cfg(not(feature = "fault"))]
mod fault {
    use cleat_backend::{Backend, Unavailable};

    pub(super) const BACKEND: &dyn Backend = &Unavailable {
        scheme: "fault",
        message: "are for tests, and this binary was built without them",
        repair: "build it with `cargo build --features fault`",
    };
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
