//! What several integration tests share.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test uses its part")]

pub mod nbd_server;
