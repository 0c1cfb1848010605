//! `cleat man`: generates the manual from the definitions of `--help`, one page per command.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_mangen::Man as Page;
use clap_mangen::roff::{Roff, roman};

use super::{Cli, exit, output};
use cleat_core::error::{Error, Result};

pub(super) const EXAMPLES: &str = "\
Examples:
  Read it:
    $ cleat man | man -l -

  One page per command, for packages:
    $ cleat man --directory /usr/share/man/man1
    $ man cleat-map
";

/// Print the manual page, or write the page of every command to a directory
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Man {
    /// Write cleat.1, cleat-map.1 and so on to this directory, which is created if needed
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// Returns an error if a page cannot be written.
pub(super) fn run(args: &Man) -> Result<()> {
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    let Some(directory) = &args.directory else {
        return output::bytes(&page(&root).map_err(not_rendered)?);
    };
    std::fs::create_dir_all(directory).map_err(|error| cannot_write(directory, error))?;
    write_pages(directory, &root)
}

/// Writes the pages of a command and of its subcommands.
fn write_pages(directory: &Path, command: &Command) -> Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let path = directory.join(format!("{name}.1"));
    let content = page(command).map_err(not_rendered)?;
    std::fs::write(&path, content).map_err(|error| cannot_write(&path, error))?;
    let mut under = command.get_subcommands().filter(|command| !command.is_hide_set());
    under.try_for_each(|command| write_pages(directory, command))
}

fn page(command: &Command) -> io::Result<Vec<u8>> {
    let is_root = command.get_name() == "cleat";
    let source = concat!("cleat ", env!("CARGO_PKG_VERSION"));
    // The examples get the section EXAMPLES instead of the generated EXTRA.
    let examples = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    let page = Page::new(command.clone());
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    // The title has no date, so that the same source generates the same page.
    let title = format!(".TH {} 1 \"\" \"{source}\" \"cleat manual\"\n", name.to_uppercase());
    let mut out = title.into_bytes();
    page.render_name_section(&mut out)?;
    page.render_synopsis_section(&mut out)?;
    page.render_description_section(&mut out)?;
    page.render_options_section(&mut out)?;
    if command.has_subcommands() {
        page.render_subcommands_section(&mut out)?;
    }
    let examples = examples.strip_prefix("Examples:\n").unwrap_or(&examples);
    if !examples.is_empty() {
        verbatim(&mut out, "EXAMPLES", examples)?;
    }
    verbatim(&mut out, "EXIT STATUS", &exit_codes())?;
    if is_root {
        verbatim(&mut out, "JSON", JSON)?;
    }
    verbatim(&mut out, "ENVIRONMENT", ENVIRONMENT)?;
    verbatim(&mut out, "FILES", FILES)?;
    see_also(&mut out, command.get_name())?;
    Ok(out)
}

/// Writes a section whose lines are not filled.
fn verbatim(out: &mut Vec<u8>, heading: &str, text: &str) -> io::Result<()> {
    let mut roff = Roff::new();
    roff.control("SH", [heading]);
    roff.control("nf", []);
    for line in text.trim_end().lines() {
        roff.text([roman(line)]);
    }
    roff.control("fi", []);
    roff.to_writer(out)
}

fn see_also(out: &mut Vec<u8>, this: &str) -> io::Result<()> {
    let root = Cli::command();
    let visible = root.get_subcommands().filter(|command| !command.is_hide_set());
    let mut pages: Vec<String> = if this == "cleat" { Vec::new() } else { vec!["cleat(1)".into()] };
    let others = visible.map(Command::get_name).filter(|name| *name != this);
    pages.extend(others.map(|name| format!("cleat-{name}(1)")));
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]);
    roff.text([roman(pages.join(", "))]);
    roff.to_writer(out)
}

/// Returns the table of exit codes as text.
pub(super) fn exit_codes() -> String {
    exit::TABLE.iter().fold(String::new(), |mut text, (code, meaning)| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{code:>4}  {meaning}");
        text
    })
}

const ENVIRONMENT: &str = "\
CLEAT_SOCKET  the daemon's socket, if --socket is not given
NO_COLOR      if set, help and usage are printed without colours";

const FILES: &str = "\
/etc/cleat/cleat.toml            the daemon's configuration
/run/cleat/cleat.sock            the control socket of the daemon
/var/lib/cleat/                  the journal of mappings
/run/cleat/records/              copies of records that the journal does not take
/dev/nbdX                        the devices
/dev/disk/by-id/cleat-NAME       stable names of the devices";

pub(super) const JSON: &str = "\
With -o json each command prints one document (stats: one per line). Later versions only add fields.
A field without a value is null. Sizes are in bytes, times in seconds since the epoch.

map, set, resize, status TARGET: a mapping
  name uri state message device symlink size_bytes block_size read_only connections
  dead_connection_timeout_s on_outage iops bytes_per_s busy_poll fenced sync_failed unsaved_bytes space outage
  quiesce quiet worker_pid worker_version last_worker_end mapping_id generation mapped_at_s holders
  state    mapping, mapped, recovering, failed, unmapping, orphan
  fenced   true: another client owns the volume, or another volume has taken its place; the state is
           failed until it is mapped again
  sync_failed  true: the storage lost written data; every flush fails until it is mapped again
  unsaved_bytes  acknowledged writes in memory that are not in the store yet; a failure of the node loses them
  space    {put_bytes, written_bytes, write_amplification, object_bytes, live_bytes, space_amplification,
           copied_bytes, copy_rate} of a volume on an object store; or null. An amplification is null before
           there is data. The collector copies at most copy_rate bytes a second; null is no limit
  outage   {since_unix_ms, reason, queued, policy} while the backend cannot be reached; or null
  quiesce  whether the device is quiesced for snapshots
  quiet    {since_unix_ms, hook} while it is quiesced; or null. hook is null if file systems are frozen
  holders  {kind: mount, path, filesystem, namespace_pid} | {kind: process, pid, command}
           | {kind: device, name}
ls         {mappings: [mapping]}
unmap      {target, was_mapped, remaining_holders, steps: [{step, took_ms, note}], unmounted: [holder],
           device_left, unproven}; all but the first two are for --force
status     {version, pid, started_at_s, checks, mappings}
doctor     {worst, checks: [{name, verdict, finding, repair}]}
upgrade    {daemon: part | null, volumes: [part]}
  part     {name, outcome, from_version, to_version, paused_us, message, repair}
  outcome  restarted, handed_over, current, failed
stats      {at_ms, latency_bounds_ns, volumes: [{name, device, connections, in_flight, errors,
           counters: {OPERATION: {count, bytes, errors, total_ns, latency_buckets, latency}},
           rates: {OPERATION: {iops, bytes_per_s, errors_per_s, mean_latency_us, latency}}}]}
  latency  {p50_us, p90_us, p99_us, p999_us, max_us}
volume create, resize, clone, flatten, snapshot create, remove, protect, unprotect, rollback,
trash restore: {volume, changed}; changed is false if nothing had to be done
volume remove      {volume, changed, trash: trashed | null}
  trashed  {id, name, removed_at_s, kept_until_s}
volume list        {volumes: [{name, uri, id, size_bytes, parent, snapshots, watchers,
                   error: {kind, message, repair} | null}], next}
  next     the value of --after for the next part of the list, or null
volume info        {name, uri, id, size_bytes, used_bytes, created_at_s, objects, object_size_bytes,
                   object_prefix, stripe_unit_bytes, stripe_count, data_pool, compression, encryption,
                   features, flags,
                   parent: {name, image_id, in_trash, overlap_bytes} | null, snapshots: [snapshot],
                   clones, claim, watchers: [{client, address}], locks: [{client, cookie, address}]}
  snapshot {id, name, size_bytes, created_at_s, protected, kind: user, trash, mirror or other}
volume export, import {volume, file, size_bytes}
volume fsck, scrub {snapshots, objects, defects: [{snapshot, range: {offset, length} | null, problem}],
           unreferenced: {objects, names} | null}
volume fsck --repair {dry_run, repairs: [{range, problem, source}], deleted: [name], deleted_objects,
           refused: [{problem, reason}], snapshots, objects, defects, unreferenced}
volume snapshot list  {snapshots: [snapshot]}
volume diff        {volume, since, size_bytes, changes: [{offset, length, content}]}; content is data or zeroes
volume trash list  {trash: [trashed]}
volume trash purge {removed: [trashed], failed: [{trashed's, kind, message, repair}],
                   waiting: [trashed]}
fence ls           {volume, clients: [client]}
  client   {address, node, boot_id, mapping_id, generation, since_s, claim, holds_lock, watches,
           cut_off_until}
  claim    held, released or taken; null if the volume has no record of a claim
fence add          {volume, cut_off: [address]}
fence clear        {volume, address, changed}
kubectl volumes    {volumes: [{persistent_volume, claim, handle, grant, holders: [granted], waits_for,
                   actions}]}
  granted  {node, mode, generation, since, revoked, safe_to_mount, safe_to_detach, device}
kubectl node       {node, state, volumes: [{persistent_volume, claim, handle, attached, holder: granted | null,
                   fenced, pods, waits_for}]}
kubectl why        {claim, waits, answer, action, steps: [{kind, name, state}]}
kubectl drain-check {node, can_be_drained, moving, obstacles: [{what, reason, action}]}
kubectl take-over  a List of a PersistentVolume and a PersistentVolumeClaim
progress   {progress: {operation, volume, done, total}}, lines on stderr while a volume command runs
errors     {error: {kind, message, repair, exit_code}}, on stderr";

fn cannot_write(path: &Path, error: io::Error) -> Error {
    Error::from_io(format!("cannot write {}", path.display()), error)
        .with_repair("use another directory, or run the command as root")
}

fn not_rendered(error: io::Error) -> Error {
    Error::from_io("cannot render the manual", error)
}
