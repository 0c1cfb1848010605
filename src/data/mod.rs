//! The data path of one volume: sockets to NBD to requests to the backend, and back.
//!
//! Comes in: connected sockets, of the kernel's driver or of NBD clients, and an open volume. Goes
//! out: how each connection ended. A connection has a thread of its own with a ring of its own
//! ([`connection`]); they share nothing but the volume. [`server`] owns the threads, [`listener`]
//! puts a listening socket in front of it.
//!
//! What may never happen here: an allocation, lock, log line or format per request; a queue or
//! buffer without bound; one connection's end, error or panic that takes another one along. No
//! async runtime, no control, no kernel interface is named in here.

pub mod nbd;
