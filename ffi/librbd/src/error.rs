//! What could not be done, and why.

use std::fmt;

use librbd_sys::LoadError;

/// `Result` with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An action that failed. Its text needs no source: it is one sentence with the cause.
#[derive(Debug)]
pub struct Error {
    action: String,
    cause: Cause,
}

#[derive(Debug)]
enum Cause {
    Load(LoadError),
    Errno(i32),
    Invalid(&'static str),
}

impl Error {
    /// The error number, where the library gave one.
    pub fn errno(&self) -> Option<i32> {
        match self.cause {
            Cause::Errno(errno) => Some(errno),
            Cause::Load(_) | Cause::Invalid(_) => None,
        }
    }

    /// What is wrong with the libraries, where that is the cause.
    pub fn load(&self) -> Option<&LoadError> {
        match &self.cause {
            Cause::Load(error) => Some(error),
            Cause::Errno(_) | Cause::Invalid(_) => None,
        }
    }

    pub(crate) fn new(action: impl Into<String>, errno: i32) -> Self {
        Self { action: action.into(), cause: Cause::Errno(errno) }
    }

    pub(crate) fn invalid(action: impl Into<String>, what: &'static str) -> Self {
        Self { action: action.into(), cause: Cause::Invalid(what) }
    }

    pub(crate) fn no_library(error: LoadError) -> Self {
        Self { action: "use Ceph".to_owned(), cause: Cause::Load(error) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}: ", self.action)?;
        match &self.cause {
            Cause::Load(error) => error.fmt(f),
            // Linux has no name for it that says what it means here.
            Cause::Errno(libc::ESHUTDOWN) => write!(f, "the cluster has blocklisted this client"),
            Cause::Errno(errno) => std::io::Error::from_raw_os_error(*errno).fmt(f),
            Cause::Invalid(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {}

/// Makes a result of what a function of the libraries returned: below zero is an errno.
pub(crate) fn check(returned: i32, action: impl FnOnce() -> String) -> Result<i32> {
    if returned < 0 { Err(Error::new(action(), returned.saturating_neg())) } else { Ok(returned) }
}
