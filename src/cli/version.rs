//! The version, build and features of this binary.

pub(super) use cleat_worker::version::LONG;
