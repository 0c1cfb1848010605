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
