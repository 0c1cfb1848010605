//! The work that the backend does without a request: it stops before the claim of the volume is released, and
//! while all I/O fails.

use std::time::{Duration, Instant};

use super::Session;
use cleat_backend::Image;
use cleat_core::error::{Error, ErrorKind, Result};

/// How long a handover waits for the background work. A task that takes longer waits for a backend that does
/// not answer, so that a release of the claim would fail, too.
const HANDOVER_TIMEOUT: Duration = Duration::from_millis(500);

impl Session {
    /// Stops the background work for a handover.
    ///
    /// # Errors
    /// `Unavailable` if a task may still change the volume at the backend; the work then continues.
    pub(super) fn stop_background_for_handover(&self) -> Result<()> {
        match stop(&*self.image, self.clock.now() + HANDOVER_TIMEOUT) {
            0 => Ok(()),
            tasks => {
                restart(&*self.image);
                let message = format!("{tasks} background tasks of the backend do not stop");
                Err(Error::new(ErrorKind::Unavailable, message)
                    .with_repair("hand the volume over when its backend answers again"))
            }
        }
    }

    /// Stops the background work. Returns the number of tasks that may still change the volume at the backend
    /// at `deadline`.
    pub(super) fn stop_background(&self, deadline: Instant) -> u32 {
        stop(&*self.image, deadline)
    }

    /// Lets the background work continue.
    pub(super) fn restart_background(&self) {
        restart(&*self.image);
    }
}

fn stop(image: &dyn Image, deadline: Instant) -> u32 {
    let running = image.background().map(|work| work.stop(deadline)).unwrap_or_default();
    for task in &running {
        let (task, may_write) = (task.name, task.may_write);
        tracing::warn!(task, may_write, "a background task of the backend has not stopped in time");
    }
    let writers = running.iter().filter(|task| task.may_write).count();
    u32::try_from(writers).unwrap_or(u32::MAX)
}

fn restart(image: &dyn Image) {
    if let Some(work) = image.background() {
        work.restart();
    }
}

#[cfg(test)]
mod tests {
    use cleat_backend::RunningTask;
    use cleat_core::clock::{Clock, ManualClock};

    use super::*;
    use crate::fake_image::FakeImage;

    #[test]
    fn only_tasks_that_may_write_count_and_the_work_can_continue() {
        let now = ManualClock::new().now();
        assert_eq!(stop(&FakeImage::default(), now), 0, "there is no background work");
        let task = |name, may_write| RunningTask { name, may_write };
        let image = FakeImage::with_background(vec![task("reader", false), task("writer", true)]);
        assert_eq!(stop(&image, now), 1);
        assert!(image.background_is_stopped());
        restart(&image);
        assert!(!image.background_is_stopped());
    }
}
