//! Adoption by a new supervisor, which connects to the control socket.

use std::os::fd::AsFd;

use super::{Next, Session};
use crate::channel::Channel;
use crate::protocol::{FromWorker, Opened, Ready, Start, ToWorker};
use crate::version::ProtocolVersions;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_nbd::wire::transmission_flags;

impl Session {
    /// Handles the first message, or the end, of a connection that has not sent `Adopt` yet.
    pub(super) fn on_pending(&mut self, index: usize) -> Next {
        let channel = self.supervisors.take_pending(index);
        let adopted = match channel.receive() {
            Ok(Some((ToWorker::Adopt { version, oldest, build, mapping_id, keeps_tail }, _))) => {
                // A new supervisor knows nothing of a handover that the last one has begun.
                if self.end_offer() == Next::Exit {
                    return Next::Exit;
                }
                self.adopt(
                    &channel,
                    &ProtocolVersions { newest: version, oldest, build },
                    &mapping_id,
                )
                .inspect(|()| self.image.permit_tail_file(keeps_tail))
            }
            Ok(Some(_)) => Err(Error::new(
                ErrorKind::InvalidArgument,
                "the first message on the control socket must be adopt",
            )),
            Ok(None) => return Next::Continue,
            Err(error) => Err(error),
        };
        match adopted {
            Ok(()) => self.supervisors.put_in_charge(channel),
            Err(error) => {
                tracing::warn!(error = %error.report(), "an adoption was refused");
                let _ = channel.send_failure(&error);
            }
        }
        Next::Continue
    }

    /// Sends a new supervisor everything that the last one was sent and that still holds.
    fn adopt(
        &mut self,
        channel: &Channel,
        supervisor: &ProtocolVersions,
        mapping_id: &str,
    ) -> Result<()> {
        ProtocolVersions::of_this_build().common(supervisor)?;
        if mapping_id != self.start.mapping_id {
            let message = format!("this worker serves the mapping {}", self.start.mapping_id);
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let page = self.page.file().map_err(|e| Error::from_io("the statistics page", e))?;
        let ready = self.ready();
        self.resizer.start_over(ready.size);
        channel.send(&FromWorker::Ready(Box::new(ready)), &[page.as_fd()])?;
        tracing::info!("adopted by a supervisor");
        for message in self.monitors.state() {
            channel.send(&message, &[])?;
        }
        if let Some(message) = self.quiesce.unanswered() {
            channel.send(&message, &[])?;
        }
        Ok(())
    }

    /// Describes the worker and its volume.
    pub(super) fn ready(&self) -> Ready {
        let blocks = self.image.block_sizes();
        let features = self.image.features();
        let ProtocolVersions { newest, oldest, build } = ProtocolVersions::of_this_build();
        let Start { uri, read_only, quiesce, .. } = &self.start;
        let opened = Opened { uri: uri.clone(), read_only: *read_only, quiesce: *quiesce };
        Ready {
            version: newest,
            oldest,
            build,
            binary: self.binary.clone(),
            mapping_id: self.start.mapping_id.clone(),
            generation: self.start.generation,
            pid: std::process::id(),
            identity: Some(self.image.identity()),
            size: self.image.size(),
            minimum_block: blocks.minimum,
            preferred_block: blocks.preferred,
            transmission_flags: transmission_flags(features),
            outlives_worker: features.keeps_acknowledged_writes,
            connections: self.connections.count(),
            opened: Some(opened),
        }
    }
}
