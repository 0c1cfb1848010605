//! `cleat controller`: runs the controller of a Kubernetes cluster.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::cli::{Globals, output};
use crate::kubernetes::attach_calls::AttachSocket;
use crate::kubernetes::fencing::Volumes;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::random::Random;
use cleat_kube::rights::Extra;
use cleat_kube::{CallServer, Config, Policy, Remediation, SWEEP_PERIOD, Timing};
use cleat_telemetry::{Format, Log};

const EXAMPLES: &str = "\
Examples:
  Install the custom resource of grants:
    $ cleat controller --print-crd | kubectl apply -f -

  Install service accounts with exactly the rights that are needed:
    $ cleat controller --print-rights cleat-system | kubectl apply -f -

  In a pod with a service account:
    $ cleat controller --listen '[::]:9810'

  On a machine with a kubeconfig, for a test:
    $ cleat controller --kubeconfig ~/.kube/config --log-format human
";

/// Run the controller of a Kubernetes cluster: it attaches volumes, and decides which node may use them
///
/// Of several controllers one works, and another one replaces it within 15 seconds. The controller handles the
/// VolumeAttachments of the driver in the place of csi-attacher: run only one of the two, or use --csi-socket.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(in crate::cli) struct Controller {
    /// The kubeconfig file [default: that of the environment, or the service account of the pod]
    #[arg(long, value_name = "PATH")]
    kubeconfig: Option<PathBuf>,
    /// The name of the CSI driver
    #[arg(long, value_name = "NAME", default_value = "cleat.csi.storage")]
    driver: String,
    /// The namespace of the leader's Lease [default: that of the pod or of the kubeconfig]
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// Grant and fence the volumes of the clusters and object stores in this file (see csi.clusters) [default: refuse them]
    #[arg(long, value_name = "PATH")]
    clusters: Option<PathBuf>,
    /// The address of /metrics, /healthz and /readyz [default: none]
    #[arg(long, value_name = "IP:PORT")]
    listen: Option<SocketAddr>,
    /// Serve ControllerPublish and ControllerUnpublish on this socket, and leave VolumeAttachments to csi-attacher
    #[arg(long, value_name = "PATH")]
    csi_socket: Option<PathBuf>,
    /// Create and delete the VolumeAttachments as pods need them, where kube-controller-manager does not
    ///
    /// The CSIDriver object must say attachRequired: false. With --print-rights, adds the rights for it.
    #[arg(long, conflicts_with = "csi_socket")]
    attach_detach: bool,
    /// The number of objects that are worked on at the same time
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,
    /// How long a node may take to release a revoked volume before it is fenced, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = Policy::default().release_timeout_s)]
    release_timeout: u64,
    /// After how many seconds that a node is not ready a detach by Kubernetes fences it
    #[arg(long, value_name = "SECONDS", default_value_t = Policy::default().forced_detach_s)]
    forced_detach: u64,
    /// Fence a node that keeps a volume and has not renewed its Lease for this long, in seconds [default: never]
    ///
    /// Only the clock of the controller counts. kubelet renews its Lease every 10 s.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    lease_timeout: Option<u64>,
    /// Take volumes and pods from a node when its kubelet and its agent are silent, and put it out of service
    ///
    /// The volumes are fenced at the storage first, so that a node that lives can do no harm. The node returns to service
    /// by itself. Other drivers of the cluster detach from the node as well. With --print-rights, adds the rights for it.
    #[arg(long)]
    remediate: bool,
    /// How long kubelet and agent must be silent, in seconds
    ///
    /// 15 at least: kubelet renews its Lease every 10 s, and a node that works must not become silent because the API server
    /// pauses for a few seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 15, requires = "remediate", value_parser = clap::value_parser!(u64).range(15..=3600))]
    remediation_timeout: u64,
    /// How many nodes may be lost at the same time: where more are silent, nothing is done
    #[arg(long, value_name = "N", default_value_t = 2, requires = "remediate", value_parser = clap::value_parser!(u16).range(1..))]
    remediation_limit: u16,
    /// Only say in the log and in events what would be done
    #[arg(long, requires = "remediate")]
    remediation_dry_run: bool,
    /// Print the custom resource definition of grants and exit
    #[arg(long)]
    print_crd: bool,
    /// Print the rights of the controller and of the nodes in this namespace, with the policy for nodes, and exit
    #[arg(long, value_name = "NAMESPACE")]
    print_rights: Option<String>,
    /// The format of the log: auto, human, json, journald
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<Format>,
    /// The log level: error, warn, info, debug, trace, or a filter
    #[arg(long, value_name = "LEVEL", default_value = "info,kube=warn")]
    log_level: String,
}

/// Runs the controller until a signal ends it.
///
/// # Errors
/// Returns an error if the API server refuses the controller, or a setting is invalid.
pub(super) fn run(globals: &Globals, args: Controller) -> Result<()> {
    if args.print_crd {
        return output::text(&cleat_kube::crd::yaml());
    }
    if let Some(namespace) = args.print_rights {
        let extra = Extra { attach_detach: args.attach_detach, remediation: args.remediate };
        return output::text(&cleat_kube::rights::yaml(&namespace, extra)?);
    }
    let level = match globals.verbose {
        0 => args.log_level,
        1 => "debug,hyper=info,tower=info".to_owned(),
        _ => "trace".to_owned(),
    };
    Log::check_filter(&level).map_err(|why| {
        Error::new(ErrorKind::InvalidArgument, format!("invalid --log-level: {why}"))
    })?;
    Log { format: args.log_format.unwrap_or(Format::Auto), filter: level }.init()?;
    let driver = args.driver.clone();
    let socket = args.csi_socket.map(|path| AttachSocket { path, driver });
    let config = Config {
        kubeconfig: args.kubeconfig,
        driver: args.driver,
        namespace: args.namespace,
        identity: identity()?,
        listen: args.listen,
        workers: usize::from(args.workers),
        policy: Policy {
            release_timeout_s: args.release_timeout,
            forced_detach_s: args.forced_detach,
            lease_timeout_s: args.lease_timeout,
            ..Policy::default()
        },
        calls: socket.map(|socket| Arc::new(socket) as Arc<dyn CallServer>),
        attach_detach: args.attach_detach,
        remediation: args.remediate.then(|| Remediation {
            timeout: Duration::from_secs(args.remediation_timeout),
            limit: usize::from(args.remediation_limit),
            dry_run: args.remediation_dry_run,
        }),
        sweep_period: SWEEP_PERIOD,
        election: Timing::default(),
        #[cfg(feature = "fault")]
        after_step: cleat_backend::crash_point,
        #[cfg(not(feature = "fault"))]
        after_step: |_| (),
    };
    cleat_kube::run(&config, Arc::new(Volumes { clusters: args.clusters }))
}

/// Returns a name of this process that no other controller has.
fn identity() -> Result<String> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let number = Random::from_kernel()?.next();
    Ok(format!("{}_{number:016x}", host.trim()))
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command};

    use super::*;

    #[test]
    fn a_node_must_be_silent_for_longer_than_kubelet_takes_to_renew_its_lease() {
        let parse = |seconds| {
            let command = Controller::augment_args(Command::new("controller"));
            let args = ["controller", "--remediate", "--remediation-timeout", seconds];
            command.try_get_matches_from(args)
        };
        parse("15").unwrap();
        assert!(parse("14").unwrap_err().to_string().contains("14 is not in 15..=3600"));
    }
}
