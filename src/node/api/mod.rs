//! The control API: `proto/cleat/v1/node.proto` over a unix socket.

pub(crate) mod convert;
#[cfg(feature = "fault")]
pub(crate) mod faults;
pub(crate) mod service;
pub(crate) mod validate;
