//! Futures that run side by side within one task. The crate has no runtime, so it cannot start tasks.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

/// A future of a part of the volume.
pub(crate) type Part<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Runs all parts until one of them ends, and returns its result.
pub(crate) async fn race<T>(mut parts: Vec<Part<'_, T>>) -> T {
    poll_fn(|context| {
        let ready = parts.iter_mut().find_map(|part| match part.as_mut().poll(context) {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        });
        ready.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

/// Parts that run ahead of the use of their results, which are taken in the order of the parts.
pub(crate) struct Ahead<'a, T>(VecDeque<Step<'a, T>>);

enum Step<'a, T> {
    Running(Part<'a, T>),
    Ended(T),
}

impl<T> Default for Ahead<'_, T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<'a, T: Send> Ahead<'a, T> {
    /// The parts whose results were not taken.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Adds a part. It starts with the next call of [`Ahead::next`].
    pub(crate) fn push(&mut self, part: Part<'a, T>) {
        self.0.push_back(Step::Running(part));
    }

    /// Runs all parts until the first one has ended, and returns its result; `None` if there is no part.
    pub(crate) async fn next(&mut self) -> Option<T> {
        poll_fn(|context| {
            for step in &mut self.0 {
                if let Step::Running(part) = step
                    && let Poll::Ready(result) = part.as_mut().poll(context)
                {
                    *step = Step::Ended(result);
                }
            }
            match self.0.pop_front() {
                Some(Step::Ended(result)) => Poll::Ready(Some(result)),
                Some(running) => {
                    self.0.push_front(running);
                    Poll::Pending
                }
                None => Poll::Ready(None),
            }
        })
        .await
    }
}

/// Runs the parts, at most `limit` of them at the same time, until all have succeeded.
///
/// # Errors
/// Returns the first error. The other parts are dropped then.
pub(crate) async fn all<T, E>(
    parts: impl IntoIterator<Item = Part<'_, Result<T, E>>>,
    limit: usize,
) -> Result<Vec<T>, E> {
    let mut waiting: VecDeque<_> = parts.into_iter().collect::<Vec<_>>().into();
    let mut results: Vec<Option<T>> = waiting.iter().map(|_| None).collect();
    let (mut running, mut started) = (Vec::new(), 0);
    poll_fn(|context| {
        loop {
            while running.len() < limit {
                let Some(part) = waiting.pop_front() else { break };
                running.push((started, part));
                started += 1;
            }
            let mut ended = None;
            for (at, (number, part)) in running.iter_mut().enumerate() {
                if let Poll::Ready(result) = part.as_mut().poll(context) {
                    ended = Some((at, *number, result));
                    break;
                }
            }
            match ended {
                Some((_, _, Err(error))) => return Poll::Ready(Err(error)),
                Some((at, number, Ok(result))) => {
                    drop(running.swap_remove(at));
                    results[number] = Some(result);
                }
                None if running.is_empty() => return Poll::Ready(Ok(())),
                None => return Poll::Pending,
            }
        }
    })
    .await?;
    Ok(results.into_iter().flatten().collect())
}
