//! Which client gives way when too many have not completed their handshake.
//!
//! A client that says nothing keeps a thread and a ring until its handshake times out. Its number is
//! therefore bounded, apart from the number of clients that are served: a new client takes the place of the
//! one that has been silent for the longest time, of the same address first.

use std::net::{IpAddr, Ipv6Addr};

/// The maximum number of clients that have not completed their handshake.
pub(super) const IN_ALL: usize = 32;

/// The maximum number of such clients from one address.
const PER_ADDRESS: usize = 16;

/// The network that a client belongs to: its IPv4 address, or its IPv6 prefix of 64 bits, in which one
/// machine can have any address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Origin(IpAddr);

impl Origin {
    pub(super) fn of(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(address) => {
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & u128::MAX << 64))
            }
            address @ IpAddr::V4(_) => address,
        })
    }
}

/// Returns the index of the client that gives way to a new one from `origin`, if there are too many.
/// `clients` are those that have not completed their handshake, the oldest first; `limit` is the maximum
/// number of all.
pub(super) fn displaced(
    clients: &[Option<Origin>],
    origin: Option<Origin>,
    limit: usize,
) -> Option<usize> {
    let same = |client: &Option<Origin>| origin.is_some() && *client == origin;
    if clients.iter().filter(|client| same(client)).count() >= PER_ADDRESS {
        return clients.iter().position(same);
    }
    (clients.len() >= limit).then_some(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(address: &str) -> Option<Origin> {
        Some(Origin::of(address.parse().unwrap()))
    }

    #[test]
    fn the_oldest_of_the_same_address_gives_way_first() {
        let [one, two] = ["10.0.0.1", "10.0.0.2"].map(origin);
        let mut clients = vec![two];
        clients.extend([one; PER_ADDRESS]);
        assert_eq!(displaced(&clients, one, IN_ALL), Some(1));
        assert_eq!(displaced(&clients, two, IN_ALL), None);
        assert_eq!(displaced(&clients, two, clients.len()), Some(0));
        // Clients of a unix socket have no address.
        let local = [None; IN_ALL];
        assert_eq!(displaced(&local[1..], None, IN_ALL), None);
        assert_eq!(displaced(&local, None, IN_ALL), Some(0));
    }

    #[test]
    fn an_ipv6_network_and_a_mapped_ipv4_address_are_one_origin() {
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::ffff:0:0:1"));
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:1::1"));
        assert_eq!(origin("::ffff:10.0.0.1"), origin("10.0.0.1"));
    }
}
