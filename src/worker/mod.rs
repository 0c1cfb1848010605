//! The worker process: one a volume. It receives its volume and sockets over an inherited
//! descriptor, opens the backend, gives up every privilege, and runs the data path.

pub mod channel;
mod log;
pub mod process;
pub mod protocol;
pub mod sandbox;
mod session;
