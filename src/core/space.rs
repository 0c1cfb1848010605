//! What a volume costs in its store, besides the data that clients see.

/// The bytes that a volume has put to its store and takes there. All are zero if the backend does not count them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpaceUse {
    /// The bytes that the worker has put to the store since it opened the volume, collection included.
    pub put_bytes: u64,
    /// The bytes that clients have written since then.
    pub written_bytes: u64,
    /// The data in the volume's objects, also what nothing or only a snapshot needs.
    pub object_bytes: u64,
    /// The part of it that the volume needs.
    pub live_bytes: u64,
    /// The bytes that the collector has copied since the worker opened the volume. `put_bytes` contains them.
    pub copied_bytes: u64,
    /// The bytes per second that it copies at most; 0 if there is no limit.
    pub copy_rate: u64,
}

impl SpaceUse {
    /// Returns whether the backend counts the bytes. One that does has put its claim before it serves.
    pub fn is_counted(&self) -> bool {
        *self != Self::default()
    }

    /// Returns the bytes that were put for each byte that a client has written; `None` before the first one.
    pub fn write_amplification(&self) -> Option<f64> {
        ratio(self.put_bytes, self.written_bytes)
    }

    /// Returns the bytes of the objects for each byte in them that the volume needs; `None` if it needs none.
    pub fn space_amplification(&self) -> Option<f64> {
        ratio(self.object_bytes, self.live_bytes)
    }
}

fn ratio(all: u64, part: u64) -> Option<f64> {
    (part > 0).then(|| all as f64 / part as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_needs_a_divisor() {
        let new = SpaceUse { put_bytes: 100, ..SpaceUse::default() };
        assert!(new.is_counted() && !SpaceUse::default().is_counted());
        assert_eq!((new.write_amplification(), new.space_amplification()), (None, None));
        let used = SpaceUse {
            put_bytes: 150,
            written_bytes: 100,
            object_bytes: 90,
            live_bytes: 60,
            ..SpaceUse::default()
        };
        assert_eq!(used.write_amplification(), Some(1.5));
        assert_eq!(used.space_amplification(), Some(1.5));
        let other = SpaceUse { put_bytes: 300, live_bytes: 30, ..used };
        assert_eq!(other.write_amplification(), Some(3.0));
        assert_eq!(other.space_amplification(), Some(3.0));
    }
}
