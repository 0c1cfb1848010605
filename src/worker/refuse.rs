//! A worker without a volume, for a device that no worker will serve again: it answers every request with an
//! I/O error.
//!
//! The kernel retains the requests that it had sent to a dead worker until a server answers them, regardless
//! of `dead_connection_timeout` (`nbd_xmit_timeout`). The processes that wait for these requests hang until
//! then.
//!
//! The process is confined like every worker. It has no control socket, so that no later supervisor takes it
//! for the worker of the volume. It ends when its channel ends; the next supervisor starts another one.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::channel::Channel;
use super::protocol::{FromWorker, Ready, Refuse, ToWorker};
use super::version::ProtocolVersions;
use cleat_backend::{Completer, Image, ImageQueue, Outcome, RequestId, Started, VolumeIdentity};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::request::{IoError, Request};
use cleat_core::volume::{BlockSizes, Features};
use cleat_export::server::{ExportName, Limits, Server};
use cleat_nbd::wire::transmission_flags;
use cleat_statistics::{Page, SLOTS};
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};

/// How long the connection threads may take to end. They never wait for a backend.
const STOP_LIMIT: Duration = Duration::from_secs(1);

/// A worker that answers every request with an error.
pub(super) struct RefusingWorker {
    start: Refuse,
    server: Server,
}

impl RefusingWorker {
    /// Makes a worker without connections.
    ///
    /// # Errors
    /// Returns an error if the data path cannot be set up.
    pub(super) fn new(start: Refuse, page: Page) -> Result<Self> {
        // The requests get no buffers, because no request is ever started.
        let limits = Limits { connections: SLOTS, buffer_bytes: 0, ..Limits::default() };
        let (server, _) = Server::new(Arc::new(NoVolume), ExportName::default(), page, limits)?;
        server.set_fail_io(true);
        Ok(Self { start, server })
    }

    /// Answers requests until the supervisor sends `Stop` or closes the channel.
    ///
    /// # Errors
    /// Returns an error if the channel breaks.
    pub(super) fn run(self, channel: &Channel) -> Result<()> {
        channel.send(&FromWorker::Ready(Box::new(self.ready())), &[])?;
        let ended = self.serve_until_the_end(channel);
        // The replies that were made are sent before the sockets close. A connection that does not end in
        // time is cut off when the process exits.
        let _ = self.server.stop(STOP_LIMIT);
        ended
    }

    fn serve_until_the_end(&self, channel: &Channel) -> Result<()> {
        loop {
            wait_until_readable(channel)?;
            let answer = match channel.receive() {
                Ok(None | Some((ToWorker::Stop, _))) => return Ok(()),
                Ok(Some((command, descriptors))) => self.execute(&command, descriptors),
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::InvalidArgument | ErrorKind::Unsupported
                    ) =>
                {
                    Err(error)
                }
                Err(error) => return Err(error),
            };
            match answer {
                Ok(answer) => channel.send(&answer, &[])?,
                Err(error) => channel.send_failure(&error)?,
            }
        }
    }

    fn execute(&self, command: &ToWorker, sockets: Vec<OwnedFd>) -> Result<FromWorker> {
        match command {
            ToWorker::Ping => Ok(FromWorker::Done),
            ToWorker::Serve => {
                for socket in sockets {
                    self.server.add_kernel_connection(socket)?;
                }
                Ok(FromWorker::Serving)
            }
            _ => {
                let message = "this worker has no volume: it accepts only serve, ping and stop";
                Err(Error::new(ErrorKind::Unsupported, message))
            }
        }
    }

    fn ready(&self) -> Ready {
        let ProtocolVersions { newest, oldest, build } = ProtocolVersions::of_this_build();
        let blocks = NoVolume.block_sizes();
        Ready {
            version: newest,
            oldest,
            build,
            binary: String::new(),
            mapping_id: self.start.mapping_id.clone(),
            generation: 0,
            pid: std::process::id(),
            identity: None,
            size: NoVolume.size(),
            minimum_block: blocks.minimum,
            preferred_block: blocks.preferred,
            transmission_flags: transmission_flags(NoVolume.features()),
            outlives_worker: false,
            connections: 0,
            opened: None,
        }
    }
}

/// Waits without a limit until the channel has a message or has ended.
fn wait_until_readable(channel: &Channel) -> Result<()> {
    let mut set = [PollFd::new(channel.as_fd(), PollFlags::POLLIN)];
    match poll(&mut set, PollTimeout::NONE) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(Error::from_io("cannot wait for messages", error.into())),
    }
}

/// The refusing volume. It has the maximum size and every feature, so that the data path passes each request
/// of the kernel on to the same error.
struct NoVolume;

impl Image for NoVolume {
    fn size(&self) -> u64 {
        1 << 62
    }

    fn block_sizes(&self) -> BlockSizes {
        BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 }
    }

    fn features(&self) -> Features {
        Features::ALL
    }

    fn identity(&self) -> VolumeIdentity {
        VolumeIdentity::new("no volume")
    }

    fn queue(&self, _: &mut Ring, _: &Completer) -> Result<Box<dyn ImageQueue>> {
        Ok(Box::new(Self))
    }

    fn refresh_size(&self) -> Result<u64> {
        Ok(self.size())
    }
}

impl ImageQueue for NoVolume {
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
    use std::os::fd::BorrowedFd;
    use std::os::unix::net::UnixStream;
    use std::thread::JoinHandle;

    use cleat_nbd::wire::{RequestHeader, command, parse_simple_reply};
    use cleat_sys::seqpacket;
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    use super::*;
    use crate::protocol::MAX_PACKET;

    /// The supervisor's end of a channel to a refusing worker on a thread of this process.
    struct Supervisor {
        channel: OwnedFd,
        worker: JoinHandle<Result<()>>,
    }

    impl Supervisor {
        fn start() -> Self {
            let (unix, packets) = (AddressFamily::Unix, SockType::SeqPacket);
            let (channel, theirs) =
                socketpair(unix, packets, None, SockFlag::SOCK_CLOEXEC).unwrap();
            let worker = std::thread::spawn(move || {
                let start = Refuse { mapping_id: "id".to_owned(), ..Refuse::default() };
                let (page, _) = Page::create()?;
                RefusingWorker::new(start, page)?.run(&Channel::new(theirs)?)
            });
            let supervisor = Self { channel, worker };
            let FromWorker::Ready(ready) = supervisor.receive() else { panic!("it is not ready") };
            assert_eq!(ready.mapping_id, "id");
            supervisor
        }

        fn receive(&self) -> FromWorker {
            let mut buffer = vec![0; MAX_PACKET];
            let (length, _) = seqpacket::receive(self.channel.as_fd(), &mut buffer).unwrap();
            serde_json::from_slice(&buffer[..length]).unwrap()
        }

        fn send(&self, command: &ToWorker, descriptors: &[BorrowedFd<'_>]) {
            let text = serde_json::to_vec(command).unwrap();
            seqpacket::send(self.channel.as_fd(), &text, descriptors).unwrap();
        }

        fn call(&self, command: &ToWorker, descriptors: &[BorrowedFd<'_>]) -> FromWorker {
            self.send(command, descriptors);
            self.receive()
        }

        /// Gives the worker a connection, and returns the kernel's end of it.
        fn connect(&self) -> UnixStream {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            assert_eq!(self.call(&ToWorker::Serve, &[theirs.as_fd()]), FromWorker::Serving);
            ours
        }
    }

    fn assert_every_request_fails(socket: &mut UnixStream) {
        let (read, write, flush) = (command::READ, command::WRITE, command::FLUSH);
        for (cookie, (command, length)) in
            [(read, 4096), (write, 3 << 20), (flush, 0), (read, 1 << 20)].into_iter().enumerate()
        {
            let cookie = cookie as u64;
            let header = RequestHeader { flags: 1, command, cookie, offset: 1 << 40, length };
            socket.write_all(&header.encode()).unwrap();
            if command == write {
                socket.write_all(&vec![1; length as usize]).unwrap();
            }
            let mut reply = [0; 16];
            socket.read_exact(&mut reply).unwrap();
            let (answered, result) = parse_simple_reply(&reply).unwrap();
            assert!(answered == cookie && result.is_err(), "{command} {result:?}");
        }
    }

    #[test]
    fn every_request_fails_until_the_supervisor_stops_the_worker() {
        let supervisor = Supervisor::start();
        let mut sockets = [supervisor.connect(), supervisor.connect()];
        sockets.iter_mut().for_each(assert_every_request_fails);
        supervisor.send(&ToWorker::Stop, &[]);
        supervisor.worker.join().unwrap().unwrap();
        assert!(sockets.iter_mut().all(|socket| socket.read(&mut [0; 1]).unwrap() == 0));
    }

    #[test]
    fn the_worker_ends_with_its_channel() {
        let supervisor = Supervisor::start();
        let mut socket = supervisor.connect();
        let Supervisor { channel, worker } = supervisor;
        drop(channel);
        worker.join().unwrap().unwrap();
        assert_eq!(socket.read(&mut [0; 1]).unwrap(), 0);
    }

    #[test]
    fn commands_that_need_a_volume_fail() {
        let supervisor = Supervisor::start();
        assert_eq!(supervisor.call(&ToWorker::Ping, &[]), FromWorker::Done);
        for command in [ToWorker::RefreshSize, ToWorker::PrepareHandover] {
            let FromWorker::Failed(failure) = supervisor.call(&command, &[]) else {
                panic!("{command:?} succeeds")
            };
            assert_eq!(failure.kind, ErrorKind::Unsupported, "{failure:?}");
        }
        let mut socket = supervisor.connect();
        assert_every_request_fails(&mut socket);
    }
}
