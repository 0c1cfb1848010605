//! The NBD protocol, as the NBD project's `doc/proto.md` has it, without any I/O.
//!
//! Comes in: bytes of one connection, in any pieces. Goes out: requests, checked, and the bytes to
//! answer with. The phases are [`handshake`], which a client of ours begins with, and
//! [`transmission`], which the kernel begins with (netlink told it the rest). [`wire`] is the codec
//! under both, and [`errno`] the only place that knows error numbers on the wire.
//!
//! What may never happen here: a system call, a wait, a panic whatever the peer sends, or memory
//! taken by a number that the peer chose.

pub mod errno;
pub mod handshake;
pub mod structured;
pub mod transmission;
pub mod wire;
