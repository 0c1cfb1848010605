//! `cleat resize`: another size, online.

use super::client::{self, GRACE, OPERATION_TIMEOUT};
use super::output::{self, Format};
use super::{Globals, view};
use cleat_api::v1::ResizeRequest;
use cleat_backend::uri::parse_size;
use cleat_core::error::Result;

pub(super) const EXAMPLES: &str = "\
Examples:
  Grow the volume and its device, then the filesystem on it, all mounted:
    $ cleat resize data 20G
    $ resize2fs /dev/disk/by-id/cleat-data

  The file grew by other means; the device follows by itself within seconds, or at once:
    $ truncate -s 20G /var/lib/images/a.img
    $ cleat resize data

  Make it smaller, once the filesystem on it is, and nothing holds the device:
    $ umount /mnt && e2fsck -f /dev/disk/by-id/cleat-data
    $ resize2fs /dev/disk/by-id/cleat-data 5G
    $ cleat resize data 5G --shrink
";

/// Change a volume's size, online
///
/// Without SIZE the device takes over the size that the volume has now. A volume becomes smaller only
/// with --shrink, and only while nothing has its device mounted or open: what is on it must have been
/// made to fit before. Not all volumes can.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Resize {
    /// The mapping's name, its device or its URI
    target: String,
    /// The new size in bytes, or with K, M, G, T, P or E (powers of 1024)
    #[arg(allow_negative_numbers = true, value_parser = parse_size)]
    size: Option<u64>,
    /// Allow a smaller size: what lies behind the new end is lost
    #[arg(long)]
    shrink: bool,
}

/// Runs the command.
///
/// # Errors
/// What the daemon answers.
pub(super) fn run(globals: &Globals, args: Resize) -> Result<()> {
    let request = ResizeRequest {
        target: args.target,
        size_bytes: args.size.unwrap_or(0),
        allow_shrink: args.shrink,
    };
    let mapping: view::Mapping = client::run(globals, async |client| {
        let limit = OPERATION_TIMEOUT + GRACE;
        client.call(limit, async |mut node| node.resize(request).await).await
    })?
    .into();
    match globals.output {
        Some(Format::Json) => output::json(&mapping),
        Some(format) => output::text(&view::mappings(&[mapping], format == Format::Wide)),
        None => output::text(&format!("{}\n", mapping.size_bytes)),
    }
}
