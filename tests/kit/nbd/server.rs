//! A small NBD server for the remote ends of kernel sockets: transmission phase only, data in a `Vec`,
//! one thread per connection. It shares no code with the crate's own server, on purpose.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::wire::{DISCONNECT, FLUSH, READ, REQUEST_LEN, Request, WRITE, encode_reply};

/// HAS_FLAGS, SEND_FLUSH, SEND_FUA, CAN_MULTI_CONN.
pub const FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 8;

/// The server of one volume.
pub struct Server(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    data: Vec<u8>,
    streams: Vec<UnixStream>,
    alive: usize,
    ended_in_order: usize,
}

impl Server {
    /// Creates a server of `size` zero bytes.
    pub fn new(size: u64) -> Self {
        let data = vec![0; usize::try_from(size).unwrap()];
        let state = State { data, streams: Vec::new(), alive: 0, ended_in_order: 0 };
        Self(Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() }))
    }

    /// Serves a new connection and returns the kernel's end.
    pub fn connection(&self) -> OwnedFd {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut state = self.0.state.lock().unwrap();
        state.streams.push(ours.try_clone().unwrap());
        state.alive += 1;
        drop(state);
        let shared = Arc::clone(&self.0);
        std::thread::spawn(move || {
            let in_order = serve(&shared, ours).unwrap_or(false);
            let mut state = shared.state.lock().unwrap();
            state.alive -= 1;
            state.ended_in_order += usize::from(in_order);
            shared.changed.notify_all();
        });
        theirs.into()
    }

    /// Closes every connection at once, as the death of a worker does.
    pub fn cut(&self) {
        for stream in self.0.state.lock().unwrap().streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.wait(|state| state.alive == 0);
    }

    /// Extends the volume, for a larger device.
    pub fn grow(&self, size: u64) {
        self.0.state.lock().unwrap().data.resize(usize::try_from(size).unwrap(), 0);
    }

    /// Returns `length` bytes of the volume at `offset`.
    pub fn bytes(&self, offset: usize, length: usize) -> Vec<u8> {
        self.0.state.lock().unwrap().data[offset..offset + length].to_vec()
    }

    /// Waits until `connections` connections have ended by `NBD_CMD_DISC`. Returns `false` after 30 s.
    pub fn ended_in_order(&self, connections: usize) -> bool {
        self.wait(|state| state.ended_in_order == connections)
    }

    /// Returns the number of open connections.
    pub fn connections_alive(&self) -> usize {
        self.0.state.lock().unwrap().alive
    }

    fn wait(&self, condition: impl Fn(&State) -> bool) -> bool {
        let state = self.0.state.lock().unwrap();
        let limit = Duration::from_secs(30);
        let waited =
            self.0.changed.wait_timeout_while(state, limit, |state| !condition(state)).unwrap();
        !waited.1.timed_out()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for stream in &self.0.state.lock().unwrap().streams {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Serves requests until the connection ends. Returns whether it ended by `NBD_CMD_DISC`.
fn serve(shared: &Shared, mut stream: UnixStream) -> std::io::Result<bool> {
    loop {
        let mut header = [0; REQUEST_LEN];
        stream.read_exact(&mut header)?;
        let Request { command, cookie, offset, length, .. } = Request::parse(&header);
        let (offset, length) = (usize::try_from(offset).unwrap(), length as usize);
        let mut reply = encode_reply(cookie, 0).to_vec();
        let mut payload = vec![0; if command == WRITE { length } else { 0 }];
        stream.read_exact(&mut payload)?;
        let mut state = shared.state.lock().unwrap();
        let inside = offset + length <= state.data.len();
        match command {
            READ if inside => reply.extend(&state.data[offset..offset + length]),
            WRITE if inside => state.data[offset..offset + length].copy_from_slice(&payload),
            DISCONNECT => return Ok(true),
            FLUSH => {}
            _ => reply = encode_reply(cookie, libc::EINVAL.cast_unsigned()).to_vec(),
        }
        drop(state);
        // The kernel may have closed its end, with a request in flight. NBD_CMD_DISC is then still to be read.
        let _ = stream.write_all(&reply);
    }
}

/// Waits for at most `limit` and returns whether the peer of `stream` has closed the connection.
pub fn hangs_up(stream: &UnixStream, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        let mut set = [PollFd::new(stream.as_fd(), PollFlags::empty())];
        poll(&mut set, PollTimeout::from(50_u8)).unwrap();
        if set[0].revents().is_some_and(|events| events.contains(PollFlags::POLLHUP)) {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disconnect_behind_a_request_whose_reply_is_not_read_is_in_order() {
        let server = Server::new(4096);
        let mut kernel = UnixStream::from(server.connection());
        let state = server.0.state.lock().unwrap();
        kernel.write_all(&Request::new(READ, 1, 0, 4096).encode()).unwrap();
        kernel.write_all(&Request::new(DISCONNECT, 2, 0, 0).encode()).unwrap();
        kernel.shutdown(Shutdown::Both).unwrap();
        drop(state);
        assert!(server.ended_in_order(1));
    }
}
