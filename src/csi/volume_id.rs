//! The ids of volumes, and the names of their mappings.
//!
//! The driver makes ids that contain all that is needed to find the volume: the backend, the place in it,
//! and the name there. Each part is percent-encoded, and `/` separates the parts.
//!
//! | id | volume |
//! |---|---|
//! | `file/NODE/DIRECTORY/NAME` | the file NAME in a directory of the node NODE |
//! | `rbd/CLUSTER/POOL/NAMESPACE/IMAGE` | an RBD image; NAMESPACE may be empty |
//! | `object/CLUSTER/NAME` | a volume on an object store |
//!
//! Every other id is that of a static volume, which its attributes describe.

use cleat_core::error::{Error, ErrorKind, Result};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// The maximum length of an id in bytes: that of every text in a CSI message.
const MAX_ID: usize = 1024;

/// The characters of a part that are not encoded.
pub(crate) const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');

/// What an id of the driver says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeId {
    /// A file in a directory of a node.
    File {
        /// The node.
        node: String,
        /// The directory, as the configuration of the node names it.
        directory: String,
        /// The name of the file.
        name: String,
    },
    /// An RBD image.
    Rbd {
        /// The cluster, as the file of clusters names it.
        cluster: String,
        /// The pool.
        pool: String,
        /// The namespace in the pool; it may be empty.
        namespace: String,
        /// The image.
        image: String,
    },
    /// A volume on an object store.
    Object {
        /// The store, as the file of clusters names it.
        cluster: String,
        /// The name of the volume.
        name: String,
    },
}

impl VolumeId {
    /// Parses an id. Returns `None` for an id that the driver did not make.
    pub fn parse(id: &str) -> Option<Self> {
        let decoded = |part: &str| percent_decode_str(part).decode_utf8().ok().map(Into::into);
        let parts: Vec<String> = id.split('/').map(decoded).collect::<Option<_>>()?;
        let parsed = match &parts[..] {
            [scheme, node, directory, name] if scheme == "file" => {
                Self::File { node: node.clone(), directory: directory.clone(), name: name.clone() }
            }
            [scheme, cluster, pool, namespace, image] if scheme == "rbd" => Self::Rbd {
                cluster: cluster.clone(),
                pool: pool.clone(),
                namespace: namespace.clone(),
                image: image.clone(),
            },
            [scheme, cluster, name] if scheme == "object" => {
                Self::Object { cluster: cluster.clone(), name: name.clone() }
            }
            _ => return None,
        };
        // One volume has one id: other encodings of the same text are not ids of the driver.
        (parsed.to_string() == id && parsed.is_complete()).then_some(parsed)
    }

    /// Returns the id of the volume `name` in the same place.
    #[must_use]
    pub fn beside(&self, name: &str) -> Self {
        let mut id = self.clone();
        match &mut id {
            Self::File { name: own, .. }
            | Self::Rbd { image: own, .. }
            | Self::Object { name: own, .. } => name.clone_into(own),
        }
        id
    }

    fn is_complete(&self) -> bool {
        let parts = match self {
            Self::File { node, directory, name } => &[node, directory, name][..],
            Self::Rbd { cluster, pool, image, .. } => &[cluster, pool, image],
            Self::Object { cluster, name } => &[cluster, name],
        };
        parts.iter().all(|part| !part.is_empty())
    }
}

/// Prints the id.
impl std::fmt::Display for VolumeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let part = |text| utf8_percent_encode(text, ENCODED);
        match self {
            Self::File { node, directory, name } => {
                write!(f, "file/{}/{}/{}", part(node), part(directory), part(name))
            }
            Self::Rbd { cluster, pool, namespace, image } => {
                let (cluster, pool) = (part(cluster), part(pool));
                write!(f, "rbd/{cluster}/{pool}/{}/{}", part(namespace), part(image))
            }
            Self::Object { cluster, name } => {
                write!(f, "object/{}/{}", part(cluster), part(name))
            }
        }
    }
}

/// Checks the id in a request.
///
/// # Errors
/// Returns `InvalidArgument` if it is empty, too long or contains control characters.
pub(crate) fn checked(id: &str) -> Result<&str> {
    let invalid = |message: String| Err(Error::new(ErrorKind::InvalidArgument, message));
    if id.is_empty() {
        return invalid("the request has no volume id".to_owned());
    }
    if id.len() > MAX_ID || id.chars().any(char::is_control) {
        return invalid(format!(
            "the volume id is longer than {MAX_ID} bytes or contains control characters"
        ));
    }
    Ok(id)
}

/// The beginning of the names of this driver's mappings.
pub const PREFIX: &str = "csi-";

/// Returns the name of the mapping of a volume: readable, and different for different ids.
pub fn mapping_name(id: &str) -> String {
    const READABLE: usize = 56;
    let last = id.rsplit('/').find(|part| !part.is_empty()).unwrap_or_default();
    let readable: String = last
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' })
        .take(READABLE)
        .collect();
    let hash = hmac_sha256::Hash::hash(id.as_bytes());
    let hash: String = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{PREFIX}{readable}-{hash}")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ids_of_the_driver_and_of_others() {
        let id = "file/node-1/fast/pvc-0b1c";
        let file = VolumeId::parse(id).unwrap();
        assert_eq!(
            file,
            VolumeId::File {
                node: "node-1".into(),
                directory: "fast".into(),
                name: "pvc-0b1c".into()
            }
        );
        let VolumeId::Rbd { namespace, image, .. } =
            VolumeId::parse("rbd/c1/volumes//a%2Fb").unwrap()
        else {
            panic!("an RBD image")
        };
        assert_eq!((namespace.as_str(), image.as_str()), ("", "a/b"));
        let object = VolumeId::Object { cluster: "s3".into(), name: "a b".into() };
        assert_eq!(VolumeId::parse("object/s3/a%20b"), Some(object));
        for other in [
            "",
            "fake-vol-id",
            "file/n/d",
            "rbd/c/p/n/i/x",
            "file/n/%64/x",
            "rbd//p//i",
            "object/s3",
            "object//a",
            "object/s3/a/b",
        ] {
            assert_eq!(VolumeId::parse(other), None, "{other}");
        }
    }

    /// Volumes that are staged on running nodes have these names.
    #[test]
    fn names_of_mappings_never_change() {
        assert_eq!(mapping_name("static"), "csi-static-2053dbbf6ec7135c");
    }

    proptest! {
        #[test]
        fn every_id_survives_the_round_trip(
            cluster in ".{1,20}", pool in ".{1,20}", namespace in ".{0,20}", image in ".{1,20}"
        ) {
            let id = VolumeId::Rbd { cluster, pool, namespace, image };
            prop_assert_eq!(VolumeId::parse(&id.to_string()), Some(id));
        }

        #[test]
        fn any_text_gives_a_valid_name_of_a_mapping(id in ".{0,300}") {
            let name = mapping_name(&id);
            prop_assert!(name.len() <= 128, "{}", name);
            prop_assert!(name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)));
            prop_assert_eq!(VolumeId::parse(&id).is_some_and(|known| known.to_string() != id), false);
        }
    }
}
