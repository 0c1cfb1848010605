//! The ids of group snapshots, and the names of their snapshots.
//!
//! All snapshots of a group have the same name, each in its volume. It contains the name of the request and a hash
//! of the ids of the volumes, so that it says to which group a snapshot belongs, and a list of snapshots can be
//! compared with the group. The id of the group is `group/` and this name.

use percent_encoding::{percent_decode_str, utf8_percent_encode};

use super::names;
use crate::volume_id::{ENCODED, VolumeId};

/// The beginning of an id.
const SCHEME: &str = "group/";

/// The number of digits of the hash.
const HASH: usize = 16;

/// A group snapshot of this driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupId {
    /// The part of the name that follows from the name of the request.
    name: String,
    /// The hash of the ids of the volumes.
    hash: String,
}

impl GroupId {
    /// Returns the id of the group that a request with the name `name` makes of `volumes`, in any order.
    pub(crate) fn new(name: &str, volumes: &[VolumeId]) -> Self {
        Self { name: names::of_group(name), hash: hash(volumes) }
    }

    /// Parses an id. Returns `None` for an id that the driver did not make.
    pub(crate) fn parse(id: &str) -> Option<Self> {
        let snapshot = percent_decode_str(id.strip_prefix(SCHEME)?).decode_utf8().ok()?;
        // One group has one id.
        Self::of_snapshot(&snapshot).filter(|parsed| parsed.to_string() == id)
    }

    /// Returns the group of the snapshot with the name `snapshot`; `None` for a snapshot of its own.
    pub(crate) fn of_snapshot(snapshot: &str) -> Option<Self> {
        let (name, hash) = snapshot.strip_prefix(names::GROUP)?.rsplit_once('-')?;
        let is_hash = hash.len() == HASH && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        (is_hash && !name.is_empty()).then(|| Self { name: name.to_owned(), hash: hash.to_owned() })
    }

    /// Returns the name of each snapshot of the group.
    pub(crate) fn snapshot(&self) -> String {
        format!("{}{}-{}", names::GROUP, self.name, self.hash)
    }

    /// Returns the name of a snapshot that is taken and may not be of the same moment as the others.
    pub(crate) fn unfinished_snapshot(&self) -> String {
        format!("{}{}-{}", names::UNFINISHED_GROUP, self.name, self.hash)
    }

    /// Returns whether `other` is a group of other volumes with the same name.
    pub(crate) fn conflicts_with(&self, other: &Self) -> bool {
        self.name == other.name && self.hash != other.hash
    }

    /// Returns whether the group has exactly these volumes.
    pub(crate) fn is_of(&self, volumes: &[VolumeId]) -> bool {
        hash(volumes) == self.hash
    }
}

/// Prints the id.
impl std::fmt::Display for GroupId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{SCHEME}{}", utf8_percent_encode(&self.snapshot(), ENCODED))
    }
}

fn hash(volumes: &[VolumeId]) -> String {
    let mut ids: Vec<String> = volumes.iter().map(VolumeId::to_string).collect();
    ids.sort_unstable();
    // No id contains a line feed.
    names::short_hash(ids.join("\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn image(image: &str) -> VolumeId {
        let (cluster, pool) = ("c".to_owned(), "p".to_owned());
        VolumeId::Rbd { cluster, pool, namespace: String::new(), image: image.to_owned() }
    }

    #[test]
    fn a_group_is_the_same_for_the_same_volumes_in_any_order() {
        let (a, b, c) = (image("a"), image("b"), image("c"));
        let group = GroupId::new("g", &[a.clone(), b.clone()]);
        assert_eq!(group, GroupId::new("g", &[b.clone(), a.clone()]));
        assert!(group.is_of(&[b.clone(), a.clone()]) && !group.is_of(std::slice::from_ref(&a)));
        let other = GroupId::new("g", &[a.clone(), c]);
        assert!(group.conflicts_with(&other) && !group.conflicts_with(&group));
        assert!(!group.conflicts_with(&GroupId::new("h", &[a, b])));
    }

    /// Groups that exist have these names.
    #[test]
    fn names_in_the_storage_never_change() {
        let volumes = [image("a"), image("b")];
        let group = GroupId::new("groupsnapshot-1", &volumes);
        assert_eq!(group.snapshot(), "csigroup-groupsnapshot-1-813ee45eb8d122b9");
        assert_eq!(group.to_string(), "group/csigroup-groupsnapshot-1-813ee45eb8d122b9");
        assert!(names::is_step(&group.unfinished_snapshot()));
        // A name that is not plain never has the stored name of one that is.
        let stored = GroupId::new("a/b", &volumes).snapshot();
        assert_eq!(stored, "csigroup--a-b-c14cddc033f64b9d-813ee45eb8d122b9");
    }

    #[test]
    fn other_texts_are_no_ids() {
        for other in ["", "fake", "group/", "group/csigroup-g", "group/csigroup--813ee45eb8d122b9"]
        {
            assert_eq!(GroupId::parse(other), None, "{other}");
        }
        for other in ["csi-g", "csigroup-g-b1ab", "csigroupnew-g-813ee45eb8d122b9"] {
            assert_eq!(GroupId::of_snapshot(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn every_id_survives_the_round_trip(name in ".{1,200}") {
            let group = GroupId::new(&name, &[image("a")]);
            prop_assert_eq!(GroupId::parse(&group.to_string()), Some(group.clone()));
            prop_assert_eq!(GroupId::of_snapshot(&group.snapshot()), Some(group.clone()));
            prop_assert_eq!(VolumeId::parse(&group.to_string()), None);
        }
    }
}
