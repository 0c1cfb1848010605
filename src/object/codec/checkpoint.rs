//! Checkpoints: the volume after a slot, as the names of its map pages, and what else a replay of the history
//! up to there would give.

use super::page::{Form, PageId, decode_pages, encode_pages};
use super::reader::Writer;
use super::snapshot::{MAX_SNAPSHOTS, SNAPSHOT_BYTES, Snapshot};
use super::{Damage, Identity, Kind, exact, open, prefix, seal};
use crate::name::Nonce;

/// The maximum number of pages of the index.
pub(super) const MAX_PAGES: usize = 64 << 10;

/// The maximum number of pages of the usage. Each has up to 1024 slots, of which one at least has data.
pub const MAX_USAGE_PAGES: usize = 1 << 20;

/// A checkpoint: the volume after all records up to and including the slot in its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Where the object belongs.
    pub identity: Identity,
    /// The nonce of the writer.
    pub nonce: Nonce,
    /// The size of the volume in bytes.
    pub size: u64,
    /// The number of the next object with pages of the epoch that a writer may use.
    pub next_page: u64,
    /// The pages of the index, in the order of the ranges.
    pub index: Vec<Option<PageId>>,
    /// The pages of the usage.
    pub usage: Vec<Option<PageId>>,
    /// The snapshots, in the order of their creation.
    pub snapshots: Vec<Snapshot>,
}

impl Checkpoint {
    /// Returns the object's bytes.
    pub fn encode(&self) -> Vec<u8> {
        debug_assert!(self.usage.len() <= MAX_USAGE_PAGES);
        debug_assert!(self.snapshots.len() <= MAX_SNAPSHOTS);
        let form = Form::of(self.index.iter().chain(&self.usage));
        let mut body = Writer::default();
        body.u64(self.size);
        body.u64(self.next_page);
        encode_pages(&mut body, &self.index, form);
        encode_pages(&mut body, &self.usage, form);
        body.length(self.snapshots.len());
        self.snapshots.iter().for_each(|snapshot| snapshot.encode(&mut body));
        seal(kind_of(form), self.identity, self.nonce, body)
    }

    /// Decodes the checkpoint that was read under the name of `identity`.
    ///
    /// # Errors
    /// Returns an error if the bytes are not those of a checkpoint with that name.
    pub fn decode(identity: Identity, bytes: &[u8]) -> Result<Self, Damage> {
        let form = match prefix(bytes)? {
            Kind::CheckpointOfRanges => Form::Ranges,
            _ => Form::Objects,
        };
        let (nonce, mut body) = open(kind_of(form), identity, bytes)?;
        let (size, next_page) = (body.u64()?, body.u64()?);
        let index = decode_pages(&mut body, MAX_PAGES, form)?;
        let usage = decode_pages(&mut body, MAX_USAGE_PAGES, form)?;
        form.check(index.iter().chain(&usage))?;
        let count = body.count(SNAPSHOT_BYTES, MAX_SNAPSHOTS)?;
        let mut snapshots: Vec<Snapshot> = Vec::with_capacity(count);
        for _ in 0..count {
            let snapshot = Snapshot::decode(&mut body)?;
            if snapshots.last().is_some_and(|before| before.at >= snapshot.at) {
                return Err(Damage::Field("order of snapshots"));
            }
            snapshots.push(snapshot);
        }
        body.end()?;
        exact(bytes)?;
        Ok(Self { identity, nonce, size, next_page, index, usage, snapshots })
    }
}

fn kind_of(form: Form) -> Kind {
    match form {
        Form::Objects => Kind::Checkpoint,
        Form::Ranges => Kind::CheckpointOfRanges,
    }
}
