//! The worker process: one a volume. It receives its volume and sockets over an inherited
//! descriptor, opens the backend, gives up every privilege, and runs the data path.
//!
//! Comes in: [`protocol`] messages of the supervisor in charge. Goes out: answers, events, and the
//! served connections. What may never happen here: a privilege kept past [`sandbox`], a wait of the
//! data path for the supervisor, an end of the process while connections are served.

pub mod channel;
mod log;
pub mod process;
pub mod protocol;
pub mod sandbox;
mod session;
