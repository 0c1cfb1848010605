//! Snapshots as commands show them.

use cleat_backend::store::Snapshot;
use cleat_object::codec;
use cleat_object::name::SnapshotId;

/// The number of a snapshot for people.
pub(crate) fn number(id: SnapshotId) -> u64 {
    id.epoch << 24 | id.number & 0xff_ffff
}

/// Describes a snapshot.
pub(crate) fn described(snapshot: codec::Snapshot) -> Snapshot {
    Snapshot {
        id: number(snapshot.id),
        name: snapshot.name,
        size_bytes: snapshot.size,
        created_at_s: i64::try_from(snapshot.created_at_s).unwrap_or(i64::MAX),
        protected: false,
        kind: "user",
    }
}
