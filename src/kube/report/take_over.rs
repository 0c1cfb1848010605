//! Takes over a volume of ceph-csi, or a static volume: the objects with which the same RBD image is a volume of this
//! driver that can be granted. The volume handle names the image, so that each image has one.

use std::collections::BTreeMap;

use cleat_core::error::{Error, ErrorKind, Result};
use kube::ResourceExt;
use kube::api::{DynamicObject, ObjectMeta};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// The end of the names of ceph-csi's drivers for RBD. Rook puts its namespace before it.
const CEPH_CSI: &str = "rbd.csi.ceph.com";

/// The beginning of the names of images that ceph-csi makes, if the volume does not have the name.
const IMAGE_PREFIX: &str = "csi-vol-";

/// The attributes of a static volume that name its image.
const OF_IMAGE: [&str; 5] = ["staticVolume", "clusterID", "pool", "radosNamespace", "imageName"];

/// The length of the UUID at the end of a volume handle of ceph-csi.
const UUID: usize = 36;

/// An RBD image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The id of the cluster in the file of clusters.
    pub cluster: String,
    /// The pool.
    pub pool: String,
    /// The namespace in the pool, if the volume names one.
    pub namespace: Option<String>,
    /// The name of the image.
    pub name: String,
}

/// What is needed to take over a volume, as it is in the API server. The objects have all their fields, also those of
/// newer versions of Kubernetes.
pub(super) struct Facts {
    pub(super) volume: DynamicObject,
    pub(super) claim: DynamicObject,
    /// The nodes that VolumeAttachments name.
    pub(super) attached: Vec<String>,
    /// The pods that use the claim.
    pub(super) pods: Vec<String>,
}

/// What the volume becomes.
#[derive(Debug, Clone)]
pub struct TakeOver<'a> {
    /// The name of the driver that takes it over.
    pub driver: &'a str,
    /// The StorageClass; `None`: the same one.
    pub storage_class: Option<&'a str>,
}

/// The objects of a volume that is taken over.
#[derive(Debug, Clone)]
pub struct TakenOver {
    /// The PersistentVolume, without a status.
    pub volume: DynamicObject,
    /// The claim that is bound to it, without a status.
    pub claim: DynamicObject,
}

/// Returns the objects. `id` makes the volume handle of an image.
///
/// # Errors
/// Returns `InUse` with the pods and the nodes that use the volume; `Unsupported` for a volume of another driver, for
/// one whose storage would be deleted with the PersistentVolume, and for one that this driver cannot decrypt.
pub(super) fn taken_over(
    facts: &Facts,
    wanted: &TakeOver<'_>,
    id: impl FnOnce(&Image) -> String,
) -> Result<TakenOver> {
    let name = facts.volume.name_any();
    let mut spec = object(&facts.volume.data, "spec");
    let mut csi = object(&Value::Object(spec.clone()), "csi");
    let driver = text(&csi, "driver").to_owned();
    let attributes = attributes(&csi);
    let is_static = driver == wanted.driver && is_true(&attributes, "staticVolume");
    if !is_static && !driver.ends_with(CEPH_CSI) {
        let message = format!(
            "the PersistentVolume {name} is not of ceph-csi ({CEPH_CSI}), and not a static volume of {} with the \
             attribute staticVolume",
            wanted.driver
        );
        return Err(unsupported(message, "kubectl get pv -o wide lists the volumes"));
    }
    check_unused(facts, &name)?;
    if text(&spec, "persistentVolumeReclaimPolicy") != "Retain" {
        let message = format!(
            "the image would be deleted with the PersistentVolume {name}, which has to be retained"
        );
        let patch = r#"'{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}'"#;
        return Err(unsupported(message, &format!("kubectl patch pv {name} -p {patch}")));
    }
    let handle = id(&image(&name, text(&csi, "volumeHandle"), &attributes)?);
    let kept = if is_static {
        let is_kept = |key: &String| !OF_IMAGE.contains(&key.as_str());
        attributes.into_iter().filter(|(key, _)| is_kept(key)).collect()
    } else {
        kept_attributes(&name, &attributes)?
    };
    set(&mut csi, "driver", Some(wanted.driver));
    set(&mut csi, "volumeHandle", Some(handle));
    set(&mut csi, "volumeAttributes", (!kept.is_empty()).then_some(kept));
    csi.remove("controllerPublishSecretRef");
    set(&mut spec, "csi", Some(csi));
    if let Some(Value::Object(claim)) = spec.get_mut("claimRef") {
        claim.remove("uid");
        claim.remove("resourceVersion");
    }
    let mut claim_spec = object(&facts.claim.data, "spec");
    set(&mut claim_spec, "volumeName", Some(name));
    claim_spec.remove("dataSource");
    claim_spec.remove("dataSourceRef");
    if let Some(class) = wanted.storage_class {
        set(&mut spec, "storageClassName", Some(class));
        set(&mut claim_spec, "storageClassName", Some(class));
    }
    Ok(TakenOver { volume: new(&facts.volume, spec), claim: new(&facts.claim, claim_spec) })
}

/// Returns a member of an object of JSON that is an object; an empty one without it.
fn object(of: &Value, key: &str) -> Map<String, Value> {
    of.get(key).and_then(Value::as_object).cloned().unwrap_or_default()
}

/// Returns a member that is text; empty text without it.
fn text<'a>(of: &'a Map<String, Value>, key: &str) -> &'a str {
    of.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// Sets a member, or removes it.
fn set(of: &mut Map<String, Value>, key: &str, value: Option<impl Serialize>) {
    match value {
        Some(value) => of.insert(key.to_owned(), json!(value)),
        None => of.remove(key),
    };
}

/// Returns the attributes of a volume.
fn attributes(csi: &Map<String, Value>) -> BTreeMap<String, String> {
    let attributes = csi.get("volumeAttributes").cloned().unwrap_or_default();
    serde_json::from_value(attributes).unwrap_or_default()
}

/// Returns a new object of the kind of an old one. Annotations say who has made the object, and finalizers who watches
/// it; both are those of the old driver.
fn new(old: &DynamicObject, spec: Map<String, Value>) -> DynamicObject {
    let metadata = ObjectMeta {
        name: old.metadata.name.clone(),
        namespace: old.metadata.namespace.clone(),
        labels: old.metadata.labels.clone(),
        ..ObjectMeta::default()
    };
    DynamicObject { types: old.types.clone(), metadata, data: json!({ "spec": spec }) }
}

fn check_unused(facts: &Facts, name: &str) -> Result<()> {
    if !facts.pods.is_empty() {
        let message =
            format!("the PersistentVolume {name} is used by pods: {}", facts.pods.join(", "));
        return Err(Error::new(ErrorKind::InUse, message)
            .with_repair("end them, for example with kubectl scale"));
    }
    if !facts.attached.is_empty() {
        let message =
            format!("the PersistentVolume {name} is attached to {}", facts.attached.join(", "));
        return Err(Error::new(ErrorKind::InUse, message)
            .with_repair("wait until kubectl get volumeattachments does not list it"));
    }
    Ok(())
}

/// Returns the attributes that this driver needs, too.
fn kept_attributes(
    name: &str,
    attributes: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>> {
    let value = |key: &str| attributes.get(key).map_or("", String::as_str);
    if !is_true(attributes, "encrypted") {
        return Ok(BTreeMap::new());
    }
    let (kind, kms) = (value("encryptionType"), value("encryptionKMSID"));
    if !["", "block"].contains(&kind) || !kms.is_empty() {
        let message = format!(
            "the PersistentVolume {name} is encrypted with encryptionType {kind:?} and encryptionKMSID {kms:?}, which \
             this driver does not have"
        );
        return Err(unsupported(message, "copy its data to a new volume"));
    }
    Ok([("encrypted".to_owned(), "true".to_owned())].into())
}

fn is_true(attributes: &BTreeMap<String, String>, key: &str) -> bool {
    attributes.get(key).is_some_and(|value| value == "true")
}

/// Returns the image of a volume of ceph-csi. Older volumes do not have its name, which ends as the volume handle.
fn image(name: &str, handle: &str, attributes: &BTreeMap<String, String>) -> Result<Image> {
    let value = |key: &str| attributes.get(key).filter(|value| !value.is_empty()).cloned();
    let missing = |key: &str| {
        let message = format!("the PersistentVolume {name} does not have the attribute {key}");
        unsupported(
            message,
            "write the PersistentVolume by hand: see docs/csi.md, Volumes of ceph-csi",
        )
    };
    let is_static = is_true(attributes, "staticVolume");
    let of_handle = || {
        let uuid = handle.get(handle.len().checked_sub(UUID)?..)?;
        let prefix = value("volumeNamePrefix").unwrap_or_else(|| IMAGE_PREFIX.to_owned());
        handle.starts_with("0001-").then(|| format!("{prefix}{uuid}"))
    };
    let image = match value("imageName") {
        Some(image) => Some(image),
        None if is_static => Some(handle.to_owned()),
        None => of_handle(),
    };
    Ok(Image {
        cluster: value("clusterID").ok_or_else(|| missing("clusterID"))?,
        pool: value("pool").ok_or_else(|| missing("pool"))?,
        namespace: value("radosNamespace"),
        name: image.ok_or_else(|| missing("imageName"))?,
    })
}

fn unsupported(message: String, repair: &str) -> Error {
    Error::new(ErrorKind::Unsupported, message).with_repair(repair.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANDLE: &str =
        "0001-0009-rook-ceph-0000000000000002-1c0f9e3e-1111-2222-3333-444455556666";

    fn facts(attributes: Value) -> Facts {
        Facts {
            volume: serde_json::from_value(json!({
                "apiVersion": "v1", "kind": "PersistentVolume",
                "metadata": {
                    "name": "pvc-1", "uid": "u", "labels": { "a": "b" },
                    "finalizers": ["kubernetes.io/pv-protection"],
                    "annotations": { "pv.kubernetes.io/provisioned-by": "rook-ceph.rbd.csi.ceph.com" },
                },
                "spec": {
                    "persistentVolumeReclaimPolicy": "Retain", "storageClassName": "old",
                    "fieldOfTheFuture": 7,
                    "claimRef": { "namespace": "prod", "name": "data", "uid": "c", "resourceVersion": "1" },
                    "csi": {
                        "driver": "rook-ceph.rbd.csi.ceph.com", "volumeHandle": HANDLE, "fsType": "ext4",
                        "volumeAttributes": attributes,
                        "nodeStageSecretRef": { "name": "rook-csi-rbd-node", "namespace": "rook-ceph" },
                        "controllerPublishSecretRef": { "name": "rook-csi-rbd-node", "namespace": "rook-ceph" },
                    },
                },
                "status": { "phase": "Bound" },
            }))
            .unwrap(),
            claim: serde_json::from_value(json!({
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": { "name": "data", "namespace": "prod", "uid": "c" },
                "spec": { "storageClassName": "old", "volumeName": "pvc-1", "dataSource": { "kind": "VolumeSnapshot", "name": "s" } },
            }))
            .unwrap(),
            attached: Vec::new(),
            pods: Vec::new(),
        }
    }

    fn source(facts: &mut Facts) -> &mut Value {
        &mut facts.volume.data["spec"]["csi"]
    }

    /// Returns the CSI source of the new PersistentVolume.
    fn taken_source(facts: &Facts) -> Value {
        take(facts).unwrap().volume.data["spec"]["csi"].clone()
    }

    fn attributes() -> Value {
        json!({ "clusterID": "rook-ceph", "pool": "p", "imageName": "csi-vol-x", "journalPool": "p" })
    }

    fn take(facts: &Facts) -> Result<TakenOver> {
        let wanted = TakeOver { driver: "cleat.csi.storage", storage_class: Some("new") };
        taken_over(facts, &wanted, |image| {
            format!("rbd/{}/{}//{}", image.cluster, image.pool, image.name)
        })
    }

    #[test]
    fn the_same_image_gets_new_objects() {
        let TakenOver { volume, claim } = take(&facts(attributes())).unwrap();
        assert_eq!(
            json!(volume),
            json!({
                "apiVersion": "v1", "kind": "PersistentVolume",
                "metadata": { "name": "pvc-1", "labels": { "a": "b" } },
                "spec": {
                    "persistentVolumeReclaimPolicy": "Retain", "storageClassName": "new",
                    "fieldOfTheFuture": 7,
                    "claimRef": { "namespace": "prod", "name": "data" },
                    "csi": {
                        "driver": "cleat.csi.storage", "volumeHandle": "rbd/rook-ceph/p//csi-vol-x",
                        "fsType": "ext4",
                        "nodeStageSecretRef": { "name": "rook-csi-rbd-node", "namespace": "rook-ceph" },
                    },
                },
            })
        );
        assert_eq!(
            json!(claim),
            json!({
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": { "name": "data", "namespace": "prod" },
                "spec": { "storageClassName": "new", "volumeName": "pvc-1" },
            })
        );
    }

    #[test]
    fn the_image_follows_from_the_handle_of_older_and_static_volumes() {
        let old = json!({ "clusterID": "c", "pool": "p" });
        let handle = &taken_source(&facts(old))["volumeHandle"];
        assert_eq!(handle, "rbd/c/p//csi-vol-1c0f9e3e-1111-2222-3333-444455556666");
        let fixed = json!({ "clusterID": "c", "pool": "p", "staticVolume": "true" });
        let handle = &taken_source(&facts(fixed))["volumeHandle"];
        assert_eq!(*handle, format!("rbd/c/p//{HANDLE}"));
    }

    #[test]
    fn a_static_volume_of_this_driver_keeps_its_other_attributes() {
        let mut facts = facts(json!({
            "staticVolume": "true", "clusterID": "c", "pool": "p", "imageName": "db", "radosNamespace": "n",
            "iops": "100",
        }));
        source(&mut facts)["driver"] = json!("cleat.csi.storage");
        let wanted = TakeOver { driver: "cleat.csi.storage", storage_class: None };
        let taken = taken_over(&facts, &wanted, |image| format!("{image:?}")).unwrap();
        let new = &taken.volume.data["spec"]["csi"];
        let image = Image {
            cluster: "c".to_owned(),
            pool: "p".to_owned(),
            namespace: Some("n".to_owned()),
            name: "db".to_owned(),
        };
        assert_eq!(new["volumeHandle"], format!("{image:?}"));
        assert_eq!(new["volumeAttributes"], json!({ "iops": "100" }));
        // A volume that has a handle of this driver already.
        source(&mut facts)["volumeAttributes"]["staticVolume"] = json!("false");
        let error = taken_over(&facts, &wanted, |_| String::new()).unwrap_err();
        assert!(error.message().contains("not a static volume"), "{error}");
    }

    #[test]
    fn what_could_lose_data_is_refused() {
        let refused = |change: &dyn Fn(&mut Facts)| {
            let mut facts = facts(attributes());
            change(&mut facts);
            take(&facts).unwrap_err()
        };
        let used = refused(&|facts| facts.pods.push("prod/db-0".to_owned()));
        assert_eq!(used.kind(), ErrorKind::InUse);
        assert!(used.message().contains("prod/db-0"), "{used}");
        let attached = refused(&|facts| facts.attached.push("node-a".to_owned()));
        assert!(attached.message().contains("node-a"), "{attached}");
        let deleted = refused(&|facts| {
            facts.volume.data["spec"]["persistentVolumeReclaimPolicy"] = json!("Delete");
        });
        assert!(deleted.repair().unwrap().starts_with("kubectl patch pv pvc-1"), "{deleted:?}");
        let other = refused(&|facts| {
            source(facts)["driver"] = json!("cephfs.csi.ceph.com");
        });
        assert!(other.message().contains("is not of ceph-csi"), "{other}");
        let mut encrypted = attributes();
        encrypted["encrypted"] = json!("true");
        let kept = taken_source(&facts(encrypted.clone()));
        assert_eq!(kept["volumeAttributes"], json!({ "encrypted": "true" }));
        encrypted["encryptionKMSID"] = json!("vault");
        assert_eq!(take(&facts(encrypted)).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
