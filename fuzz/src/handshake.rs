//! The NBD handshake with arbitrary input of a client.
//!
//! Input: one byte for the export's properties, one for the split, then the client's bytes.

use cleat_core::volume::BlockSizes;
use cleat_nbd::handshake::{Agreed, Export, Handshake, MAX_OPTION_DATA, Step};
use cleat_nbd::wire::{OPTION_HEADER_LEN, OPTION_REPLY_MAGIC, put_greeting, reply};

use crate::pieces::{ends, take};

/// The maximum number of bytes to be sent after one call: the bound of the handshake, plus one reply.
const OUT_MAX: usize = 32 << 10;

/// The result of a handshake.
#[derive(Debug, PartialEq)]
struct Outcome {
    consumed: usize,
    sent: Vec<u8>,
    step: Step,
    agreed: Agreed,
}

/// Checks that the split of the client's bytes does not matter, that the unconsumed bytes and the bytes to be
/// sent are bounded, and that the replies are framed correctly: one final reply to each option.
pub(crate) fn check(mut data: &[u8]) {
    let (properties, seed) = (take(&mut data), take(&mut data));
    let whole = negotiate(properties, data, 0);
    let split = negotiate(properties, data, seed);
    assert_eq!(whole, split, "the split of the stream matters");
    if let Some(finals) = final_replies(&whole) {
        // An option has at least a header, and the client's flags come first.
        assert!(
            finals * OPTION_HEADER_LEN + 4 <= whole.consumed.max(4),
            "more replies than options"
        );
    }
}

fn negotiate(properties: u8, stream: &[u8], seed: u8) -> Outcome {
    let mut out = Vec::new();
    let mut handshake = Handshake::new(export(properties), &mut out);
    let mut greeting = Vec::new();
    put_greeting(&mut greeting);
    assert_eq!(out, greeting);
    out.clear();
    let (mut consumed, mut sent) = (0, Vec::new());
    for end in ends(seed, stream.len()) {
        loop {
            let (bytes, step) = handshake.advance(&stream[consumed..end], &mut out);
            consumed += bytes;
            assert!(out.len() <= OUT_MAX, "{} bytes wait to be sent", out.len());
            let idle = bytes == 0 && out.is_empty();
            sent.append(&mut out);
            if step != Step::Continue {
                return Outcome { consumed, sent, step, agreed: handshake.agreed() };
            }
            if idle {
                break;
            }
        }
        let kept = end - consumed;
        assert!(kept < MAX_OPTION_DATA as usize + OPTION_HEADER_LEN, "{kept} bytes are kept");
    }
    Outcome { consumed, sent, step: Step::Continue, agreed: handshake.agreed() }
}

/// Returns an export with these properties. Bit 0: the client must request block sizes. Bit 1: no description.
/// Bit 2: read-only.
fn export(properties: u8) -> Export {
    let bit = |number: u8| properties >> number & 1 == 1;
    Export {
        name: "disk".to_owned(),
        description: if bit(1) { String::new() } else { "a disk".to_owned() },
        size: 1 << 30,
        blocks: BlockSizes {
            minimum: if bit(0) { 4096 } else { 1 },
            preferred: 4096,
            maximum: 32 << 20,
        },
        transmission_flags: if bit(2) { 0x3 } else { 0x10d },
    }
}

/// Counts the acknowledgements and errors. Returns `None` after EXPORT_NAME, whose reply has no frame.
fn final_replies(outcome: &Outcome) -> Option<usize> {
    let (mut rest, mut finals) = (outcome.sent.as_slice(), 0);
    while !rest.is_empty() {
        let (magic, after) = rest.split_at_checked(8)?;
        if magic != OPTION_REPLY_MAGIC.to_be_bytes() {
            assert_eq!(outcome.step, Step::Transmission, "a reply without its magic number");
            assert!(matches!(rest.len(), 10 | 134), "{} bytes after EXPORT_NAME", rest.len());
            return None;
        }
        let word = |at: usize| after.get(at..at + 4).and_then(|word| word.try_into().ok());
        let kind = word(4).map(u32::from_be_bytes).expect("a reply has a type");
        let length = word(8).map(u32::from_be_bytes).expect("a reply has a length");
        finals += usize::from(kind == reply::ACK || kind & reply::ERROR != 0);
        rest = after.get(12 + length as usize..).expect("a reply has all of its data");
    }
    Some(finals)
}
