//! What a volume costs in its store, as `cleat status` prints it.

use serde::Serialize;

use super::size::human;
use cleat_api::v1;
use cleat_core::space::SpaceUse;

/// The bytes that a volume has put to its store and takes there.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Space {
    /// The bytes that the worker has put to the store since it opened the volume.
    pub put_bytes: u64,
    /// The bytes that clients have written since then.
    pub written_bytes: u64,
    /// The first divided by the second; null while nothing was written.
    pub write_amplification: Option<f64>,
    /// The data in the volume's objects.
    pub object_bytes: u64,
    /// The part of it that the volume needs.
    pub live_bytes: u64,
    /// The first divided by the second; null while the volume has no data.
    pub space_amplification: Option<f64>,
    /// The bytes that the collector has copied since the worker opened the volume.
    pub copied_bytes: u64,
    /// The bytes per second that it copies at most; null if there is no limit.
    pub copy_rate: Option<u64>,
}

impl From<v1::SpaceUse> for Space {
    fn from(space: v1::SpaceUse) -> Self {
        let v1::SpaceUse {
            put_bytes,
            written_bytes,
            object_bytes,
            live_bytes,
            copied_bytes,
            copy_rate,
        } = space;
        let space = SpaceUse {
            put_bytes,
            written_bytes,
            object_bytes,
            live_bytes,
            copied_bytes,
            copy_rate,
        };
        Self {
            put_bytes,
            written_bytes,
            write_amplification: space.write_amplification().map(rounded),
            object_bytes,
            live_bytes,
            space_amplification: space.space_amplification().map(rounded),
            copied_bytes,
            copy_rate: Some(copy_rate).filter(|rate| *rate > 0),
        }
    }
}

impl Space {
    /// Returns the write amplification with its parts, as text.
    pub(super) fn of_writes(&self) -> String {
        let (put, written) = (human(self.put_bytes), human(self.written_bytes));
        let parts = format!("{put} put to the store, {written} written");
        shown(self.write_amplification, &parts)
    }

    /// Returns the space amplification with its parts, as text.
    pub(super) fn of_space(&self) -> String {
        let (objects, live) = (human(self.object_bytes), human(self.live_bytes));
        shown(self.space_amplification, &format!("{objects} of data in objects, {live} needed"))
    }

    /// Returns what the collector has copied, and its limit, as text.
    pub(super) fn of_collector(&self) -> String {
        let limit = match self.copy_rate {
            Some(rate) => format!("at most {} a second", human(rate)),
            None => "no limit".to_owned(),
        };
        format!("{} copied ({limit})", human(self.copied_bytes))
    }
}

/// Two decimals, so that the text and the JSON agree.
fn rounded(ratio: f64) -> f64 {
    (ratio * 100.0).round() / 100.0
}

fn shown(ratio: Option<f64>, parts: &str) -> String {
    match ratio {
        Some(ratio) => format!("{ratio:.2} ({parts})"),
        None => format!("none ({parts})"),
    }
}
