//! The handshake: the server side of the fixed newstyle negotiation ("Fixed newstyle negotiation").
//!
//! The server has one export. An option that it does not serve gets an error reply, and the negotiation
//! continues with the next option. The connection ends only if the stream cannot be parsed any further, if
//! the protocol demands it, or if the client exceeds a limit.
//!
//! This file frames the stream: it finds the options in the bytes and enforces the limits. [`options`]
//! answers each option, and [`queries`] parses the data of options that have some.

mod options;
mod queries;
#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests;

use cleat_core::volume::BlockSizes;

use super::wire::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, OPTION_HEADER_LEN, OptionHeader, option, put_greeting,
    put_option_reply, reply,
};

/// The maximum length of option data that the server parses, in bytes: a name of 4096 bytes
/// ("Conventions") and space for information requests. Longer data is skipped and answered with
/// `ERR_TOO_BIG`.
pub const MAX_OPTION_DATA: u32 = 16 << 10;

/// The maximum length of option data that the server skips, in bytes. Longer data ends the connection.
pub const MAX_OPTION_SKIPPED: u32 = 1 << 20;

/// The maximum number of options that one client may send before transmission.
pub const MAX_OPTIONS: u32 = 256;

/// The maximum length of a name or description, in bytes ("Conventions").
pub const MAX_STRING: usize = 4096;

/// When this many bytes of replies are pending, they must be sent before more input is parsed.
const OUT_BOUND: usize = 16 << 10;

/// The volume that the server offers to clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// The export's name, at most [`MAX_STRING`] bytes. The empty name selects the export, too.
    pub name: String,
    /// A description for users, at most [`MAX_STRING`] bytes. It may be empty.
    pub description: String,
    /// The size in bytes.
    pub size: u64,
    /// The block sizes that the server announces.
    pub blocks: BlockSizes,
    /// The transmission flags: see [`super::wire::transmission_flags`].
    pub transmission_flags: u16,
}

/// The protocol extensions that the handshake has negotiated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Agreed {
    /// The server answers reads with structured replies.
    pub structured: bool,
    /// The client has selected the context "base:allocation", so the server answers `BLOCK_STATUS`.
    pub allocation: bool,
}

/// What the caller must do after a call of [`Handshake::advance`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Send the content of `out`, then call again with the unconsumed bytes and with more bytes.
    Continue,
    /// Send the content of `out`. The unconsumed bytes, and all bytes after them, belong to transmission.
    Transmission,
    /// Send the content of `out` and close the connection.
    End(Refusal),
}

/// Why a handshake ended without transmission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The client sent `ABORT`, the orderly end of a handshake.
    #[error("the client ended the handshake")]
    Aborted,
    /// The client set flags that this server has not offered.
    #[error("the client sent unknown handshake flags {0:#x}")]
    ClientFlags(u32),
    /// The magic number of an option is wrong, so the stream cannot be parsed any further.
    #[error("the client broke the handshake's framing")]
    Magic,
    /// The client sent `EXPORT_NAME`, which has no error reply, with an unknown name.
    #[error("the client asked for an unknown export")]
    UnknownExport,
    /// A client without fixed newstyle sent another option than `EXPORT_NAME`.
    #[error("the client sent an option without having agreed to fixed newstyle")]
    NotFixed,
    /// The client announced more option data than [`MAX_OPTION_SKIPPED`].
    #[error("the client sent option data of {0} bytes, beyond any limit")]
    OptionData(u32),
    /// The client sent more than [`MAX_OPTIONS`] options.
    #[error("the client sent more than {MAX_OPTIONS} options")]
    Options,
}

/// The handshake of one connection.
#[derive(Debug)]
pub struct Handshake {
    export: Export,
    state: State,
    /// The number of options received.
    options: u32,
    fixed: bool,
    no_zeroes: bool,
    structured: bool,
    /// The export name with which the client selected "base:allocation".
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
    /// Starts a handshake and appends the greeting to `out`.
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

    /// Returns the extensions that were negotiated. The value is final after [`Step::Transmission`].
    pub fn agreed(&self) -> Agreed {
        self.agreed
    }

    /// Parses the front of `input` and appends replies to `out`. Returns the number of bytes consumed and
    /// the next step.
    ///
    /// The caller keeps the unconsumed bytes. These are fewer than [`MAX_OPTION_DATA`] plus an option
    /// header, unless the call stopped early because the pending replies have reached their bound.
    pub fn advance(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Step) {
        let mut consumed = 0;
        while out.len() < OUT_BOUND {
            let (bytes, step) = self.advance_once(&input[consumed..], out);
            consumed += bytes;
            match step {
                Step::Continue if bytes == 0 => break,
                Step::Continue => {}
                step => return (consumed, step),
            }
        }
        (consumed, Step::Continue)
    }

    fn advance_once(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Step) {
        match self.state {
            State::Flags => match input.first_chunk::<4>() {
                Some(flags) => (4, self.take_client_flags(u32::from_be_bytes(*flags))),
                None => (0, Step::Continue),
            },
            State::Option => self.take_option(input, out),
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

    fn take_client_flags(&mut self, flags: u32) -> Step {
        let known = u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
        // "The server MUST drop the TCP connection if the client sets an unknown flag" ("Client flags").
        if flags & !known != 0 {
            return Step::End(Refusal::ClientFlags(flags));
        }
        self.fixed = flags & u32::from(FLAG_FIXED_NEWSTYLE) != 0;
        self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
        self.state = State::Option;
        Step::Continue
    }

    fn take_option(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Step) {
        let Some(header) = input.first_chunk::<OPTION_HEADER_LEN>() else {
            return (0, Step::Continue);
        };
        let Some(OptionHeader { option, length }) = OptionHeader::parse(header) else {
            return (0, Step::End(Refusal::Magic));
        };
        // EXPORT_NAME "is the only valid option in nonfixed newstyle negotiation" ("Option types").
        if !self.fixed && option != option::EXPORT_NAME {
            return (0, Step::End(Refusal::NotFixed));
        }
        if length > MAX_OPTION_DATA {
            // EXPORT_NAME has no error reply.
            if length > MAX_OPTION_SKIPPED || option == option::EXPORT_NAME {
                return (0, Step::End(Refusal::OptionData(length)));
            }
            self.state = State::Skip { option, left: length };
            return (OPTION_HEADER_LEN, self.count_option());
        }
        let Some(data) = input[OPTION_HEADER_LEN..].get(..length as usize) else {
            return (0, Step::Continue);
        };
        let step = match self.count_option() {
            Step::Continue => self.answer(option, data, out),
            step => step,
        };
        (OPTION_HEADER_LEN + data.len(), step)
    }

    fn count_option(&mut self) -> Step {
        self.options += 1;
        if self.options > MAX_OPTIONS { Step::End(Refusal::Options) } else { Step::Continue }
    }
}
