//! The NBD transmission phase with arbitrary input of a client or the kernel.
//!
//! Input: one byte for the volume's features, one for the split, then the client's bytes.

use cleat_core::request::{Op, Request};
use cleat_core::volume::{BlockSizes, Features};
use cleat_nbd::handshake::Agreed;
use cleat_nbd::transmission::{Event, MAX_PAYLOAD, MAX_SKIPPED, Transmission, Violation};
use cleat_nbd::wire::{REQUEST_LEN, RequestHeader};

use crate::pieces::{ends, take};

const SIZE: u64 = 1 << 20;
const BLOCK: u32 = 512;

/// Checks that the split of the stream does not matter, that every accepted request lies inside the
/// volume and is allowed by its features, and that headers are encoded as they were read.
pub(crate) fn check(mut data: &[u8]) {
    let (properties, seed) = (take(&mut data), take(&mut data));
    let whole = events(properties, data, 0);
    assert_eq!(whole, events(properties, data, seed), "the split of the stream matters");
    let (features, agreed) = mode(properties);
    for event in &whole {
        match event {
            Event::Request { request, .. } => check_request(request, features),
            Event::Write { request, .. } => {
                assert_eq!(request.op, Op::Write);
                assert!(request.length <= MAX_PAYLOAD.into(), "a payload of {}", request.length);
                check_request(request, features);
            }
            Event::Status { offset, length, .. } => {
                assert!(agreed.allocation, "BLOCK_STATUS without its context");
                check_range(*offset, *length);
            }
            Event::StatusRefused { .. } => {
                assert!(agreed.structured, "an error chunk without structured replies");
            }
            Event::Violation(Violation::Payload(length)) => assert!(*length > MAX_SKIPPED),
            _ => {}
        }
    }
    if let Some(Ok(header)) = data.first_chunk::<REQUEST_LEN>().map(RequestHeader::parse) {
        assert_eq!(header.encode()[..], data[..REQUEST_LEN], "the header is encoded otherwise");
    }
}

/// Returns the events of the stream, split according to `seed`. The request's cookie determines whether a
/// payload is taken or skipped.
fn events(properties: u8, stream: &[u8], seed: u8) -> Vec<Event> {
    let (features, agreed) = mode(properties);
    let blocks = BlockSizes { minimum: BLOCK, preferred: 4096, maximum: MAX_PAYLOAD };
    let mut parser = Transmission::new(features, blocks);
    parser.agree(agreed);
    let (mut events, mut pos, mut payload) = (Vec::new(), 0, 0_u64);
    for end in ends(seed, stream.len()) {
        loop {
            let taken = payload.min((end - pos) as u64);
            parser.payload_taken(taken);
            payload -= taken;
            pos += usize::try_from(taken).expect("it is inside the stream");
            if payload > 0 {
                break;
            }
            let (consumed, event) = parser.next(&stream[pos..end], SIZE);
            pos += consumed;
            match event {
                Event::Starved => break,
                Event::Write { cookie, .. } if cookie & 1 == 1 => parser.skip_payload(),
                Event::Write { request, .. } => payload = request.length,
                Event::Violation(_) | Event::Disconnect => {
                    events.push(event);
                    return events;
                }
                _ => {}
            }
            assert!(consumed >= REQUEST_LEN, "an event without a request");
            events.push(event);
        }
        assert!(payload > 0 || end - pos < REQUEST_LEN, "a whole request is left");
    }
    events
}

/// Returns the mode for these properties. Bits 0 to 5: features of the volume. Bit 6: structured replies and
/// BLOCK_STATUS.
fn mode(properties: u8) -> (Features, Agreed) {
    let bit = |number: u8| properties >> number & 1 == 1;
    let features = Features {
        read_only: bit(0),
        flush: !bit(1),
        fua: !bit(2),
        trim: !bit(3),
        write_zeroes: !bit(4),
        fast_zero: !bit(5),
        ..Features::ALL
    };
    (features, Agreed { structured: bit(6), allocation: bit(6) })
}

fn check_request(request: &Request, features: Features) {
    let Request { op, flags, offset, length } = *request;
    assert!(!(features.read_only && op.modifies()), "{op:?} on a read-only volume");
    assert!(features.fua || !flags.fua, "FUA was not offered");
    assert!(features.fast_zero || !flags.fast_zero, "FAST_ZERO was not offered");
    let offered = match op {
        Op::Flush => features.flush,
        Op::Trim => features.trim,
        Op::WriteZeroes => features.write_zeroes,
        Op::Read | Op::Write | Op::Cache => true,
    };
    assert!(offered, "{op:?} was not offered");
    match op {
        Op::Flush => assert_eq!((offset, length), (0, 0)),
        _ => check_range(offset, length),
    }
}

fn check_range(offset: u64, length: u64) {
    let end = offset.checked_add(length).expect("a range does not wrap");
    assert!(length > 0 && end <= SIZE, "{length} bytes at {offset} in a volume of {SIZE}");
    assert_eq!((offset | length) % u64::from(BLOCK), 0, "{length} bytes at {offset}: alignment");
}
