//! For a device that no worker will serve again: its requests are answered, each with an error. What
//! the kernel had sent to a worker that died, it holds back until somebody is there to answer it,
//! whatever `dead_connection_timeout` says (nbd_xmit_timeout), and whoever waits for it with it.
//!
//! Runs in the supervisor: there is no volume to open and no byte to be kept.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use cleat_backend::{Completer, Image, ImageQueue, Outcome, RequestId, Started};
use cleat_core::error::Result;
use cleat_core::request::{IoError, Request};
use cleat_core::volume::{BlockSizes, Features};
use cleat_export::server::{ExportName, Limits, Server};
use cleat_statistics::{Page, SLOTS};
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};

/// For the threads to end once they are told to; they wait for nobody.
const STOP_LIMIT: Duration = Duration::from_secs(1);

/// Answers until it is dropped.
pub struct Refusing {
    server: Server,
}

impl Refusing {
    /// Answers the kernel at the other ends of `sockets`. Blocks for a moment.
    ///
    /// # Errors
    /// When threads or rings cannot be made.
    pub fn start(sockets: Vec<OwnedFd>) -> Result<Self> {
        let (page, _) = Page::create()?;
        // Requests without their payloads: nothing is ever started.
        let limits = Limits { connections: SLOTS, buffer_bytes: 0, ..Limits::default() };
        let (server, _) = Server::new(Arc::new(Nothing), ExportName::default(), page, limits)?;
        server.set_fail_io(true);
        let refusing = Self { server };
        refusing.add(sockets)?;
        Ok(refusing)
    }

    /// Answers at these, too.
    ///
    /// # Errors
    /// As [`Refusing::start`].
    pub fn add(&self, sockets: Vec<OwnedFd>) -> Result<()> {
        sockets.into_iter().try_for_each(|s| self.server.add_kernel_connection(s).map(drop))
    }
}

impl Drop for Refusing {
    fn drop(&mut self) {
        // What was answered has left before the sockets close; more cannot be done for it.
        let _ = self.server.stop(STOP_LIMIT);
    }
}

/// As large and able as a device can be, so that each request gets the same answer.
struct Nothing;

impl Image for Nothing {
    fn size(&self) -> u64 {
        1 << 62
    }

    fn block_sizes(&self) -> BlockSizes {
        BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 }
    }

    fn features(&self) -> Features {
        Features::ALL
    }

    fn queue(&self, _: &mut Ring, _: &Completer) -> Result<Box<dyn ImageQueue>> {
        Ok(Box::new(Self))
    }

    fn refresh_size(&self) -> Result<u64> {
        Ok(self.size())
    }
}

impl ImageQueue for Nothing {
    fn start(&mut self, _: RequestId, _: Request, buffer: Option<Buffer>, _: &mut Ring) -> Started {
        Started::Done(Outcome { result: Err(IoError::Broken), buffer })
    }

    fn on_ring(&mut self, _: Completion, _: &mut Ring) -> Option<(RequestId, Outcome)> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use cleat_nbd::wire::{RequestHeader, command, parse_simple_reply};

    #[test]
    fn every_request_fails_until_it_is_dropped() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let refusing = Refusing::start(vec![theirs.into()]).unwrap();
        let (read, write, flush) = (command::READ, command::WRITE, command::FLUSH);
        for (cookie, (command, length)) in
            [(read, 4096), (write, 3 << 20), (flush, 0), (read, 1 << 20)].into_iter().enumerate()
        {
            let cookie = cookie as u64;
            let header = RequestHeader { flags: 1, command, cookie, offset: 1 << 40, length };
            ours.write_all(&header.encode()).unwrap();
            if command == write {
                ours.write_all(&vec![1; length as usize]).unwrap();
            }
            let mut reply = [0; 16];
            ours.read_exact(&mut reply).unwrap();
            let (answered, result) = parse_simple_reply(&reply).unwrap();
            assert!(answered == cookie && result.is_err(), "{command} {result:?}");
        }
        drop(refusing);
        assert_eq!(ours.read(&mut [0; 1]).unwrap(), 0);
    }
}
