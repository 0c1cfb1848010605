//! The names of volumes and snapshots in their storage. They follow from the names of the requests, so that a
//! repeated request finds what an earlier one made.
//!
//! A plain name is used as it is. Another one becomes readable text with a hash. Two different names can
//! therefore have the same name in the storage, if someone tries to; the labels of the volume then differ.

use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum length in bytes of a name in a request. The specification has 128.
const MAX_NAME: usize = 256;

/// The maximum length of a name that is used as it is, in bytes.
const MAX_PLAIN: usize = 128;

/// The maximum length of the readable part of another name, in bytes.
const MAX_READABLE: usize = 60;

/// The maximum length of a prefix, in bytes.
const MAX_PREFIX: usize = 64;

/// The beginning of the names of snapshots that CreateSnapshot makes. It tells them from snapshots of the same
/// name that an administrator took.
const SNAPSHOT: &str = "csi-";

/// The beginning of the names of snapshots that exist only while a volume is cloned.
const CLONE: &str = "csiclone-";

/// The beginning of the names of the snapshots of a group.
pub(crate) const GROUP: &str = "csigroup-";

/// The beginning of the names of snapshots of a group that is being made.
pub(crate) const UNFINISHED_GROUP: &str = "csigroupnew-";

/// Checks the name in a request. `what` names it in errors.
///
/// # Errors
/// Returns `InvalidArgument` if it is missing, too long or contains control characters.
pub(crate) fn checked<'a>(what: &str, name: &'a str) -> Result<&'a str> {
    let invalid = |message: String| Err(Error::new(ErrorKind::InvalidArgument, message));
    if name.is_empty() {
        return invalid(format!("the request has no {what}"));
    }
    if name.len() > MAX_NAME || name.chars().any(char::is_control) {
        return invalid(format!(
            "the {what} is longer than {MAX_NAME} bytes or contains control characters"
        ));
    }
    Ok(name)
}

/// Checks the prefix of the names of volumes.
///
/// # Errors
/// Returns `InvalidArgument` for a prefix that is not plain.
pub(crate) fn checked_prefix(prefix: &str) -> Result<&str> {
    if prefix.is_empty() || (prefix.len() <= MAX_PREFIX && is_plain(prefix)) {
        return Ok(prefix);
    }
    let message = format!(
        "the volumeNamePrefix must begin with a letter or a digit and have at most {MAX_PREFIX} letters, \
         digits, '-', '_' and '.'"
    );
    Err(Error::new(ErrorKind::InvalidArgument, message))
}

/// Returns the name of a volume in its storage.
pub(crate) fn of_volume(prefix: &str, name: &str) -> String {
    format!("{prefix}{}", stored(name))
}

/// Returns the name of a snapshot in its storage.
pub(crate) fn of_snapshot(name: &str) -> String {
    format!("{SNAPSHOT}{}", stored(name))
}

/// Returns the name of the snapshot from which the volume `volume` is cloned, if the storage clones only
/// snapshots.
pub(crate) fn of_clone_snapshot(volume: &str) -> String {
    format!("{CLONE}{volume}")
}

/// Returns whether a snapshot is only a step of a call: of cloning a volume, or of a group snapshot.
pub(crate) fn is_step(snapshot: &str) -> bool {
    snapshot.starts_with(CLONE) || snapshot.starts_with(UNFINISHED_GROUP)
}

/// Returns the part of the names of a group's snapshots that follows from its name. Names that are not plain begin
/// with `-`, so that none of them has the same part as a plain one.
pub(crate) fn of_group(name: &str) -> String {
    if is_plain(name) { name.to_owned() } else { format!("-{}", stored(name)) }
}

/// Returns a hash of 16 hexadecimal digits.
pub(crate) fn short_hash(text: &[u8]) -> String {
    let hash = hmac_sha256::Hash::hash(text);
    hash[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns whether the name of a snapshot or of a volume without a prefix is the name of the request.
pub(crate) fn is_plain(name: &str) -> bool {
    let inside = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    name.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
        && name.len() <= MAX_PLAIN
        && name.bytes().all(inside)
}

fn stored(name: &str) -> String {
    if is_plain(name) {
        return name.to_owned();
    }
    let readable: String = name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' })
        .skip_while(|c| !c.is_ascii_alphanumeric())
        .take(MAX_READABLE)
        .collect();
    let readable = if readable.is_empty() { "volume" } else { &readable };
    format!("{readable}-{}", short_hash(name.as_bytes()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Volumes that exist have these names.
    #[test]
    fn names_in_the_storage_never_change() {
        for (name, stored) in [
            ("pvc-0b1c", "pvc-0b1c"),
            ("a/b", "a-b-c14cddc033f64b9d"),
            ("pvc 1", "pvc-1-4194fec0a9417bb5"),
            ("\u{fc}", "volume-607474ca475a9724"),
        ] {
            assert_eq!(of_volume("", name), stored);
        }
        assert_eq!(of_volume("k8s-", "pvc-1"), "k8s-pvc-1");
        assert_eq!(of_snapshot("snapshot-1"), "csi-snapshot-1");
        assert!(is_step(&of_clone_snapshot("pvc-1")));
        assert!(!is_step(&of_snapshot("csiclone-x")));
    }

    #[test]
    fn names_of_requests() {
        assert!(checked("name", &"n".repeat(128)).is_ok());
        for bad in ["", "a\u{7}", &"n".repeat(300)] {
            assert_eq!(checked("name", bad).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        assert!(checked_prefix("").is_ok() && checked_prefix("k8s-").is_ok());
        for bad in ["-a", "a/b", &"n".repeat(65)] {
            assert!(checked_prefix(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn every_name_has_a_valid_name_in_the_storage(name in ".{1,200}", other in ".{1,200}") {
            let stored = of_volume("", &name);
            prop_assert!(stored.len() <= MAX_PLAIN && is_plain(&stored), "{}", stored);
            prop_assert_eq!(&stored, &of_volume("", &name));
            if name != other {
                prop_assert_ne!(stored, of_volume("", &other));
            }
        }
    }
}
