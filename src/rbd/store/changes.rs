//! Where contents of images differ (`rbd diff`).

use std::time::{Duration, Instant};

use librbd::{Image, Open, Stat};

use super::{RbdStore, Target};
use cleat_backend::changes::{Change, ChangeStore, Changes, Content, Contents};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

/// The number of objects that one walk of librbd looks at.
const OBJECTS: u64 = 64;

/// How long a call goes on to look at more objects. Each one may be queried from the OSDs.
const TIME: Duration = Duration::from_secs(5);

impl ChangeStore for RbdStore {
    fn changes(&self, contents: &Contents<'_>, from: u64, limit: usize) -> Result<Changes> {
        let since = contents.since.map(str::to_owned);
        self.call(contents.name, contents.snapshot, move |target| {
            target.changes(since.as_deref(), from, limit)
        })
    }
}

impl Target {
    fn changes(&self, since: Option<&str>, from: u64, limit: usize) -> Result<Changes> {
        if self.spec.encryption.is_some() {
            // librbd compares objects, and the header of the encryption shifts the offsets.
            let message = format!("{} is encrypted: its changes cannot be found", self.name);
            return Err(Error::new(ErrorKind::Unsupported, message).with_repair(
                "without encryption= in the URI, the changes of the raw image are shown",
            ));
        }
        let image = self.open_at(None, Open::ReadOnly)?;
        let snapshot = self.spec.snapshot.as_deref();
        let contents = Contents { name: &self.spec.image, snapshot, since };
        let known = self.snapshots_of(&image)?;
        contents.check(&self.name, |name| {
            let found = known.iter().find(|known| known.kind == "user" && known.name == name);
            found.map(|snapshot| snapshot.id)
        })?;
        let image = match snapshot {
            Some(_) => self.open_at(snapshot, Open::ReadOnly)?,
            None => image,
        };
        let failed = |error| self.failed(error);
        let stat = image.stat().map_err(failed)?;
        let mut changes = Changes { ranges: Vec::new(), until: from, size_bytes: stat.size };
        let give_up_at = SystemClock.now() + TIME;
        while changes.until < stat.size {
            let end = end_of_walk(&stat, changes.until);
            walk(&image, since, end, &mut changes).map_err(failed)?;
            if changes.ranges.len() >= limit || has_passed(give_up_at) {
                break;
            }
        }
        Ok(changes)
    }
}

/// Returns where a walk ends that begins at `from`: between two objects, or two sets of objects of a striped image.
fn end_of_walk(stat: &Stat, from: u64) -> u64 {
    let set = stat.object_size.saturating_mul(stat.stripe_count).max(1);
    let sets = (OBJECTS / stat.stripe_count.max(1)).max(1);
    let begin = from - from % set;
    begin.saturating_add(set.saturating_mul(sets)).min(stat.size)
}

/// Adds the changes up to `end`.
fn walk(image: &Image, since: Option<&str>, end: u64, changes: &mut Changes) -> librbd::Result<()> {
    let mut found = Vec::new();
    let mut add = |offset, length, has_data: bool| {
        let content = if has_data { Content::Data } else { Content::Zeroes };
        found.push(Change { offset, length, content });
        true
    };
    let from = changes.until;
    image.diff(since, from, end - from, false, &mut add)?;
    // A walk over stripes follows the order of objects, not of bytes.
    found.sort_unstable_by_key(|change| change.offset);
    found.into_iter().for_each(|change| changes.add(change));
    changes.until = end;
    Ok(())
}

fn has_passed(time: Instant) -> bool {
    SystemClock.now() >= time
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(object_size: u64, stripe_count: u64, size: u64) -> Stat {
        Stat { size, object_size, stripe_unit: object_size, stripe_count }
    }

    #[test]
    fn a_walk_ends_between_two_sets_of_objects() {
        let plain = stat(1 << 22, 1, 1 << 40);
        assert_eq!(end_of_walk(&plain, 0), 64 << 22);
        assert_eq!(end_of_walk(&plain, (64 << 22) + 5), 128 << 22);
        assert_eq!(end_of_walk(&stat(1 << 22, 1, 1000), 0), 1000);
        assert_eq!(end_of_walk(&stat(1 << 20, 100, 1 << 40), 100 << 20), 200 << 20);
        assert_eq!(end_of_walk(&stat(u64::MAX, 2, u64::MAX), 7), u64::MAX);
    }
}
