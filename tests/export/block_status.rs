//! BLOCK_STATUS as the NBD specification (doc/proto.md) describes it: its flags, and its errors as chunks.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cleat_export::server::Limits;
use test_kit::nbd::wire::{BLOCK_STATUS, Request};

use super::fixture::Fixture;

/// NBD_CMD_FLAG_FUA.
const FUA: u16 = 1 << 0;
/// NBD_REPLY_TYPE_BLOCK_STATUS.
const STATUS: u16 = 5;
/// NBD_REPLY_TYPE_ERROR.
const ERROR: u16 = 1 << 15 | 1;

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Negotiates structured replies and, with `context`, base:allocation.
fn client(fixture: &Fixture, context: bool) -> UnixStream {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    fixture.server.add_client(theirs.into(), None).unwrap();
    ours.read_exact(&mut [0; 18]).unwrap();
    ours.write_all(&[0, 0, 0, 3]).unwrap();
    // NBD_OPT_STRUCTURED_REPLY, which is answered by NBD_REP_ACK.
    ours.write_all(&option(8, &[])).unwrap();
    ours.read_exact(&mut [0; 20]).unwrap();
    if context {
        let name = b"base:allocation";
        let mut query = vec![0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, name.len() as u8];
        query.extend(name);
        // NBD_OPT_SET_META_CONTEXT, which is answered by NBD_REP_META_CONTEXT and NBD_REP_ACK.
        ours.write_all(&option(10, &query)).unwrap();
        ours.read_exact(&mut vec![0; 20 + 4 + name.len() + 20]).unwrap();
    }
    // NBD_OPT_EXPORT_NAME ends the negotiation.
    ours.write_all(&option(1, &[])).unwrap();
    ours.read_exact(&mut [0; 10]).unwrap();
    ours
}

/// Sends a BLOCK_STATUS. Returns the type and the payload of the only chunk of its reply.
fn status(client: &mut UnixStream, flags: u16, length: u32) -> (u16, Vec<u8>) {
    let request = Request { flags, ..Request::new(BLOCK_STATUS, 42, 0, length) };
    client.write_all(&request.encode()).unwrap();
    let mut header = [0; 20];
    client.read_exact(&mut header).unwrap();
    assert_eq!(header[..6], [0x66, 0x8e, 0x33, 0xef, 0, 1], "the only chunk of a reply");
    assert_eq!(header[8..16], 42_u64.to_be_bytes());
    let length = u32::from_be_bytes(header[16..].try_into().unwrap());
    let mut payload = vec![0; length as usize];
    client.read_exact(&mut payload).unwrap();
    (u16::from_be_bytes([header[6], header[7]]), payload)
}

#[test]
fn block_status_with_fua_is_accepted() {
    let fixture = Fixture::memory(Limits::default());
    let mut client = client(&fixture, true);
    let plain = status(&mut client, 0, 4096);
    assert_eq!(plain.0, STATUS);
    assert_eq!(status(&mut client, FUA, 4096), plain);
}

#[test]
fn errors_of_block_status_are_chunks() {
    const EIO: u8 = 5;
    const EINVAL: u8 = 22;
    let error = |number| (ERROR, vec![0, 0, 0, number, 0, 0]);
    let fixture = Fixture::memory(Limits::default());
    let mut without_context = client(&fixture, false);
    assert_eq!(status(&mut without_context, 0, 4096), error(EINVAL));
    let mut client = client(&fixture, true);
    assert_eq!(status(&mut client, 0, 0), error(EINVAL));
    fixture.server.set_fail_io(true);
    assert_eq!(status(&mut client, 0, 4096), error(EIO));
    fixture.server.set_fail_io(false);
    assert_eq!(status(&mut client, 0, 4096).0, STATUS);
}
