//! `cleat volume list` and `info`.

use std::fmt::Write as _;

use super::time;
use crate::cli::output::{self, Format, Table};
use crate::cli::{Globals, exit, size};
use cleat_backend::store::{self, Listing, Page};
use cleat_backend::uri::{Size, StoreUri, VolumeUri};
use cleat_core::error::Result;

const LIST_EXAMPLES: &str = "\
Examples:
  Only names, one per line; then with sizes, parents, snapshots and users:
    $ cleat volume list rbd:volumes
    $ cleat volume list rbd:volumes/tenant --long

  The files of a directory:
    $ cleat volume list file:/var/lib/images

  In pages of a thousand:
    $ cleat volume list rbd:volumes -o json --limit 1000
    $ cleat volume list rbd:volumes -o json --limit 1000 --after vol-0999
";

/// List the volumes of a pool, a namespace or a directory
///
/// Listing names is fast; --long opens each image. A volume that cannot be read is listed nevertheless, with
/// the reason on stderr, or as `error` in JSON; the exit code is then that of the first such error.
#[derive(Debug, clap::Args)]
#[command(visible_alias = "ls", after_long_help = LIST_EXAMPLES)]
pub(super) struct List {
    /// The store: rbd:POOL, rbd:POOL/NAMESPACE or file:/DIRECTORY
    #[arg(value_parser = crate::backends::store)]
    place: StoreUri,
    /// Show the size, parent, snapshots and users of each volume; also with -o wide
    #[arg(short, long)]
    long: bool,
    /// The maximum number of volumes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Only names that follow this one
    #[arg(long, value_name = "NAME")]
    after: Option<String>,
}

const INFO_EXAMPLES: &str = "\
Examples:
    $ cleat volume info rbd:volumes/data
    $ cleat volume info rbd:volumes/data@monday

  Show which node has it mapped:
    $ cleat volume info rbd:volumes/data -o json | jq '.claim.node, .watchers'
";

/// Show the properties of a volume
///
/// Shows its size and layout, its parent, snapshots and clones, the clients that have it open for writing
/// or hold its lock, and its claim. The used space is shown if it is known without a scan: for an image
/// with a valid fast-diff map.
#[derive(Debug, clap::Args)]
#[command(after_long_help = INFO_EXAMPLES)]
pub(super) struct Info {
    /// The volume, or a snapshot of it
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
}

/// Lists volumes. Returns the exit code, which is that of the first volume that could not be read.
pub(super) fn list(globals: &Globals, args: List) -> Result<u8> {
    let details = args.long || globals.output == Some(Format::Wide);
    let limit = args.limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let page = Page { after: args.after, limit, details };
    let listing = args.place.connect()?.list(&page)?;
    let failed = || listing.volumes.iter().filter_map(|entry| Some((entry, entry.error.as_ref()?)));
    let code = failed().next().map_or(exit::OK, |(_, error)| exit::code(error.kind));
    if globals.output == Some(Format::Json) {
        return output::json(&listing).map(|()| code);
    }
    output::text(&if details { table(&listing) } else { names(&listing) })?;
    for (entry, why) in failed() {
        output::note(&format!("cannot read {}: {why}", entry.name));
    }
    if let Some(last) = listing.next {
        output::note(&format!("there are more: --after '{last}'"));
    }
    Ok(code)
}

pub(super) fn info(globals: &Globals, args: &Info) -> Result<()> {
    let (store, name, snapshot) = args.uri.store_location()?;
    let info = store.connect()?.info(&name, snapshot.as_deref())?;
    if globals.output == Some(Format::Json) {
        return output::json(&info);
    }
    output::text(&described(&info))
}

fn names(listing: &Listing) -> String {
    listing.volumes.iter().fold(String::new(), |mut text, entry| {
        text.push_str(&output::printable(&entry.name));
        text.push('\n');
        text
    })
}

fn table(listing: &Listing) -> String {
    let mut table =
        Table::new(&["NAME", "SIZE", "SNAPSHOTS", "USERS", "PARENT"]).align_right([1, 2, 3]);
    let number = |number: Option<usize>| number.map(|n| n.to_string()).unwrap_or_default();
    for entry in &listing.volumes {
        table.row(vec![
            entry.name.clone(),
            entry.size_bytes.map(size::human).unwrap_or_default(),
            number(entry.snapshots),
            number(entry.watchers),
            entry.parent.clone().unwrap_or_default(),
        ]);
    }
    table.render()
}

fn described(info: &store::Info) -> String {
    let mut text = format!("{}\n", output::printable(&info.uri));
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "  {name:<11} {}", output::printable(&value));
        }
    };
    let used = info.used_bytes.map(|used| format!(", {} used", size::human(used)));
    let bytes = info.size_bytes;
    line("size", format!("{} ({bytes} bytes){}", size::human(bytes), used.unwrap_or_default()));
    line("id", info.id.clone().unwrap_or_default());
    line("created", info.created_at_s.map(time).unwrap_or_default());
    line("objects", objects(info));
    line("data pool", info.data_pool.clone().unwrap_or_default());
    line("compression", info.compression.clone().unwrap_or_default());
    line("encryption", info.encryption.clone().unwrap_or_default());
    line("features", info.features.join(", "));
    line("flags", info.flags.join(", "));
    let parent = info.parent.as_ref();
    let parent = parent.map(|from| format!("{from}, {} of it", size::human(from.overlap_bytes)));
    line("parent", parent.unwrap_or_default());
    line("snapshots", snapshots(&info.snapshots));
    line(
        "clones",
        match &info.clones {
            Some(clones) => clones.join(", "),
            None => "unknown: this client may not read all pools".to_owned(),
        },
    );
    for watcher in &info.watchers {
        line("open by", format!("{} at {}", watcher.client, watcher.address));
    }
    for lock in &info.locks {
        let address = lock.address.as_ref().map(|address| format!(" at {address}"));
        let cookie = lock.cookie.as_ref().map(|cookie| format!(" ({cookie})"));
        let (address, cookie) = (address.unwrap_or_default(), cookie.unwrap_or_default());
        line("locked by", format!("{}{address}{cookie}", lock.client));
    }
    line("claim", info.claim.as_ref().map(ToString::to_string).unwrap_or_default());
    text
}

fn objects(info: &store::Info) -> String {
    let (Some(count), Some(object)) = (info.objects, info.object_size_bytes) else {
        return String::new();
    };
    let mut text = format!("{count} of {}", Size(object));
    if let (Some(unit), Some(stripes)) = (info.stripe_unit_bytes, info.stripe_count)
        && stripes > 1
    {
        // Writing to a String cannot fail.
        let _ = write!(text, ", striped in units of {} over {stripes}", Size(unit));
    }
    if let Some(prefix) = &info.object_prefix {
        let _ = write!(text, ", {prefix}");
    }
    text
}

fn snapshots(snapshots: &[store::Snapshot]) -> String {
    let shown: Vec<String> = snapshots
        .iter()
        .map(|snapshot| match (snapshot.kind, snapshot.protected) {
            ("trash", _) => format!("{} (removed, kept for its clones)", snapshot.name),
            (_, true) => format!("{} (protected)", snapshot.name),
            _ => snapshot.name.clone(),
        })
        .collect();
    shown.join(", ")
}
