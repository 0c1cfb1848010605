//! The bounds of a server and its connections.

/// Bounds of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections at one time; at most [`cleat_statistics::SLOTS`].
    pub connections: usize,
    /// Requests of one connection that are in flight or wait for their reply to leave; 1 to 1024. The
    /// kernel's driver never has more than 128.
    pub depth: u32,
    /// Payload memory of one connection, in bytes. A request that is alone is admitted beyond it.
    pub buffer_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 16, depth: 128, buffer_bytes: 64 << 20 }
    }
}
