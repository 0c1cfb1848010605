//! The settings of the controller.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cleat_grants::policy::Policy;
use kube::Client;

use crate::call_server::CallServer;
use crate::lease::Timing;

/// The settings of the controller.
#[derive(Debug, Clone)]
pub struct Config {
    /// The kubeconfig file. Without it, that of the environment or the service account of the pod is used.
    pub kubeconfig: Option<PathBuf>,
    /// The name of the CSI driver, whose VolumeAttachments the controller handles.
    pub driver: String,
    /// The namespace of the Lease of the leader; without it, that of the pod or of the kubeconfig.
    pub namespace: Option<String>,
    /// The name of this process in the Lease. It must differ from that of every other controller.
    pub identity: String,
    /// The address of the metrics and health endpoints; none without it.
    pub listen: Option<SocketAddr>,
    /// The number of volumes and of attachments that are worked on at the same time.
    pub workers: usize,
    /// When fencing may start.
    pub policy: Policy,
    /// Serves ControllerPublish and ControllerUnpublish for external-attacher, which then handles the
    /// VolumeAttachments. Without it, the controller handles them itself.
    pub calls: Option<Arc<dyn CallServer>>,
    /// Whether the controller creates and deletes the VolumeAttachments as pods need them, in the place of
    /// kube-controller-manager.
    pub attach_detach: bool,
    /// Whether nodes that are lost lose their volumes and their pods by themselves.
    pub remediation: Option<Remediation>,
    /// The time between two sweeps.
    pub sweep_period: Duration,
    /// The times of the leader election.
    pub election: Timing,
    /// Called with the name of each step that the controller has made for a volume, before the next one. Tests end the
    /// process there.
    pub after_step: fn(&str),
}

/// The time between two sweeps by default.
pub const SWEEP_PERIOD: Duration = Duration::from_secs(24 * 3600);

/// The settings of node remediation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remediation {
    /// How long kubelet and agent must be silent.
    pub timeout: Duration,
    /// The maximum number of nodes that are lost at the same time.
    pub limit: usize,
    /// Whether it only says what it would do.
    pub dry_run: bool,
}

impl Config {
    /// Returns the namespace of the controller.
    pub(crate) fn namespace<'a>(&'a self, client: &'a Client) -> &'a str {
        self.namespace.as_deref().unwrap_or(client.default_namespace())
    }

    /// Returns the name of the Lease of the leader.
    pub(crate) fn lease(&self) -> String {
        format!("controller-{}", self.driver)
    }
}
