//! ListVolumes, ControllerListVolumeHealth and ListSnapshots, in pages.
//!
//! A token is the id of the last entry of a page. The next page begins after it, also if that volume or snapshot
//! does not exist any more.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use cleat_backend::store::{Info, Snapshot};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::csi::v1 as csi;
use csi::list_volumes_response as volumes;

use super::Controller;
use super::access::holder;
use super::labels::Made;
use super::places::{Located, Place};
use super::published;
use super::refused::{Answer, Refused};
use super::snapshot_id::SnapshotId;
use super::snapshots::is_listed;
use super::walk::visit_place;
use crate::secrets::Secrets;
use crate::volume_id::VolumeId;

/// The beginnings of tokens, so that a token of one list is not valid in another one.
const VOLUMES: &str = "volume:";
const HEALTH: &str = "health:";
const SNAPSHOTS: &str = "snapshot:";

/// A page of a list.
pub(crate) struct Paged<T> {
    pub(crate) entries: Vec<T>,
    /// The token of the next page; empty if there is none.
    pub(crate) next_token: String,
}

/// Collects a page.
struct Collector<T> {
    limit: usize,
    entries: Vec<T>,
    /// The id of the last entry.
    last: String,
    more: bool,
}

impl<T> Collector<T> {
    /// Starts a page with at most `max_entries` entries; 0 stands for no limit.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a negative number.
    fn new(max_entries: i32) -> Result<Self> {
        let limit = usize::try_from(max_entries).map_err(|_| {
            let message = "the maximum number of entries is negative";
            Error::new(ErrorKind::InvalidArgument, message)
        })?;
        let limit = if limit == 0 { usize::MAX } else { limit };
        Ok(Self { limit, entries: Vec::new(), last: String::new(), more: false })
    }

    /// Adds an entry. Returns `Break` if the page was full before.
    fn add(&mut self, id: impl ToString, entry: impl FnOnce() -> T) -> ControlFlow<()> {
        if self.entries.len() == self.limit {
            self.more = true;
            return ControlFlow::Break(());
        }
        self.last = id.to_string();
        self.entries.push(entry());
        ControlFlow::Continue(())
    }

    fn finish(self, token: &str) -> Paged<T> {
        let next_token = if self.more { format!("{token}{}", self.last) } else { String::new() };
        Paged { entries: self.entries, next_token }
    }
}

/// Where a walk over the volumes begins.
struct Start {
    located: Located,
    /// Whether the walk contains this volume.
    inclusive: bool,
}

impl Controller {
    /// Lists the volumes that this driver has made.
    pub(crate) fn list_volumes(
        &self,
        max_entries: i32,
        token: &str,
    ) -> Answer<Paged<volumes::Entry>> {
        let mut page = Collector::new(max_entries)?;
        let start = self.start(token, VOLUMES)?;
        self.walk(start, &Secrets::default(), &mut |place, info| {
            let Some(made) = Made::read(info) else { return Ok(ControlFlow::Continue(())) };
            let id = place.id(&self.node, &info.name).to_string();
            let published_node_ids = self.publishing_nodes(&id, info);
            Ok(page.add(&id, || volumes::Entry {
                volume: Some(self.volume(place, info, &made)),
                status: Some(volumes::VolumeStatus { published_node_ids }),
            }))
        })?;
        Ok(page.finish(VOLUMES))
    }

    /// Lists the volumes that are not healthy.
    pub(crate) fn list_health(
        &self,
        max_entries: i32,
        token: &str,
        secrets: &Secrets,
    ) -> Answer<Paged<csi::VolumeHealth>> {
        let mut page = Collector::new(max_entries)?;
        let start = self.start(token, HEALTH)?;
        self.walk(start, secrets, &mut |place, info| {
            let volume_id = place.id(&self.node, &info.name).to_string();
            let health_statuses = self.local.health(&volume_id).unwrap_or_default();
            if health_statuses.is_empty() || Made::read(info).is_none() {
                return Ok(ControlFlow::Continue(()));
            }
            let id = volume_id.clone();
            Ok(page.add(id, || csi::VolumeHealth { volume_id, health_statuses }))
        })?;
        Ok(page.finish(HEALTH))
    }

    /// Lists the snapshots that a request chooses.
    pub(crate) fn chosen_snapshots(
        &self,
        request: &csi::ListSnapshotsRequest,
        secrets: &Secrets,
    ) -> Answer<Paged<csi::Snapshot>> {
        let (max_entries, token) = (request.max_entries, &*request.starting_token);
        let none = || -> Answer<Paged<csi::Snapshot>> {
            Ok(Collector::new(max_entries)?.finish(SNAPSHOTS))
        };
        let source = &*request.source_volume_id;
        if !request.snapshot_id.is_empty() {
            let Some(id) = SnapshotId::parse(&request.snapshot_id) else { return none() };
            if !source.is_empty() && source != id.volume.to_string() {
                return none();
            }
            let mut page = Collector::new(max_entries)?;
            match self.get_snapshot(&id, secrets) {
                Ok(found) => {
                    let _: ControlFlow<()> = page.add(&id, || found);
                }
                Err(refused) if refused.error().kind() == ErrorKind::NotFound => {}
                Err(refused) => return Err(refused),
            }
            return Ok(page.finish(SNAPSHOTS));
        }
        let source = match source {
            "" => None,
            source => match VolumeId::parse(source) {
                None => return none(),
                found => found,
            },
        };
        self.list_snapshots(max_entries, token, source.as_ref(), secrets)
    }

    /// Lists the snapshots of all volumes, or of the volume `source`.
    pub(crate) fn list_snapshots(
        &self,
        max_entries: i32,
        token: &str,
        source: Option<&VolumeId>,
        secrets: &Secrets,
    ) -> Answer<Paged<csi::Snapshot>> {
        let mut page = Collector::new(max_entries)?;
        let last = match token.strip_prefix(SNAPSHOTS) {
            _ if token.is_empty() => None,
            id => Some(id.and_then(SnapshotId::parse).ok_or_else(Refused::invalid_token)?),
        };
        let mut visit = |place: &Place, info: &Info| -> Answer<ControlFlow<()>> {
            let volume = place.id(&self.node, &info.name);
            for snapshot in sorted(info) {
                let id = SnapshotId { volume: volume.clone(), snapshot: snapshot.name.clone() };
                let is_before =
                    |last: &SnapshotId| last.volume == id.volume && last.snapshot >= id.snapshot;
                if last.as_ref().is_some_and(is_before) {
                    continue;
                }
                let entry = || self.snapshot(place, &info.name, snapshot);
                if page.add(id.to_string(), entry).is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
            Ok(ControlFlow::Continue(()))
        };
        if let Some(source) = source {
            let Located { place, name } = self.locate(source)?;
            if let Some(info) = self.open(&place, secrets)?.find(&name)? {
                let _: ControlFlow<()> = visit(&place, &info)?;
            }
        } else {
            let start = match &last {
                Some(last) => {
                    Some(Start { located: self.position(&last.volume)?, inclusive: true })
                }
                None => None,
            };
            self.walk(start, secrets, &mut visit)?;
        }
        Ok(page.finish(SNAPSHOTS))
    }

    /// Returns the nodes that may use a volume: those to which it is published, the one with its claim, and this
    /// one if it has mapped the volume.
    pub(crate) fn publishing_nodes(&self, id: &str, info: &Info) -> Vec<String> {
        let here = self.local.health(id).map(|_| self.node.clone());
        let published = published::nodes(info).map(str::to_owned);
        let all: BTreeSet<String> = published.chain(holder(info)).chain(here).collect();
        all.into_iter().collect()
    }

    /// Parses the token of a list of volumes.
    fn start(&self, token: &str, beginning: &str) -> Answer<Option<Start>> {
        if token.is_empty() {
            return Ok(None);
        }
        let id = token.strip_prefix(beginning).and_then(VolumeId::parse);
        let id = id.ok_or_else(Refused::invalid_token)?;
        Ok(Some(Start { located: self.position(&id)?, inclusive: false }))
    }

    /// Returns the place of a list in which a token points to `id`.
    fn position(&self, id: &VolumeId) -> Answer<Located> {
        let located = self.locate(id).map_err(|_| Refused::invalid_token())?;
        if !self.places()?.contains(&located.place) {
            return Err(Refused::invalid_token());
        }
        Ok(located)
    }

    /// Visits the volumes of all configured places in order, until `visit` returns `Break`. A volume that cannot
    /// be described is left out, with a warning.
    fn walk(
        &self,
        start: Option<Start>,
        secrets: &Secrets,
        visit: &mut dyn FnMut(&Place, &Info) -> Answer<ControlFlow<()>>,
    ) -> Answer<()> {
        let begin = start.as_ref().map(|start| &start.located);
        for place in self.places()? {
            if begin.is_some_and(|begin| place < begin.place) {
                continue;
            }
            let open = match self.open(&place, secrets) {
                Ok(open) => open,
                // The directory or the pool does not exist yet.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error.into()),
            };
            let begin = start.as_ref().filter(|start| start.located.place == place);
            if let Some(Start { located, inclusive: true }) = begin
                && let Some(info) = open.find(&located.name)?
                && visit(&place, &info)?.is_break()
            {
                return Ok(());
            }
            let after = begin.map(|start| start.located.name.clone());
            if visit_place(&place, &open, after, visit)?.is_break() {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Returns the snapshots of a volume in the order of their names, which is that of lists.
fn sorted(info: &Info) -> Vec<&Snapshot> {
    let mut snapshots: Vec<_> = info.snapshots.iter().filter(|found| is_listed(found)).collect();
    snapshots.sort_by(|a, b| a.name.cmp(&b.name));
    snapshots
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::tests::controller;

    #[test]
    fn pages_end_at_their_limit_and_name_the_last_entry() {
        let mut page = Collector::new(2).unwrap();
        assert!(page.add("a", || 1).is_continue());
        assert!(page.add("b", || 2).is_continue());
        assert!(page.add("c", || 3).is_break());
        let page = page.finish(VOLUMES);
        assert_eq!((page.entries, &*page.next_token), (vec![1, 2], "volume:b"));
        let mut all = Collector::new(0).unwrap();
        assert!((0..1000).all(|number| all.add(number, || number).is_continue()));
        assert_eq!(all.finish(VOLUMES).next_token, "");
        assert!(Collector::<u8>::new(-1).is_err());
    }

    #[test]
    fn tokens_that_this_list_did_not_make_are_invalid() {
        let directory = tempfile::tempdir().unwrap();
        let controller = controller(&directory);
        assert!(controller.start("", VOLUMES).unwrap().is_none());
        assert!(controller.start("volume:file/n1/fast/a", VOLUMES).unwrap().is_some());
        for token in [
            "invalid-token",
            "volume:",
            "volume:fake",
            "health:file/n1/fast/a",
            "volume:file/n2/fast/a",
            "volume:file/n1/none/a",
            "volume:rbd/c1/other//a",
        ] {
            let refused = controller.start(token, VOLUMES).err().unwrap();
            assert_eq!(refused.code(), tonic::Code::Aborted, "{token}");
        }
    }
}
