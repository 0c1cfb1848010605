//! The error of this crate.

use std::fmt;

use librbd_sys::LoadError;

/// `Result` with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An action that failed. The text is one sentence that includes the cause.
#[derive(Debug)]
pub struct Error {
    action: String,
    cause: Cause,
    subject: Subject,
}

/// What an action that failed was about, as far as the errno alone does not show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// Ceph's configuration file.
    Configuration,
    /// An option of Ceph: it is unknown, or its value is invalid.
    Option,
    /// The connection to the cluster, with the client's key.
    Connection,
    /// A key of a type that the library cannot read.
    Key,
    /// A pool.
    Pool,
    /// Anything else.
    Other,
}

#[derive(Debug)]
enum Cause {
    Load(LoadError),
    Errno(i32),
    Invalid(&'static str),
    Unsupported(&'static str),
}

impl Error {
    /// Returns the error number, if the library returned one.
    pub fn errno(&self) -> Option<i32> {
        match self.cause {
            Cause::Errno(errno) => Some(errno),
            Cause::Unsupported(_) => Some(libc::EOPNOTSUPP),
            Cause::Load(_) | Cause::Invalid(_) => None,
        }
    }

    /// Returns the error of loading the libraries, if that is the cause.
    pub fn load(&self) -> Option<&LoadError> {
        match &self.cause {
            Cause::Load(error) => Some(error),
            Cause::Errno(_) | Cause::Invalid(_) | Cause::Unsupported(_) => None,
        }
    }

    /// Returns what the action was about.
    pub fn subject(&self) -> Subject {
        self.subject
    }

    /// Sets what the action was about.
    pub(crate) fn about(self, subject: Subject) -> Self {
        Self { subject, ..self }
    }

    fn with(action: impl Into<String>, cause: Cause) -> Self {
        Self { action: action.into(), cause, subject: Subject::Other }
    }

    pub(crate) fn new(action: impl Into<String>, errno: i32) -> Self {
        Self::with(action, Cause::Errno(errno))
    }

    pub(crate) fn invalid(action: impl Into<String>, what: &'static str) -> Self {
        Self::with(action, Cause::Invalid(what))
    }

    pub(crate) fn unsupported(action: impl Into<String>, what: &'static str) -> Self {
        Self::with(action, Cause::Unsupported(what))
    }

    pub(crate) fn no_library(error: LoadError) -> Self {
        Self::with("use Ceph", Cause::Load(error))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}: ", self.action)?;
        match &self.cause {
            Cause::Load(error) => error.fmt(f),
            // The system's text for it ("Cannot send after transport endpoint shutdown") is misleading.
            Cause::Errno(libc::ESHUTDOWN) => write!(f, "the cluster has blocklisted this client"),
            Cause::Errno(errno) => std::io::Error::from_raw_os_error(*errno).fmt(f),
            Cause::Invalid(what) | Cause::Unsupported(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {}

/// Converts the return value of a library function: a negative value is a negated errno.
pub(crate) fn check(returned: i32, action: impl FnOnce() -> String) -> Result<i32> {
    if returned < 0 { Err(Error::new(action(), returned.saturating_neg())) } else { Ok(returned) }
}
