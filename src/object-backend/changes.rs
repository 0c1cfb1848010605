//! Where contents of volumes differ, for commands, from the maps alone.

use cleat_backend::changes::{Change, ChangeStore, Changes, Content, Contents};
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
    let size_bytes = now.size();
    let mut changes = Changes { ranges: Vec::new(), until: size_bytes, size_bytes };
    if from >= size_bytes {
        return Ok(changes);
    }
    let range = from..size_bytes;
    let parts: Vec<_> = match since {
        Some(since) => {
            let since = content(place, Some(since)).await?;
            now.differences(&since, range, limit).await?
        }
        None => {
            let extents = now.extents(range, limit).await?.into_iter();
            let difference = |has_data| if has_data { Difference::Data } else { Difference::Same };
            extents.map(|(range, has_data)| (range, difference(has_data))).collect()
        }
    };
    changes.until = parts.last().map_or(size_bytes, |(range, _)| range.end);
    for (range, difference) in parts {
        let content = match difference {
            Difference::Same => continue,
            Difference::Data => Content::Data,
            Difference::Zeroes => Content::Zeroes,
        };
        changes.add(Change { offset: range.start, length: range.end - range.start, content });
    }
    Ok(changes)
}

async fn content(place: &Place, snapshot: Option<&Snapshot>) -> Result<Volume, Failure> {
    match snapshot {
        Some(snapshot) => place.view_snapshot(snapshot.id, Config::default()).await,
        None => place.view(Config::default()).await,
    }
}
