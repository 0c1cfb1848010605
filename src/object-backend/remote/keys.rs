//! The file with the keys of a client, in the format of AWS's shared credentials file.

use std::fmt;

use zeroize::Zeroizing;

use cleat_backend::uri::invalid;
use cleat_core::error::Result;

use super::origin::Origin;

/// The maximum length of the file in bytes.
pub(crate) const MAX_BYTES: usize = 16 << 10;

/// The section of the file that is read. Lines before the first section belong to it, too.
const PROFILE: &str = "default";

/// The line that says where keys come from that the supervisor has found itself.
const ORIGIN: &str = "cleat_origin";

/// The keys of a client.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Keys {
    pub(crate) id: String,
    pub(crate) secret: Zeroizing<String>,
    /// The token of temporary keys.
    pub(crate) token: Option<Zeroizing<String>>,
    /// Where they come from, if the content says so.
    pub(super) origin: Option<Origin>,
}

impl Keys {
    /// Parses the content of the file. The error does not contain any of it.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if a key is missing or malformed.
    pub(crate) fn parse(content: &[u8]) -> Result<Self> {
        let found = Self::of_profile(content, PROFILE).map_err(malformed)?;
        found.ok_or_else(|| malformed("aws_access_key_id is missing"))
    }

    /// Parses the section of one profile. Returns `None` if it does not exist or has no keys.
    ///
    /// # Errors
    /// Returns what is wrong with a key, without any of the content.
    pub(super) fn of_profile(content: &[u8], profile: &str) -> Result<Option<Self>, &'static str> {
        let text = std::str::from_utf8(content).map_err(|_| "it is not UTF-8")?;
        let (mut id, mut secret, mut token, mut origin) = (None, None, None, None);
        let mut is_read = profile == PROFILE;
        for line in text.lines().map(str::trim) {
            if let Some(section) = line.strip_prefix('[') {
                is_read = section.strip_suffix(']').is_some_and(|name| name.trim() == profile);
            }
            let pair =
                line.split_once('=').filter(|_| is_read && !line.starts_with(['#', ';', '[']));
            let Some((key, value)) = pair else { continue };
            match key.trim() {
                "aws_access_key_id" => id = Some(checked(value)?.to_owned()),
                "aws_secret_access_key" => {
                    secret = Some(Zeroizing::new(checked(value)?.to_owned()))
                }
                "aws_session_token" => token = Some(Zeroizing::new(checked(value)?.to_owned())),
                ORIGIN => origin = Origin::of_word(value.trim()),
                _ => {}
            }
        }
        match (id, secret) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err("aws_access_key_id is missing"),
            (Some(_), None) => Err("aws_secret_access_key is missing"),
            (Some(id), Some(secret)) => Ok(Some(Self { id, secret, token, origin })),
        }
    }

    /// Returns the content of a file with these keys, for a worker.
    ///
    /// # Errors
    /// Returns what is wrong with a key, without any of its content.
    pub(super) fn content(&self, origin: Origin) -> Result<Zeroizing<Vec<u8>>, &'static str> {
        // It never grows, so it leaves no copy behind.
        let mut text = Zeroizing::new(String::with_capacity(MAX_BYTES));
        let token = self.token.as_ref().map(|token| ("aws_session_token", &***token));
        let lines = [
            Some((ORIGIN, origin.word())),
            Some(("aws_access_key_id", &*self.id)),
            Some(("aws_secret_access_key", &**self.secret)),
            token,
        ];
        for (key, value) in lines.into_iter().flatten() {
            let value = checked(value)?;
            if text.len() + key.len() + value.len() + 2 > MAX_BYTES {
                return Err("the keys are too long");
            }
            for part in [key, "=", value, "\n"] {
                text.push_str(part);
            }
        }
        Ok(Zeroizing::new(std::mem::take(&mut *text).into_bytes()))
    }
}

fn checked(value: &str) -> Result<&str, &'static str> {
    let value = value.trim();
    let is_plain = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_graphic());
    is_plain.then_some(value).ok_or("a value is empty or has other characters than visible ASCII")
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
    fn the_section_of_a_profile_is_read() {
        let text = b"aws_access_key_id = d\naws_secret_access_key = e\n[ one ]\ns3 =\n\
                     aws_access_key_id = a\naws_secret_access_key = b\n[half]\naws_access_key_id = c\n\
                     [empty]\nregion = x\n";
        let id = |profile| Keys::of_profile(text, profile).map(|keys| keys.map(|keys| keys.id));
        assert_eq!(id("one"), Ok(Some("a".into())));
        assert_eq!(id("default"), Ok(Some("d".into())));
        assert_eq!((id("empty"), id("other")), (Ok(None), Ok(None)));
        assert_eq!(id("half"), Err("aws_secret_access_key is missing"));
    }

    #[test]
    fn keys_are_passed_on_as_a_file_with_their_origin() {
        let token = Some(Zeroizing::new("T==".to_owned()));
        let mut keys =
            Keys { id: "i".into(), secret: Zeroizing::new("s".into()), token, origin: None };
        let content = keys.content(Origin::Instance).unwrap();
        let passed = Keys::parse(&content).unwrap();
        assert_eq!(passed, Keys { origin: Some(Origin::Instance), ..keys.clone() });
        keys.id = "a\naws_session_token = b".into();
        assert!(keys.content(Origin::Instance).unwrap_err().contains("visible ASCII"));
        keys.id = "i".repeat(MAX_BYTES);
        assert_eq!(keys.content(Origin::Instance), Err("the keys are too long"));
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
