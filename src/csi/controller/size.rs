//! The sizes of volumes: the range in a request, and the size in it that a volume gets.

use cleat_backend::uri::{MAX_SIZE, Size};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::csi::v1 as csi;

use super::refused::Refused;

/// The size of a volume whose request has none, in bytes.
const DEFAULT: u64 = 1 << 30;

/// The units to which sizes are rounded up, the preferred one first. The last one is the sector of a device.
const UNITS: [u64; 3] = [1 << 20, 4096, 512];

/// The range of sizes in a request, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    required: u64,
    /// `u64::MAX` without a limit.
    limit: u64,
}

impl Range {
    /// Checks the range of a request. No range permits every size.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if it is negative or empty.
    pub(crate) fn parse(range: Option<csi::CapacityRange>) -> Result<Self> {
        let range = range.unwrap_or_default();
        let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidArgument, message));
        let (Ok(required), Ok(limit)) =
            (u64::try_from(range.required_bytes), u64::try_from(range.limit_bytes))
        else {
            return invalid("the capacity range is negative");
        };
        let limit = if limit == 0 { u64::MAX } else { limit };
        if limit < required {
            return invalid("the upper bound of the capacity range is below its lower bound");
        }
        Ok(Self { required, limit })
    }

    /// Returns whether a volume of this size is what the request wants.
    pub(crate) fn contains(&self, size: u64) -> bool {
        (self.required..=self.limit).contains(&size)
    }

    /// Returns the size of a new volume, which is at least `least` bytes: the size of its source, or 0.
    ///
    /// # Errors
    /// Returns OUT_OF_RANGE if no size that a volume can have is in the range.
    pub(crate) fn size(&self, least: u64) -> Result<u64, Refused> {
        let wanted = match self.required.max(least) {
            0 => DEFAULT.min(self.limit - self.limit % 512),
            wanted => wanted,
        };
        let rounded = |unit| wanted.checked_next_multiple_of(unit);
        let fits = |size: &u64| *size > 0 && *size <= self.limit.min(MAX_SIZE);
        // The source determines the size as it is, rounded or not.
        let sizes = UNITS.into_iter().filter_map(rounded).chain((least > 0).then_some(least));
        sizes.filter(|size| *size >= self.required).find(fits).ok_or_else(|| {
            let limit = Size(self.limit.min(MAX_SIZE));
            let message = if least > self.limit {
                format!("the source has {}, which is more than the limit of {limit}", Size(least))
            } else {
                let required = Size(self.required);
                format!("no volume can have a size between {required} and {limit} bytes")
            };
            Refused::out_of_range(
                Error::new(ErrorKind::InvalidArgument, message)
                    .with_repair("use a size that is a multiple of 512 bytes and below 4E"),
            )
        })
    }
}

/// Shows the bounds of the range.
impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.limit {
            u64::MAX => write!(f, "at least {}", Size(self.required)),
            limit => write!(f, "{} to {}", Size(self.required), Size(limit)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(required_bytes: i64, limit_bytes: i64) -> Range {
        Range::parse(Some(csi::CapacityRange { required_bytes, limit_bytes })).unwrap()
    }

    #[test]
    fn sizes_are_rounded_up_as_far_as_the_limit_permits() {
        assert_eq!(Range::parse(None).unwrap().size(0).unwrap(), DEFAULT);
        assert_eq!(range(1, 0).size(0).unwrap(), 1 << 20);
        assert_eq!(range(1_000_000_000, 0).size(0).unwrap(), 954 << 20);
        assert_eq!(range(1_000_000_000, 1_000_000_000).size(0).unwrap(), 1_000_000_000);
        assert_eq!(range(5000, 8192).size(0).unwrap(), 8192);
        assert_eq!(range(0, 1 << 20).size(0).unwrap(), 1 << 20);
        assert_eq!(range(0, 1_000_000).size(0).unwrap(), 999_936);
        // A volume is at least as large as its source.
        assert_eq!(range(1 << 20, 0).size(3 << 20).unwrap(), 3 << 20);
        assert_eq!(range(0, 5000).size(5000).unwrap(), 5000);
    }

    #[test]
    fn impossible_sizes_are_out_of_range() {
        for (range, least) in
            [(range(513, 1000), 0), (range(0, 100), 4096), (range(i64::MAX, 0), 0)]
        {
            let refused = range.size(least).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::OutOfRange, "{range:?}");
        }
        for (required_bytes, limit_bytes) in [(-1, 0), (0, -1), (5, 4)] {
            let range = Some(csi::CapacityRange { required_bytes, limit_bytes });
            assert_eq!(Range::parse(range).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        assert!(
            range(5, 10).contains(10) && !range(5, 10).contains(11) && range(5, 0).contains(99)
        );
    }
}
