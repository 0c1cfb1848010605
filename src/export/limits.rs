//! The bounds of a server and its connections.

/// Bounds of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The maximum number of connections at one time; at most [`cleat_statistics::SLOTS`].
    pub connections: usize,
    /// The maximum number of requests of one connection that are in flight or whose reply is not sent; 1 to
    /// 1024. The kernel's driver never has more than 128.
    pub depth: u32,
    /// The payload memory of one connection, in bytes. A single request is admitted beyond it.
    pub buffer_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 16, depth: 128, buffer_bytes: 64 << 20 }
    }
}
