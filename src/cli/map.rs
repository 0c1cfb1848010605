//! `cleat map`: a volume becomes a block device.

use std::time::Duration;

use super::client::{self, GRACE, OPERATION_TIMEOUT, milliseconds};
use super::output::{self, Format};
use super::set::PolicyArgs;
use super::{Globals, size, view};
use cleat_api::v1::{MapOptions, MapRequest};
use cleat_core::error::{Error, Result};
use cleat_node::config::MAX_CONNECTIONS;

pub(super) const EXAMPLES: &str = "\
Examples:
  Map a raw image and use it:
    $ dev=$(cleat map file:/var/lib/images/a.img)
    $ mkfs.ext4 \"$dev\" && mount \"$dev\" /mnt

  Under a name of your own, around the page cache, with four connections:
    $ cleat map 'file:/var/lib/images/a.img?direct=true' --name data --connections 4
    /dev/nbd1
    $ ls -l /dev/disk/by-id/cleat-data

  A file that is made when it is not there:
    $ cleat map 'file:/var/lib/images/b.img?create=10G'

  At most 500 requests and 50 MiB per second; fail when the backend is away for two minutes:
    $ cleat map file:/mnt/far/c.img --iops 500 --bps 50M --on-outage queue:2m

  An RBD image, as the client that /etc/ceph/ceph.client.node7.keyring is for:
    $ cleat map 'rbd:pool/image?id=node7' --name vol7

  A volume in memory, gone when it is unmapped:
    $ cleat map mem:1G --name scratch

  An image of a node that is lost, which never writes to it again:
    $ cleat map rbd:volumes/db --take-over

  An image whose snapshots, whoever makes them, hold a clean file system:
    $ cleat map rbd:volumes/db --name db --quiesce
    $ rbd snap create volumes/db@monday

  For a script that wants more than the device:
    $ cleat map mem:1G -o json | jq -r .symlink
";

/// Make a volume a block device
///
/// Prints the device's path, alone, on stdout, once the device node and its symlink
/// /dev/disk/by-id/cleat-NAME exist and the size is right. On failure nothing is left behind.
/// Mapping the same volume again with the same name and options gives the same device.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Map {
    /// The volume: file:/path, rbd:pool/image or mem:SIZE; options after `?` as key=value&key=value
    ///
    /// file:/path is a raw file or a block device; its options are direct=true (past the page cache)
    /// and create=SIZE (make the file, sparse, where it is missing or empty).
    /// rbd:pool[/namespace]/image[@snapshot] is an RBD image of Ceph; its options are id=NAME,
    /// keyring=PATH, conf=PATH, encryption=luks2|luks1|luks with passphrase_file=PATH, trim=false,
    /// config.OPTION=VALUE (an option of Ceph), and lock=shared (several write at a time and nobody is
    /// kept out: destroys what does not expect it). mem:SIZE holds the volume
    /// in memory; it is gone when it is unmapped. `?` and `%` in a path are written %3F and %25.
    uri: String,
    /// The mapping's name, unique on this node [default: derived from the URI]
    #[arg(long)]
    name: Option<String>,
    /// Refuse every write
    #[arg(long)]
    read_only: bool,
    /// Connections to the kernel, each with its thread [default: the daemon's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CONNECTIONS)))]
    connections: Option<u32>,
    /// The device's block size in bytes [default: the volume's smallest]
    #[arg(long, value_name = "BYTES", value_parser = block_size)]
    block_size: Option<u32>,
    /// How long I/O waits while no worker serves the device before it fails [default: the daemon's]
    #[arg(long, value_name = "DURATION", value_parser = size::duration)]
    dead_connection_timeout: Option<Duration>,
    /// Take the volume from whoever has claimed it (rbd:): that client is cut off first, for good
    ///
    /// What it has not written yet is lost, and what is mounted there fails. Needed only when the other
    /// side cannot be asked to unmap, and is not known to have ended.
    #[arg(long)]
    take_over: bool,
    /// Freeze the file systems on the device for the moment in which a snapshot is made (rbd:)
    ///
    /// Whoever makes the snapshot (rbd snap create, cleat volume snapshot, mirroring) waits until what is
    /// dirty is written and nobody writes; so the snapshot needs no repair. They are thawed when it is
    /// made, and in any case after the daemon's map.quiesce_deadline (30 s). Its map.quiesce_hook names a
    /// program that does something else in place of freezing. Where it fails the snapshot fails, unless
    /// it is made with --ignore-quiesce-error; with --skip-quiesce nobody is asked.
    #[arg(long, conflicts_with = "read_only")]
    quiesce: bool,
    #[command(flatten)]
    policy: PolicyArgs,
    /// Give up after this long [default: 30s; 150s where a passphrase unlocks the volume]
    #[arg(long, value_name = "DURATION", value_parser = size::duration)]
    timeout: Option<Duration>,
}

/// Runs the command.
///
/// # Errors
/// What the daemon answers.
pub(super) fn run(globals: &Globals, args: Map) -> Result<()> {
    // Checked here, too, so that a slip of the pen is told without a daemon; what is sent is what was
    // typed.
    let uri = crate::backends::volume(&args.uri).map_err(teach)?;
    let timeout = args.timeout.unwrap_or(OPERATION_TIMEOUT + uri.spec().extra_open_time());
    let options = MapOptions {
        read_only: args.read_only,
        connections: args.connections.unwrap_or(0),
        block_size: args.block_size.unwrap_or(0),
        // In whole seconds, rounded up: a shorter wait than asked for would be a surprise.
        dead_connection_timeout_s: args
            .dead_connection_timeout
            .map_or(0, |duration| milliseconds(duration).div_ceil(1000)),
        on_outage: args.policy.on_outage.map(|policy| policy.to_string()).unwrap_or_default(),
        iops: args.policy.iops,
        bytes_per_s: args.policy.bps,
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
        let limit = timeout + GRACE;
        client.call(limit, async |mut node| node.map(request).await).await
    })?
    .into();
    match globals.output {
        None => output::text(&format!("{}\n", mapping.device.as_deref().unwrap_or_default())),
        Some(Format::Json) => output::json(&mapping),
        Some(format) => output::text(&view::mappings(&[mapping], format == Format::Wide)),
    }
}

fn teach(error: Error) -> Error {
    match error.repair() {
        Some(_) => error,
        None => error.with_repair("see what volumes there are: cleat map --help"),
    }
}

fn block_size(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "1024" | "1K" => Ok(1024),
        "2048" | "2K" => Ok(2048),
        "4096" | "4K" => Ok(4096),
        _ => Err("a device's block size is 512, 1024, 2048 or 4096".to_owned()),
    }
}
