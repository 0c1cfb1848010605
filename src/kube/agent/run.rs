//! The tasks of the agent: they watch the grants of the node, look whether the API server is back after an outage, and
//! work on volumes.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use futures::StreamExt;
use kube::Client;
use kube::api::{Api, ListParams};
use kube::runtime::watcher::Event;
use tokio::task::JoinSet;

use super::shared::{Agent, Shared};
use super::volume::AgentVolume;
use crate::api::{call, message};
use crate::client::connect;
use crate::grant::{DRIVER_LABEL, VolumeGrant, node_label};
use crate::guard::Raw;
use crate::kind::Kind;
use crate::queue::{CONFLICT, FAILED, Next};

/// The number of volumes that are worked on at the same time.
const WORKERS: usize = 8;

/// The time between two attempts to read what the node remembers, or the kubeconfig.
const RETRY: Duration = Duration::from_secs(5);

/// The time between two attempts to release the claim of a client that is not proved to have ended. Ceph needs 30 s to
/// notice the end of a client.
const IN_USE_RETRY: Duration = Duration::from_secs(10);

/// The time between two attempts to reach an API server that does not answer.
const OUTAGE_RETRY: Duration = Duration::from_secs(2);

impl Agent {
    /// Works until the future is dropped. Everything that fails is tried again.
    pub fn run(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(self.run_always())
    }

    async fn run_always(&self) {
        let shared = &self.0;
        self.remember().await;
        let mut tasks = JoinSet::new();
        for _ in 0..WORKERS {
            let shared = Arc::clone(shared);
            tasks.spawn(async move {
                loop {
                    shared.work().await;
                }
            });
        }
        let client = shared.connect().await;
        let other = Arc::clone(shared);
        tasks.spawn(async move { other.send_heartbeats(&client).await });
        let other = Arc::clone(shared);
        tasks.spawn(async move { other.notice_end_of_outage().await });
        shared.watch().await;
    }

    /// Reads the volumes that an earlier agent may have claimed.
    async fn remember(&self) {
        let shared = &self.0;
        let handles = shared.until_read(|| shared.node.remembered()).await;
        let mut volumes = shared.volumes();
        for handle in handles {
            let name = shared.name_of(&handle);
            // A call that came before has claimed nothing yet.
            let volume = volumes.entry(name).or_insert_with(|| AgentVolume::new(&handle, true));
            volume.remembered = true;
        }
        drop(volumes);
        shared.look_at_all();
    }
}

impl Shared {
    /// Makes the client of the API server.
    async fn connect(&self) -> Client {
        let kubeconfig = self.config.kubeconfig.as_deref();
        let client = self.until_read(|| connect(kubeconfig)).await;
        // Set once: this is the only caller.
        let _ = self.grants.set(Kind::new(Api::all(client.clone()), &[]));
        client
    }

    /// Repeats `read` until it succeeds. An error is logged when it differs from the last one.
    async fn until_read<T, F: Future<Output = Result<T>>>(&self, read: impl Fn() -> F) -> T {
        let mut logged = String::new();
        loop {
            match read().await {
                Ok(value) => return value,
                Err(error) => {
                    let text = message(&error);
                    if text != logged {
                        tracing::error!("the agent for grants does not work: {text}");
                        self.failed(&Error::new(ErrorKind::Unavailable, text.clone()));
                        logged = text;
                    }
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    /// Watches the grants that name this node.
    async fn watch(&self) {
        let Some(grants) = self.grants.get() else { return };
        let Shared { config, .. } = self;
        let selector = format!("{DRIVER_LABEL}={},{}", config.driver, node_label(&config.node));
        let mut events = grants.watch(&selector);
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => self.apply(grants, event),
                Err(error) => {
                    let text = format!("cannot watch the grants of the node: {error}");
                    self.failed(&Error::new(ErrorKind::Unavailable, text));
                    tokio::time::sleep(OUTAGE_RETRY).await;
                }
            }
        }
    }

    fn apply(&self, grants: &Kind<VolumeGrant>, event: Event<Raw>) {
        // A list begins before the API server is asked.
        let is_answer = !matches!(event, Event::Init);
        let is_list = matches!(event, Event::InitDone);
        for change in grants.mirror.apply_raw(event, |_| true) {
            self.queue.add(change.name);
        }
        if is_list {
            self.look_at_all();
        }
        if is_answer {
            self.reached();
        }
    }

    /// Asks an API server that has not answered whether it is back: a watch that continues reports nothing until
    /// something changes.
    async fn notice_end_of_outage(&self) {
        let Some(grants) = self.grants.get() else { return };
        let parameters = ListParams::default().limit(1).match_any();
        loop {
            tokio::time::sleep(OUTAGE_RETRY).await;
            if self.outage().is_none() {
                continue;
            }
            let what = || "cannot list grants".to_owned();
            match call(what, grants.api.list_metadata(&parameters)).await {
                Ok(_) => self.reached(),
                Err(error) => self.failed(&error),
            }
        }
    }

    /// Works on the next volume of the queue.
    async fn work(&self) {
        let name = self.queue.next().await;
        let worked = self.work_on(&name).await;
        let next = match &worked {
            Ok(next) => {
                self.note(&name, None);
                *next
            }
            Err(error) if error.kind() == ErrorKind::Aborted => Next::Failed(CONFLICT),
            Err(error) => {
                self.note(&name, Some(error));
                match error.kind() {
                    ErrorKind::InUse => Next::After(IN_USE_RETRY),
                    _ => Next::Failed(FAILED),
                }
            }
        };
        self.changes.send_replace(());
        self.queue.done(name, next);
    }
}
