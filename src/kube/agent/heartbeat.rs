//! Renews the Lease of the agent, so that the controller knows that it works.

use std::time::Duration;

use cleat_core::error::{ErrorKind, Result};
use k8s_openapi::api::coordination::v1::Lease;
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::time::{sleep, timeout};

use super::shared::Shared;
use crate::api::{call, message};
use crate::heartbeat::{name_of, renew};

/// The longest time between two looks whether the controller wants a heartbeat.
const LOOK_AGAIN: Duration = Duration::from_secs(20);

/// How long the controller may take to make the Lease.
const MADE_AFTER: Duration = Duration::from_secs(2);

/// The time between two attempts after a failure.
const RETRY: Duration = Duration::from_secs(1);

impl Shared {
    /// Sends heartbeats as long as the controller wants them, until the future is dropped. A failure is not logged
    /// twice: the watch of the grants fails for the same reasons.
    pub(super) async fn send_heartbeats(&self, client: &Client) {
        let leases: Api<Lease> = Api::default_namespaced(client.clone());
        let mut changes = self.changes.subscribe();
        let mut known = None;
        loop {
            match self.send_heartbeat(&leases, known.take()).await {
                Ok(Some((lease, wait))) => {
                    known = Some(lease);
                    sleep(wait).await;
                }
                Ok(None) => {
                    // The controller makes the Lease when the node gets its first volume.
                    let _ = timeout(LOOK_AGAIN, changes.changed()).await;
                    sleep(MADE_AFTER).await;
                    changes.mark_unchanged();
                }
                Err(error) => {
                    tracing::debug!("{}", message(&error));
                    sleep(RETRY).await;
                }
            }
        }
    }

    /// Renews the Lease, as it was at the last renewal or as it is read now. Returns `None` if there is none.
    async fn send_heartbeat(
        &self,
        leases: &Api<Lease>,
        known: Option<Lease>,
    ) -> Result<Option<(Lease, Duration)>> {
        let name = name_of(&self.config.node);
        let read = match known {
            Some(lease) => Some(lease),
            None => {
                let request = leases.get_opt(&name);
                match call(|| format!("cannot read the Lease {name}"), request).await {
                    // An older controller has given no rights for it.
                    Err(error) if error.kind() == ErrorKind::PermissionDenied => None,
                    read => read?,
                }
            }
        };
        let Some(mut lease) = read else { return Ok(None) };
        let wait = renew(&mut lease, &self.config.node);
        let parameters = PostParams::default();
        let request = leases.replace(&name, &parameters, &lease);
        let renewed = call(|| format!("cannot renew the Lease {name}"), request).await?;
        Ok(Some((renewed, wait)))
    }
}
