//! The labels of a volume of this driver: for which request it was made, and its parameters.

use std::collections::BTreeMap;

use cleat_backend::store::{Info, Labels};
use cleat_core::error::{Error, ErrorKind, Result};

use super::names;

/// The name in the request.
const NAME: &str = "csi.name";

/// The name in the storage. It differs from that of the volume if a file was copied with its labels.
const STORED: &str = "csi.stored";

/// The size that the volume was made with, in bytes.
const SIZE: &str = "csi.size";

/// The parameters that do not change, as JSON.
const PARAMETERS: &str = "csi.parameters";

/// The id of the snapshot or of the volume that the volume was made from.
const SOURCE: &str = "csi.source";

/// The beginning of the labels of mutable parameters.
const MUTABLE: &str = "csi.mutable.";

/// The beginning of the labels with the names in the requests of snapshots whose name in the storage differs.
const SNAPSHOT: &str = "csi.snapshot.";

/// What the labels of a volume say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Made {
    /// The name in the request.
    pub(crate) name: String,
    /// The size that the volume was made with, in bytes.
    pub(crate) size: u64,
    pub(crate) parameters: BTreeMap<String, String>,
    /// The id of the snapshot or of the volume that the volume was made from.
    pub(crate) source: Option<String>,
    pub(crate) mutable: BTreeMap<String, String>,
}

impl Made {
    /// Reads the labels of a volume. Returns `None` for a volume that this driver did not make.
    pub(crate) fn read(info: &Info) -> Option<Self> {
        let labels = &info.labels;
        if labels.get(STORED) != Some(&info.name) {
            return None;
        }
        let mutable = labels.iter().filter_map(|(key, value)| {
            key.strip_prefix(MUTABLE).map(|key| (key.to_owned(), value.clone()))
        });
        Some(Self {
            name: labels.get(NAME)?.clone(),
            size: labels.get(SIZE)?.parse().ok()?,
            parameters: serde_json::from_str(labels.get(PARAMETERS)?).ok()?,
            source: labels.get(SOURCE).cloned(),
            mutable: mutable.collect(),
        })
    }

    /// Returns the labels of a new volume with the name `stored` in the storage, without those of mutable
    /// parameters: a volume is the same with others.
    pub(crate) fn labels(&self, stored: &str) -> Result<Labels> {
        let parameters = serde_json::to_string(&self.parameters).map_err(|error| {
            Error::new(ErrorKind::Internal, "cannot write parameters as JSON").with_source(error)
        })?;
        let source = self.source.as_ref().map(|source| (SOURCE, source.clone()));
        let labels = [
            (NAME, self.name.clone()),
            (STORED, stored.to_owned()),
            (SIZE, self.size.to_string()),
            (PARAMETERS, parameters),
        ];
        let labels = labels.into_iter().chain(source);
        Ok(labels.map(|(key, value)| (key.to_owned(), value)).collect())
    }
}

/// Returns the labels of mutable parameters.
pub(crate) fn of_mutable(parameters: &BTreeMap<String, String>) -> Labels {
    let labelled = |(key, value): (&String, &String)| (format!("{MUTABLE}{key}"), value.clone());
    parameters.iter().map(labelled).collect()
}

/// Returns the label with the name in the request of a snapshot, if its name in the storage differs from it.
pub(crate) fn of_snapshot(name: &str, stored: &str) -> Option<(String, String)> {
    (!names::is_plain(name)).then(|| (format!("{SNAPSHOT}{stored}"), name.to_owned()))
}

/// Returns the key of the label with the name in the request of a snapshot.
pub(crate) fn snapshot_key(stored: &str) -> String {
    format!("{SNAPSHOT}{stored}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::tests::map;

    #[test]
    fn labels_say_for_which_request_a_volume_was_made() {
        let made = Made {
            name: "a/b".to_owned(),
            size: 4096,
            parameters: map(&[("directory", "fast")]),
            source: Some("file/n/d/v@csi-s".to_owned()),
            mutable: BTreeMap::new(),
        };
        let labels = made.labels("a-b-1").unwrap();
        let info = Info { name: "a-b-1".to_owned(), labels, ..Info::default() };
        assert_eq!(Made::read(&info), Some(made.clone()));
        let mut changed = info.clone();
        changed.labels.extend(of_mutable(&map(&[("iops", "5")])));
        let mutable = map(&[("iops", "5")]);
        assert_eq!(Made::read(&changed), Some(Made { mutable, ..made }));
        // A copy of the file, and a volume of another program.
        assert_eq!(Made::read(&Info { name: "copy".to_owned(), ..info }), None);
        assert_eq!(Made::read(&Info { name: "other".to_owned(), ..Info::default() }), None);
    }

    #[test]
    fn only_a_snapshot_with_another_name_needs_a_label() {
        assert_eq!(of_snapshot("snapshot-1", "csi-snapshot-1"), None);
        let label = of_snapshot("a/b", "csi-a-b-1").unwrap();
        assert_eq!(label, (snapshot_key("csi-a-b-1"), "a/b".to_owned()));
    }
}
