//! A network between a node and the API server that a test can hold: nothing is lost, and everything arrives late.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

/// A proxy. It serves until the test program ends.
#[derive(Debug, Clone)]
pub(crate) struct Proxy {
    port: u16,
    gate: Arc<Gate>,
}

#[derive(Debug, Default)]
struct Gate {
    is_held: Mutex<bool>,
    changed: Condvar,
}

impl Proxy {
    /// Starts a proxy for the server at `address`.
    pub(crate) fn start(address: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let gate = Arc::new(Gate::default());
        let (address, accepting) = (address.to_owned(), Arc::clone(&gate));
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(&address) else { continue };
                pass_on(&client, &server, &accepting);
                pass_on(&server, &client, &accepting);
            }
        });
        Self { port, gate }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Holds everything that is sent from now on in either direction, or lets it pass again.
    pub(crate) fn hold(&self, is_held: bool) {
        *self.gate.is_held.lock().unwrap() = is_held;
        self.gate.changed.notify_all();
    }
}

impl Gate {
    fn wait(&self) {
        let held = self.is_held.lock().unwrap();
        drop(self.changed.wait_while(held, |is_held| *is_held).unwrap());
    }
}

/// Passes on what `from` sends, on a thread of its own, until one of the two closes.
fn pass_on(from: &TcpStream, to: &TcpStream, gate: &Arc<Gate>) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    let gate = Arc::clone(gate);
    thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            gate.wait();
            if to.write_all(&buffer[..length]).is_err() {
                break;
            }
        }
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    });
}
