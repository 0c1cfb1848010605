//! Errors of the control side: a kind that prescribes the reaction, a sentence for the reader, the
//! repair where one is known, and the source.
//!
//! The data path has its own, smaller error ([`crate::request::IoError`]).

use std::fmt;

/// `Result` with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, as far as the caller's reaction depends on it. Each kind has one gRPC status
/// code (`control::admin`) and one exit code (`cli::exit`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The caller's input is wrong; the same call fails again.
    InvalidArgument,
    /// The volume, device or file does not exist.
    NotFound,
    /// A mapping of that name exists with other properties.
    AlreadyExists,
    /// Somebody holds the device or the volume: who, stands in the message.
    InUse,
    /// Another operation on the same volume is under way; call again later.
    Aborted,
    /// A permission or capability is missing.
    PermissionDenied,
    /// A part of the system that is needed is missing: kernel module, library, feature.
    Unsupported,
    /// The daemon or the backend does not answer; may succeed later.
    Unavailable,
    /// A bounded wait ended.
    TimedOut,
    /// No room: disk, memory, devices.
    NoSpace,
    /// Somebody else owns the volume now.
    Fenced,
    /// Something failed that should not have: I/O, a kernel answer, a defect. Also what a process of a
    /// newer build calls otherwise.
    #[serde(other)]
    Internal,
}

/// An error with its context. Printed as one line; [`Error::repair`] and the sources stand apart.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    repair: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind`; `message` says what could not be done and why, without a final period.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), repair: None, source: None }
    }

    /// Adds what the reader can do about it, as a sentence or a command.
    #[must_use]
    pub fn with_repair(mut self, repair: impl Into<String>) -> Self {
        self.repair = Some(repair.into());
        self
    }

    /// Adds the error underneath. The message must not repeat it.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Wraps an I/O error; the kind follows from it.
    pub fn from_io(message: impl Into<String>, source: std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let kind = match source.kind() {
            Io::NotFound => ErrorKind::NotFound,
            Io::PermissionDenied => ErrorKind::PermissionDenied,
            Io::AlreadyExists | Io::AddrInUse => ErrorKind::AlreadyExists,
            Io::TimedOut => ErrorKind::TimedOut,
            Io::StorageFull | Io::QuotaExceeded => ErrorKind::NoSpace,
            Io::ResourceBusy => ErrorKind::InUse,
            Io::Unsupported => ErrorKind::Unsupported,
            Io::ConnectionRefused | Io::ConnectionReset | Io::BrokenPipe => ErrorKind::Unavailable,
            _ => ErrorKind::Internal,
        };
        Self::new(kind, message).with_source(source)
    }

    /// What went wrong, for the caller's reaction.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The message alone, without sources.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The message and every source underneath, separated by ": ", on one line.
    pub fn report(&self) -> String {
        let mut report = self.message.clone();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            report.push_str(": ");
            report.push_str(&error.to_string());
            source = error.source();
        }
        report
    }

    /// What the reader can do about it.
    pub fn repair(&self) -> Option<&str> {
        self.repair.as_deref()
    }
}

/// The message alone, as is the custom: whoever prints the error walks its sources, see
/// [`Error::report`].
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
