//! The backends of the daemon that the kit starts, for suites that do not see the composition.

use cleat_backend::Registry;

/// All backends, with injected faults.
pub static REGISTRY: Registry = Registry::new(&[
    cleat_backend::mem::BACKEND,
    cleat_backend::file::BACKEND,
    cleat_backend::fault::BACKEND,
    cleat_rbd::BACKEND,
    cleat_object_backend::DIRECTORY,
    cleat_object_backend::AMAZON,
]);
