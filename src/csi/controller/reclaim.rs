//! ControllerReclaimSpace of CSI-Addons: gives blocks of zeroes back to the storage.
//!
//! It may take long, so it neither makes the volume busy nor uses the threads of other calls.

use std::mem::take;

use cleat_core::error::{Error, ErrorKind};
use cleat_csi_api::addons::reclaimspace as messages;
use messages::{ControllerReclaimSpaceRequest, ControllerReclaimSpaceResponse, StorageConsumption};
use tokio::time::Instant;
use tonic::{Response, Status};

use super::Controller;
use super::places::{Located, OpenPlace, on};
use super::refused::{Answer, Refused};
use super::service::{checked, existing};
use super::volumes::{missing, signed};
use crate::secrets::Secrets;
use crate::volume_id::{self, VolumeId};

impl Controller {
    /// Runs the call. After its deadline, the work continues in the background.
    pub(crate) async fn controller_reclaim_space(
        &self,
        mut request: ControllerReclaimSpaceRequest,
        deadline: Instant,
    ) -> Result<Response<ControllerReclaimSpaceResponse>, Status> {
        let secrets = checked(Secrets::take(take(&mut request.secrets)))?;
        checked(volume_id::checked(&request.volume_id))?;
        let id = existing(&request.volume_id)?;
        let key = [format!("the space of {}", request.volume_id)];
        self.exclusive("ControllerReclaimSpace", &key, deadline, |this| async move {
            let threads = this.reclaims.clone();
            threads.run(deadline, move || this.reclaim(&id, &secrets)).await
        })
        .await
    }

    fn reclaim(&self, id: &VolumeId, secrets: &Secrets) -> Answer<ControllerReclaimSpaceResponse> {
        let Located { place, name } = self.locate(id)?;
        let open = self.open(&place, secrets)?;
        let Some(store) = open.store().reclaim() else {
            let message = format!("zeroes of volumes in {place} are not freed here");
            let error = Error::new(ErrorKind::Unsupported, message);
            return Err(Refused::unimplemented(
                error.with_repair("fstrim on the node frees unused blocks (NodeReclaimSpace)"),
            ));
        };
        let usage = |open: &OpenPlace| -> Answer<Option<StorageConsumption>> {
            let info = open.find(&name)?.ok_or_else(|| missing(id))?;
            let used = info.used_bytes;
            Ok(used.map(|used| StorageConsumption { usage_bytes: signed(used) }))
        };
        let pre_usage = usage(&open)?;
        store.reclaim(&name, &mut on)?;
        Ok(ControllerReclaimSpaceResponse { pre_usage, post_usage: usage(&open)? })
    }
}
