//! Labels of images, and the free space of a pool.
//!
//! All labels of an image are one entry of its metadata, so that a change takes effect as a whole. librbd copies
//! the metadata of a parent to its clones; the entry therefore names its image.

use librbd::{Image, Open};
use serde::{Deserialize, Serialize};

use super::{RbdStore, Target, answer, pool_error, with_timeout};
use crate::spec::RbdSpec;
use crate::timeouts::CALL_TIMEOUT;
use cleat_backend::store::{LabelStore, Labels, Layout, changed_labels, label_differences};
use cleat_core::error::{Error, ErrorKind, Result};

/// The metadata key.
const KEY: &str = "cleat.labels";

/// The value of the entry. Unknown fields are ignored when reading, and are lost with the next change.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    /// The id of the image.
    image: String,
    labels: Labels,
}

/// Reads the labels of `image`. The entry of another image, which this one is a clone of, counts as none.
///
/// # Errors
/// Returns the library's error. The inner error is that of an entry that is not valid JSON.
pub(crate) fn read(image: &Image) -> librbd::Result<Result<Labels, serde_json::Error>> {
    let Some(text) = image.metadata_get(KEY)? else { return Ok(Ok(Labels::new())) };
    let id = image.id()?;
    Ok(parse(&text, &id))
}

fn parse(text: &str, id: &str) -> Result<Labels, serde_json::Error> {
    let entry: Entry = serde_json::from_str(text)?;
    Ok(if entry.image == id { entry.labels } else { Labels::new() })
}

impl LabelStore for RbdStore {
    fn set(&self, name: &str, changes: &Labels) -> Result<bool> {
        let changes = changes.clone();
        self.call(name, None, move |target| {
            let image = target.open(Open::Write)?;
            let is = target.labels(&image)?;
            let labels = changed_labels(&is, &changes)?;
            if labels == is {
                return Ok(false);
            }
            target.label(&image, labels).map(|()| true)
        })
    }
}

impl Target {
    /// Creates an image, and stores its labels.
    pub(crate) fn create_labelled(&self, size: u64, layout: &Layout) -> Result<bool> {
        self.labelled(&layout.labels, || self.create(size, layout))
    }

    /// Creates a clone, and stores its labels.
    pub(crate) fn clone_labelled(&self, parent: &RbdSpec, layout: Layout) -> Result<bool> {
        let labels = layout.labels.clone();
        self.labelled(&labels, || self.clone_of(parent, layout))
    }

    /// Runs `create`, which returns whether it has created the image, and stores the labels of the image.
    fn labelled(&self, wanted: &Labels, create: impl FnOnce() -> Result<bool>) -> Result<bool> {
        let wanted = changed_labels(&Labels::new(), wanted)?;
        let created = create()?;
        if wanted.is_empty() {
            return Ok(created);
        }
        let image = self.open(Open::Write)?;
        if created {
            return self.label(&image, wanted).map(|()| true);
        }
        self.adopt(&image, wanted)
    }

    /// Labels an image whose creation was interrupted before it had labels. Returns whether it has been labelled.
    ///
    /// # Errors
    /// Returns `AlreadyExists` if the image has other labels, or data or snapshots without labels, and `InUse` if
    /// a client uses an image without labels.
    fn adopt(&self, image: &Image, wanted: Labels) -> Result<bool> {
        let failed = |error| self.failed(error);
        let is = self.labels(image)?;
        let differences = label_differences(&is, &wanted);
        if differences.is_empty() {
            return Ok(false);
        }
        let exists = |with: String| {
            Error::new(ErrorKind::AlreadyExists, format!("{} exists with {with}", self.name))
                .with_repair("use another name, or remove the image")
        };
        if !is.is_empty() {
            return Err(exists(differences.join("; ")));
        }
        self.check_unused(image)?;
        let has_snapshots = !image.snapshots().map_err(failed)?.is_empty();
        if has_snapshots || image.used().map_err(failed)? != 0 {
            return Err(exists("data and without labels: another program made it".to_owned()));
        }
        self.label(image, wanted).map(|()| true)
    }

    fn labels(&self, image: &Image) -> Result<Labels> {
        read(image).map_err(|error| self.failed(error))?.map_err(|error| {
            let message = format!("the labels of {} are not valid JSON", self.name);
            Error::new(ErrorKind::Internal, message)
                .with_repair(format!("look at them: rbd image-meta get {} {KEY}", self.name))
                .with_source(error)
        })
    }

    /// Replaces the labels of an image, which another client may have locked.
    fn label(&self, image: &Image, labels: Labels) -> Result<()> {
        let entry = Entry { image: image.id().map_err(|error| self.failed(error))?, labels };
        let text = serde_json::to_string(&entry).map_err(|error| {
            Error::new(ErrorKind::Internal, "cannot write labels as JSON").with_source(error)
        })?;
        image.metadata_put(KEY, &text).map_err(|error| self.failed(error))
    }
}

/// What is read of the answer of `ceph df --format json`.
#[derive(Debug, Deserialize)]
struct Usage {
    #[serde(default)]
    pools: Vec<PoolUsage>,
}

#[derive(Debug, Deserialize)]
struct PoolUsage {
    name: String,
    stats: PoolStatistics,
}

#[derive(Debug, Deserialize)]
struct PoolStatistics {
    /// The bytes that clients can still write, as the monitors estimate them: the redundancy of the pool and the
    /// fullest OSD are taken into account.
    max_avail: u64,
}

impl RbdStore {
    /// Returns the bytes that can still be written to the pool, as `ceph df` shows them.
    pub(crate) fn pool_space(&self) -> Result<Option<u64>> {
        let store = self.clone();
        with_timeout(CALL_TIMEOUT, &answer(self.spec.pool()), move || {
            let command = r#"{"prefix":"df","format":"json"}"#;
            let answer = store.pool.cluster().monitor_command(command);
            let answer = answer.map_err(|error| pool_error(error, store.spec.client()))?;
            space(&answer, store.spec.pool())
        })
    }
}

fn space(answer: &str, pool: &str) -> Result<Option<u64>> {
    let usage: Usage = serde_json::from_str(answer).map_err(|error| {
        let message = "the monitors' list of pools (ceph df) is not valid JSON";
        Error::new(ErrorKind::Internal, message).with_source(error)
    })?;
    Ok(usage.pools.iter().find(|usage| usage.name == pool).map(|usage| usage.stats.max_avail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_labels_of_a_parent_are_not_those_of_its_clones() {
        let labels = Labels::from([("csi.name".to_owned(), "a".to_owned())]);
        let entry = Entry { image: "1234".to_owned(), labels: labels.clone() };
        let text = serde_json::to_string(&entry).unwrap();
        assert_eq!(parse(&text, "1234").unwrap(), labels);
        assert_eq!(parse(&text, "5678").unwrap(), Labels::new());
        assert!(parse("{}", "1234").is_err());
    }

    #[test]
    fn the_space_is_that_of_the_pool() {
        let answer = r#"{"stats":{"total_bytes":9},"pools":[
            {"name":"a","id":1,"stats":{"stored":5,"max_avail":7}},
            {"name":"b","id":2,"stats":{"stored":5,"max_avail":8}}]}"#;
        assert_eq!(space(answer, "b").unwrap(), Some(8));
        assert_eq!(space(answer, "c").unwrap(), None);
        assert!(space("[", "b").is_err());
    }
}
