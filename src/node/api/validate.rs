//! What may come in from outside: names, URIs, options. Checked here, once, before anything is
//! done with them.

use std::time::Duration;

use crate::config::{MAX_CONNECTIONS, MAX_TIMEOUT_S};
use cleat_core::error::{Error, ErrorKind, Result};

/// The longest URI, in bytes.
pub(crate) const MAX_URI: usize = 4096;

/// The longest name, in bytes.
pub(crate) const MAX_NAME: usize = 128;

/// Whether `name` is `[A-Za-z0-9][A-Za-z0-9._-]{0,127}`.
pub(crate) fn is_name(name: &str) -> bool {
    name.len() <= MAX_NAME
        && name.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// Checks a name that a user gave.
///
/// # Errors
/// `InvalidArgument`, with what a name may be.
pub(crate) fn name(name: &str) -> Result<()> {
    if is_name(name) {
        return Ok(());
    }
    let shown: String = name.chars().take(40).collect();
    Err(invalid(format!("{shown:?} is not a name for a mapping")).with_repair(
        "use letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 128",
    ))
}

/// Checks a URI as far as the supervisor has to: the backend reads the rest.
///
/// # Errors
/// `InvalidArgument`.
pub(crate) fn uri(uri: &str) -> Result<()> {
    if uri.is_empty() {
        return Err(invalid("the volume's URI is empty").with_repair("for example mem:1G"));
    }
    if uri.len() > MAX_URI {
        return Err(invalid(format!("the volume's URI is longer than {MAX_URI} bytes")));
    }
    if uri.chars().any(char::is_control) {
        return Err(invalid("the volume's URI has control characters in it"));
    }
    let scheme = uri.split_once(':').map_or("", |(scheme, _)| scheme);
    let plausible = scheme.bytes().next().is_some_and(|first| first.is_ascii_lowercase())
        && scheme.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    if !plausible {
        return Err(invalid(format!("{uri:?} is not the URI of a volume"))
            .with_repair("write a scheme first: file:/path, mem:1G"));
    }
    Ok(())
}

/// Checks a block size; 0 leaves it to the backend.
///
/// # Errors
/// `InvalidArgument`.
pub(crate) fn block_size(bytes: u32) -> Result<()> {
    match bytes {
        0 | 512 | 1024 | 2048 | 4096 => Ok(()),
        _ => Err(invalid(format!("{bytes} is not a block size"))
            .with_repair("use 512, 1024, 2048 or 4096")),
    }
}

/// Checks a number of connections; 0 leaves it to the daemon.
///
/// # Errors
/// `InvalidArgument`.
pub(crate) fn connections(count: u32) -> Result<()> {
    match count {
        0..=MAX_CONNECTIONS => Ok(()),
        _ => Err(invalid(format!("{count} connections are more than {MAX_CONNECTIONS}"))),
    }
}

/// Checks a timeout in seconds; 0 leaves it to the daemon.
///
/// # Errors
/// `InvalidArgument`.
pub(crate) fn timeout_s(seconds: u32) -> Result<()> {
    match seconds {
        0..=MAX_TIMEOUT_S => Ok(()),
        _ => Err(invalid(format!("a timeout of {seconds} s is longer than a day"))),
    }
}

/// Checks that there is something to be made quiet.
///
/// # Errors
/// `InvalidArgument`.
pub(crate) fn quiesce(quiesce: bool, read_only: bool) -> Result<()> {
    match quiesce && read_only {
        true => Err(invalid("nothing of a mapping that is read-only has to be made quiet")
            .with_repair("map it without --quiesce, or without --read-only")),
        false => Ok(()),
    }
}

/// A target, checked: a name, a URI or a path.
///
/// # Errors
/// `InvalidArgument`.
pub(crate) fn target(target: String) -> Result<String> {
    let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidArgument, message));
    if target.is_empty() {
        return invalid("no mapping is named");
    }
    if target.len() > MAX_URI || target.chars().any(char::is_control) {
        return invalid("that is no name, URI or device");
    }
    Ok(target)
}

/// A bound on a call; 0 leaves it to the daemon.
///
/// # Errors
/// `InvalidArgument` beyond a day.
pub(crate) fn timeout(timeout_ms: u32, default: Duration) -> Result<Duration> {
    timeout_s(timeout_ms / 1000)?;
    Ok(match timeout_ms {
        0 => default,
        _ => Duration::from_millis(u64::from(timeout_ms)),
    })
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "0", "pvc-1234_x.y", &"a".repeat(128)] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", ".", "..", "-a", "a/b", "a b", "ä", "a\n", &"a".repeat(129)] {
            assert!(!is_name(bad), "{bad:?}");
            assert_eq!(name(bad).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
    }

    #[test]
    fn uris() {
        for good in ["mem:1G", "file:/a b/c?direct=true", "s3://b/p", "fault:mem:1M"] {
            uri(good).unwrap();
        }
        for bad in ["", "mem", ":1", "/dev/sda", "File:/x", "mem:1\0", &"a".repeat(5000)] {
            assert!(uri(bad).is_err(), "{bad:?}");
        }
    }
}
