//! `cleat kubectl`, or `kubectl cleat`: what a person asks about volumes in a Kubernetes cluster.

use std::collections::BTreeSet;
use std::path::PathBuf;

use cleat_core::error::Result;
use cleat_csi::VolumeId;
use cleat_kube::report::{
    DrainCheck, HolderRow, Image, NodeReport, Reader, TakenOver, VolumeRow, Why,
};
use serde::Serialize;

use crate::cli::output::{self, Format, Table, printable};
use crate::cli::{Globals, exit};

const EXAMPLES: &str = "\
Examples:
  As a plugin of kubectl (`make install` makes this link):
    $ ln -s /usr/local/bin/cleat /usr/local/bin/kubectl-cleat
    $ kubectl cleat volumes

  Why does a pod not start?
    $ kubectl cleat why data-db-0 -n prod

  May this node be drained?
    $ kubectl cleat drain-check node-a && kubectl drain node-a --ignore-daemonsets
";

const VOLUMES_EXAMPLES: &str = "\
Examples:
    $ kubectl cleat volumes
    $ kubectl cleat volumes -o json | jq -r '.volumes[] | select(.waits_for != []).claim'
";

const NODE_EXAMPLES: &str = "\
Examples:
    $ kubectl cleat node node-a
";

const WHY_EXAMPLES: &str = "\
Examples:
    $ kubectl cleat why data-db-0 -n prod
    prod/data-db-0 waits: node node-a must release the volume; it is not known to be lost, for 3 min
    To do: look at the agent on node node-a; if the node is lost: kubectl taint node node-a …
";

const DRAIN_EXAMPLES: &str = "\
Examples:
    $ kubectl cleat drain-check node-a && kubectl drain node-a --ignore-daemonsets
";

const TAKE_OVER_EXAMPLES: &str = "\
Examples:
    $ kubectl patch pv pvc-1 -p '{\"spec\":{\"persistentVolumeReclaimPolicy\":\"Retain\"}}'
    $ kubectl scale statefulset db --replicas 0
    $ kubectl cleat take-over pvc-1 --storage-class cleat-rbd > pvc-1.json
    $ kubectl delete pvc data-db-0 && kubectl delete pv pvc-1
    $ kubectl apply -f pvc-1.json
    $ kubectl scale statefulset db --replicas 1
";

/// Show the volumes of a Kubernetes cluster, and what they wait for (also: kubectl cleat)
///
/// Only reads objects of the API server, with the rights of the kubeconfig's user: PersistentVolumes, claims,
/// VolumeAttachments, StorageClasses, CSINodes, pods, nodes, events and VolumeGrants. No node is asked.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(in crate::cli) struct Kubectl {
    /// The kubeconfig file [default: that of the environment, or the service account of the pod]
    #[arg(long, global = true, value_name = "PATH")]
    kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig [default: its current context]
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// The name of the CSI driver
    #[arg(long, global = true, value_name = "NAME", default_value = "cleat.csi.storage")]
    driver: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Volumes(Volumes),
    Node(Node),
    Why(WhyArgs),
    DrainCheck(Drain),
    TakeOver(TakeOver),
}

/// List the volumes of the driver, who may use them, and what they wait for
#[derive(Debug, clap::Args)]
#[command(after_long_help = VOLUMES_EXAMPLES)]
struct Volumes {}

/// Show the state of a node and its volumes
#[derive(Debug, clap::Args)]
#[command(after_long_help = NODE_EXAMPLES)]
struct Node {
    /// The name of the node
    name: String,
}

/// Say in one sentence what a PersistentVolumeClaim waits for, and what to do
///
/// Follows the claim to its PersistentVolume, pods, VolumeAttachment, grant, node, device and the record at the storage, and
/// shows the first place where this way stops. Device and record are shown as the node and the controller have reported
/// them.
#[derive(Debug, clap::Args)]
#[command(after_long_help = WHY_EXAMPLES)]
struct WhyArgs {
    /// The name of the PersistentVolumeClaim, or NAMESPACE/NAME
    claim: String,
    /// Its namespace [default: that of the context]
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
}

/// Check whether the volumes of a node leave it with its pods when it is drained
///
/// The exit code is 0 if nothing is in the way, and 23 otherwise. Changes nothing. PodDisruptionBudgets and volumes of
/// other drivers are not looked at.
#[derive(Debug, clap::Args)]
#[command(after_long_help = DRAIN_EXAMPLES)]
struct Drain {
    /// The name of the node
    node: String,
}

/// Print the objects with which an RBD volume of ceph-csi, or a static one, becomes a volume that can be granted
///
/// Prints the PersistentVolume and its claim, with their names, for the same image. Changes nothing: delete the old
/// objects, and then apply the printed ones. Refuses a volume that is in use, and one whose image would be deleted with
/// the PersistentVolume. The file of clusters (csi.clusters) must have the clusterID of the volume.
#[derive(Debug, clap::Args)]
#[command(after_long_help = TAKE_OVER_EXAMPLES)]
struct TakeOver {
    /// The name of the PersistentVolume
    volume: String,
    /// The StorageClass of the new objects [default: that of the old ones]
    #[arg(long, value_name = "NAME")]
    storage_class: Option<String>,
    /// The RADOS namespace of the image, which the configuration of ceph-csi has for its cluster [default: none]
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    rados_namespace: String,
}

/// Runs the command and returns the exit code.
///
/// # Errors
/// Returns the error of the API server.
pub(super) fn run(globals: &Globals, args: Kubectl) -> Result<u8> {
    let format = globals.output.unwrap_or(Format::Table);
    let (kubeconfig, context) = (args.kubeconfig.as_deref(), args.context.as_deref());
    let driver = &*args.driver;
    let reader = Reader::connect(kubeconfig, context, driver)?;
    match args.command {
        Command::Volumes(_) => {
            let volumes = reader.volumes()?;
            let text = |format| volumes_table(&volumes, format == Format::Wide);
            show(format, &Listing { volumes: &volumes }, text)?;
            if volumes.is_empty() {
                output::note(&no_volumes(driver, &reader.drivers()?));
            }
        }
        Command::Node(node) => {
            let report = reader.node(&node.name)?;
            show(format, &report, |_| node_text(&report))?;
        }
        Command::Why(why) => {
            let why = reader.why(why.namespace.as_deref(), &why.claim)?;
            show(format, &why, |_| why_text(&why))?;
        }
        Command::DrainCheck(drain) => {
            let check = reader.drain_check(&drain.node)?;
            show(format, &check, |_| drain_text(&check))?;
            return Ok(if check.can_be_drained { exit::OK } else { exit::NOT_DRAINABLE });
        }
        Command::TakeOver(taken) => {
            let class = taken.storage_class.as_deref();
            let namespace = taken.rados_namespace;
            let id = |image: &Image| id_of(image, &namespace);
            let TakenOver { volume, claim } = reader.take_over(&taken.volume, class, &id)?;
            let list = Manifests { api_version: "v1", kind: "List", items: (volume, claim) };
            output::json(&list)?;
        }
    }
    Ok(exit::OK)
}

/// Says which drivers have volumes in the place of one that has none.
fn no_volumes(driver: &str, others: &BTreeSet<String>) -> String {
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    let names = others.join(", ");
    let hint = match &*names {
        "" => "no PersistentVolume of a CSI driver exists".to_owned(),
        names => format!("choose another --driver: {names}"),
    };
    format!("no volumes of the driver {driver}; {hint}")
}

/// Objects in the form of `kubectl apply`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Manifests<T> {
    api_version: &'static str,
    kind: &'static str,
    items: T,
}

/// Returns the volume handle of an image. `namespace` is for a volume that does not name one.
fn id_of(image: &Image, namespace: &str) -> String {
    let Image { cluster, pool, namespace: own, name } = image.clone();
    let namespace = own.unwrap_or_else(|| namespace.to_owned());
    VolumeId::Rbd { cluster, pool, namespace, image: name }.to_string()
}

/// The list in JSON.
#[derive(Serialize)]
struct Listing<'a> {
    volumes: &'a [VolumeRow],
}

fn show(format: Format, value: &impl Serialize, text: impl FnOnce(Format) -> String) -> Result<()> {
    match format {
        Format::Json => output::json(value),
        format => output::text(&text(format)),
    }
}

fn volumes_table(volumes: &[VolumeRow], wide: bool) -> String {
    let mut headings = vec!["CLAIM", "VOLUME", "HOLDER", "MODE", "STATE", "WAITS FOR"];
    if wide {
        headings.extend(["DEVICE", "HANDLE", "GRANT"]);
    }
    let mut table = Table::new(&headings);
    for volume in volumes {
        let of_holders = |text: &dyn Fn(&HolderRow) -> String| {
            let texts: Vec<String> = volume.holders.iter().map(text).collect();
            texts.join(",")
        };
        let mut row = vec![
            text_of(volume.claim.as_deref()),
            text_of(volume.persistent_volume.as_deref()),
            of_holders(&|holder| holder.node.clone()),
            of_holders(&|holder| format!("{:?}", holder.mode)),
            of_holders(&|holder| state(holder).to_owned()),
            text_of(volume.waits_for.first().map(String::as_str)),
        ];
        if wide {
            row.extend([
                of_holders(&|holder| holder.device.clone().unwrap_or_default()),
                volume.handle.clone(),
                text_of(volume.grant.as_deref()),
            ]);
        }
        table.row(row);
    }
    table.render()
}

/// Describes a holder by its signals.
fn state(holder: &HolderRow) -> &'static str {
    match holder {
        HolderRow { revoked: true, .. } => "revoked",
        HolderRow { safe_to_mount: true, .. } => "safe to mount",
        HolderRow { safe_to_detach: true, .. } => "safe to detach",
        _ => "granted",
    }
}

fn node_text(report: &NodeReport) -> String {
    let mut table = Table::new(&["CLAIM", "VOLUME", "ATTACHED", "STATE", "DEVICE", "PODS"]);
    for volume in &report.volumes {
        let state = match (&volume.holder, volume.fenced) {
            (Some(holder), _) => state(holder),
            (None, true) => "fenced",
            (None, false) => "",
        };
        let device = volume.holder.as_ref().and_then(|holder| holder.device.as_deref());
        table.row(vec![
            text_of(volume.claim.as_deref()),
            volume.persistent_volume.clone().unwrap_or_else(|| volume.handle.clone()),
            if volume.attached { "yes" } else { "no" }.to_owned(),
            state.to_owned(),
            text_of(device),
            volume.pods.join(","),
        ]);
    }
    let node = printable(&report.node);
    format!("node {node} is {}\n\n{}", printable(&report.state), table.render())
}

fn why_text(why: &Why) -> String {
    let mut table = Table::new(&["KIND", "NAME", "STATE"]);
    for step in &why.steps {
        table.row(vec![step.kind.to_owned(), step.name.clone(), step.state.clone()]);
    }
    let action = why.action.as_deref().map(|action| format!("To do: {}\n", printable(action)));
    format!("{}\n{}\n{}", printable(&why.answer), action.unwrap_or_default(), table.render())
}

fn drain_text(check: &DrainCheck) -> String {
    let node = printable(&check.node);
    let mut text = match check.can_be_drained {
        true => format!("node {node} can be drained: {} volumes leave it\n", check.moving),
        false => format!("node {node} should not be drained now:\n"),
    };
    for obstacle in &check.obstacles {
        let [what, reason, action] =
            [&obstacle.what, &obstacle.reason, &obstacle.action].map(|text| printable(text));
        text += &format!("\n{what}: {reason}\n  To do: {action}\n");
    }
    text
}

fn text_of(text: Option<&str>) -> String {
    text.unwrap_or_default().to_owned()
}
