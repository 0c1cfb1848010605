//! Finds the allocated parts of an image with librbd's diff, which walks over the image's objects.
//!
//! - With a valid fast-diff map the walk reads only the map, in units of objects. Without one it queries
//!   the OSDs for every object, one after the other. A call then covers few objects, and the NBD client
//!   continues with another request.
//! - Before librbd 1.17, that is in all of Ceph 16, the map is misread unless the walk starts at the first
//!   byte of an object, so it starts there. That is not possible for a clone (the objects of its parent
//!   may have another size) and for a striped image; their objects are queried.
//! - A walk over stripes follows the order of objects, not of bytes. The result is sorted, and a walk
//!   that reaches the limit gives no information.

use std::ops::Range;

use librbd::{
    Parent, RBD_FEATURE_FAST_DIFF, RBD_FLAG_FAST_DIFF_INVALID, RBD_FLAG_OBJECT_MAP_INVALID, Stat,
};

use cleat_backend::extents::Layout;
use cleat_core::volume::Extent;

/// The number of objects that one call queries from the OSDs.
const SLOW_OBJECTS: u64 = 64;

/// The maximum number of parts of objects that one walk collects.
const MAX_FOUND: usize = 1 << 16;

/// The first librbd that reads the map correctly from any offset.
const REPAIRED: (i32, i32, i32) = (1, 17, 0);

/// Returns the extents of `range` from its start: at least one and at most `limit`. They may cover only a
/// part of the range. Blocks until the cluster has answered.
pub(crate) fn extents(
    image: &librbd::Image,
    range: Range<u64>,
    limit: usize,
) -> librbd::Result<Vec<Extent>> {
    let stat = image.stat()?;
    let whole_objects =
        has_map(image)? && (librbd::version()? >= REPAIRED || is_plain(&stat, image.parent()?));
    let Range { start, end } = walk_range(&range, &stat, whole_objects);
    let mut found: Vec<(u64, u64)> = Vec::new();
    let mut walk = |offset: u64, length: u64, exists: bool| {
        if exists {
            found.push((offset, offset.saturating_add(length)));
        }
        found.len() < MAX_FOUND
    };
    let walked = image.diff(None, start, end.saturating_sub(start), whole_objects, &mut walk);
    let full = found.len() == MAX_FOUND;
    if !full {
        walked?;
    }
    let known = match found.last() {
        Some(_) if full && is_striped(&stat) => range.start,
        Some(&(_, last)) if full => last.min(end),
        _ => end,
    };
    found.sort_unstable();
    Ok(lay_out(&found, range, known, limit))
}

fn is_striped(stat: &Stat) -> bool {
    stat.stripe_count > 1 || stat.stripe_unit != stat.object_size
}

/// Returns whether a walk that starts with an object of the image does so in every image that it reads.
fn is_plain(stat: &Stat, parent: Option<Parent>) -> bool {
    !is_striped(stat) && parent.is_none()
}

/// Returns the range to walk over for `range`. It consists of whole objects, or of whole sets of objects
/// for a striped image, and covers few of them if each has to be queried.
fn walk_range(range: &Range<u64>, stat: &Stat, whole_objects: bool) -> Range<u64> {
    let set = stat.object_size.saturating_mul(stat.stripe_count).max(1);
    let start = range.start - range.start % set;
    let mut end = range.end.checked_next_multiple_of(set).unwrap_or(range.end).min(stat.size);
    if !whole_objects {
        let sets = (SLOW_OBJECTS / stat.stripe_count.max(1)).max(1);
        end = end.min(start.saturating_add(set.saturating_mul(sets)));
    }
    start..end
}

fn has_map(image: &librbd::Image) -> librbd::Result<bool> {
    let invalid = RBD_FLAG_FAST_DIFF_INVALID | RBD_FLAG_OBJECT_MAP_INVALID;
    Ok(image.features()? & RBD_FEATURE_FAST_DIFF != 0 && image.flags()? & invalid == 0)
}

/// Converts the sorted allocated parts `found`, which are complete up to `known`, into extents of `range`.
fn lay_out(found: &[(u64, u64)], range: Range<u64>, known: u64, limit: usize) -> Vec<Extent> {
    let length = range.end - range.start;
    let (start, known) = (range.start, known.min(range.end));
    let mut layout = Layout::new(range, 1, limit);
    for &(start, end) in found.iter().filter(|(start, _)| *start < known) {
        if !layout.data(start..end.min(known)) {
            break;
        }
    }
    if known <= start {
        return vec![Extent { length, hole: false }];
    }
    layout.finish(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Not tested with a cluster, because distributions may have fixed the defect in their Ceph 16.
    #[test]
    fn a_walk_starts_with_an_object_and_queries_few_of_them() {
        let object_size = 4 << 20;
        let stat = |stripe_count| Stat {
            size: 1 << 40,
            object_size,
            stripe_unit: if stripe_count > 1 { 65536 } else { object_size },
            stripe_count,
        };
        let odd = object_size + 1..8 << 30;
        assert_eq!(walk_range(&odd, &stat(1), true), object_size..8 << 30);
        assert_eq!(walk_range(&odd, &stat(1), false), object_size..65 * object_size);
        assert_eq!(walk_range(&odd, &stat(4), false), 0..64 * object_size);
        assert_eq!(walk_range(&odd, &stat(1000), false), 0..1000 * object_size);
        let last = (1 << 40) - 1..1 << 40;
        assert_eq!(walk_range(&last, &stat(1), true), (1 << 40) - object_size..1 << 40);
        assert!(is_plain(&stat(1), None) && !is_plain(&stat(4), None));
    }

    #[test]
    fn unknown_parts_are_omitted_or_reported_as_data() {
        let found = [(0, 4), (8, 12), (20, 30)];
        let listed = |range, known, limit| {
            let extents = lay_out(&found, range, known, limit);
            extents.iter().map(|e| (e.length, e.hole)).collect::<Vec<_>>()
        };
        assert_eq!(
            listed(2..25, 25, 9),
            [(2, false), (4, true), (4, false), (8, true), (5, false)]
        );
        assert_eq!(listed(2..25, 25, 2), [(2, false), (4, true)]);
        assert_eq!(listed(2..25, 10, 9), [(2, false), (4, true), (2, false)]);
        assert_eq!(listed(12..20, 20, 9), [(8, true)]);
        assert_eq!(listed(12..20, 12, 9), [(8, false)]);
        assert_eq!(listed(30..40, 99, 9), [(10, true)]);
    }
}
