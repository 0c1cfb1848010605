//! The parameters of a StorageClass, in the words of ceph-csi where it has one: where a volume is created, how its
//! storage lays it out, and which attributes the node gets.

use std::collections::BTreeMap;

use cleat_backend::store::Layout;
use cleat_backend::uri::parse_size;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy;

use super::Controller;
use super::names::checked_prefix;
use super::places::Place;
use crate::attributes::Attributes;
use crate::source::cluster;

/// The parameters that determine where and how a volume is created, with their meaning. Errors list them.
const CREATION: [(&str, &str); 11] = [
    ("directory", "the directory of a file volume, by its name in the configuration"),
    ("clusterID", "the cluster of an RBD image, or the object store"),
    ("pool", "the pool of an RBD image"),
    ("radosNamespace", "the namespace in the pool"),
    ("dataPool", "the pool with the data of an RBD image"),
    ("imageFeatures", "the features of an RBD image, separated by commas"),
    ("objectSize", "the size of the objects of an RBD image"),
    ("stripeUnit", "the stripe unit of an RBD image; needs stripeCount"),
    ("stripeCount", "the number of objects that a stripe covers"),
    ("compression", "the compression of a volume on an object store: lz4, none"),
    ("volumeNamePrefix", "the beginning of the volume's name in its storage"),
];

/// The attributes that the node gets, with their meaning. `crate::attributes` reads them.
const ATTRIBUTES: [(&str, &str); 6] = [
    ("directIO", "\"true\": a file volume bypasses the page cache"),
    ("quiesce", "\"true\": filesystems are frozen while a snapshot is made"),
    ("connections", "the connections between the kernel and the worker"),
    ("blockSize", "the block size of the device in bytes"),
    ("fsck", "how filesystems are checked before a mount: preen, full, never"),
    ("encrypted", "\"true\": the volume is encrypted with encryptionPassphrase of its secret"),
];

/// The attributes that can be changed while the volume is in use (VolumeAttributesClass), with their meaning.
const MUTABLE: [(&str, &str); 3] = [
    ("onOutage", "what requests do while the backend is unreachable: queue, queue:TIME, fail"),
    ("iops", "the limit of requests per second"),
    ("bps", "the limit of bytes per second"),
];

/// Parameters of ceph-csi that are accepted and have no effect here: there is no other mounter and no journal.
const IGNORED: [&str; 4] = ["mounter", "mapOptions", "unmapOptions", "journalPool"];

/// Parameters for other programs, which are accepted and have no effect here.
const FOREIGN_PREFIXES: [&str; 2] = ["csi.storage.k8s.io/", "storage.kubernetes.io/"];

/// Parameters of ceph-csi whose only accepted value is that of what this driver does.
const FIXED: [(&str, &str); 4] = [
    ("imageFormat", "2"),
    ("thickProvision", "false"),
    ("encryptionType", "block"),
    ("encryptionKMSID", ""),
];

/// Where and how a volume is created.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Parameters {
    pub(crate) place: Place,
    /// The layout without labels.
    pub(crate) layout: Layout,
    pub(crate) prefix: String,
    /// The parameters that have an effect and do not change.
    pub(crate) fixed: BTreeMap<String, String>,
    /// The parameters that can be changed.
    pub(crate) mutable: Mutable,
}

impl Parameters {
    pub(crate) fn is_encrypted(&self) -> bool {
        is_encrypted(&self.fixed)
    }
}

/// Returns whether these parameters ask for an encrypted volume.
pub(crate) fn is_encrypted(parameters: &BTreeMap<String, String>) -> bool {
    parameters.get("encrypted").is_some_and(|value| value == "true")
}

/// Parameters that can be changed while the volume is in use.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Mutable {
    pub(crate) texts: BTreeMap<String, String>,
    pub(crate) change: policy::Change,
}

impl Mutable {
    /// Parses the mutable parameters of a request.
    ///
    /// # Errors
    /// Returns `InvalidArgument`, with the known ones, for an unknown parameter or an invalid value.
    pub(crate) fn parse(parameters: BTreeMap<String, String>) -> Result<Self> {
        let is_known = |key: &str| MUTABLE.iter().any(|(known, _)| *known == key);
        if let Some(key) = parameters.keys().find(|key| !is_known(key)) {
            return Err(unknown("a mutable parameter", key, &MUTABLE));
        }
        let change = Attributes::parse(&parameters)?.policy;
        change.apply(policy::Policy::default()).limits.check()?;
        Ok(Self { texts: parameters, change })
    }
}

/// Returns those of `parameters` that the node gets as attributes of the volume.
pub(crate) fn attributes(parameters: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let is_attribute = |key: &str| ATTRIBUTES.iter().any(|(known, _)| *known == key);
    let chosen = parameters.iter().filter(|(key, _)| is_attribute(key));
    chosen.map(|(key, value)| (key.clone(), value.clone())).collect()
}

impl Controller {
    /// Parses the parameters of a request. `mutable` override the others. Reads the file of clusters for an RBD
    /// image.
    ///
    /// # Errors
    /// Returns `InvalidArgument`, with the known parameters, for unknown, incomplete or invalid ones.
    pub(crate) fn parameters(
        &self,
        parameters: BTreeMap<String, String>,
        mutable: BTreeMap<String, String>,
    ) -> Result<Parameters> {
        let (mut fixed, mut changeable) = (BTreeMap::new(), BTreeMap::new());
        for (key, value) in parameters {
            match kind(&key, &value)? {
                Kind::Fixed if value.is_empty() => {}
                Kind::Fixed => drop(fixed.insert(key, value)),
                Kind::Mutable => drop(changeable.insert(key, value)),
                Kind::NoEffect => {}
            }
        }
        changeable.extend(mutable);
        let mutable = Mutable::parse(changeable)?;
        Attributes::parse(&attributes(&fixed))?;
        let prefix = checked_prefix(fixed.get("volumeNamePrefix").map_or("", String::as_str))?;
        let (prefix, place) = (prefix.to_owned(), self.place(&fixed)?);
        Ok(Parameters { place, layout: layout(&fixed)?, prefix, fixed, mutable })
    }

    fn place(&self, fixed: &BTreeMap<String, String>) -> Result<Place> {
        let remote: Vec<&str> = CREATION[1..10]
            .iter()
            .map(|(key, _)| *key)
            .filter(|key| fixed.contains_key(*key))
            .collect();
        if remote.is_empty() {
            let directory = match fixed.get("directory") {
                Some(directory) => directory.clone(),
                None => self.default_directory()?,
            };
            if !self.config.directories.contains_key(&directory) {
                let known: Vec<&str> = self.config.directories.keys().map(String::as_str).collect();
                return Err(invalid(format!(
                    "there is no directory {directory:?} on the node {}; there are: {}",
                    self.node,
                    known.join(", ")
                ))
                .with_repair("correct the parameter directory, or add it to [csi.directories]"));
            }
            return Ok(Place::File { directory });
        }
        if fixed.contains_key("directory") {
            let message = format!("the parameter directory excludes {}", remote.join(", "));
            return Err(invalid(message).with_repair("use the parameters of one kind of storage"));
        }
        let needed = |key: &str| {
            let missing = || invalid(format!("{} needs the parameter {key}", remote.join(", ")));
            fixed.get(key).cloned().ok_or_else(missing)
        };
        let id = needed("clusterID")?;
        let known = cluster(&self.config, &id).map_err(|error| match error.kind() {
            ErrorKind::NotFound => invalid(format!("the clusterID {id:?} is not known"))
                .with_repair("add it and its monitors to the file that csi.clusters names")
                .with_source(error),
            _ => error,
        })?;
        if known.store.is_some() {
            let is_of_rbd = |key: &&str| !["clusterID", "compression"].contains(key);
            let of_rbd: Vec<&str> = remote.into_iter().filter(is_of_rbd).collect();
            if !of_rbd.is_empty() {
                let message = format!("{id} is an object store, and has no {}", of_rbd.join(", "));
                return Err(invalid(message).with_repair("use clusterID and compression alone"));
            }
            return Ok(Place::Object { cluster: id });
        }
        if fixed.contains_key("compression") {
            let message = format!("{id} is no object store, and has no compression of volumes");
            return Err(invalid(message).with_repair("remove the parameter compression"));
        }
        let pool = needed("pool")?;
        let namespace = fixed.get("radosNamespace").unwrap_or(&known.rbd.rados_namespace).clone();
        Ok(Place::Rbd { cluster: id, pool, namespace })
    }
}

enum Kind {
    Fixed,
    Mutable,
    NoEffect,
}

fn kind(key: &str, value: &str) -> Result<Kind> {
    let is = |list: &[(&str, &str)]| list.iter().any(|(known, _)| *known == key);
    if is(&CREATION) || is(&ATTRIBUTES) {
        return Ok(Kind::Fixed);
    }
    if is(&MUTABLE) {
        return Ok(Kind::Mutable);
    }
    if let Some((_, only)) = FIXED.iter().find(|(known, _)| *known == key) {
        if value == *only || value.is_empty() {
            return Ok(Kind::NoEffect);
        }
        return Err(invalid(format!("the parameter {key} can only be {only:?} with this driver"))
            .with_repair("remove the parameter"));
    }
    if IGNORED.contains(&key) || FOREIGN_PREFIXES.iter().any(|prefix| key.starts_with(prefix)) {
        return Ok(Kind::NoEffect);
    }
    let known: Vec<_> = [&CREATION[..], &ATTRIBUTES, &MUTABLE].concat();
    Err(unknown("a parameter", key, &known))
}

fn layout(fixed: &BTreeMap<String, String>) -> Result<Layout> {
    let refused = |key: &str, error: Error| {
        invalid(format!("the parameter {key} is invalid")).with_source(error)
    };
    let size = |key: &str| {
        let text = fixed.get(key);
        text.map(|text| parse_size(text).map_err(|error| refused(key, error))).transpose()
    };
    let count = fixed.get("stripeCount").map(|text| text.parse::<u64>());
    let count = count.transpose().map_err(|error| {
        invalid("the parameter stripeCount is not a number".to_owned()).with_source(error)
    })?;
    let stripes = match (size("stripeUnit")?, count) {
        (Some(unit), Some(count)) => Some((unit, count)),
        (None, None) => None,
        _ => return Err(invalid("stripeUnit and stripeCount need each other".to_owned())),
    };
    let features = fixed.get("imageFeatures").map(|list| {
        let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
        names.map(str::to_owned).collect()
    });
    let data_pool = fixed.get("dataPool").cloned();
    let object_size = size("objectSize")?;
    let compression = fixed.get("compression").cloned();
    Ok(Layout { features, object_size, stripes, data_pool, compression, ..Layout::default() })
}

fn unknown(what: &str, key: &str, known: &[(&str, &str)]) -> Error {
    let known: Vec<String> =
        known.iter().map(|(key, meaning)| format!("{key} ({meaning})")).collect();
    let shown: String = key.chars().take(60).collect();
    invalid(format!("{shown:?} is not {what} of this driver; known are {}", known.join(", ")))
        .with_repair("correct the parameters of the StorageClass or of the VolumeAttributesClass")
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::tests::{controller, map};

    fn parse(pairs: &[(&str, &str)]) -> Result<Parameters> {
        let directory = tempfile::tempdir().unwrap();
        controller(&directory).parameters(map(pairs), BTreeMap::new())
    }

    #[test]
    fn a_storage_class_of_ceph_csi_is_accepted() {
        let parameters = parse(&[
            ("clusterID", "c1"),
            ("pool", "replicapool"),
            ("dataPool", "ec"),
            ("imageFormat", "2"),
            ("imageFeatures", "layering, exclusive-lock"),
            ("stripeUnit", "4096"),
            ("stripeCount", "8"),
            ("objectSize", "8388608"),
            ("mounter", "rbd-nbd"),
            ("mapOptions", "nbd:queue_depth=1024"),
            ("volumeNamePrefix", "k8s-"),
            ("encrypted", "false"),
            ("csi.storage.k8s.io/fstype", "ext4"),
            ("csi.storage.k8s.io/provisioner-secret-name", "rook-csi-rbd-provisioner"),
        ])
        .unwrap();
        let (cluster, pool) = ("c1".to_owned(), "replicapool".to_owned());
        assert_eq!(parameters.place, Place::Rbd { cluster, pool, namespace: "tenant".to_owned() });
        let features = ["layering", "exclusive-lock"].map(str::to_owned).to_vec();
        assert_eq!(
            parameters.layout,
            Layout {
                features: Some(features),
                object_size: Some(8 << 20),
                stripes: Some((4096, 8)),
                data_pool: Some("ec".to_owned()),
                ..Layout::default()
            }
        );
        assert_eq!(parameters.prefix, "k8s-");
        assert!(!parameters.fixed.contains_key("mounter"));
    }

    #[test]
    fn no_parameters_give_a_file_in_the_default_directory() {
        let file = |directory: &str| Place::File { directory: directory.to_owned() };
        assert_eq!(parse(&[]).unwrap().place, file("default"));
        let parameters = parse(&[("directory", "fast"), ("iops", "9"), ("fsck", "full")]).unwrap();
        assert_eq!(parameters.place, file("fast"));
        assert_eq!(parameters.mutable.change.iops, Some(9));
        assert_eq!(attributes(&parameters.fixed), map(&[("fsck", "full")]));
    }

    #[test]
    fn mutable_parameters_override_the_others() {
        let directory = tempfile::tempdir().unwrap();
        let parameters = controller(&directory)
            .parameters(map(&[("iops", "9"), ("bps", "1M")]), map(&[("iops", "5")]))
            .unwrap();
        assert_eq!(parameters.mutable.texts, map(&[("iops", "5"), ("bps", "1M")]));
        assert_eq!(parameters.mutable.change.iops, Some(5));
    }

    #[test]
    fn an_object_store_has_no_pools() {
        let directory = tempfile::tempdir().unwrap();
        let controller = controller(&directory);
        let list = r#"[{"clusterID": "o", "store": "dir:/srv/objects"}]"#;
        std::fs::write(directory.path().join("clusters.json"), list).unwrap();
        let parse = |pairs: &[(&str, &str)]| controller.parameters(map(pairs), BTreeMap::new());
        let place = parse(&[("clusterID", "o"), ("fsck", "never")]).unwrap().place;
        assert_eq!(place, Place::Object { cluster: "o".to_owned() });
        let compressed = parse(&[("clusterID", "o"), ("compression", "lz4")]).unwrap();
        assert_eq!(compressed.layout.compression.as_deref(), Some("lz4"));
        let error = parse(&[("clusterID", "o"), ("pool", "p")]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains("o is an object store, and has no pool"), "{error}");
    }

    #[test]
    fn wrong_parameters_are_refused_with_the_known_ones() {
        for (pairs, part) in [
            (&[("poolName", "x")][..], "pool (the pool of an RBD image)"),
            (&[("pool", "x")], "needs the parameter clusterID"),
            (&[("clusterID", "c1")], "needs the parameter pool"),
            (&[("clusterID", "c9"), ("pool", "p")], "\"c9\" is not known"),
            (&[("clusterID", "c1"), ("pool", "p"), ("compression", "lz4")], "no object store"),
            (&[("directory", "none")], "there are: default, fast"),
            (&[("directory", "fast"), ("pool", "p")], "excludes pool"),
            (&[("encrypted", "yes")], "encrypted"),
            (&[("encryptionType", "file")], "can only be \"block\""),
            (&[("encryptionKMSID", "vault")], "can only be \"\""),
            (&[("imageFormat", "1")], "can only be \"2\""),
            (&[("iops", "many")], "iops"),
            (&[("iops", "999999999999")], "requests per second"),
            (&[("fsck", "sometimes")], "fsck"),
            (&[("clusterID", "c1"), ("pool", "p"), ("objectSize", "big")], "objectSize"),
            (&[("clusterID", "c1"), ("pool", "p"), ("stripeUnit", "4096")], "need each other"),
            (&[("volumeNamePrefix", "a/")], "volumeNamePrefix"),
        ] {
            let error = parse(pairs).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{pairs:?}");
            assert!(error.message().contains(part), "{pairs:?}: {error}");
        }
        for pairs in [[("pool", "x")], [("fsck", "full")]] {
            let error = Mutable::parse(map(&pairs)).unwrap_err();
            assert!(error.message().contains("iops (the limit"), "{error}");
        }
    }

    #[test]
    fn every_attribute_is_one_that_the_node_reads() {
        for (key, _) in ATTRIBUTES.iter().chain(&MUTABLE) {
            let value = match *key {
                "directIO" | "quiesce" | "encrypted" => "true",
                "onOutage" => "fail",
                "fsck" => "never",
                _ => "4096",
            };
            assert!(Attributes::parse(&map(&[(key, value)])).is_ok(), "{key}");
        }
    }
}
