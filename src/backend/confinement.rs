//! What a process that serves a volume keeps of its access to the system.

use std::fmt;
use std::path::PathBuf;

/// When a process that serves a volume can give up its access to the system, and which access it keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Confinement {
    /// After [`VolumeSpec::open`](crate::VolumeSpec::open), which starts no thread: everything that the process will use
    /// is open then.
    AfterOpen,
    /// Before `VolumeSpec::open`, because opening starts threads, which can only be confined from
    /// their start on.
    BeforeOpen {
        /// Directories, and special files, that will be read as they are then. Every user must be allowed to
        /// read them: the process is not root any more.
        paths: Vec<PathBuf>,
        /// Files that will be read, and directories whose files will be read, as they are before the
        /// confinement: the process gets copies in memory, at the same paths.
        copies: Vec<PathBuf>,
        /// Directories in which files and directories will be made, written, linked and removed. Every user must be
        /// allowed to do that in them; a directory above, which the process does not see, keeps other users away.
        writable: Vec<PathBuf>,
        /// The sockets that will be needed.
        network: Network,
    },
}

/// The network that a confined process can use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Network {
    /// None.
    #[default]
    None,
    /// Connections to one address, which a second process makes, see [`Connector`](crate::connector::Connector). The process
    /// itself has no network.
    Connector(Address),
    /// TCP connections to these ports of any address, and UDP, to resolve names. Kernels before 6.7 do not enforce
    /// the ports.
    Ports(Vec<u16>),
    /// Every socket of AF_INET and AF_INET6.
    Any,
}

/// The files with which the C library resolves names.
pub const NAME_FILES: [&str; 6] = [
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
];

/// A server, by its name or its IP address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// The name or the address, without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_as_in_a_url() {
        let shown = |host: &str| Address { host: host.into(), port: 9000 }.to_string();
        assert_eq!(shown("store"), "store:9000");
        assert_eq!(shown("::1"), "[::1]:9000");
    }
}
