//! The data half: each request is a future. A short one begins on the thread of its connection, because most need nothing
//! but memory and the cache, and two changes of the thread would take several times as long. What waits continues on the
//! thread of the volume.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use cleat_backend::{Completer, ImageQueue, Outcome, RequestId, Started};
use cleat_core::request::{IoError, Op, Request};
use cleat_object::volume::{Failure, Found, Volume};
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};

use crate::errors::io_error;
use crate::image::shared::Shared;
use crate::watched::Watched;

/// The zeroes of one write, where a range of zeroes must stay allocated.
const ZEROES: &[u8] = &[0; 256 << 10];

/// The maximum length of a request that begins on the thread of its connection, in bytes.
const MAX_SHORT: u64 = 256 << 10;

pub(crate) struct ObjectQueue {
    pub(crate) shared: Arc<Shared>,
    pub(crate) store: Arc<Watched>,
    pub(crate) completer: Completer,
    /// The short reads of this batch.
    pub(crate) reads: Vec<Read>,
}

/// A read that begins at the end of its batch.
pub(crate) struct Read {
    id: RequestId,
    request: Request,
    buffer: Buffer,
    volume: Volume,
    /// Where its data is, if it needs nothing but the cache.
    found: Option<Found>,
}

impl ImageQueue for ObjectQueue {
    fn start(
        &mut self,
        id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        _ring: &mut Ring,
    ) -> Started {
        let ended = |result, buffer| Started::Done(Outcome { result, buffer });
        if request.op == Op::Cache {
            return ended(Ok(()), buffer);
        }
        if is_slow_zero(&request) {
            return ended(Err(IoError::Unsupported), buffer);
        }
        if self.shared.is_fenced() {
            return ended(Err(IoError::Fenced), buffer);
        }
        let Some(volume) = self.shared.volume() else {
            return ended(Err(IoError::Shutdown), buffer);
        };
        match buffer {
            Some(buffer) if request.op == Op::Read && is_short(&request) => {
                self.reads.push(Read { id, request, buffer, volume, found: None });
                Started::Pending
            }
            buffer => self.begin(id, request, buffer, volume),
        }
    }

    /// Begins all reads of the batch, step by step: what they need from the memory is loaded at the same time.
    fn end_batch(&mut self, _: &mut Ring, done: &mut Vec<(RequestId, Outcome)>) {
        let mut reads = std::mem::take(&mut self.reads);
        if let [first, _, ..] = reads.as_slice() {
            first.volume.load_entries(reads.iter().map(|read| read.request.offset));
        }
        for Read { request, buffer, volume, found, .. } in &mut reads {
            *found = volume.look_up_at_once(request.offset, buffer.payload_mut());
        }
        for Read { volume, found, .. } in &reads {
            found.iter().for_each(|found| volume.prepare(found));
        }
        for Read { id, request, mut buffer, volume, found } in reads.drain(..) {
            let is_copied =
                found.is_some_and(|found| volume.copy_at_once(&found, buffer.payload_mut()));
            let started = match is_copied {
                true => Started::Done(Outcome { result: Ok(()), buffer: Some(buffer) }),
                false => self.begin(id, request, Some(buffer), volume),
            };
            if let Started::Done(outcome) = started {
                done.push((id, outcome));
            }
        }
        self.reads = reads;
    }

    fn on_ring(&mut self, _: Completion, _: &mut Ring) -> Option<(RequestId, Outcome)> {
        // This queue submits nothing to the ring.
        None
    }
}

impl ObjectQueue {
    /// Begins a request that may wait.
    fn begin(
        &self,
        id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        volume: Volume,
    ) -> Started {
        let changes = request.op.modifies() || request.op == Op::Flush;
        let bytes = if request.op == Op::Write { request.length } else { 0 };
        let early = is_plain(&request) && self.shared.can_keep(&volume, bytes);
        let waits_for_puts = changes && !early;
        // The puts of earlier requests are being repeated. Another copy of this one would only fill the tail.
        if waits_for_puts && self.store.is_in_outage() && volume.has_puts() {
            return Started::Done(Outcome { result: Err(IoError::Retry), buffer });
        }
        let (shared, store) = (Arc::clone(&self.shared), Arc::clone(&self.store));
        let mut work = Box::pin(async move {
            let mut buffer = buffer;
            let operation = carry_out(&shared, &volume, &request, buffer.as_mut());
            let ended = match changes {
                true => store.unless_outage(operation).await,
                false => Some(operation.await),
            };
            let result = match ended {
                Some(result) => result.map_err(|failure| {
                    shared.note(&failure, Some(&request));
                    io_error(&failure, changes)
                }),
                // Its records stay in the log. They precede those of its repetition and of all later requests, so they
                // never overwrite newer data.
                None => Err(IoError::Retry),
            };
            Outcome { result, buffer }
        });
        if is_short(&request)
            && let Poll::Ready(outcome) =
                work.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        {
            return Started::Done(outcome);
        }
        let completer = self.completer.clone();
        self.shared.spawner.spawn(async move { completer.complete(id, work.await) });
        Started::Pending
    }
}

/// Carries a request out. When it returns, what a plain write has changed survives the process, and what any other
/// request has changed is durable.
async fn carry_out(
    shared: &Shared,
    volume: &Volume,
    request: &Request,
    buffer: Option<&mut Buffer>,
) -> Result<(), Failure> {
    let Request { op, flags, offset, length } = *request;
    match (op, buffer) {
        (Op::Read, Some(buffer)) => {
            let Err(failure) = volume.read(offset, buffer.payload_mut()).await else {
                return Ok(());
            };
            let present = shared.look_again(failure).await?;
            return present.read(offset, buffer.payload_mut()).await;
        }
        (Op::Write, Some(buffer)) => volume.write(offset, buffer.payload()).await?,
        (Op::Read | Op::Write, None) => {
            return Err(Failure::Invalid("the request has no buffer"));
        }
        (Op::Trim, _) => volume.trim(offset, length).await?,
        (Op::WriteZeroes, _) if flags.no_hole => write_zeroes(volume, offset, length).await?,
        (Op::WriteZeroes, _) => volume.write_zeroes(offset, length).await?,
        (Op::Flush | Op::Cache, _) => {}
    }
    match op.modifies() {
        true if is_plain(request) && shared.is_kept(volume) => Ok(()),
        true => shared.put(volume).await,
        false => volume.flush().await,
    }
}

/// Whether a request may begin on the thread of its connection, whose other requests wait meanwhile.
fn is_short(request: &Request) -> bool {
    matches!(request.op, Op::Read | Op::Write) && request.length <= MAX_SHORT
}

/// Whether the request need not be durable when it ends.
fn is_plain(request: &Request) -> bool {
    request.op.modifies() && !request.flags.fua
}

/// Writes zeroes as data.
async fn write_zeroes(volume: &Volume, offset: u64, length: u64) -> Result<(), Failure> {
    let end = offset + length;
    let mut at = offset;
    while at < end {
        let piece = ZEROES.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
        volume.write(at, &ZEROES[..piece]).await?;
        at += piece as u64;
    }
    Ok(())
}

/// Whether a request asks for zeroes that stay allocated, and for an error where that takes long.
fn is_slow_zero(request: &Request) -> bool {
    request.op == Op::WriteZeroes && request.flags.fast_zero && request.flags.no_hole
}
