//! Renews the Lease of the agent, so that the controller knows that it works.

use std::time::Duration;

use cleat_core::error::{ErrorKind, Result};
use k8s_openapi::api::coordination::v1::Lease;
use kube::Client;
use kube::api::{Api, PostParams};

use super::shared::Shared;
use crate::api::{call, message};
use crate::heartbeat::{name_of, renew};

/// The time between two looks whether the controller wants a heartbeat.
const LOOK_AGAIN: Duration = Duration::from_secs(20);

/// The time between two attempts after a failure.
const RETRY: Duration = Duration::from_secs(1);

impl Shared {
    /// Sends heartbeats as long as the controller wants them, until the future is dropped. A failure is not logged
    /// twice: the watch of the grants fails for the same reasons.
    pub(super) async fn send_heartbeats(&self, client: &Client) {
        let leases: Api<Lease> = Api::default_namespaced(client.clone());
        let mut known = None;
        loop {
            let wait = match self.send_heartbeat(&leases, known.take()).await {
                Ok(Some((lease, wait))) => {
                    known = Some(lease);
                    wait
                }
                Ok(None) => LOOK_AGAIN,
                Err(error) => {
                    tracing::debug!("{}", message(&error));
                    RETRY
                }
            };
            tokio::time::sleep(wait).await;
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
