//! What a block device asks of a volume: the request, and the ways in which it can end.
//!
//! Everything between the wire and a backend speaks in these types. Nothing here knows of NBD:
//! errno values and command numbers live in `data::nbd`.

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Fill the request's buffer from the volume.
    Read,
    /// Store the request's buffer.
    Write,
    /// Make durable every write that completed before this request was received. Has no range.
    Flush,
    /// The range's content is no longer needed. May be ignored, or may make it read as zero.
    Trim,
    /// The range reads as zeroes afterwards.
    WriteZeroes,
    /// The range will be read soon; may be ignored.
    Cache,
}

impl Op {
    /// Every operation, in the order of their statistics.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Trim, Self::WriteZeroes, Self::Cache];

    /// Whether the operation changes what the volume holds, so that a read-only one refuses it.
    pub fn modifies(self) -> bool {
        matches!(self, Self::Write | Self::Trim | Self::WriteZeroes)
    }

    /// The operation's name in logs, statistics and metrics.
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

/// Demands on how a request is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Flags {
    /// Durable when it completes (force unit access); on writes, trims and write-zeroes.
    pub fua: bool,
    /// `WriteZeroes` keeps the range allocated.
    pub no_hole: bool,
    /// `WriteZeroes` fails with [`IoError::Unsupported`] rather than be as slow as writing.
    pub fast_zero: bool,
}

/// One request on a volume. Its buffer, where it has one, travels beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What is asked for.
    pub op: Op,
    /// How.
    pub flags: Flags,
    /// First byte. Zero for `Flush`.
    pub offset: u64,
    /// Bytes. Zero for `Flush`; for the rest never zero once it has been checked.
    pub length: u64,
}

/// Why a request failed. `Copy`, so that the hot path never allocates.
///
/// The kind tells the caller what to do: `Retry` may succeed later, `Fenced` never will again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum IoError {
    /// the backend cannot be reached just now; the same request may succeed later
    ///
    /// Promises that nothing of the request is still on its way, else it could land after its
    /// repetition, on top of what has been written since; and that the repetition means all that the
    /// request meant: a flush after writes may have been lost is `Broken`.
    #[error("the backend cannot be reached just now")]
    Retry,
    /// somebody else owns the volume; nothing will be written until it is opened anew
    #[error("fenced: somebody else owns the volume")]
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
    /// a bound of this process was reached (memory, queue)
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
    /// Every kind, in the order of their statistics.
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

    /// The kind's name in statistics and metrics.
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

    /// The kind that an operating-system error number stands for, as a local file gives it.
    pub fn from_errno(errno: i32) -> Self {
        match errno {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Self::NoSpace,
            libc::EINVAL => Self::Invalid,
            libc::EROFS | libc::EPERM | libc::EACCES => Self::ReadOnly,
            libc::EOPNOTSUPP | libc::ENOSYS => Self::Unsupported,
            libc::ENOMEM | libc::ENOBUFS => Self::NoMemory,
            libc::ESHUTDOWN => Self::Fenced,
            // Of a transport below the file: all paths of a multipath or remote device are down (the
            // block layer's TIMEOUT and TRANSPORT), or a network file system gave up for now. EIO and
            // what is final for an open file (ESTALE, ENODEV) are not among them.
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
