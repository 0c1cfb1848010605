//! The data path of one volume: sockets to NBD to requests to the backend, and back.
//!
//! - Input: connected sockets, of the kernel's driver or of NBD clients, and an open volume.
//! - Output: how each connection ended.
//!
//! A connection has a thread and a ring of its own ([`connection`]); the connections share only the volume,
//! its policy and its statistics page. [`server`] owns the threads, and [`serve`] adds a listening socket.
//!
//! The following never happens here: an allocation, lock, log line or format per request; a queue or buffer
//! without a bound; the end, error or panic of one connection that ends another one. The crate uses no async
//! runtime, no control API and no kernel interface.

#[cfg(feature = "bench")]
pub mod bench;
mod block_status;
mod buffer_pool;
mod connection;
mod control;
pub mod handover;
mod in_flight;
mod limiter;
mod limits;
mod link;
mod log_limit;
mod modifications;
mod negotiation;
mod pages;
mod paused;
mod pipes;
mod policy;
mod polling;
mod receive_buffer;
mod receiving;
mod requests;
mod retry;
mod sending;
pub mod serve;
pub mod server;
mod statistics;
mod throttle;

/// How a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// The client sent a disconnect request.
    #[error("the client disconnected")]
    Disconnected,
    /// The server stopped the connection after its running requests.
    #[error("stopped")]
    Stopped,
    /// The connection was paused, and another process serves the socket.
    #[error("handed over")]
    HandedOver,
    /// The server ended the connection at once.
    #[error("aborted")]
    Aborted,
    /// The stream ended without a disconnect request.
    #[error("the client closed the connection without a disconnect request")]
    Closed,
    /// The negotiation failed.
    #[error(transparent)]
    Refused(cleat_nbd::handshake::Refusal),
    /// The negotiation took too long.
    #[error("the client did not complete the handshake in time")]
    HandshakeTimeout,
    /// The maximum number of clients was reached while the client completed its handshake.
    #[error("the maximum number of clients is served already")]
    Full,
    /// The client violated the NBD protocol.
    #[error(transparent)]
    Violation(cleat_nbd::transmission::Violation),
    /// The socket failed.
    #[error("the socket failed: {0}")]
    Socket(std::io::Error),
    /// The ring failed.
    #[error("io_uring failed: {0}")]
    Ring(std::io::Error),
    /// The connection's thread panicked, which is a defect of this program.
    #[error("the connection's thread panicked: {0}")]
    Panicked(String),
}

impl End {
    /// Returns whether the peer expects the end of the connection.
    pub fn is_orderly(&self) -> bool {
        matches!(
            self,
            Self::Disconnected
                | Self::Stopped
                | Self::HandedOver
                | Self::Refused(cleat_nbd::handshake::Refusal::Aborted)
        )
    }
}
