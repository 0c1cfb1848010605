//! What a volume looks like to a client: sizes of access, features, extents.

/// Sizes of access, in bytes; each a power of two except `maximum`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths must be multiples of this.
    pub minimum: u32,
    /// Multiples of this are served best.
    pub preferred: u32,
    /// The longest payload of one request.
    pub maximum: u32,
}

/// What a volume can do beyond reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// Refuses every request that modifies.
    pub read_only: bool,
    /// FLUSH means something.
    pub flush: bool,
    /// Writes can be made durable one by one.
    pub fua: bool,
    /// TRIM may free space.
    pub trim: bool,
    /// WRITE_ZEROES is served.
    pub write_zeroes: bool,
    /// `fast_zero` is understood.
    pub fast_zero: bool,
    /// CACHE does something.
    pub cache: bool,
    /// The contract holds across queues, so several connections may be used.
    pub multi_connection: bool,
    /// The content outlives this process, so that a new worker may take over after a crash.
    pub outlives_worker: bool,
}

impl Features {
    /// Everything there is.
    pub const ALL: Self = Self {
        read_only: false,
        flush: true,
        fua: true,
        trim: true,
        write_zeroes: true,
        fast_zero: true,
        cache: true,
        multi_connection: true,
        outlives_worker: true,
    };
}

/// A part of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// In bytes; never zero.
    pub length: u64,
    /// Takes no room, and reads as zeroes. What is no hole may hold anything.
    pub hole: bool,
}
