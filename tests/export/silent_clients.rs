//! Clients that do not complete their handshake, and a client that does.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cleat_core::error::ErrorKind;
use cleat_export::End;
use cleat_export::server::{Limits, Server};
use test_kit::nbd::client::Client;
use test_kit::nbd::wire;

use super::fixture::Fixture;

const ATTACKER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

fn silent(server: &Server, address: Option<IpAddr>) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    server.add_client(theirs.into(), address).unwrap();
    ours
}

/// Completes the handshake with NBD_OPT_EXPORT_NAME ("Newstyle negotiation" in proto.md).
fn complete(mut stream: UnixStream) -> std::io::Result<Client> {
    stream.read_exact(&mut [0; 18])?;
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0")?;
    stream.read_exact(&mut [0; 10])?;
    Ok(Client { stream })
}

fn is_closed(stream: &mut UnixStream) -> bool {
    // The greeting of the server may come before the end.
    let mut bytes = [0; 64];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

#[test]
fn silent_clients_of_any_number_do_not_keep_a_good_client_out() {
    let limits = Limits { connections: 2, ..Limits::default() };
    let fixture = Fixture::memory(limits);
    // More than there are connections, handshakes from one address, and handshakes in all.
    let mut silent_ones: Vec<UnixStream> =
        (0..24).map(|_| silent(&fixture.server, Some(ATTACKER))).collect();
    silent_ones.extend((0..40).map(|_| silent(&fixture.server, None)));
    let mut good = complete(silent(&fixture.server, Some([10, 0, 0, 2].into()))).unwrap();
    good.send(wire::FLUSH, 1, 0, 0);
    good.expect(1, Ok(()));
    let mut neighbour = complete(silent(&fixture.server, Some(ATTACKER))).unwrap();
    neighbour.send(wire::FLUSH, 2, 0, 0);
    neighbour.expect(2, Ok(()));
    assert!(is_closed(&mut silent_ones[0]), "the oldest silent client was disconnected");
    let (ours, theirs) = UnixStream::pair().unwrap();
    let error = fixture.server.add_client(theirs.into(), None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "two clients are the limit");
    drop((ours, good, neighbour));
}

#[test]
fn no_more_clients_than_allowed_complete_their_handshake() {
    let fixture = Fixture::memory(Limits { connections: 1, ..Limits::default() });
    let [one, mut other] = [(); 2].map(|()| silent(&fixture.server, None));
    let mut served = complete(one).unwrap();
    served.send(wire::FLUSH, 1, 0, 0);
    served.expect(1, Ok(()));
    // The server closes the connection after its last reply of the handshake.
    let _ = complete(other.try_clone().unwrap());
    assert!(is_closed(&mut other));
    assert!(matches!(fixture.end(), End::Full));
}
