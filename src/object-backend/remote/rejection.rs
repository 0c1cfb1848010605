//! Answers of a store that are no success, and what they mean.

use std::error::Error as StdError;
use std::fmt;

use cleat_object::store::StoreError;

use super::bucket::{Bucket, Provider};
use super::origin::Origin;

/// The maximum length of the text of a rejection, in characters.
const MAX_TEXT: usize = 300;

/// An answer that is no success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rejection {
    pub(super) status: u16,
    pub(super) code: String,
    pub(super) message: String,
}

impl Rejection {
    /// Reads the code and the message from the body, in XML or JSON. A store may send none.
    pub(super) fn new(status: u16, body: &[u8]) -> Self {
        let text = String::from_utf8_lossy(body);
        let element = |name: &str| {
            let (_, rest) = text.split_once(&format!("<{name}>"))?;
            rest.split_once("</").map(|(value, _)| plain(value))
        };
        let message = element("Message").unwrap_or_else(|| plain(&text));
        Self { status, code: element("Code").unwrap_or_default(), message }
    }
}

/// Returns a text of the store as one line without control characters.
pub(super) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_TEXT).collect()
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HTTP {}, {}: {}", self.status, self.code, self.message)
    }
}

impl StdError for Rejection {}

/// Returns what an error of `object_store` means for the engine.
pub(super) fn classify(error: &object_store::Error, bucket: &Bucket, origin: Origin) -> StoreError {
    if let Some(rejection) = rejection(error) {
        return meaning(rejection, bucket, origin);
    }
    // Azure deletes in batches: the status of an object is in the body of an answer with the status 202.
    if matches!(error, object_store::Error::NotFound { .. }) {
        return StoreError::NotFound;
    }
    let at = bucket.address().shown();
    if let Some(untrusted) = chain(error).find_map(certificate_error) {
        return StoreError::Refused(format!(
            "the certificate of {at} is not trusted: {untrusted}; name the file of its authority with ca_file="
        ));
    }
    // The innermost cause: the others repeat it with the address of the request.
    let cause = chain(error).last().map(ToString::to_string).unwrap_or_default();
    StoreError::Unclear(format!("{at}: {}", plain(&cause)))
}

/// Returns why the certificate of a store was refused; `None` for another error.
pub(super) fn certificate_error(error: &(dyn StdError + 'static)) -> Option<String> {
    match error.downcast_ref::<rustls::Error>() {
        Some(rustls::Error::InvalidCertificate(why)) => Some(why.to_string()),
        Some(_) => None,
        // What an error of I/O contains is not its source.
        None => certificate_error(error.downcast_ref::<std::io::Error>()?.get_ref()?),
    }
}

fn meaning(rejection: &Rejection, bucket: &Bucket, origin: Origin) -> StoreError {
    let Rejection { status, code, .. } = rejection;
    let name = &bucket.bucket;
    let refused = |why: &str| StoreError::Refused(format!("{why} (HTTP {status}, {code})"));
    match (*status, code.as_str()) {
        (404, "NoSuchKey" | "BlobNotFound") => StoreError::NotFound,
        (404, _) if bucket.provider == Provider::Google && code.is_empty() => StoreError::NotFound,
        (404, _) => refused(&format!("the bucket {name} does not exist")),
        (412, _) | (409, "BlobAlreadyExists") => StoreError::Exists,
        (403, "RequestTimeTooSkewed") => {
            refused("the clock of this node differs from that of the store: correct it, with NTP")
        }
        (403, "SignatureDoesNotMatch") => {
            refused(&format!("the secret key from {origin} is not that of the access key"))
        }
        (403, "AuthenticationFailed") => refused(&format!(
            "the key from {origin} is not that of the storage account, or the clock of this node is wrong"
        )),
        (403, "InvalidAccessKeyId") => {
            // Some stores forget temporary keys that have expired.
            refused(&format!(
                "the store does not know the access key from {origin}; a temporary one may have expired"
            ))
        }
        (400 | 403, "ExpiredToken" | "InvalidToken" | "InvalidTokenId") => refused(&format!(
            "the temporary keys from {origin} have expired, or their token is wrong"
        )),
        (401 | 403, _) => {
            refused(&format!("the access key from {origin} may not do this in the bucket {name}"))
        }
        (301 | 307, _) => {
            refused(&format!("the bucket {name} is in another region: name it with region="))
        }
        (501, _) => refused("the store does not support conditional puts"),
        // Another put of the same name is in progress, the store is busy, or it fails for a moment.
        (408 | 409 | 429 | 500..=599, _) => StoreError::Unclear(rejection.to_string()),
        _ => refused(&format!("unexpected answer: {}", rejection.message)),
    }
}

/// Returns whether a read was refused because the object ends before its range.
pub(super) fn is_behind_the_end(error: &object_store::Error) -> bool {
    rejection(error).is_some_and(|rejection| rejection.status == 416)
}

pub(super) fn rejection(error: &object_store::Error) -> Option<&Rejection> {
    chain(error).find_map(|error| error.downcast_ref::<Rejection>())
}

/// Returns an error and its sources.
pub(super) fn chain(
    error: &object_store::Error,
) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    let first: &(dyn StdError + 'static) = error;
    std::iter::successors(Some(first), |&error| error.source())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket() -> Bucket {
        let options =
            cleat_backend::uri::Options::parse("endpoint=http://h:80&credentials_file=/k").unwrap();
        Bucket::parse_volume(Provider::Amazon, "//bucket/a/v", options).unwrap().0
    }

    fn found(status: u16, body: &str) -> StoreError {
        meaning(&Rejection::new(status, body.as_bytes()), &bucket(), Origin::Instance)
    }

    #[test]
    fn each_refusal_names_its_cause() {
        let error = |code: &str| format!("<Error><Code>{code}</Code><Message>m</Message></Error>");
        for (status, code, part) in [
            (403, "RequestTimeTooSkewed", "clock of this node"),
            (403, "SignatureDoesNotMatch", "secret key from the role of the instance"),
            (403, "InvalidAccessKeyId", "does not know the access key from the role"),
            (403, "AuthenticationFailed", "is not that of the storage account"),
            (403, "AccessDenied", "may not do this in the bucket bucket"),
            (400, "ExpiredToken", "keys from the role of the instance have expired"),
            (403, "InvalidTokenId", "or their token is wrong"),
            (404, "NoSuchBucket", "bucket bucket does not exist"),
            (301, "PermanentRedirect", "another region"),
            (501, "NotImplemented", "conditional puts"),
            (418, "Teapot", "unexpected answer: m (HTTP 418, Teapot)"),
        ] {
            match found(status, &error(code)) {
                StoreError::Refused(why) => assert!(why.contains(part), "{why}"),
                other => panic!("{status} {code}: {other:?}"),
            }
        }
        assert_eq!(found(412, ""), StoreError::Exists);
        assert_eq!(found(409, &error("BlobAlreadyExists")), StoreError::Exists);
        assert_eq!(found(404, &error("NoSuchKey")), StoreError::NotFound);
        for status in [409, 429, 500, 503] {
            let found = found(status, "busy");
            assert!(matches!(found, StoreError::Unclear(_)), "{found:?}");
        }
    }

    #[test]
    fn an_object_that_a_batch_of_deletes_does_not_find_does_not_exist() {
        let error = object_store::Error::NotFound { path: "a".into(), source: "404".into() };
        assert_eq!(classify(&error, &bucket(), Origin::File), StoreError::NotFound);
    }

    #[test]
    fn the_text_of_a_rejection_is_one_short_line() {
        let long = format!("<Code>a\nb</Code>{}", "x\u{7}".repeat(1000));
        let rejection = Rejection::new(500, long.as_bytes());
        assert_eq!(rejection.code, "a b");
        assert_eq!(rejection.message.chars().count(), MAX_TEXT);
        assert!(!rejection.to_string().contains(char::is_control));
        assert_eq!(Rejection::new(500, &[0xff, 0xfe]).message, "\u{fffd}\u{fffd}");
    }
}
