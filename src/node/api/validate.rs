//! Checks the names, URIs and options of incoming calls. Each value is checked once, before it is used.

use std::time::Duration;

use crate::config::{MAX_CONNECTIONS, MAX_TIMEOUT_S};
use cleat_backend::uri::shown;
use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum length of a URI, in bytes.
pub(crate) const MAX_URI: usize = 4096;

/// The maximum length of a name, in bytes.
pub(crate) const MAX_NAME: usize = 128;

/// Returns whether `name` matches `[A-Za-z0-9][A-Za-z0-9._-]{0,127}`.
pub(crate) fn is_name(name: &str) -> bool {
    name.len() <= MAX_NAME
        && name.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// Checks the name of a mapping.
///
/// # Errors
/// Returns `InvalidArgument`, with the allowed form, if it is not a name.
pub(crate) fn name(name: &str) -> Result<()> {
    if is_name(name) {
        return Ok(());
    }
    let shown: String = name.chars().take(40).collect();
    Err(invalid(format!("{shown:?} is not a name for a mapping")).with_repair(
        "use at most 128 letters, digits, '.', '_' and '-', with a letter or digit first",
    ))
}

/// Checks the length and the scheme of a URI. The backend checks the rest.
///
/// # Errors
/// Returns `InvalidArgument` if it is not a URI.
pub(crate) fn uri(uri: &str) -> Result<()> {
    if uri.is_empty() {
        return Err(invalid("the volume's URI is empty").with_repair("for example mem:1G"));
    }
    if uri.len() > MAX_URI {
        return Err(invalid(format!("the volume's URI is longer than {MAX_URI} bytes")));
    }
    if uri.chars().any(char::is_control) {
        return Err(invalid("the volume's URI contains control characters"));
    }
    let scheme = uri.split_once(':').map_or("", |(scheme, _)| scheme);
    let plausible = scheme.bytes().next().is_some_and(|first| first.is_ascii_lowercase())
        && scheme.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    if !plausible {
        return Err(invalid(format!("{:?} is not the URI of a volume", shown(uri)))
            .with_repair("begin with a scheme, for example file:/path or mem:1G"));
    }
    Ok(())
}

/// Checks a block size in bytes; 0 means the backend's minimum.
///
/// # Errors
/// Returns `InvalidArgument` if the kernel does not support the size.
pub(crate) fn block_size(bytes: u32) -> Result<()> {
    match bytes {
        0 | 512 | 1024 | 2048 | 4096 => Ok(()),
        _ => Err(invalid(format!("{bytes} is not a block size"))
            .with_repair("use 512, 1024, 2048 or 4096")),
    }
}

/// Checks a number of connections; 0 means the daemon's default.
///
/// # Errors
/// Returns `InvalidArgument` above [`MAX_CONNECTIONS`].
pub(crate) fn connections(count: u32) -> Result<()> {
    match count {
        0..=MAX_CONNECTIONS => Ok(()),
        _ => Err(invalid(format!(
            "{count} connections are too many: the limit is {MAX_CONNECTIONS}"
        ))),
    }
}

/// Checks a timeout in seconds; 0 means the daemon's default.
///
/// # Errors
/// Returns `InvalidArgument` if it is longer than a day.
pub(crate) fn timeout_s(seconds: u32) -> Result<()> {
    match seconds {
        0..=MAX_TIMEOUT_S => Ok(()),
        _ => Err(invalid(format!("a timeout of {seconds} s is longer than a day"))),
    }
}

/// Checks the quiesce option.
///
/// # Errors
/// Returns `InvalidArgument` for a read-only mapping, which needs no quiesce.
pub(crate) fn quiesce(quiesce: bool, read_only: bool) -> Result<()> {
    match quiesce && read_only {
        true => Err(invalid("a read-only mapping cannot be quiesced")
            .with_repair("map it without --quiesce, or without --read-only")),
        false => Ok(()),
    }
}

/// Checks a target: a name, a URI or a path.
///
/// # Errors
/// Returns `InvalidArgument` if it is empty, too long, or contains control characters.
pub(crate) fn target(target: String) -> Result<String> {
    let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidArgument, message));
    if target.is_empty() {
        return invalid("the name of the mapping is empty");
    }
    if target.len() > MAX_URI || target.chars().any(char::is_control) {
        return invalid("the target is not a name, a URI or a device");
    }
    Ok(target)
}

/// Checks the timeout of a call and returns it; 0 means `default`.
///
/// # Errors
/// Returns `InvalidArgument` if it is longer than a day.
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
    fn valid_and_invalid_names() {
        for good in ["a", "0", "pvc-1234_x.y", &"a".repeat(128)] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", ".", "..", "-a", "a/b", "a b", "ä", "a\n", &"a".repeat(129)] {
            assert!(!is_name(bad), "{bad:?}");
            assert_eq!(name(bad).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
    }

    #[test]
    fn valid_and_invalid_uris() {
        for good in ["mem:1G", "file:/a b/c?direct=true", "s3://b/p", "fault:mem:1M"] {
            uri(good).unwrap();
        }
        for bad in ["", "mem", ":1", "/dev/sda", "File:/x", "mem:1\0", &"a".repeat(5000)] {
            assert!(uri(bad).is_err(), "{bad:?}");
        }
        let message = uri("Rbd:p/i?config.key=AQsecret").unwrap_err().report();
        assert!(!message.contains("AQsecret"), "{message}");
    }
}
