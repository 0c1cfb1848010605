//! A look at the machine that callers share. Looking costs as much for one device as for all, and a
//! hundred unmaps at once would look two hundred times.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::error::Result;

/// The last look, and when it began.
#[derive(Debug)]
pub(super) struct SharedLook<T>(Mutex<Option<(Instant, Arc<T>)>>);

impl<T> Default for SharedLook<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T> SharedLook<T> {
    /// What `look` sees, or what another caller saw who began to look after this one asked: never
    /// anything older than the question.
    pub(super) fn get(&self, look: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let asked = Instant::now();
        // Whoever panicked with it: what is there is whole.
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((began, seen)) = &*last
            && *began >= asked
        {
            return Ok(Arc::clone(seen));
        }
        let began = Instant::now();
        let seen = Arc::new(look()?);
        *last = Some((began, Arc::clone(&seen)));
        Ok(seen)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn nobody_gets_what_was_seen_before_he_asked() {
        let shared = SharedLook::default();
        for expected in 0..3 {
            assert_eq!(*shared.get(|| Ok(expected)).unwrap(), expected);
        }
        assert!(shared.get(|| Err(crate::kernel::module_missing())).is_err());
    }

    #[test]
    fn those_who_wait_together_look_once() {
        const CALLERS: u32 = 32;
        let shared = SharedLook::default();
        let looks = AtomicU32::new(0);
        let look = || {
            looks.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(200));
            Ok(())
        };
        std::thread::scope(|scope| {
            for _ in 0..CALLERS {
                scope.spawn(|| shared.get(look).unwrap());
            }
        });
        // The first, one for those who came during it, and a few for stragglers.
        assert!(looks.into_inner() < CALLERS / 4);
    }
}
