//! What stands behind the `?`, and percent encoding.

use std::fmt;

use super::invalid;
use cleat_core::error::Result;

/// Options that nobody has taken yet: keys are unique.
#[derive(Debug, Default)]
pub struct Options(Vec<(String, String)>);

impl Options {
    /// Reads `key=value&…`.
    pub fn parse(text: &str) -> Result<Self> {
        let mut options = Self::default();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(invalid(format!("the option {pair:?} has no value"))
                    .with_repair("options are written as key=value, joined by &"));
            };
            if options.0.iter().any(|(known, _)| known == key) {
                return Err(invalid(format!("the option {key:?} is given twice")));
            }
            let value = String::from_utf8(decode(value)?)
                .map_err(|_| invalid(format!("the value of {key:?} is not UTF-8")))?;
            options.0.push((key.to_owned(), value));
        }
        Ok(options)
    }

    /// Takes the value of `key`.
    pub fn take(&mut self, key: &str) -> Option<String> {
        let index = self.0.iter().position(|(known, _)| known == key)?;
        Some(self.0.swap_remove(index).1)
    }

    /// Takes the value of `key`, which must be `true` or `false`.
    pub fn flag(&mut self, key: &str) -> Result<Option<bool>> {
        match self.take(key).as_deref() {
            None => Ok(None),
            Some("true") => Ok(Some(true)),
            Some("false") => Ok(Some(false)),
            Some(other) => Err(invalid(format!("{key} is true or false, not {other:?}"))),
        }
    }

    /// Takes the options whose keys begin with `prefix`, and cuts it off them.
    pub fn split_prefix(&mut self, prefix: &str) -> Self {
        let (with, without) =
            std::mem::take(&mut self.0).into_iter().partition(|(key, _)| key.starts_with(prefix));
        self.0 = without;
        let with: Vec<(String, String)> = with;
        let cut = |(key, value): (String, String)| (key[prefix.len()..].to_owned(), value);
        Self(with.into_iter().map(cut).collect())
    }

    /// What is left, as it was written.
    pub fn into_pairs(self) -> Vec<(String, String)> {
        self.0
    }

    /// Cuts `prefix` off the keys that have it.
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

    /// Ends the reading: what is left is unknown to `owner`.
    pub fn finish(self, owner: &str, valid: &[&str]) -> Result<()> {
        let Some((key, _)) = self.0.first() else { return Ok(()) };
        let error = invalid(format!("{owner} has no option {key:?}"));
        Err(if valid.is_empty() {
            error.with_repair(format!("{owner} takes no options"))
        } else {
            error.with_repair(format!("valid options are {}", valid.join(", ")))
        })
    }
}

/// Turns each `%XX` into its byte.
pub fn decode(text: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (Some(high), Some(low)) = (hex(tail.first()), hex(tail.get(1))) else {
            return Err(invalid(format!("{text:?} has a % that no two hexadecimal digits follow"))
                .with_repair("write %25 for the character % itself"));
        };
        bytes.push(high << 4 | low);
        rest = &tail[2..];
    }
    Ok(bytes)
}

fn hex(digit: Option<&u8>) -> Option<u8> {
    match digit? {
        digit @ b'0'..=b'9' => Some(digit - b'0'),
        digit @ b'a'..=b'f' => Some(digit - b'a' + 10),
        digit @ b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

/// Bytes as they are written in a URI.
pub struct Encoded<'a>(pub &'a [u8]);

impl fmt::Display for Encoded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0 {
            if byte.is_ascii_alphanumeric() || b"/-._~+,:@=".contains(byte) {
                write!(f, "{}", *byte as char)?;
            } else {
                write!(f, "%{byte:02x}")?;
            }
        }
        Ok(())
    }
}

/// Options as they stand behind a URI; nothing where there are none.
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
