//! Upgrades of workers: planned handovers.

use cleat_api::v1::upgrade_event::Outcome;
use cleat_api::v1::{UpgradeEvent, UpgradeRequest};
use tokio_stream::StreamExt as _;
use tonic::Status;

use super::Supervisor;
use crate::wait::wait_until;

impl Supervisor {
    /// Upgrades all workers and returns the events. Panics on an error.
    pub fn upgrade(&self, force: bool) -> Vec<UpgradeEvent> {
        self.upgrade_with(UpgradeRequest { force, workers_only: true, targets: Vec::new() })
            .unwrap()
    }

    /// Sends an upgrade request and returns all events.
    pub fn upgrade_with(&self, request: UpgradeRequest) -> Result<Vec<UpgradeEvent>, Status> {
        let mut client = self.client();
        self.block_on(async move {
            let stream = client.upgrade(request).await?.into_inner();
            stream.collect::<Result<Vec<_>, _>>().await
        })
    }

    /// Upgrades the worker of the only mapping, and checks that it succeeds. Retries steps that exceed
    /// their time limit on a busy machine.
    pub fn hand_over(&self) -> UpgradeEvent {
        let mut tries = std::iter::repeat_with(|| self.upgrade(true).pop().unwrap()).take(4);
        let slow = |event: &UpgradeEvent| event.message.contains("did not answer in time");
        let event = tries.find(|event| !slow(event)).expect("an attempt within the time limit");
        assert_eq!(event.outcome(), Outcome::HandedOver, "{event:?}");
        event
    }

    /// Waits until the process `pid` is the current worker of the mapping `a`.
    pub fn wait_for_worker(&self, pid: u32) {
        wait_until("the expected worker serves the mapping", || {
            self.get("a").unwrap().worker_pid == pid
        });
    }

    /// Upgrades the worker of the only mapping, and checks that it fails.
    pub fn fail_to_hand_over(&self) -> UpgradeEvent {
        let event = self.upgrade(true).pop().unwrap();
        assert_eq!(event.outcome(), Outcome::Failed, "{event:?}");
        event
    }
}
