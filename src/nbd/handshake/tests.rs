//! Tests of the handshake with scripted and random clients.

use proptest::prelude::*;

use super::super::structured::ALLOCATION;
use super::super::wire::{
    OPTION_MAGIC, OPTION_REPLY_MAGIC, be16, be32, be64, flag, info, info_block_size, info_export,
};
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
    [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes(), data].concat()
}

fn go(option: u32, name: &str, requests: &[u16]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((requests.len() as u16).to_be_bytes());
    data.extend(requests.iter().flat_map(|requests| requests.to_be_bytes()));
    request(option, &data)
}

/// Passes the client's bytes to a handshake in pieces that end at `cuts`. Returns the number of bytes
/// consumed, all replies after the greeting, and the last step.
fn run(export: Export, stream: &[u8], cuts: &[usize]) -> (usize, Vec<u8>, Step) {
    let mut out = Vec::new();
    let mut handshake = Handshake::new(export, &mut out);
    let mut sent = std::mem::take(&mut out).split_off(18);
    let mut consumed = 0;
    for &end in cuts.iter().chain([&stream.len()]) {
        loop {
            let (bytes, step) = handshake.advance(&stream[consumed..end], &mut out);
            consumed += bytes;
            assert!(out.len() < OUT_BOUND + 16384, "pending replies are bounded");
            sent.append(&mut out);
            match step {
                Step::Continue if bytes == 0 => break,
                Step::Continue => {}
                step => return (consumed, sent, step),
            }
        }
    }
    (consumed, sent, Step::Continue)
}

fn contexts(option: u32, name: &[u8], query: &[u8]) -> Vec<u8> {
    let length = |bytes: &[u8]| (bytes.len() as u32).to_be_bytes();
    let count = 1_u32.to_be_bytes();
    request(option, &[&length(name), name, &count, &length(query), query].concat())
}

/// Sends these options and a GO for the export. Returns the negotiated extensions, the options and types of
/// the replies before those to GO, and the transmission flags.
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
    let set_replies = [(set, reply::META_CONTEXT), (set, ack)];
    assert_eq!(replies, [&[(option::STRUCTURED_REPLY, ack)], &set_replies[..]].concat());
    assert_eq!(flags, 0x10d | flag::SEND_DF);
    let (got, replies, flags) = agreed(&[select(b"disk", ALLOCATION)]);
    assert_eq!((got, flags), (Agreed::default(), 0x10d));
    assert_eq!(replies, [(set, refused)]);
    // The selection has another name or another context, or a later option has replaced it.
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

/// Parses replies into their options, types and data.
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
fn go_sends_all_information_and_leaves_later_bytes_unconsumed() {
    let requests = [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE, 999];
    let mut stream = [FLAGS.to_vec(), go(option::GO, "disk", &requests)].concat();
    let length = stream.len();
    stream.extend(b"first request");
    let (consumed, sent, step) = run(export(), &stream, &[]);
    assert_eq!((consumed, step), (length, Step::Transmission));
    let replies = replies(&sent);
    let data: Vec<_> = replies.iter().map(|(_, _, data)| &data[..]).collect();
    assert_eq!(data[0], info_export(1 << 30, 0x10d));
    assert_eq!(data[1], info_block_size(export().blocks));
    assert_eq!((data[2], data[3]), (&b"\0\x01disk"[..], &b"\0\x02a disk"[..]));
    assert_eq!(replies[4], (option::GO, reply::ACK, vec![]));
}

#[test]
fn unknown_and_malformed_options_get_errors_and_do_not_end_the_handshake() {
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
    let (consumed, sent, step) = run(export(), &stream, &[]);
    assert_eq!((consumed, step), (stream.len(), Step::End(Refusal::Aborted)));
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
fn export_name_is_padded_unless_the_client_disables_it() {
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
fn go_without_block_sizes_fails_if_the_minimum_is_large() {
    let mut large = export();
    large.blocks.minimum = 4096;
    let ask = |requests| [FLAGS.to_vec(), go(option::GO, "", requests)].concat();
    let (_, sent, step) = run(large.clone(), &ask(&[]), &[]);
    assert_eq!(kinds(&sent), [(option::GO, reply::ERR_BLOCK_SIZE_REQD)]);
    assert_eq!(step, Step::Continue);
    let (_, _, step) = run(large, &ask(&[info::BLOCK_SIZE]), &[]);
    assert_eq!(step, Step::Transmission);
}

#[test]
fn unparsable_input_and_exceeded_limits_end_the_handshake() {
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
            .prop_map(|(option, name, requests)| go(option, name, &requests)),
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
    fn the_result_does_not_depend_on_how_the_stream_is_split(
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
