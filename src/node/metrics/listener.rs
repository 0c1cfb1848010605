//! The TCP listener of the endpoint.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpSocket};

/// The connections that the kernel keeps until they are accepted.
const BACKLOG: u32 = 1024;

/// Listens on `address`. `[::]` stands for all addresses, also those of IPv4, and also where the kernel has no IPv6: one
/// configuration is for all nodes of a cluster, and the address of a node may be of either kind.
///
/// # Errors
/// Returns an error if the address is in use.
pub(super) async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    if address.ip() != Ipv6Addr::UNSPECIFIED {
        return TcpListener::bind(address).await;
    }
    all(address.port(), listen_on_both).await
}

async fn all(
    port: u16,
    on_both: impl Fn(SocketAddr) -> io::Result<TcpListener>,
) -> io::Result<TcpListener> {
    match on_both((Ipv6Addr::UNSPECIFIED, port).into()) {
        // Where the address is in use, the one of IPv4 alone would be half of what was configured.
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await
        }
        bound => bound,
    }
}

fn listen_on_both(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v6()?;
    socket.set_reuseaddr(true)?;
    // The default is a setting of the node (net.ipv6.bindv6only).
    setsockopt(&socket, sockopt::Ipv6V6Only, &false)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_addresses_are_those_of_ipv6_and_of_ipv4() {
        let listener = listen("[::]:0".parse().unwrap()).await.unwrap();
        let bound = listener.local_addr().unwrap();
        tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, bound.port())).await.unwrap();
        if bound.is_ipv6() {
            tokio::net::TcpStream::connect((Ipv6Addr::LOCALHOST, bound.port())).await.unwrap();
            let again = listen((Ipv6Addr::UNSPECIFIED, bound.port()).into()).await;
            assert_eq!(again.unwrap_err().kind(), io::ErrorKind::AddrInUse);
        }
    }

    #[tokio::test]
    async fn without_ipv6_all_addresses_are_those_of_ipv4() {
        let without_ipv6 = |_| Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT));
        let listener = all(0, without_ipv6).await.unwrap();
        assert!(listener.local_addr().unwrap().is_ipv4());
    }

    #[tokio::test]
    async fn one_address_is_that_address() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        assert!(listener.local_addr().unwrap().ip().is_loopback());
    }
}
