//! Which process listens on a worker's control socket: for a device without a record, the only way
//! from its identity to its worker.

use std::fs;
use std::io::Read;
use std::path::Path;

use cleat_core::error::{Error, Result};

/// What /proc/net/unix may be long, in bytes; a socket takes about 80.
const TABLE_MAX: u64 = 64 << 20;
/// The flag of a socket that listens (include/uapi/linux/net.h, __SO_ACCEPTCON), as the table shows it.
const LISTENS: &str = "00010000";

/// The process that has the socket bound at `path` open to listen on it.
///
/// # Errors
/// When /proc cannot be read.
pub(super) fn listener_of(path: &Path) -> Result<Option<u32>> {
    let unreadable = |error| Error::from_io("cannot read /proc", error);
    let mut table = Vec::new();
    let file = fs::File::open("/proc/net/unix").map_err(unreadable)?;
    file.take(TABLE_MAX).read_to_end(&mut table).map_err(unreadable)?;
    // The names of other sockets may be anything, text or not.
    let table = String::from_utf8_lossy(&table);
    let Some(inode) = inode_of(&table, path) else { return Ok(None) };
    let link = format!("socket:[{inode}]");
    let processes = fs::read_dir("/proc").map_err(unreadable)?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    Ok(pids.into_iter().find(|pid| has_open(*pid, &link)))
}

/// Whether a process has what `link` names open.
fn has_open(pid: u32, link: &str) -> bool {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.any(|found| found.as_os_str() == link)
}

/// `Num: RefCount Protocol Flags Type St Inode Path` (proc_net_unix, net/unix/af_unix.c).
fn inode_of<'a>(table: &'a str, path: &Path) -> Option<&'a str> {
    let path = path.to_str()?;
    table.lines().find_map(|line| {
        // The path goes to the end of the line, spaces and all.
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
    fn who_listens_is_found_and_who_is_connected_is_not() {
        let directory = tempfile::tempdir().unwrap();
        // Next to one whose name is no text.
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
        // The accepted end still carries the path.
        assert_eq!(listener_of(&path).unwrap(), None);
    }
}
