//! Objects of any kind, as JSON.

use std::time::{Duration, Instant};

use kube::api::{
    Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, ValidationDirective,
};
use kube::core::{ApiResource, GroupVersionKind, TypeMeta};
use kube::{Client, Error};
use serde_json::Value;

/// The namespace of what users make.
pub(crate) const USER: &str = "default";

/// How long a test waits: the controllers of Kubernetes try again with a backoff, and remove pods every 20 s.
const LIMIT: Duration = Duration::from_secs(120);

/// A kind of objects. Those in a namespace are in [`USER`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    version: &'static str,
    name: &'static str,
    is_namespaced: bool,
}

impl Kind {
    const fn of_cluster(version: &'static str, name: &'static str) -> Self {
        Self { version, name, is_namespaced: false }
    }

    const fn of_user(version: &'static str, name: &'static str) -> Self {
        Self { version, name, is_namespaced: true }
    }
}

pub(crate) const NODE: Kind = Kind::of_cluster("v1", "Node");
pub(crate) const POD: Kind = Kind::of_user("v1", "Pod");
pub(crate) const CLAIM: Kind = Kind::of_user("v1", "PersistentVolumeClaim");
pub(crate) const VOLUME: Kind = Kind::of_cluster("v1", "PersistentVolume");
pub(crate) const EVENT: Kind = Kind::of_user("v1", "Event");
pub(crate) const ATTACHMENT: Kind = Kind::of_cluster("storage.k8s.io/v1", "VolumeAttachment");
pub(crate) const SNAPSHOT: Kind = Kind::of_user("snapshot.storage.k8s.io/v1", "VolumeSnapshot");
pub(crate) const CONTENT: Kind =
    Kind::of_cluster("snapshot.storage.k8s.io/v1", "VolumeSnapshotContent");

/// The API of the objects of one kind, in `namespace` if they are in one.
fn api(client: &Client, types: &TypeMeta, namespace: Option<&str>) -> Api<DynamicObject> {
    let version = &types.api_version;
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &types.kind));
    match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    }
}

/// Applies an object as `kubectl apply --server-side --validate=strict` does.
pub(crate) async fn apply(client: &Client, object: &Value) -> Result<DynamicObject, Error> {
    apply_with(client, object, PatchParams::apply("test")).await
}

/// As [`apply`] with `--dry-run=server`: nothing is stored.
pub(crate) async fn check(client: &Client, object: &Value) -> Result<DynamicObject, Error> {
    apply_with(client, object, PatchParams::apply("test").dry_run()).await
}

async fn apply_with(
    client: &Client,
    object: &Value,
    parameters: PatchParams,
) -> Result<DynamicObject, Error> {
    let object: DynamicObject = serde_json::from_value(object.clone()).unwrap();
    let mut parameters = parameters.force();
    parameters.field_validation = Some(ValidationDirective::Strict);
    let name = object.metadata.name.clone().unwrap();
    api_of(client, &object).patch(&name, &parameters, &Patch::Apply(&object)).await
}

/// Reads the object with the kind and the name of `object`.
pub(crate) async fn find(client: &Client, object: &Value) -> Option<DynamicObject> {
    let object: DynamicObject = serde_json::from_value(object.clone()).unwrap();
    api_of(client, &object).get_opt(&object.metadata.name.clone().unwrap()).await.unwrap()
}

fn api_of(client: &Client, object: &DynamicObject) -> Api<DynamicObject> {
    api(client, object.types.as_ref().unwrap(), object.metadata.namespace.as_deref())
}

/// The objects of a control plane, for an administrator.
#[derive(Clone)]
pub(crate) struct Objects(pub(crate) Client);

impl Objects {
    fn api(&self, kind: Kind) -> Api<DynamicObject> {
        let types = TypeMeta { api_version: kind.version.to_owned(), kind: kind.name.to_owned() };
        api(&self.0, &types, kind.is_namespaced.then_some(USER))
    }

    /// Creates an object of this kind, or changes it.
    pub(crate) async fn apply(&self, kind: Kind, mut object: Value) {
        object["apiVersion"] = kind.version.into();
        object["kind"] = kind.name.into();
        if kind.is_namespaced {
            object["metadata"]["namespace"] = USER.into();
        }
        apply(&self.0, &object).await.unwrap_or_else(|error| panic!("{object}: {error}"));
    }

    pub(crate) async fn get(&self, kind: Kind, name: &str) -> Option<Value> {
        let found = self.api(kind).get_opt(name).await.unwrap();
        found.map(|object| serde_json::to_value(object).unwrap())
    }

    pub(crate) async fn list(&self, kind: Kind) -> Vec<Value> {
        let found = self.api(kind).list(&ListParams::default()).await.unwrap();
        found.items.iter().map(|object| serde_json::to_value(object).unwrap()).collect()
    }

    /// Changes fields of an object.
    pub(crate) async fn patch(&self, kind: Kind, name: &str, body: Value) {
        let parameters = PatchParams::default();
        self.api(kind).patch(name, &parameters, &Patch::Merge(body)).await.unwrap();
    }

    /// Changes fields of the status of an object.
    pub(crate) async fn patch_status(&self, kind: Kind, name: &str, body: Value) {
        let (parameters, body) = (PatchParams::default(), serde_json::json!({ "status": body }));
        self.api(kind).patch_status(name, &parameters, &Patch::Merge(body)).await.unwrap();
    }

    /// Deletes an object. A pod ends at once, because there is no kubelet that ends it.
    pub(crate) async fn delete(&self, kind: Kind, name: &str) {
        self.api(kind).delete(name, &DeleteParams::default().grace_period(0)).await.unwrap();
    }

    /// Waits until `condition` returns a value for an object.
    pub(crate) async fn until<T>(
        &self,
        kind: Kind,
        name: &str,
        what: &str,
        condition: impl Fn(&Value) -> Option<T>,
    ) -> T {
        let deadline = Instant::now() + LIMIT;
        loop {
            let found = self.get(kind, name).await;
            if let Some(value) = found.as_ref().and_then(&condition) {
                return value;
            }
            assert!(
                Instant::now() < deadline,
                "timed out: {} {name} {what}: {found:#?}",
                kind.name
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until an object does not exist.
    pub(crate) async fn gone(&self, kind: Kind, name: &str) {
        let deadline = Instant::now() + LIMIT;
        while let Some(found) = self.get(kind, name).await {
            assert!(Instant::now() < deadline, "timed out: {} {name} stays: {found:#}", kind.name);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Returns the text at a JSON pointer.
pub(crate) fn text(object: &Value, pointer: &str) -> Option<String> {
    object.pointer(pointer)?.as_str().map(str::to_owned)
}
