//! The NBD protocol without any I/O, as specified in `doc/proto.md` of the NBD project
//! (<https://github.com/NetworkBlockDevice/nbd>). Section names in quotes in this crate refer to that
//! document.
//!
//! - Input: the bytes of one connection, split in any way.
//! - Output: checked requests, and the bytes of the replies.
//!
//! A client of `cleat serve` starts with the [`handshake`]. The kernel's driver starts directly with
//! [`transmission`], because netlink has configured the rest. Both use the codec in [`wire`]. [`structured`]
//! encodes structured replies, and [`errno`] is the only module that knows the error numbers of the protocol.
//!
//! Never allowed here: a system call, a wait, a panic caused by input, or an allocation whose size a peer
//! has chosen.

pub mod errno;
pub mod handshake;
pub mod structured;
pub mod transmission;
pub mod wire;
