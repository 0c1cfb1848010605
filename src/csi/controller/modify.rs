//! ControllerModifyVolume: changes the mutable parameters of a volume.
//!
//! The new values are labels of the volume, so a node gets them with the next ControllerPublishVolume. A volume
//! that this process has mapped gets them at once.

use tokio::time::Instant;

use super::Controller;
use super::labels::{Made, of_mutable};
use super::parameters::Mutable;
use super::places::Located;
use super::refused::Answer;
use super::volumes::missing;
use crate::secrets::Secrets;
use crate::volume_id::VolumeId;

impl Controller {
    /// Changes parameters of a volume. Others keep their values.
    pub(crate) async fn modify_volume(
        self,
        id: VolumeId,
        change: Mutable,
        secrets: Secrets,
        deadline: Instant,
    ) -> Answer<()> {
        let (volume, labels) = (id.clone(), of_mutable(&change.texts));
        self.on_thread(deadline, move |this| {
            let Located { place, name } = this.locate(&id)?;
            let open = this.open(&place, &secrets)?;
            let info = open.find(&name)?.filter(|info| Made::read(info).is_some());
            if info.is_none() {
                return Err(missing(&id).into());
            }
            if !labels.is_empty() {
                open.labels()?.set(&name, &labels)?;
            }
            Ok(())
        })
        .await?;
        if !change.change.is_empty() {
            self.local.set_policy(&volume.to_string(), change.change, deadline).await?;
        }
        Ok(())
    }
}
