//! The properties of a volume that a client sees: block sizes, features, extents.

/// Block sizes, in bytes. Each is a power of two, except `maximum`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// The unit of offsets and lengths: both must be multiples of it.
    pub minimum: u32,
    /// The unit with the best performance.
    pub preferred: u32,
    /// The maximum payload of one request.
    pub maximum: u32,
}

/// What a volume supports beyond reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// The volume refuses every request that modifies it.
    pub read_only: bool,
    /// A flush makes earlier writes durable; without it, flushes are not served.
    pub flush: bool,
    /// A single write can be made durable (force unit access).
    pub fua: bool,
    /// A trim may free space.
    pub trim: bool,
    /// Write-zeroes requests are served.
    pub write_zeroes: bool,
    /// The flag `fast_zero` is honoured.
    pub fast_zero: bool,
    /// A cache request has an effect.
    pub cache: bool,
    /// Flushes and forced writes cover all connections, so that a device may have several.
    pub multi_connection: bool,
    /// Every acknowledged write survives the death of the process that serves the volume, so that a new
    /// worker can serve the device after a crash. Without it, the device fails when its worker dies.
    pub keeps_acknowledged_writes: bool,
}

impl Features {
    /// A writable volume with every feature.
    pub const ALL: Self = Self {
        read_only: false,
        flush: true,
        fua: true,
        trim: true,
        write_zeroes: true,
        fast_zero: true,
        cache: true,
        multi_connection: true,
        keeps_acknowledged_writes: true,
    };
}

/// A part of a volume whose bytes are all data or all hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The length in bytes; never zero.
    pub length: u64,
    /// Whether the part is a hole: it is not allocated and reads as zeroes. Other parts may hold any
    /// bytes, zeroes included.
    pub hole: bool,
}
