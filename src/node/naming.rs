//! The names of mappings whose users gave none, and the mappings of a URI. Options are not part of a
//! volume's identity: an image is mapped once, whatever its options are.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::mapping::{Mapping, Register};
use crate::planner::Record;
use cleat_core::error::{Error, ErrorKind, Result};

/// Returns the mappings of a URI: those with the same options, or, if there are none and the URI has no
/// options, those of the same volume with any options.
pub(crate) fn mapped_as(register: &Register, uri: &str) -> Vec<Arc<Mapping>> {
    let mut mappings = register.all();
    let is_it = |mapping: &Arc<Mapping>| other_volume(&mapping.view().record, uri).is_none();
    match volume_part(uri) == uri && !mappings.iter().any(is_it) {
        true => mappings.retain(|mapping| is_same(&mapping.view().record.uri, uri)),
        false => mappings.retain(is_it),
    }
    mappings
}

/// Returns whether two URIs name the same volume. Only the text is compared: two spellings of a path count
/// as two volumes, and the claim of the storage prevents that both are mapped.
pub(crate) fn is_same(one: &str, other: &str) -> bool {
    volume_part(one) == volume_part(other)
}

fn volume_part(uri: &str) -> &str {
    uri.split_once('?').map_or(uri, |(volume, _)| volume)
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
    // The FNV-1a hash distinguishes files of the same name in different directories.
    let hash = volume.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{stem}-{:08x}", hash >> 32)
}

/// Checks that a new mapping's symlink cannot be that of a partition of another mapping: whoever can write a
/// volume determines its partitions, and a user of the symlink would get the other volume. Mappings of earlier
/// builds may have such names; the udev rule gives their symlinks precedence.
///
/// # Errors
/// Returns `InvalidArgument` if the name ends with `-part` and a number.
pub(crate) fn check_new_name(name: &str) -> Result<()> {
    let Some((stem, number)) = name.rsplit_once("-part") else { return Ok(()) };
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(());
    }
    let message = format!("{name} is the name of a partition of the mapping {stem:?}");
    Err(Error::new(ErrorKind::InvalidArgument, message)
        .with_repair("choose a name that does not end with -part and a number"))
}

/// Describes how the volume of a record differs from the requested one; `None`: it does not.
pub(crate) fn other_volume(record: &Record, uri: &str) -> Option<String> {
    if record.uri == uri {
        return None;
    }
    if !is_same(&record.uri, uri) {
        return Some(format!("the volume {}", record.uri));
    }
    let (present, requested) = (options(&record.uri), options(uri));
    let list = |options: Vec<&&str>| match options.as_slice() {
        [] => "none".to_owned(),
        some => some.iter().map(|option| **option).collect::<Vec<_>>().join("&"),
    };
    // The order of options does not matter.
    if present == requested {
        return None;
    }
    let has = list(present.difference(&requested).collect());
    let lacks = list(requested.difference(&present).collect());
    Some(format!("the same volume with other options: {has} instead of {lacks}"))
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
    fn derived_names_depend_on_the_directory_and_not_on_options() {
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
    fn the_name_of_a_partition_is_refused() {
        for bad in ["x-part1", "x-part12", "-part0", "a-part1-part2"] {
            let error = check_new_name(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{bad}");
        }
        for good in ["x", "x-part", "part1", "x-part1a", "x-party", "x-part1-data", "x.part1"] {
            check_new_name(good).unwrap();
        }
    }

    #[test]
    fn a_difference_between_volumes_is_described() {
        let of = |uri: &str| Record { uri: uri.into(), ..planner::tests::record(1, true) };
        let difference = |present, requested| other_volume(&of(present), requested);
        assert_eq!(difference("rbd:p/i?a=1&b=2", "rbd:p/i?b=2&a=1"), None);
        assert_eq!(difference("rbd:p/i", "rbd:p/j").unwrap(), "the volume rbd:p/i");
        assert_eq!(
            difference("rbd:p/i?a=1&b=2", "rbd:p/i?b=2&c=3").unwrap(),
            "the same volume with other options: a=1 instead of c=3"
        );
        assert!(difference("rbd:p/i", "rbd:p/i?c=3").unwrap().contains("none instead of c=3"));
    }

    proptest! {
        #[test]
        fn derived_names_are_valid_names(uri in ".{0,300}") {
            prop_assert!(validate::is_name(&derived_name(&uri)), "{}", derived_name(&uri));
            prop_assert!(check_new_name(&derived_name(&uri)).is_ok(), "{}", derived_name(&uri));
        }
    }
}
