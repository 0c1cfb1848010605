//! `cleat volume export` and `import`: copies of a volume in files, by `qemu-img` over NBD.
//!
//! A child process serves the volume as `cleat serve` does, and `qemu-img` copies between the server and the file.
//! So every volume and every format is copied by programs that exist for it, and holes stay holes.

mod programs;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use serde::Serialize;

use self::programs::{ImageInfo, Server, convert, inspect};
use super::change::volume_location;
use super::{TakeOverArgs, Tracker};
use crate::cli::Globals;
use crate::cli::output::{self, Format as OutputFormat};
use cleat_backend::store::{Layout, Store};
use cleat_backend::uri::{Size, VolumeUri};
use cleat_core::error::{Error, ErrorKind, Result};

const EXPORT_EXAMPLES: &str = "\
Examples:
  A backup of a snapshot in a compact file:
    $ cleat volume export rbd:volumes/data@monday /backup/data.qcow2

  A raw file; ranges without data are holes in it:
    $ cleat volume export dir:/var/lib/volumes/data /backup/data.img
";

/// Copy a volume, or a snapshot, to a file
///
/// The file must not exist; it has its name only when it is complete and durable, and only its owner can read it (mode 0600).
/// The volume is opened read-only. A volume in use is copied while it changes, and the copy has no consistent content then:
/// take a snapshot, and export that. Needs the program qemu-img (Debian: qemu-utils).
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXPORT_EXAMPLES)]
pub(super) struct Export {
    /// The volume, or a snapshot of it
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    /// The file that is created
    file: PathBuf,
    #[command(flatten)]
    format: FormatArgs,
}

const IMPORT_EXAMPLES: &str = "\
Examples:
  Create a volume with the content of an image, and its size:
    $ cleat volume import debian-12.qcow2 rbd:volumes/debian

  Replace the content of a volume that exists:
    $ cleat volume import /backup/data.img dir:/var/lib/volumes/data --overwrite
";

/// Create a volume with the content of a file
///
/// The volume must not exist, except with --overwrite; it gets the size of the file's content. An import that was
/// interrupted leaves a part of the content in the volume: repeat it with --overwrite, or remove the volume. Files that
/// refer to other files (backing files) are refused. Needs the program qemu-img (Debian: qemu-utils).
#[derive(Debug, clap::Args)]
#[command(after_long_help = IMPORT_EXAMPLES)]
pub(super) struct Import {
    /// The file to read
    file: PathBuf,
    /// The volume
    #[arg(value_parser = crate::backends::volume)]
    uri: VolumeUri,
    #[command(flatten)]
    format: FormatArgs,
    /// Replace the content of a volume that exists and is at least as large
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    take_over: TakeOverArgs,
}

#[derive(Debug, clap::Args)]
struct FormatArgs {
    /// The format of the file [default: qcow2 if its name ends in .qcow2, otherwise raw]
    // It is never guessed from the content, which the user of a raw volume chooses.
    #[arg(long, value_name = "FORMAT")]
    format: Option<FileFormat>,
}

/// The format of a file with the content of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum FileFormat {
    /// The bytes of the volume
    Raw,
    /// The format of QEMU
    Qcow2,
}

impl FormatArgs {
    fn of(&self, file: &Path) -> FileFormat {
        let by_name = match file.extension().is_some_and(|extension| extension == "qcow2") {
            true => FileFormat::Qcow2,
            false => FileFormat::Raw,
        };
        self.format.unwrap_or(by_name)
    }
}

impl FileFormat {
    /// The name that `qemu-img` has for the format.
    fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// The result in JSON.
#[derive(Debug, Serialize)]
struct Copied<'a> {
    volume: &'a str,
    file: &'a Path,
    size_bytes: u64,
}

pub(super) fn export(globals: &Globals, args: &Export) -> Result<()> {
    let format = args.format.of(&args.file);
    let file = absolute(&args.file)?;
    if fs::symlink_metadata(&file).is_ok() {
        let message = format!("cannot export to {}: the file exists", file.display());
        return Err(Error::new(ErrorKind::AlreadyExists, message)
            .with_repair("choose another name, or remove the file"));
    }
    let tracker = Tracker::begin(globals, "export", &args.uri)?;
    let server = Server::start(&args.uri, &["--read-only"])?;
    let part = Part::beside(&file)?;
    tracker.run(|progress| {
        let target = ["-O", format.name()];
        convert(&["-f", "raw"], server.uri(), &target, part.path.as_os_str(), progress)
    })?;
    let size_bytes = inspect(&part.path, format.name())?.virtual_size;
    server.stop()?;
    part.complete(&file)?;
    finish(globals, &args.uri, &file, size_bytes)
}

pub(super) fn import(globals: &Globals, args: &Import) -> Result<()> {
    let format = args.format.of(&args.file);
    let file = absolute(&args.file)?;
    let (place, name) = volume_location(&args.uri)?;
    let ImageInfo { virtual_size, .. } = inspect(&file, format.name())?;
    let tracker = Tracker::begin(globals, "import", &args.uri)?;
    let store = args.take_over.store(&place)?;
    if args.overwrite {
        check_room(&*store, &name, args, virtual_size)?;
    } else {
        create(&*store, &name, args, virtual_size)?;
    }
    let more: &[&str] = if args.take_over.take_over { &["--take-over"] } else { &[] };
    let server = Server::start(&args.uri, more)?;
    let zero: &[&str] = if args.overwrite { &[] } else { &["--target-is-zero"] };
    let target = [&["-n", "-O", "raw"], zero].concat();
    let source = ["-f", format.name()];
    let copied = tracker.run(|progress| {
        convert(&source, file.as_os_str(), &target, server.uri().as_ref(), progress)
    });
    // The server has written everything when it has ended.
    copied.and(server.stop()).map_err(|error| match error.repair() {
        Some(_) => error,
        None => error.with_repair(
            "the volume has a part of the content: repeat the command with --overwrite",
        ),
    })?;
    finish(globals, &args.uri, &file, virtual_size)
}

/// Checks that a volume which exists has room for the content of the file.
fn check_room(store: &dyn Store, name: &str, args: &Import, needed: u64) -> Result<()> {
    let size = store.info(name, None)?.size_bytes;
    if size >= needed {
        return Ok(());
    }
    let (file, needed_text) = (args.file.display(), Size(needed));
    let message =
        format!("cannot import {file}: it has {needed_text}, and the volume only {}", Size(size));
    let repair = format!("cleat volume resize '{}' {needed}", args.uri);
    Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(repair))
}

/// Creates the volume, which must not exist.
fn create(store: &dyn Store, name: &str, args: &Import, size: u64) -> Result<()> {
    match store.create(name, size, &Layout::default()) {
        Ok(true) => Ok(()),
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => {
            let uri = args.uri.to_string();
            let message = format!("cannot import to {}: the volume exists", output::short(&uri));
            Err(Error::new(ErrorKind::AlreadyExists, message)
                .with_repair("add --overwrite to replace its content, or choose another name"))
        }
    }
}

fn finish(globals: &Globals, uri: &VolumeUri, file: &Path, size_bytes: u64) -> Result<()> {
    if globals.output == Some(OutputFormat::Json) {
        return output::json(&Copied { volume: &uri.to_string(), file, size_bytes });
    }
    Ok(())
}

/// Returns the path from the root, which `qemu-img` never takes for the name of a protocol.
///
/// # Errors
/// Returns `InvalidArgument` for `-`, which would be a file with this name and not the standard output or input.
fn absolute(file: &Path) -> Result<PathBuf> {
    if file == Path::new("-") {
        let message = "a volume can be copied to and from files only, not - (a pipe)";
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("name a file; for a file with the name -, write ./-"));
    }
    std::path::absolute(file)
        .map_err(|error| Error::from_io(format!("cannot use the path {}", file.display()), error))
}

/// A file that is not complete. Without [`Part::complete`] it is removed.
struct Part {
    path: PathBuf,
    is_complete: bool,
}

impl Part {
    /// The file beside the one that it becomes, with a name that says so.
    fn beside(file: &Path) -> Result<Self> {
        let name = file.file_name().ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, format!("{} is not a file", file.display()))
        })?;
        let mut part = name.to_owned();
        part.push(".part");
        let path = file.with_file_name(part);
        // Only one export at a time writes the file, and only its owner reads the content of the volume.
        let mut new = OpenOptions::new();
        match new.write(true).create_new(true).mode(0o600).open(&path) {
            Ok(_) => Ok(Self { path, is_complete: false }),
            Err(error) => {
                let repair = "check the directory; a file with this name is left by an export that was killed, or is the complete copy of one whose name was taken: look before you remove it";
                let what = format!("cannot create {}", path.display());
                Err(Error::from_io(what, error).with_repair(repair))
            }
        }
    }

    /// Makes the content durable, and gives the file its name. The copy stays if it cannot have this name.
    fn complete(mut self, file: &Path) -> Result<()> {
        let failed = |error| Error::from_io(format!("cannot write {}", file.display()), error);
        File::open(&self.path).and_then(|part| part.sync_all()).map_err(failed)?;
        self.is_complete = true;
        rename_to_new(&self.path, file).map_err(|error| {
            let part = self.path.display();
            failed(error).with_repair(format!("the complete copy is {part}: give it another name"))
        })?;
        let directory = file.parent().unwrap_or(Path::new("/"));
        File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.is_complete {
            // What cannot be removed is not used by anything.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Gives a file a name that was not taken meanwhile.
fn rename_to_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE) {
        // Network file systems, as NFS, do not have this kind of rename, but hard links.
        Err(Errno::EINVAL) => {
            fs::hard_link(from, to)?;
            fs::remove_file(from)
        }
        other => other.map_err(io::Error::from),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_format_follows_from_the_name_or_the_option() {
        let of = |format, name: &str| FormatArgs { format }.of(Path::new(name));
        assert_eq!(of(None, "a.qcow2"), FileFormat::Qcow2);
        assert_eq!(of(None, "a.img"), FileFormat::Raw);
        assert_eq!(of(Some(FileFormat::Raw), "a.qcow2"), FileFormat::Raw);
    }

    #[test]
    fn a_file_has_its_name_only_when_it_is_complete() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("a");
        drop(Part::beside(&file).expect("the name is free"));
        assert_eq!(fs::read_dir(directory.path()).expect("a directory").count(), 0);
        let part = Part::beside(&file).expect("the name is free");
        assert!(Part::beside(&file).is_err(), "one export at a time");
        fs::write(&part.path, "content").expect("a file");
        part.complete(&file).expect("the name is free");
        assert_eq!(fs::read_to_string(&file).expect("a file"), "content");
        let mode = fs::metadata(&file).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(directory.path()).expect("a directory").count(), 1);
    }

    #[test]
    fn a_complete_copy_is_kept_if_its_name_is_taken() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("a");
        let part = Part::beside(&file).expect("the name is free");
        let path = part.path.clone();
        fs::write(&path, "new").expect("a file");
        fs::write(&file, "other").expect("a file");
        let error = part.complete(&file).expect_err("the name is taken");
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert!(error.repair().is_some_and(|repair| repair.contains("a.part")), "{error:?}");
        let content = |path: &Path| fs::read_to_string(path).expect("a file");
        assert_eq!((content(&file), content(&path)), ("other".to_owned(), "new".to_owned()));
    }
}
