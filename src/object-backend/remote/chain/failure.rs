//! An error that several callers get.

use cleat_core::error::{Error, ErrorKind};

/// Why a service gives no keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) kind: ErrorKind,
    pub(super) message: String,
    pub(super) repair: String,
    /// Whether the service is used without any setting that names it.
    pub(super) is_default: bool,
}

impl Failure {
    pub(super) fn error(&self) -> Error {
        Error::new(self.kind, &self.message).with_repair(&self.repair)
    }
}
