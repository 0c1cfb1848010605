//! Returns unused space of a mounted file system to its storage.

use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};
use tokio::time::Instant;

use crate::call::Call;
use crate::path::check_path;
use crate::tools::FSTRIM;

/// Discards the unused blocks of the file system that is mounted at `mountpoint`, and returns how many
/// bytes were discarded. File systems may count blocks again that they have discarded before. A discard
/// that is interrupted can be repeated.
///
/// # Errors
/// Returns `Unsupported` if the device does not support discards, or fstrim is not installed; `TimedOut`;
/// otherwise `Internal` with the output of fstrim.
pub async fn trim(mountpoint: &Path, deadline: Instant) -> Result<u64> {
    check_path("the mount point", mountpoint)?;
    let ended =
        Call::new(FSTRIM, mountpoint).arg("--verbose").arg(mountpoint).run(deadline).await?;
    if ended.reports("discard operation is not supported") {
        let name = mountpoint.display();
        return Err(ended.failure(ErrorKind::Unsupported).with_repair(format!(
            "lsblk --discard $(findmnt -n -o SOURCE {name}) shows what the device supports"
        )));
    }
    let ended = ended.success()?;
    parse(&ended.stdout).ok_or_else(|| {
        let message = format!("cannot parse the output of fstrim: {:?}", ended.stdout);
        Error::new(ErrorKind::Internal, message)
    })
}

/// Parses a line such as `/mnt: 1.2 GiB (1288490188 bytes) trimmed`. The path may contain anything.
fn parse(text: &str) -> Option<u64> {
    let rest = text.trim_end().strip_suffix(" bytes) trimmed")?;
    rest.rsplit_once('(')?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_number_of_bytes_is_parsed(path in "/[ -~]{0,20}", bytes: u64) {
            let text = format!("{path}: 1.2 GiB ({bytes} bytes) trimmed\n");
            prop_assert_eq!(parse(&text), Some(bytes));
        }

        #[test]
        fn no_output_makes_the_parser_panic(text in "\\PC{0,40}") {
            parse(&text);
        }
    }
}
