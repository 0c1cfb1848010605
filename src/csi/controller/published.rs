//! Which volumes ControllerPublishVolume has permitted to which node, and whether only to read. It is stored as a
//! label of each volume, so that it is removed with the volume, and no other record can disagree with it.
//!
//! A node's labels are changed only by the controller in the process of that node. So this process knows the number
//! of its volumes after it has read the labels once, and reads them again before it refuses a volume.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use cleat_backend::store::{Info, Labels};
use cleat_core::error::{Error, ErrorKind, Result};

use super::Controller;
use super::places::{OpenPlace, Place};
use super::refused::Refused;
use super::walk::visit_place;
use crate::secrets::Secrets;

/// The beginning of the labels with the nodes that may use a volume.
const PUBLISHED: &str = "csi.published.";

/// The value of the label of a node that may read and write.
const READ_WRITE: &str = "rw";

/// The value of the label of a node that may only read.
const READ_ONLY: &str = "ro";

/// The ids of the volumes that are published to this node; `None` before they are read. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct PublishedHere(Arc<Mutex<Option<BTreeSet<String>>>>);

/// Returns the nodes to which a volume is published.
pub(crate) fn nodes(info: &Info) -> impl Iterator<Item = &str> {
    info.labels.keys().filter_map(|key| key.strip_prefix(PUBLISHED))
}

/// Returns whether a volume is published to `node`, and if it is, whether only for reading.
pub(crate) fn is_read_only(info: &Info, node: &str) -> Option<bool> {
    info.labels.get(&format!("{PUBLISHED}{node}")).map(|value| value == READ_ONLY)
}

impl Controller {
    /// Stores that `node`, this one, may use a volume. One that is published already as wanted is success.
    ///
    /// # Errors
    /// Returns `AlreadyExists` if the volume is published in the other mode, `NoSpace` if the node has as many volumes
    /// as it can have, and the errors of the storage.
    pub(crate) fn store_published(
        &self,
        id: &str,
        info: &Info,
        open: &OpenPlace,
        read_only: bool,
        secrets: &Secrets,
    ) -> Result<()> {
        match is_read_only(info, &self.node) {
            Some(is) if is == read_only => return Ok(()),
            Some(is) => {
                let shown = |read_only| if read_only { "read-only" } else { "read-write" };
                let (is, wanted) = (shown(is), shown(read_only));
                let message = format!(
                    "volume {id} is published to the node {} {is}, not {wanted}",
                    self.node
                );
                return Err(
                    Error::new(ErrorKind::AlreadyExists, message).with_repair("unpublish it first")
                );
            }
            None => {}
        }
        self.take_place(id, secrets)?;
        let mode = if read_only { READ_ONLY } else { READ_WRITE };
        let stored = self.label(info, open, &self.node, mode);
        if stored.is_err() {
            self.leave_place(id);
        }
        stored
    }

    /// Removes the permission of `node`, or of all nodes if `node` is empty.
    pub(crate) fn remove_published(
        &self,
        id: &str,
        info: &Info,
        open: &OpenPlace,
        node: &str,
    ) -> Result<()> {
        for other in nodes(info).filter(|other| node.is_empty() || *other == node) {
            self.label(info, open, other, "")?;
        }
        if node.is_empty() || node == self.node {
            self.leave_place(id);
        }
        Ok(())
    }

    fn label(&self, info: &Info, open: &OpenPlace, node: &str, value: &str) -> Result<()> {
        let change = Labels::from([(format!("{PUBLISHED}{node}"), value.to_owned())]);
        open.labels()?.set(&info.name, &change).map(drop)
    }

    /// Counts a volume of this node.
    ///
    /// # Errors
    /// Returns `NoSpace` if the node has as many volumes as it can have.
    fn take_place(&self, id: &str, secrets: &Secrets) -> Result<()> {
        let limit = self.local.attach_limit();
        let mut here = self.published.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Volumes can have been removed by others, so a full set is read again.
        let is_sure = here.as_ref().is_some_and(|ids| ids.contains(id) || ids.len() < limit);
        if !is_sure {
            *here = Some(self.read_published(secrets)?);
        }
        let ids = here.get_or_insert_default();
        if ids.len() >= limit && !ids.contains(id) {
            let message = format!(
                "the node {} can have {limit} volumes, and {} are published to it",
                self.node,
                ids.len()
            );
            return Err(Error::new(ErrorKind::NoSpace, message)
                .with_repair("unpublish others, or raise limits.mappings of the node's daemon"));
        }
        ids.insert(id.to_owned());
        Ok(())
    }

    /// Does not count a volume of this node any more.
    pub(crate) fn leave_place(&self, id: &str) {
        let mut here = self.published.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ids) = &mut *here {
            ids.remove(id);
        }
    }

    /// Reads the ids of the volumes that are published to this node. Those in places that the client of this call
    /// cannot read do not count.
    fn read_published(&self, secrets: &Secrets) -> Result<BTreeSet<String>> {
        let mut ids = BTreeSet::new();
        for place in self.places()? {
            let mut visit = |place: &Place, info: &Info| {
                if is_read_only(info, &self.node).is_some() {
                    ids.insert(place.id(&self.node, &info.name).to_string());
                }
                Ok(ControlFlow::Continue(()))
            };
            let open = self.open(&place, secrets).map_err(Refused::from);
            let read = open.and_then(|open| visit_place(&place, &open, None, &mut visit));
            if let Err(refused) = read {
                let report = refused.error().report();
                tracing::warn!("the published volumes in {place} do not count: {report}");
            }
        }
        Ok(ids)
    }
}
