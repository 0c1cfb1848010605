//! The identity of a mapping, as the kernel keeps it.

/// Who a device belongs to: `cleat.<mapping id>.<name>`, kept by the kernel as the nbd backend
/// identifier, so that a device is never adopted by its number.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity(String);

impl Identity {
    /// The prefix of every identity of ours.
    pub const PREFIX: &'static str = "cleat.";

    /// The identity of the mapping `mapping_id` (lower-case hexadecimal) called `name`.
    pub fn new(mapping_id: &str, name: &str) -> Self {
        Self(format!("{}{mapping_id}.{name}", Self::PREFIX))
    }

    /// Reads back what sysfs shows; `None` when the device is not one of ours.
    pub fn parse(backend: &str) -> Option<Self> {
        let rest = backend.strip_prefix(Self::PREFIX)?;
        let (id, name) = rest.split_once('.')?;
        // The identity becomes a file name and a udev property: nothing else may come in.
        let hexadecimal = |b: u8| b.is_ascii_hexdigit();
        let word = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        let plausible = (1..=64).contains(&id.len())
            && id.bytes().all(hexadecimal)
            && (1..=128).contains(&name.len())
            && name.bytes().all(word)
            && name.as_bytes()[0].is_ascii_alphanumeric();
        plausible.then(|| Self(backend.to_owned()))
    }

    /// The identity as the kernel keeps it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The mapping's id.
    pub fn mapping_id(&self) -> &str {
        self.0[Self::PREFIX.len()..].split('.').next().unwrap_or_default()
    }

    /// The mapping's name.
    pub fn name(&self) -> &str {
        self.0[Self::PREFIX.len()..].split_once('.').map_or("", |(_, name)| name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_read_back_as_it_was_written() {
        let identity = Identity::new("00ff", "data.1");
        assert_eq!(Identity::parse(identity.as_str()), Some(identity.clone()));
        assert_eq!((identity.mapping_id(), identity.name()), ("00ff", "data.1"));
    }

    #[test]
    fn nothing_else_is_taken_for_an_identity() {
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
