//! A walk over the volumes of a place.

use std::ops::ControlFlow;

use cleat_backend::store::{Info, Page};
use cleat_core::error::ErrorKind;

use super::places::{OpenPlace, Place};
use super::refused::Answer;

/// The number of volumes that are listed at a time.
const PAGE: usize = 256;

/// Visits the volumes of a place in order, from the one after `after` on, until `visit` returns `Break`. A volume
/// that cannot be described is left out, with a warning.
pub(crate) fn visit_place(
    place: &Place,
    open: &OpenPlace,
    mut after: Option<String>,
    visit: &mut dyn FnMut(&Place, &Info) -> Answer<ControlFlow<()>>,
) -> Answer<ControlFlow<()>> {
    loop {
        let listing = open.store().list(&Page { after, limit: PAGE, details: false })?;
        for entry in listing.volumes {
            let info = match open.find(&entry.name) {
                Ok(Some(info)) => info,
                // The volume was removed since the list was read, or it exists in part.
                Ok(None) => continue,
                Err(error) if affects_all(error.kind()) => return Err(error.into()),
                Err(error) => {
                    tracing::warn!(volume = entry.uri, "not listed: {}", error.report());
                    continue;
                }
            };
            if visit(place, &info)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        match listing.next {
            Some(next) => after = Some(next),
            None => return Ok(ControlFlow::Continue(())),
        }
    }
}

/// Returns whether an error affects all volumes of a place, each of which would wait for the same timeout.
pub(crate) fn affects_all(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::TimedOut | ErrorKind::Unavailable | ErrorKind::Fenced)
}
