//! The client of an object store with the S3 API: blocking HTTP/1.1, no TLS, path-style addresses.

mod bucket;
pub(crate) mod http;
mod keys;
mod sign;
mod store;
mod xml;

use std::io;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use cleat_core::clock::{Clock, SystemClock};
use cleat_object::store::StoreError;

pub(crate) use bucket::{Bucket, SCHEME};
use http::{Connection, Request, Response};
pub(crate) use keys::{Keys, MAX_BYTES};
use sign::{Scope, Signed, authorization, hash};
pub(crate) use store::S3Home;

/// The timeout of one call, with all data.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The maximum number of connections that wait for their next call.
const MAX_IDLE: usize = 32;

/// The characters that a path or a query does not encode (RFC 3986, 2.3). The signature requires exactly these.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The same for a path.
const IN_PATH: &AsciiSet = &ENCODED.remove(b'/');

/// A call.
struct Call<'a> {
    method: &'static str,
    /// The key of the object; `None` for a call of the bucket.
    key: Option<&'a str>,
    /// The query, in the order of the keys.
    query: &'a [(&'a str, &'a str)],
    /// A field of the head with its name in lower case.
    field: Option<(&'static str, String)>,
    body: &'a [u8],
    /// The maximum length of the body of the answer.
    max_answer: usize,
}

/// The answer to a call: the status and the body.
type Answer = Result<(u16, Vec<u8>), StoreError>;

/// A client of a bucket. Any number of threads may call it.
pub(crate) struct Client {
    bucket: Bucket,
    keys: RwLock<Arc<Keys>>,
    idle: Mutex<Vec<Connection>>,
}

impl Client {
    pub(crate) fn new(bucket: Bucket, keys: Keys) -> Self {
        Self { bucket, keys: RwLock::new(Arc::new(keys)), idle: Mutex::default() }
    }

    /// Uses other keys for later calls.
    pub(crate) fn set_keys(&self, keys: Keys) {
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
    }

    /// Sends a call and returns the answer. Blocks.
    ///
    /// # Errors
    /// Returns `Unclear` if no answer has come: the call may have been executed, or may still be.
    fn call(&self, call: &Call<'_>) -> Answer {
        let at = format!("{}:{}", self.bucket.endpoint.host, self.bucket.endpoint.port);
        let unclear = |error: io::Error| StoreError::Unclear(format!("{at}: {error}"));
        let (target, fields) = self.head(call);
        let request =
            Request { method: call.method, target: &target, fields: &fields, body: call.body };
        let deadline = SystemClock.now() + CALL_TIMEOUT;
        // A name of its own: the lock would last as long as the block.
        let idle = self.idle().pop();
        if let Some(mut connection) = idle {
            connection.set_deadline(deadline);
            // The server may have closed a connection that was idle. Every call can be repeated: the engine finds
            // out which of two puts has created an object.
            if let Ok(answer) = connection.call(&request, call.max_answer) {
                return Ok(self.keep(connection, answer));
            }
            // Others have been idle for as long.
            self.idle().clear();
        }
        let host = self.bucket.endpoint.host.trim_matches(['[', ']']);
        let mut connection =
            Connection::open(host, self.bucket.endpoint.port, deadline).map_err(unclear)?;
        let answer = connection.call(&request, call.max_answer).map_err(unclear)?;
        Ok(self.keep(connection, answer))
    }

    /// Keeps the connection for another call, if it can be used.
    fn keep(&self, connection: Connection, answer: Response) -> (u16, Vec<u8>) {
        let mut idle = self.idle();
        if answer.is_reusable && idle.len() < MAX_IDLE {
            idle.push(connection);
        }
        (answer.status, answer.body)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the target and the fields of a call, with its signature.
    fn head(&self, call: &Call<'_>) -> (String, Vec<(&'static str, String)>) {
        let keys = Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner));
        let mut path = format!("/{}", utf8_percent_encode(&self.bucket.bucket, IN_PATH));
        if let Some(key) = call.key {
            path.push('/');
            path.extend(utf8_percent_encode(key, IN_PATH));
        }
        let encode = |text| utf8_percent_encode(text, ENCODED);
        let pairs = call.query.iter();
        let pairs = pairs.map(|(key, value)| format!("{}={}", encode(key), encode(value)));
        let query = pairs.collect::<Vec<_>>().join("&");
        let (body_hash, time) = (hash(call.body), amz_date(SystemClock.wall()));
        let mut fields = vec![
            ("host", self.bucket.endpoint.authority()),
            ("x-amz-content-sha256", body_hash.clone()),
            ("x-amz-date", time.clone()),
        ];
        fields.extend(call.field.clone());
        let token = keys.token.as_ref().map(|token| (**token).clone());
        fields.extend(token.map(|token| ("x-amz-security-token", token)));
        fields.sort_unstable_by_key(|(name, _)| *name);
        let signed: Vec<(&str, &str)> =
            fields.iter().map(|(name, value)| (*name, &**value)).collect();
        let scope = Scope { region: &self.bucket.region, service: "s3", time: &time };
        let signed = Signed {
            method: call.method,
            path: &path,
            query: &query,
            fields: &signed,
            body_hash: &body_hash,
        };
        let authorization = authorization(&keys, &scope, &signed);
        fields.push(("authorization", authorization));
        fields.push(("content-length", call.body.len().to_string()));
        let target = if query.is_empty() { path } else { format!("{path}?{query}") };
        (target, fields)
    }

    /// Returns the error for an answer that is not a success.
    fn failed(&self, status: u16, body: &[u8]) -> StoreError {
        let (code, message) = xml::error(body);
        let bucket = &self.bucket.bucket;
        let refused = |why: String| StoreError::Refused(format!("{why} (HTTP {status}, {code})"));
        match (status, &*code) {
            (404, "NoSuchKey") => StoreError::NotFound,
            (404, _) => refused(format!("the bucket {bucket} does not exist")),
            (412, _) => StoreError::Exists,
            (403, "RequestTimeTooSkewed") => refused(
                "the clock of this node differs from that of the store: correct it, with NTP"
                    .into(),
            ),
            (403, "SignatureDoesNotMatch") => refused(
                "the secret key in the file of credentials_file= is not that of the access key"
                    .into(),
            ),
            (403, "InvalidAccessKeyId") => {
                refused("the store does not know the access key of credentials_file=".into())
            }
            (400 | 403, "ExpiredToken" | "InvalidToken") => {
                refused("the temporary keys of credentials_file= have expired".into())
            }
            (401 | 403, _) => {
                refused(format!("the access key may not do this in the bucket {bucket}"))
            }
            (301 | 307, _) => {
                refused(format!("the bucket {bucket} is in another region: name it with region="))
            }
            (501, _) => refused("the store does not support conditional puts".into()),
            // Another put of the same name is in progress, the store is busy, or it fails for a moment.
            (409 | 429 | 500..=599, _) => {
                StoreError::Unclear(format!("HTTP {status}, {code}: {message}"))
            }
            _ => refused(format!("unexpected answer: {message}")),
        }
    }
}

/// Returns a time as `YYYYMMDDTHHMMSSZ`.
fn amz_date(time: SystemTime) -> String {
    let text = humantime::format_rfc3339_seconds(time).to_string();
    text.replace(['-', ':'], "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client() -> Client {
        let (bucket, _) = Bucket::parse_volume(
            "//bucket/a/v",
            cleat_backend::uri::Options::parse("endpoint=http://h:80&credentials_file=/k").unwrap(),
        )
        .unwrap();
        let (id, secret) = ("ID".to_owned(), "SECRET".to_owned());
        Client::new(bucket, Keys { id, secret: secret.into(), token: Some("T".to_owned().into()) })
    }

    #[test]
    fn a_request_has_a_sorted_and_encoded_head_without_the_secret() {
        let call = Call {
            method: "GET",
            key: None,
            query: &[("list-type", "2"), ("prefix", "a/ä b")],
            field: Some(("range", "bytes=0-9".to_owned())),
            body: b"",
            max_answer: 1,
        };
        let (target, fields) = client().head(&call);
        assert_eq!(target, "/bucket?list-type=2&prefix=a%2F%C3%A4%20b");
        let value = |name| fields.iter().find(|(is, _)| *is == name).map(|(_, value)| &**value);
        assert_eq!((value("host"), value("x-amz-security-token")), (Some("h"), Some("T")));
        let names =
            "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date;x-amz-security-token,";
        assert!(value("authorization").unwrap().contains(names), "{fields:?}");
        assert!(fields.iter().all(|(_, value)| !value.contains("SECRET")));
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_369_353_600);
        assert_eq!(amz_date(time), "20130524T000000Z");
    }

    #[test]
    fn each_refusal_names_its_cause() {
        let client = client();
        let error = |code: &str| format!("<Error><Code>{code}</Code><Message>m</Message></Error>");
        for (status, code, part) in [
            (403, "RequestTimeTooSkewed", "clock of this node"),
            (403, "SignatureDoesNotMatch", "secret key"),
            (403, "InvalidAccessKeyId", "access key"),
            (403, "AccessDenied", "may not do this in the bucket bucket"),
            (400, "ExpiredToken", "have expired"),
            (404, "NoSuchBucket", "bucket bucket does not exist"),
            (301, "PermanentRedirect", "another region"),
            (501, "NotImplemented", "conditional puts"),
            (418, "Teapot", "unexpected answer: m (HTTP 418, Teapot)"),
        ] {
            match client.failed(status, error(code).as_bytes()) {
                StoreError::Refused(why) => assert!(why.contains(part), "{why}"),
                other => panic!("{status} {code}: {other:?}"),
            }
        }
        assert_eq!(client.failed(412, b""), StoreError::Exists);
        assert_eq!(client.failed(404, error("NoSuchKey").as_bytes()), StoreError::NotFound);
        for status in [409, 429, 500, 503] {
            let found = client.failed(status, b"busy");
            assert!(matches!(found, StoreError::Unclear(_)), "{found:?}");
        }
    }
}
