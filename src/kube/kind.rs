//! All objects of one kind: a mirror of them, and writes that are conditional on the version from which they were
//! decided.

use std::fmt::Debug;
use std::sync::Arc;

use cleat_core::error::{Error, ErrorKind, Result};
use futures::StreamExt;
use futures::stream::BoxStream;
use kube::api::{Api, ApiResource, ListParams, ObjectMeta, Patch, PatchParams};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::api::{self, call};
use crate::guard::Raw;
use crate::mirror::{Index, Mirror};

/// The time after which the API server ends a watch, in seconds. A watch that has shown nothing for 5 s longer is given up:
/// its connection may be dead, which nothing else shows while no object changes. The next watch continues at the version
/// that the last one has reached, without a list.
const WATCH_TIMEOUT_S: u32 = 30;

/// All objects of one kind, and the API to change them.
#[derive(Debug)]
pub(crate) struct Kind<K: 'static> {
    pub(crate) api: Api<K>,
    pub(crate) mirror: Mirror<K>,
}

impl<K> Kind<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize + 'static,
{
    pub(crate) fn new(api: Api<K>, indexes: &'static [Index<K>]) -> Self {
        Self { api, mirror: Mirror::new(name_of, indexes) }
    }

    /// Watches the objects that the labels `selector` select; all of them, if it is empty. An object that cannot be read
    /// hides no other one.
    pub(crate) fn watch(&self, selector: &str) -> RawEvents {
        watch(self.raw(), selector)
    }

    /// As [`Kind::new`], for objects in namespaces: their names in the mirror are NAMESPACE/NAME.
    pub(crate) fn of_namespaces(api: Api<K>, indexes: &'static [Index<K>]) -> Self {
        Self { api, mirror: Mirror::new(full_name_of, indexes) }
    }

    fn raw(&self) -> Api<Raw> {
        let (client, kind) = (self.api.clone().into_client(), ApiResource::erase::<K>(&()));
        match self.api.namespace() {
            Some(namespace) => Api::namespaced_with(client, namespace, &kind),
            None => Api::all_with(client, &kind),
        }
    }

    /// Checks that an object can be read, or does not exist.
    ///
    /// # Errors
    /// Returns `Internal` if the watch has shown an object that cannot be read.
    pub(crate) fn check(&self, name: &str) -> Result<()> {
        let unreadable = self.mirror.unreadable(name);
        unreadable.map_or(Ok(()), |object| Err(object.error(&K::kind(&()))))
    }

    /// Changes an object by a merge patch, if it is still as in `known`. `what` says what cannot be done if it
    /// fails.
    ///
    /// # Errors
    /// Returns `Aborted` if the object has changed, or does not exist any more. The mirror then has its new state.
    pub(crate) async fn patch(&self, known: &K, body: Value, what: &str) -> Result<Arc<K>> {
        let name = known.name_any();
        let body = on_version(known, body);
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(body));
        let request = self.api.patch(&name, &parameters, &patch);
        self.written(&name, call(|| format!("{what} {name}"), request).await).await
    }

    /// As [`Kind::patch`], for the status.
    pub(crate) async fn patch_status(&self, known: &K, body: Value, what: &str) -> Result<Arc<K>> {
        let name = known.name_any();
        let body = on_version(known, body);
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(body));
        let request = self.api.patch_status(&name, &parameters, &patch);
        self.written(&name, call(|| format!("{what} {name}"), request).await).await
    }

    /// Takes the answer to a write into the mirror. After a conflict, reads the object.
    pub(crate) async fn written(&self, name: &str, answer: Result<K>) -> Result<Arc<K>> {
        match answer {
            Ok(object) => Ok(self.mirror.put(object)),
            Err(error) if api::is_conflict(&error) => {
                self.refresh(name).await?;
                Err(Error::new(ErrorKind::Aborted, error.report()))
            }
            Err(error) => Err(error),
        }
    }

    /// Reads the present state of the objects that `selected` selects.
    pub(crate) async fn refresh_all(&self, selected: &ListParams) -> Result<Vec<Arc<K>>> {
        let what = || format!("cannot list {}", K::plural(&()));
        let listed = call(what, self.api.list(selected)).await?;
        Ok(listed.items.into_iter().map(|object| self.mirror.put(object)).collect())
    }

    /// Reads the present state of an object.
    pub(crate) async fn refresh(&self, name: &str) -> Result<Option<Arc<K>>> {
        let what = || format!("cannot read {} {name}", K::kind(&()));
        match call(what, self.api.get_opt(name)).await? {
            Some(object) => Ok(Some(self.mirror.put(object))),
            None => {
                self.mirror.remove(name);
                Ok(None)
            }
        }
    }
}

/// The events of a watch.
pub(crate) type RawEvents = BoxStream<'static, watcher::Result<Event<Raw>>>;

fn watch(api: Api<Raw>, selector: &str) -> RawEvents {
    let settings = watcher::Config::default().timeout(WATCH_TIMEOUT_S);
    let is_limited = !selector.is_empty();
    let settings = if is_limited { settings.labels(selector) } else { settings };
    watcher(api, settings).boxed()
}

/// Makes a patch conditional on the resourceVersion of `known`.
fn on_version<K: ResourceExt>(known: &K, mut body: Value) -> Value {
    body["metadata"]["resourceVersion"] = json!(known.resource_version());
    body
}

/// Returns NAMESPACE/NAME of an object.
pub(crate) fn full_name<K: Resource>(object: &K) -> String {
    full_name_of(object.meta())
}

pub(crate) fn full_name_of(metadata: &ObjectMeta) -> String {
    let namespace = metadata.namespace.as_deref().unwrap_or_default();
    format!("{namespace}/{}", metadata.name.as_deref().unwrap_or_default())
}

/// Returns the name of an object without its namespace.
pub(crate) fn name_of(metadata: &ObjectMeta) -> String {
    metadata.name.clone().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::objects::Node;

    use super::*;
    use crate::fake;

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_shows_nothing_begins_again_where_it_was_without_a_list() {
        let (client, asked) = fake::silent("");
        let nodes = Kind::<Node>::new(Api::all(client), &[]);
        let mut events = nodes.watch("a=b");
        let watching = async { while events.next().await.is_some() {} };
        assert!(tokio::time::timeout(Duration::from_secs(100), watching).await.is_err());
        let asked = asked.lock().unwrap();
        let watches: Vec<&String> =
            asked.iter().filter(|query| query.contains("watch=true")).collect();
        assert_eq!((asked.len() - watches.len(), watches.len()), (1, 3), "{asked:?}");
        let continues = |query: &&String| {
            query.contains("resourceVersion=7") && query.contains("labelSelector=a%3Db")
        };
        assert!(watches.iter().all(continues), "{watches:?}");
    }
}
