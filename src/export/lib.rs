//! The data path of one volume: sockets to NBD to requests to the backend, and back.
//!
//! Comes in: connected sockets, of the kernel's driver or of NBD clients, and an open volume. Goes
//! out: how each connection ended. A connection has a thread of its own with a ring of its own
//! ([`connection`]); they share nothing but the volume. [`server`] owns the threads, [`serve`]
//! puts a listening socket in front of it.
//!
//! What may never happen here: an allocation, lock, log line or format per request; a queue or
//! buffer without bound; one connection's end, error or panic that takes another one along. No
//! async runtime, no control, no kernel interface is named in here.

mod block_status;
mod buffer_pool;
mod connection;
mod control;
pub mod handover;
mod in_flight;
mod limiter;
mod limits;
mod link;
mod negotiation;
mod paused;
mod policy;
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
    /// by the client, in order
    #[error("the client disconnected")]
    Disconnected,
    /// by us, after the running requests
    #[error("stopped")]
    Stopped,
    /// by us, at rest: the socket is served by another process
    #[error("handed over")]
    HandedOver,
    /// by us, at once
    #[error("aborted")]
    Aborted,
    /// the stream ended where more should have come
    #[error("the client closed the connection without a disconnect request")]
    Closed,
    /// the handshake came to nothing
    #[error(transparent)]
    Refused(cleat_nbd::handshake::Refusal),
    /// the client did not get through the handshake in time
    #[error("the client did not complete the handshake in time")]
    HandshakeTimeout,
    /// what came is not NBD
    #[error(transparent)]
    Violation(cleat_nbd::transmission::Violation),
    /// the socket failed
    #[error("the socket failed: {0}")]
    Socket(std::io::Error),
    /// the ring failed
    #[error("io_uring failed: {0}")]
    Ring(std::io::Error),
    /// a defect, in this program
    #[error("the connection's thread panicked: {0}")]
    Panicked(String),
}

impl End {
    /// Whether the peer knows that the connection is over and expects no more of it.
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
