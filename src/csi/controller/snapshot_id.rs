//! The ids of snapshots: the id of their volume, `@`, and their name in the storage, percent-encoded.

use percent_encoding::{percent_decode_str, utf8_percent_encode};

use crate::volume_id::{ENCODED, VolumeId};

/// A snapshot of a volume of this driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotId {
    pub(crate) volume: VolumeId,
    pub(crate) snapshot: String,
}

impl SnapshotId {
    /// Parses an id. Returns `None` for an id that the driver did not make.
    pub(crate) fn parse(id: &str) -> Option<Self> {
        let (volume, snapshot) = id.split_once('@')?;
        let snapshot = percent_decode_str(snapshot).decode_utf8().ok()?.into_owned();
        let parsed = Self { volume: VolumeId::parse(volume)?, snapshot };
        // One snapshot has one id.
        (!parsed.snapshot.is_empty() && parsed.to_string() == id).then_some(parsed)
    }
}

/// Prints the id.
impl std::fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.volume, utf8_percent_encode(&self.snapshot, ENCODED))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn other_texts_are_no_ids() {
        assert!(SnapshotId::parse("rbd/c1/volumes//image@csi-s1").is_some());
        for other in ["", "fake", "file/n/d/v", "file/n/d/v@", "fake@s", "file/n/d/v@%73", "@s"] {
            assert_eq!(SnapshotId::parse(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn every_id_survives_the_round_trip(
            node in ".{1,20}", directory in ".{1,20}", name in ".{1,20}", snapshot in ".{1,20}"
        ) {
            let volume = VolumeId::File { node, directory, name };
            let id = SnapshotId { volume: volume.clone(), snapshot };
            prop_assert_eq!(SnapshotId::parse(&id.to_string()), Some(id.clone()));
            // No id is that of a volume and of a snapshot.
            prop_assert_eq!(VolumeId::parse(&id.to_string()), None);
            prop_assert_eq!(SnapshotId::parse(&volume.to_string()), None);
        }
    }
}
