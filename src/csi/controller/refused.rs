//! An error with its code of the specification, which for some conditions does not follow from its kind.

use cleat_core::error::{Error, ErrorKind};
use tonic::{Code, Status};

use crate::status;

/// The error of a call.
#[derive(Debug)]
pub(crate) struct Refused {
    code: Code,
    error: Error,
}

/// The result of a call.
pub(crate) type Answer<T> = Result<T, Refused>;

impl Refused {
    /// The error of a size that no volume can have.
    pub(crate) fn out_of_range(error: Error) -> Self {
        Self { code: Code::OutOfRange, error }
    }

    /// The error of a list that cannot be continued where the caller wants.
    pub(crate) fn invalid_token() -> Self {
        let message = "the starting token is not valid";
        let error = Error::new(ErrorKind::Aborted, message);
        error.with_repair("list from the beginning, without a token").into()
    }

    /// The error of a call that the storage does not have.
    pub(crate) fn unimplemented(error: Error) -> Self {
        Self { code: Code::Unimplemented, error }
    }

    #[cfg(test)]
    pub(crate) fn code(&self) -> Code {
        self.code
    }

    /// Returns the error.
    pub(crate) fn error(&self) -> &Error {
        &self.error
    }

    /// Returns the status for the caller.
    pub(crate) fn status(&self) -> Status {
        Status::new(self.code, status::message(&self.error))
    }
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self { code: status::code(error.kind()), error }
    }
}
