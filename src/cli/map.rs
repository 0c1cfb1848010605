//! `cleat map`: maps a volume to a block device.

use std::time::Duration;

use super::client::{self, OPERATION_TIMEOUT, REPLY_MARGIN, milliseconds};
use super::output::{self, Format};
use super::set::PolicyArgs;
use super::{Globals, size, view};
use cleat_api::v1::{MapOptions, MapRequest};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_node::config::MAX_CONNECTIONS;

pub(super) const EXAMPLES: &str = "\
Examples:
  Map a raw image and use it:
    $ dev=$(cleat map file:/var/lib/images/a.img)
    $ mkfs.ext4 \"$dev\" && mount \"$dev\" /mnt

  With a name, with direct I/O to the file, and with four connections:
    $ cleat map 'file:/var/lib/images/a.img?direct=true' --name data --connections 4
    /dev/nbd1
    $ ls -l /dev/disk/by-id/cleat-data

  A file that is created if it does not exist:
    $ cleat map 'file:/var/lib/images/b.img?create=10G'

  At most 500 requests and 50 MiB per second; I/O fails when an outage lasts two minutes:
    $ cleat map file:/mnt/far/c.img --iops 500 --bps 50M --on-outage queue:2m

  An RBD image, with the Ceph client of /etc/ceph/ceph.client.node7.keyring:
    $ cleat map 'rbd:pool/image?id=node7' --name vol7

  A volume in memory, whose data is lost when it is unmapped:
    $ cleat map mem:1G --name scratch

  An image that a lost node has claimed; that node is fenced:
    $ cleat map rbd:volumes/db --take-over

  An image whose snapshots contain a clean file system:
    $ cleat map rbd:volumes/db --name db --quiesce
    $ rbd snap create volumes/db@monday

  Other properties of the mapping, for a script:
    $ cleat map mem:1G -o json | jq -r .symlink
";

/// Map a volume to a block device
///
/// Prints only the device's path on stdout, as soon as the device node and its symlink
/// /dev/disk/by-id/cleat-NAME exist and the size is correct. On failure, all steps are undone. Mapping the
/// same volume again with the same name and options returns the same device.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Map {
    /// The volume: file:/path, dir:/directory/volume, rbd:pool/image, s3://bucket/volume or mem:SIZE; options
    /// after `?` as key=value&key=value
    ///
    /// file:/path is a raw file or a block device. Its options are direct=true (bypass the page cache) and
    /// create=SIZE (create the file, sparse, if it is missing or empty when it is mapped).
    /// rbd:pool[/namespace]/image[@snapshot] is an RBD image of Ceph. Its options are id=NAME,
    /// keyring=PATH, conf=PATH, encryption=luks2|luks1|luks with passphrase_file=PATH, trim=false,
    /// config.OPTION=VALUE (an option of Ceph), and lock=shared (several clients write at the same time and
    /// none is fenced; this destroys file systems that are not made for it). dir:/directory/volume is a log of
    /// objects in a local directory, and s3://bucket/[prefix/]volume one in an object store with the S3 API, with
    /// the options credentials_file=PATH, endpoint=https://HOST:PORT, ca_file=PATH and region=NAME. Without
    /// credentials_file, the daemon takes the keys from the usual sources: its environment, the shared credentials file,
    /// or the role of the container or the instance. gs: and az: are
    /// the same on Google Cloud Storage and on Azure Blob Storage, which needs account=NAME. `cleat volume create`
    /// creates them. mem:SIZE keeps the volume in memory; its data is lost when it is unmapped. Write `?` and `%` in
    /// a path as %3F and %25.
    uri: String,
    /// The mapping's name, unique on this node [default: derived from the URI]
    ///
    /// The device's symlink is /dev/disk/by-id/cleat-NAME, and those of its partitions end with -part1, -part2
    /// and so on. A name must not end like that.
    #[arg(long, value_parser = name)]
    name: Option<String>,
    /// Make the device read-only
    #[arg(long)]
    read_only: bool,
    /// The number of connections to the kernel, each with a thread [default: set in the daemon's
    /// configuration, 1 if it says nothing]
    ///
    /// More connections use more processors. But with more than one the kernel sends a request that takes longer
    /// than 30 s a second time, and repeats the requests of a dead worker after 30 s instead of 1 s.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CONNECTIONS)))]
    connections: Option<u32>,
    /// The device's block size in bytes [default: the volume's minimum]
    #[arg(long, value_name = "BYTES", value_parser = block_size)]
    block_size: Option<u32>,
    /// The time after which I/O fails if no worker serves the device [default: set in the daemon's
    /// configuration]
    #[arg(long, value_name = "DURATION", value_parser = size::duration)]
    dead_connection_timeout: Option<Duration>,
    /// Take the volume from the client that has claimed it (rbd:), which is fenced first
    ///
    /// The fenced client loses data that it has not written, and its mounts of the volume fail. Needed only
    /// if the volume cannot be unmapped there and the client may still run.
    #[arg(long)]
    take_over: bool,
    /// Freeze the file systems on the device while a snapshot is created (rbd:, and volumes of objects)
    ///
    /// The creation of a snapshot (rbd snap create, cleat volume snapshot, mirroring) waits until all dirty
    /// data is written and writes are blocked, so a file system in the snapshot needs no repair. The file
    /// systems are thawed when the snapshot exists, at the latest after map.quiesce_deadline (30 s) of the
    /// daemon's configuration. map.quiesce_hook names a program to run instead of freezing. If quiescing
    /// fails, the snapshot fails, unless rbd creates it with --ignore-quiesce-error. With its --skip-quiesce
    /// the snapshot is created without quiescing.
    #[arg(long, conflicts_with = "read_only")]
    quiesce: bool,
    #[command(flatten)]
    policy: PolicyArgs,
    /// Fail after this time [default: 30s; 150s for a volume with a passphrase]
    #[arg(long, value_name = "DURATION", value_parser = size::duration)]
    timeout: Option<Duration>,
}

/// Runs the command.
///
/// # Errors
/// Returns an error if the URI is invalid, and the daemon's error.
pub(super) fn run(globals: &Globals, args: Map) -> Result<()> {
    // The client checks the URI, too, so that a typing error is reported without a daemon. It sends the URI as
    // typed.
    let uri = crate::backends::volume(&args.uri).map_err(with_hint)?;
    if let Some(warning) = uri.spec().warning().filter(|_| globals.output != Some(Format::Json)) {
        output::note(&format!("warning: {warning}"));
    }
    let timeout = args.timeout.unwrap_or(OPERATION_TIMEOUT + uri.spec().extra_open_time());
    let options = MapOptions {
        read_only: args.read_only,
        connections: args.connections.unwrap_or(0),
        block_size: args.block_size.unwrap_or(0),
        // The API has whole seconds. Rounding up keeps the timeout from being shorter than requested.
        dead_connection_timeout_s: args
            .dead_connection_timeout
            .map_or(0, |duration| milliseconds(duration).div_ceil(1000)),
        on_outage: args.policy.on_outage.map(|policy| policy.to_string()).unwrap_or_default(),
        iops: args.policy.iops,
        bytes_per_s: args.policy.bps,
        busy_poll: args.policy.busy_poll.map(|setting| setting.to_string()).unwrap_or_default(),
        quiesce: args.quiesce,
    };
    let request = MapRequest {
        uri: args.uri,
        name: args.name.unwrap_or_default(),
        options: Some(options),
        timeout_ms: milliseconds(timeout),
        take_over: args.take_over,
    };
    let mapping: view::Mapping = client::run(globals, async |client| {
        let limit = timeout + REPLY_MARGIN;
        client.call(limit, async |mut node| node.map(request).await).await
    })?
    .into();
    match globals.output {
        None => output::text(&format!("{}\n", mapping.device.as_deref().unwrap_or_default())),
        Some(Format::Json) => output::json(&mapping),
        Some(format) => output::text(&view::mappings(&[mapping], format == Format::Wide)),
    }
}

fn with_hint(error: Error) -> Error {
    match error.repair() {
        Some(_) => error,
        None => error.with_repair("see the kinds of volumes with `cleat map --help`"),
    }
}

/// Refuses an empty name, which in the API stands for none: a script whose variable is empty would get a mapping
/// with a name that it does not expect. The daemon checks the rest.
fn name(text: &str) -> Result<String> {
    if text.is_empty() {
        return Err(Error::new(ErrorKind::InvalidArgument, "the name is empty")
            .with_repair("write a name, or omit --name to derive one from the URI"));
    }
    Ok(text.to_owned())
}

fn block_size(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "1024" | "1K" => Ok(1024),
        "2048" | "2K" => Ok(2048),
        "4096" | "4K" => Ok(4096),
        _ => Err("the block size must be 512, 1024, 2048 or 4096".to_owned()),
    }
}
