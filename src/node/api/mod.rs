//! The control API: `proto/cleat/v1/node.proto` over a unix socket.

pub(crate) mod convert;
pub(crate) mod service;
pub(crate) mod validate;
