//! A volume that is opened for a single change of a command.

use std::cell::Cell;
use std::time::Duration;

use cleat_backend::claimant::Claimant;
use cleat_core::clock::SystemClock;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::volume::{Config, Failure, Place, Volume};

use crate::claim::Attempt;
use crate::claim::decision::Purpose;
use crate::claim::record::Use;
use crate::errors::{failed, no_answer};
use crate::executor::{Executor, block_until};
use crate::timeouts::{CALL_TIMEOUT, DROP_TIMEOUT, after};

/// Claims the volume `shown`, opens it, runs `change` and releases the claim.
///
/// # Errors
/// Returns `InUse` if another client has a claim, and otherwise the failure of the volume.
pub(crate) fn change<T, F>(
    place: &Place,
    shown: &str,
    claimant: &Claimant,
    change: impl FnOnce(Volume) -> F,
) -> Result<T>
where
    F: Future<Output = std::result::Result<T, Failure>>,
{
    change_within(CALL_TIMEOUT, (place, shown, claimant), change)
}

/// As [`change`], with another timeout.
pub(crate) fn change_within<T, F>(
    timeout: Duration,
    (place, shown, claimant): (&Place, &str, &Claimant),
    change: impl FnOnce(Volume) -> F,
) -> Result<T>
where
    F: Future<Output = std::result::Result<T, Failure>>,
{
    place.check_key().map_err(|failure| failed(shown, failure))?;
    let (purpose, usage, clock) = (Purpose::Change, Use::Serve, &SystemClock);
    let attempt = Attempt { place, name: shown, claimant, purpose, usage, only: None, clock };
    let executor = Executor::start("object-change")
        .map_err(|error| Error::from_io("cannot start a thread", error))?;
    let claimed = Cell::new(None);
    let changed = block_until(after(timeout), async {
        let lost = |lost| Error::new(ErrorKind::Aborted, format!("cannot claim {shown}: {lost}"));
        let epoch = attempt.acquire().await?.map_err(lost)?;
        claimed.set(Some(epoch));
        let opened = place.open(epoch, Config::default()).await;
        let changed = match opened {
            Ok(volume) => {
                let running = volume.clone();
                executor.spawner().spawn(async move { drop(running.run().await) });
                let changed = change(volume.clone()).await;
                // Nothing may be in progress when the claim is released.
                match volume.pause().await {
                    Ok(()) => changed,
                    Err(failure) => Err(failure),
                }
            }
            Err(failure) => Err(failure),
        };
        let released = place.release(epoch).await;
        changed.and_then(|changed| released.map(|()| changed)).map_err(|f| failed(shown, f))
    });
    changed.unwrap_or_else(|| {
        // Nothing is written after that, and whoever opens the volume next ends the log of this epoch.
        drop(executor);
        if let Some(epoch) = claimed.get() {
            // If that fails, too, the claim stays, and says whose it is.
            let _ = block_until(after(DROP_TIMEOUT), place.release(epoch));
        }
        Err(no_answer(shown))
    })
}
