//! The store of a volume in a bucket, and the management of volumes there.

use std::ops::Range;
use std::sync::Arc;

use cleat_backend::CredentialSet;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::store::pool::Pool;
use cleat_object::store::{Pending, Store, StoreError};

use super::{Bucket, Call, Client, Keys, xml};
use crate::connection::Connection;
use crate::executor::block_until;
use crate::naming::is_name;
use crate::timeouts::{CALL_TIMEOUT, after};

/// The threads of a client, and so the calls that it has in flight.
const THREADS: usize = 16;

/// The names that one call lists.
const LISTED: &str = "1000";

/// The maximum length of the answer to a call that has no data, in bytes: 1000 names of 1024 bytes with three
/// characters for each.
const MAX_ANSWER: usize = 8 << 20;

/// The maximum length of an object, in bytes.
const MAX_OBJECT: u64 = 32 << 20;

/// The maximum number of volumes below a prefix.
const MAX_VOLUMES: usize = 100_000;

/// The calls of the management that are repeated.
const MAX_ATTEMPTS: u32 = 5;

/// A bucket with volumes.
pub(crate) struct S3Home {
    client: Arc<Client>,
    pool: Arc<Pool>,
}

/// The objects of one volume.
struct S3Store {
    client: Arc<Client>,
    pool: Arc<Pool>,
    /// Begins the keys.
    prefix: Arc<str>,
}

impl S3Home {
    /// Makes a client. Starts its threads, and sends nothing.
    ///
    /// # Errors
    /// Returns the error of malformed credentials.
    pub(crate) fn connect(bucket: &Bucket, credentials: &CredentialSet) -> Result<Self> {
        let keys = keys(bucket, credentials)?;
        let pool = Pool::start("s3", THREADS)
            .map_err(|error| Error::from_io("cannot start the threads of the S3 client", error))?;
        let client = Arc::new(Client::new(bucket.clone(), keys));
        Ok(Self { client, pool: Arc::new(pool) })
    }

    fn prefix(&self, name: &str) -> String {
        format!("{}{name}/", self.client.bucket.prefix)
    }

    /// Repeats a call while its result is not clear.
    fn repeat<T>(&self, mut call: impl FnMut() -> Result<T, StoreError>) -> Result<T> {
        let mut attempt = 1;
        loop {
            match call() {
                Err(StoreError::Unclear(_)) if attempt < MAX_ATTEMPTS => {
                    block_until(after(CALL_TIMEOUT), self.pool.back_off(attempt));
                    attempt += 1;
                }
                other => return other.map_err(|error| self.failed(error)),
            }
        }
    }

    fn failed(&self, error: StoreError) -> Error {
        let kind = match &error {
            StoreError::Refused(_) => ErrorKind::PermissionDenied,
            _ => ErrorKind::Unavailable,
        };
        let shown = format!("s3://{}/{}", self.client.bucket.bucket, self.client.bucket.prefix);
        Error::new(kind, format!("cannot access {shown}")).with_source(error)
    }

    /// Returns all keys of a volume.
    fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let mut keys: Vec<String> = Vec::new();
        loop {
            let after = keys.last().cloned().unwrap_or_default();
            let part = self.repeat(|| list(&self.client, prefix, &after))?.keys;
            if part.is_empty() {
                return Ok(keys);
            }
            keys.extend(part);
        }
    }
}

impl Connection for S3Home {
    fn store(&self, name: &str) -> Result<Arc<dyn Store>> {
        let (client, pool) = (Arc::clone(&self.client), Arc::clone(&self.pool));
        Ok(Arc::new(S3Store { client, pool, prefix: self.prefix(name).into() }))
    }

    /// A prefix need not exist.
    fn prepare(&self, _name: &str) -> Result<()> {
        Ok(())
    }

    /// The order of names is not that of their keys, which end with a slash, so all are listed.
    fn names(&self, after: Option<&str>, limit: usize) -> Result<(Vec<String>, bool)> {
        let prefix = &self.client.bucket.prefix;
        let (mut names, mut next) = (Vec::new(), None);
        loop {
            let part = self.repeat(|| list_prefixes(&self.client, prefix, next.as_deref()))?;
            let found = part.prefixes.iter().filter_map(|found| {
                let name = found.strip_prefix(&**prefix)?.strip_suffix('/')?;
                (is_name(name) && after.is_none_or(|after| name > after)).then(|| name.to_owned())
            });
            names.extend(found);
            if names.len() > MAX_VOLUMES {
                let message = format!("there are more than {MAX_VOLUMES} names below {prefix:?}");
                return Err(Error::new(ErrorKind::InvalidArgument, message));
            }
            next = part.next;
            if next.is_none() {
                break;
            }
        }
        names.sort_unstable();
        let mut volumes = Vec::new();
        for name in names {
            let key = format!("{}desc", self.prefix(&name));
            let found = self.repeat(|| match read(&self.client, &key, 0..8) {
                Err(StoreError::NotFound) => Ok(false),
                other => other.map(|_| true),
            })?;
            if found && volumes.len() == limit {
                return Ok((volumes, true));
            }
            volumes.extend(found.then_some(name));
        }
        Ok((volumes, false))
    }

    /// Deletes the description last, and the claims before it in their order, so that a removal that was interrupted
    /// is continued by another one, and no client takes the rest for a volume that was never claimed.
    fn remove(&self, name: &str, go_on: &mut dyn FnMut(u64) -> bool) -> Result<()> {
        let prefix = self.prefix(name);
        let [claims, description] = [format!("{prefix}epoch/"), format!("{prefix}desc")];
        let keys = self.keys(&prefix)?.into_iter().filter(|key| *key != description);
        let (last, mut order): (Vec<_>, Vec<_>) = keys.partition(|key| key.starts_with(&claims));
        order.extend(last);
        order.push(description);
        for (key, done) in order.iter().zip(0..) {
            if !go_on(done) {
                let message =
                    format!("the removal of {prefix} was stopped: {done} objects are removed");
                return Err(Error::new(ErrorKind::Aborted, message)
                    .with_repair("repeat the command, which continues"));
            }
            self.repeat(|| delete(&self.client, key))?;
        }
        Ok(())
    }

    fn tidy(&self, _name: &str) {}

    fn available_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    fn renew(&self, credentials: &CredentialSet) -> Result<()> {
        self.client.set_keys(keys(&self.client.bucket, credentials)?);
        Ok(())
    }
}

fn keys(bucket: &Bucket, credentials: &CredentialSet) -> Result<Keys> {
    Keys::parse(credentials.get(&bucket.credential_file().path)?.bytes())
}

impl S3Store {
    /// Runs a call for the object `name` on a thread of the client.
    fn run<'a, T: Send + 'static>(
        &self,
        name: &str,
        call: impl FnOnce(&Client, &str) -> Result<T, StoreError> + Send + 'static,
    ) -> Pending<'a, Result<T, StoreError>> {
        let (client, key) = (Arc::clone(&self.client), format!("{}{name}", self.prefix));
        self.pool.run(move || call(&client, &key))
    }
}

impl Store for S3Store {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        let bytes = bytes.to_owned();
        self.run(name, move |client, key| create(client, key, &bytes))
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        self.run(name, move |client, key| read(client, key, range))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        let begins = Arc::clone(&self.prefix);
        let after = if after.is_empty() { String::new() } else { format!("{begins}{after}") };
        self.run(prefix, move |client, key| {
            let keys = list(client, key, &after)?.keys;
            let name = |key: String| key.strip_prefix(&*begins).map(str::to_owned);
            Ok(keys.into_iter().filter_map(name).collect())
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        self.run(name, delete)
    }

    fn back_off(&self, attempt: u32) -> Pending<'_, ()> {
        self.pool.back_off(attempt)
    }
}

fn create(client: &Client, key: &str, body: &[u8]) -> Result<(), StoreError> {
    let field = Some(("if-none-match", "*".to_owned()));
    let (method, key, max_answer) = ("PUT", Some(key), MAX_ANSWER);
    match client.call(&Call { method, key, query: &[], field, body, max_answer })? {
        (200, _) => Ok(()),
        (status, body) => Err(client.failed(status, &body)),
    }
}

fn read(client: &Client, key: &str, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
    let length = range.end.saturating_sub(range.start);
    if length == 0 || length > MAX_OBJECT {
        let message = format!("internal: a read of {length} bytes");
        return if length == 0 { Ok(Vec::new()) } else { Err(StoreError::Refused(message)) };
    }
    let field = Some(("range", format!("bytes={}-{}", range.start, range.end - 1)));
    // A server that ignores the range sends the whole object.
    let max_answer = usize::try_from(MAX_OBJECT).unwrap_or(usize::MAX);
    let call = Call { method: "GET", key: Some(key), query: &[], field, body: &[], max_answer };
    let at = |position: u64| usize::try_from(position).unwrap_or(usize::MAX);
    match client.call(&call)? {
        (206, mut body) => {
            body.truncate(at(length));
            Ok(body)
        }
        (200, body) => {
            let [begin, end] =
                [range.start, range.end].map(|position| at(position).min(body.len()));
            Ok(body[begin..end].to_vec())
        }
        // The object ends before the range.
        (416, _) => Ok(Vec::new()),
        (status, body) => Err(client.failed(status, &body)),
    }
}

fn delete(client: &Client, key: &str) -> Result<(), StoreError> {
    let (method, key, max_answer) = ("DELETE", Some(key), MAX_ANSWER);
    match client.call(&Call { method, key, query: &[], field: None, body: &[], max_answer })? {
        (200 | 204, _) => Ok(()),
        (status, body) => match client.failed(status, &body) {
            StoreError::NotFound => Ok(()),
            error => Err(error),
        },
    }
}

/// Lists keys that begin with `prefix` and follow `after`.
fn list(client: &Client, prefix: &str, after: &str) -> Result<xml::List, StoreError> {
    let all = [
        ("encoding-type", "url"),
        ("list-type", "2"),
        ("max-keys", LISTED),
        ("prefix", prefix),
        ("start-after", after),
    ];
    listed(client, if after.is_empty() { &all[..4] } else { &all })
}

/// Lists what keys that begin with `prefix` have up to the next slash.
fn list_prefixes(
    client: &Client,
    prefix: &str,
    token: Option<&str>,
) -> Result<xml::List, StoreError> {
    let mut query = vec![("delimiter", "/"), ("encoding-type", "url"), ("list-type", "2")];
    query.extend([("max-keys", LISTED), ("prefix", prefix)]);
    if let Some(token) = token {
        query.insert(0, ("continuation-token", token));
    }
    listed(client, &query)
}

fn listed(client: &Client, query: &[(&str, &str)]) -> Result<xml::List, StoreError> {
    let (method, max_answer) = ("GET", MAX_ANSWER);
    match client.call(&Call { method, key: None, query, field: None, body: &[], max_answer })? {
        (200, body) => xml::list(&body)
            .ok_or_else(|| StoreError::Unclear("the list of the store is malformed".into())),
        (status, body) => Err(client.failed(status, &body)),
    }
}
