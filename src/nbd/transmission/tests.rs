//! Tests of the transmission parser with scripted and random requests.

use proptest::prelude::*;

use super::*;

const SIZE: u64 = 1 << 20;
const BLOCKS: BlockSizes = BlockSizes { minimum: 512, preferred: 4096, maximum: MAX_PAYLOAD };

fn header(command: u16, flags: u16, offset: u64, length: u32) -> RequestHeader {
    RequestHeader { flags, command, cookie: 42, offset, length }
}

fn event(features: Features, header: RequestHeader) -> Event {
    Transmission::new(features, BLOCKS).next(&header.encode(), SIZE).1
}

fn refusal(features: Features, header: RequestHeader) -> Option<IoError> {
    match event(features, header) {
        Event::Refused { error, .. } => Some(error),
        _ => None,
    }
}

#[test]
fn valid_requests_are_parsed_with_their_flags() {
    let flags = Flags { fua: true, no_hole: true, fast_zero: true };
    let request = Request { op: Op::WriteZeroes, flags, offset: 512, length: 1024 };
    let seen = event(Features::ALL, header(command::WRITE_ZEROES, 0b10011, 512, 1024));
    assert_eq!(seen, Event::Request { cookie: 42, request });
    let last = header(command::READ, 0, SIZE - 512, 512);
    assert!(matches!(event(Features::ALL, last), Event::Request { .. }));
    assert!(matches!(event(Features::ALL, header(command::WRITE, 1, 0, 512)), Event::Write { .. }));
    let flush = Request { op: Op::Flush, flags: Flags::default(), offset: 0, length: 0 };
    let seen = event(Features::ALL, header(command::FLUSH, 0, 77, 99));
    assert_eq!(seen, Event::Request { cookie: 42, request: flush });
    assert_eq!(event(Features::ALL, header(command::DISC, 0, 0, 0)), Event::Disconnect);
}

#[test]
fn invalid_requests_are_refused_with_the_specified_errors() {
    use IoError::{Invalid, NoSpace, ReadOnly};
    let beyond = SIZE - 512;
    let cases = [
        (header(command::READ, 0, beyond, 1024), Invalid),
        (header(command::WRITE, 0, beyond, 1024), NoSpace),
        (header(command::WRITE_ZEROES, 0, beyond, 1024), NoSpace),
        (header(command::TRIM, 0, beyond, 1024), Invalid),
        (header(command::READ, 0, u64::MAX - 511, 512), Invalid),
        (header(command::READ, 0, 1, 512), Invalid),
        (header(command::READ, 0, 512, 511), Invalid),
        (header(command::READ, 0, 0, 0), Invalid),
        (header(command::WRITE, 0, 0, MAX_PAYLOAD + 512), Invalid),
        (header(command::READ, 1 << 2, 0, 512), Invalid),
        (header(command::WRITE, command_flag::NO_HOLE, 0, 512), Invalid),
        (header(command::BLOCK_STATUS, 0, 0, 512), Invalid),
        (header(command::CACHE, 0, beyond, 1024), Invalid),
        (header(999, 0, 0, 0), Invalid),
    ];
    for (header, error) in cases {
        assert_eq!(refusal(Features::ALL, header), Some(error), "{header:?}");
    }
    let read_only = Features { read_only: true, ..Features::ALL };
    for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
        assert_eq!(refusal(read_only, header(command, 0, 0, 512)), Some(ReadOnly));
    }
}

#[test]
fn commands_and_flags_that_were_not_advertised_are_refused() {
    let none = Features::default();
    let optional = [command::FLUSH, command::TRIM, command::WRITE_ZEROES, command::CACHE];
    for command in optional {
        assert_eq!(refusal(none, header(command, 0, 0, 512)), Some(IoError::Invalid));
    }
    let fua = header(command::WRITE, command_flag::FUA, 0, 512);
    assert_eq!(refusal(none, fua), Some(IoError::Invalid));
    let slow = Features { fast_zero: false, ..Features::ALL };
    let fast = header(command::WRITE_ZEROES, command_flag::FAST_ZERO, 0, 512);
    assert_eq!(refusal(slow, fast), Some(IoError::Invalid));
}

#[test]
fn negotiated_extensions_are_served() {
    let mut parser = Transmission::new(Features::ALL, BLOCKS);
    parser.agree(Agreed { structured: true, allocation: true });
    let mut seen = |header: RequestHeader| parser.next(&header.encode(), SIZE).1;
    let whole = header(command::BLOCK_STATUS, 0, 0, SIZE as u32);
    let status = |one| Event::Status { cookie: 42, offset: 0, length: SIZE, one };
    assert_eq!(seen(whole), status(false));
    let one = RequestHeader { flags: command_flag::REQ_ONE, ..whole };
    assert_eq!(seen(one), status(true));
    assert_eq!(seen(RequestHeader { flags: command_flag::FUA, ..whole }), status(false));
    let refused = Event::StatusRefused { cookie: 42, error: IoError::Invalid };
    for bad in [
        RequestHeader { length: 0, ..whole },
        RequestHeader { offset: 512, ..whole },
        RequestHeader { offset: u64::MAX - 511, length: 512, ..whole },
        RequestHeader { offset: 1, length: 512, ..whole },
        RequestHeader { flags: command_flag::NO_HOLE, ..whole },
    ] {
        assert_eq!(seen(bad), refused, "{bad:?}");
    }
    let read = header(command::READ, command_flag::DF, 0, 512);
    assert!(matches!(seen(read), Event::Request { .. }));
    let write = header(command::WRITE, command_flag::DF, 0, 512);
    assert!(matches!(seen(write), Event::Refused { .. }));
}

#[test]
fn block_status_is_refused_with_a_flag_or_in_a_context_that_was_not_negotiated() {
    let refused = Event::StatusRefused { cookie: 42, error: IoError::Invalid };
    let mut parser = Transmission::new(Features::ALL, BLOCKS);
    parser.agree(Agreed { structured: true, allocation: false });
    let status = header(command::BLOCK_STATUS, 0, 0, 512);
    assert_eq!(parser.next(&status.encode(), SIZE).1, refused);
    let mut parser = Transmission::new(Features { fua: false, ..Features::ALL }, BLOCKS);
    parser.agree(Agreed { structured: true, allocation: true });
    let with_fua = RequestHeader { flags: command_flag::FUA, ..status };
    assert_eq!(parser.next(&with_fua.encode(), SIZE).1, refused);
}

#[test]
fn the_payload_of_a_refused_write_is_skipped() {
    let mut parser = Transmission::new(Features::ALL, BLOCKS);
    let mut input = header(command::WRITE, 0, SIZE, 1024).encode().to_vec();
    input.extend([0xee; 1024]);
    input.extend(header(command::READ, 0, 0, 512).encode());
    let (consumed, first) = parser.next(&input, SIZE);
    assert!(matches!(first, Event::Refused { error: IoError::NoSpace, .. }));
    assert!(!parser.at_boundary());
    let (_, second) = parser.next(&input[consumed..], SIZE);
    assert!(matches!(second, Event::Request { .. }));
    assert!(parser.at_boundary());
}

#[test]
fn violations_end_the_connection() {
    let absurd = header(command::WRITE, 0, 0, u32::MAX);
    assert_eq!(event(Features::ALL, absurd), Event::Violation(Violation::Payload(u32::MAX)));
    let (_, seen) = Transmission::new(Features::ALL, BLOCKS).next(&[7; 28], SIZE);
    assert_eq!(seen, Event::Violation(Violation::Magic(0x0707_0707)));
}

/// Passes a stream to the parser in pieces that end at `cuts`, and takes the payloads of writes. Returns the
/// events.
fn events(stream: &[u8], cuts: &[usize]) -> Vec<Event> {
    let mut parser = Transmission::new(Features::ALL, BLOCKS);
    parser.agree(Agreed { structured: true, allocation: true });
    let (mut events, mut pos, mut payload) = (Vec::new(), 0, 0);
    for &end in cuts.iter().chain([&stream.len()]) {
        loop {
            let taken = payload.min(end - pos);
            parser.payload_taken(taken as u64);
            (pos, payload) = (pos + taken, payload - taken);
            if payload > 0 {
                break;
            }
            let (consumed, event) = parser.next(&stream[pos..end], SIZE);
            pos += consumed;
            match event {
                Event::Starved => break,
                Event::Write { request, .. } => payload = request.length as usize,
                Event::Violation(_) | Event::Disconnect => {
                    events.push(event);
                    return events;
                }
                _ => {}
            }
            events.push(event);
        }
    }
    events
}

fn any_stream() -> impl Strategy<Value = Vec<u8>> {
    let length = prop_oneof![
        4 => (0u32..5).prop_map(|blocks| blocks * 512),
        1 => any::<u16>().prop_map(u32::from),
        1 => any::<u32>(),
    ];
    let offset = prop_oneof![8 => (0u64..2049).prop_map(|n| n * 512), 1 => any::<u64>()];
    let flags = prop_oneof![4 => Just(0u16), 1 => 0u16..64];
    let request = (flags, 0u16..10, any::<u64>(), offset, length).prop_map(
        |(flags, command, cookie, offset, length)| {
            let header = RequestHeader { flags, command, cookie, offset, length };
            let mut bytes = header.encode().to_vec();
            if command == command::WRITE {
                bytes.resize(bytes.len() + (length as usize).min(4096), 0xdd);
            }
            bytes
        },
    );
    proptest::collection::vec(request, 0..12).prop_map(|requests| requests.concat())
}

proptest! {
    #[test]
    fn the_events_do_not_depend_on_how_the_stream_is_split(
        stream in any_stream(),
        mut cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let mut cuts: Vec<usize> =
            cuts.drain(..).map(|cut| cut.index(stream.len() + 1)).collect();
        cuts.sort_unstable();
        prop_assert_eq!(events(&stream, &cuts), events(&stream, &[]));
    }

    #[test]
    fn arbitrary_bytes_never_panic(stream in proptest::collection::vec(any::<u8>(), 0..300)) {
        events(&stream, &[stream.len() / 3]);
    }

    #[test]
    fn accepted_requests_are_in_range_and_aligned(stream in any_stream()) {
        for event in events(&stream, &[]) {
            if let Event::Status { offset, length, .. } = event {
                prop_assert!(length > 0 && offset + length <= SIZE);
                prop_assert!((offset | length) % 512 == 0);
            }
            let (Event::Request { request, .. } | Event::Write { request, .. }) = event else {
                continue;
            };
            prop_assert!(request.offset + request.length <= SIZE);
            prop_assert!((request.offset | request.length) % 512 == 0);
            prop_assert!(request.op == Op::Flush || request.length > 0);
        }
    }

    #[test]
    fn headers_survive_the_wire(
        flags: u16, command: u16, cookie: u64, offset: u64, length: u32,
    ) {
        let header = RequestHeader { flags, command, cookie, offset, length };
        prop_assert_eq!(RequestHeader::parse(&header.encode()), Ok(header));
    }
}
