//! The handshake: fixed newstyle negotiation, server side.
//!
//! One export. Whatever a client asks for that is not served gets its error, and the stream stays in
//! step; only what cannot be understood at all ends the connection. STARTTLS and EXTENDED_HEADERS have
//! their place in [`Handshake::answer`].

use cleat_core::volume::BlockSizes;

use super::structured::{ALLOCATION, ALLOCATION_ID, ContextQuery};
use super::wire::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, OPTION_HEADER_LEN, OptionHeader, be16, be32, flag, info,
    info_block_size, info_export, option, put_greeting, put_option_reply, reply,
};

/// The longest data of an option that is looked at, in bytes: a name of 4096 ("Strings") and room
/// for information requests. More is skipped and answered with ERR_TOO_BIG.
pub const MAX_OPTION_DATA: u32 = 16 << 10;

/// The longest data of an option that is skipped, in bytes. More ends the connection.
pub const MAX_OPTION_SKIPPED: u32 = 1 << 20;

/// Options that one client may send before it has to begin.
pub const MAX_OPTIONS: u32 = 256;

/// The longest name and description, in bytes ("Strings").
pub const MAX_STRING: usize = 4096;

/// Pending answers, in bytes, from which on they have to be sent before more is understood.
const OUT_BOUND: usize = 16 << 10;

/// The minimum block size that a client may assume without asking.
const ASSUMED_BLOCK: u32 = 512;

/// What clients can connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// Its name; a client that gives the empty name gets it, too. At most [`MAX_STRING`] bytes.
    pub name: String,
    /// For people; may be empty. At most [`MAX_STRING`] bytes.
    pub description: String,
    /// In bytes.
    pub size: u64,
    /// Its sizes of access.
    pub blocks: BlockSizes,
    /// See [`super::wire::transmission_flags`].
    pub transmission_flags: u16,
}

/// What the client and we do beyond the basic protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Agreed {
    /// Reads are answered by structured replies.
    pub structured: bool,
    /// The context "base:allocation" is selected, so BLOCK_STATUS is served.
    pub allocation: bool,
}

/// Where the handshake stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Send what is in `out`; then go on with what was not eaten and with more bytes.
    Continue,
    /// Send what is in `out`; what was not eaten, and all that follows, is transmission.
    Transmission,
    /// Send what is in `out`, and close.
    End(Refusal),
}

/// Why a handshake ended without transmission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// the client went away in order
    #[error("the client ended the handshake")]
    Aborted,
    /// client flags that this server did not offer
    #[error("the client sent unknown handshake flags {0:#x}")]
    ClientFlags(u32),
    /// no option begins where one should
    #[error("the client broke the handshake's framing")]
    Magic,
    /// EXPORT_NAME, which has no error reply, with an unknown name
    #[error("the client asked for an unknown export")]
    UnknownExport,
    /// something other than EXPORT_NAME from a client without fixed newstyle
    #[error("the client sent an option without having agreed to fixed newstyle")]
    NotFixed,
    /// option data beyond any limit
    #[error("the client sent option data of {0} bytes, beyond any limit")]
    OptionData(u32),
    /// more options than anybody needs
    #[error("the client sent more than {MAX_OPTIONS} options")]
    Options,
}

/// The handshake of one connection.
#[derive(Debug)]
pub struct Handshake {
    export: Export,
    state: State,
    options: u32,
    fixed: bool,
    no_zeroes: bool,
    structured: bool,
    /// The export for which "base:allocation" was selected, by the name that was given.
    selected: Option<Vec<u8>>,
    agreed: Agreed,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Flags,
    Option,
    Skip { option: u32, left: u32 },
}

impl Handshake {
    /// Begins by appending the greeting to `out`.
    pub fn new(export: Export, out: &mut Vec<u8>) -> Self {
        put_greeting(out);
        Self {
            export,
            state: State::Flags,
            options: 0,
            fixed: false,
            no_zeroes: false,
            structured: false,
            selected: None,
            agreed: Agreed::default(),
        }
    }

    /// What was agreed upon, once the handshake has led to transmission.
    pub fn agreed(&self) -> Agreed {
        self.agreed
    }

    /// Eats from the front of `input` and appends answers to `out`: returns how many bytes, and
    /// where that leads. The caller keeps what was not eaten, which is less than
    /// [`MAX_OPTION_DATA`] and an option header unless `out` has become long first.
    pub fn advance(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Step) {
        let mut eaten = 0;
        while out.len() < OUT_BOUND {
            let (bytes, step) = self.one(&input[eaten..], out);
            eaten += bytes;
            match step {
                Step::Continue if bytes == 0 => break,
                Step::Continue => {}
                step => return (eaten, step),
            }
        }
        (eaten, Step::Continue)
    }

    fn one(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Step) {
        match self.state {
            State::Flags => match input.first_chunk::<4>() {
                Some(flags) => (4, self.client_flags(u32::from_be_bytes(*flags))),
                None => (0, Step::Continue),
            },
            State::Option => self.option(input, out),
            State::Skip { option, left } => {
                let skipped = left.min(u32::try_from(input.len()).unwrap_or(u32::MAX));
                let left = left - skipped;
                self.state = State::Skip { option, left };
                if left == 0 {
                    self.state = State::Option;
                    put_option_reply(out, option, reply::ERR_TOO_BIG, b"option data too long");
                }
                (skipped as usize, Step::Continue)
            }
        }
    }

    fn client_flags(&mut self, flags: u32) -> Step {
        let known = u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
        // "If the server sees an unknown client flag, it MUST drop the session."
        if flags & !known != 0 {
            return Step::End(Refusal::ClientFlags(flags));
        }
        self.fixed = flags & u32::from(FLAG_FIXED_NEWSTYLE) != 0;
        self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
        self.state = State::Option;
        Step::Continue
    }

    fn option(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Step) {
        let Some(header) = input.first_chunk::<OPTION_HEADER_LEN>() else {
            return (0, Step::Continue);
        };
        let Some(OptionHeader { option, length }) = OptionHeader::parse(header) else {
            return (0, Step::End(Refusal::Magic));
        };
        if !self.fixed && option != option::EXPORT_NAME {
            return (0, Step::End(Refusal::NotFixed));
        }
        if length > MAX_OPTION_DATA {
            // EXPORT_NAME has no error reply.
            if length > MAX_OPTION_SKIPPED || option == option::EXPORT_NAME {
                return (0, Step::End(Refusal::OptionData(length)));
            }
            self.state = State::Skip { option, left: length };
            return (OPTION_HEADER_LEN, self.count());
        }
        let Some(data) = input[OPTION_HEADER_LEN..].get(..length as usize) else {
            return (0, Step::Continue);
        };
        let step = match self.count() {
            Step::Continue => self.answer(option, data, out),
            step => step,
        };
        (OPTION_HEADER_LEN + data.len(), step)
    }

    fn count(&mut self) -> Step {
        self.options += 1;
        if self.options > MAX_OPTIONS { Step::End(Refusal::Options) } else { Step::Continue }
    }

    fn answer(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
        match option {
            option::EXPORT_NAME => return self.export_name(data, out),
            option::ABORT => {
                put_option_reply(out, option, reply::ACK, &[]);
                return Step::End(Refusal::Aborted);
            }
            option::LIST if data.is_empty() => self.list(out),
            option::LIST => put_option_reply(out, option, reply::ERR_INVALID, b"LIST has no data"),
            option::INFO | option::GO => return self.info(option, data, out),
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                put_option_reply(out, option, reply::ACK, &[]);
            }
            option::STRUCTURED_REPLY => {
                put_option_reply(out, option, reply::ERR_INVALID, b"STRUCTURED_REPLY has no data");
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(option, data, out);
            }
            // STARTTLS, EXTENDED_HEADERS, and the unknown.
            _ => put_option_reply(out, option, reply::ERR_UNSUP, b"not supported"),
        }
        Step::Continue
    }

    fn meta_context(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        let set = option == option::SET_META_CONTEXT;
        if set {
            // Whatever comes of it, it replaces the selection before.
            self.selected = None;
        }
        let mut refuse = |kind, why: &[u8]| put_option_reply(out, option, kind, why);
        if !self.structured {
            return refuse(reply::ERR_INVALID, b"negotiate structured replies first");
        }
        let Some(query) = ContextQuery::parse(data) else {
            return refuse(reply::ERR_INVALID, b"malformed request");
        };
        if !self.serves(query.name) {
            return refuse(reply::ERR_UNKNOWN, b"no such export");
        }
        if if set { query.sets_allocation() } else { query.lists_allocation() } {
            let context = [&ALLOCATION_ID.to_be_bytes(), ALLOCATION].concat();
            put_option_reply(out, option, reply::META_CONTEXT, &context);
            if set {
                self.selected = Some(query.name.to_vec());
            }
        }
        put_option_reply(out, option, reply::ACK, &[]);
    }

    /// Transmission of the export that the client calls `name` begins.
    fn agree(&mut self, name: &[u8]) {
        // "If the name does not match, the server MUST NOT regard contexts as selected."
        let allocation = self.selected.as_deref() == Some(name);
        self.agreed = Agreed { structured: self.structured, allocation };
    }

    fn transmission_flags(&self) -> u16 {
        // Reads never come in fragments.
        let more = if self.structured { flag::SEND_DF } else { 0 };
        self.export.transmission_flags | more
    }

    fn export_name(&mut self, name: &[u8], out: &mut Vec<u8>) -> Step {
        if !self.serves(name) {
            return Step::End(Refusal::UnknownExport);
        }
        out.extend(self.export.size.to_be_bytes());
        out.extend(self.transmission_flags().to_be_bytes());
        if !self.no_zeroes {
            out.extend([0; 124]);
        }
        self.agree(name);
        Step::Transmission
    }

    fn list(&self, out: &mut Vec<u8>) {
        let name = self.export.name.as_bytes();
        let length = u32::try_from(name.len()).expect("a name has at most MAX_STRING bytes");
        let mut data = length.to_be_bytes().to_vec();
        data.extend(name);
        data.extend(self.export.description.as_bytes());
        put_option_reply(out, option::LIST, reply::SERVER, &data);
        put_option_reply(out, option::LIST, reply::ACK, &[]);
    }

    fn info(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
        let refuse = |out: &mut Vec<u8>, kind, why: &[u8]| {
            put_option_reply(out, option, kind, why);
            Step::Continue
        };
        let Some(query) = InfoQuery::parse(data) else {
            return refuse(out, reply::ERR_INVALID, b"malformed request");
        };
        if !self.serves(query.name) {
            return refuse(out, reply::ERR_UNKNOWN, b"no such export");
        }
        let Export { name, description, size, blocks, .. } = &self.export;
        if blocks.minimum > ASSUMED_BLOCK && !query.asks(info::BLOCK_SIZE) && option == option::GO {
            return refuse(out, reply::ERR_BLOCK_SIZE_REQD, b"ask for NBD_INFO_BLOCK_SIZE");
        }
        let mut send = |data: &[u8]| put_option_reply(out, option, reply::INFO, data);
        send(&info_export(*size, self.transmission_flags()));
        send(&info_block_size(*blocks));
        if query.asks(info::NAME) {
            send(&info_string(info::NAME, name));
        }
        if query.asks(info::DESCRIPTION) && !description.is_empty() {
            send(&info_string(info::DESCRIPTION, description));
        }
        put_option_reply(out, option, reply::ACK, &[]);
        if option == option::INFO {
            return Step::Continue;
        }
        self.agree(query.name);
        Step::Transmission
    }

    /// "The empty string is the default export."
    fn serves(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.export.name.as_bytes()
    }
}

/// The data of INFO and GO.
struct InfoQuery<'a> {
    name: &'a [u8],
    /// Big-endian numbers of [`info`].
    wanted: &'a [u8],
}

impl<'a> InfoQuery<'a> {
    /// `None` unless every length inside is right.
    fn parse(data: &'a [u8]) -> Option<Self> {
        let (length, rest) = data.split_at_checked(4)?;
        let (name, rest) = rest.split_at_checked(usize::try_from(be32(length, 0)).ok()?)?;
        let (count, wanted) = rest.split_at_checked(2)?;
        (wanted.len() == usize::from(be16(count, 0)) * 2 && name.len() <= MAX_STRING)
            .then_some(Self { name, wanted })
    }

    fn asks(&self, number: u16) -> bool {
        self.wanted.chunks_exact(2).any(|wanted| be16(wanted, 0) == number)
    }
}

fn info_string(number: u16, text: &str) -> Vec<u8> {
    [&number.to_be_bytes(), text.as_bytes()].concat()
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use proptest::prelude::*;

    use super::super::wire::{OPTION_MAGIC, OPTION_REPLY_MAGIC, be64};
    use super::*;

    const FLAGS: [u8; 4] = [0, 0, 0, 3];

    fn export() -> Export {
        Export {
            name: "disk".into(),
            description: "a disk".into(),
            size: 1 << 30,
            blocks: BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 },
            transmission_flags: 0x10d,
        }
    }

    fn request(option: u32, data: &[u8]) -> Vec<u8> {
        let length = data.len() as u32;
        [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes(), data]
            .concat()
    }

    fn go(option: u32, name: &str, wanted: &[u16]) -> Vec<u8> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend((wanted.len() as u16).to_be_bytes());
        data.extend(wanted.iter().flat_map(|wanted| wanted.to_be_bytes()));
        request(option, &data)
    }

    /// Runs the client's bytes, which end at each of `cuts` for a while, and returns how many were
    /// eaten, everything that was answered after the greeting, and where it led.
    fn run(export: Export, stream: &[u8], cuts: &[usize]) -> (usize, Vec<u8>, Step) {
        let mut out = Vec::new();
        let mut handshake = Handshake::new(export, &mut out);
        let mut sent = std::mem::take(&mut out).split_off(18);
        let mut eaten = 0;
        for &end in cuts.iter().chain([&stream.len()]) {
            loop {
                let (bytes, step) = handshake.advance(&stream[eaten..end], &mut out);
                eaten += bytes;
                assert!(out.len() < OUT_BOUND + 16384, "answers are bounded");
                sent.append(&mut out);
                match step {
                    Step::Continue if bytes == 0 => break,
                    Step::Continue => {}
                    step => return (eaten, sent, step),
                }
            }
        }
        (eaten, sent, Step::Continue)
    }

    fn contexts(option: u32, name: &[u8], query: &[u8]) -> Vec<u8> {
        let length = |bytes: &[u8]| (bytes.len() as u32).to_be_bytes();
        let count = 1_u32.to_be_bytes();
        request(option, &[&length(name), name, &count, &length(query), query].concat())
    }

    /// What is agreed upon after these options and a GO for the export, and how it was answered.
    fn agreed(options: &[Vec<u8>]) -> (Agreed, Vec<(u32, u32)>, u16) {
        let stream = [FLAGS.to_vec(), options.concat(), go(option::GO, "disk", &[])].concat();
        let mut out = Vec::new();
        let mut handshake = Handshake::new(export(), &mut out);
        let (_, step) = handshake.advance(&stream, &mut out);
        assert_eq!(step, Step::Transmission);
        let replies = replies(&out[18..]);
        let info =
            replies.iter().find(|(option, kind, _)| (*option, *kind) == (option::GO, reply::INFO));
        let flags = be16(&info.unwrap().2, 10);
        let kinds = replies.iter().map(|(option, kind, _)| (*option, *kind));
        (handshake.agreed(), kinds.take_while(|(option, _)| *option != option::GO).collect(), flags)
    }

    #[test]
    fn contexts_are_selected_for_one_export_after_structured_replies() {
        let structured = || request(option::STRUCTURED_REPLY, &[]);
        let (list, set) = (option::LIST_META_CONTEXT, option::SET_META_CONTEXT);
        let select = |name: &[u8], query: &[u8]| contexts(set, name, query);
        let (ack, refused) = (reply::ACK, reply::ERR_INVALID);
        let (got, replies, flags) = agreed(&[structured(), select(b"disk", ALLOCATION)]);
        assert_eq!(got, Agreed { structured: true, allocation: true });
        let of_set = [(set, reply::META_CONTEXT), (set, ack)];
        assert_eq!(replies, [&[(option::STRUCTURED_REPLY, ack)], &of_set[..]].concat());
        assert_eq!(flags, 0x10d | flag::SEND_DF);
        let (got, replies, flags) = agreed(&[select(b"disk", ALLOCATION)]);
        assert_eq!((got, flags), (Agreed::default(), 0x10d));
        assert_eq!(replies, [(set, refused)]);
        // Of another name, of another context, or lost by a selection that came later.
        for options in [
            vec![structured(), select(b"", ALLOCATION)],
            vec![structured(), select(b"disk", b"base:")],
            vec![structured(), select(b"disk", ALLOCATION), select(b"disk", b"qemu:x")],
            vec![structured(), select(b"disk", ALLOCATION), request(set, b"x")],
            vec![structured(), contexts(list, b"disk", b"base:")],
        ] {
            let (got, replies, _) = agreed(&options);
            assert_eq!(got, Agreed { structured: true, allocation: false }, "{replies:?}");
        }
        let (_, replies, _) = agreed(&[structured(), contexts(list, b"disk", b"base:")]);
        assert_eq!(replies[1..], [(list, reply::META_CONTEXT), (list, ack)]);
        let (_, replies, _) = agreed(&[request(option::STRUCTURED_REPLY, b"x")]);
        assert_eq!(replies, [(option::STRUCTURED_REPLY, refused)]);
    }

    /// The replies' options, types and data.
    fn replies(mut sent: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
        let mut replies = Vec::new();
        while !sent.is_empty() {
            assert_eq!(be64(sent, 0), OPTION_REPLY_MAGIC);
            let end = 20 + be32(sent, 16) as usize;
            replies.push((be32(sent, 8), be32(sent, 12), sent[20..end].to_vec()));
            sent = &sent[end..];
        }
        replies
    }

    fn kinds(sent: &[u8]) -> Vec<(u32, u32)> {
        replies(sent).iter().map(|(option, kind, _)| (*option, *kind)).collect()
    }

    #[test]
    fn go_tells_everything_and_leaves_the_rest_for_transmission() {
        let wanted = [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE, 999];
        let mut stream = [FLAGS.to_vec(), go(option::GO, "disk", &wanted)].concat();
        let length = stream.len();
        stream.extend(b"first request");
        let (eaten, sent, step) = run(export(), &stream, &[]);
        assert_eq!((eaten, step), (length, Step::Transmission));
        let replies = replies(&sent);
        let data: Vec<_> = replies.iter().map(|(_, _, data)| &data[..]).collect();
        assert_eq!(data[0], info_export(1 << 30, 0x10d));
        assert_eq!(data[1], info_block_size(export().blocks));
        assert_eq!((data[2], data[3]), (&b"\0\x01disk"[..], &b"\0\x02a disk"[..]));
        assert_eq!(replies[4], (option::GO, reply::ACK, vec![]));
    }

    #[test]
    fn unknown_and_malformed_options_keep_step() {
        let stream = [
            FLAGS.to_vec(),
            request(option::STARTTLS, &[]),
            request(option::SET_META_CONTEXT, &[1; 100]),
            request(0xdead, &[2; 5000]),
            request(option::LIST, b"x"),
            request(option::GO, &[0, 0, 0, 9, b'x']),
            request(option::INFO, &[0xff; 4]),
            go(option::INFO, "other", &[]),
            request(77, &vec![0; MAX_OPTION_DATA as usize + 1]),
            go(option::INFO, "", &[]),
            request(option::LIST, &[]),
            request(option::ABORT, &[]),
        ]
        .concat();
        let (eaten, sent, step) = run(export(), &stream, &[]);
        assert_eq!((eaten, step), (stream.len(), Step::End(Refusal::Aborted)));
        let expected = [
            (option::STARTTLS, reply::ERR_UNSUP),
            (option::SET_META_CONTEXT, reply::ERR_INVALID),
            (0xdead, reply::ERR_UNSUP),
            (option::LIST, reply::ERR_INVALID),
            (option::GO, reply::ERR_INVALID),
            (option::INFO, reply::ERR_INVALID),
            (option::INFO, reply::ERR_UNKNOWN),
            (77, reply::ERR_TOO_BIG),
            (option::INFO, reply::INFO),
            (option::INFO, reply::INFO),
            (option::INFO, reply::ACK),
            (option::LIST, reply::SERVER),
            (option::LIST, reply::ACK),
            (option::ABORT, reply::ACK),
        ];
        assert_eq!(kinds(&sent), expected);
    }

    #[test]
    fn export_name_has_padding_unless_agreed_otherwise() {
        let ask = request(option::EXPORT_NAME, b"disk");
        let (_, sent, step) = run(export(), &[&FLAGS[..], &ask].concat(), &[]);
        assert_eq!((sent.len(), step), (10, Step::Transmission));
        let (_, sent, _) = run(export(), &[&[0, 0, 0, 0][..], &ask].concat(), &[]);
        assert_eq!((sent.len(), be64(&sent, 0), be16(&sent, 8)), (134, 1 << 30, 0x10d));
        let other = request(option::EXPORT_NAME, b"other");
        let (_, sent, step) = run(export(), &[&FLAGS[..], &other].concat(), &[]);
        assert_eq!((sent.len(), step), (0, Step::End(Refusal::UnknownExport)));
    }

    #[test]
    fn large_blocks_have_to_be_asked_for() {
        let mut large = export();
        large.blocks.minimum = 4096;
        let ask = |wanted| [FLAGS.to_vec(), go(option::GO, "", wanted)].concat();
        let (_, sent, step) = run(large.clone(), &ask(&[]), &[]);
        assert_eq!(kinds(&sent), [(option::GO, reply::ERR_BLOCK_SIZE_REQD)]);
        assert_eq!(step, Step::Continue);
        let (_, _, step) = run(large, &ask(&[info::BLOCK_SIZE]), &[]);
        assert_eq!(step, Step::Transmission);
    }

    #[test]
    fn what_cannot_be_followed_ends_the_handshake() {
        let end = |stream: &[u8]| run(export(), stream, &[]).2;
        assert_eq!(end(&[0, 0, 0, 4]), Step::End(Refusal::ClientFlags(4)));
        assert_eq!(end(&[&FLAGS[..], &[9; 16]].concat()), Step::End(Refusal::Magic));
        let list = request(option::LIST, &[]);
        assert_eq!(end(&[&[0; 4][..], &list].concat()), Step::End(Refusal::NotFixed));
        let mut absurd = request(option::LIST, &[]);
        absurd[12..].fill(0xff);
        assert_eq!(end(&[&FLAGS[..], &absurd].concat()), Step::End(Refusal::OptionData(u32::MAX)));
        let endless = [FLAGS.to_vec(), list.repeat(MAX_OPTIONS as usize + 1)].concat();
        assert_eq!(end(&endless), Step::End(Refusal::Options));
    }

    fn any_stream() -> impl Strategy<Value = Vec<u8>> {
        let data = proptest::collection::vec(any::<u8>(), 0..40);
        let name = prop_oneof![Just(""), Just("disk"), Just("none")];
        let one = prop_oneof![
            3 => (0u32..13, data.clone()).prop_map(|(option, data)| request(option, &data)),
            3 => (6u32..8, name, proptest::collection::vec(0u16..6, 0..6))
                .prop_map(|(option, name, wanted)| go(option, name, &wanted)),
            2 => (9u32..11, prop_oneof![Just(ALLOCATION), Just(&b"base:"[..]), Just(&b"x"[..])])
                .prop_map(|(option, query)| contexts(option, b"disk", query)),
            1 => Just(request(option::STRUCTURED_REPLY, &[])),
            1 => (16_000u32..17_000).prop_map(|len| request(55, &vec![0; len as usize])),
            1 => data,
        ];
        let flags = prop_oneof![9 => Just(FLAGS), 1 => any::<[u8; 4]>()];
        (flags, proptest::collection::vec(one, 0..12))
            .prop_map(|(flags, options)| [flags.to_vec(), options.concat()].concat())
    }

    proptest! {
        #[test]
        fn chunks_do_not_matter(
            stream in any_stream(),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let mut cuts: Vec<usize> =
                cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.sort_unstable();
            prop_assert_eq!(run(export(), &stream, &cuts), run(export(), &stream, &[]));
        }

        #[test]
        fn arbitrary_bytes_never_panic(stream in proptest::collection::vec(any::<u8>(), 0..300)) {
            run(export(), &stream, &[]);
            run(export(), &[&FLAGS[..], &stream].concat(), &[]);
        }
    }
}
