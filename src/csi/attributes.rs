//! The attributes of a volume (`volumeAttributes` of a PersistentVolume, from the parameters of its
//! StorageClass), in the words of ceph-csi where it has one.

use std::collections::BTreeMap;
use std::str::FromStr;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy;

use crate::host::CheckPolicy;

/// The attributes that this driver reads, with their meaning. Errors list them.
const KNOWN: [(&str, &str); 15] = [
    ("uri", "the URI of a static volume"),
    ("staticVolume", "\"true\" if the volume handle is the name of an RBD image"),
    ("clusterID", "the cluster, as in the file of clusters"),
    ("pool", "the pool of an RBD image"),
    ("radosNamespace", "the namespace in the pool"),
    ("imageName", "the name of a static image, if it is not the volume handle"),
    ("directIO", "\"true\": a file volume bypasses the page cache"),
    ("quiesce", "\"true\": filesystems are frozen while a snapshot is made"),
    ("onOutage", "what requests do while the backend is unreachable: queue, queue:TIME, fail"),
    ("iops", "the limit of requests per second"),
    ("bps", "the limit of bytes per second"),
    ("connections", "the connections between the kernel and the worker"),
    ("blockSize", "the block size of the device in bytes"),
    ("fsck", "how filesystems are checked before a mount: preen, full, never"),
    ("encrypted", "\"true\": the volume is encrypted with encryptionPassphrase of its secret"),
];

/// Attributes for other programs: they are accepted and ignored.
const FOREIGN_PREFIXES: [&str; 2] = ["csi.storage.k8s.io/", "storage.kubernetes.io/"];

/// Attributes of ceph-csi that matter only when an image is created.
const CREATION: [&str; 11] = [
    "dataPool",
    "imageFeatures",
    "imageFormat",
    "journalPool",
    "mounter",
    "mapOptions",
    "unmapOptions",
    "stripeCount",
    "stripeUnit",
    "objectSize",
    "volumeNamePrefix",
];

/// The field of the publish context with the generation of the grant.
const GENERATION: &str = "generation";

/// The field of the publish context that says that the node may only read.
pub(crate) const READ_ONLY: &str = "readOnly";

/// The attributes of a volume.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Attributes {
    pub(crate) uri: Option<String>,
    pub(crate) static_volume: bool,
    pub(crate) cluster: Option<String>,
    pub(crate) pool: Option<String>,
    pub(crate) namespace: Option<String>,
    pub(crate) image: Option<String>,
    pub(crate) direct_io: bool,
    pub(crate) quiesce: bool,
    pub(crate) policy: policy::Change,
    pub(crate) connections: u32,
    pub(crate) block_size: u32,
    pub(crate) check: CheckPolicy,
    pub(crate) encrypted: bool,
    /// The generation of the grant with which the controller has published the volume; 0 without one.
    pub(crate) generation: u64,
    /// Whether the controller has published the volume for reading only.
    pub(crate) read_only: bool,
}

impl Attributes {
    /// Parses the attributes of a request.
    ///
    /// # Errors
    /// Returns `InvalidArgument`, with the known attributes, for an unknown attribute or an invalid value.
    pub(crate) fn parse(context: &BTreeMap<String, String>) -> Result<Self> {
        let mut attributes = Self::default();
        for (key, value) in context {
            if !attributes.set(key, value)? {
                return Err(unknown(key));
            }
        }
        Ok(attributes)
    }

    /// Parses the attributes of a request, and those that the controller has added when it published the volume.
    /// These are the newer ones.
    ///
    /// # Errors
    /// Fails as [`Attributes::parse`] does.
    pub(crate) fn parse_published(
        context: &BTreeMap<String, String>,
        published: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let mut all = context.clone();
        all.extend(published.clone());
        let generation = published.get(GENERATION).map(|value| parsed(GENERATION, value));
        if generation.is_some() {
            all.remove(GENERATION);
        }
        let generation = generation.transpose()?.unwrap_or_default();
        let read_only = published.get(READ_ONLY).map(|value| flag(READ_ONLY, value)).transpose()?;
        if read_only.is_some() {
            all.remove(READ_ONLY);
        }
        let read_only = read_only.unwrap_or_default();
        Ok(Self { generation, read_only, ..Self::parse(&all)? })
    }

    /// Stores one attribute. Returns whether it is known.
    fn set(&mut self, key: &str, value: &str) -> Result<bool> {
        let text = || Some(value.to_owned()).filter(|value| !value.is_empty());
        match key {
            "uri" => self.uri = text(),
            "staticVolume" => self.static_volume = flag(key, value)?,
            "clusterID" => self.cluster = text(),
            "pool" => self.pool = text(),
            "radosNamespace" => self.namespace = text(),
            "imageName" => self.image = text(),
            "directIO" => self.direct_io = flag(key, value)?,
            "quiesce" => self.quiesce = flag(key, value)?,
            "onOutage" => self.policy.outage = Some(parsed(key, value)?),
            "iops" => self.policy.iops = Some(parsed(key, value)?),
            "bps" => self.policy.bytes_per_s = Some(size(key, value)?),
            "connections" => self.connections = parsed(key, value)?,
            "blockSize" => self.block_size = parsed(key, value)?,
            "fsck" => self.check = parsed(key, value)?,
            "encrypted" => self.encrypted = flag(key, value)?,
            "encryptionType" if value != "block" && !value.is_empty() => {
                return Err(invalid(format!("the attribute {key} can only be \"block\"")));
            }
            "encryptionKMSID" if !value.is_empty() => {
                let message = format!("the attribute {key} is not supported");
                return Err(invalid(message).with_repair(
                    "store the passphrase as encryptionPassphrase in the secret of the volume",
                ));
            }
            "encryptionType" | "encryptionKMSID" => {}
            _ => {
                return Ok(CREATION.contains(&key)
                    || FOREIGN_PREFIXES.iter().any(|prefix| key.starts_with(prefix)));
            }
        }
        Ok(true)
    }
}

fn unknown(key: &str) -> Error {
    let known: Vec<String> =
        KNOWN.iter().map(|(key, meaning)| format!("{key} ({meaning})")).collect();
    let shown: String = key.chars().take(60).collect();
    invalid(format!(
        "{shown:?} is not an attribute of a volume; the attributes are {}",
        known.join(", ")
    ))
    .with_repair(
        "correct the parameters of the StorageClass, or the volumeAttributes of the volume",
    )
}

fn flag(key: &str, value: &str) -> Result<bool> {
    match value {
        "true" => Ok(true),
        "false" | "" => Ok(false),
        _ => Err(invalid(format!("the attribute {key} must be \"true\" or \"false\""))),
    }
}

fn size(key: &str, value: &str) -> Result<u64> {
    cleat_backend::uri::parse_size_or_zero(value).map_err(|error| refused(key, &error))
}

fn parsed<T: FromStr>(key: &str, value: &str) -> Result<T>
where
    T::Err: std::fmt::Display,
{
    value.parse().map_err(|error| refused(key, &error))
}

fn refused(key: &str, error: &dyn std::fmt::Display) -> Error {
    invalid(format!("the attribute {key} is invalid: {error}"))
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Attributes> {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Attributes::parse(&pairs.collect())
    }

    #[test]
    fn the_attributes_of_a_ceph_csi_volume_are_accepted() {
        let attributes = parse(&[
            ("clusterID", "rook-ceph"),
            ("pool", "replicapool"),
            ("imageFeatures", "layering"),
            ("journalPool", "replicapool"),
            ("csi.storage.k8s.io/pv/name", "pvc-1"),
            ("storage.kubernetes.io/csiProvisionerIdentity", "1-2-x"),
            ("onOutage", "queue:30s"),
            ("iops", "500"),
            ("bps", "10M"),
            ("fsck", "full"),
        ])
        .unwrap();
        assert_eq!(attributes.cluster.as_deref(), Some("rook-ceph"));
        assert_eq!(attributes.policy.iops, Some(500));
        assert_eq!(attributes.policy.bytes_per_s, Some(10 << 20));
        assert_eq!(attributes.check, CheckPolicy::Full);
    }

    #[test]
    fn what_the_controller_publishes_replaces_attributes() {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let context = [pair("iops", "1"), pair("fsck", "full")].into();
        let attributes =
            Attributes::parse_published(&context, &[pair("iops", "2")].into()).unwrap();
        assert_eq!((attributes.policy.iops, attributes.check), (Some(2), CheckPolicy::Full));
    }

    #[test]
    fn an_unknown_attribute_is_refused_with_the_known_ones() {
        let error = parse(&[("poolName", "x")]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains("\"poolName\"") && error.message().contains("pool ("));
    }

    #[test]
    fn invalid_values_name_their_attribute() {
        for (key, value) in [
            ("iops", "-1"),
            ("bps", "much"),
            ("quiesce", "yes"),
            ("onOutage", "later"),
            ("fsck", "sometimes"),
            ("connections", "1.5"),
        ] {
            let error = parse(&[(key, value)]).unwrap_err();
            assert!(error.message().contains(key), "{error}");
        }
    }

    #[test]
    fn every_known_attribute_is_read() {
        for (key, _) in KNOWN {
            assert!(Attributes::default().set(key, "").unwrap_or(true), "{key}");
        }
    }
}
