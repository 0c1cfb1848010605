//! The store of a volume in a bucket, and the management of volumes there.

use std::future::ready;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use futures::stream::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;

use cleat_backend::CredentialSet;
use cleat_backend::connector::Connector;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::name::Name;
use cleat_object::store::pool::BackOff;
use cleat_object::store::{Pending, Store, StoreError};

use super::bucket::Bucket;
use super::client::{Client, client};
use super::credentials::credential_file;
use super::hedge::{Budget, hedged};
use super::rejection::{classify, is_behind_the_end};
use crate::cache::hash_of;
use crate::connection::Connection;
use crate::executor::block_until;
use crate::naming::{is_object, is_volume_name};
use crate::timeouts::{CALL_TIMEOUT, after};

/// The reads that a client has in flight.
const READS: usize = 16;

/// The other calls that a client has in flight: the pages of a checkpoint, the log objects, and some more. They never
/// take the place of a read, or the pages that of a log object.
const CHANGES: usize = 24;

/// The timeout of a read, without its transfer.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The slowest transfer of a read that is waited for, in bytes per second.
const SLOWEST: u64 = 1 << 20;

/// The threads of a client. They send, receive, and encrypt.
const THREADS: usize = 2;

/// The names that one call lists.
const LISTED: usize = 1000;

/// The maximum length of an object, in bytes.
const MAX_OBJECT: u64 = 32 << 20;

/// The maximum number of volumes below a prefix.
const MAX_VOLUMES: usize = 100_000;

/// The interval in which a command looks whether its keys have changed.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(20);

/// The calls of the management that are repeated.
const MAX_ATTEMPTS: u32 = 5;

/// A bucket with volumes.
pub(crate) struct RemoteHome(Arc<Caller>);

/// The objects of one volume.
struct RemoteStore {
    caller: Arc<Caller>,
    /// Begins the keys.
    prefix: String,
}

/// A client of a bucket, with the threads that it runs on.
struct Caller {
    bucket: Arc<Bucket>,
    client: RwLock<Client>,
    /// Makes the connections, if this process is confined.
    connector: Option<Arc<Connector>>,
    reads: Arc<Semaphore>,
    changes: Arc<Semaphore>,
    hedges: Arc<Budget>,
    back_off: BackOff,
    /// `None` while it is dropped.
    runtime: Option<Runtime>,
}

impl Caller {
    /// Runs a call that is not a read on a thread of the client. It runs also if the result is dropped.
    fn run<'a, T: Send + 'static, F>(
        &self,
        call: impl FnOnce(Arc<dyn ObjectStore>) -> F,
    ) -> Pending<'a, Result<T, StoreError>>
    where
        F: Future<Output = object_store::Result<T>> + Send + 'static,
    {
        self.run_within(CALL_TIMEOUT, &self.changes, call)
    }

    /// Runs a call as soon as one of `slots` is free, and then until the timeout.
    fn run_within<'a, T: Send + 'static, F>(
        &self,
        timeout: Duration,
        slots: &Arc<Semaphore>,
        call: impl FnOnce(Arc<dyn ObjectStore>) -> F,
    ) -> Pending<'a, Result<T, StoreError>>
    where
        F: Future<Output = object_store::Result<T>> + Send + 'static,
    {
        let current = self.client.read().unwrap_or_else(PoisonError::into_inner).clone();
        let Client { store: client, origin } = current;
        let (bucket, slots) = (Arc::clone(&self.bucket), Arc::clone(slots));
        let call = call(client);
        let Some(runtime) = &self.runtime else { return Box::pin(async { Err(ended()) }) };
        let running = runtime.spawn(async move {
            // The semaphore is never closed.
            let _slot = slots.acquire().await;
            match tokio::time::timeout(timeout, call).await {
                Ok(result) => result.map_err(|error| classify(&error, &bucket, origin)),
                Err(_) => {
                    let (at, seconds) = (bucket.address().shown(), timeout.as_secs());
                    Err(StoreError::Unclear(format!("{at} did not answer in {seconds} s")))
                }
            }
        });
        Box::pin(async { running.await.unwrap_or_else(|_| Err(ended())) })
    }

    fn wait(&self, attempt: u32) -> Pending<'static, ()> {
        let time = self.back_off.next(attempt);
        let Some(runtime) = &self.runtime else { return Box::pin(async {}) };
        // A sleep is made on the runtime. An error means that the runtime ends.
        let waiting = runtime.spawn(async move { tokio::time::sleep(time).await });
        Box::pin(async { drop(waiting.await) })
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        // A plain drop would wait for calls, and must not happen on a thread of another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn ended() -> StoreError {
    StoreError::Unclear("the client of the store has ended".into())
}

impl RemoteHome {
    /// Makes a client. Starts its threads, and sends nothing.
    ///
    /// # Errors
    /// Returns the error of malformed credentials.
    pub(crate) fn connect(
        bucket: &Bucket,
        credentials: &CredentialSet,
        connector: Option<Arc<Connector>>,
    ) -> Result<Self> {
        let client = client(bucket, credentials, connector.clone())?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("store")
            .enable_all()
            .build()
            .map_err(|error| Error::from_io("cannot start the threads of the client", error))?;
        Ok(Self(Arc::new(Caller {
            bucket: Arc::new(bucket.clone()),
            client: RwLock::new(client),
            connector,
            reads: Arc::new(Semaphore::new(READS)),
            changes: Arc::new(Semaphore::new(CHANGES)),
            hedges: Arc::default(),
            back_off: BackOff::default(),
            runtime: Some(runtime),
        })))
    }

    fn prefix(&self, name: &str) -> String {
        format!("{}{name}/", self.0.bucket.prefix)
    }

    /// Repeats a call while its result is not clear. Blocks.
    fn repeat<'a, T>(
        &self,
        mut call: impl FnMut() -> Pending<'a, Result<T, StoreError>>,
    ) -> Result<T> {
        let mut attempt = 1;
        loop {
            let late = || Err(StoreError::Unclear("the store does not answer".into()));
            match block_until(after(2 * CALL_TIMEOUT), call()).unwrap_or_else(late) {
                Err(StoreError::Unclear(_)) if attempt < MAX_ATTEMPTS => {
                    block_until(after(CALL_TIMEOUT), self.0.wait(attempt));
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
        let shown = self.0.bucket.shown("");
        Error::new(kind, format!("cannot access {shown}")).with_source(error)
    }

    fn objects(&self, name: &str) -> RemoteStore {
        RemoteStore { caller: Arc::clone(&self.0), prefix: self.prefix(name) }
    }

    /// Returns the names of all objects of a volume. Other objects below its prefix, as those of another volume, are not
    /// its own. Each call lists a part, because a call has a timeout.
    fn names_of(&self, objects: &RemoteStore) -> Result<Vec<String>> {
        let (mut own, mut after) = (Vec::new(), String::new());
        loop {
            let names = self.repeat(|| objects.list("", &after))?;
            let Some(last) = names.last() else { return Ok(own) };
            after.clone_from(last);
            own.extend(names.into_iter().filter(|name| is_object(name)));
        }
    }
}

impl Connection for RemoteHome {
    fn store(&self, name: &str) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(self.objects(name)))
    }

    /// A prefix need not exist.
    fn prepare(&self, _name: &str) -> Result<()> {
        Ok(())
    }

    /// The order of names is not that of their keys, which end with a slash, so all are listed.
    fn names(&self, after: Option<&str>, limit: usize) -> Result<(Vec<String>, bool)> {
        let prefix = &self.0.bucket.prefix;
        let found: Vec<String> = self.repeat(|| {
            let prefix = prefix.clone();
            self.0.run(|client| async move {
                let prefix = Some(Path::parse(&prefix)?).filter(|path| !path.as_ref().is_empty());
                let found = client.list_with_delimiter(prefix.as_ref()).await?.common_prefixes;
                Ok(found.into_iter().map(String::from).collect())
            })
        })?;
        let names = found.iter().filter_map(|found| {
            let name = found.strip_prefix(&**prefix)?;
            (is_volume_name(name) && after.is_none_or(|after| name > after))
                .then(|| name.to_owned())
        });
        let mut names: Vec<String> = names.collect();
        if names.len() > MAX_VOLUMES {
            let message = format!("there are more than {MAX_VOLUMES} names below {prefix:?}");
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        names.sort_unstable();
        let mut volumes = Vec::new();
        for name in names {
            let key = format!("{}desc", self.prefix(&name));
            let found = self.repeat(|| {
                let reading = self.0.read(key.clone(), 0..8);
                Box::pin(async {
                    match reading.await {
                        Err(StoreError::NotFound) => Ok(false),
                        other => other.map(|_| true),
                    }
                })
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
        let (objects, description) = (self.objects(name), Name::Description.to_string());
        let names = self.names_of(&objects)?.into_iter().filter(|name| *name != description);
        let (last, mut order): (Vec<_>, Vec<_>) =
            names.partition(|name| name.starts_with("epoch/"));
        order.extend(last);
        order.push(description);
        for (object, done) in order.iter().zip(0..) {
            if !go_on(done) {
                let shown = self.0.bucket.shown(name);
                let message =
                    format!("the removal of {shown} was stopped: {done} objects are removed");
                return Err(Error::new(ErrorKind::Aborted, message)
                    .with_repair("repeat the command, which continues"));
            }
            self.repeat(|| objects.delete(object))?;
        }
        Ok(())
    }

    fn tidy(&self, _name: &str) {}

    fn available_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    fn renew(&self, credentials: &CredentialSet) -> Result<()> {
        self.0.renew(credentials)
    }

    fn follow(&self) {
        self.0.follow(FOLLOW_INTERVAL);
    }
}

impl Caller {
    fn read(
        &self,
        key: String,
        range: Range<u64>,
    ) -> Pending<'static, Result<Vec<u8>, StoreError>> {
        let length = range.end.saturating_sub(range.start);
        if length > MAX_OBJECT {
            let message = format!("internal: a read of {length} bytes");
            return Box::pin(async { Err(StoreError::Refused(message)) });
        }
        if length == 0 {
            return Box::pin(async { Ok(Vec::new()) });
        }
        let timeout = READ_TIMEOUT + Duration::from_secs(length / SLOWEST);
        let (hedge, budget) = (self.bucket.hedge, Arc::clone(&self.hedges));
        self.run_within(timeout, &self.reads, move |client| async move {
            let key = Path::parse(&key)?;
            let read = || get(&*client, &key, range.clone());
            match hedge {
                Some(delay) => {
                    budget.count();
                    hedged(tokio::time::sleep(delay), || budget.take(), read).await
                }
                None => read().await,
            }
        })
    }

    fn renew(&self, credentials: &CredentialSet) -> Result<()> {
        let renewed = client(&self.bucket, credentials, self.connector.clone())?;
        *self.client.write().unwrap_or_else(PoisonError::into_inner) = renewed;
        Ok(())
    }

    /// Uses keys that have changed, until the client is dropped.
    fn follow(self: &Arc<Self>, interval: Duration) {
        let Some(runtime) = &self.runtime else { return };
        let (caller, file) = (Arc::downgrade(self), credential_file(&self.bucket));
        runtime.spawn(async move {
            let mut known = None;
            loop {
                tokio::time::sleep(interval).await;
                let named = file.clone();
                let reading = tokio::task::spawn_blocking(move || {
                    let (opened, version) = named.open_with_version()?;
                    let secret = named.read(&opened)?;
                    Ok::<_, Error>((CredentialSet::with(named.path, secret), version))
                });
                // An error means that the runtime ends.
                let Ok(found) = reading.await else { return };
                let Some(caller) = caller.upgrade() else { return };
                let renewed = found.and_then(|(credentials, version)| {
                    if known == Some(version) {
                        Ok(version)
                    } else {
                        caller.renew(&credentials).map(|()| version)
                    }
                });
                match renewed {
                    Ok(version) => known = Some(version),
                    Err(error) => {
                        tracing::warn!("the present keys stay in use: {}", error.report());
                    }
                }
            }
        });
    }

    /// Succeeds if there is no such object.
    fn delete(&self, key: String) -> Pending<'static, Result<(), StoreError>> {
        let deleted = self.run(|client| async move { client.delete(&Path::parse(&key)?).await });
        Box::pin(async {
            match deleted.await {
                Err(StoreError::NotFound) => Ok(()),
                other => other,
            }
        })
    }
}

async fn get(
    client: &dyn ObjectStore,
    key: &Path,
    range: Range<u64>,
) -> object_store::Result<Vec<u8>> {
    let options = GetOptions { range: Some(GetRange::Bounded(range)), ..GetOptions::default() };
    match client.get_opts(key, options).await {
        Ok(found) => Ok(found.bytes().await?.into()),
        Err(error) if is_behind_the_end(&error) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

impl Store for RemoteStore {
    fn place(&self) -> u64 {
        hash_of(self.prefix.bytes())
    }

    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        let (key, payload) = (self.key(name), PutPayload::from(bytes.to_owned()));
        self.caller.run(|client| async move {
            let options = PutMode::Create.into();
            client.put_opts(&Path::parse(&key)?, payload, options).await.map(|_| ())
        })
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        self.caller.read(self.key(name), range)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        let begins = self.prefix.clone();
        let offset = (!after.is_empty()).then(|| self.key(after));
        let prefix = self.key(prefix);
        self.caller.run(|client| async move {
            let prefix = Path::parse(&prefix)?;
            let found = match &offset {
                Some(offset) => client.list_with_offset(Some(&prefix), &Path::parse(offset)?),
                None => client.list(Some(&prefix)),
            };
            // A store that ignores the offset, as Azurite does, lists the same names again.
            let is_behind = |key: &String| offset.as_ref().is_none_or(|offset| key > offset);
            let keys = found.map_ok(|object| String::from(object.location));
            let keys = keys.try_filter(|key| ready(is_behind(key))).take(LISTED);
            let keys: Vec<String> = keys.try_collect().await?;
            let name = |key: String| key.strip_prefix(&*begins).map(str::to_owned);
            Ok(keys.into_iter().filter_map(name).collect())
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        self.caller.delete(self.key(name))
    }

    fn back_off(&self, attempt: u32) -> Pending<'_, ()> {
        self.caller.wait(attempt)
    }
}

impl RemoteStore {
    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

#[cfg(test)]
mod tests;
