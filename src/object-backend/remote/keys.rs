//! The file with the keys of a client, in the format of AWS's shared credentials file.

use std::fmt;

use zeroize::Zeroizing;

use cleat_backend::uri::invalid;
use cleat_core::error::Result;

/// The maximum length of the file in bytes.
pub(crate) const MAX_BYTES: usize = 16 << 10;

/// The section of the file that is read. Lines before the first section belong to it, too.
const SECTION: &str = "[default]";

/// The keys of a client.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Keys {
    pub(crate) id: String,
    pub(crate) secret: Zeroizing<String>,
    /// The token of temporary keys.
    pub(crate) token: Option<Zeroizing<String>>,
}

impl Keys {
    /// Parses the content of the file. The error does not contain any of it.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if a key is missing or malformed.
    pub(crate) fn parse(content: &[u8]) -> Result<Self> {
        let text = std::str::from_utf8(content).map_err(|_| malformed("it is not UTF-8"))?;
        let (mut id, mut secret, mut token) = (None, None, None);
        let mut is_read = true;
        for line in text.lines().map(str::trim) {
            if line.starts_with('[') {
                is_read = line == SECTION;
            }
            let pair =
                line.split_once('=').filter(|_| is_read && !line.starts_with(['#', ';', '[']));
            let Some((key, value)) = pair else { continue };
            let value = value.trim();
            if value.is_empty() || !value.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(malformed(
                    "a value is empty or has other characters than visible ASCII",
                ));
            }
            match key.trim() {
                "aws_access_key_id" => id = Some(value.to_owned()),
                "aws_secret_access_key" => secret = Some(Zeroizing::new(value.to_owned())),
                "aws_session_token" => token = Some(Zeroizing::new(value.to_owned())),
                _ => {}
            }
        }
        let id = id.ok_or_else(|| malformed("aws_access_key_id is missing"))?;
        let secret = secret.ok_or_else(|| malformed("aws_secret_access_key is missing"))?;
        Ok(Self { id, secret, token })
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keys(hidden)")
    }
}

fn malformed(why: &str) -> cleat_core::error::Error {
    invalid(format!("the file of credentials_file= is malformed: {why}")).with_repair(
        "write the section [default] with the lines aws_access_key_id = … and aws_secret_access_key = …",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_section_is_read_and_nothing_is_shown() {
        let text = "# comment\n[other]\naws_access_key_id = no\n[default]\n aws_access_key_id = ID\n\
                    aws_secret_access_key=se/cr+et=\nregion = x\naws_session_token = TOKEN\n[third]\n\
                    aws_secret_access_key = no\n";
        let keys = Keys::parse(text.as_bytes()).unwrap();
        let token = keys.token.as_ref().map(|token| &***token);
        assert_eq!((&*keys.id, &**keys.secret, token), ("ID", "se/cr+et=", Some("TOKEN")));
        assert_eq!(format!("{keys:?}"), "Keys(hidden)");
        let plain = Keys::parse(b"aws_access_key_id=a\naws_secret_access_key=b").unwrap();
        assert_eq!(plain.token, None);
    }

    #[test]
    fn a_malformed_file_is_refused_without_its_content() {
        for text in [
            "",
            "aws_access_key_id = hidden",
            "[x]\naws_access_key_id = hidden\naws_secret_access_key = hidden",
            "aws_access_key_id = hid den\naws_secret_access_key = b",
            "aws_access_key_id = hidden\naws_secret_access_key =",
        ] {
            let error = Keys::parse(text.as_bytes()).expect_err(text);
            assert!(!error.report().contains("hid"), "{error}");
            assert!(error.repair().unwrap().contains("[default]"));
        }
    }
}
