//! What this binary is: version, build and features.

pub(super) use cleat_worker::version::LONG;
