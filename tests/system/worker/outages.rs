//! Outages of a bucket that last for longer than a request is repeated.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use cleat_worker::protocol::ToWorker;
use test_kit::ceph::shared;
use test_kit::nbd::kernel as nbd;
use test_kit::worker::Worker;

use super::objects::{BLOCK, ObjectVolume, SIZE, stamp};

/// The proxy passes everything on.
const UP: u8 = 0;
/// It closes a connection on which the client reads an object.
const NO_READS: u8 = 1;
/// It closes every connection.
const DOWN: u8 = 2;

/// A store that can be made unavailable: a proxy in front of the gateway.
struct Proxy {
    address: SocketAddr,
    mode: Arc<AtomicU8>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    fn to(gateway: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (mode, streams) = (Arc::new(AtomicU8::new(UP)), Arc::new(Mutex::new(Vec::new())));
        let (seen, open) = (Arc::clone(&mode), Arc::clone(&streams));
        // It ends with the process of the test.
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if seen.load(Ordering::Relaxed) == DOWN {
                    continue;
                }
                let server = TcpStream::connect(&gateway).unwrap();
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let seen = Arc::clone(&seen);
                    thread::spawn(move || pass(from, to, &seen));
                }
                open.lock().unwrap().extend([client, server]);
            }
        });
        Self { address, mode, streams }
    }

    fn set(&self, mode: u8) {
        self.mode.store(mode, Ordering::Relaxed);
        if mode == DOWN {
            for stream in self.streams.lock().unwrap().drain(..) {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, mode: &AtomicU8) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        // A request begins a packet, because the client sends the next one only after the answer.
        let is_read = buffer.starts_with(b"GET ");
        if mode.load(Ordering::Relaxed) == NO_READS && is_read
            || to.write_all(&buffer[..count]).is_err()
        {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// Writes one block to each MiB, each time others, and waits for the answers.
fn write_all(socket: &UnixStream, round: u64) {
    for page in 0..SIZE >> 20 {
        let data = stamp(round, page);
        nbd::send(socket, nbd::WRITE, page, page << 20, BLOCK, &data);
    }
}

fn answers(socket: &UnixStream) {
    for _ in 0..SIZE >> 20 {
        assert_eq!(nbd::reply(socket).1, 0);
    }
}

#[test]
fn an_outage_for_a_minute_under_load_delays_requests_and_no_request_fails() {
    let proxy = Proxy::to(shared().s3().0);
    let volume = ObjectVolume::in_bucket_at(&proxy.address.to_string());
    for is_first in [true, false] {
        // The second one writes a checkpoint, so that the third one loads the map when its writes are confirmed.
        let (mut worker, sockets) = Worker::serving(&volume.uri, 1);
        if is_first {
            write_all(&sockets[0], 1);
            answers(&sockets[0]);
            assert_eq!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
        }
        thread::sleep(Duration::from_secs(2));
        worker.send(&ToWorker::Stop, &[]);
        assert!(worker.exit().success(), "{}", worker.log());
    }
    let (_worker, sockets) = Worker::serving(&volume.uri, 1);
    // Puts succeed, and the background cannot load the map for them, for longer than a request is repeated.
    proxy.set(NO_READS);
    write_all(&sockets[0], 2);
    thread::sleep(Duration::from_secs(20));
    proxy.set(DOWN);
    answers(&sockets[0]);
    let began = Instant::now();
    write_all(&sockets[0], 3);
    thread::sleep(Duration::from_secs(60).saturating_sub(began.elapsed()));
    proxy.set(UP);
    answers(&sockets[0]);
    for page in 0..SIZE >> 20 {
        assert!(nbd::read(&sockets[0], page << 20, BLOCK) == stamp(3, page), "page {page}");
    }
    write_all(&sockets[0], 4);
    answers(&sockets[0]);
    assert_eq!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
}
