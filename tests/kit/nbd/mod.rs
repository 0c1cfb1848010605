//! NBD spoken by hand: a client and a server that share no code with the project's protocol crate,
//! so that a mistake there does not cancel itself out.

#[cfg(feature = "daemon")]
pub mod client;
pub mod kernel;
pub mod server;
