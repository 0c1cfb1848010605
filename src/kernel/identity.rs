//! The identity of a mapping, as the kernel keeps it.

/// The identity of a mapping: `cleat.<mapping id>.<name>`. The kernel keeps it as the nbd backend
/// identifier, so that a supervisor recognises a device by it and never by its number.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity(String);

impl Identity {
    /// The prefix of every identity that cleat makes.
    pub const PREFIX: &'static str = "cleat.";

    /// Makes the identity of the mapping `mapping_id` (lower-case hexadecimal) with the name `name`.
    pub fn new(mapping_id: &str, name: &str) -> Self {
        Self(format!("{}{mapping_id}.{name}", Self::PREFIX))
    }

    /// Parses a backend identifier from sysfs; `None` when cleat did not make it.
    pub fn parse(backend: &str) -> Option<Self> {
        let rest = backend.strip_prefix(Self::PREFIX)?;
        let (id, name) = rest.split_once('.')?;
        // The identity becomes a file name and a udev property, so only safe characters are accepted.
        let hexadecimal = |b: u8| b.is_ascii_hexdigit();
        let word = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        let plausible = (1..=64).contains(&id.len())
            && id.bytes().all(hexadecimal)
            && (1..=128).contains(&name.len())
            && name.bytes().all(word)
            && name.as_bytes()[0].is_ascii_alphanumeric();
        plausible.then(|| Self(backend.to_owned()))
    }

    /// Returns the identity as the kernel keeps it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the mapping's id.
    pub fn mapping_id(&self) -> &str {
        self.0[Self::PREFIX.len()..].split('.').next().unwrap_or_default()
    }

    /// Returns the mapping's name.
    pub fn name(&self) -> &str {
        self.0[Self::PREFIX.len()..].split_once('.').map_or("", |(_, name)| name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_parsed_as_it_was_made() {
        let identity = Identity::new("00ff", "data.1");
        assert_eq!(Identity::parse(identity.as_str()), Some(identity.clone()));
        assert_eq!((identity.mapping_id(), identity.name()), ("00ff", "data.1"));
    }

    #[test]
    fn other_identifiers_are_not_identities() {
        let long = format!("cleat.00.{}", "a".repeat(129));
        let others = [
            "",
            "cleat.",
            "cleat.00",
            "cleat.00.",
            "cleat..a",
            "cleat.zz.a",
            "cleat.00.a/b",
            "cleat.00.../x",
            "cleat.00.a\nb",
            "cleat.00.-a",
            "rbd",
            "Cleat.00.a",
            &long,
        ];
        for other in others {
            assert_eq!(Identity::parse(other), None, "{other:?}");
        }
    }
}
