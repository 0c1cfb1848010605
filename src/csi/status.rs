//! Errors as gRPC statuses with the codes of the CSI specification.
//!
//! UNIMPLEMENTED means there that the driver does not have the call, so a missing part of the system is
//! FAILED_PRECONDITION. So is a volume that another client owns: DATA_LOSS has no meaning for CSI callers.

use cleat_core::error::{Error, ErrorKind};
use tonic::{Code, Status};

/// Converts an error.
pub(crate) fn of(error: &Error) -> Status {
    Status::new(code(error.kind()), message(error))
}

/// Returns the message of an error. It ends with the repair, because CSI callers show only the message.
pub(crate) fn message(error: &Error) -> String {
    match error.repair() {
        Some(repair) => format!("{}; to repair: {repair}", error.report()),
        None => error.report(),
    }
}

/// Returns the code of an error.
pub(crate) fn code(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::InvalidArgument => Code::InvalidArgument,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::AlreadyExists => Code::AlreadyExists,
        ErrorKind::Aborted => Code::Aborted,
        ErrorKind::PermissionDenied => Code::PermissionDenied,
        ErrorKind::InUse | ErrorKind::Unsupported | ErrorKind::Fenced | ErrorKind::Replaced => {
            Code::FailedPrecondition
        }
        ErrorKind::Unavailable => Code::Unavailable,
        ErrorKind::TimedOut => Code::DeadlineExceeded,
        ErrorKind::NoSpace => Code::ResourceExhausted,
        ErrorKind::Internal => Code::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repair_is_part_of_the_message() {
        let error = Error::new(ErrorKind::InUse, "v is in use").with_repair("umount /mnt");
        let status = of(&error);
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert_eq!(status.message(), "v is in use; to repair: umount /mnt");
    }
}
