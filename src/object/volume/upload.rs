//! The puts of log objects, several at a time; acknowledgements stay in the order of the slots.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use super::access::{Failure, Put, slot};
use super::shared::{Shared, State};
use super::tail::{Closed, Sending};
use crate::codec::{LogObject, Record};
use crate::encryption::DataKey;
use crate::packing::Compressor;

/// The data that is packed at once, in bytes. Other work goes on in between.
const STEP_BYTES: usize = 256 << 10;

/// A slot that is to be sent. No other upload sends it.
struct Chosen {
    number: u64,
    confirmed: u64,
    records: Arc<[Record]>,
    data: Arc<Vec<u8>>,
}

impl Shared {
    /// Sends one slot after the other. Several of these run side by side.
    pub(super) async fn upload(&self) -> Failure {
        loop {
            if let Err(failure) = self.upload_next().await {
                self.fail(&failure);
                return failure;
            }
        }
    }

    async fn upload_next(&self) -> Result<(), Failure> {
        let chosen = self.wait(|state| self.start(state)).await?;
        let number = chosen.number;
        let bytes = self.build(chosen).await;
        let put = self.access.put(slot(self.epoch, number), &bytes, u32::MAX).await?;
        if put == Put::Foreign {
            return Err(Failure::Fenced);
        }
        let mut state = self.lock();
        if let Some(sent) = state.tail.slot(number) {
            sent.sending = Sending::Durable;
        }
        state.tail.confirm();
        state.release_kept()?;
        state.changed();
        Ok(())
    }

    /// Chooses a slot to send. Closes the open batch if it is full, or if a flush waits for it and no other flush has a
    /// put in flight: flushes that arrive meanwhile share the next put.
    fn start(&self, state: &mut State) -> Option<Chosen> {
        let tail = &mut state.tail;
        let is_waiting = |slot: &Closed| slot.sending == Sending::Waiting;
        let mut at = tail.slots.iter().position(is_waiting);
        if at.is_none() && tail.open_records() > 0 {
            let in_flight = |slot: &Closed| slot.for_flush && slot.sending == Sending::Sent;
            let is_full = tail.open_bytes() >= self.config.object_bytes;
            if is_full || tail.flush_wanted && !tail.slots.iter().any(in_flight) {
                at = Some(tail.slots.len());
                tail.close();
            }
        }
        let at = at?;
        let (number, confirmed) = (tail.first + at as u64, tail.confirmed);
        let slot = &mut tail.slots[at];
        slot.sending = Sending::Sent;
        let (records, data) = (Arc::clone(&slot.records), Arc::clone(&slot.data));
        Some(Chosen { number, confirmed, records, data })
    }

    /// Returns the bytes of the object of a slot. The slot gets the records as they are stored.
    async fn build(&self, chosen: Chosen) -> Vec<u8> {
        let Chosen { number, confirmed, records, data } = chosen;
        let identity = self.access.identity(self.epoch, number);
        let (nonce, records) = (self.access.nonce, records.to_vec());
        let mut object = LogObject { identity, nonce, confirmed, records };
        let packed = match self.access.packing.is_plain() {
            true => None,
            false => Some(self.pack(&mut object, &data).await),
        };
        let mut bytes = object.encode();
        if let Some(slot) = self.lock().tail.slot(number) {
            slot.header_bytes = short(bytes.len());
            if packed.is_some() {
                slot.records = object.records.into();
            }
        }
        bytes.extend_from_slice(packed.as_ref().unwrap_or(&data));
        bytes
    }

    /// Compresses and encrypts the data of an object. Returns the stored bytes of all extents; the records get what is
    /// different. Encryption depends on the length of the header, and that on what compression has saved.
    async fn pack(&self, object: &mut LogObject, data: &[u8]) -> Vec<u8> {
        let packing = &self.access.packing;
        let (mut compressor, mut stored) = (Compressor::new(packing), Vec::new());
        let (mut at, mut turn) = (0, Turn::default());
        for extent in object.records.iter_mut().filter_map(Record::extent_mut) {
            let plain = &data[at..][..extent.length as usize];
            compressor.append(extent, plain, &mut stored);
            at += plain.len();
            turn.after(plain.len()).await;
        }
        let key = self.access.writer_key(self.epoch);
        let key: Option<&DataKey> = key.as_deref();
        let (mut at, mut begin) = (short(object.encode().len()), 0);
        for extent in object.records.iter_mut().filter_map(Record::extent_mut) {
            let bytes = &mut stored[begin..][..packing.stored_length(extent) as usize];
            begin += bytes.len();
            let place = (self.position(object.identity.number), at);
            packing.finish(key, place, extent, bytes);
            at = at.saturating_add(extent.length);
            turn.after(extent.length as usize).await;
        }
        stored
    }
}

/// Counts work, and lets other work of the volume have its turn from time to time.
#[derive(Default)]
struct Turn {
    bytes: usize,
}

impl Turn {
    async fn after(&mut self, bytes: usize) {
        self.bytes += bytes;
        if self.bytes >= STEP_BYTES {
            self.bytes = 0;
            let_others_run().await;
        }
    }
}

/// A position in an object.
fn short(position: usize) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}

/// Returns when the other work of the volume had its turn.
async fn let_others_run() {
    let mut is_second = false;
    poll_fn(|context| {
        if std::mem::replace(&mut is_second, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
