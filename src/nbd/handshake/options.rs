//! The answers to options ("Option types", "Option reply types").
//!
//! A new option is an arm of [`Handshake::answer`]. STARTTLS and EXTENDED_HEADERS, which are not
//! implemented, belong there, too.

use super::super::structured::{ALLOCATION, ALLOCATION_ID};
use super::super::wire::{
    flag, info, info_block_size, info_export, option, put_option_reply, reply,
};
use super::queries::{ContextQuery, InfoQuery};
use super::{Agreed, Export, Handshake, Refusal, Step};

/// The block size, in bytes, that a client uses for interoperability if it does not request block sizes
/// ("Size constraints").
const ASSUMED_BLOCK: u32 = 512;

impl Handshake {
    /// Answers one option with its complete data.
    pub(super) fn answer(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
        match option {
            option::EXPORT_NAME => return self.answer_export_name(data, out),
            option::ABORT => {
                put_option_reply(out, option, reply::ACK, &[]);
                return Step::End(Refusal::Aborted);
            }
            option::LIST if data.is_empty() => self.answer_list(out),
            option::LIST => put_option_reply(out, option, reply::ERR_INVALID, b"LIST has no data"),
            option::INFO | option::GO => return self.answer_info(option, data, out),
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                put_option_reply(out, option, reply::ACK, &[]);
            }
            option::STRUCTURED_REPLY => {
                put_option_reply(out, option, reply::ERR_INVALID, b"STRUCTURED_REPLY has no data");
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.answer_meta_context(option, data, out);
            }
            // STARTTLS, EXTENDED_HEADERS, and unknown options.
            _ => put_option_reply(out, option, reply::ERR_UNSUP, b"not supported"),
        }
        Step::Continue
    }

    /// Answers `EXPORT_NAME`. The option has no error reply, so an unknown name ends the connection.
    fn answer_export_name(&mut self, name: &[u8], out: &mut Vec<u8>) -> Step {
        if !self.serves(name) {
            return Step::End(Refusal::UnknownExport);
        }
        out.extend(self.export.size.to_be_bytes());
        out.extend(self.transmission_flags().to_be_bytes());
        if !self.no_zeroes {
            // The reserved bytes of "Newstyle negotiation".
            out.extend([0; 124]);
        }
        self.agree(name);
        Step::Transmission
    }

    fn answer_list(&self, out: &mut Vec<u8>) {
        let name = self.export.name.as_bytes();
        let length = u32::try_from(name.len()).expect("a name has at most MAX_STRING bytes");
        let mut data = length.to_be_bytes().to_vec();
        data.extend(name);
        data.extend(self.export.description.as_bytes());
        put_option_reply(out, option::LIST, reply::SERVER, &data);
        put_option_reply(out, option::LIST, reply::ACK, &[]);
    }

    /// Answers `INFO` and `GO`, which differ only in that a successful `GO` starts transmission.
    fn answer_info(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
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
        let must_request_sizes = option == option::GO && blocks.minimum > ASSUMED_BLOCK;
        if must_request_sizes && !query.requests(info::BLOCK_SIZE) {
            return refuse(out, reply::ERR_BLOCK_SIZE_REQD, b"ask for NBD_INFO_BLOCK_SIZE");
        }
        let mut send = |data: &[u8]| put_option_reply(out, option, reply::INFO, data);
        send(&info_export(*size, self.transmission_flags()));
        send(&info_block_size(*blocks));
        if query.requests(info::NAME) {
            send(&info_string(info::NAME, name));
        }
        if query.requests(info::DESCRIPTION) && !description.is_empty() {
            send(&info_string(info::DESCRIPTION, description));
        }
        put_option_reply(out, option, reply::ACK, &[]);
        if option == option::INFO {
            return Step::Continue;
        }
        self.agree(query.name);
        Step::Transmission
    }

    fn answer_meta_context(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        let set = option == option::SET_META_CONTEXT;
        if set {
            // SET_META_CONTEXT replaces the earlier selection even if it fails ("Option types").
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

    /// Fixes what was negotiated, for transmission of the export that the client selects as `name`.
    fn agree(&mut self, name: &[u8]) {
        // A selected context counts only if SET_META_CONTEXT gave the name that transmission is started
        // with (SET_META_CONTEXT in "Option types").
        let allocation = self.selected.as_deref() == Some(name);
        self.agreed = Agreed { structured: self.structured, allocation };
    }

    fn transmission_flags(&self) -> u16 {
        // The server never fragments the reply to a read, so it can always honour DF.
        let more = if self.structured { flag::SEND_DF } else { 0 };
        self.export.transmission_flags | more
    }

    /// Returns whether `name` selects the export. The empty name selects the default export (EXPORT_NAME
    /// in "Option types").
    fn serves(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.export.name.as_bytes()
    }
}

/// Returns the data of an INFO reply that carries a string.
fn info_string(number: u16, text: &str) -> Vec<u8> {
    [&number.to_be_bytes(), text.as_bytes()].concat()
}
