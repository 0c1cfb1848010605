//! The names of mappings whose users gave none, and which mapping a URI means. Options are not part of
//! a volume's identity: the same image with another option is the same image, and mapped once.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::mapping::{Mapping, Register};
use crate::planner::Record;

/// The mappings that a URI means: those of just these options, or else, where it has none, all of
/// its volume.
pub(crate) fn mapped_as(register: &Register, uri: &str) -> Vec<Arc<Mapping>> {
    let mut mappings = register.all();
    let is = |mapping: &Arc<Mapping>| mapping.view().record.uri;
    match volume_part(uri) == uri && !mappings.iter().any(|mapping| is(mapping) == uri) {
        true => mappings.retain(|mapping| is_same(&is(mapping), uri)),
        false => mappings.retain(|mapping| is(mapping) == uri),
    }
    mappings
}

/// Whether two URIs name the same volume. Text decides: two ways to write a path are two volumes here,
/// and the storage's own claim keeps them apart.
fn is_same(one: &str, other: &str) -> bool {
    volume_part(one) == volume_part(other)
}

fn volume_part(uri: &str) -> &str {
    uri.split_once('?').map_or(uri, |(mapping, _)| mapping)
}

/// Returns the name of a mapping whose user gave none: readable, and the same for every call with the same
/// volume, whatever its options are.
pub(crate) fn derived_name(uri: &str) -> String {
    let volume = volume_part(uri);
    let (scheme, path) = volume.split_once(':').unwrap_or(("", volume));
    let last = path.rsplit('/').find(|part| !part.is_empty()).unwrap_or_default();
    let mut stem: String = format!("{scheme}-{last}")
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' })
        .take(64)
        .collect();
    if !stem.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        stem.insert(0, 'v');
    }
    // FNV-1a: keeps volumes of the same file name in different directories apart.
    let hash = volume.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{stem}-{:08x}", hash >> 32)
}

/// What tells the volume of a record from the one that is asked for; `None`: nothing.
pub(crate) fn other_volume(record: &Record, uri: &str) -> Option<String> {
    if record.uri == uri {
        return None;
    }
    if !is_same(&record.uri, uri) {
        return Some(format!("the volume {}", record.uri));
    }
    let (is, asked) = (options(&record.uri), options(uri));
    let list = |options: Vec<&&str>| match options.as_slice() {
        [] => "none".to_owned(),
        some => some.iter().map(|option| **option).collect::<Vec<_>>().join("&"),
    };
    let (has, lacks) =
        (list(is.difference(&asked).collect()), list(asked.difference(&is).collect()));
    match is == asked {
        // The same in another order.
        true => None,
        false => {
            Some(format!("other options of the same volume: {has}, where {lacks} was asked for"))
        }
    }
}

fn options(uri: &str) -> BTreeSet<&str> {
    let query = uri.split_once('?').map_or("", |(_, query)| query);
    query.split('&').filter(|option| !option.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::api::validate;
    use crate::planner;

    #[test]
    fn derived_names_tell_directories_apart_and_options_not() {
        assert_ne!(derived_name("file:/a/x.img"), derived_name("file:/b/x.img"));
        assert!(derived_name("file:/a/x.img").starts_with("file-x.img-"));
        assert_eq!(derived_name("mem:1G"), derived_name("mem:1G"));
        assert_eq!(derived_name("rbd:p/i"), derived_name("rbd:p/i?id=x"));
        assert_ne!(derived_name("rbd:p/i"), derived_name("rbd:p/i@s?id=x"));
    }

    /// Mappings in the journals of running nodes have these names.
    #[test]
    fn derived_names_never_change() {
        assert_eq!(derived_name("file:/a/x.img"), "file-x.img-75c1704b");
    }

    #[test]
    fn a_difference_is_named() {
        let of = |uri: &str| Record { uri: uri.into(), ..planner::tests::record(1, true) };
        let told = |is, asked| other_volume(&of(is), asked);
        assert_eq!(told("rbd:p/i?a=1&b=2", "rbd:p/i?b=2&a=1"), None);
        assert_eq!(told("rbd:p/i", "rbd:p/j").unwrap(), "the volume rbd:p/i");
        assert_eq!(
            told("rbd:p/i?a=1&b=2", "rbd:p/i?b=2&c=3").unwrap(),
            "other options of the same volume: a=1, where c=3 was asked for"
        );
        assert!(told("rbd:p/i", "rbd:p/i?c=3").unwrap().contains("none, where c=3"));
    }

    proptest! {
        #[test]
        fn derived_names_are_names(uri in ".{0,300}") {
            prop_assert!(validate::is_name(&derived_name(&uri)), "{}", derived_name(&uri));
        }
    }
}
