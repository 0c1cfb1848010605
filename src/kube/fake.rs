//! For unit tests: an API server that has only VolumeAttachments, a storage without volumes, and a cluster with both.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt::{Debug, Formatter};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::random::Random;
use cleat_grants::object::{
    Condition, Generation, GrantSpec, Holder, Mode, NodeEntry, Reason, Signal, Time, Truth,
};
use cleat_grants::policy::Policy;
use cleat_grants::record::{Record, Target};
use futures::stream;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame};
use hyper::{Request, Response};
use kube::client::Body;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::config::{Config, SWEEP_PERIOD};
use crate::grant::VolumeGrant;
use crate::lease::Timing;
use crate::metrics::Metrics;
use crate::objects::VolumeAttachment;
use crate::storage::{Backing, Fencing, Storage};

/// The name of the driver.
pub(crate) const DRIVER: &str = "cleat.csi.storage";

/// The paths of the requests that an API server has answered.
pub(crate) type Asked = Arc<Mutex<Vec<String>>>;

/// Returns a client of an API server that has nothing.
pub(crate) fn client() -> Client {
    Client::new(
        tower::service_fn(|_: Request<Body>| async {
            Response::builder().status(404).body(Body::empty())
        }),
        "default",
    )
}

/// Returns a client of an API server that lists nothing and whose watches show nothing and do not end, and the requests
/// that it gets. It never answers those whose path contains `held`, unless that is empty.
pub(crate) fn silent(held: &'static str) -> (Client, Asked) {
    let asked = Asked::default();
    let requests = Arc::clone(&asked);
    let service = tower::service_fn(move |request: Request<Body>| {
        let path = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
        let list = json!({ "metadata": { "resourceVersion": "7" }, "items": [] }).to_string();
        let body = if path.contains("watch=true") {
            StreamBody::new(stream::pending::<std::result::Result<Frame<Bytes>, Infallible>>())
                .boxed_unsync()
        } else {
            Full::from(list).boxed_unsync()
        };
        let is_held = !held.is_empty() && path.contains(held);
        requests.lock().unwrap_or_else(PoisonError::into_inner).push(path);
        async move {
            if is_held {
                std::future::pending::<()>().await;
            }
            Ok::<_, Infallible>(Response::new(body))
        }
    });
    (Client::new(service, "default"), asked)
}

/// Returns a cluster whose API server has these attachments and whose mirrors are empty, and what it is asked for.
pub(crate) fn cluster(attachments: Vec<VolumeAttachment>) -> (Cluster, Asked) {
    let asked = Asked::default();
    let requests = Arc::clone(&asked);
    let cluster = cluster_of(move |_, path| {
        requests.lock().unwrap_or_else(PoisonError::into_inner).push(path.to_owned());
        answer(&attachments, path)
    });
    (cluster, asked)
}

/// Returns a cluster whose mirrors are empty. `answer` gets the method and the path of a request, and returns the HTTP
/// status and the body of the answer.
pub(crate) fn cluster_of(
    answer: impl Fn(&str, &str) -> (u16, Value) + Clone + Send + 'static,
) -> Cluster {
    cluster_with(answer, Arc::new(NoVolumes))
}

/// As [`cluster_of`], with a storage.
pub(crate) fn cluster_with(
    answer: impl Fn(&str, &str) -> (u16, Value) + Clone + Send + 'static,
    storage: Arc<dyn Storage>,
) -> Cluster {
    let service = tower::service_fn(move |request: Request<Body>| {
        let path = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
        let (code, body) = answer(request.method().as_str(), &path);
        let body = Body::from(body.to_string().into_bytes());
        async move { Response::builder().status(code).body(body) }
    });
    cluster_at(&Client::new(service, "default"), storage)
}

/// Returns a cluster with an API server, whose mirrors are empty.
pub(crate) fn cluster_at(client: &Client, storage: Arc<dyn Storage>) -> Cluster {
    let config = Config {
        kubeconfig: None,
        driver: DRIVER.to_owned(),
        namespace: None,
        identity: "test".to_owned(),
        listen: None,
        workers: 1,
        policy: Policy::default(),
        calls: None,
        attach_detach: false,
        remediation: None,
        sweep_period: SWEEP_PERIOD,
        election: Timing::default(),
        after_step: |_| (),
    };
    let (metrics, random) = (Arc::new(Metrics::default()), Random::seeded(1));
    Cluster::new(client, &config, storage, metrics, random)
}

/// Answers a list with a selector of one label, or a read of one object.
fn answer(attachments: &[VolumeAttachment], path: &str) -> (u16, Value) {
    if let Some((_, selector)) = path.split_once("labelSelector=") {
        let selector = selector.split('&').next().unwrap_or_default();
        let selector = selector.replace("%2F", "/").replace("%3D", "=");
        let is_selected = |known: &&VolumeAttachment| {
            known.labels().iter().any(|(key, value)| format!("{key}={value}") == selector)
        };
        let items: Vec<_> = attachments.iter().filter(is_selected).collect();
        return (200, json!({ "metadata": {}, "items": items }));
    }
    let name = path.rsplit('/').next().unwrap_or_default().trim_end_matches('?');
    match attachments.iter().find(|known| known.name_any() == name) {
        Some(known) => (200, json!(known)),
        None => not_found(),
    }
}

/// The answer about an object that does not exist.
pub(crate) fn not_found() -> (u16, Value) {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "not found", "reason": "NotFound", "code": 404,
    });
    (404, status)
}

/// A storage that has none of the volumes that it can fence.
#[derive(Debug)]
struct NoVolumes;

impl NoVolumes {
    fn missing<T>() -> Result<T> {
        Err(Error::new(ErrorKind::NotFound, "the volume does not exist"))
    }
}

impl Storage for NoVolumes {
    fn find(&self, handle: &str) -> Result<Backing> {
        if let Some(node_id) = handle.strip_prefix("local/") {
            return Ok(Backing::Local { node_id: node_id.to_owned() });
        }
        Ok(Backing::Granted(Arc::new(Self)))
    }

    fn places(&self) -> Result<BTreeSet<String>> {
        Ok(BTreeSet::new())
    }

    fn volumes_in(&self, _: &str, _: Instant) -> Result<Vec<String>> {
        Ok(Vec::new())
    }
}

impl Fencing for NoVolumes {
    fn record(&self, _: Instant) -> Result<Record> {
        Self::missing()
    }

    fn fence(&self, _: &Target, _: Instant) -> Result<()> {
        Self::missing()
    }

    fn unfence(&self, _: &str, _: Instant) -> Result<()> {
        Self::missing()
    }

    fn release(&self, _: &str, _: &str, _: Instant) -> Result<()> {
        Self::missing()
    }
}

/// Returns a grant whose node `a` has to release the volume since long, at a version of the object.
pub(crate) fn revoked(handle: &str, version: u64, has_released: bool) -> VolumeGrant {
    let generation = Generation(1);
    let holder = Holder {
        node: "a".to_owned(),
        generation,
        mode: Mode::ReadWrite,
        revoked: true,
        since: Time(0),
        pod_uids: Vec::new(),
    };
    let mut grant =
        VolumeGrant::new(DRIVER, handle, GrantSpec { generation, holders: vec![holder] });
    grant.metadata.resource_version = Some(version.to_string());
    let mut entry = NodeEntry { node: "a".to_owned(), generation, ..NodeEntry::default() };
    entry.set(Condition {
        kind: Signal::SafeToDetach,
        status: if has_released { Truth::True } else { Truth::False },
        reason: if has_released { Reason::Released } else { Reason::Mapped },
        message: String::new(),
        generation,
        last_transition_time: Time(0),
    });
    grant.status.grant.nodes.push(entry);
    grant
}

/// A storage whose volumes have all one record. The calls are counted.
#[derive(Clone, Default)]
pub(crate) struct OneRecord {
    pub(crate) record: Arc<Mutex<Record>>,
    pub(crate) reads: Arc<AtomicUsize>,
    pub(crate) fences: Arc<AtomicUsize>,
    /// Called when the record is read.
    pub(crate) on_read: Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>,
}

impl Debug for OneRecord {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OneRecord").finish_non_exhaustive()
    }
}

impl Storage for OneRecord {
    fn find(&self, _: &str) -> Result<Backing> {
        Ok(Backing::Granted(Arc::new(self.clone())))
    }

    fn places(&self) -> Result<BTreeSet<String>> {
        Ok(BTreeSet::new())
    }

    fn volumes_in(&self, _: &str, _: Instant) -> Result<Vec<String>> {
        Ok(Vec::new())
    }
}

impl Fencing for OneRecord {
    fn record(&self, _: Instant) -> Result<Record> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.on_read.get().iter().for_each(|called| called());
        Ok(record)
    }

    fn fence(&self, _: &Target, _: Instant) -> Result<()> {
        self.fences.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn unfence(&self, _: &str, _: Instant) -> Result<()> {
        Ok(())
    }

    fn release(&self, _: &str, _: &str, _: Instant) -> Result<()> {
        Ok(())
    }
}
