//! Requests on a volume, and the errors with which they can end.
//!
//! All code between the wire protocol and the backends uses these types. They are independent of NBD:
//! its error numbers and command numbers are in the export crate.

/// The operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Fill the request's buffer from the volume.
    Read,
    /// Store the request's buffer.
    Write,
    /// Make every write durable that completed before this request was received. It has no range.
    Flush,
    /// The content of the range is no longer needed. The backend may ignore it, or make the range read
    /// as zeroes.
    Trim,
    /// Make the range read as zeroes.
    WriteZeroes,
    /// Prepare for a read of the range. The backend may ignore it.
    Cache,
}

impl Op {
    /// All operations, in the order in which the statistics count them.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Trim, Self::WriteZeroes, Self::Cache];

    /// Returns whether the operation changes the content of the volume. A read-only volume refuses it.
    pub fn modifies(self) -> bool {
        matches!(self, Self::Write | Self::Trim | Self::WriteZeroes)
    }

    /// Returns the operation's name in logs, statistics and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Trim => "trim",
            Self::WriteZeroes => "write_zeroes",
            Self::Cache => "cache",
        }
    }
}

/// How a request has to be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Flags {
    /// The effect of a write, trim or write-zeroes is durable when it completes (force unit access).
    pub fua: bool,
    /// `WriteZeroes` keeps the range allocated.
    pub no_hole: bool,
    /// `WriteZeroes` fails with [`IoError::Unsupported`] where it would be as slow as a write.
    pub fast_zero: bool,
}

/// One request on a volume. Its buffer, if it has one, is passed separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The operation.
    pub op: Op,
    /// How the operation has to be carried out.
    pub flags: Flags,
    /// The first byte of the range. Zero for `Flush`.
    pub offset: u64,
    /// The length of the range in bytes. Zero for `Flush`; never zero for a checked request of another
    /// operation.
    pub length: u64,
}

/// Why a request failed. The type is `Copy`, so that the hot path never allocates.
///
/// The kind prescribes the caller's reaction: after `Retry` the same request may succeed later, after
/// `Fenced` it never succeeds again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum IoError {
    /// the backend cannot be reached at the moment; the same request may succeed later
    ///
    /// A backend that returns it guarantees two things. No part of the request is still in flight: a late
    /// part could overwrite newer data after the retry. And the retry has the full effect of the request:
    /// a flush that fails after writes may have been lost is therefore `Broken`, not `Retry`.
    #[error("the backend cannot be reached just now")]
    Retry,
    /// another client owns the volume; no write succeeds until the volume is opened again
    #[error("fenced: another client owns the volume")]
    Fenced,
    /// the backend has no room
    #[error("no space left in the backend")]
    NoSpace,
    /// the request is not one that this volume accepts (range, alignment, read-only)
    #[error("the volume does not accept this request")]
    Invalid,
    /// a write to a read-only volume
    #[error("the volume is read-only")]
    ReadOnly,
    /// not possible on this backend, or not fast where fast was demanded
    #[error("not supported by the backend")]
    Unsupported,
    /// a limit of this process was reached (memory, queue)
    #[error("out of memory or another bound")]
    NoMemory,
    /// the volume is being shut down
    #[error("the volume is being shut down")]
    Shutdown,
    /// the medium failed
    #[error("input/output error")]
    Broken,
}

impl IoError {
    /// All kinds, in the order in which the statistics count them.
    pub const ALL: [Self; 9] = [
        Self::Retry,
        Self::Fenced,
        Self::NoSpace,
        Self::Invalid,
        Self::ReadOnly,
        Self::Unsupported,
        Self::NoMemory,
        Self::Shutdown,
        Self::Broken,
    ];

    /// Returns the kind's name in statistics and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Fenced => "fenced",
            Self::NoSpace => "nospace",
            Self::Invalid => "invalid",
            Self::ReadOnly => "readonly",
            Self::Unsupported => "unsupported",
            Self::NoMemory => "nomemory",
            Self::Shutdown => "shutdown",
            Self::Broken => "broken",
        }
    }

    /// Returns the kind for an error number of the operating system, as I/O on a local file or device returns
    /// it.
    pub fn from_errno(errno: i32) -> Self {
        match errno {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Self::NoSpace,
            libc::EINVAL => Self::Invalid,
            libc::EROFS | libc::EPERM | libc::EACCES => Self::ReadOnly,
            libc::EOPNOTSUPP | libc::ENOSYS => Self::Unsupported,
            libc::ENOMEM | libc::ENOBUFS => Self::NoMemory,
            libc::ESHUTDOWN => Self::Fenced,
            // Errors of a transport below the file: all paths of a multipath or remote device are down
            // (the block layer's TIMEOUT and TRANSPORT), or a network file system has given up for now.
            // EIO, and errors that are final for an open file (ESTALE, ENODEV), do not belong here.
            libc::EAGAIN
            | libc::ETIMEDOUT
            | libc::ENOLINK
            | libc::EHOSTDOWN
            | libc::EHOSTUNREACH
            | libc::ENETDOWN
            | libc::ENETUNREACH
            | libc::ECONNREFUSED
            | libc::ECONNRESET
            | libc::ECONNABORTED
            | libc::ENOTCONN => Self::Retry,
            _ => Self::Broken,
        }
    }
}
