//! CreateVolumeGroupSnapshot, DeleteVolumeGroupSnapshot and GetVolumeGroupSnapshot.
//!
//! The steps of CreateVolumeGroupSnapshot:
//!
//! 1. All volumes are held: from then on, none of them changes.
//! 2. A snapshot of each volume is taken, under a name that marks it as unfinished.
//! 3. Each hold must have lasted until now, and ends. Otherwise the snapshots are removed.
//! 4. Each snapshot gets its final name.
//!
//! A repeated call continues at step 4 if a snapshot has its final name, because all of them had passed step 3 then.
//! Otherwise it removes what exists and begins again. No group is stored anywhere else: the callers of the other
//! calls list the snapshots, and the id of the group proves the list.

use cleat_backend::group_snapshot::Hold;
use cleat_backend::store::Snapshot;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::csi::v1 as csi;
use std::time::Duration;
use tokio::time::Instant;

use super::Controller;
use super::group_id::GroupId;
use super::places::{Located, OpenPlace, Place, on};
use super::refused::Answer;
use super::snapshot_id::SnapshotId;
use super::snapshots::check_volumes;
use super::volumes::missing;
use crate::secrets::Secrets;
use crate::volume_id::VolumeId;

/// The maximum number of volumes of a group. Each one is held until the snapshots of all are taken.
pub(crate) const MAX_VOLUMES: usize = 64;

/// How long the clients of the volumes may take to hold their requests.
const HOLD_TIMEOUT: Duration = Duration::from_secs(5);

/// A volume of a group.
struct Member {
    id: VolumeId,
    place: Place,
    name: String,
    open: OpenPlace,
}

/// How far a volume's snapshot of a group is.
enum Step {
    Nothing,
    Unfinished,
    Done(Snapshot),
}

impl Controller {
    /// Takes a snapshot of all volumes at the same moment, or finds those that an earlier call has taken.
    pub(crate) fn create_group(
        &self,
        name: &str,
        volumes: &[VolumeId],
        secrets: &Secrets,
        deadline: Instant,
    ) -> Answer<csi::VolumeGroupSnapshot> {
        let group = GroupId::new(name, volumes);
        let members = self.members(volumes, secrets)?;
        let steps = members.iter().map(|member| member.step(&group)).collect::<Result<Vec<_>>>()?;
        let is_checked = steps.iter().any(|step| matches!(step, Step::Done(_)));
        if !is_checked {
            self.check_name(&group, &members, secrets)?;
            for (member, step) in members.iter().zip(&steps) {
                if matches!(step, Step::Unfinished) {
                    member.remove(&group.unfinished_snapshot())?;
                }
            }
            take(&members, &group, deadline)?;
        } else if steps.iter().any(|step| matches!(step, Step::Nothing)) {
            let message =
                format!("the group snapshot {group} is incomplete: it was deleted in part");
            return Err(Error::new(ErrorKind::InUse, message)
                .with_repair("delete it, then repeat the call")
                .into());
        }
        for member in &members {
            let (from, to) = (group.unfinished_snapshot(), group.snapshot());
            member.open.group_snapshots()?.rename_snapshot(&member.name, &from, &to)?;
        }
        self.found_group(&group, &members)
    }

    /// Describes a group snapshot.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if `snapshots` are not those of the group, and `NotFound` if one of them does not
    /// exist.
    pub(crate) fn get_group(
        &self,
        group: &GroupId,
        snapshots: &[String],
        secrets: &Secrets,
    ) -> Answer<csi::VolumeGroupSnapshot> {
        let members = self.members(&volumes_of(group, snapshots)?, secrets)?;
        self.found_group(group, &members)
    }

    /// Removes a group snapshot. Snapshots that do not exist are success.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if `snapshots` are not those of the group.
    pub(crate) fn delete_group(
        &self,
        group: &GroupId,
        snapshots: &[String],
        secrets: &Secrets,
    ) -> Answer<()> {
        for volume in volumes_of(group, snapshots)? {
            let Located { place, name } = self.locate(&volume)?;
            match self.open(&place, secrets) {
                Ok(open) => open.snapshots()?.remove(&name, &group.snapshot())?,
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error.into()),
            };
        }
        Ok(())
    }

    /// Returns whether a storage is configured whose volumes can have group snapshots.
    pub(crate) async fn has_group_snapshots(&self) -> bool {
        let deadline = Instant::now() + HOLD_TIMEOUT;
        let places = |this: &Self| Ok(this.places()?.iter().any(|place| !place.is_local()));
        self.on_thread(deadline, places).await.unwrap_or_else(|refused| {
            tracing::warn!("group snapshots are not announced: {}", refused.error().report());
            false
        })
    }

    fn members(&self, volumes: &[VolumeId], secrets: &Secrets) -> Result<Vec<Member>> {
        let member = |id: &VolumeId| {
            let Located { place, name } = self.locate(id)?;
            let open = self.open(&place, secrets)?;
            open.group_snapshots()?;
            Ok(Member { id: id.clone(), place, name, open })
        };
        volumes.iter().map(member).collect()
    }

    /// Checks that no group of other volumes has the same name.
    fn check_name(&self, group: &GroupId, members: &[Member], secrets: &Secrets) -> Result<()> {
        let conflict = |snapshot: &str| {
            GroupId::of_snapshot(snapshot).is_some_and(|other| group.conflicts_with(&other))
        };
        let mut checked: Vec<&Place> = Vec::new();
        for member in members {
            if !checked.contains(&&member.place) {
                check_volumes(&member.open, None, &conflict)?;
                checked.push(&member.place);
            }
        }
        self.check_other_places(&checked, secrets, &conflict)
    }

    /// Returns a group in the form of the messages.
    fn found_group(&self, group: &GroupId, members: &[Member]) -> Answer<csi::VolumeGroupSnapshot> {
        let mut snapshots = Vec::with_capacity(members.len());
        for member in members {
            let Step::Done(found) = member.step(group)? else {
                let message = format!("the snapshot of {} in {group} does not exist", member.id);
                return Err(Error::new(ErrorKind::NotFound, message).into());
            };
            snapshots.push(self.snapshot(&member.place, &member.name, &found));
        }
        let first = snapshots.iter().filter_map(|snapshot| snapshot.creation_time);
        Ok(csi::VolumeGroupSnapshot {
            group_snapshot_id: group.to_string(),
            creation_time: first.min_by_key(|time| (time.seconds, time.nanos)),
            ready_to_use: true,
            snapshots,
        })
    }
}

impl Member {
    fn step(&self, group: &GroupId) -> Result<Step> {
        let found = match self.open.snapshots()?.list(&self.name) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(missing(&self.id)),
            found => found?,
        };
        let named = |name: String| move |snapshot: &&Snapshot| snapshot.name == name;
        if let Some(done) = found.iter().find(named(group.snapshot())) {
            return Ok(Step::Done(done.clone()));
        }
        let is_unfinished = found.iter().any(|found| found.name == group.unfinished_snapshot());
        Ok(if is_unfinished { Step::Unfinished } else { Step::Nothing })
    }

    fn remove(&self, snapshot: &str) -> Result<bool> {
        self.open.snapshots()?.remove(&self.name, snapshot)
    }
}

/// Takes unfinished snapshots at the same moment, or leaves none.
fn take(members: &[Member], group: &GroupId, deadline: Instant) -> Result<()> {
    let mut holds = Vec::with_capacity(members.len());
    let taken = take_held(members, group, deadline, &mut holds);
    for (hold, member) in holds.into_iter().zip(members) {
        if let Err(error) = hold.end() {
            tracing::warn!(volume = %member.id, "the hold ends by itself: {}", error.report());
        }
    }
    taken.inspect_err(|_| {
        for member in members {
            if let Err(error) = member.remove(&group.unfinished_snapshot()) {
                tracing::warn!(volume = %member.id, "a snapshot is left: {}", error.report());
            }
        }
    })
}

fn take_held(
    members: &[Member],
    group: &GroupId,
    deadline: Instant,
    holds: &mut Vec<Box<dyn Hold>>,
) -> Result<()> {
    for member in members {
        holds.push(member.open.group_snapshots()?.hold(&member.name)?);
    }
    let until = deadline.min(Instant::now() + HOLD_TIMEOUT).into_std();
    holds.iter().try_for_each(|hold| hold.wait(until))?;
    let snapshot = group.unfinished_snapshot();
    for member in members {
        member.open.snapshots()?.create(&member.name, &snapshot, &mut on)?;
    }
    holds.iter().try_for_each(|hold| hold.check())
}

/// Returns the volumes of the snapshots with these ids.
///
/// # Errors
/// Returns `InvalidArgument` if they are not exactly the snapshots of the group.
fn volumes_of(group: &GroupId, snapshots: &[String]) -> Result<Vec<VolumeId>> {
    let volume = |id: &String| {
        let parsed = SnapshotId::parse(id).filter(|parsed| parsed.snapshot == group.snapshot());
        parsed.map(|parsed| parsed.volume)
    };
    let volumes: Option<Vec<VolumeId>> = snapshots.iter().map(volume).collect();
    volumes.filter(|volumes| group.is_of(volumes)).ok_or_else(|| {
        let message = format!("the snapshot ids are not those of the group snapshot {group}");
        Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("name exactly the snapshots that CreateVolumeGroupSnapshot has returned")
    })
}
