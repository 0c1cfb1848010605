//! Errors of the control side. An error consists of a kind that prescribes the caller's reaction, a
//! message for the reader, a repair hint where one is known, and its source.
//!
//! The data path has its own, smaller error ([`crate::request::IoError`]).

use std::fmt;

/// `Result` with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The class of an error, by the reaction that it requires. Each kind has one gRPC status
/// code (`cleat_node::api`) and one exit code (`cli::exit`); `Fenced` and `Replaced` share theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The caller's input is wrong; the same call fails again.
    InvalidArgument,
    /// The volume, device or file does not exist.
    NotFound,
    /// A mapping with that name exists with other properties.
    AlreadyExists,
    /// The device or the volume is in use. The message names the holders.
    InUse,
    /// Another operation on the same volume is in progress; the caller may retry later.
    Aborted,
    /// A permission or capability is missing.
    PermissionDenied,
    /// A required part of the system is missing: a kernel module, a library, a feature.
    Unsupported,
    /// The daemon or the backend does not answer; a retry may succeed later.
    Unavailable,
    /// A deadline expired.
    TimedOut,
    /// Disk space, memory or devices are exhausted.
    NoSpace,
    /// Another client owns the volume now; this one was fenced.
    Fenced,
    /// Another volume is found in place of the one that the mapping's device was made for. It must never be
    /// served on that device.
    Replaced,
    /// An unexpected failure: an I/O error, an unexpected reply of the kernel, a defect. A kind that only
    /// a newer build knows is parsed as this one.
    #[serde(other)]
    Internal,
}

/// An error with its context. `Display` prints the message alone, on one line; [`Error::repair`] and the
/// sources are read separately.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    repair: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// Creates an error of `kind`. `message` states what failed and why, without a final period.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), repair: None, source: None }
    }

    /// Adds a repair hint: a sentence or a command.
    #[must_use]
    pub fn with_repair(mut self, repair: impl Into<String>) -> Self {
        self.repair = Some(repair.into());
        self
    }

    /// Adds the error that caused this one. The message must not repeat it.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Wraps an I/O error, and derives the kind from its [`std::io::ErrorKind`].
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

    /// Returns the kind, which prescribes the caller's reaction.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the message alone, without sources.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the message and the messages of all sources, separated by ": ", on one line.
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

    /// Returns the repair hint, if there is one.
    pub fn repair(&self) -> Option<&str> {
        self.repair.as_deref()
    }
}

/// Prints the message alone, which is the convention for errors with sources. [`Error::report`] adds the
/// sources.
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
