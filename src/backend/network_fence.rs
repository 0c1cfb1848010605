//! Fencing by network address: it cuts off every client with an address in a range, whichever volumes the client uses.
//!
//! [`crate::fence`] cuts off single clients of one volume, and proves that they have ended before it ends the fencing.
//! Here the caller names the addresses and is responsible for them: nothing is known about the clients there.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum length of the text of a range in bytes. The longest address of IPv6 has 45.
const MAX_TEXT: usize = 49;

/// Fences address ranges at the storage of a [`Store`](crate::store::Store). A fence applies to everything that this
/// storage has, not only to the volumes of the store. It ends by itself after a time that the backend documents.
///
/// Every call can be repeated. A call that fails may have taken effect in part.
pub trait NetworkFenceStore {
    /// Fences all clients with addresses in `ranges`. After success, a server of the storage executes no request of a
    /// fenced client once it has received a request of a client that has connected since. Blocks until the storage has
    /// answered.
    ///
    /// # Errors
    /// Returns `Unsupported` for more addresses than the storage can fence, and the backend's error otherwise.
    fn fence(&self, ranges: &[AddressRange]) -> Result<()>;

    /// Ends the fencing of `ranges`. A range that is not fenced is no error. Blocks until the storage has answered.
    ///
    /// # Errors
    /// Returns the backend's error.
    fn unfence(&self, ranges: &[AddressRange]) -> Result<()>;

    /// Returns the fenced ranges, in order. Single clients that are fenced are not among them. Blocks until the storage
    /// has answered.
    ///
    /// # Errors
    /// Returns the backend's error.
    fn fenced(&self) -> Result<Vec<AddressRange>>;

    /// Returns this process as the storage sees it.
    ///
    /// # Errors
    /// Returns the backend's error.
    fn client(&self) -> Result<NetworkClient>;
}

/// A client of a storage system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkClient {
    /// The id of the storage system, which differs from those of all others.
    pub storage: String,
    /// The addresses that a fence must contain to cut off the client.
    pub addresses: Vec<IpAddr>,
}

/// A range of IP addresses: those with the same first bits. The text is ADDRESS/BITS (CIDR).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressRange {
    first: IpAddr,
    bits: u8,
}

impl AddressRange {
    /// Makes the range of the addresses whose first `bits` bits are those of `first`.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for too many bits, and if `first` is not the first address of the range.
    pub fn new(first: IpAddr, bits: u8) -> Result<Self> {
        let width = width(first);
        if u32::from(bits) > width {
            return Err(invalid(format!("{first}/{bits} has more than {width} bits")));
        }
        let start = address(first, number(first) & !host_mask(width, bits));
        if start != first {
            let message = format!("{first} is not the first address of {first}/{bits}");
            return Err(invalid(message).with_repair(format!(
                "write {start}/{bits} for the range, or {first}/{width} for the address"
            )));
        }
        Ok(Self { first, bits })
    }

    /// Returns the range that has only `address`.
    pub fn of(address: IpAddr) -> Self {
        // Widths are 32 and 128.
        let bits = if address.is_ipv4() { 32 } else { 128 };
        Self { first: address, bits }
    }

    /// Returns the first address.
    pub fn first(&self) -> IpAddr {
        self.first
    }

    /// Returns how many bits all addresses have in common.
    pub fn bits(&self) -> u8 {
        self.bits
    }

    /// Returns the number of addresses; `u128::MAX` for one more.
    pub fn count(&self) -> u128 {
        host_mask(width(self.first), self.bits).saturating_add(1)
    }

    /// Returns whether an address is in the range.
    pub fn contains(&self, other: IpAddr) -> bool {
        let mask = !host_mask(width(self.first), self.bits);
        other.is_ipv4() == self.first.is_ipv4() && number(other) & mask == number(self.first)
    }

    /// Returns the addresses, in order.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let first = self.first;
        let last = number(first) | host_mask(width(first), self.bits);
        (number(first)..=last).map(move |number| address(first, number))
    }
}

impl FromStr for AddressRange {
    type Err = Error;

    /// Parses ADDRESS/BITS.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for another text, and as [`AddressRange::new`] does.
    fn from_str(text: &str) -> Result<Self> {
        if text.len() > MAX_TEXT {
            return Err(invalid(format!("a range of addresses is longer than {MAX_TEXT} bytes")));
        }
        let parsed = text.split_once('/').and_then(|(first, bits)| {
            // `parse` of numbers accepts a sign.
            let is_number = bits.bytes().all(|byte| byte.is_ascii_digit());
            Some((first.parse().ok()?, bits.parse().ok().filter(|_| is_number)?))
        });
        let (first, bits) = parsed.ok_or_else(|| {
            invalid(format!("{text:?} is not a range of addresses")).with_repair(
                "write ADDRESS/BITS, for example 10.1.2.0/24, 10.1.2.3/32 or fd00::7/128",
            )
        })?;
        Self::new(first, bits)
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.bits)
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

/// Returns the number of bits of addresses like `address`.
fn width(address: IpAddr) -> u32 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// Returns the bits in which the addresses of a range may differ.
fn host_mask(width: u32, bits: u8) -> u128 {
    let hosts = width - u32::from(bits);
    1_u128.checked_shl(hosts).map_or(u128::MAX, |one| one - 1)
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// Returns the address with this number, of the same version as `like`.
fn address(like: IpAddr, number: u128) -> IpAddr {
    match (like, u32::try_from(number)) {
        (IpAddr::V4(_), Ok(number)) => Ipv4Addr::from_bits(number).into(),
        _ => Ipv6Addr::from_bits(number).into(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(text: &str) -> AddressRange {
        text.parse().unwrap()
    }

    #[test]
    fn ranges_have_one_text() {
        for (text, shown, count) in [
            ("10.1.2.0/24", "10.1.2.0/24", 256),
            ("10.1.2.3/32", "10.1.2.3/32", 1),
            ("0.0.0.0/0", "0.0.0.0/0", 1 << 32),
            ("FD00:0:0::0007/128", "fd00::7/128", 1),
            ("fd00::/64", "fd00::/64", 1 << 64),
            ("::/0", "::/0", u128::MAX),
        ] {
            let range = range(text);
            assert_eq!((range.to_string().as_str(), range.count()), (shown, count), "{text}");
        }
        assert_eq!(range("10.1.2.3/32"), AddressRange::of([10, 1, 2, 3].into()));
        assert!(range("::/0").contains("::1".parse().unwrap()));
        assert!(!range("::/0").contains([10, 0, 0, 1].into()));
    }

    #[test]
    fn other_texts_are_refused() {
        for (text, part) in [
            ("", "write ADDRESS/BITS"),
            ("10.1.2.3", "write ADDRESS/BITS"),
            ("10.1.2.0/", "write ADDRESS/BITS"),
            ("10.1.2.0/+24", "write ADDRESS/BITS"),
            ("10.1.2.0/24/8", "write ADDRESS/BITS"),
            ("10.1.2.0/999", "write ADDRESS/BITS"),
            ("010.1.2.0/24", "write ADDRESS/BITS"),
            ("fe80::1%eth0/128", "write ADDRESS/BITS"),
            ("10.1.2.0/33", "more than 32 bits"),
            ("fd00::/129", "more than 128 bits"),
            ("10.1.2.3/24", "write 10.1.2.0/24 for the range, or 10.1.2.3/32"),
            ("fd00::7/64", "write fd00::/64 for the range, or fd00::7/128"),
            ("1.1.1.1/32                                         ", "longer than 49 bytes"),
        ] {
            let error = text.parse::<AddressRange>().unwrap_err();
            let shown = format!("{error}; {}", error.repair().unwrap_or_default());
            assert!(shown.contains(part), "{text:?}: {shown}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "[0-9a-f.:/+%-]{0,60}") {
            if let Ok(range) = text.parse::<AddressRange>() {
                prop_assert_eq!(range.to_string().parse::<AddressRange>().unwrap(), range);
            }
        }

        #[test]
        fn a_range_has_exactly_the_addresses_with_its_bits(number: u32, bits in 22_u8..=32) {
            let inside = IpAddr::from(Ipv4Addr::from_bits(number));
            let first = Ipv4Addr::from_bits(number & (u32::MAX << (32 - bits)));
            let range = AddressRange::new(first.into(), bits).unwrap();
            let all: Vec<IpAddr> = range.addresses().collect();
            prop_assert_eq!(all.len() as u128, range.count());
            prop_assert!(all.contains(&inside) && all.iter().all(|one| range.contains(*one)));
            prop_assert!(all.is_sorted() && all[0] == range.first());
            for outside in [number ^ (1 << (32 - bits).min(31)), !number] {
                let is_inside = all.contains(&Ipv4Addr::from_bits(outside).into());
                prop_assert_eq!(range.contains(Ipv4Addr::from_bits(outside).into()), is_inside);
            }
            let refused = AddressRange::new(inside, bits).is_err();
            prop_assert_eq!(refused, inside != range.first());
        }

        #[test]
        fn ranges_of_version_6_contain_what_shares_their_bits(number: u128, other: u128, bits in 0_u8..=128) {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
            let range = AddressRange::new(Ipv6Addr::from_bits(number & mask).into(), bits).unwrap();
            prop_assert!(range.contains(Ipv6Addr::from_bits(number).into()));
            let shares = number & mask == other & mask;
            prop_assert_eq!(range.contains(Ipv6Addr::from_bits(other).into()), shares);
            prop_assert_eq!(range.to_string().parse::<AddressRange>().unwrap(), range);
        }
    }
}
