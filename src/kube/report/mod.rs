//! What people ask about volumes: which there are, what a node has, what a claim waits for, and whether a node can
//! be drained. The answers come from the objects of the API server alone; nothing is written, and no node is asked.
//!
//! [`Reader`] reads the objects. The other files turn them into answers without I/O.

mod facts;
mod node;
mod steps;
mod take_over;
mod volumes;
mod why;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::future::Future;
use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::object::Time;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};
use kube::api::{Api, ApiResource, DynamicObject, ListParams};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::runtime::Runtime;

use crate::api::{call, now};
use crate::attach_detach::pods;
use crate::client::connect_as;
use crate::grant::{DRIVER_LABEL, VolumeGrant, grant_name};
use crate::objects::{Node, PersistentVolume, PersistentVolumeClaim, Pod, VolumeAttachment};

pub use node::{DrainCheck, NodeReport, NodeVolume, Obstacle};
pub use steps::Step;
pub use take_over::{Image, TakeOver, TakenOver};
pub use volumes::{HolderRow, VolumeRow};
pub use why::Why;

/// The number of objects that one call lists.
const PAGE: u32 = 500;

/// The maximum number of objects of one kind that are read. A cluster with more is refused.
const MAX_OBJECTS: usize = 200_000;

/// The maximum length of a name.
const MAX_NAME: usize = 253;

/// Reads the objects of a cluster that concern the volumes of one driver. Each call blocks until the API server has
/// answered.
pub struct Reader {
    runtime: Runtime,
    objects: Objects,
}

struct Objects {
    client: Client,
    driver: String,
}

impl Reader {
    /// Prepares reading with a kubeconfig file, or with that of the environment or the service account of the pod.
    /// `context` is one of the kubeconfig; without it, its current one. Does not connect.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if the file cannot be read or does not have the context.
    pub fn connect(kubeconfig: Option<&Path>, context: Option<&str>, driver: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Error::from_io("cannot start a runtime", error))?;
        let client = runtime.block_on(connect_as(kubeconfig, context))?;
        Ok(Self { runtime, objects: Objects { client, driver: driver.to_owned() } })
    }

    /// Lists the volumes of the driver: those with a PersistentVolume, and those that only have a grant.
    ///
    /// # Errors
    /// Returns the error of the API server.
    pub fn volumes(&self) -> Result<Vec<VolumeRow>> {
        self.runtime.block_on(self.objects.volumes())
    }

    /// Returns the CSI drivers of all PersistentVolumes.
    ///
    /// # Errors
    /// Returns the error of the API server.
    pub fn drivers(&self) -> Result<BTreeSet<String>> {
        self.runtime.block_on(self.objects.drivers())
    }

    /// Describes what a node has of the driver.
    ///
    /// # Errors
    /// Returns `NotFound` if neither the node exists nor a grant names it, and otherwise the error of the API server.
    pub fn node(&self, name: &str) -> Result<NodeReport> {
        self.runtime.block_on(self.objects.node(name))
    }

    /// Checks whether the volumes of the driver permit that a node is drained.
    ///
    /// # Errors
    /// As [`Reader::node`].
    pub fn drain_check(&self, name: &str) -> Result<DrainCheck> {
        self.runtime.block_on(self.objects.drain_check(name))
    }

    /// Says what a PersistentVolumeClaim waits for. `claim` is NAME or NAMESPACE/NAME. Without a namespace, that of the
    /// kubeconfig's context is used.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for an impossible name and for two namespaces, `NotFound` if the claim does not exist, and otherwise the error
    /// of the API server.
    pub fn why(&self, namespace: Option<&str>, claim: &str) -> Result<Why> {
        self.runtime.block_on(self.objects.why(namespace, claim))
    }

    /// Returns the objects with which a volume of ceph-csi is one of the driver. Without `storage_class`, it keeps its
    /// own. `id` makes the volume handle of an image.
    ///
    /// # Errors
    /// Returns `NotFound` if the PersistentVolume or its claim does not exist; `InUse` with what uses it;
    /// `Unsupported` for a volume that cannot be taken over; otherwise the error of the API server.
    pub fn take_over(
        &self,
        volume: &str,
        storage_class: Option<&str>,
        id: &dyn Fn(&Image) -> String,
    ) -> Result<TakenOver> {
        self.runtime.block_on(self.objects.take_over(volume, storage_class, id))
    }
}

impl Objects {
    async fn volumes(&self) -> Result<Vec<VolumeRow>> {
        let (volumes, grants) = (self.persistent_volumes().await?, self.grants().await?);
        Ok(volumes::rows(&self.driver, &volumes, &grants))
    }

    async fn drivers(&self) -> Result<BTreeSet<String>> {
        let volumes: Vec<PersistentVolume> = self.all(&ListParams::default()).await?;
        let driver = |volume: PersistentVolume| Some(volume.spec?.csi?.driver);
        Ok(volumes.into_iter().filter_map(driver).collect())
    }

    async fn node(&self, name: &str) -> Result<NodeReport> {
        node::report(&self.facts_of_node(name).await?)
    }

    async fn drain_check(&self, name: &str) -> Result<DrainCheck> {
        node::drain_check(&self.facts_of_node(name).await?)
    }

    async fn why(&self, namespace: Option<&str>, claim: &str) -> Result<Why> {
        let (namespace, claim) = split(namespace, claim)?;
        let namespace = namespace.unwrap_or(self.client.default_namespace());
        check_name("namespace", namespace)?;
        check_name("PersistentVolumeClaim", claim)?;
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), namespace);
        let found = read(|| format!("read the claim {namespace}/{claim}"), claims.get(claim)).await;
        let claim = found.map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                error.with_repair("name the namespace with -n; kubectl get pvc -A lists the claims")
            }
            _ => error,
        })?;
        let spec = claim.spec.clone().unwrap_or_default();
        let volume: Option<PersistentVolume> = self.get(spec.volume_name.as_deref()).await?;
        let class: Option<StorageClass> = self.get(spec.storage_class_name.as_deref()).await?;
        let pods = self.pods(Some(namespace), &ListParams::default()).await?;
        let pods = pods.into_iter().filter(|pod| uses(pod, &claim.name_any())).collect();
        let mut facts = facts::Facts {
            driver: &self.driver,
            now: now(),
            csi_driver: self.get(Some(&*self.driver)).await?,
            registered: Vec::new(),
            warnings: BTreeMap::new(),
            attachments: Vec::new(),
            grant: None,
            nodes: Vec::new(),
            claim,
            class,
            volume,
            pods,
        };
        if let Some(volume) = &facts.volume {
            let attachments: Vec<VolumeAttachment> = self.all(&ListParams::default()).await?;
            let of_volume = |attachment: &VolumeAttachment| {
                attachment.spec.source.persistent_volume_name == volume.metadata.name
            };
            facts.attachments = attachments.into_iter().filter(of_volume).collect();
            if let Some(handle) = handle(volume, &self.driver) {
                facts.grant = self.grant(&grant_name(&self.driver, handle)).await?;
            }
        }
        for name in facts.node_names() {
            facts.nodes.extend(self.get::<Node>(Some(&*name)).await?);
            let registered: Option<CSINode> = self.get(Some(&*name)).await?;
            let drivers = registered.iter().flat_map(|node| &node.spec.drivers);
            if drivers.into_iter().any(|known| known.name == self.driver) {
                facts.registered.push(name);
            }
        }
        let uids = facts.pods.iter().map(ResourceExt::uid).chain([facts.claim.uid()]);
        for uid in uids.flatten().collect::<Vec<_>>() {
            let warning = self.last_warning(namespace, &uid).await?;
            facts.warnings.extend(warning.map(|warning| (uid, warning)));
        }
        Ok(why::answer(&facts))
    }

    async fn take_over(
        &self,
        volume: &str,
        storage_class: Option<&str>,
        id: &dyn Fn(&Image) -> String,
    ) -> Result<TakenOver> {
        let missing = |what: String| {
            Error::new(ErrorKind::NotFound, what).with_repair("kubectl get pv lists the volumes")
        };
        check_name("PersistentVolume", volume)?;
        let kind = ApiResource::erase::<PersistentVolume>(&());
        let volumes: Api<DynamicObject> = Api::all_with(self.client.clone(), &kind);
        let request = volumes.get_opt(volume);
        let found = read(|| format!("read the PersistentVolume {volume}"), request).await?;
        let found = found
            .ok_or_else(|| missing(format!("the PersistentVolume {volume} does not exist")))?;
        let claim = &found.data["spec"]["claimRef"];
        let (Some(name), Some(namespace)) = (claim["name"].as_str(), claim["namespace"].as_str())
        else {
            return Err(missing(format!("the PersistentVolume {volume} has no claim")));
        };
        let kind = ApiResource::erase::<PersistentVolumeClaim>(&());
        let claims: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), namespace, &kind);
        let claim = read(|| format!("read the claim {namespace}/{name}"), claims.get(name)).await?;
        let pods = self.pods(Some(namespace), &ListParams::default()).await?;
        let pods = pods.iter().filter(|pod| uses(pod, name));
        let pods = pods.map(|pod| format!("{namespace}/{}", pod.name_any())).collect();
        let attachments: Vec<VolumeAttachment> = self.all(&ListParams::default()).await?;
        let of_volume = |attachment: &VolumeAttachment| {
            attachment.spec.source.persistent_volume_name.as_deref() == Some(volume)
        };
        let attached = attachments.into_iter().filter(of_volume);
        let attached = attached.map(|attachment| attachment.spec.node_name).collect();
        let facts = take_over::Facts { volume: found, claim, attached, pods };
        let wanted = TakeOver { driver: &self.driver, storage_class };
        take_over::taken_over(&facts, &wanted, id)
    }

    /// Returns the message of the last warning about an object; none if the user may not read events.
    async fn last_warning(&self, namespace: &str, uid: &str) -> Result<Option<String>> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let which = ListParams::default().fields(&format!("involvedObject.uid={uid},type=Warning"));
        let events = match pages(&events, &which).await {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => return Ok(None),
            events => events?,
        };
        let time = |event: &Event| {
            let last = event.last_timestamp.as_ref().map(|time| time.0);
            last.or(event.event_time.as_ref().map(|time| time.0))
        };
        let last = events.into_iter().max_by_key(time);
        Ok(last.and_then(|event| event.message))
    }

    async fn facts_of_node(&self, name: &str) -> Result<node::Facts<'_>> {
        check_name("node", name)?;
        let on_node = ListParams::default().fields(&format!("spec.nodeName={name}"));
        Ok(node::Facts {
            driver: &self.driver,
            now: now(),
            name: name.to_owned(),
            node: self.get(Some(name)).await?,
            volumes: self.persistent_volumes().await?,
            grants: self.grants().await?,
            attachments: self.all(&ListParams::default()).await?,
            pods: self.pods(None, &on_node).await?,
        })
    }

    async fn persistent_volumes(&self) -> Result<Vec<PersistentVolume>> {
        let all: Vec<PersistentVolume> = self.all(&ListParams::default()).await?;
        Ok(all.into_iter().filter(|volume| handle(volume, &self.driver).is_some()).collect())
    }

    async fn grants(&self) -> Result<Vec<VolumeGrant>> {
        let of_driver = ListParams::default().labels(&format!("{DRIVER_LABEL}={}", self.driver));
        match self.all(&of_driver).await {
            // The cluster works without grants: the custom resource is not installed.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            found => found,
        }
    }

    async fn grant(&self, name: &str) -> Result<Option<VolumeGrant>> {
        let grants: Api<VolumeGrant> = Api::all(self.client.clone());
        read(|| format!("read the grant {name}"), grants.get_opt(name)).await
    }

    /// Reads an object without a namespace; none without a name.
    async fn get<K>(&self, name: Option<&str>) -> Result<Option<K>>
    where
        K: Resource<DynamicType = (), Scope = kube::core::ClusterResourceScope>,
        K: Clone + Debug + DeserializeOwned,
    {
        let Some(name) = name.filter(|name| !name.is_empty()) else { return Ok(None) };
        let api: Api<K> = Api::all(self.client.clone());
        read(|| format!("read the {} {name}", K::kind(&())), api.get_opt(name)).await
    }

    async fn pods(&self, namespace: Option<&str>, which: &ListParams) -> Result<Vec<Pod>> {
        let api = match namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        pages(&api, which).await
    }

    async fn all<K>(&self, which: &ListParams) -> Result<Vec<K>>
    where
        K: Resource<DynamicType = (), Scope = kube::core::ClusterResourceScope>,
        K: Clone + Debug + DeserializeOwned,
    {
        pages(&Api::all(self.client.clone()), which).await
    }
}

/// Checks a name before it becomes a part of the path of a request.
fn check_name(kind: &str, name: &str) -> Result<()> {
    let is_valid =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    let why = if name.is_empty() {
        "it is empty".to_owned()
    } else if name.len() > MAX_NAME {
        format!("it has more than {MAX_NAME} characters")
    } else if !name.bytes().all(is_valid) {
        "it has other characters than a-z, 0-9, - and .".to_owned()
    } else {
        return Ok(());
    };
    let message = format!("{name:?} is not the name of a {kind}: {why}");
    Err(Error::new(ErrorKind::InvalidArgument, message))
}

/// Splits NAMESPACE/NAME of a claim. `namespace` is the one that was named apart from it.
fn split<'a>(namespace: Option<&'a str>, claim: &'a str) -> Result<(Option<&'a str>, &'a str)> {
    let Some((own, name)) = claim.split_once('/') else { return Ok((namespace, claim)) };
    match namespace {
        Some(other) if other != own => {
            let message = format!("{claim} is in the namespace {own}, and -n names {other}");
            let error = Error::new(ErrorKind::InvalidArgument, message);
            Err(error.with_repair("name the namespace once"))
        }
        _ => Ok((Some(own), name)),
    }
}

/// As [`call`], with the rights of the kubeconfig's user.
async fn read<T>(
    what: impl FnOnce() -> String,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T> {
    call(what, request).await.map_err(|error| match error.kind() {
        ErrorKind::PermissionDenied => {
            error.with_repair("use a kubeconfig whose user may read these objects")
        }
        _ => error,
    })
}

/// Lists all objects, some at a time.
async fn pages<K>(api: &Api<K>, which: &ListParams) -> Result<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let what = || format!("list the objects of kind {}", K::kind(&()));
    let mut objects = Vec::new();
    let mut which = which.clone().limit(PAGE);
    loop {
        let page = read(what, api.list(&which)).await?;
        objects.extend(page.items);
        if objects.len() > MAX_OBJECTS {
            let message = format!("cannot {}: there are more than {MAX_OBJECTS}", what());
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => which = which.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

/// Returns the volume handle of a PersistentVolume, if it is of the driver.
fn handle<'a>(volume: &'a PersistentVolume, driver: &str) -> Option<&'a str> {
    let csi = volume.spec.as_ref()?.csi.as_ref()?;
    (csi.driver == driver).then_some(&*csi.volume_handle)
}

/// Whether a pod uses a claim of its namespace, also one that is made for it, and has not ended.
fn uses(pod: &Pod, claim: &str) -> bool {
    let name = format!("{}/{claim}", pod.namespace().unwrap_or_default());
    pods::claims(pod).contains(&name) && !has_ended(pod)
}

fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Returns how long ago a time was, for people.
fn ago(then: Time, now: Time) -> String {
    let seconds = now.0.saturating_sub(then.0);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_claim_that_is_made_for_a_pod_is_one_of_its_claims() {
        let template = json!({ "volumeClaimTemplate": { "spec": {} } });
        let named = json!({ "claimName": "data" });
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "name": "db", "namespace": "prod" },
            "spec": { "containers": [], "volumes": [
                { "name": "scratch", "ephemeral": template },
                { "name": "v", "persistentVolumeClaim": named },
            ] },
        }))
        .unwrap();
        let used = ["db-scratch", "data", "scratch", "v"].map(|claim| uses(&pod, claim));
        assert_eq!(used, [true, true, false, false]);
    }

    #[test]
    fn two_namespaces_of_a_claim_are_refused() {
        assert_eq!(split(None, "x").unwrap(), (None, "x"));
        assert_eq!(split(Some("prod"), "x").unwrap(), (Some("prod"), "x"));
        assert_eq!(split(Some("prod"), "prod/x").unwrap(), (Some("prod"), "x"));
        let error = split(Some("staging"), "prod/x").unwrap_err();
        assert_eq!(error.message(), "prod/x is in the namespace prod, and -n names staging");
    }

    #[test]
    fn an_impossible_name_is_refused_with_what_is_wrong() {
        let long = "a".repeat(MAX_NAME + 1);
        let cases = [("", "is empty"), (&*long, "more than 253"), ("A", "other characters")];
        for (name, why) in cases {
            let error = check_name("node", name).unwrap_err();
            assert!(error.message().contains(why), "{error}");
        }
        assert!(check_name("node", &long[1..]).is_ok());
    }
}
