//! Where two contents of a volume differ.

use cleat_core::error::{Error, ErrorKind, Result};
use serde::Serialize;

/// Finds where contents of volumes differ.
pub trait ChangeStore {
    /// Returns the ranges that have changed between two contents of a volume, from the offset `from` on. Returns when it
    /// has found about `limit` ranges, or earlier; at least one byte is compared. The caller continues at
    /// [`Changes::until`]. Reads no data of the volume. A range that was written counts as changed, also if it was written
    /// with the same data.
    ///
    /// Each call compares what the volume is when it is made: of a volume in use, the results of several calls are of
    /// several moments, unless both contents are snapshots.
    ///
    /// # Errors
    /// Returns `NotFound` if the volume or a snapshot does not exist, `InvalidArgument` if [`Contents::since`] is not the
    /// older snapshot, `Unsupported` for a volume whose changes the storage does not know, and the backend's error
    /// otherwise.
    fn changes(&self, contents: &Contents<'_>, from: u64, limit: usize) -> Result<Changes>;
}

/// Two contents of a volume.
#[derive(Debug, Clone, Copy)]
pub struct Contents<'a> {
    /// The volume.
    pub name: &'a str,
    /// The snapshot with the later content; `None` for the present content.
    pub snapshot: Option<&'a str>,
    /// The snapshot with the earlier content; `None` for a volume without data.
    pub since: Option<&'a str>,
}

impl Contents<'_> {
    /// Checks that the snapshots exist and that `since` is the older one. `number` returns the number of a snapshot of the
    /// volume `shown` by its name; later snapshots have higher numbers.
    ///
    /// # Errors
    /// Returns `NotFound` or `InvalidArgument`.
    pub fn check(&self, shown: &str, number: impl Fn(&str) -> Option<u64>) -> Result<()> {
        let find = |name: &str| {
            number(name).ok_or_else(|| {
                let message = format!("{shown} has no snapshot {name:?}");
                Error::new(ErrorKind::NotFound, message)
                    .with_repair("cleat volume snapshot ls shows the snapshots")
            })
        };
        let later = self.snapshot.map(find).transpose()?;
        let since = self.since.map(find).transpose()?;
        if later.zip(since).is_some_and(|(later, since)| since >= later) {
            let [since, later] = [self.since, self.snapshot].map(Option::unwrap_or_default);
            let message = format!("the snapshot {since:?} of {shown} is not older than {later:?}");
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("compare the later snapshot with the earlier one"));
        }
        Ok(())
    }
}

/// The changes in a part of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// The ranges that have changed, in the order of their offsets.
    pub ranges: Vec<Change>,
    /// The offset up to which the contents were compared, in bytes.
    pub until: u64,
    /// The size of the later content in bytes. Nothing is compared behind it.
    pub size_bytes: u64,
}

/// A range that has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The offset in bytes.
    pub offset: u64,
    /// The length in bytes.
    pub length: u64,
    /// What the range has now.
    pub content: Content,
}

/// What a range has that has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Content {
    /// Data.
    Data,
    /// Nothing: it was trimmed or overwritten with zeroes, and reads as zeroes.
    Zeroes,
}

impl Changes {
    /// Appends a range. Adjacent ranges with the same content become one.
    pub fn add(&mut self, change: Change) {
        match self.ranges.last_mut() {
            Some(last)
                if last.content == change.content && last.offset + last.length == change.offset =>
            {
                last.length += change.length;
            }
            _ => self.ranges.push(change),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_older_snapshot_that_exists_is_compared_with() {
        let check = |snapshot, since| {
            let number = |name: &str| name.strip_prefix('s')?.parse().ok().filter(|id| *id < 3);
            Contents { name: "v", snapshot, since }.check("dir:/p/v", number)
        };
        for (snapshot, since) in
            [(None, None), (None, Some("s2")), (Some("s1"), None), (Some("s2"), Some("s1"))]
        {
            assert!(check(snapshot, since).is_ok());
        }
        for since in ["s1", "s2"] {
            let error = check(Some("s1"), Some(since)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }
        for (snapshot, since) in [(None, "s3"), (None, ""), (Some("s4"), "s1")] {
            let error = check(snapshot, Some(since)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
            assert!(error.message().contains("dir:/p/v"), "{error}");
        }
    }

    #[test]
    fn adjacent_ranges_with_the_same_content_become_one() {
        let mut changes = Changes { ranges: Vec::new(), until: 0, size_bytes: 4096 };
        let parts = [
            (0, Content::Data),
            (512, Content::Data),
            (1024, Content::Zeroes),
            (2048, Content::Data),
        ];
        for (offset, content) in parts {
            changes.add(Change { offset, length: 512, content });
        }
        let found: Vec<_> = changes.ranges.iter().map(|it| (it.offset, it.length)).collect();
        assert_eq!(found, [(0, 1024), (1024, 512), (2048, 512)]);
    }
}
