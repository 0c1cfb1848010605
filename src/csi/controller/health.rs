//! ControllerGetVolumeHealth: the health of a volume, as the storage and this node see it. Each reason has its
//! repair in docs/csi.md.

use cleat_core::error::{Error, ErrorKind};
use cleat_csi_api::csi::v1 as csi;
use csi::VolumeHealthErrorType as Kind;
use csi::volume_health::VolumeHealthEntry;

use super::Controller;
use super::places::Located;
use super::refused::Answer;
use super::volumes::missing;
use crate::secrets::Secrets;
use crate::volume_id::VolumeId;

impl Controller {
    /// Returns the health of a volume.
    ///
    /// # Errors
    /// Returns `NotFound` if the volume does not exist.
    pub(crate) fn volume_health(
        &self,
        id: &VolumeId,
        secrets: &Secrets,
    ) -> Answer<csi::VolumeHealth> {
        let Located { place, name } = self.locate(id)?;
        let found = self.open(&place, secrets).and_then(|open| open.find(&name));
        let unreachable = match found {
            Ok(Some(_)) => None,
            Ok(None) => return Err(missing(id).into()),
            Err(error) if is_outage(error.kind()) => Some(entry(&error)),
            Err(error) => return Err(error.into()),
        };
        let volume_id = id.to_string();
        let local = self.local.health(&volume_id).unwrap_or_default();
        let health_statuses = unreachable.into_iter().chain(local).collect();
        Ok(csi::VolumeHealth { volume_id, health_statuses })
    }
}

fn is_outage(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::TimedOut | ErrorKind::Unavailable)
}

fn entry(error: &Error) -> VolumeHealthEntry {
    VolumeHealthEntry {
        status: Kind::Inaccessible.into(),
        reason: "StorageUnreachable".to_owned(),
        message: crate::status::message(error),
    }
}
