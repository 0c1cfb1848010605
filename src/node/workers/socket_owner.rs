//! Finds the process that listens on a worker's control socket. For a device without a record, this is the
//! only way to find its worker.

use std::fs;
use std::io::Read;
use std::path::Path;

use cleat_core::error::{Error, Result};

/// How much of /proc/net/unix is read, in bytes; a socket takes about 80.
const MAX_TABLE: u64 = 64 << 20;
/// The flags of a listening socket in the table (include/uapi/linux/net.h, __SO_ACCEPTCON).
const LISTENS: &str = "00010000";

/// Returns the process that listens on the socket at `path`. Blocks while it searches the open files of all
/// processes.
///
/// # Errors
/// Returns an error if /proc cannot be read.
pub(super) fn listener_of(path: &Path) -> Result<Option<u32>> {
    let Some(link) = link_of(path)? else { return Ok(None) };
    let processes = fs::read_dir("/proc").map_err(unreadable)?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    Ok(pids.into_iter().find(|pid| has_open(*pid, &link)))
}

/// Returns whether process `pid` has the socket open that listens at `path`. Blocks while it reads /proc.
///
/// # Errors
/// Returns an error if /proc cannot be read.
pub(super) fn listens(pid: u32, path: &Path) -> Result<bool> {
    Ok(link_of(path)?.is_some_and(|link| has_open(pid, &link)))
}

/// Returns what the links in /proc/PID/fd to the socket that listens at `path` contain.
fn link_of(path: &Path) -> Result<Option<String>> {
    let mut table = Vec::new();
    let file = fs::File::open("/proc/net/unix").map_err(unreadable)?;
    file.take(MAX_TABLE).read_to_end(&mut table).map_err(unreadable)?;
    // The names of other sockets may be invalid UTF-8.
    let table = String::from_utf8_lossy(&table);
    Ok(inode_of(&table, path).map(|inode| format!("socket:[{inode}]")))
}

fn unreadable(error: std::io::Error) -> Error {
    Error::from_io("cannot read /proc", error)
}

/// Returns whether a process has the file open to which `link` points.
fn has_open(pid: u32, link: &str) -> bool {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.any(|found| found.as_os_str() == link)
}

/// Returns the inode of the socket that listens at `path`. The columns of the table are
/// `Num: RefCount Protocol Flags Type St Inode Path` (unix_seq_show, net/unix/af_unix.c).
fn inode_of<'a>(table: &'a str, path: &Path) -> Option<&'a str> {
    let path = path.to_str()?;
    table.lines().find_map(|line| {
        // The path is the rest of the line and may contain spaces.
        let mut words = line.strip_suffix(path)?.split_whitespace();
        let listens = words.nth(3)? == LISTENS;
        let inode = words.nth(2)?;
        (listens && words.next().is_none()).then_some(inode)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_listens_only_on_its_own_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        assert!(!listens(std::process::id(), &path).unwrap());
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(listens(std::process::id(), &path).unwrap());
        assert!(!listens(1, &path).unwrap());
    }

    #[test]
    fn the_listening_process_is_found_and_a_connected_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        // Another socket's name is not valid UTF-8.
        use std::os::linux::net::SocketAddrExt;
        let name = [&b"cleat-\xff"[..], &std::process::id().to_ne_bytes()].concat();
        let name = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
        let _other = std::os::unix::net::UnixListener::bind_addr(&name).unwrap();
        let path = directory.path().join("a b.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let _client = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let (_server, _) = listener.accept().unwrap();
        assert_eq!(listener_of(&path).unwrap(), Some(std::process::id()));
        drop(listener);
        // The accepted connection still has the path.
        assert_eq!(listener_of(&path).unwrap(), None);
    }
}
