//! The transmission phase: bytes to checked requests.
//!
//! The payload of a write does not pass through here: after [`Event::Write`] the next
//! `request.length` bytes of the stream are the payload, which the caller takes by itself (straight
//! from the socket into an aligned buffer, if it likes) and reports by
//! [`Transmission::payload_taken`]. Payloads of refused writes are skipped here.
//!
//! What the handshake agreed upon ([`Agreed`]) is a mode of this type. 64-bit headers would be another;
//! a request's length is 64 bits wide already.

use cleat_core::request::{Flags, IoError, Op, Request};
use cleat_core::volume::{BlockSizes, Features};

use super::handshake::Agreed;
use super::wire::{REQUEST_LEN, RequestHeader, command, command_flag};

/// The longest payload that is served, in bytes; what clients may assume without INFO_BLOCK_SIZE.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// The longest payload of a refused write that is read and thrown away, in bytes. Whoever sends
/// more is not worth keeping in step with.
pub const MAX_SKIPPED: u32 = 64 << 20;

/// What the bytes so far amount to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Nothing yet; more bytes are needed.
    Starved,
    /// A request without payload.
    Request {
        /// To be given back with the reply.
        cookie: u64,
        /// Checked against the volume.
        request: Request,
    },
    /// A write, whose payload follows: see [`Transmission::payload_taken`].
    Write {
        /// To be given back with the reply.
        cookie: u64,
        /// Checked against the volume.
        request: Request,
    },
    /// BLOCK_STATUS, in a range of the volume that is not empty.
    Status {
        /// To be given back with the reply.
        cookie: u64,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// The reply may have a single extent only.
        one: bool,
    },
    /// A request that the volume does not accept; to be answered with the error.
    Refused {
        /// To be given back with the reply.
        cookie: u64,
        /// What was asked for, if it is an operation of ours.
        op: Option<Op>,
        /// Why not.
        error: IoError,
    },
    /// The client says goodbye: nothing more will come, and this is not answered.
    Disconnect,
    /// The client broke the protocol: nothing more can be understood.
    Violation(Violation),
}

/// Why a connection cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// no request begins where one should
    #[error("the client sent {0:#010x} where a request begins")]
    Magic(u32),
    /// a payload that is too long even to be skipped
    #[error("the client announced a payload of {0} bytes, beyond any limit")]
    Payload(u32),
}

/// The parser of one connection.
#[derive(Debug)]
pub struct Transmission {
    features: Features,
    alignment_mask: u64,
    max_payload: u32,
    agreed: Agreed,
    /// Bytes of a write's payload that the caller still has to take.
    payload: u64,
    /// Bytes of a refused write's payload that are still to be skipped.
    skip: u64,
}

impl Transmission {
    /// A parser for a volume with these properties.
    pub fn new(features: Features, blocks: BlockSizes) -> Self {
        Self {
            features,
            alignment_mask: u64::from(blocks.minimum) - 1,
            max_payload: blocks.maximum.min(MAX_PAYLOAD),
            agreed: Agreed::default(),
            payload: 0,
            skip: 0,
        }
    }

    /// Parses by what the handshake agreed upon, from now on.
    pub fn agree(&mut self, agreed: Agreed) {
        self.agreed = agreed;
    }

    /// Eats from the front of `input`: returns how many bytes, and what they amount to. `size` is
    /// the volume's, in bytes. To be called again with the rest until it is [`Event::Starved`].
    ///
    /// # Panics
    /// While a write's payload is outstanding.
    pub fn next(&mut self, input: &[u8], size: u64) -> (usize, Event) {
        assert_eq!(self.payload, 0, "a payload comes first");
        let skipped = self.skip_in(input);
        let Some(header) = input[skipped..].first_chunk::<REQUEST_LEN>() else {
            return (skipped, Event::Starved);
        };
        let event = match RequestHeader::parse(header) {
            Ok(header) => self.judge(header, size),
            Err(magic) => Event::Violation(Violation::Magic(magic)),
        };
        (skipped + REQUEST_LEN, event)
    }

    /// Notes that the caller took `bytes` of the outstanding payload from the stream.
    ///
    /// # Panics
    /// When that is more than was outstanding.
    pub fn payload_taken(&mut self, bytes: u64) {
        self.payload = self.payload.checked_sub(bytes).expect("no more than the payload is taken");
    }

    /// Skips the outstanding payload, of which nothing was taken, as that of a refused write.
    pub fn skip_payload(&mut self) {
        self.skip += std::mem::take(&mut self.payload);
    }

    /// Skips as much of `input` as belongs to what is to be skipped; returns how many bytes.
    pub fn skip_in(&mut self, input: &[u8]) -> usize {
        let skipped = usize::try_from(self.skip).map_or(input.len(), |skip| skip.min(input.len()));
        self.skip -= skipped as u64;
        skipped
    }

    /// Whether the stream stands between two requests.
    pub fn at_boundary(&self) -> bool {
        self.payload == 0 && self.skip == 0
    }

    fn judge(&mut self, header: RequestHeader, size: u64) -> Event {
        let RequestHeader { cookie, length, .. } = header;
        if header.command == command::DISC {
            return Event::Disconnect;
        }
        if header.command == command::BLOCK_STATUS && self.agreed.allocation {
            return self.judge_status(&header, size);
        }
        let is_write = header.command == command::WRITE;
        match self.check(&header, size) {
            Ok(request) if is_write => {
                self.payload = request.length;
                Event::Write { cookie, request }
            }
            Ok(request) => Event::Request { cookie, request },
            Err(_) if is_write && length > MAX_SKIPPED => {
                Event::Violation(Violation::Payload(length))
            }
            Err(error) => {
                self.skip = if is_write { u64::from(length) } else { 0 };
                Event::Refused { cookie, op: op(header.command), error }
            }
        }
    }

    fn judge_status(&self, header: &RequestHeader, size: u64) -> Event {
        let RequestHeader { cookie, offset, flags, .. } = *header;
        let length = u64::from(header.length);
        if flags & !command_flag::REQ_ONE != 0
            || self.check_range(offset, length, size, IoError::Invalid).is_err()
        {
            return Event::Refused { cookie, op: None, error: IoError::Invalid };
        }
        let one = flags & command_flag::REQ_ONE != 0;
        Event::Status { cookie, offset, length, one }
    }

    fn check_range(
        &self,
        offset: u64,
        length: u64,
        size: u64,
        beyond: IoError,
    ) -> Result<(), IoError> {
        if length == 0 {
            return Err(IoError::Invalid);
        }
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(beyond);
        }
        if (offset | length) & self.alignment_mask != 0 {
            return Err(IoError::Invalid);
        }
        Ok(())
    }

    fn check(&self, header: &RequestHeader, size: u64) -> Result<Request, IoError> {
        let op = op(header.command).ok_or(IoError::Invalid)?;
        let flags = self.check_flags(op, header.flags)?;
        if op.modifies() && self.features.read_only {
            return Err(IoError::ReadOnly);
        }
        let offered = match op {
            Op::Read | Op::Write => true,
            Op::Flush => self.features.flush,
            Op::Trim => self.features.trim,
            Op::WriteZeroes => self.features.write_zeroes,
            Op::Cache => self.features.cache,
        };
        if !offered {
            return Err(IoError::Invalid);
        }
        if op == Op::Flush {
            // Offset and length are reserved; whatever they say has no meaning.
            return Ok(Request { op, flags, offset: 0, length: 0 });
        }
        let (offset, length) = (header.offset, u64::from(header.length));
        let has_payload = matches!(op, Op::Read | Op::Write);
        if has_payload && header.length > self.max_payload {
            return Err(IoError::Invalid);
        }
        // "SHOULD be ENOSPC" for writes, EINVAL for the rest.
        let grows = matches!(op, Op::Write | Op::WriteZeroes);
        let beyond = if grows { IoError::NoSpace } else { IoError::Invalid };
        self.check_range(offset, length, size, beyond)?;
        Ok(Request { op, flags, offset, length })
    }

    fn check_flags(&self, op: Op, flags: u16) -> Result<Flags, IoError> {
        let zeroes = op == Op::WriteZeroes;
        let allowed = if self.features.fua { command_flag::FUA } else { 0 }
            | if zeroes { command_flag::NO_HOLE } else { 0 }
            | if op == Op::Read && self.agreed.structured { command_flag::DF } else { 0 }
            | if zeroes && self.features.fast_zero { command_flag::FAST_ZERO } else { 0 };
        if flags & !allowed != 0 {
            return Err(IoError::Invalid);
        }
        let set = |flag| flags & flag != 0;
        Ok(Flags {
            // Valid on every command, meaningful on those that modify.
            fua: set(command_flag::FUA) && op.modifies(),
            no_hole: set(command_flag::NO_HOLE),
            fast_zero: set(command_flag::FAST_ZERO),
        })
    }
}

fn op(command: u16) -> Option<Op> {
    match command {
        command::READ => Some(Op::Read),
        command::WRITE => Some(Op::Write),
        command::FLUSH => Some(Op::Flush),
        command::TRIM => Some(Op::Trim),
        command::WRITE_ZEROES => Some(Op::WriteZeroes),
        command::CACHE => Some(Op::Cache),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
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
    fn good_requests_pass_with_their_flags() {
        let flags = Flags { fua: true, no_hole: true, fast_zero: true };
        let request = Request { op: Op::WriteZeroes, flags, offset: 512, length: 1024 };
        let seen = event(Features::ALL, header(command::WRITE_ZEROES, 0b10011, 512, 1024));
        assert_eq!(seen, Event::Request { cookie: 42, request });
        let last = header(command::READ, 0, SIZE - 512, 512);
        assert!(matches!(event(Features::ALL, last), Event::Request { .. }));
        assert!(matches!(
            event(Features::ALL, header(command::WRITE, 1, 0, 512)),
            Event::Write { .. }
        ));
        let flush = Request { op: Op::Flush, flags: Flags::default(), offset: 0, length: 0 };
        let seen = event(Features::ALL, header(command::FLUSH, 0, 77, 99));
        assert_eq!(seen, Event::Request { cookie: 42, request: flush });
        assert_eq!(event(Features::ALL, header(command::DISC, 0, 0, 0)), Event::Disconnect);
    }

    #[test]
    fn bad_requests_are_refused_with_the_errors_of_the_specification() {
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
    fn what_was_not_advertised_is_refused() {
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
    fn what_was_agreed_upon_is_served() {
        let mut parser = Transmission::new(Features::ALL, BLOCKS);
        parser.agree(Agreed { structured: true, allocation: true });
        let mut seen = |header: RequestHeader| parser.next(&header.encode(), SIZE).1;
        let whole = header(command::BLOCK_STATUS, 0, 0, SIZE as u32);
        let status = |one| Event::Status { cookie: 42, offset: 0, length: SIZE, one };
        assert_eq!(seen(whole), status(false));
        let one = RequestHeader { flags: command_flag::REQ_ONE, ..whole };
        assert_eq!(seen(one), status(true));
        let refused = Event::Refused { cookie: 42, op: None, error: IoError::Invalid };
        for bad in [
            RequestHeader { length: 0, ..whole },
            RequestHeader { offset: 512, ..whole },
            RequestHeader { offset: u64::MAX - 511, length: 512, ..whole },
            RequestHeader { offset: 1, length: 512, ..whole },
            RequestHeader { flags: command_flag::FUA, ..whole },
        ] {
            assert_eq!(seen(bad), refused, "{bad:?}");
        }
        let read = header(command::READ, command_flag::DF, 0, 512);
        assert!(matches!(seen(read), Event::Request { .. }));
        let write = header(command::WRITE, command_flag::DF, 0, 512);
        assert!(matches!(seen(write), Event::Refused { .. }));
    }

    #[test]
    fn a_refused_payload_is_skipped_in_step() {
        let mut parser = Transmission::new(Features::ALL, BLOCKS);
        let mut input = header(command::WRITE, 0, SIZE, 1024).encode().to_vec();
        input.extend([0xee; 1024]);
        input.extend(header(command::READ, 0, 0, 512).encode());
        let (eaten, first) = parser.next(&input, SIZE);
        assert!(matches!(first, Event::Refused { error: IoError::NoSpace, .. }));
        assert!(!parser.at_boundary());
        let (_, second) = parser.next(&input[eaten..], SIZE);
        assert!(matches!(second, Event::Request { .. }));
        assert!(parser.at_boundary());
    }

    #[test]
    fn what_cannot_be_followed_ends_the_connection() {
        let absurd = header(command::WRITE, 0, 0, u32::MAX);
        assert_eq!(event(Features::ALL, absurd), Event::Violation(Violation::Payload(u32::MAX)));
        let (_, seen) = Transmission::new(Features::ALL, BLOCKS).next(&[7; 28], SIZE);
        assert_eq!(seen, Event::Violation(Violation::Magic(0x0707_0707)));
    }

    /// Runs a stream through the parser in pieces that end at `cuts`, taking payloads on the way.
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
                let (eaten, event) = parser.next(&stream[pos..end], SIZE);
                pos += eaten;
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
        fn chunks_do_not_matter(
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
        fn what_passes_is_inside_aligned_and_bounded(stream in any_stream()) {
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
}
