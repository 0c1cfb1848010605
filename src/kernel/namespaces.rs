//! Runs an action in every mount namespace that has a device mounted.
//!
//! Only a thread of its own enters a namespace, and ends there: a thread that left the process's own
//! namespace must do nothing else. The thread reads the mounts of the namespace from inside, so that the
//! paths are right. It does so through a descriptor of this process's /proc, because the namespace may have
//! no /proc or a different one.
//!
//! An unmount returns only when the last one of a file system has written its dirty data, which never
//! happens while the backend does not answer. So each namespace has its own thread, with a deadline.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use nix::fcntl::{OFlag, openat};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::Mode;

use super::UnmountScope;
use super::bounded_call::BoundedCalls;
use super::mountinfo::parse_mountinfo;
use super::sysfs::Disk;
use super::usage::{MOUNTINFO_MAX, Proc, too_much};
use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum number of namespaces that may have the device mounted; each needs a thread.
const NAMESPACES_MAX: usize = 1024;
/// The maximum number of threads at the same time.
const AT_ONCE: usize = 32;

/// A mount namespace, and whether it is the one of this process.
pub(super) struct Namespace {
    descriptor: File,
    pub(super) own: bool,
}

/// Runs `action` in every namespace of `which` that has the device mounted, this process's own first,
/// each time on a thread of its own. Blocks until `deadline` at most. Returns what each action returned.
///
/// # Errors
/// Returns `TimedOut` if an action still runs at the deadline; otherwise the errors of reading /proc.
pub(super) fn in_namespaces<T: Send + 'static>(
    proc: &Proc,
    threads: &BoundedCalls,
    disk: &Disk,
    which: UnmountScope,
    what: &str,
    deadline: Instant,
    action: fn(&File, &Disk) -> io::Result<T>,
) -> Result<Vec<io::Result<T>>> {
    let unreadable = |error| Error::from_io(format!("cannot open {}", proc.0.display()), error);
    // Shared, so that it is closed here: a thread may have a table of descriptors of its own.
    let directory = Arc::new(File::open(&proc.0).map_err(unreadable)?);
    let mut failed = None;
    let mut done = Vec::new();
    for some in namespaces(proc, disk, which)?.chunks(AT_ONCE) {
        std::thread::scope(|scope| {
            let running: Vec<_> = some
                .iter()
                .map(|namespace| {
                    let (directory, disk) = (Arc::clone(&directory), disk.clone());
                    let (own, there) = (namespace.own, namespace.descriptor.try_clone());
                    let call = move || {
                        let there = there?;
                        if !own {
                            enter(&there)?;
                        }
                        drop(there);
                        action(&directory, &disk)
                    };
                    scope.spawn(move || threads.run(what, deadline, call, drop))
                })
                .collect();
            for thread in running {
                match thread.join() {
                    Ok(Ok(outcome)) => done.push(outcome),
                    Ok(Err(error)) => failed = Some(error),
                    Err(_) => {
                        let message = format!("the thread to {what} panicked");
                        failed = Some(Error::new(ErrorKind::Internal, message));
                    }
                }
            }
        });
    }
    failed.map_or(Ok(done), Err)
}

/// Returns the namespaces in which the device is mounted, this process's own first, each once.
pub(super) fn namespaces(proc: &Proc, disk: &Disk, which: UnmountScope) -> Result<Vec<Namespace>> {
    let mut found: Vec<Namespace> = Vec::new();
    let (mut seen, mut entered) = (HashSet::new(), HashSet::new());
    let own = ("self".to_owned(), true);
    let others = match which {
        UnmountScope::All => proc.processes()?,
        UnmountScope::Own | UnmountScope::None => Vec::new(),
    };
    let others = others.into_iter().map(|pid| (pid.to_string(), false));
    for (process, own) in std::iter::once(own).chain(others) {
        let directory = proc.0.join(&process);
        // Opened first, so that the namespace whose mounts are read is the one that is entered. A process
        // that has ended has no namespace.
        let Ok(descriptor) = File::open(directory.join("ns/mnt")) else { continue };
        let identity = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino()));
        let Ok(namespace) = descriptor.metadata().map(|found| (found.dev(), found.ino())) else {
            continue;
        };
        // Of the processes of one namespace, one may be in a chroot and see fewer mounts than the others,
        // and than a thread that enters.
        let view = (namespace, identity(&directory.join("root")).ok());
        if entered.contains(&namespace) || !seen.insert(view) {
            continue;
        }
        if own || has_mount(proc, &process, disk) {
            entered.insert(namespace);
            found.push(Namespace { descriptor, own });
        }
        if found.len() > NAMESPACES_MAX {
            return Err(too_much("mount namespaces"));
        }
    }
    Ok(found)
}

fn has_mount(proc: &Proc, process: &str, disk: &Disk) -> bool {
    let mut text = Vec::new();
    let file = File::open(proc.0.join(process).join("mountinfo"));
    let read = file.and_then(|file| file.take(MOUNTINFO_MAX).read_to_end(&mut text));
    read.is_ok() && parse_mountinfo(&text).any(|mount| mount.is_on(disk))
}

/// Moves the calling thread into a mount namespace, for the rest of its life.
fn enter(namespace: &File) -> io::Result<()> {
    // setns(2) requires a root and working directory that the thread shares with no other.
    unshare(CloneFlags::CLONE_FS)?;
    Ok(setns(namespace, CloneFlags::CLONE_NEWNS)?)
}

/// Reads the mountinfo of the calling thread's namespace (proc_pid_mountinfo(5)). `proc` is /proc.
pub(super) fn mountinfo(proc: &File) -> io::Result<Vec<u8>> {
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    let file = File::from(openat(proc, "thread-self/mountinfo", flags, Mode::empty())?);
    let mut text = Vec::new();
    file.take(MOUNTINFO_MAX).read_to_end(&mut text)?;
    Ok(text)
}
