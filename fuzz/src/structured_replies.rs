//! Structured replies: the chunks of the server, parsed as a client does, and the queries with which a client
//! negotiates the metadata context.
//!
//! Input: 24 bytes for the fields of replies; the rest is the data of a SET_META_CONTEXT option.

use cleat_core::request::IoError;
use cleat_core::volume::{BlockSizes, Extent};
use cleat_nbd::errno;
use cleat_nbd::handshake::{Export, Handshake, MAX_OPTION_DATA, Step};
use cleat_nbd::structured::{
    ALLOCATION, ALLOCATION_ID, CHUNK_HEADER_LEN, EXTENT_LEN, STATUS_HEADER_LEN, chunk, error,
    parse_header, put_status, read_header, status_len,
};
use cleat_nbd::wire::{OPTION_MAGIC, option, reply};

const NAME: &str = "disk";

/// Checks that every chunk is parsed to the fields from which it was created, and that a context is selected
/// exactly if the client has requested it by its name.
pub(crate) fn check(data: &[u8]) {
    let (fields, query) = data.split_at(data.len().min(24));
    let mut padded = [0; 24];
    padded[..fields.len()].copy_from_slice(fields);
    let word = |at: usize| {
        let bytes = padded[at..at + 8].try_into().expect("it has eight bytes");
        u64::from_be_bytes(bytes)
    };
    let length = u32::try_from(word(16) >> 32).expect("it has 32 bits");
    chunks(word(0), word(8), length);
    extents(word(0), query);
    if let Some(header) = query.first_chunk::<CHUNK_HEADER_LEN>()
        && let Some((_, cookie, length)) = parse_header(header)
    {
        assert_eq!(cookie.to_be_bytes(), header[8..16]);
        assert_eq!(length.to_be_bytes(), header[16..20]);
    }
    contexts(&query[..query.len().min(MAX_OPTION_DATA as usize)]);
}

fn chunks(cookie: u64, offset: u64, length: u32) {
    let read = read_header(cookie, offset, length);
    let header = read.first_chunk().expect("a chunk has a header");
    let announced = length.saturating_add(8);
    assert_eq!(parse_header(header), Some((chunk::OFFSET_DATA, cookie, announced)));
    assert_eq!(read[CHUNK_HEADER_LEN..], offset.to_be_bytes());
    for kind in IoError::ALL {
        let bytes = error(cookie, kind);
        let (header, data) = bytes.split_at(CHUNK_HEADER_LEN);
        let header = header.first_chunk().expect("a chunk has a header");
        assert_eq!(parse_header(header), Some((chunk::ERROR, cookie, 6)));
        assert_eq!(data[..4], errno::to_wire(Err(kind)).to_be_bytes());
    }
}

/// Checks a block status whose extents are the groups of four bytes in `lengths`.
fn extents(cookie: u64, lengths: &[u8]) {
    let extents: Vec<Extent> = lengths
        .as_chunks::<4>()
        .0
        .iter()
        .take(64)
        .map(|bytes| Extent { length: u32::from_be_bytes(*bytes).into(), hole: bytes[0] & 1 == 1 })
        .collect();
    let mut bytes = vec![0xee; status_len(extents.len())];
    put_status(&mut bytes, cookie, &extents);
    let header = bytes.first_chunk().expect("a chunk has a header");
    let (kind, echoed, length) = parse_header(header).expect("it is a chunk");
    assert_eq!((kind, echoed), (chunk::BLOCK_STATUS, cookie));
    assert_eq!(length as usize, bytes.len() - CHUNK_HEADER_LEN);
    assert_eq!(bytes[CHUNK_HEADER_LEN..STATUS_HEADER_LEN], ALLOCATION_ID.to_be_bytes());
    for (descriptor, extent) in bytes[STATUS_HEADER_LEN..].chunks(EXTENT_LEN).zip(&extents) {
        let length = u32::try_from(extent.length).expect("it was made of 32 bits");
        assert_eq!(descriptor[..4], length.to_be_bytes());
        assert_eq!(descriptor[4..], if extent.hole { 3_u32 } else { 0 }.to_be_bytes());
    }
}

/// Negotiates structured replies, sends `query` as SET_META_CONTEXT, starts transmission, and checks whether
/// the context is selected.
fn contexts(query: &[u8]) {
    let request = |option: u32, data: &[u8]| {
        let length = u32::try_from(data.len()).expect("it is bounded").to_be_bytes();
        [&OPTION_MAGIC.to_be_bytes(), &option.to_be_bytes()[..], &length, data].concat()
    };
    let name_length = u32::try_from(NAME.len()).expect("it is short").to_be_bytes();
    let go = [&name_length, NAME.as_bytes(), &[0, 0]].concat();
    let stream = [
        vec![0, 0, 0, 3],
        request(option::STRUCTURED_REPLY, &[]),
        request(option::SET_META_CONTEXT, query),
        request(option::GO, &go),
    ]
    .concat();
    let mut out = Vec::new();
    let mut handshake = Handshake::new(export(), &mut out);
    out.clear();
    assert_eq!(handshake.advance(&stream, &mut out), (stream.len(), Step::Transmission));
    let agreed = handshake.agreed();
    assert!(agreed.structured);
    let parsed = parse(query);
    let for_export = parsed.as_ref().filter(|(name, _)| name == NAME.as_bytes());
    let wanted = for_export.is_some_and(|(_, queries)| queries.contains(&ALLOCATION.to_vec()));
    assert_eq!(agreed.allocation, wanted, "{parsed:?}");
    // The reply after that of STRUCTURED_REPLY, which has no data.
    let kind = u32::from_be_bytes(*out[32..].first_chunk().expect("there is a second reply"));
    assert_eq!(parsed.is_none(), kind == reply::ERR_INVALID, "{parsed:?} led to {kind:#x}");
}

/// Returns the name of the export and the queries, as doc/proto.md describes them, or `None` if a length is
/// wrong. It shares no code with the parser that it checks.
fn parse(data: &[u8]) -> Option<(Vec<u8>, Vec<Vec<u8>>)> {
    let mut rest = data.iter().copied();
    let number = |rest: &mut dyn Iterator<Item = u8>| {
        let bytes: Vec<u8> = rest.take(4).collect();
        bytes.try_into().ok().map(u32::from_be_bytes)
    };
    let string = |rest: &mut dyn Iterator<Item = u8>| {
        let length = number(rest)? as usize;
        let bytes: Vec<u8> = rest.take(length).collect();
        (bytes.len() == length).then_some(bytes)
    };
    let name = string(&mut rest)?;
    let count = number(&mut rest)?;
    let mut queries = Vec::new();
    for _ in 0..count {
        queries.push(string(&mut rest)?);
    }
    rest.next().is_none().then_some((name, queries))
}

fn export() -> Export {
    Export {
        name: NAME.to_owned(),
        description: String::new(),
        size: 1 << 20,
        blocks: BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 },
        transmission_flags: 1,
    }
}
