//! An NBD client and server that share no code with the project's protocol crate, so that a mistake in
//! that crate is not hidden by the same mistake here.

#[cfg(feature = "daemon")]
pub mod client;
pub mod kernel;
pub mod server;
pub mod wire;
