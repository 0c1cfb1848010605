//! The error numbers of the protocol ("Error values"). No other file maps them.

use cleat_core::request::IoError;

const EPERM: u32 = 1;
const EIO: u32 = 5;
const ENOMEM: u32 = 12;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;
const ESHUTDOWN: u32 = 108;

/// Returns the value of a reply's error field. Zero is success.
pub fn to_wire(result: Result<(), IoError>) -> u32 {
    match result {
        Ok(()) => 0,
        Err(IoError::Retry | IoError::Broken) => EIO,
        Err(IoError::Fenced | IoError::Shutdown) => ESHUTDOWN,
        Err(IoError::NoSpace) => ENOSPC,
        Err(IoError::Invalid) => EINVAL,
        Err(IoError::ReadOnly) => EPERM,
        Err(IoError::Unsupported) => ENOTSUP,
        Err(IoError::NoMemory) => ENOMEM,
    }
}

/// Returns the result that the error field of a server's reply stands for.
///
/// # Errors
/// Returns an error for every value except zero.
pub fn from_wire(error: u32) -> Result<(), IoError> {
    match error {
        0 => Ok(()),
        EPERM => Err(IoError::ReadOnly),
        EIO => Err(IoError::Broken),
        ENOMEM => Err(IoError::NoMemory),
        ENOSPC => Err(IoError::NoSpace),
        ENOTSUP => Err(IoError::Unsupported),
        ESHUTDOWN => Err(IoError::Shutdown),
        // "The client SHOULD treat an unexpected error value as if it had been NBD_EINVAL." This includes
        // NBD_EOVERFLOW, which a server sends for requests that this crate never makes.
        _ => Err(IoError::Invalid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_numbers_match_the_specification() {
        assert_eq!(to_wire(Ok(())), 0);
        let wire: Vec<u32> = IoError::ALL.iter().map(|&kind| to_wire(Err(kind))).collect();
        assert_eq!(wire, [5, 108, 28, 22, 1, 95, 12, 108, 5]);
    }

    #[test]
    fn errors_survive_the_wire_and_unknown_numbers_are_invalid() {
        for kind in IoError::ALL {
            let back = from_wire(to_wire(Err(kind)));
            assert_eq!(to_wire(back), to_wire(Err(kind)));
        }
        assert_eq!(from_wire(4711), Err(IoError::Invalid));
    }
}
