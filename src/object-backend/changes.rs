//! Where contents of volumes differ, for commands, from the maps alone.

use std::ops::Range;
use std::time::Duration;

use cleat_backend::changes::{Change, ChangeStore, Changes, Content, Contents};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::Result;
use cleat_object::codec::Snapshot;
use cleat_object::volume::{Config, Difference, Failure, Place, Volume};

use crate::errors::{failed, no_answer};
use crate::executor::block_until;
use crate::manage::ObjectStore;
use crate::table::number;
use crate::timeouts::{CALL_TIMEOUT, after};

/// How often the contents are looked at again, if the writer of the volume has deleted what was to be read.
const MAX_LOOKS: u32 = 3;

/// The number of pages of the map that are compared in one step. Each one may be read from a remote store, one after the
/// other, and a step must end within [`CALL_TIMEOUT`].
const PAGES: u64 = 64;

/// How long a call begins more steps.
const TIME: Duration = Duration::from_secs(5);

impl ChangeStore for ObjectStore {
    fn changes(&self, contents: &Contents<'_>, from: u64, limit: usize) -> Result<Changes> {
        let (volume, place) = self.existing(contents.name)?;
        let shown = volume.shown();
        let known = Self::view(&volume, &place)?.snapshots();
        let find = |name: &str| known.iter().find(|snapshot| snapshot.name == name);
        contents.check(&shown, |name| find(name).map(|snapshot| number(snapshot.id)))?;
        let (later, since) = (contents.snapshot.and_then(find), contents.since.and_then(find));
        let mut looks = 0;
        loop {
            let compared = compare(&place, later, since, from, limit);
            match block_until(after(CALL_TIMEOUT), compared) {
                Some(Err(Failure::Lost(_))) if looks < MAX_LOOKS => looks += 1,
                Some(ended) => return ended.map_err(|failure| failed(&shown, failure)),
                None => return Err(no_answer(&shown)),
            }
        }
    }
}

async fn compare(
    place: &Place,
    later: Option<&Snapshot>,
    since: Option<&Snapshot>,
    from: u64,
    limit: usize,
) -> Result<Changes, Failure> {
    let now = content(place, later).await?;
    let since = match since {
        Some(since) => Some(content(place, Some(since)).await?),
        None => None,
    };
    let size_bytes = now.size();
    let mut changes = Changes { ranges: Vec::new(), until: from, size_bytes };
    let give_up_at = after(TIME);
    while changes.until < size_bytes && changes.ranges.len() < limit {
        let step = PAGES.saturating_mul(now.page_bytes());
        let range = changes.until..size_bytes.min(changes.until.saturating_add(step));
        let left = limit - changes.ranges.len();
        add(&mut changes, parts(&now, since.as_ref(), range, left).await?);
        if SystemClock.now() >= give_up_at {
            break;
        }
    }
    Ok(changes)
}

/// Splits a range by how it differs, as [`Volume::differences`] does.
async fn parts(
    now: &Volume,
    since: Option<&Volume>,
    range: Range<u64>,
    limit: usize,
) -> Result<Vec<(Range<u64>, Difference)>, Failure> {
    if let Some(since) = since {
        return now.differences(since, range, limit).await;
    }
    let difference = |has_data| if has_data { Difference::Data } else { Difference::Same };
    let extents = now.extents(range, limit).await?.into_iter();
    Ok(extents.map(|(range, has_data)| (range, difference(has_data))).collect())
}

fn add(changes: &mut Changes, parts: Vec<(Range<u64>, Difference)>) {
    for (range, difference) in parts {
        changes.until = range.end;
        let content = match difference {
            Difference::Same => continue,
            Difference::Data => Content::Data,
            Difference::Zeroes => Content::Zeroes,
        };
        changes.add(Change { offset: range.start, length: range.end - range.start, content });
    }
}

async fn content(place: &Place, snapshot: Option<&Snapshot>) -> Result<Volume, Failure> {
    match snapshot {
        Some(snapshot) => place.view_snapshot(snapshot.id, Config::default()).await,
        None => place.view(Config::default()).await,
    }
}

#[cfg(test)]
mod tests {
    use cleat_backend::CredentialSet;
    use cleat_backend::store::{Layout, SnapshotStore, Store};
    use cleat_backend::uri::Options;

    use super::*;
    use crate::home::Home;
    use crate::snapshots::tests::{claimant, on};
    use crate::writer::change;

    const SIZE: u64 = 200 << 20;
    const DATA: [u8; 4096] = [1; 4096];
    const BLOCK: u64 = DATA.len() as u64;

    /// Blocks far apart, over more pages of the map than one step compares.
    fn offsets() -> impl Iterator<Item = u64> {
        (0..40).map(|number| number * 5 * (1 << 20) + BLOCK)
    }

    #[test]
    fn the_changes_of_many_pages_are_found_in_parts() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_str().unwrap();
        let home = Home::parse("dir", path, Options::parse("").unwrap()).unwrap();
        let store = ObjectStore::connect(&home, &claimant("c"), CredentialSet::default()).unwrap();
        Store::create(&store, "v", SIZE, &Layout::default()).unwrap();
        SnapshotStore::create(&store, "v", "s", &mut on).unwrap();
        let (volume, place) = store.existing("v").unwrap();
        let written = change(&place, &volume.shown(), &store.claimant, async |opened: Volume| {
            for offset in offsets() {
                opened.write(offset, &DATA).await?;
            }
            opened.flush().await
        });
        written.unwrap();
        let is_whole = |found: &[Change]| {
            let length = |change: &Change| (change.length, change.content);
            found.iter().map(|change| change.offset).eq(offsets())
                && found.iter().all(|change| length(change) == (BLOCK, Content::Data))
        };
        for since in [None, Some("s")] {
            let contents = Contents { name: "v", snapshot: None, since };
            for limit in [1, 7, 10_000] {
                let (mut found, mut until) = (Vec::new(), 0);
                while until < SIZE {
                    let part = ChangeStore::changes(&store, &contents, until, limit).unwrap();
                    assert!(part.until > until && part.ranges.len() <= limit, "{part:?}");
                    found.extend(part.ranges);
                    until = part.until;
                }
                assert!(is_whole(&found), "{since:?}, {limit}: {found:?}");
            }
            assert_eq!(ChangeStore::changes(&store, &contents, SIZE, 9).unwrap().ranges, []);
        }
    }
}
