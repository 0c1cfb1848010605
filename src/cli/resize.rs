//! `cleat resize`: changes the size of a volume and its device, online.

use super::client::{self, OPERATION_TIMEOUT, REPLY_MARGIN};
use super::output::{self, Format};
use super::{Globals, view};
use cleat_api::v1::ResizeRequest;
use cleat_backend::uri::parse_size;
use cleat_core::error::Result;

pub(super) const EXAMPLES: &str = "\
Examples:
  Grow a mounted volume and its device, then the filesystem:
    $ cleat resize data 20G
    $ resize2fs /dev/disk/by-id/cleat-data

  After the volume was resized by other means: update the device now and not within seconds:
    $ truncate -s 20G /var/lib/images/a.img
    $ cleat resize data

  Shrink a volume that is not in use, after its filesystem:
    $ umount /mnt && e2fsck -f /dev/disk/by-id/cleat-data
    $ resize2fs /dev/disk/by-id/cleat-data 5G
    $ cleat resize data 5G --shrink
";

/// Change a volume's size, online
///
/// Without SIZE, the device gets the volume's current size. A volume is shrunk only with --shrink, and only
/// while its device is neither mounted nor open; shrink the filesystem first. Some volumes cannot be resized.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Resize {
    /// The mapping's name, device or URI
    target: String,
    /// The new size in bytes, or with K, M, G, T, P or E (powers of 1024)
    #[arg(allow_negative_numbers = true, value_parser = parse_size)]
    size: Option<u64>,
    /// Allow a smaller size; the data behind the new end is lost
    #[arg(long)]
    shrink: bool,
}

/// Runs the command.
///
/// # Errors
/// Returns the daemon's error.
pub(super) fn run(globals: &Globals, args: Resize) -> Result<()> {
    let request = ResizeRequest {
        target: args.target,
        size_bytes: args.size.unwrap_or(0),
        allow_shrink: args.shrink,
    };
    let mapping: view::Mapping = client::run(globals, async |client| {
        let limit = OPERATION_TIMEOUT + REPLY_MARGIN;
        client.call(limit, async |mut node| node.resize(request).await).await
    })?
    .into();
    match globals.output {
        Some(Format::Json) => output::json(&mapping),
        Some(format) => output::text(&view::mappings(&[mapping], format == Format::Wide)),
        None => output::text(&format!("{}\n", mapping.size_bytes)),
    }
}
