//! The options of a URI, which follow the `?`, and percent encoding.

use std::fmt;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};

use super::{invalid, shown};
use cleat_core::error::{Error, Result};

/// Options that have not been taken yet. Keys are unique.
#[derive(Debug, Default)]
pub struct Options(Vec<(String, String)>);

impl Options {
    /// Parses `key=value&…`.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for an option without a value, for a key that occurs twice, and for a value
    /// that is not UTF-8 or has an invalid percent sequence.
    pub fn parse(text: &str) -> Result<Self> {
        let mut options = Self::default();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(invalid(format!("the option {:?} has no value", shown(pair)))
                    .with_repair("options are written as key=value, joined by &"));
            };
            if options.0.iter().any(|(known, _)| known == key) {
                return Err(invalid(format!("the option {:?} is given twice", shown(key))));
            }
            // The errors do not contain the value, which may be a secret.
            let owner = || format!("the value of {:?}", shown(key));
            let value = try_decode(value).ok_or_else(|| bad_escape(&owner()))?;
            let value = String::from_utf8(value)
                .map_err(|_| invalid(format!("{} is not UTF-8", owner())))?;
            options.0.push((key.to_owned(), value));
        }
        Ok(options)
    }

    /// Removes the option `key` and returns its value.
    pub fn take(&mut self, key: &str) -> Option<String> {
        let index = self.0.iter().position(|(known, _)| known == key)?;
        Some(self.0.swap_remove(index).1)
    }

    /// Removes the option `key`, whose value must be `true` or `false`, and returns its value.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for any other value.
    pub fn flag(&mut self, key: &str) -> Result<Option<bool>> {
        match self.take(key).as_deref() {
            None => Ok(None),
            Some("true") => Ok(Some(true)),
            Some("false") => Ok(Some(false)),
            Some(other) => Err(invalid(format!("{key} is true or false, not {other:?}"))),
        }
    }

    /// Removes the options whose keys begin with `prefix`, and returns them without the prefix.
    pub fn split_prefix(&mut self, prefix: &str) -> Self {
        let (with, without) =
            std::mem::take(&mut self.0).into_iter().partition(|(key, _)| key.starts_with(prefix));
        self.0 = without;
        let with: Vec<(String, String)> = with;
        let cut = |(key, value): (String, String)| (key[prefix.len()..].to_owned(), value);
        Self(with.into_iter().map(cut).collect())
    }

    /// Returns the options that have not been taken, as keys and values.
    pub fn into_pairs(self) -> Vec<(String, String)> {
        self.0
    }

    /// Removes `prefix` from the keys that begin with it.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if a key then occurs twice.
    #[cfg(feature = "fault")]
    pub fn merge(&mut self, prefix: &str) -> Result<()> {
        for (key, value) in self.split_prefix(prefix).0 {
            if self.0.iter().any(|(known, _)| *known == key) {
                return Err(invalid(format!("the option {key:?} is given twice")));
            }
            self.0.push((key, value));
        }
        Ok(())
    }

    /// Checks that all options have been taken. `owner` and its `valid` options are for the message.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for an option that is left.
    pub fn finish(self, owner: &str, valid: &[&str]) -> Result<()> {
        let Some((key, _)) = self.0.first() else { return Ok(()) };
        let error = invalid(format!("{owner} has no option {:?}", shown(key)));
        Err(if valid.is_empty() {
            error.with_repair(format!("{owner} takes no options"))
        } else {
            error.with_repair(format!("valid options are {}", valid.join(", ")))
        })
    }
}

/// Decodes percent encoding: each `%XX` becomes the byte with that hexadecimal number. Unlike
/// `percent_encoding`, which leaves an invalid sequence as it is, this refuses it.
///
/// # Errors
/// Returns `InvalidArgument` for a `%` that is not followed by two hexadecimal digits.
pub fn decode(text: &str) -> Result<Vec<u8>> {
    try_decode(text).ok_or_else(|| bad_escape(&format!("{:?}", shown(text))))
}

fn bad_escape(owner: &str) -> Error {
    invalid(format!("{owner} has a % that no two hexadecimal digits follow"))
        .with_repair("write %25 for the character % itself")
}

fn try_decode(text: &str) -> Option<Vec<u8>> {
    let is_valid = |at: usize| {
        let digits = text.as_bytes().get(at + 1..at + 3);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    let is_encoded = text.match_indices('%').all(|(at, _)| is_valid(at));
    is_encoded.then(|| percent_decode_str(text).collect())
}

/// The bytes that [`Encoded`] escapes: all except letters, digits and a few marks without a meaning in
/// these URIs.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'+')
    .remove(b',')
    .remove(b':')
    .remove(b'@')
    .remove(b'=');

/// Displays bytes with percent encoding. The digits are lower-case, as in every canonical URI of cleat.
pub struct Encoded<'a>(pub &'a [u8]);

impl fmt::Display for Encoded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Each part is either one escaped byte or a run of bytes that need no escape.
        percent_encode(self.0, ESCAPED).try_for_each(|part| match part.strip_prefix('%') {
            Some(digits) => write!(f, "%{}", digits.to_ascii_lowercase()),
            None => f.write_str(part),
        })
    }
}

/// Displays options as they follow a URI; nothing if there are none.
pub(super) struct Query<'a>(pub(super) &'a [(String, String)]);

impl fmt::Display for Query<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (key, value)) in self.0.iter().enumerate() {
            let separator = if index == 0 { '?' } else { '&' };
            write!(f, "{separator}{key}={}", Encoded(value.as_bytes()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_percent_sequences_are_refused() {
        for text in ["%", "a%", "%4", "%4g", "%g4", "%%41", "%+1", "%4\u{e4}"] {
            assert!(decode(text).is_err(), "{text:?}");
        }
        for (text, bytes) in
            [("%41%2f%2F", &b"A//"[..]), ("%2541", b"%41"), ("\u{e4}", b"\xc3\xa4")]
        {
            assert_eq!(decode(text).unwrap(), bytes, "{text:?}");
        }
    }

    #[test]
    fn every_byte_survives_encoding_and_decoding() {
        let bytes: Vec<u8> = (0..=255).collect();
        let text = Encoded(&bytes).to_string();
        assert!(text.contains("%00") && text.contains("%ff") && text.contains("%25"), "{text}");
        assert_eq!(decode(&text).unwrap(), bytes);
    }
}
